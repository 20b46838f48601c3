"""A loss that calls the model itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


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
