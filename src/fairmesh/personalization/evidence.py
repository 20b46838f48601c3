"""How well held-out rows support each of several models, and the mixture of them that follows."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from fairmesh.problems.row_loss import Loss, per_sample, reads_logits

_FLOATS_AT_ONCE = 1 << 22  # of outputs times points of the grid
_PARTS = {1: 1, 2: 40, 3: 12}  # components -> parts that a unit of weight is divided into
_SINGLE = 0.2  # prior probability that a single model is right; the rest is spread evenly over the mixtures


def mixed(outputs: Sequence[Tensor], weights: Sequence[float], probabilities: bool) -> Tensor:
    """Returns the outputs of a mixture of models: the logarithm of its probabilities, so that cross-entropy takes them
    as logits, or the average output. A model without weight is left out, whatever its outputs are.

    Args:
        outputs: The outputs of each model.
        weights: The weight of each; they sum to one.
        probabilities: Whether outputs are logits of classes.
    """
    present = [(out, weight) for out, weight in zip(outputs, weights) if weight > 0]
    if len(present) == 1:
        return present[0][0]
    if probabilities:
        return torch.stack([out.log_softmax(dim=-1) + math.log(weight) for out, weight in present]).logsumexp(dim=0)
    return torch.stack([weight * out for out, weight in present]).sum(dim=0)


def log_evidence(total: Tensor, rows: Tensor | float, labels: bool) -> Tensor:
    """Returns the logarithm of how likely held-out rows are under a model, up to a constant; -inf if it is not finite.

    The loss of labels is a negative logarithm of their probability. The loss of numbers has an unknown scale, so its
    mean L counts as that of a Gaussian with the most likely variance: L^(-rows / 2). A loss below zero is taken for the
    logarithm of a density.

    Args:
        total: The sum of the loss over the rows.
        rows: The number of rows. If they belong to units, both are scaled to one row per unit.
        labels: Whether targets are class labels.
    """
    mean = total / rows
    evidence = -total if labels else torch.where(mean < 0, -total, -0.5 * rows * mean.clamp(min=1e-30).log())
    return evidence.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)


def compared_by_units(ours: Tensor, others: Mapping[str, Tensor], units: Tensor | None) -> dict[str, dict[str, float]]:
    """Returns how much the mean loss of one model differs from that of others, by their names: the difference, its
    standard error by what units deviate (NaN for one unit), how many units there are, and the other's loss.

    Args:
        ours: The loss of the model at every row.
        others: Those of others, at the same rows.
        units: The unit of every row; None if each row is its own.
    """
    owner = torch.arange(len(ours)) if units is None else units.unique(return_inverse=True)[1]
    count, found = int(owner.max()) + 1, {}
    for name, theirs in others.items():
        differences = (ours - theirs).double()
        deviations = differences.new_zeros(count).index_add_(0, owner, differences - differences.mean())
        variance = float(deviations.square().sum()) * count / (count - 1) if count > 1 else math.nan
        mean = float(differences.mean())
        found[name] = {
            "difference": mean if math.isfinite(mean) else math.nan,
            "error": math.sqrt(variance) / len(ours) if math.isfinite(variance) else math.nan,
            "units": count,
            "of": float(theirs.double().mean()),
        }
    return found


@cache
def _grid(components: int) -> tuple[Tensor, Tensor]:
    """Returns weights on a grid of the simplex (points, components), and the logarithm of their prior probability."""
    parts = _PARTS.get(components, 6)
    inner = itertools.product(range(parts + 1), repeat=components - 1)
    weights = torch.tensor([(*some, parts - sum(some)) for some in inner if sum(some) <= parts], dtype=torch.float64)
    weights = weights / parts
    single = (weights == 1).any(dim=-1)
    prior = (1 - _SINGLE) / len(weights) + single.double() * (_SINGLE / components)
    return weights, prior.log()


class Predictions:
    """What several models predict for the held-out rows of one site.

    Args:
        outputs: Each model's outputs for these rows, by the name of the model.
        targets: The rows' targets.
        loss: (outputs, targets) -> mean over the rows.
        labels: Whether targets are class labels.
        independent: How many of them are independent, as a share: units per row, if rows belong to units. Default: 1.0.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> right, wrong = torch.tensor([[4.0, 0.0]] * 20), torch.tensor([[0.0, 4.0]] * 20)
        >>> labels = torch.zeros(20, dtype=torch.int64)
        >>> rows = fm.personalization.Predictions(
        ...     {"a": right, "b": wrong}, labels, torch.nn.functional.cross_entropy, labels=True
        ... )
        >>> rows.mean_weights(["a", "b"], rows=labels == 0)["a"] > 0.9
        True
    """

    def __init__(self, outputs: dict[str, Tensor], targets: Tensor, loss: Loss, labels: bool, independent: float = 1.0):
        self.outputs, self.targets, self._loss, self._labels = outputs, targets, loss, labels
        self._independent = independent
        self.likelihood = labels or reads_logits(loss)  # whether the loss is a negative logarithm of a probability
        self._on_grid = cache(self._losses_on_grid)

    def losses(self, weights: dict[str, float]) -> Tensor:
        """Returns the loss of a mixture at every row, in float64.

        Args:
            weights: The weight of each model; they sum to one.
        """
        outputs = mixed([self.outputs[name] for name in weights], list(weights.values()), self._labels)
        return per_sample(self._loss, outputs, self.targets).double()

    def mean_weights(self, names: Sequence[str], rows: Tensor) -> dict[str, float]:
        """Returns the mean of the weights over their posterior distribution, given the held-out rows.

        The prior is even over all mixtures, with a fifth of it on the k single models. Predictions by the mean, made
        for one row after another from the rows before, have a cross-entropy that exceeds that of the best single model
        by at most log(5 k), summed over all rows. With few rows the mean stays in the middle, where a choice would
        follow the noise.

        Args:
            names: The models to mix. Those whose outputs are not finite get no weight.
            rows: Which rows to use, as a mask.
        """
        usable = [name for name in names if bool(torch.isfinite(self.outputs[name]).all())]
        if not usable:
            return {name: float(name == names[0]) for name in names}
        grid, prior = _grid(len(usable))
        losses = self._on_grid(tuple(usable))[:, rows]
        evidence = prior * 0.0
        if losses.numel():
            total, count = losses.sum(dim=-1) * self._independent, losses.shape[-1] * self._independent
            evidence = log_evidence(total, count, self._labels)
        if not bool(evidence.isfinite().any()):  # no mixture is possible at all
            evidence = prior * 0.0
        mean = torch.softmax(prior + evidence, dim=0) @ grid
        found = dict(zip(usable, mean.tolist()))
        return {name: found.get(name, 0.0) for name in names}

    def _losses_on_grid(self, names: tuple[str, ...]) -> Tensor:
        """Returns the loss of every mixture on the grid at every row: (points, rows)."""
        grid, _ = _grid(len(names))
        parts = torch.stack([self.outputs[name] for name in names]).double()
        parts = parts.log_softmax(dim=-1) if self._labels else parts
        at_once, found = max(1, _FLOATS_AT_ONCE // parts[0].numel()), []
        for weights in grid.split(at_once):
            shaped = weights.reshape(*weights.shape, *[1] * (parts.ndim - 1))  # (points, names, 1, ...)
            outputs = (parts + shaped.log()).logsumexp(dim=1) if self._labels else (parts * shaped).sum(dim=1)
            outputs = outputs.to(self.targets.dtype) if self.targets.is_floating_point() else outputs
            targets = self.targets.expand(len(weights), *self.targets.shape).flatten(0, 1)
            found.append(per_sample(self._loss, outputs.flatten(0, 1), targets).unflatten(0, (len(weights), -1)))
        return torch.cat(found).double()

    def cross_validated(self, folds: Tensor, rows: Tensor, weigh: Callable[[Tensor], dict[str, float]]) -> Tensor:
        """Returns the outputs of a mixture for the given rows, with weights that a row's own fold had no part in.

        Args:
            folds: The fold of every row.
            rows: Which rows to use, as a mask.
            weigh: Returns the weights that follow from some rows, given as a mask.
        """
        outputs = torch.empty_like(next(iter(self.outputs.values())))
        for fold in folds[rows].unique():
            here = rows & (folds == fold)
            weights = weigh(rows & ~here)
            parts = [self.outputs[name][here] for name in weights]
            outputs[here] = mixed(parts, list(weights.values()), self._labels).to(outputs)
        return outputs[rows]
