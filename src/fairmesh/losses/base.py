"""What a loss is: a number per sample, whose mean is the loss of a batch or a site. Files can name it, or it calls the
model itself."""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fairmesh.errors import BadInput

ClassWeights = tuple[float, ...] | Literal["balanced"] | None


class NamedLoss(ABC):
    """A loss that experiment files can name: `loss = "focal"`.

    A subclass is a frozen dataclass with `each`.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> loss = fm.losses.Huber(delta=1.0)
        >>> float(loss(torch.tensor([[0.5], [3.0]]), torch.zeros(2)))
        1.3125
    """

    noun: ClassVar[str] = "loss"  # of the family, in error messages
    reads_logits: ClassVar[bool] = False  # whether each output is the logit of a yes-or-no label
    of_numbers: ClassVar[bool] = False  # whether it compares each output with a number
    of_labels: ClassVar[bool] = False  # whether each target is the number of a class
    lowest: ClassVar[float | None] = None  # the lowest possible loss of a sample, if that is known

    def __post_init__(self):
        weights = getattr(self, "class_weights", None)
        if isinstance(weights, tuple) and not all(0 < weight < float("inf") for weight in weights):
            raise BadInput(f'class_weights must be numbers > 0, or "balanced", got {list(weights)}')

    @abstractmethod
    def each(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Returns the loss of each sample (samples,).

        Args:
            outputs: The model's outputs (samples, ...).
            targets: The targets (samples, ...).
            weights: The class weights, on the device of the outputs, if the loss has any. Default: None.
        """

    def soft(self, outputs: Tensor, probabilities: Tensor, weights: Tensor | None = None) -> Tensor:
        """Returns the loss of each sample (samples,) whose labels were mixed, as mixup does.

        Args:
            outputs: The model's outputs (samples, ...).
            probabilities: The share of each class in a label: (samples, classes, ...); of a yes-or-no label the shares
                of no and yes.
            weights: As of `each`. Default: None.
        """
        raise BadInput(f"the loss {type(self).__name__} does not take mixed labels, which augment returns")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean over the samples."""
        return self.on(outputs.device, outputs.dtype)(outputs, targets)

    def on(self, device: torch.device, dtype: torch.dtype, soft: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns the loss as a function of outputs and targets, with its class weights on a device; with `soft`, of
        outputs and the probabilities of mixed labels."""
        given = getattr(self, "class_weights", None)
        weights = None if given is None else torch.tensor(given, dtype=dtype, device=device)
        return functools.partial(_mean, self.soft if soft else self.each, weights)

    @property
    def is_balanced(self) -> bool:
        """Whether class weights are still to be found from the labels of all sites."""
        return getattr(self, "class_weights", None) == "balanced"

    def fitted(self, counts: Sequence[int]) -> "NamedLoss":
        """Returns the loss with balanced class weights from the number of training samples of each class: N / (k n_c)
        for a class with n_c of all N samples, of k classes that occur. A class that does not occur has weight 1."""
        if not self.is_balanced:
            return self
        total, occurring = sum(counts), sum(count > 0 for count in counts)
        weights = tuple(total / (occurring * count) if count else 1.0 for count in counts)
        return dataclasses.replace(self, class_weights=weights)  # type: ignore[type-var]

    def check(self, classes: int) -> None:
        """Raises BadInput if there is not one weight for each class."""
        given = getattr(self, "class_weights", None)
        if isinstance(given, tuple) and len(given) != classes:
            raise BadInput(f"loss: class_weights has {len(given)} numbers for {classes} classes; give one for each")


@dataclass(frozen=True)
class ModelLoss:
    """A loss (model, batch) that calls the model itself: several passes, losses that models compute, auxiliary terms.

    `Problem(loss=fm.losses.ModelLoss(function))` calls `function(model, batch)`. The model is the module with a node's
    parameters; all its methods and layers can be called, any number of times. The batch is the pair (inputs, targets),
    each a tensor, a tuple or a dictionary, as the data has it. Metrics other than the loss call `model(inputs)`, as for
    any loss.

    Args:
        function: (model, (inputs, targets)) -> one number per sample (samples,), or a scalar, their mean. One number
            per sample is faster to evaluate; weights of single samples (subgroups, or full batches of sites of unequal
            size) need it.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> def loss(model, batch):  # the error, and a penalty on how much the output moves with noise
        ...     inputs, targets = batch
        ...     outputs, noisy = model(inputs), model(inputs + 0.1 * torch.randn_like(inputs))
        ...     return ((outputs - targets) ** 2 + (outputs - noisy) ** 2).mean(dim=1)
        >>> sites = [fm.Site((torch.randn(20, 3), torch.randn(20, 1))) for _ in range(2)]
        >>> problem = fm.Problem(torch.nn.Linear(3, 1), sites, loss=fm.losses.ModelLoss(loss))
        >>> problem.flat_model.dim
        4
    """

    function: Callable[[nn.Module, tuple[Any, Any]], Tensor]

    def __call__(self, model: nn.Module, batch: tuple[Any, Any]) -> Tensor:
        """Returns what the function returns."""
        return self.function(model, batch)


def _mean(each: Callable[..., Tensor], weights: Tensor | None, outputs: Tensor, targets: Tensor) -> Tensor:
    return each(outputs, targets, weights).mean()
