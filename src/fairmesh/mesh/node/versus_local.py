"""Whether the common model is better for a site than the one that it could train alone.

Each site trains its own model, compares both on its own test rows, and announces four counts, signed: how many rows
both models, only the common one, only its own one, or neither answers right. A count below five is not told. Where
another metric than accuracy decides, such as an AUROC or the RMSE of numbers, and of rows that belong to units such as
patients, about which counts say nothing, it announces the verdict only; the difference and its interval stay in the
site's folder. So every site can show the verdicts of all sites. Each verdict is that of one among n sites (Bonferroni).
It depends on the site's own numbers only, so that nobody's false numbers move the verdict on another.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fairmesh.comparisons.alone import (
    FOLDS,
    LOOKS,
    AloneRun,
    early_stopped_models,
    judged_apart,
    regularised,
    takes_folds,
    whole_model,
    with_enough_rows,
)
from fairmesh.data.site import Site
from fairmesh.errors import BadInput, Diverged, in_a_line, listed
from fairmesh.evidence import LEVEL, Difference, Number, Share, Worst, versus, versus_counts
from fairmesh.evidence.answering import judged
from fairmesh.evidence.intervals import Estimate
from fairmesh.evidence.means import mean_of
from fairmesh.evidence.verdicts import evidence_row, verdict_in_words
from fairmesh.mesh.announcements import CELLS, FEW, FEWEST, KINDS, ROWS_AT_LEAST, least_rows, most_rows
from fairmesh.mesh.node.life import COMPARING
from fairmesh.mesh.node.membership import Membership
from fairmesh.mesh.node.result import metrics_by_site
from fairmesh.mesh.node.rounds import Rounds, alone_identity, alone_run
from fairmesh.mesh.node.store import new_folder
from fairmesh.mesh.node.watching import Aside
from fairmesh.mesh.wire.journal import storing
from fairmesh.metrics.units import Unit
from fairmesh.personalization.cross_fit import LARGE, CrossFit
from fairmesh.problems.objective import Objective
from fairmesh.problems.prepared import Prepared
from fairmesh.storage.files import read_bytes, read_record, write_atomically, write_record
from fairmesh.storage.run_folder import SUMMARY
from fairmesh.storage.strict_json import as_json
from fairmesh.training.loop import Training

KIND = "versus_local"  # of announcement
_ACCURACY = "accuracy"
_APART = 0.01  # of the rows, by which counts and an accuracy that were computed differently may differ; and one row
_FAILED = "failed; the reason is in the site's log"
_CONTRADICTS = "its counts contradict its accuracy"
_UNASKED = "it has told counts of right answers, but the metric that decides is another one"
_SILENT = (
    f"These sites have told no counts of test rows, as with fewer than {ROWS_AT_LEAST} of them, and cannot be the "
    "worst site: {}. The mean over sites includes them; its interval takes each for a site with one row."
)
_BY_UNIT = (
    "These sites have told their verdict by units without counts of rows, so that others know no interval: {}. The "
    "interval of the mean over sites takes each for a site with one unit."
)


def compared(rounds: Rounds, common: Path, folder: Path) -> dict[str, Any]:
    """Trains this site's own model, and compares the model in the file `common` with it. What is in `folder` already is
    not computed again, since it may have been announced.

    Returns:
        What this site announces.
    """
    membership, generation = rounds.membership, rounds.membership.mesh.generation
    file = folder / f"compared-{generation}.json"
    try:
        kept = read_record(file, "the models are compared again")
    except BadInput as error:
        rounds.node.log("warning", "a kept comparison cannot be used", reason=str(error))
        kept = {}
    if kept:
        return {key: kept[key] for key in KINDS[KIND].fields}
    (mine,) = [site for site in rounds.problem.sites if site.train.here]
    why_not = _not_compared(membership, rounds.problem, mine)
    cells: dict[str, int | str] = {}
    verdict, at_home = "", {}
    try:
        if not why_not:
            own = _own_model(rounds, mine, folder)
            flat, part = rounds.problem.flat_model, rounds.state.own
            theirs = flat.row_of_state_dict(load_file(common)).to(own)
            theirs = theirs if part is None else flat.at_site(theirs, part.rows[0, 0])
            here = rounds.problem.changed(sites=[mine], prior=None, objective=Objective())
            if here.primary == _ACCURACY and here.classes and mine.test.units is None:
                cells = _counted(here, theirs, own)
            elif math.isnan((found := _judged_here(here, theirs, own, len(membership.names))).interval[0]):
                why_not = f"{here.primary} is not defined on its test rows"
            else:
                verdict, at_home = found.verdict, {"metric": here.primary} | found.table()
    except (BadInput, Diverged, RuntimeError) as error:  # the result is complete without it
        why_not = _FAILED  # the error may name files or values of this site
        rounds.node.log("error", "the comparison with this site's model alone failed", reason=in_a_line(error))
    body = {"generation": generation, "cells": cells, "verdict": verdict, "why_not": why_not}
    if not why_not:
        with storing(folder.parent):
            write_record(file, body | at_home)
    return body


def _not_compared(membership: Membership, problem: Prepared, mine: Site) -> str:
    if not membership.site.compare_with_local:
        return "withheld by the site"
    if problem.privacy is not None:
        return "counts of test rows are told with noise only"
    if problem.trainer is not None:
        return "sites train with code of their own"
    if mine.test is None:
        return "no test rows"
    if mine.test.units is not None and len(mine.test.units.unique()) < 2:
        return "fewer than 2 test units"
    return f"fewer than {ROWS_AT_LEAST} test rows" if len(mine.test) < ROWS_AT_LEAST else ""


def _own_model(rounds: Rounds, mine: Site, folder: Path) -> Tensor:
    """Returns the model of this site alone, as a row. It is kept in the folder."""
    problem, training, membership = rounds.problem, rounds.training, rounds.membership
    file, number = folder / "model.safetensors", problem.sites.index(mine)
    if not is_readable(file):  # not trained yet, or damaged
        objective = Objective(judged_on="held-out" if mine.validation is None else "validation")
        apart, run = problem.changed(objective=objective), alone_run(rounds.node, training.network)
        trained = _regularised if takes_folds(problem, number) and problem.flat_model.dim <= LARGE else _early_stopped
        state = trained(apart, number, run, training, alone_identity(apart, membership))
        about = {"architecture": problem.flat_model.architecture, "which": "local", "site": membership.name}
        with new_folder(folder) as into:
            into.write_model("model", state, about)
        run.phases.forget("compared")
    return problem.flat_model.row_of_state_dict(load_file(file)).to(training.device, training.dtype)


def _regularised(
    problem: Prepared, number: int, run: AloneRun, training: Training, identity: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Returns the model of this site, trained on all rows with the penalties that folds of them support: that of a
    simulation."""
    alone = whole_model(problem)
    sites = [with_enough_rows(alone, i) if i == number else site for i, site in enumerate(alone.sites)]

    def carrier(how: str, *work: Any) -> Any:
        return run.phases.carried_out(COMPARING, "compared", identity, *work)

    device, dtype, trace = training.device, training.dtype, run.options.trace == "auto"
    fit = CrossFit(alone.changed(sites=sites), [number], FOLDS, run.seed, device, dtype, trace, carrier)
    start = alone.initial_row(run.seed).to(device, dtype).unsqueeze(0)
    return alone.flat_model.state_dict(regularised(fit, start, run.rounds).models[0, -1].cpu())


def _early_stopped(
    problem: Prepared, number: int, run: AloneRun, training: Training, identity: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Returns the model of this site that does best on rows that it was not trained on: one training, for large models
    and where folds cannot be trained."""
    apart, looks = judged_apart(problem), _looks(run.rounds)
    models = early_stopped_models(apart, run, looks, COMPARING, "compared", identity).models
    return problem.flat_model.state_dict(models[0, 0])


def is_readable(file: Path) -> bool:
    """Returns whether a file of tensors exists and is whole."""
    try:
        return bool(load_file(file))
    except (SafetensorError, OSError):
        return False


def _looks(rounds: int) -> set[int]:
    """Returns after which rounds the model of a site alone is measured, the last one included. Early ones are closer
    together: few rows are learned by heart within some rounds."""
    return {max(1, round(rounds * (k / LOOKS) ** 2)) for k in range(1, LOOKS + 1)}


def _judged_here(here: Prepared, common: Tensor, own: Tensor, among: int) -> Difference:
    """Returns how two models differ on this site's test rows by the metric that decides, as one among several sites."""
    ours, alone = (judged(here, {0: row[None]}) for row in (common, own))
    (found,) = versus(ours, alone, among=among).at_sites
    return found


def _counted(here: Prepared, common: Tensor, own: Tensor) -> dict[str, int | str]:
    """Returns how many test rows of this site each model answers right, by `CELLS`."""
    (answers,) = judged(here, {0: torch.stack([common, own])}).answers
    if answers.right is None:
        raise TypeError("targets are no classes")
    first, second = answers.right == 1
    counts = [(first & second), (first & ~second), (~first & second), (~first & ~second)]
    found = {name: int(count.sum()) for name, count in zip(CELLS, counts)}
    return {name: count if count >= FEWEST else FEW for name, count in found.items()}


def difference(cells: Mapping[str, int | str], among: int = 1) -> Difference | None:
    """Returns how the common model differs from a site's own, from the counts that the site told; None if it told
    none. For counts that were not told, every possible value is tried: the verdict holds for all of them.

    Args:
        cells: The counts.
        among: How many sites there are. Default: 1.
    """
    if not cells:
        return None
    choices = [(0, FEWEST - 1) if cells[name] == FEW else (int(cells[name]),) for name in CELLS]
    counts = [(sum(every), every[1], every[2]) for every in itertools.product(*choices)]
    possible = [versus_counts(*of_rows, among) for of_rows in counts]
    if len({each.verdict for each in possible}) > 1:
        possible = [replace(versus_counts(*of_rows), verdict="unclear") for of_rows in counts]
    lows, highs = zip(*(each.interval for each in possible))
    values = [each.difference for each in possible]
    return replace(possible[0], difference=(min(values) + max(values)) / 2, interval=(min(lows), max(highs)))


def evidence_of(
    announced: Mapping[str, Mapping[str, Any]],
    names: Sequence[str],
    values: Sequence[float | None],
    metric: str,
    higher_is_better: bool = True,
) -> dict[str, Any]:
    """Returns the intervals and verdicts of all sites, in the form in which a simulation has them in its summary. A
    site that has told no counts may have a single test row: it counts as such in the mean, and cannot be the worst. One
    that has told a verdict instead has units; such sites can be the worst if no site has told counts.

    Args:
        announced: What each site announced.
        names: The sites.
        values: The metric of the common model at each of them; None where it is not known.
        metric: The metric that decides. Only of accuracy do sites tell counts.
        higher_is_better: Whether a larger value of it is better. Default: True.
    """
    every = [
        _AtSite(name, math.nan if v is None else v, metric, **_told(announced[name])) for name, v in zip(names, values)
    ]
    told_counts = [site for site in every if not site.silent and not site.by_unit]
    counted = told_counts or [site for site in every if site.by_unit]
    worst = Worst(tuple(site.estimate for site in counted), higher_is_better)
    mean = mean_of([Share(site.value, 1) if site.silent or site.by_unit else site.estimate for site in every])
    measured = [site for site in every if not math.isnan(site.value)]
    silent, by_unit = ([site.name for site in measured if getattr(site, kind)] for kind in ("silent", "by_unit"))
    notes = ((_SILENT, silent), (_BY_UNIT, by_unit))
    return {
        "level": LEVEL,
        "metric": metric,
        "covers": "units" if by_unit and not told_counts else "samples",
        "notes": [note.format(listed(sites)) for note, sites in notes if sites],
        "worst": {"site": None if worst.which is None else counted[worst.which].name} | evidence_row(worst),
        "mean": evidence_row(mean),
        "sites": [site.row(len(names)) for site in every],
    }


def _told(body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: body[key] for key in ("cells", "verdict", "why_not")}


@dataclass(frozen=True)
class _AtSite:
    """The common model at one site, and what the site told of it next to its own."""

    name: str
    value: float
    metric: str
    cells: Mapping[str, int | str]
    verdict: str
    why_not: str

    @property
    def _counts(self) -> list[int]:
        return [int(count) for count in self.cells.values() if count != FEW]

    @property
    def silent(self) -> bool:
        """Whether it has told neither counts nor a verdict, so that it may have a single test row."""
        return self.metric == _ACCURACY and not self.cells and not self.verdict

    @property
    def by_unit(self) -> bool:
        """Whether it has told a verdict instead of counts, since its rows belong to units."""
        return self.metric == _ACCURACY and not self.cells and bool(self.verdict)

    @property
    def estimate(self) -> Estimate:
        if self.metric == _ACCURACY:
            return Share(self.value, sum(self._counts))
        return Number(self.value, 0, math.nan)

    def row(self, among: int) -> dict[str, Any]:
        """Returns the row of the evidence of a site among several."""
        versus = {"verdict": self.verdict} if self.verdict else {}
        if (found := difference(self.cells, among)) is not None:
            versus = found.table()
        row = {"name": self.name, "n": self.estimate.rows or None, "few_rows": self.silent}
        row |= evidence_row(self.estimate) | {"versus": {"local": versus} if versus else {}}
        if len(self._counts) < len(self.cells):
            row["n_at_least"] = True
        return row | ({"why_not": self.why_not} if self.why_not else {})


def contradiction(cells: Mapping[str, int | str], accuracy: float | None, rows: int) -> str:
    """Returns why the counts of a site cannot be those of its accuracy, or of as many test rows as it has declared; ""
    if they can. Of counts that were not told, every possible value counts."""
    if cells and not least_rows(cells) <= rows <= most_rows(cells):
        told = f"{least_rows(cells)} to {most_rows(cells)}"
        return f"its counts are of {told} test rows, but it has declared {rows}"
    if not cells or accuracy is None:
        return ""
    right = {name: cells[name] for name in ("both", "only_common")}
    wrong = {name: cells[name] for name in ("only_local", "neither")}
    least, most = least_rows(right), least_rows(wrong)
    low = least / max(1, least + most_rows(wrong))
    high = most_rows(right) / max(1, most_rows(right) + most)
    if low - _APART - 1 / rows <= accuracy <= high + _APART + 1 / rows:
        return ""
    return f"its counts say that {low:.3g} to {high:.3g} of the rows are right, but its accuracy is {accuracy:.3g}"


def evidence(
    folder: Path,
    announced: Mapping[str, Mapping[str, Any]],
    rows: Mapping[str, int],
    problem: Prepared,
    same: bool,
    aside: Aside,
) -> dict[str, Any] | None:
    """Returns the evidence that the summary of a result gets; None if no site has told counts or a verdict. Counts that
    contradict what a site has said of its accuracy, if both are of the `same` model, or how many test rows it has
    declared (`rows`), are ignored; so are all if another metric decides."""
    names, metric = list(rows), problem.primary
    values = metrics_by_site(folder).get(metric)
    if values is None or not any(announced[name]["cells"] or announced[name]["verdict"] for name in names):
        return None
    told, values, counting = dict(announced), list(values), metric == _ACCURACY
    for k, name in enumerate(names):
        cells, accuracy = told[name]["cells"], values[k] if same else None
        reason = contradiction(cells, accuracy, rows[name]) if counting else _UNASKED if cells else ""
        if reason:
            aside.ignore(name, "counts", reason)
            told[name] = {**told[name], "cells": {}, "why_not": _CONTRADICTS if counting else _UNASKED}
            values[k] = None if counting else values[k]
    return evidence_of(told, names, values, metric, problem.higher_is_better(metric))


def add_evidence(rounds: Rounds, folder: Path) -> None:
    """Adds the evidence to the summary of a result, if there is any."""
    node = rounds.node
    rows = {name: node.facts[name]["test"] for name in rounds.membership.names}
    same = rounds.state.own is None and "accuracy" not in rounds.problem.metrics  # which may be another one

    def of_all() -> dict[str, Any] | None:
        return evidence(folder, node.bulletin.of_all(KIND), rows, rounds.problem, same, node.aside)

    found = node.aside.tried("the comparison of all sites", of_all, None)
    if found is not None:
        summary = json.loads(read_bytes(folder / SUMMARY))
        write_atomically(folder / SUMMARY, (as_json(summary | {"evidence": found}, indent=2) + "\n").encode())


def sentences(summary: Mapping[str, Any]) -> list[str]:
    """Returns for each site with a verdict one sentence, from the summary of a result."""
    versus = {site["name"]: site["versus"].get("local") for site in (summary.get("evidence") or {}).get("sites", [])}
    accuracy = Unit(_ACCURACY, share=True)
    return [f"{name}: {verdict_in_words(one, accuracy, 'alone')}" for name, one in versus.items() if one]
