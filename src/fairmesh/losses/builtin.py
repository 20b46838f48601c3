"""The losses that experiment files can name."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fairmesh.config.ranges import NotNegative, Positive, Within
from fairmesh.config.tables import register
from fairmesh.losses.base import ClassWeights, NamedLoss

__all__ = ["AbsoluteError", "BinaryCrossEntropy", "CrossEntropy", "Dice", "Focal", "Huber", "SquaredError"]


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean squared error; outputs (samples, 1) match targets (samples,)."""
    return nn.functional.mse_loss(outputs.reshape(targets.shape), targets)


def _by_entry(outputs: Tensor, targets: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns log-probabilities (samples, classes, entries), labels (samples, entries), and which entries count, None
    for all. One output for each target is the logit of class 1."""
    labels = targets.reshape(len(targets), -1).long()
    if outputs.numel() == targets.numel():
        logit = outputs.reshape(labels.shape).unsqueeze(1)
        outputs = torch.cat([torch.zeros_like(logit), logit], dim=1)
    logs = outputs.reshape(len(targets), outputs.shape[1], -1).log_softmax(dim=1)
    if ignore_index is None:
        return logs, labels, None
    valid = labels != ignore_index
    return logs, labels.masked_fill(~valid, 0), valid


def _by_class(outputs: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities and mixed labels, both (samples, classes, entries)."""
    mixed = probabilities.reshape(*probabilities.shape[:2], -1)
    if outputs.numel() * 2 == probabilities.numel() and mixed.shape[1] == 2:  # one logit for each label
        logit = outputs.reshape(len(mixed), 1, -1)
        outputs = torch.cat([torch.zeros_like(logit), logit], dim=1)
    return outputs.reshape(mixed.shape).log_softmax(dim=1), mixed


def _of_mixed(losses: Tensor, mixed: Tensor, weights: Tensor | None, ignores: bool) -> Tensor:
    """Returns the loss of each sample, given that of each class (samples, classes, entries). Entries without any class
    do not count if the loss ignores some."""
    weighed = losses * mixed if weights is None else losses * mixed * weights.reshape(-1, 1)
    return _of_samples(weighed.sum(dim=1), mixed.sum(dim=1) > 0 if ignores else None)


def _of_samples(entries: Tensor, valid: Tensor | None) -> Tensor:
    """Returns the mean over the valid entries of each sample; 0 for a sample without any, which teaches nothing."""
    if valid is None:
        return entries.mean(dim=1)
    return (entries * valid).sum(dim=1) / valid.sum(dim=1).clamp(min=1)


class _OfClasses(NamedLoss):
    """A loss of the logarithm of the right class's probability."""

    of_labels: ClassVar[bool] = True
    lowest: ClassVar[float | None] = 0.0
    ignore_index: int | None

    @abstractmethod
    def if_true(self, chosen: Tensor, logs: Tensor) -> Tensor:
        """Returns the loss of each entry if some classes are the right ones.

        Args:
            chosen: The log-probabilities of these (samples, chosen classes, entries).
            logs: The log-probabilities of all classes (samples, classes, entries).
        """

    def each(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        logs, labels, valid = _by_entry(outputs, targets, self.ignore_index)
        losses = self.if_true(logs.gather(1, labels.unsqueeze(1)), logs).squeeze(1)
        return _of_samples(losses if weights is None else losses * weights[labels], valid)

    def soft(self, outputs: Tensor, probabilities: Tensor, weights: Tensor | None = None) -> Tensor:
        logs, mixed = _by_class(outputs, probabilities)
        return _of_mixed(self.if_true(logs, logs), mixed, weights, self.ignore_index is not None)


@dataclass(frozen=True)
class CrossEntropy(_OfClasses):
    """The negative logarithm of the probability of the right class.

    Targets are labels (samples,), or (samples, ...) with outputs (samples, classes, ...) for a class per pixel or
    token.

    Args:
        class_weights: What a sample of each class counts, numbers > 0; "balanced" for weights from the training samples
            of all sites, N / (k n_c); None for 1. The loss is the mean of w_y times the loss of each sample, not
            divided by the weights of the batch. Default: None.
        label_smoothing: How much of each label is spread evenly over all classes, in [0, 1). Default: 0.0.
        ignore_index: The target of pixels or tokens that do not count; None if all count. The loss of a sample is the
            mean over those that do, and 0 if none does. Default: None.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> loss = fm.losses.CrossEntropy(class_weights=(1.0, 3.0))
        >>> round(float(loss(torch.zeros(2, 2), torch.tensor([0, 1]))), 4)  # (1 + 3) / 2 times log 2
        1.3863
    """

    class_weights: ClassWeights = None
    label_smoothing: Annotated[float, Within("[0, 1)")] = 0.0
    ignore_index: int | None = None

    def if_true(self, chosen: Tensor, logs: Tensor) -> Tensor:
        if not self.label_smoothing:
            return -chosen
        return (1 - self.label_smoothing) * -chosen - self.label_smoothing * logs.mean(dim=1, keepdim=True)


@dataclass(frozen=True)
class Focal(_OfClasses):
    """Cross-entropy that counts easy samples less: (1 - p)^gamma times -log p, with p of the right class.

    Args:
        gamma: How much less, >= 0; 0 is cross-entropy. Default: 2.0.
        class_weights: As of `CrossEntropy`. Default: None.
        ignore_index: As of `CrossEntropy`. Default: None.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> round(float(fm.losses.Focal()(torch.zeros(1, 2), torch.tensor([0]))), 4)  # log 2 / 4
        0.1733
    """

    gamma: NotNegative = 2.0
    class_weights: ClassWeights = None
    ignore_index: int | None = None

    def if_true(self, chosen: Tensor, logs: Tensor) -> Tensor:
        return -(1 - chosen.exp()).clamp(min=1e-7).pow(self.gamma) * chosen  # the slope of 0^gamma may be infinite


@dataclass(frozen=True)
class BinaryCrossEntropy(NamedLoss):
    """Cross-entropy of yes-or-no labels, each with one output, its logit.

    Targets are 0 or 1, as whole numbers or floats: (samples,) for a model with one output, (samples, labels) for
    several labels, or masks. The loss of a sample is the mean over its labels.

    Args:
        class_weights: What a label 0 and a label 1 count; "balanced" as of `CrossEntropy`; None for 1. Default: None.
        ignore_index: As of `CrossEntropy`. Default: None.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> round(float(fm.losses.BinaryCrossEntropy()(torch.zeros(2, 1), torch.tensor([0, 1]))), 4)
        0.6931
    """

    reads_logits: ClassVar[bool] = True
    lowest: ClassVar[float | None] = 0.0
    class_weights: ClassWeights = None
    ignore_index: int | None = None

    def each(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        labels = targets.reshape(len(targets), -1)
        valid = None if self.ignore_index is None else labels != self.ignore_index
        truths = (labels if valid is None else labels.masked_fill(~valid, 0)).to(outputs.dtype)
        losses = nn.functional.binary_cross_entropy_with_logits(outputs.reshape(labels.shape), truths, reduction="none")
        if weights is not None:
            losses = losses * (weights[0] + (weights[1] - weights[0]) * truths)
        return _of_samples(losses, valid)

    def soft(self, outputs: Tensor, probabilities: Tensor, weights: Tensor | None = None) -> Tensor:
        logit = outputs.reshape(len(outputs), -1)
        losses = -nn.functional.logsigmoid(torch.stack([-logit, logit], dim=1))
        mixed = probabilities.reshape(losses.shape)
        return _of_mixed(losses, mixed, weights, self.ignore_index is not None)


class _OfNumbers(NamedLoss):
    """A loss of the difference between prediction and target."""

    of_numbers: ClassVar[bool] = True
    lowest: ClassVar[float | None] = 0.0

    @abstractmethod
    def of_differences(self, differences: Tensor) -> Tensor:
        """Returns the loss of each number, from prediction minus target."""

    def each(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        differences = (outputs.reshape(targets.shape) - targets).reshape(len(targets), -1)
        return self.of_differences(differences).mean(dim=1)


@dataclass(frozen=True)
class SquaredError(_OfNumbers):
    """The squared difference between prediction and target.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> float(fm.losses.SquaredError()(torch.tensor([[1.0], [3.0]]), torch.zeros(2)))
        5.0
    """

    def of_differences(self, differences: Tensor) -> Tensor:
        return differences.square()


@dataclass(frozen=True)
class AbsoluteError(_OfNumbers):
    """The absolute difference between prediction and target.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> float(fm.losses.AbsoluteError()(torch.tensor([[1.0], [3.0]]), torch.zeros(2)))
        2.0
    """

    def of_differences(self, differences: Tensor) -> Tensor:
        return differences.abs()


@dataclass(frozen=True)
class Huber(_OfNumbers):
    """Half the squared difference up to delta, and linear beyond, so that outliers count less.

    Args:
        delta: Where it becomes linear, > 0. Default: 1.0.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> float(fm.losses.Huber(delta=2.0)(torch.tensor([[5.0]]), torch.zeros(1)))
        8.0
    """

    delta: Positive = 1.0

    def of_differences(self, differences: Tensor) -> Tensor:
        apart = differences.abs()
        inside = apart.clamp(max=self.delta)
        return inside * (apart - inside / 2)


@dataclass(frozen=True)
class Dice(NamedLoss):
    """One minus the overlap of predicted and true masks of each sample, 2 sum p t / (sum p + sum t), over its classes.

    Targets are masks (samples, ...) with outputs (samples, classes, ...), or one logit for each entry.

    Args:
        smooth: Is added above and below the fraction line, > 0, so that empty masks have an overlap of 1. Default: 1.0.
        background: Whether class 0 counts as a class. Default: False.
        ignore_index: As of `CrossEntropy`. Default: None.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> outputs, mask = torch.full((1, 4), 20.0), torch.tensor([[1, 1, 0, 0]])
        >>> round(float(fm.losses.Dice()(outputs, mask)), 3)  # 1 - (2 * 2 + 1) / (4 + 2 + 1)
        0.286
    """

    of_labels: ClassVar[bool] = True
    lowest: ClassVar[float | None] = 0.0
    smooth: Positive = 1.0
    background: bool = False
    ignore_index: int | None = None

    def each(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        logs, labels, valid = _by_entry(outputs, targets, self.ignore_index)
        classes = torch.arange(logs.shape[1], device=logs.device).reshape(1, -1, 1)
        truths, said = (labels.unsqueeze(1) == classes).to(logs.dtype), logs.exp()
        if valid is not None:
            truths, said = truths * valid.unsqueeze(1), said * valid.unsqueeze(1)
        return self._of_masks(truths, said)

    def soft(self, outputs: Tensor, probabilities: Tensor, weights: Tensor | None = None) -> Tensor:
        logs, mixed = _by_class(outputs, probabilities)
        return self._of_masks(mixed, logs.exp() * mixed.sum(dim=1, keepdim=True))  # 0 where no class is given

    def _of_masks(self, truths: Tensor, said: Tensor) -> Tensor:
        both, size = (truths * said).sum(dim=2), truths.sum(dim=2) + said.sum(dim=2)
        overlap = (2 * both + self.smooth) / (size + self.smooth)
        return 1 - overlap[:, 0 if self.background else 1 :].mean(dim=1)


register(
    NamedLoss,
    {
        "absolute-error": AbsoluteError,
        "binary-cross-entropy": BinaryCrossEntropy,
        "cross-entropy": CrossEntropy,
        "dice": Dice,
        "focal": Focal,
        "huber": Huber,
        "squared-error": SquaredError,
    },
)
