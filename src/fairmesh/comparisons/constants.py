"""The best constant answer of each site, which any model should exceed, and whether a run does."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from fairmesh.data.samples import Samples
from fairmesh.errors import listed
from fairmesh.evidence.intervals import quantile
from fairmesh.evidence.outcomes import Answers, Outcomes
from fairmesh.evidence.scores import paired
from fairmesh.evidence.units import totals_by_unit
from fairmesh.losses import ModelLoss
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.numerics import trees
from fairmesh.problems.evaluator import measured
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.row_loss import as_floats, per_sample, takes_shares


def answered(constant: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    """Returns a constant output for each of some samples, and their targets."""
    targets = as_floats(samples.known_targets(), torch.float32)
    return constant.expand(trees.length(targets), *constant.shape[1:]), targets


def best_constant(problem: Prepared, i: int) -> Tensor:
    """Returns the output (1, ...) that has the least loss if it is given for all training rows of a site. For labels
    and cross-entropy its largest entry is the most frequent class."""
    train = problem.sites[i].train
    outputs = initial_outputs(problem, train.seen, 0, rows=1)
    loss, known = _constants.get(train, (None, None))
    if known is None or loss is not problem.loss or known.shape != outputs.shape:
        known = _best_constant(problem, train, outputs)
        _constants[train] = problem.loss, known
    return known


_constants: WeakKeyDictionary[Samples, tuple[Any, Tensor]] = WeakKeyDictionary()  # with the loss that they are best for


def _best_constant(problem: Prepared, train: Samples, outputs: Tensor) -> Tensor:
    targets = as_floats(train.known_targets(), torch.float32)
    count = trees.length(targets)
    center, spread = torch.zeros_like(outputs), torch.ones_like(outputs)
    if problem.task == "numbers":  # which may be prices or lengths, so that the search is in their own spreads
        columns = targets.reshape(count, *outputs.shape[1:])
        center, spread = columns.mean(dim=0, keepdim=True), columns.std(dim=0, keepdim=True, correction=0)
        spread = spread.clamp(min=1e-30)
    away = torch.zeros_like(outputs).requires_grad_(True)
    optimizer = torch.optim.LBFGS([away], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        constant = center + spread * away
        value = problem.output_loss(constant.expand(count, *constant.shape[1:]), targets)
        if problem.task != "numbers":  # keeps the output of a class that the site does not have finite
            value = value + away.square().sum() / count
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    return (center + spread * away).detach()


def constant_values(problem: Prepared, judged_on: str) -> list[float]:
    """Returns the primary metric at every site if the answer is always the one that is best for the site's training
    rows; NaN where it is not defined, or the site's samples are elsewhere or missing."""
    found = []
    for i, site in enumerate(problem.sites):
        samples = getattr(site, judged_on)
        if samples is None or not samples.here or not len(samples):
            found.append(math.nan)
            continue
        with torch.no_grad():
            found.append(measured(problem, *answered(best_constant(problem, i), samples))[problem.primary])
    return found


_FAR = 2.0  # times the loss of a constant answer, above which a run has diverged


class FarAbove(NamedTuple):
    """Replicas that end far above a constant answer."""

    replicas: list[int]
    times: float  # the largest loss among them, in multiples of the constant's

    def in_words(self, total: int, advice: str) -> str:
        """Returns that these replicas, of a total, have diverged."""
        of = f"replicas {listed(self.replicas, 5)}: " if total > 1 else ""
        return (
            f"diverged: {of}the mean loss over sites is {self.times:.3g} times that of one constant answer; the "
            f"numbers are of no use. {advice[:1].upper()}{advice[1:]}"
        )


def far_above_constant(
    records: Sequence[tuple[Mapping[str, Any], int]], problem: Prepared, judged_on: str, group: ProcessGroup
) -> FarAbove:
    """Returns the replicas whose mean loss over sites is more than twice that of one constant answer for all sites, and
    whose primary metric is no better than that of the best constant of each site. A model that is too sure of its
    classes can have a large loss, but it has a better metric.

    Args:
        records: The last record of each replica whose loss has risen, and its split.
        problem: The problem, with the data of the sites that this process has.
        judged_on: The data that the records are of.
        group: The processes of the run.
    """
    if takes_shares(problem.loss) or isinstance(problem.loss, ModelLoss):
        return FarAbove([], 0.0)
    constants = [_constant_losses(split, judged_on, group) for split in problem.every_split]
    times = {record["replica"]: _times_above(record, constants[split], problem) for record, split in records}
    far = [r for r in times if times[r] > _FAR]
    return FarAbove(far, max((times[r] for r in far), default=0.0))


def _times_above(record: Mapping[str, Any], constants: Mapping[int, Sequence[float]], problem: Prepared) -> float:
    """Returns the mean loss over sites in multiples of a constant answer's; 0 if the primary metric is better than a
    constant's, or if one of them is not defined."""
    losses, values = record["loss"]["sites"], record[problem.primary]["sites"]
    rows = [(losses[i], values[i], *of_site) for i, of_site in constants.items() if math.isfinite(values[i])]
    if not rows or not np.isfinite(rows).all():
        return 0.0
    loss, value, constant_loss, constant_value = np.mean(rows, axis=0).tolist()
    better = value > constant_value if problem.higher_is_better(problem.primary) else value < constant_value
    return 0.0 if better else loss / max(constant_loss, 1e-30)


def _constant_losses(problem: Prepared, judged_on: str, group: ProcessGroup) -> dict[int, list[float]]:
    """Returns, by site, the loss of one constant answer for all sites, and the primary metric of the site's own best
    constant; sites where one of them is not defined are left out."""
    values = constant_values(problem, judged_on)
    here = [i for i in problem.here if math.isfinite(values[i]) and not getattr(problem.sites[i], judged_on).stream]
    constants = {i: best_constant(problem, i) for i in here}
    every = _gathered(group, {i: [len(problem.sites[i].train), constants[i].flatten().tolist()] for i in here})
    if not every:
        return {}
    rows, columns = zip(*every.values())
    common = torch.from_numpy(np.average(columns, axis=0, weights=rows)).float()
    told = {}
    for i in here:
        losses = _losses_of(common.reshape(constants[i].shape), problem, getattr(problem.sites[i], judged_on))
        told[i] = [float(losses.mean()), values[i]]
    return _gathered(group, told)


_SURE = 0.025  # chance of a false warning


def worse_than_constant(outcomes: Outcomes, problem: Prepared, group: ProcessGroup, chosen: bool = False) -> str:
    """Returns that models of numbers are clearly worse than a constant answer: over all sites than one constant, or at
    some sites than the best one for the site's training rows; nothing if the test rows do not show that.

    Args:
        outcomes: What the models answered at all sites.
        problem: The problem, with the data of the sites that this process has.
        group: The processes of the run, each of which has the data of some sites.
        chosen: Whether sites are given models of their own, so that this is about the common one. Default: False.
    """
    splits = problem.every_split
    if problem.task != "numbers" or takes_shares(problem.loss) or isinstance(problem.loss, ModelLoss):
        return ""
    if len(outcomes.of_sites) != len(splits):  # all replicas of a split diverged
        return ""
    sets = {i: [getattr(split.sites[i], outcomes.judged_on) for split in splits] for i in problem.here}
    here = [i for i, of_splits in sets.items() if _can_be_worse(outcomes.at(i), of_splits)]
    constants = {i: [best_constant(split, i) for split in splits] for i in here}
    every = _gathered(group, {i: [len(problem.sites[i].train), constants[i][0].flatten().tolist()] for i in here})
    if not every:
        return ""
    rows, columns = zip(*every.values())
    common = torch.from_numpy(np.average(columns, axis=0, weights=rows)).float()
    told = {}
    for i in here:
        answered = [answers.losses.double().numpy() for answers in outcomes.at(i)]
        own = [_losses_of(constant, split, of) for constant, split, of in zip(constants[i], splits, sets[i])]
        units = outcomes.units(i)
        difference = paired(answered, own, outcomes.overlaps[i], shares=False, units=units)
        worse = difference.bound(_SURE / len(every), upper=False) > 0
        more = answered[0].mean(axis=0) - _losses_of(common.reshape(constants[i][0].shape), splits[0], sets[i][0])[0]
        more = totals_by_unit(more, None if units is None else units[0])
        told[i] = [bool(worse), len(more), float(more.sum()), float(np.square(more).sum())]
    every = _gathered(group, told)
    _, count, total, squares = map(sum, zip(*every.values()))
    return _in_words([outcomes.sites[i] for i in sorted(every) if every[i][0]], count, total, squares, chosen)


def _in_words(names: list[str], count: int, total: float, squares: float, chosen: bool) -> str:
    """Returns what is worse than a constant: the model over all sites, if the sum over `count` rows or units of what
    its loss has more than one constant's is clearly positive, or else at the sites with these names."""
    error = math.sqrt(max(0.0, squares - total * total / count) * count / max(1, count - 1))
    if count > 1 and total > quantile(1 - _SURE, count - 1) * error:
        at = f", and at {listed(names, 3)} than a constant of their own" if names else ""
        scaled = "scaled targets (scale_target of a table, standardize of a contract)"
        remedy = f"train longer, with other steps, or on {scaled}"
        return f"clearly worse than one constant answer for all sites{at}: {remedy}"
    if not names:
        return ""
    which, remedy = "", "may need models of their own: [personalization]"
    if chosen:
        which, remedy = "the common model is ", "should use the models that they are given"
    return (
        f"{which}clearly worse than a constant answer, the best for the site's training rows, at {listed(names, 3)}; "
        f"over all sites the model is no worse than one constant, so these sites {remedy}"
    )


def _can_be_worse(answers: Sequence[Answers], sets: Sequence[Samples]) -> bool:
    """Returns whether models answered at all rows of a site, and there is something to learn: its targets vary."""
    if not answers or not all(of_split.predicted for of_split in answers):
        return False
    targets = [None if samples.stream else samples.targets for samples in sets]
    return all(isinstance(tensor, Tensor) and bool((tensor != tensor[:1]).any()) for tensor in targets)


def _gathered(group: ProcessGroup, told: dict[int, list]) -> dict[int, list]:
    """Returns what each process tells of its sites, from all processes."""
    return {int(i): row for part in group.all_gather_json(told) for i, row in part.items()}


def _losses_of(constant: Tensor, problem: Prepared, samples: Samples) -> np.ndarray:
    """Returns the loss of a constant output at every sample: (1, rows)."""
    with torch.no_grad():
        return per_sample(problem.output_loss, *answered(constant, samples)).double().unsqueeze(0).numpy()


@torch.no_grad()
def initial_outputs(problem: Prepared, samples: Samples, seed: int, rows: int | None = None) -> Tensor:
    model = problem.flat_model.to(torch.device("cpu"), torch.float32)
    return model(
        problem.initial_whole_row(seed).float(), as_floats(trees.at(samples.inputs, slice(rows)), torch.float32)
    )
