"""Compares a run with reference models: each site alone, all data in one place, the average model, the common model
fine-tuned at each site, and a constant answer."""

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairmesh.algorithms.base import Algorithm
from fairmesh.algorithms.fed_avg import FedAvg
from fairmesh.algorithms.local import Local
from fairmesh.algorithms.pooled import Pooled
from fairmesh.algorithms.steps import Moved
from fairmesh.comparisons.alone import FOLDS, regularised, whole_model, with_enough_rows
from fairmesh.comparisons.constants import best_constant, constant_values
from fairmesh.comparisons.phases import Notices, Phases
from fairmesh.config.tables import to_table
from fairmesh.data.units import units_of
from fairmesh.errors import BadInput, FairmeshError, Interrupted, listed, nearest
from fairmesh.evidence import Comparison, versus
from fairmesh.evidence.outcome_files import packed
from fairmesh.losses import ModelLoss
from fairmesh.networks.base import Traffic
from fairmesh.networks.memory import SingleProcess
from fairmesh.personalization.builtin import FineTuned
from fairmesh.personalization.cross_fit import CrossFit, Fitted, can_judge, penalties_for, sites_at_once
from fairmesh.personalization.outcome import PersonalSite
from fairmesh.problems.evaluator import Evaluator
from fairmesh.problems.objective import Objective
from fairmesh.problems.parts import Parts
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.problem import Problem, prepare
from fairmesh.storage.occupied import ALONE
from fairmesh.storage.run_folder import RunFolder, extend_summary
from fairmesh.topology.graphs import Topology
from fairmesh.training.defaults import ROUNDS
from fairmesh.training.finish import write_outcome
from fairmesh.training.loop import TrainingState
from fairmesh.training.meter import with_spread
from fairmesh.training.observers import stop_signals
from fairmesh.training.options import DTYPES, Options, device_of
from fairmesh.training.provenance import provenance_of
from fairmesh.training.replicas import Placements, Replica
from fairmesh.training.result import Result, aligned
from fairmesh.training.run_status import telling_after
from fairmesh.training.summary import summary_of
from fairmesh.training.train import train

TITLES = {
    "local": "each site alone",
    "average": "average model",
    "pooled": "all data in one place",
    "fine-tuned": "fine-tuned at each site",
    "constant": "constant answer",
}
REFERENCES = tuple(TITLES)
FOLDER = "references"  # inside a run's folder
_OWN = ("local", "fine-tuned", "constant")  # references in which every site has a model of its own


@dataclass(frozen=True, eq=False)
class ReferenceComparison:
    """A run next to its reference models.

    Args:
        result: The run.
        references: The reference models by name: "local", "average", "pooled", "fine-tuned", "constant". Where sites
            have models of their own, each site is judged by its own.
        failed: Why a reference is missing, by its name, such as that it diverged. Default: {}.
        seconds: How long each reference took. Default: {}.

    Example:
        >>> import fairmesh as fm
        >>> problem = fm.Experiment(fm.data.Digits(nodes=4, odd=1)).problem()
        >>> compared = fm.compare_with_references(problem, algorithm=fm.TrackedADGDA(), rounds=20)
        >>> list(compared.references)
        ['local', 'average', 'pooled', 'fine-tuned', 'constant']
        >>> len(compared.values("local"))  # one number per site
        4
        >>> sorted(compared.as_json()["local"]["versus"])
        ['level', 'mean', 'metric', 'paired', 'sites', 'worst']
    """

    result: Result
    references: dict[str, Result]
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def values(self, name: str | None = None, metric: str | None = None) -> list[float]:
        """Returns one number per site, the mean over seeds and splits of the replicas that did not diverge.

        Args:
            name: The reference; None for the run itself. Default: None.
            metric: The metric; None for the primary one. Default: None.
        """
        return site_means(self.result if name is None else self.references[name], metric)

    def versus(self, name: str, metric: str | None = None) -> Comparison:
        """Returns how the run differs from a reference at every site, test row by test row.

        Args:
            name: The reference.
            metric: The metric; None for the primary one. Default: None.

        Raises:
            BadInput: The run or the reference has diverged.
        """
        return versus(self.result.outcomes(), self.references[name].outcomes(), metric)

    def evidence(self, metric: str | None = None) -> dict[str, Any]:
        """Returns the intervals of the run, and its differences from all references at every site, as summary.json has
        them.

        Args:
            metric: The metric; None for the primary one. Default: None.
        """
        if not _is_sound(self.result):
            return {}
        against = {name: one for name, one in self.references.items() if self._sound(name)}
        return self.result.evidence(metric, against=against)

    def sentences(self) -> list[str]:
        """Returns what the run brought over each site alone: a sentence per site, and one for all sites. Nothing if
        that is not known."""
        found = self.versus_alone()
        return [*found.sentences("alone"), found.sentence("alone")] if found else []

    def versus_alone(self) -> Comparison | None:
        """Returns how the run differs from what each site trains alone; None if that is not known."""
        return self.versus("local") if self._sound("local") else None

    def constant_sentence(self) -> str:
        """Returns what a constant answer reaches, and at which sites it does as well as the run; nothing if that is not
        known."""
        return constant_sentence(self.result, self.values("constant")) if self._sound("constant") else ""

    def _sound(self, name: str) -> bool:
        """Returns whether some replicas of the run and of a reference did not diverge."""
        return name in self.references and _is_sound(self.result) and _is_sound(self.references[name])

    def as_json(self) -> dict[str, Any]:
        """Returns the references by name, as summary.json has them: the metric of each at every site, averaged over
        seeds and splits, and how the run differs from it."""
        primary = self.result.problem.primary
        found: dict[str, Any] = {}
        for name, one in self.references.items():
            sound = [record[primary] for record in one.final if record["replica"] not in one.diverged]
            found[name] = {
                "title": TITLES[name],
                "metric": primary,
                "diverged": not sound,
                "sites": self.values(name),
                **{what: _mean([record[what] for record in sound]) for what in ("worst", "mean", "best")},
                "seconds": round(self.seconds.get(name, 0.0), 3),
                "folder": f"{FOLDER}/{name}",
            }
            if self._sound(name):
                compared = self.versus(name)
                found[name]["versus"] = compared.table()
                found[name]["better_off"] = compared.count("better") / len(compared.sites)
        return found | {name: {"title": TITLES[name], "failed": reason} for name, reason in self.failed.items()}

    def table(self) -> list[list[str]]:
        """Returns a header and one row per site: its metric by the run, and by every reference."""
        problem = self.result.problem
        unit = problem.unit()
        measured = [bool(getattr(site, self.result.judged_on)) for site in problem.sites]

        def column(name: str | None = None) -> list[str]:
            return [unit.shown(v) if known else "not measured" for v, known in zip(self.values(name), measured)]

        columns = {"this run": column()}
        for name, title in TITLES.items():
            if name in self.references:
                columns[title] = column(name) if _is_sound(self.references[name]) else ["diverged"] * problem.n
            elif name in self.failed:
                columns[title] = ["failed"] * problem.n
        rows = zip((str(site.name) for site in problem.sites), *columns.values())
        return [[f"site ({unit.metric})", *columns], *map(list, rows)]

    def __str__(self) -> str:
        return aligned(self.table())


def _is_sound(result: Result) -> bool:
    """Returns whether some replica did not diverge."""
    return len(result.diverged) < len(result.replicas)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def site_means(result: Result, metric: str | None = None) -> list[float]:
    """Returns one number per site, the mean over seeds and splits of the replicas that did not diverge.

    Args:
        result: The run.
        metric: The metric; None for the primary one. Default: None.
    """
    metric = metric or result.problem.primary
    rows = [record[metric]["sites"] for record in result.final if record["replica"] not in result.diverged]
    return [_mean(column) for column in zip(*rows)] if rows else [math.nan] * result.problem.n


def constant_sentence(result: Result, constants: Sequence[float] = ()) -> str:
    """Returns what a constant answer would reach, which any model should exceed, and at which sites it does as well.

    Args:
        result: The run.
        constants: The primary metric of the constant answer at every site; () to compute it. Default: ().

    Returns:
        The sentence; nothing if sites have no constant answer, or no number to compare it with.
    """
    problem = result.problem.of_split(0)
    if problem.privacy is not None:  # a constant answer is found by training rows
        return ""
    if problem.task not in ("classes", "binary", "numbers") or isinstance(problem.loss, ModelLoss):
        return ""
    unit, higher = problem.unit(), problem.higher_is_better(problem.primary)
    constants = constants or constant_values(problem, result.judged_on)
    known = [
        (site, constant, reached)
        for site, constant, reached in zip(problem.sites, constants, site_means(result))
        if math.isfinite(constant) and math.isfinite(reached)
    ]
    if not known:
        return ""
    values = [constant for _, constant, _ in known]
    counted = [c for site, c, _ in known if units_of(getattr(site, result.judged_on)) >= result.worst_needs_rows]
    worst, mean = (min if higher else max)(counted or values), _mean(values)
    as_good = [str(site.name) for site, c, reached in known if (c >= reached if higher else c <= reached)]
    where = f"; it does as well as the run at {listed(as_good, 5)}" if as_good else ""
    return (
        "a constant answer, the best for each site's training rows, reaches "
        f"{unit.shown(worst)} at the worst site and {unit.shown(mean)} on average{where}"
    )


def compare_with_references(
    problem: Problem | Prepared | Sequence[Problem | Prepared],
    topology: Topology | None = None,
    algorithm: Algorithm | None = None,
    rounds: int = ROUNDS,
    *,
    references: Sequence[str] = REFERENCES,
    seeds: Sequence[int] = (0,),
    placements: Placements = None,
    out: str | os.PathLike | None = None,
    resume: bool = False,
    announce: Callable[[str], None] | None = None,
    **options: Any,
) -> ReferenceComparison:
    """Trains a model, and the models that it should be compared with.

    It answers what every site asks first: is the common model better for us than what we could have without it? The
    references are

    - "local": each site alone. A site divides its rows, also those of its validation set, into five folds, and keeps
      its model as small as held-out rows support.
    - "average": the same algorithm with fixed weights, or FedAvg if the algorithm has no others.
    - "pooled": all data in one place, which sites that keep their data cannot have.
    - "fine-tuned": the common model after validated local steps at each site, as `fm.personalization.FineTuned`.
    - "constant": the best constant answer for each site's training rows; for labels, the most frequent class.

    All seeds and splits of a reference train as one batch.

    Args:
        problem: The problem, or a list of problems that differ only in their split, as in `fm.train`.
        topology: Who talks to whom; None for the graph of `fm.train`. Default: None.
        algorithm: The algorithm; None for that of `fm.train`. Default: None.
        rounds: Rounds to train, >= 1. Default: 600.
        references: Which references. Default: ("local", "average", "pooled", "fine-tuned", "constant").
        seeds: Seeds of the replicas. Default: (0,).
        placements: As in `fm.train`. Default: None.
        out: The folder to write: the run, and its references in `references/NAME`. None to write nothing. Default:
            None.
        resume: Whether to continue what is in `out`; references that are finished there are not repeated. Default:
            False.
        announce: Called with a sentence before each part of the work. Default: None.
        **options: The fields of `fm.Options`.

    Returns:
        The run and its references. A reference that diverges is marked, and the others are kept.

    Raises:
        BadInput: A reference does not exist, or a setting cannot be used.

    Example:
        >>> import fairmesh as fm
        >>> problem = fm.Experiment(fm.data.Digits(nodes=4, odd=1)).problem()
        >>> compared = fm.compare_with_references(problem, rounds=20, references=["local", "constant"])
        >>> max(compared.values("constant")) < 0.5
        True
    """
    for name in references:
        if name not in TITLES:
            raise BadInput(f"there is no reference {name!r}{nearest(name, TITLES)}")
    problem = prepare(problem)
    problem.refuse_trainer("a comparison with reference models")
    problem.refuse_privacy("a comparison with reference models")
    result = train(
        problem, topology, algorithm, rounds, seeds=seeds, placements=placements, out=out, resume=resume,
        announce=announce, **options,
    )  # fmt: skip
    return add_references(result, Options(**options), references, out, resume, announce)


def add_references(
    result: Result,
    options: Options,
    references: Sequence[str] = REFERENCES,
    out: str | os.PathLike | None = None,
    resume: bool = False,
    announce: Callable[[str], None] | None = None,
    handle_signals: bool = False,
) -> ReferenceComparison:
    """Trains the references of a finished run, as `compare_with_references` says, and writes them into its folder."""
    check_one_algorithm([replica.algorithm for replica in result.replicas])
    result.problem.refuse_privacy("a comparison with reference models")
    work = _Work(result, options, None if out is None else Path(out) / FOLDER, resume, handle_signals)
    found: dict[str, Result] = {}
    failed: dict[str, str] = {}
    seconds: dict[str, float] = {}
    if out is not None:
        (Path(out) / FOLDER).mkdir(exist_ok=True)  # which says to a run that is resumed that it has references
    with telling_after(out, result, "training references") as status:
        announce = status.heard(announce)
        for name in [name for name in REFERENCES if name in references]:
            if announce:
                announce(f"reference: {TITLES[name]}")
            status.phase(f"reference: {TITLES[name]}")
            started = time.perf_counter()
            try:
                with stop_signals(handle_signals) as stop:
                    notices = Notices(stop, announce, status.phase)
                    work.phases = Phases(None if out is None else Path(out) / ALONE, notices)
                    found[name] = work.reference(name)
            except Interrupted:
                raise
            except FairmeshError as error:
                failed[name] = str(error)
            seconds[name] = time.perf_counter() - started
        compared = ReferenceComparison(result, found, failed, seconds)
        if out is not None:
            extend_summary(out, {"references": compared.as_json(), "evidence": compared.evidence()})
    return compared


def check_one_algorithm(algorithms: Sequence[Algorithm]) -> None:
    """Refuses a sweep."""
    if any(one != algorithms[0] for one in algorithms):
        raise BadInput(
            f"references are for one algorithm, but the sweep has {len(algorithms)}; choose one of them, and run it "
            "without [sweep]"
        )


class _Constant(nn.Module):
    """A model that gives the same output for every input."""

    def __init__(self, output: Tensor):
        super().__init__()
        self.output = nn.Parameter(output)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output.expand(len(inputs), *self.output.shape[1:])


class _Work:
    """Trains the references of one run."""

    phases = Phases()

    def __init__(
        self,
        result: Result,
        options: Options,
        folder: Path | None,
        resume: bool,
        handle_signals: bool = False,
    ):
        self._result, self._folder, self._resume = result, folder, resume
        self._handle_signals = handle_signals
        self._options = replace(
            options, on_divergence="mark", compare_weights=False, choose_weights=False, own_models=False,
            keep_best=False, lying_neighbours=0, checkpoint_every=None,
        )  # fmt: skip
        self._device, self._dtype = device_of(options.device), DTYPES[options.dtype]
        first: dict[tuple[int, int], int] = {}
        for r, replica in enumerate(result.replicas):
            first.setdefault((replica.split, replica.seed), r)
        self._first = list(first.values())  # the run's replicas with another split or seed
        n = result.problem.n
        self._replicas = [Replica(seed, tuple(range(n)), Local(), split) for split, seed in first]
        self._sites = [(replica, i) for replica in self._replicas for i in range(n)]
        self._problem = result.problem.each(lambda split: split.changed(objective=Objective()))
        self._alone = self._problem.each(whole_model)

    def reference(self, name: str) -> Result:
        """Returns a reference, trained or as it was kept."""
        if name not in _OWN:
            return self._trained(name)
        problem = self._constant_problem() if name == "constant" else self._alone
        started, kept = time.perf_counter(), self.phases.finished(name, self._identity())
        models = kept.get("models")
        if models is None:
            models = {"local": self._local, "fine-tuned": self._fine_tuned, "constant": self._constants}[name]()
        result = self._result_of(problem, models, time.perf_counter() - started)
        if not kept and self._folder is not None:
            self._write(self._folder / name, result, models)
            self.phases.finish(name, self._identity(), {"models": models})
            self.phases.forget(f"{name}-*")
        return result

    # References that are runs -----------------------------------------------------------------------------------------

    def _trained(self, name: str) -> Result:
        result, problem, algorithm = self._result, self._problem, Pooled()
        if name == "average":
            if result.fixed is not None:
                return self._kept(name, result.fixed)
            fixed = result.replicas[0].algorithm.with_fixed_weights()
            algorithm = FedAvg() if fixed is None else fixed
            problem = self._problem if fixed is None else result.problem
        return self._train(problem, algorithm, None if self._folder is None else self._folder / name)

    def _train(self, problem: Prepared, algorithm: Algorithm, out: Path | None = None) -> Result:
        return train(
            problem, self._result.topology, algorithm, self._result.rounds,
            seeds=sorted({replica.seed for replica in self._replicas}),
            out=out, resume=self._resume and out is not None and out.exists(), handle_signals=self._handle_signals,
            announce=lambda text: None,  # what there is to know about the numbers was said of the run
            **to_table(self._options),
        )  # fmt: skip

    def _kept(self, name: str, result: Result) -> Result:
        """Returns a run that is already done, and writes it."""
        if self._folder is not None:
            folder = RunFolder(_emptied(self._folder / name), resume=False)
            folder.replace_records(result.records)
            write_outcome(folder, result, provenance_of(result.problem, SingleProcess()))
            folder.close()
        return result

    # References with a model at every site ----------------------------------------------------------------------------

    def _local(self) -> Tensor:
        if self._alone.flat_model.own_dim:
            return self._local_with_statistics()
        starts = torch.stack([self._alone.initial_row(replica.seed) for replica, _ in self._sites])
        rounds, penalties = self._result.rounds, len(penalties_for(self._alone))
        return self._of_fits("local", lambda fit, rows: regularised(fit, rows, rounds), starts, penalties)

    def _local_with_statistics(self) -> Tensor:
        """Returns each site's model with the statistics of its BatchNorm layers. Folds would need statistics of their
        own, so these models are trained to the end."""
        result = self._train(self._alone, Local())
        models, own = result.state.algorithm.models, result.own_parts()
        return torch.cat([models, own.to(models)], dim=-1).cpu()  # type: ignore[union-attr]

    def _fine_tuned(self) -> Tensor:
        if not bool(self._result.row()[self._first].isfinite().all()):
            raise BadInput("the common model has diverged, so it cannot be fine-tuned")
        if self._alone.flat_model.own_dim:
            raise BadInput(
                "a model whose BatchNorm layers have statistics of each site is not fine-tuned, since held-out rows "
                'would need statistics of their own; use batch_norm = "frozen" or "convert"'
            )
        method = FineTuned()
        rows = torch.stack([self._common(r, i) for r in self._first for i in range(self._problem.n)])
        tuned = self._of_fits(
            "fine-tuned", lambda fit, rows: fit.tuned(fit.same(rows), method.steps, method.step), rows
        )
        few = [not can_judge(self._problem.of_split(r.split), i) for r, i in self._sites]
        few = torch.tensor(few).view(len(self._replicas), -1, 1)
        return torch.where(few, rows.view_as(tuned).to(tuned), tuned)  # these keep the common model

    def _common(self, r: int, site: int) -> Tensor:
        """Returns the model of a replica of the run as a site uses it, with the part that stays at the site."""
        if not self._problem.flat_model.own_dim:
            return self._result.row()[r].cpu()
        whole = self._result.whole_row(r, site=str(self._problem.sites[site].name))
        return self._alone.flat_model.row_of_state_dict(self._problem.flat_model.state_dict(whole.cpu()))

    def _of_fits(
        self, name: str, fitted: Callable[[CrossFit, Tensor], Fitted], starts: Tensor, penalties: int = 1
    ) -> Tensor:
        """Returns each site's model (replicas, sites, dim), trained from its start, as many sites at once as fit."""
        sites = [with_enough_rows(self._alone.of_split(replica.split), i) for replica, i in self._sites]
        together = self._alone.changed(sites=sites, prior=None)
        folds, seed, trace = FOLDS, self._replicas[0].seed, self._options.trace == "auto"
        rows = torch.empty(len(starts), starts.shape[-1], dtype=self._dtype)
        for part in sites_at_once(together, range(len(sites)), folds, self._dtype, penalties):

            def carrier(how: str, *work: Any, part: list[int] = part) -> Any:
                return self.phases.carried_out(f"training {TITLES[name]}", f"{name}-{part[0]}", self._identity(), *work)

            fit = CrossFit(together, part, folds, seed, self._device, self._dtype, trace, carrier)
            rows[part] = fitted(fit, starts[part].to(self._device, self._dtype)).models[:, -1].cpu()
        return rows.view(len(self._replicas), self._problem.n, -1)

    def _constant_problem(self) -> Prepared:
        output = torch.zeros_like(best_constant(self._problem.of_split(0), self._problem.here[0]))
        return self._problem.each(
            lambda split: split.changed(model=_Constant(output), augment=None, parts=Parts(), batch_norm="refuse")
        )

    def _constants(self) -> Tensor:
        rows = [best_constant(self._problem.of_split(replica.split), i).flatten() for replica, i in self._sites]
        return torch.stack(rows).view(len(self._replicas), self._problem.n, -1)

    def _result_of(self, problem: Prepared, models: Tensor, seconds: float) -> Result:
        """Returns the result of models (replicas, sites, dim), each judged at its own site."""
        replicas, on = self._replicas, self._result.judged_on
        splits = [replica.split for replica in replicas]
        judge = Evaluator(problem, on, self._device, models.dtype, splits=splits)  # type: ignore[arg-type]
        placements = torch.tensor([replica.placement for replica in replicas])
        sent = dict.fromkeys(("nominal_bits_busiest", "nominal_bits_total", "bytes_busiest_node", "bytes_total"), 0)
        records: list[dict[str, Any]] = [
            {"round": self._result.rounds, "replica": r, "seed": replica.seed}
            | ({"split": replica.split} if problem.splits else {})
            | sent
            for r, replica in enumerate(replicas)
        ]
        with_spread(records, judge.of_own_models(models.to(self._device), placements), problem, None)
        nothing = torch.zeros(len(replicas), dtype=torch.float64)
        of_nodes = torch.zeros(len(replicas), problem.n, dtype=torch.float64)
        state = TrainingState(
            algorithm=Moved(models, torch.zeros_like(models), None),
            average_model=models.mean(dim=1),
            average_dual=None,
            sent=Traffic(of_nodes, nothing, of_nodes, nothing),
            best=None,
        )
        diverged = [r for r in range(len(replicas)) if not bool(models[r].isfinite().all())]
        return Result(
            problem,
            replicas,
            self._result.rounds,
            records,
            state,
            diverged,
            on,
            seconds=seconds,
            cvar_level=self._result.cvar_level,
            worst_needs_rows=self._result.worst_needs_rows,
        )

    # Their files ------------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """Returns what a reference depends on, so that one of another run is not taken for it."""
        row = self._result.row()[self._first].double()
        return {
            "data and model": self._result.problem.digest(),
            "rounds": self._result.rounds,
            "replicas": [[replica.split, replica.seed] for replica in self._replicas],
            "run": [float(value) for value in row.norm(dim=-1)],
        }

    def _write(self, path: Path, result: Result, models: Tensor) -> None:
        folder, name = RunFolder(_emptied(path), resume=False), path.name
        labels = result.problem.classes is not None
        for r in range(len(self._replicas)):
            for i, site in enumerate(result.problem.sites):
                state = {name: result.problem.flat_model.state_dict(models[r, i])}
                one = PersonalSite(i, str(site.name), {name: 1.0}, state, labels, 0, False)
                about = {"architecture": result.problem.flat_model.architecture, "which": name, "replica": r}
                folder.write_model(_file(i, r), one.tensors(), about | {"site": site.name})
        folder.write_preprocessing([split.preprocessing for split in result.problem.every_split])
        folder.replace_records(result.records)
        folder.write_outcomes(packed(result.every_outcome()))
        summary = summary_of(result) | {"algorithm": name, "models": []}
        folder.write_summary(summary)
        folder.close()


def _file(site: int, replica: int) -> str:
    return f"personal-{site}{f'-{replica}' if replica else ''}"


def _emptied(path: Path) -> Path:
    """Returns the folder of a reference without what an earlier attempt left in it."""
    if path.is_dir():
        shutil.rmtree(path)
    return path
