"""Gives each site a model of its own after the common training. Nothing leaves a site for it."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from fairmesh.config.registry import registered_name
from fairmesh.config.tables import from_table
from fairmesh.data.reserve import too_few_in_words
from fairmesh.data.samples import Samples
from fairmesh.errors import BadInput
from fairmesh.numerics import trees
from fairmesh.personalization.base import COMMON, FINE_TUNED, LOCAL, Personalization
from fairmesh.personalization.builtin import Mixture
from fairmesh.personalization.cross_fit import (
    Carrier,
    CrossFit,
    can_judge,
    refuse_streams,
    rows_to_learn_from,
    sites_at_once,
    to_the_end,
)
from fairmesh.personalization.evidence import Predictions, mixed
from fairmesh.personalization.outcome import Personalized, PersonalSite
from fairmesh.problems.evaluator import measured, measured_names
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.row_loss import as_floats

PERSONAL = "personal"
Progress = Callable[[int, int], None]  # (steps done, steps in all)


class Trained(Protocol):
    """What is needed of a run's result."""

    @property
    def problem(self) -> Prepared: ...
    @property
    def replicas(self) -> list: ...
    def row(self) -> Tensor: ...


def personalize(
    result: Trained,
    method: Personalization | None = None,
    *,
    replica: int = 0,
    device: str = "cpu",
    progress: Progress = lambda done, steps: None,
) -> Personalized:
    """Gives each site a model of its own, from the common model of a run and the site's own rows.

    Each site trains a local model, and the models that the method asks for. It judges them by rows that they were not
    trained on, and keeps what these support. Sites do not communicate.

    The common model was trained on the sites' training rows, where it looks better than it is. The comparison is fair
    on rows that were kept out of the common training: those of `fm.data.reserve`, or a validation set of the site's
    own. `fm.train(personalization=...)` and experiment files with `[personalization]` reserve them. Without such rows
    all rows judge, and the choice leans towards the common model; `PersonalSite.unseen` says so. Sites with fewer than
    10 rows keep the common model.

    Args:
        result: A finished run, as `fm.train` returns it.
        method: How sites get their models; None for `fm.personalization.Mixture()`. Default: None.
        replica: The number of the replica, from 0. Default: 0.
        device: "cpu", "cuda" or "cuda:1", ... Default: "cpu".
        progress: Called after every step with the steps done and the steps in all. Default: nothing is called.

    Returns:
        The models and their metrics, for the sites whose data is here.

    Raises:
        BadInput: The method, the replica or the device does not exist, or the common model is not finite.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> def site(sign):  # the sites disagree about which class is which
        ...     x = torch.randn(260, 2, generator=torch.Generator().manual_seed(7 + sign))
        ...     y = (sign * x[:, 0] > 0).long()
        ...     return fm.Site((x[:60], y[:60]), test=(x[60:], y[60:]))
        >>> problem = fm.Problem(lambda: torch.nn.Linear(2, 2), fm.data.reserve([site(1), site(1), site(-1)]))
        >>> result = fm.train(problem, fm.Ring(), fm.TrackedADGDA(), rounds=20)
        >>> last = fm.personalize(result).sites[2].test
        >>> last["common"]["accuracy"] < 0.7 and last["personal"]["accuracy"] > 0.9
        True
    """
    if not 0 <= replica < len(result.replicas):
        raise BadInput(f"replica must lie in 0..{len(result.replicas) - 1}, got {replica}")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise BadInput(f"unknown device {device!r}: use 'cpu' or 'cuda'") from error
    row = result.row()[replica]
    if not bool(torch.isfinite(row).all()):
        raise BadInput(
            f"the common model of replica {replica} is not finite: the run has diverged; lower its step size"
        )
    return personalized(
        result.problem.of_split(result.replicas[replica].split),
        row,
        Mixture() if method is None else method,
        seed=result.replicas[replica].seed,
        replica=replica,
        device=where,
        dtype=row.dtype,
        progress=progress,
    )


def refuse_structure(problem: Prepared) -> None:
    """Raises BadInput if the outputs of a site's models cannot be mixed, their mixture has no loss, or samples are not
    in memory."""
    problem.output_loss  # noqa: B018 - which refuses a loss that calls the model
    refuse_streams([site.train for site in problem.sites], "personal models (personalization)")
    if problem.structured is not None:
        raise BadInput(
            f"personalization mixes models of one input and one output tensor, but {problem.structured} of this "
            "problem have another form; train without it, or keep parts of the model at each site"
        )


def personalized(
    problem: Prepared,
    row: Tensor,
    method: Personalization,
    *,
    seed: int,
    replica: int = 0,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    trace: bool = True,
    progress: Progress = lambda done, steps: None,
    carrier: Carrier = to_the_end,
) -> Personalized:
    """Returns the own models of the sites that are here, from the common model `row` (dim,)."""
    refuse_structure(problem)
    problem.refuse_own_parts("personalization")
    method = from_table(Personalization, method, "personalization")
    device = device or torch.device("cpu")
    able = [i for i in problem.here if can_judge(problem, i)]
    portions = sites_at_once(problem, able, method.folds, dtype)
    steps = len(portions) * (method.local_steps + (method.steps if FINE_TUNED in method.components else 0))
    before = 0

    def watched(name: str, count: int, first: Any, onwards: Callable[[Any, int], Iterator[tuple[int, Any]]]) -> Any:
        nonlocal before

        def shown(state: Any, done: int) -> Iterator[tuple[int, Any]]:
            for k, now in onwards(state, done):
                if k > done:
                    progress(before + k, steps)
                yield k, now

        last = carrier(f"{name}-{replica}-{before}", count, first, shown)
        before += count
        return last

    found: dict[int, PersonalSite] = {}
    for sites in portions:
        fit = CrossFit(problem, sites, method.folds, seed, device, dtype, trace, watched)
        found |= {site.number: site for site in _fitted(fit, row.to(device, dtype), method, seed)}
    sites = [found.get(i) or _kept(problem, i, row) for i in problem.here]
    return Personalized(registered_name(method), replica, sites)


def _fitted(fit: CrossFit, row: Tensor, method: Personalization, seed: int) -> list[PersonalSite]:
    """Returns the outcomes of some sites, which are trained together."""
    sites = fit.sites
    start = fit.problem.initial_row(seed).to(row).expand(len(sites), -1)
    local = fit.alone(fit.same(start), method.local_steps, method.local_step)
    rows = {COMMON: row.expand(len(sites), -1), LOCAL: local.models[:, -1]}
    outputs = {COMMON: fit.outputs(fit.same(rows[COMMON])), LOCAL: fit.outputs(local.models)}
    steps = {LOCAL: local.steps}
    if FINE_TUNED in method.components:
        tuned = fit.tuned(fit.same(rows[COMMON]), method.steps, method.step)
        rows[FINE_TUNED], outputs[FINE_TUNED] = tuned.models[:, -1], fit.outputs(tuned.models)
        steps[FINE_TUNED] = tuned.steps
    return [_chosen(fit, s, method, rows, outputs, steps) for s in range(len(sites))]


def _chosen(
    fit: CrossFit,
    s: int,
    method: Personalization,
    rows: dict[str, Tensor],
    outputs: dict[str, Tensor],
    steps: dict[str, Tensor],
) -> PersonalSite:
    """Returns the outcome of the site s of a fit, given the models of all sites, what models that were trained without
    a row predict for it, and the steps that they took."""
    problem, here, unseen = fit.problem, fit.site_of_row == s, bool(fit.has_unseen[s])
    labels, rows = problem.task == "classes", {name: of_sites[s] for name, of_sites in rows.items()}
    outputs = {name: of_sites[here] for name, of_sites in outputs.items()}
    targets, judged = fit.targets[here], fit.judged[here]
    held_out = Predictions(outputs, targets, problem.output_loss, labels, float(fit.independent[s]))
    weights, note = method.weights(held_out, judged), None
    if unseen and LOCAL in weights:
        # The common model has seen the other rows, so they speak too well of it. If they favour the local model all
        # the same, and more than the few unseen rows do, they are right to.
        everyone = method.weights(held_out, torch.ones_like(judged))
        weights = max(weights, everyone, key=lambda w: w[LOCAL])
    if not unseen:
        note = (
            "the common model was trained on the rows that judge it, so the choice leans towards it; keep rows out "
            "of the common training with fm.data.reserve"
        )
    mixture = held_out.cross_validated(fit.fold_of_row[here], judged, lambda rows: method.weights(held_out, rows))
    shown = {COMMON: outputs[COMMON][judged], LOCAL: outputs[LOCAL][judged], PERSONAL: mixture}
    number = fit.sites[s]
    site, test = problem.sites[number], {}
    if site.test is not None:
        tested = {name: outputs_on(problem, row, site.test) for name, row in rows.items()}
        tested[PERSONAL] = mixed([tested[name] for name in weights], list(weights.values()), labels)
        true = as_floats(site.test.targets, tested[COMMON].dtype)
        test = {name: measured(problem, tested[name], true) for name in (COMMON, LOCAL, PERSONAL)}
    return PersonalSite(
        number,
        str(site.name),
        weights,
        {name: problem.flat_model.state_dict(rows[name]) for name in weights},
        labels,
        rows=int(judged.sum()),
        unseen=unseen,
        steps={name: float(of_sites[s]) for name, of_sites in steps.items()},
        held_out={name: measured(problem, out, targets[judged]) for name, out in shown.items()},
        test=test,
        note=note,
    )


_FLOATS_AT_ONCE = 1 << 23


@torch.no_grad()
def outputs_on(problem: Prepared, row: Tensor, samples: Samples) -> Tensor:
    """Returns a model's outputs for a set of samples, on the CPU."""
    model = problem.flat_model.to(row.device, row.dtype)
    chunk = max(1, _FLOATS_AT_ONCE // trees.numbers_per_sample(samples.inputs))
    made = []
    for start in range(0, len(samples), chunk):
        few = trees.mapped(lambda part, at=start: part[at : at + chunk].to(row.device, copy=True), samples.inputs)
        made.append(model(row, as_floats(few, row.dtype)).cpu())
    return torch.cat(made)


def _kept(problem: Prepared, i: int, row: Tensor) -> PersonalSite:
    """Returns the outcome of a site that is too small to judge models by its rows: it keeps the common model."""
    site, rows = problem.sites[i], rows_to_learn_from(problem, i)
    test = {}
    if site.test is not None:
        out = outputs_on(problem, row, site.test)
        numbers = measured(problem, out, as_floats(site.test.targets, out.dtype))
        test = {COMMON: numbers, LOCAL: dict.fromkeys(numbers, math.nan), PERSONAL: numbers}
    nothing: dict[str, float] = dict.fromkeys(measured_names(problem), math.nan)
    return PersonalSite(
        i,
        str(site.name),
        {COMMON: 1.0},
        {COMMON: problem.flat_model.state_dict(row)},
        problem.task == "classes",
        rows=0,
        unseen=False,
        held_out=dict.fromkeys((COMMON, LOCAL, PERSONAL), nothing),
        test=test,
        note=f"the common model was kept: {too_few_in_words(rows)}",
    )
