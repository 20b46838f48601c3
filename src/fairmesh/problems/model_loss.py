"""Losses that call the model itself, evaluated for a row of parameters."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from fairmesh.errors import BadInput, in_a_line
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree
from fairmesh.problems.flat_model import FlatModel
from fairmesh.problems.torch_draws import TorchDraws

_MOVED = (0.0, 0.1, 0.5)  # standard deviation of the parameters around the initial ones, at which a loss is checked


@dataclass(frozen=True, eq=False)
class BoundModelLoss:
    """A loss of the user's own that calls the model, and how it is evaluated.

    Args:
        function: (module, (inputs, targets)) -> a scalar, or a number per sample.
        each: Whether it gives a number per sample.
        by_vmap: Whether vmap can evaluate it for several samples at once.
    """

    function: Callable[[nn.Module, tuple[Any, Any]], Tensor]
    each: bool
    by_vmap: bool = True

    def __call__(self, model: nn.Module, batch: tuple[Any, Any]) -> Tensor:
        """Returns what the function returns."""
        return self.function(model, batch)

    def of_batch(self, model: FlatModel, row: Tensor, inputs: Tree, targets: Tree, key: Tensor) -> Tensor:
        """Returns the loss of a batch, in training mode."""
        value = model.within(row, lambda module: self.function(module, (inputs, targets)), key)
        return value.mean() if self.each else value

    def of_samples(
        self, model: FlatModel, row: Tensor, inputs: Tree, targets: Tree, key: Tensor | None = None
    ) -> Tensor:
        """Returns the loss of each sample (samples,); with a key in training mode, which a loss that gives a scalar
        does not have for single samples."""
        if self.each:
            return model.within(row, lambda module: self.function(module, (inputs, targets)), key)
        if key is not None:
            raise BadInput(
                "subgroups, full batches of sites of unequal size and an algorithm's sample_losses need the losses of "
                "single samples; let the function of fm.losses.ModelLoss return one number per sample (samples,)"
            )

        def one(*batch: Tree) -> Tensor:
            alone = trees.mapped(lambda part: part.unsqueeze(0), batch)
            return model.within(row, lambda module: self.function(module, alone))

        if self.by_vmap:
            return vmap(one, chunk_size=_AT_ONCE)(inputs, targets)
        return torch.stack([one(trees.at(inputs, i), trees.at(targets, i)) for i in range(trees.length(inputs))])


_AT_ONCE = 256  # samples, each a batch of one


class _SameDraws(TorchDraws):
    """Answers a draw with one number in all places, so that a batch and its single samples draw the same."""

    def uniforms(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        found = super().uniforms((1,), dtype, device)
        return found.expand(math.prod(shape)).reshape(tuple(shape)).clone()


def bound(
    function: Callable[[nn.Module, tuple[Any, Any]], Tensor], model: FlatModel, row: Tensor, batch: tuple[Tree, Tree]
) -> BoundModelLoss:
    """Returns the loss with how it is evaluated, found on a few samples.

    Args:
        function: The user's function.
        model: The model.
        row: Its initial parameters.
        batch: Inputs and targets of a few samples.

    Raises:
        BadInput: It fails, returns something else, or its value for a batch is not the mean over the samples.
    """
    count = trees.length(batch[0])
    each = False
    for moved in _MOVED:
        noise = torch.randn(row.shape, generator=torch.Generator().manual_seed(0), dtype=row.dtype)
        at = row + moved * noise

        def value(part: tuple[Tree, Tree], at: Tensor = at) -> Tensor:
            key = torch.zeros((), dtype=torch.int64)
            with torch.no_grad():
                return model.within(at, lambda module: function(module, part), draws=_SameDraws(key))

        try:
            whole = value(trees.mapped(torch.clone, batch))
        except BadInput:
            raise
        except Exception as error:  # the user's function may raise anything
            if moved:
                continue  # a model may not accept all parameters
            raise BadInput(
                f"loss: the function of fm.losses.ModelLoss fails for (model, (inputs, targets)) of {count} samples, "
                f"with inputs {trees.form_in_words(batch[0])} and targets {trees.form_in_words(batch[1])}: "
                f"{in_a_line(error)}"
            ) from error
        if not isinstance(whole, Tensor) or whole.shape not in ((), (count,)):
            shown = f"shape {tuple(whole.shape)}" if isinstance(whole, Tensor) else f"a {type(whole).__name__}"
            raise BadInput(
                f"loss: the function of fm.losses.ModelLoss must return one number per sample, ({count},) for {count} "
                f"samples, or a scalar, got {shown}"
            )
        each = whole.ndim == 1
        singles = torch.cat([value(trees.at(batch, slice(i, i + 1))).reshape(-1) for i in range(count)])
        if not bool(torch.isfinite(whole).all()):
            continue
        if each and not torch.allclose(whole, singles, rtol=1e-3, atol=1e-5):
            i = int((whole - singles).abs().argmax())
            raise BadInput(
                f"loss: sample {i} has the loss {float(whole[i]):.6g} in a batch of {count}, but "
                f"{float(singles[i]):.6g} alone; every node is measured by the mean over its "
                "samples, so the loss of a sample must not depend on the others"
            )
        if not each and not torch.allclose(whole, singles.mean(), rtol=1e-3, atol=1e-5):
            raise BadInput(
                f"loss: a batch of {count} samples has the loss {float(whole):.6g}, but the mean of their single "
                f"losses is {float(singles.mean()):.6g}; every node is measured by the mean over its samples. Let the "
                "function return one number per sample (samples,), such as the mean over a sample's own tokens"
            )
    return BoundModelLoss(function, each)
