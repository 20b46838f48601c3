"""The models that a site may use: the common one, its own, and what lies between."""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from fairmesh.personalization.cross_fit import LARGE, CrossFit, penalties_for
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.row_loss import Loss, per_sample

COMMON, LOCAL, FINE_TUNED = "common", "local", "fine-tuned"
NEAR = {"near, free": 1.0, "near": 10.0, "near, held": 100.0}
"""Models trained from the common one with a penalty on the distance from it, by name, and the penalties."""
RECALIBRATED = {"shifted": (1.0, False), "shifted, held": (10.0, False), "scaled": (1.0, True)}
"""The common model with a constant added to its outputs, or with its outputs multiplied, by name: the penalty on the
change, and whether outputs are multiplied. Multiplied logits keep the most likely class; numbers are shifted too."""
OWN = ("own, free", "own", "own, held")
"""Models from scratch with a penalty on their size, by name."""
_OWN_OF_NUMBERS, _OWN_OF_LABELS, _OWN_IF_LARGE = (1.0, 10.0, 100.0), (1.0, 3.0, 10.0), (0.0, 1.0, 10.0)
_NEWTON_STEPS = 20
_SMALL = 1e-3


class Steps(NamedTuple):
    """How long models are trained: from the common one, and from scratch."""

    tuned: int
    tuned_step: float
    alone: int
    alone_step: float

    def in_all(self, names: Collection[str]) -> int:
        """Returns the steps that these candidates take together."""
        kinds = (LOCAL in names, FINE_TUNED in names, bool(NEAR.keys() & names))
        return sum(steps for kind, steps in zip(kinds, (self.alone, self.tuned, self.tuned)) if kind)


class Calibration(NamedTuple):
    """What becomes of the outputs f of each of several groups of rows: scale f + shift."""

    scale: Tensor  # (groups,)
    shift: Tensor  # (groups, ...)

    def of(self, outputs: Tensor, groups: Tensor) -> Tensor:
        """Returns recalibrated outputs (rows, ...), given the group of each row."""
        return (_like(self.scale[groups], outputs) * outputs + self.shift[groups]).to(outputs.dtype)


class Candidate(NamedTuple):
    """A model of each of several sites, and what models that were trained without a row predict for it."""

    models: Tensor  # (sites, dim)
    outputs: Tensor  # (rows, ...)
    fitted: Tensor  # what the site's model itself predicts for them (rows, ...)
    calibration: Calibration | None = None  # what becomes of the outputs of each site's model
    steps: Tensor | None = None  # that each site's model took, if held-out rows decide on it (sites,)


def candidates(
    fit: CrossFit, commons: Tensor, start: Tensor, names: Collection[str], steps: Steps, noise: float
) -> dict[str, Candidate]:
    """Returns the models with these names, of all sites of a fit.

    Args:
        fit: The sites' rows in folds.
        commons: The common model that stands for each fold, and the one that sites are given, (folds + 1, dim).
        start: The model before its first step (dim,).
        names: Which candidates.
        steps: How long they are trained.
        noise: The mean loss of the common model, if targets are numbers; else 1. Penalties are in units of it.
    """
    count = len(fit.sites)
    common, scratch = commons.expand(count, -1, -1), start.expand(count, len(commons), -1)

    def of(models: Tensor, taken: Tensor | None = None) -> Candidate:
        return Candidate(models[:, -1], fit.outputs(models), fit.outputs(fit.same(models[:, -1])), steps=taken)

    made = {COMMON: of(common)}

    if set(OWN) & set(names):
        penalties = penalties_for(fit.problem)
        ended = fit.penalised(scratch, steps.alone, steps.alone_step, penalties, fit.in_large_batches())
        made[LOCAL] = of(fit.averaged_over_penalties(ended, scratch, steps.alone).models)
        made |= {name: of(ended.models[penalties.index(own)]) for name, own in zip(OWN, _own_penalties(fit.problem))}
    elif LOCAL in names:
        made[LOCAL] = of(*fit.alone(scratch, steps.alone, steps.alone_step))
    if FINE_TUNED in names:
        pooled = bool(NEAR.keys() & names)  # then the folds judge what became of the steps
        made[FINE_TUNED] = of(*fit.tuned(common, steps.tuned, steps.tuned_step, nested=pooled))
    if NEAR.keys() & names:
        models = fit.near(common, steps.tuned, steps.tuned_step, [noise * strength for strength in NEAR.values()])
        made |= dict(zip(NEAR, map(of, models)))
    if RECALIBRATED.keys() & names:
        for name, (strength, scaled) in RECALIBRATED.items():
            calibration, outputs = _recalibrated(fit, made[COMMON].outputs, noise * strength, scaled)
            fitted = calibration.of(made[COMMON].fitted, fit.site_of_row)
            made[name] = Candidate(common[:, -1], outputs, fitted, calibration)
    return made


def at_once(problem: Prepared, names: Collection[str]) -> int:
    """Returns how many models of a site and fold are trained at once, at most."""
    return max(len(penalties_for(problem)) if set(OWN) & set(names) else 1, len(NEAR) if NEAR.keys() & names else 1)


def _own_penalties(problem: Prepared) -> tuple[float, ...]:
    if problem.flat_model.dim > LARGE:
        return _OWN_IF_LARGE
    return _OWN_OF_NUMBERS if problem.classes is None else _OWN_OF_LABELS


def _recalibrated(fit: CrossFit, outputs: Tensor, strength: float, scaled: bool) -> tuple[Calibration, Tensor]:
    """Returns how each site's outputs are recalibrated, and the outputs of all rows, each recalibrated as the other
    folds of its site support it. The outputs are those of common models that have not seen the row, where there are
    such."""
    loss, labels = fit.problem.output_loss, fit.problem.task == "classes"
    made, held = [], torch.empty_like(outputs)
    for fold in range(fit.folds + 1):
        rest, here = fit.fold_of_row != fold, fit.fold_of_row == fold
        groups = Grouped(outputs[rest], fit.targets[rest], fit.site_of_row[rest], len(fit.sites))
        made.append(calibrated(groups, loss, labels, strength, scaled))
        held[here] = made[-1].of(outputs[here], fit.site_of_row[here])
    return made[-1], held


class Grouped(NamedTuple):
    """Rows of several groups."""

    outputs: Tensor
    targets: Tensor
    group: Tensor  # of every row
    groups: int

    def sums(self, values: Tensor) -> Tensor:
        """Returns the sum of the rows' numbers in every group."""
        return values.new_zeros(self.groups, *values.shape[1:]).index_add_(0, self.group, values)


def calibrated(rows: Grouped, loss: Loss, labels: bool, strength: float, scaled: bool) -> Calibration:
    """Returns the constant of each group that lowers the sum of its losses most, if it is added to the outputs, with
    half of the strength times its square as a penalty; nothing where that does not help. With `scaled`, outputs are
    multiplied as well, and logits of classes only multiplied: a constant for every class is too much for few rows. The
    penalty is on what that changes on average.

    Args:
        rows: The rows.
        loss: (outputs, targets) -> mean over the rows.
        labels: Whether outputs are logits of classes.
        strength: Of the penalty, > 0.
        scaled: Whether outputs are multiplied.
    """
    outputs = rows.outputs.double()
    targets = rows.targets.double() if rows.targets.is_floating_point() else rows.targets
    counts = rows.sums(torch.ones(len(outputs), dtype=torch.float64)).clamp(min=1.0)
    size = rows.sums(outputs.square().flatten(1).sum(dim=-1)) / counts  # mean square of the outputs
    nothing = Calibration(torch.ones(rows.groups).double(), outputs.new_zeros(rows.groups, *outputs.shape[1:]))
    now = nothing

    def slopes(moved: Tensor) -> Tensor:
        moved = moved.detach().requires_grad_()
        (found,) = torch.autograd.grad(per_sample(loss, moved, targets).sum(), moved)
        return found

    def slopes_and_curvatures(at: Calibration) -> tuple[Tensor, Tensor]:
        moved = at.of(outputs, rows.group)
        slope = slopes(moved)
        if labels:
            chances = moved.softmax(dim=-1)
            return slope, 2.0 * chances * (1.0 - chances)  # twice, since the logits of a row are bound to each other
        return slope, ((slopes(moved + _SMALL) - slope) / _SMALL).clamp(min=0.0)

    def objective(at: Calibration) -> Tensor:
        penalty = (at.scale - 1.0).square() * size + at.shift.square().flatten(1).sum(dim=-1)
        return rows.sums(per_sample(loss, at.of(outputs, rows.group), targets).double()) + strength / 2 * penalty

    for _ in range(_NEWTON_STEPS):
        if not (scaled and labels):
            slope, curvature = slopes_and_curvatures(now)
            change = (rows.sums(slope) + strength * now.shift) / (rows.sums(curvature) + strength)
            now = now._replace(shift=now.shift - change)
        if scaled:
            slope, curvature = slopes_and_curvatures(now)
            total = rows.sums((slope * outputs).flatten(1).sum(dim=-1)) + strength * size * (now.scale - 1.0)
            bound = rows.sums((curvature * outputs.square()).flatten(1).sum(dim=-1)) + strength * size
            now = now._replace(scale=(now.scale - total / bound.clamp(min=1e-12)).clamp(0.02, 10.0))
    better = objective(now) < objective(nothing)  # false where it is not finite
    return Calibration(
        torch.where(better, now.scale, 1.0).float(), torch.where(_like(better, now.shift), now.shift, 0.0).float()
    )


def _like(of_rows: Tensor, other: Tensor) -> Tensor:
    """Returns a number per row in the form of another tensor, to be multiplied with it."""
    return of_rows.reshape(-1, *[1] * (other.ndim - 1))
