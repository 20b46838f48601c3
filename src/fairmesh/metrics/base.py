"""What a metric is: a number from the outputs of a model and the targets of one site, and which direction is better."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fairmesh.config.registry import FAMILIES, registered_name
from fairmesh.config.tables import from_table
from fairmesh.errors import BadInput, nearest

Task = Literal["classes", "binary", "multi-label", "masks", "numbers", "several"]
TASKS: dict[str, str] = {  # what a problem predicts, in words
    "classes": "one class per sample",
    "binary": "one of two classes per sample, by one output",
    "multi-label": "several yes-or-no labels per sample",
    "masks": "a class for every pixel or token of a sample",
    "numbers": "numbers",
    "several": "several targets per sample, which only metrics of your own can read: fm.metrics.Metric(function)",
}


@dataclass(frozen=True)
class Metric:
    """A measure of a model on a site's whole test set, by a function of your own.

    A plain function given as a metric counts as one where higher is better. `fm.metrics` has the common ones.

    Args:
        function: Maps (outputs, targets) of a whole test set to a number. NaN means that it is not defined there.
        higher_is_better: Whether a larger number is better, so which site is the worst. Default: True.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> error = fm.metrics.Metric(lambda outputs, targets: (outputs - targets).abs().mean(), higher_is_better=False)
        >>> float(error(torch.ones(3), torch.zeros(3)))
        1.0
    """

    noun: ClassVar[str] = "metric of your own"
    function: Callable[[Tensor, Tensor], Any]
    higher_is_better: bool = True

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        return self.function(outputs, targets)


class NamedMetric(ABC):
    """A metric that experiment files can name: `metrics = ["auroc", "brier"]`.

    A subclass is a frozen dataclass with `resampled`, and says which problems it fits.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> scores = torch.tensor([0.1, 0.4, 0.35, 0.8]).logit()
        >>> fm.metrics.AUROC()(scores, torch.tensor([0, 0, 1, 1]))
        0.75
    """

    noun: ClassVar[str] = "metric"  # of the family, in error messages
    tasks: ClassVar[tuple[Task, ...]]  # the problems that it fits
    higher_is_better: ClassVar[bool] = True
    is_share: ClassVar[bool] = False  # whether tables show it in per cent
    in_target_units: ClassVar[bool] = False  # whether it is in the units of the numbers that are predicted
    limits: ClassVar[tuple[float, float]] = (-math.inf, math.inf)  # its lowest and highest possible value

    @abstractmethod
    def resampled(self, outputs: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        """Returns the metric of several resamples of a site's samples, NaN where it is not defined.

        Args:
            outputs: The outputs of one model for all samples (samples, ...): logits, or numbers.
            targets: Their targets (samples, ...).
            counts: How often each resample contains each sample (resamples, samples).

        Returns:
            One number per resample, float64.
        """

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        """Returns the metric of all samples."""
        return float(self.resampled(outputs, targets, torch.ones(1, len(targets), dtype=torch.float64))[0])

    def deciding(self, targets: Tensor) -> int:
        """Returns how many of the samples decide the metric: all, or those of a rare class. A bootstrap needs it."""
        return len(targets)

    def check(self, name: str, task: Task, classes: int | None) -> None:
        """Raises BadInput if the metric does not fit a problem.

        Args:
            name: The name of the metric in the problem.
            task: What the problem predicts.
            classes: Its number of classes, if it has classes.
        """
        if task not in self.tasks:
            fitting = sorted(one for one, kind in FAMILIES[NamedMetric].items() if task in kind.tasks)  # type: ignore[attr-defined]
            raise BadInput(
                f"metric {name!r} needs a problem that predicts {' or '.join(TASKS[one] for one in self.tasks)}, but "
                f"this one predicts {TASKS[task]}" + (f"; metrics that fit it: {', '.join(fitting)}" if fitting else "")
            )
        positive = getattr(self, "positive", None)
        if isinstance(positive, int) and classes is not None and positive >= classes:
            raise BadInput(
                f"metric {name!r}: positive = {positive}, but the {classes} classes are 0..{classes - 1}; give the "
                "number of the class"
            )

    def of_classes(self, name: str, class_names: Sequence[str]) -> "NamedMetric":
        """Returns the metric with the number of the class that it names, if it names one.

        Args:
            name: The name of the metric in the problem.
            class_names: The names of the problem's classes, in the order of their numbers.
        """
        positive = getattr(self, "positive", None)
        if not isinstance(positive, str):
            return self
        if positive not in class_names:
            todo = nearest(positive, class_names) if class_names else ": classes have no names here; give its number"
            raise BadInput(f"metric {name!r}: positive = {positive!r} is no class{todo}")
        return replace(self, positive=list(class_names).index(positive))  # type: ignore[type-var]


class MeanMetric(NamedMetric):
    """A metric that is the mean of a number per sample. Samples whose number is NaN are left out."""

    linear: ClassVar[bool] = True  # whether a sample's number is the same among other samples

    @abstractmethod
    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the number of each sample (samples,), float64; NaN where it is not defined."""

    def resampled(self, outputs: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        each = self.each(outputs, targets)
        defined = ~each.isnan()
        kept = counts.double() * defined
        return kept @ each.masked_fill(~defined, 0.0) / kept.sum(dim=-1)  # 0 / 0, of no sample, is NaN


def resampled(metric: Callable[[Tensor, Tensor], Any], outputs: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    """Returns a metric of several resamples of a site's samples, as a bootstrap needs it.

    Args:
        metric: A `NamedMetric`, which computes all resamples at once, or a function, which is called for each one.
        outputs: The outputs of one model for all samples (samples, ...).
        targets: Their targets (samples, ...).
        counts: How often each resample contains each sample (resamples, samples), whole numbers.

    Returns:
        One number per resample, float64, NaN where the metric is not defined.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> outputs, labels = torch.tensor([-1.0, 2.0, 3.0]), torch.tensor([0, 1, 0])
        >>> counts = torch.tensor([[1, 1, 1], [2, 1, 0]])
        >>> fm.metrics.resampled(fm.metrics.Sensitivity(), outputs, labels, counts).tolist()
        [1.0, 1.0]
    """
    if isinstance(metric, NamedMetric):
        return metric.resampled(outputs, targets, counts)
    values = torch.full((len(counts),), math.nan, dtype=torch.float64)
    for k, row in enumerate(counts):
        chosen = torch.repeat_interleave(torch.arange(len(targets)), row.long())
        with suppress(Exception):  # a function may raise anything where it is not defined, such as for one class
            values[k] = float(metric(outputs[chosen], targets[chosen]))
    return values


def limits_of(metric: Any) -> tuple[float, float]:
    """Returns the lowest and the highest possible value of a metric, also of one of your own."""
    return getattr(metric, "limits", NamedMetric.limits)


def chosen_metrics(
    given: Sequence[str | NamedMetric] | Mapping[str, Any],
) -> dict[str, NamedMetric | Metric | Callable[[Tensor, Tensor], Any]]:
    """Returns metrics by name, from a list of built-in ones or a table of any.

    Args:
        given: A list of names such as "auroc" or objects such as `fm.metrics.AUROC()`, which keep their names in files;
            or a table of names, to metrics, functions, or names of built-in metrics.

    Raises:
        BadInput: A name is not known, or two metrics have the same name.

    Example:
        >>> import fairmesh as fm
        >>> list(fm.metrics.chosen_metrics(["auroc", fm.metrics.Sensitivity(threshold=0.3)]))
        ['auroc', 'sensitivity']
    """
    if isinstance(given, Mapping):
        return {
            name: from_table(NamedMetric, one, f"metrics.{name}") if isinstance(one, str) else one
            for name, one in given.items()
        }
    if isinstance(given, str):
        raise BadInput(f'metrics: expected a list such as ["{given}"], got the name {given!r} alone')
    found: dict[str, Any] = {}
    for k, one in enumerate(given):
        metric = from_table(NamedMetric, one, f"metrics[{k}]")
        name = registered_name(metric)
        if name in found:
            raise BadInput(f"metrics: {name!r} is listed twice; give each a name of its own in a table [metrics]")
        found[name] = metric
    return found


def check_primary(primary: Any, given: Sequence[str | NamedMetric] | Mapping[str, Any]) -> None:
    """Raises BadInput if no metric has the name of the primary one.

    Args:
        primary: The name; None for the default.
        given: The metrics of the problem.
    """
    if primary is None:
        return
    if not isinstance(primary, str):
        raise BadInput(
            f"primary is the name of a metric, got {primary!r}; one with settings gets its name in metrics: "
            'metrics={"sens": fm.metrics.Sensitivity(threshold=0.3)}, primary="sens"'
        )
    known = {"accuracy", "loss", *chosen_metrics(given), *FAMILIES[NamedMetric]}
    if primary not in known:
        raise BadInput(f"primary: there is no metric {primary!r}{nearest(primary, known)}")


def predicted_labels(outputs: Tensor) -> Tensor:
    """Returns the most likely class of each sample: the largest of several outputs, or the sign of a single one."""
    if outputs.ndim == 1:
        return (outputs > 0).long()
    return (outputs.squeeze(-1) > 0).long() if outputs.shape[-1] == 1 else outputs.argmax(dim=-1)


def task_of(outputs: Tensor, targets: Tensor, logits: bool) -> Task:
    """Returns what a problem predicts, from some outputs of its model, its targets, and whether its loss reads outputs
    as logits of yes-or-no labels."""
    same = outputs.numel() == targets.numel()
    if targets.is_floating_point() and not (logits and same):
        return "numbers"
    if targets.ndim == 1:
        return "binary" if same else "classes"
    if same:
        return (
            "multi-label" if targets.ndim == 2 and targets.shape[1] > 1 else "binary" if targets.ndim == 2 else "masks"
        )
    dense = outputs.ndim == targets.ndim + 1 and outputs.shape[2:] == targets.shape[1:]
    return "masks" if dense else "numbers"
