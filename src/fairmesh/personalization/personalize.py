"""Gives each site a model of its own after the common training. At most sums over all sites leave a site for it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from fairmesh.config.registry import registered_name
from fairmesh.config.tables import from_table
from fairmesh.data.reserve import too_few_in_words
from fairmesh.data.samples import Samples
from fairmesh.errors import BadInput
from fairmesh.numerics import trees
from fairmesh.personalization.base import Personalization, TriedSite, Weigh
from fairmesh.personalization.builtin import Mixture
from fairmesh.personalization.candidates import COMMON, LOCAL, Candidate, Steps, at_once, candidates
from fairmesh.personalization.choice import Choice
from fairmesh.personalization.cross_fit import (
    Carrier,
    CrossFit,
    can_judge,
    refuse_streams,
    rows_to_learn_from,
    sites_at_once,
    to_the_end,
)
from fairmesh.personalization.evidence import Predictions, compared_by_units, mixed
from fairmesh.personalization.outcome import Personalized, PersonalSite
from fairmesh.personalization.pooled_prior import CommonLosses, Sums, all_here
from fairmesh.problems.evaluator import measured, measured_names
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.row_loss import as_floats, lowest_loss, per_sample

PERSONAL = "personal"
_CHOSEN_BY_DEFAULT = 10**6  # parameters
NOT_CHOSEN = (
    "by default, sites choose models of their own if outputs can be mixed and a model has at most "
    f'{_CHOSEN_BY_DEFAULT:,} parameters; for a larger one, the experiment says [personalization] name = "choice"'
)
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
    trained on, and keeps what these support. With `Choice`, sites learn from each
    other how likely each kind of model is.

    The common model was trained on the sites' training rows, where it looks better than it is. The comparison is fair
    on rows that were kept out of the common training: those of `fm.data.reserve`, or a validation set of the site's
    own. `fm.train(personalization=...)` and experiment files with `[personalization]` reserve them. Without such rows
    all rows judge, and the choice leans towards the common model; `PersonalSite.unseen` says so. Sites with fewer than
    10 rows keep the common model; with `Choice` sites of one row do.

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


def mixes_models(problem: Prepared) -> bool:
    """Returns whether sites of a problem can have models of their own after the common training."""
    return mixes_outputs(problem) and not any(site.train.stream for site in problem.sites)


def usual_choice(problem: Prepared, rounds: int) -> Choice | None:
    """Returns how sites get their models where neither an algorithm nor a way is named; None if the model is too large
    to train dozens of it at every site. A run of few rounds is a trial, so its sites take no more steps.

    Args:
        problem: That of one site or of all sites, with outputs that can be mixed.
        rounds: The rounds of the run.
    """
    if too_large_to_choose(problem):
        return None
    usual = Choice()
    return replace(usual, steps=min(usual.steps, rounds), local_steps=min(usual.local_steps, rounds))


def too_large_to_choose(problem: Prepared) -> bool:
    """Returns whether a model has so many parameters, frozen ones included, that sites choose among several only if
    they are asked to."""
    return problem.flat_model.dim + sum(tensor.numel() for tensor in problem.flat_model.fixed()) > _CHOSEN_BY_DEFAULT


def mixes_outputs(problem: Prepared) -> bool:
    """Returns whether sites with samples in memory can have models of their own: the same at every site, whatever its
    samples are."""
    try:
        _refuse_outputs(problem)
        problem.refuse_own_parts("personalization")
    except BadInput:
        return False
    return True


def refuse_structure(problem: Prepared) -> None:
    """Raises BadInput if the outputs of a site's models cannot be mixed, their mixture has no loss, or samples are not
    in memory."""
    _refuse_outputs(problem)
    refuse_streams([site.train for site in problem.sites], "personal models (personalization)")


def _refuse_outputs(problem: Prepared) -> None:
    problem.output_loss  # noqa: B018 - which refuses a loss that calls the model
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
    without_folds: Tensor | None = None,
    sums: Sums = all_here,
) -> Personalized:
    """Returns the own models of the sites that are here, from the common model `row` (dim,).

    Args:
        problem: The problem of one split.
        row: The common model.
        method: How sites get their models.
        seed: The seed of starts and batches.
        replica: The number of the replica. Default: 0.
        device: Where models are trained; None for the CPU. Default: None.
        dtype: Of the models in training. Default: torch.float32.
        trace: Whether rounds may be traced. Default: True.
        progress: Called after every step. Default: nothing is called.
        carrier: Carries out the training. Default: to the end at once.
        without_folds: Common models that were trained without the first folds of every site's rows, (folds, dim), as
            `in_folds` divides them; None if there are none. Default: None.
        sums: Adds up what sites elsewhere have. Default: all sites are here.
    """
    problem.refuse_privacy("personalization")
    refuse_structure(problem)
    problem.refuse_own_parts("personalization")
    method = from_table(Personalization, method, "personalization")
    device, names = device or torch.device("cpu"), {COMMON, LOCAL, *method.components}
    steps = Steps(method.steps, method.step, method.local_steps, method.local_step)
    able = [i for i in problem.here if can_judge(problem, i, method.fewest_rows, method.fewest_units)]
    portions = sites_at_once(problem, able, method.folds, dtype, at_once(problem, names))
    in_all, before = len(portions) * steps.in_all(names), 0

    def watched(name: str, count: int, first: Any, onwards: Callable[[Any, int], Iterator[tuple[int, Any]]]) -> Any:
        nonlocal before

        def shown(state: Any, done: int) -> Iterator[tuple[int, Any]]:
            for k, now in onwards(state, done):
                if k > done:
                    progress(before + k, in_all)
                yield k, now

        last = carrier(f"{name}-{replica}-{before}", count, first, shown)
        before += count
        return last

    row = row.to(device, dtype)
    apart = row[None, :][:0] if without_folds is None else without_folds.to(row)
    commons = torch.cat([apart, row.expand(method.folds + 1 - len(apart), -1)])

    @lru_cache(maxsize=1)
    def fit_of(k: int) -> CrossFit:
        return CrossFit(problem, portions[k], method.folds, seed, device, dtype, trace, watched, len(apart))

    over_sites = sums if method.sums else all_here
    of_fits = (fit_of(k).losses_of_common(commons) for k in range(len(portions)))
    common = CommonLosses.over(over_sites, of_fits, lowest_loss(problem.output_loss))
    tried: list[TriedSite] = []
    start = problem.initial_row(seed).to(row)
    for k in range(len(portions)):
        noise = 1.0 if problem.task == "classes" else common.noise
        tried += _tried(fit_of(k), candidates(fit_of(k), commons, start, names, steps, noise))
    weigh = method.learned(tried, common, over_sites)
    found = {site.number: _outcome(problem, site, weigh) for site in tried}
    sites = [found.get(i) or _kept(problem, i, row, method) for i in problem.here]
    return Personalized(registered_name(method), replica, sites)


def _tried(fit: CrossFit, made: dict[str, Candidate]) -> list[TriedSite]:
    """Returns the sites of a fit with their candidates."""
    problem, found = fit.problem, []
    for s, number in enumerate(fit.sites):
        here, independent = fit.site_of_row == s, float(fit.independent[s])
        held_out, fitted = (
            Predictions(outputs, fit.targets[here], problem.output_loss, problem.task == "classes", independent)
            for outputs in (
                {name: candidate.outputs[here] for name, candidate in made.items()},
                {name: candidate.fitted[here] for name, candidate in made.items()},
            )
        )
        found.append(
            TriedSite(
                number,
                {name: candidate.models[s] for name, candidate in made.items()},
                {
                    name: (float(c.calibration.scale[s]), c.calibration.shift[s])
                    for name, c in made.items()
                    if c.calibration
                },
                held_out,
                fitted,
                fit.fold_of_row[here],
                fit.unseen[here],
                independent,
                {name: float(candidate.steps[s]) for name, candidate in made.items() if candidate.steps is not None},
            )
        )
    return found


def _outcome(problem: Prepared, tried: TriedSite, weigh: Weigh) -> PersonalSite:
    """Returns the outcome of a site, given how its rows become weights."""
    site, held_out, judged = problem.sites[tried.number], tried.held_out, tried.judged
    labels, unseen, note = problem.task == "classes", bool(tried.unseen.any()), None
    weights = weigh(tried, torch.ones_like(judged))
    if not unseen:
        note = (
            "the common model was trained on the rows that judge it, so the choice leans towards it; keep rows out "
            "of the common training with fm.data.reserve"
        )
    mixture = held_out.cross_validated(tried.fold, judged, lambda rows: weigh(tried, rows))
    shown = {COMMON: held_out.outputs[COMMON][judged], LOCAL: held_out.outputs[LOCAL][judged], PERSONAL: mixture}
    units = rows_to_learn_from(problem, tried.number).units
    losses = {name: per_sample(problem.output_loss, out, held_out.targets[judged]) for name, out in shown.items()}
    ours = losses.pop(PERSONAL)
    test, outputs = {}, {}
    if site.test is not None:
        names = {COMMON, LOCAL, *weights}
        tested = {name: outputs_on(problem, tried.models[name], site.test) for name in names}
        for name in names & tried.calibrations.keys():
            scale, shift = tried.calibrations[name]
            tested[name] = scale * tested[name] + shift.to(tested[name])
        tested[PERSONAL] = mixed([tested[name] for name in weights], list(weights.values()), labels)
        true = as_floats(site.test.targets, tested[COMMON].dtype)
        test = {name: measured(problem, tested[name], true) for name in (COMMON, LOCAL, PERSONAL)}
        outputs = {name: tested[name] for name in (LOCAL, PERSONAL)}
    return PersonalSite(
        tried.number,
        str(site.name),
        weights,
        {name: problem.flat_model.state_dict(tried.models[name]) for name in weights},
        labels,
        rows=int(judged.sum()),
        unseen=unseen,
        steps=tried.steps,
        held_out={name: measured(problem, out, held_out.targets[judged]) for name, out in shown.items()},
        test=test,
        note=note,
        calibrations={name: tried.calibrations[name] for name in weights if name in tried.calibrations},
        outputs=outputs,
        held_out_versus=compared_by_units(ours, losses, None if units is None else units[judged]),
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


def _kept(problem: Prepared, i: int, row: Tensor, method: Personalization) -> PersonalSite:
    """Returns the outcome of a site that is too small to judge models by its rows: it keeps the common model."""
    site, rows = problem.sites[i], rows_to_learn_from(problem, i)
    test, outputs = {}, {}
    if site.test is not None:
        out = outputs_on(problem, row, site.test)
        outputs = {PERSONAL: out}
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
        note=f"the common model was kept: {too_few_in_words(rows, method.fewest_rows, method.fewest_units)}",
        outputs=outputs,
    )
