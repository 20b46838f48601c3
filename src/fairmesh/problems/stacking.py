"""How the models of several nodes are evaluated: all at once by vmap, some at a time, or one after another."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_map

from fairmesh.errors import BadInput
from fairmesh.numerics.generators import GeneratorStates
from fairmesh.numerics.tracing import Traced, values_readable
from fairmesh.problems import convolutions
from fairmesh.problems.flat_model import FlatModel

AtOnce = int | None  # how many models; None for all
_LARGE = 1_000_000  # parameters; below that, calling torch for one model at a time costs more than it saves
_WIDE = 256  # channels


def slower_stacked(module: nn.Module) -> str | None:
    """Returns why a CPU evaluates this model faster one at a time, or None. It depends on the layers alone, since a
    resumed run must compute the same numbers; benchmarks/notes.md has the measurements."""
    if sum(p.numel() for p in module.parameters()) < _LARGE:
        return None
    convolved = [layer for layer in module.modules() if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    wide = [layer for layer in convolved if layer.groups == 1 and layer.in_channels >= _WIDE]
    if len(wide) >= 4:
        return f"{len(wide)} convolutions of {_WIDE} channels or more are faster on a CPU this way"
    return None


def over_models(function: Callable[..., Any], at_once: AtOnce, in_dims: Any = 0) -> Callable[..., Any]:
    """Returns a function of stacks of arguments, one row per model, that gives stacks of what `function` gives for one.

    Args:
        function: A function of tensors.
        at_once: How many models are evaluated at once; None for all.
        in_dims: 0 for arguments that are stacks and None for those that all models share, as vmap has it. Default: 0.
    """
    stacked = vmap(function, in_dims=in_dims)
    if at_once is None:
        return stacked

    def in_portions(*arguments: Any) -> Any:
        own = [True] * len(arguments) if in_dims == 0 else [dim == 0 for dim in in_dims]
        count = next(len(argument) for argument, mine in zip(arguments, own) if mine)
        found = []
        for first in range(0, count, at_once):
            here = [a[first : first + at_once] if mine else a for a, mine in zip(arguments, own)]
            if at_once == 1:
                one = function(*(a[0] if mine else a for a, mine in zip(here, own)))
                found.append(tree_map(lambda t: t.unsqueeze(0), one))
            else:
                found.append(stacked(*here))
        return found[0] if len(found) == 1 else tree_map(lambda *parts: torch.cat(parts), *found)

    return in_portions


def gradients(
    model: FlatModel,
    loss: Callable[..., Any],
    at_once: AtOnce,
    models: int,
    device: torch.device,
    has_aux: bool = False,
    trace: bool = False,
) -> Callable[..., Any]:
    """Returns a function (rows, inputs, targets, keys, ...) -> (gradients, losses), one row per model.

    Args:
        model: The model that `loss` evaluates.
        loss: (row, inputs, targets, key, ...) -> a scalar, or with `has_aux` a scalar and more.
        at_once: How many models are evaluated at once; None for all.
        models: How many models there are.
        device: Where they are.
        has_aux: Whether `loss` returns more than a scalar; it is then returned with the losses. Default: False.
        trace: Whether to trace the operations of a stack once and replay them, on a CPU. Default: False.
    """
    if at_once == 1:
        return _OneByOne(model, loss, has_aux)
    at_once = None if at_once is None or at_once >= models else at_once
    loss = convolutions.of_many(loss, at_once or models, device)
    stacked = vmap(grad_and_value(loss, has_aux=has_aux))
    stacked = Traced(stacked) if trace and not has_aux else stacked
    if at_once is None:
        return stacked

    def in_portions(rows: Tensor, *batch: Tensor) -> Any:
        found, losses = torch.empty_like(rows), []
        for first in range(0, len(rows), at_once):
            here = slice(first, first + at_once)
            found[here], values = stacked(rows[here], *(part[here] for part in batch))
            losses.append(values)
        return found, tree_map(lambda *parts: torch.cat(parts), *losses)

    return in_portions


class _OneByOne:
    """Losses and gradients of one model after another, by ordinary automatic differentiation. It takes any module, and
    holds the activations of one model at a time."""

    def __init__(self, model: FlatModel, loss: Callable[..., Any], has_aux: bool):
        self._model, self._loss, self._has_aux = model, loss, has_aux
        self._checked = False  # whether the first call drew from no generator but the nodes' streams

    def __call__(self, rows: Tensor, *batch: Tensor) -> Any:
        before = None if self._checked or not values_readable(rows) else GeneratorStates.now()
        found, values = torch.empty_like(rows), []
        for k, row in enumerate(rows):
            values.append(
                self._model.with_gradient(self._loss, row, [part[k] for part in batch], found[k], self._has_aux)
            )
        if before is not None:
            refuse_moved(before)
            self._checked = True
        return found, tree_map(lambda *parts: torch.stack(parts), *values)


def refuse_moved(before: GeneratorStates) -> None:
    """Raises BadInput if a generator of the process was used since then."""
    if moved := before.moved():
        raise BadInput(
            f"the model, loss or augmentation draws from the generator of {' and '.join(moved)}, so runs could not be "
            "repeated; a model may use dropout layers, torch.rand, torch.randn, torch.bernoulli and the like, whose "
            "numbers fairmesh replaces by its own, and augment(batch, draw) takes uniforms from draw(*shape)"
        )
