"""The metrics that experiment files can name. All are computed for many resamples of a site's samples at once.

Outputs of classifiers are logits: the probabilities are their softmax, or the sigmoid of a single output. (The softmax
of log-probabilities is the probabilities, so these work as well.)
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fairmesh.config.ranges import Count, Share
from fairmesh.config.tables import register
from fairmesh.errors import BadInput
from fairmesh.metrics.base import MeanMetric, NamedMetric, Task, predicted_labels

_ONE_CLASS: tuple[Task, ...] = ("classes", "binary")

__all__ = [
    "AUROC",
    "F1",
    "R2",
    "RMSE",
    "Accuracy",
    "AveragePrecision",
    "BalancedAccuracy",
    "Brier",
    "CalibrationError",
    "Dice",
    "MeanAbsoluteError",
    "Sensitivity",
    "Specificity",
]


class _Read(NamedTuple):
    """What a classifier said and what is true, float64."""

    probabilities: Tensor  # (samples, classes); of a multi-label problem (samples, labels)
    truths: Tensor  # (samples, classes), 1 or 0
    exclusive: bool  # one class per sample

    @property
    def scored(self) -> list[int]:
        """The classes that one-vs-rest metrics are averaged over: of two classes only the second."""
        return [1] if self.exclusive and self.truths.shape[1] == 2 else list(range(self.truths.shape[1]))


def _read(outputs: Tensor, targets: Tensor) -> _Read:
    outputs = outputs.detach().double()
    if outputs.numel() == len(targets):  # one logit
        positive = outputs.reshape(-1).sigmoid()
        truth = targets.reshape(-1).double()
        return _Read(torch.stack([1 - positive, positive], 1), torch.stack([1 - truth, truth], 1), True)
    if targets.ndim == 2:
        return _Read(outputs.sigmoid(), targets.double(), False)
    truths = torch.nn.functional.one_hot(targets.long(), outputs.shape[-1]).double()
    return _Read(outputs.softmax(dim=-1), truths, True)


class _OfRareClasses(NamedMetric):
    """A metric that is decided by the samples of rare classes."""

    def deciding(self, targets: Tensor) -> int:
        """Returns 1 and, for each class that is scored, how many more than one of the samples are of its rarer kind."""
        truths = targets.reshape(len(targets), -1)
        if truths.shape[1] == 1:
            classes = truths.unique()
            truths = (truths == classes).double() if len(classes) > 2 else (truths == classes[-1]).double()
        ones = truths.sum(dim=0)
        return 1 + int((ones.minimum(len(targets) - ones) - 1).clamp(min=0).sum())


def _mean_of_defined(columns: list[Tensor]) -> Tensor:
    """Returns the mean over the classes where a metric is defined, NaN if there is none."""
    return torch.stack(columns, dim=-1).nanmean(dim=-1)


def _by_class(read: _Read, outputs: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns true positives, predicted and true ones of each class: (resamples, classes)."""
    predicted = outputs > 0
    if read.exclusive:
        predicted = torch.nn.functional.one_hot(predicted_labels(outputs), read.truths.shape[1])
    predicted, counts = predicted.double(), counts.double()
    return counts @ (predicted * read.truths), counts @ predicted, counts @ read.truths


class _Share(NamedMetric):
    """A share of the samples, or of their classes, that are right."""

    tasks: ClassVar = _ONE_CLASS
    is_share: ClassVar = True
    limits: ClassVar = (0.0, 1.0)


@dataclass(frozen=True)
class Accuracy(_Share, MeanMetric):
    """The share of samples with the right class.

    Of several labels per sample it is the share of right labels; of masks, the share of right entries in each sample.
    Entries whose target is no class, such as -100 or 255, are left out.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.metrics.Accuracy()(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0]))
        0.5
    """

    tasks: ClassVar = ("classes", "binary", "multi-label", "masks")

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.ndim > 1 and targets[0].numel() > 1:
            if outputs.numel() == targets.numel() and targets.ndim == 2:
                return ((outputs > 0) == (targets > 0.5)).double().mean(dim=1)
            labels, truths, valid, _ = _masks(outputs, targets)
            return ((labels == truths) & valid).sum(dim=1).double() / valid.sum(dim=1)
        return (predicted_labels(outputs) == targets.reshape(-1)).double()


@dataclass(frozen=True)
class BalancedAccuracy(_Share, _OfRareClasses):
    """The mean over the classes at the site of the share of their samples that are recognised.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.metrics.BalancedAccuracy()(torch.tensor([3.0, -1.0, -1.0]), torch.tensor([0, 0, 1]))
        0.25
    """

    def resampled(self, outputs: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        right, _, true = _by_class(_read(outputs, targets), outputs, counts)
        several = (true > 0).sum(dim=1) > 1
        return torch.where(several, (right / true).nanmean(dim=1), torch.nan)


class _OneVsRest(_OfRareClasses):
    """A metric of the scores of one class, the mean over the classes that have both kinds of samples at the site."""

    tasks: ClassVar = (*_ONE_CLASS, "multi-label")
    limits: ClassVar = (0.0, 1.0)

    @abstractmethod
    def of_class(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Returns the metric of each resample, given the number of positive and of negative samples with each distinct
        score, scores ascending: (resamples, distinct scores)."""

    def resampled(self, outputs: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        read, counts, columns = _read(outputs, targets), counts.double(), []
        for c in read.scored:
            distinct, where = torch.unique(read.probabilities[:, c], return_inverse=True)
            empty, truths = counts.new_zeros(len(counts), len(distinct)), read.truths[:, c]
            kinds = (empty.index_add(1, where, counts * kind) for kind in (truths, 1 - truths))
            columns.append(self.of_class(*kinds))
        return _mean_of_defined(columns)


@dataclass(frozen=True)
class AUROC(_OneVsRest):
    """The area under the ROC curve: the probability that a positive sample has a higher score than a negative one.

    Of more than two classes it is one-vs-rest, the mean over the classes that have both kinds of samples at the site.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.metrics.AUROC()(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 1]))
        1.0
    """

    def of_class(self, positive: Tensor, negative: Tensor) -> Tensor:
        below = negative.cumsum(dim=1) - negative / 2  # those of the same score count half
        return (positive * below).sum(dim=1) / (positive.sum(dim=1) * negative.sum(dim=1))


@dataclass(frozen=True)
class AveragePrecision(_OneVsRest):
    """The area under the precision-recall curve, as a sum over its steps.

    Of more than two classes it is one-vs-rest, the mean over the classes that have both kinds of samples at the site.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.metrics.AveragePrecision()(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 1, 0, 1]))
        0.8333333333333333
    """

    def of_class(self, positive: Tensor, negative: Tensor) -> Tensor:
        positive, negative = positive.flip(1), negative.flip(1)
        hits = positive.cumsum(dim=1)
        precision = hits / (hits + negative.cumsum(dim=1)).clamp(min=1e-300)
        value = (positive * precision).sum(dim=1) / positive.sum(dim=1)
        return torch.where(negative.sum(dim=1) > 0, value, torch.nan)


@dataclass(frozen=True)
class _AtThreshold(_Share):
    """The share of the samples of one kind, positive or not, that a threshold on the positive class sorts rightly."""

    of_positives: ClassVar[bool]  # whether it is about positive samples
    threshold: Share = 0.5
    positive: int | str = 1

    def __post_init__(self):
        if isinstance(self.positive, int) and self.positive < 0:
            raise BadInput(f"positive must be the name of a class, or its number >= 0, got {self.positive}")

    def deciding(self, targets: Tensor) -> int:
        """Returns how many samples are of the kind that it is about."""
        positives = int(targets.eq(self.positive).sum())  # type: ignore[arg-type]  # a number in a problem
        return positives if self.of_positives else len(targets) - positives

    def resampled(self, outputs: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        if isinstance(self.positive, str):
            raise BadInput(
                f"positive = {self.positive!r}: only a Problem knows the names of classes; give the number here"
            )
        read = _read(outputs, targets)
        found = read.probabilities[:, self.positive] >= self.threshold
        kind = (read.truths[:, self.positive] == self.of_positives).double()
        right = (found == self.of_positives).double()
        return counts.double() @ (right * kind) / (counts.double() @ kind)


@dataclass(frozen=True)
class Sensitivity(_AtThreshold):
    """The share of the positive samples whose probability reaches a threshold, also called recall.

    Args:
        threshold: The least probability of the positive class that counts as a find, in (0, 1). Default: 0.5.
        positive: The positive class, by its name, such as "ill", or by its number. Default: 1.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.metrics.Sensitivity(threshold=0.9)(torch.tensor([9.0, 1.0]), torch.tensor([1, 1]))
        0.5
    """

    of_positives: ClassVar = True


@dataclass(frozen=True)
class Specificity(_AtThreshold):
    """The share of the other samples whose probability of the positive class stays below a threshold.

    Args:
        threshold: The least probability of the positive class that counts as a find, in (0, 1). Default: 0.5.
        positive: The positive class, by its name, such as "ill", or by its number. Default: 1.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.metrics.Specificity()(torch.tensor([-9.0, 1.0, 1.0]), torch.tensor([0, 0, 1]))
        0.5
    """

    of_positives: ClassVar = False


@dataclass(frozen=True)
class F1(_OfRareClasses):
    """The harmonic mean of precision and recall: 2 TP / (2 TP + FP + FN).

    Of more than two classes, or of several labels, it is the mean over those that occur at the site.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> round(fm.metrics.F1()(torch.tensor([1.0, 1.0, -1.0]), torch.tensor([1, 0, 1])), 3)
        0.5
    """

    tasks: ClassVar = (*_ONE_CLASS, "multi-label")
    limits: ClassVar = (0.0, 1.0)

    def resampled(self, outputs: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        read = _read(outputs, targets)
        right, found, true = _by_class(read, outputs, counts)
        value = torch.where(true > 0, 2 * right / (found + true), torch.nan)
        return _mean_of_defined([value[:, c] for c in read.scored])


@dataclass(frozen=True)
class Brier(MeanMetric):
    """The mean squared difference between predicted probabilities and what happened; less is better.

    Of two classes it is that of the second class, in [0, 1]. Of more classes it is the sum over them, in [0, 2]; of
    several labels, their mean.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.metrics.Brier()(torch.zeros(2), torch.tensor([0, 1]))
        0.25
    """

    tasks: ClassVar = (*_ONE_CLASS, "multi-label")
    limits: ClassVar = (0.0, 2.0)
    higher_is_better: ClassVar = False

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        read = _read(outputs, targets)
        squares = (read.probabilities - read.truths).square()
        if read.exclusive:
            return squares.sum(dim=1) / (2 if squares.shape[1] == 2 else 1)
        return squares.mean(dim=1)


def confidences(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the probability that a classifier gives its prediction for each sample, and 1 where it is right, else 0.

    Args:
        outputs: Logits (samples, classes) or (samples,).
        targets: The true classes (samples,).
    """
    read = _read(outputs, targets)
    sure, label = read.probabilities.max(dim=1)
    return sure, read.truths.gather(1, label.unsqueeze(1)).squeeze(1)


def bin_of(sure: Tensor, bins: int) -> Tensor:
    """Returns the number of the bin of each probability, of bins with equal width that include their upper edge.

    Args:
        sure: The probabilities.
        bins: The number of bins.
    """
    return (sure * bins).ceil().long().clamp(1, bins) - 1


@dataclass(frozen=True)
class CalibrationError(NamedMetric):
    """The expected calibration error; less is better.

    It is the mean distance between how sure the model is of its prediction and how often it is right, over bins of
    equal width.

    Args:
        bins: The number of bins between 0 and 1, >= 1. Default: 15.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> round(fm.metrics.CalibrationError()(torch.tensor([0.8, 0.8]).logit(), torch.tensor([1, 1])), 3)
        0.2
    """

    tasks: ClassVar = _ONE_CLASS
    limits: ClassVar = (0.0, 1.0)
    higher_is_better: ClassVar = False
    bins: Count = 15

    def resampled(self, outputs: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        counts = counts.double()
        sure, right = confidences(outputs, targets)
        where = bin_of(sure, self.bins)
        apart = counts.new_zeros(len(counts), self.bins).index_add(1, where, counts * (right - sure))
        return apart.abs().sum(dim=1) / counts.sum(dim=1)


def _numbers(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns predictions and truths, (samples, numbers per sample), float64."""
    truths = targets.double().reshape(len(targets), -1)
    return outputs.detach().double().reshape(truths.shape), truths


class _Error(NamedMetric):
    """A distance between predictions and targets."""

    tasks: ClassVar = ("numbers",)
    in_target_units: ClassVar = True
    limits: ClassVar = (0.0, math.inf)
    higher_is_better: ClassVar = False


@dataclass(frozen=True)
class MeanAbsoluteError(_Error, MeanMetric):
    """The mean absolute difference between prediction and target; less is better.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.metrics.MeanAbsoluteError()(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 0.0]))
        2.0
    """

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        predicted, truths = _numbers(outputs, targets)
        return (predicted - truths).abs().mean(dim=1)


@dataclass(frozen=True)
class RMSE(_Error, MeanMetric):
    """The root of the mean squared difference between prediction and target; less is better.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.metrics.RMSE()(torch.tensor([3.0, -3.0]), torch.tensor([0.0, 0.0]))
        3.0
    """

    linear: ClassVar = False

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns what each sample adds to the root: numbers whose mean is the RMSE of these samples, and whose spread
        is that of its error (a jackknife)."""
        predicted, truths = _numbers(outputs, targets)
        squares = (predicted - truths).square().mean(dim=1)
        others = max(1, len(squares) - 1)
        without = ((squares.sum() - squares).clamp(min=0.0) / others).sqrt()
        return squares.mean().sqrt() + others * (without.mean() - without)

    def resampled(self, outputs: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        predicted, truths = _numbers(outputs, targets)
        squares = (predicted - truths).square().mean(dim=1)
        return (counts.double() @ squares / counts.double().sum(dim=1)).sqrt()


@dataclass(frozen=True)
class R2(NamedMetric):
    """The share of the targets' variance that predictions explain.

    1 is perfect, 0 is as good as the mean of the site's test targets for every row, and below 0 is worse than that. No
    model knows this mean, so with few test rows a good one may be below 0. Of several numbers per sample it is their
    mean. It is not defined if the targets do not vary.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.metrics.R2()(torch.tensor([2.0, 2.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]))
        0.0
    """

    tasks: ClassVar = ("numbers",)
    limits: ClassVar = (-math.inf, 1.0)

    def resampled(self, outputs: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        (predicted, truths), counts = _numbers(outputs, targets), counts.double()
        truths, shift = truths - truths.mean(dim=0), truths.mean(dim=0)  # so that squares lose no digits
        error = counts @ (predicted - shift - truths).square()
        mean = counts @ truths / counts.sum(dim=1, keepdim=True)
        total = counts @ truths.square() - counts.sum(dim=1, keepdim=True) * mean.square()
        scale = truths.square().sum(dim=0)
        return torch.where(total > 1e-12 * scale, 1 - error / total, torch.nan).mean(dim=1)


def _masks(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns predicted and true classes of every entry (samples, entries), which entries have a class, and the number
    of classes."""
    if outputs.numel() == targets.numel():  # one logit per entry
        labels, classes = (outputs.reshape(len(targets), -1) > 0).long(), 2
    else:
        labels, classes = outputs.argmax(dim=1).reshape(len(targets), -1), outputs.shape[1]
    truths = targets.reshape(len(targets), -1).long()
    return labels, truths, (truths >= 0) & (truths < classes), classes


@dataclass(frozen=True)
class Dice(MeanMetric):
    """The overlap of predicted and true masks, `2 |A and B| / (|A| + |B|)`.

    It is the mean over samples of the mean over classes. A class that is in neither mask of a sample is left out there.
    So are entries whose target is no class, such as -100 or 255.

    Args:
        background: Whether class 0 counts as a class. Default: False.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> outputs = torch.tensor([[[1.0, 1.0, -1.0, -1.0]]])  # one sample, one logit for each of four pixels
        >>> fm.metrics.Dice()(outputs, torch.tensor([[1, 0, 0, 0]]))
        0.6666666666666666
    """

    tasks: ClassVar = ("masks",)
    limits: ClassVar = (0.0, 1.0)
    background: bool = False

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        labels, truths, valid, classes = _masks(outputs, targets)
        columns = []
        for c in range(0 if self.background else 1, classes):
            predicted, true = (labels == c) & valid, (truths == c) & valid
            both = (predicted & true).sum(dim=1).double()
            columns.append(2 * both / (predicted.sum(dim=1) + true.sum(dim=1)))
        return _mean_of_defined(columns)


register(
    NamedMetric,
    {
        "accuracy": Accuracy,
        "auroc": AUROC,
        "average-precision": AveragePrecision,
        "balanced-accuracy": BalancedAccuracy,
        "brier": Brier,
        "calibration-error": CalibrationError,
        "dice": Dice,
        "f1": F1,
        "mae": MeanAbsoluteError,
        "r2": R2,
        "rmse": RMSE,
        "sensitivity": Sensitivity,
        "specificity": Specificity,
    },
)
