"""How the models of several nodes are evaluated: all at once by vmap, some at a time, or one after another; and their
gradients, without an import that takes as long as half of `import torch`."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from fairmesh.errors import BadInput
from fairmesh.numerics import trees
from fairmesh.numerics.random_streams import GeneratorStates
from fairmesh.numerics.tracing import Opaque, Traced, values_readable
from fairmesh.numerics.trees import Tree
from fairmesh.problems import convolutions
from fairmesh.problems.flat_model import FlatModel

AtOnce = int | None  # how many models; None for all
_LARGE = 1_000_000  # parameters; below that, calling torch for one model at a time costs more than it saves
_WIDE = 256  # channels
_NORMS = 8  # layers
_CONVOLVED = 16_000_000  # products in the convolutions of a batch, from which a CPU is faster one by one
_STREAMS = 5  # of a GPU, on which models take turns; ten are no faster (benchmarks/notes.md)

Precision = Literal["float32", "tf32", "bf16"]


def slower_stacked(module: nn.Module, kind: str, convolved: int = 0) -> str:
    """Returns why a kind of device evaluates this model faster one at a time, or "". It depends on the trained layers
    and on shapes, never on a timing, since a resumed run must compute the same numbers; benchmarks/notes.md has the
    measurements.

    Args:
        module: The model.
        kind: "cpu" or "cuda".
        convolved: How many products of numbers the trained convolutions compute in a batch. Default: 0.
    """
    if kind == "cpu" and convolved >= _CONVOLVED:
        return f"convolutions with {convolved / 1e6:,.0f} million products per batch are faster on a CPU this way"
    if sum(p.numel() for p in module.parameters() if p.requires_grad) < _LARGE:
        return ""
    layers = [m for m in module.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    wide = [layer for layer in convolutions if layer.groups == 1 and layer.in_channels >= _WIDE]
    if len(wide) >= 4:
        return f"{len(wide)} convolutions of {_WIDE} channels or more are faster this way"
    norms = [layer for layer in layers if isinstance(layer, nn.LayerNorm | nn.GroupNorm)]
    if len(norms) >= _NORMS:
        gain = "take less memory and a shorter first round" if kind == "cpu" else "are faster on a GPU"
        return f"models with {len(norms)} normalization layers {gain} this way"
    return ""


def over_models(function: Callable[..., Any], at_once: AtOnce) -> Callable[..., Any]:
    """Returns a function of stacks of arguments, one row per model, that gives stacks of what `function` gives for one.

    Args:
        function: A function of tensors.
        at_once: How many models are evaluated at once; None for all.
    """
    stacked = vmap(function)
    if at_once is None:
        return stacked

    def in_portions(*arguments: Any) -> Any:
        outcomes = []
        for first in range(0, trees.length(arguments[0]), at_once):
            if at_once == 1:
                outcome = function(*(trees.at(argument, first) for argument in arguments))
                outcomes.append(tree_map(lambda t: t.unsqueeze(0), outcome))
            else:
                outcomes.append(stacked(*(trees.at(a, slice(first, first + at_once)) for a in arguments)))
        return outcomes[0] if len(outcomes) == 1 else tree_map(lambda *parts: torch.cat(parts), *outcomes)

    return in_portions


def replayed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a function of stacks whose operations are traced once and replayed, on a CPU."""
    traced = Traced(lambda *arguments: (function(*arguments),))
    return lambda *arguments: traced(*arguments)[0]


def gradients(
    model: FlatModel,
    loss: Callable[..., Any],
    at_once: AtOnce,
    models: int,
    has_aux: bool = False,
    trace: bool = False,
    precision: Precision = "float32",
) -> Callable[..., Any]:
    """Returns a function (rows, inputs, targets, keys, ...) -> (gradients, losses), one row per model.

    Args:
        model: The model that `loss` evaluates.
        loss: (row, inputs, targets, key, ...) -> a scalar, or with `has_aux` a scalar and more.
        at_once: How many models are evaluated at once; None for all.
        models: How many models there are.
        has_aux: Whether `loss` returns more than a scalar; it is then returned with the losses. Default: False.
        trace: Whether to trace the operations of a stack once and replay them, on a CPU. Default: False.
        precision: "tf32" multiplies float32 matrices in TF32; the model itself knows of "bf16". Default: "float32".
    """
    if at_once == 1:
        function: Callable[..., Any] = _OneByOne(model, loss, has_aux)
    else:
        at_once = None if at_once is None or at_once >= models else at_once
        loss = convolutions.of_many(loss, at_once or models) if model.device.type == "cuda" else loss
        function = vmap(grad_and_value(loss, has_aux=has_aux))
        function = Traced(function) if trace and not has_aux else function
        function = function if at_once is None else functools.partial(_in_portions, function, at_once)
    if precision == "tf32":
        function = _in_tf32(function)
    opaque = model.device.type == "cuda" and (at_once == 1 or precision == "tf32") and not has_aux
    return Opaque(function) if opaque else function


def _in_portions(stacked: Callable[..., Any], at_once: int, rows: Tensor, *batch: Tree) -> Any:
    found, losses = torch.empty_like(rows), []
    for first in range(0, len(rows), at_once):
        here = slice(first, first + at_once)
        found[here], values = stacked(rows[here], *(trees.at(part, here) for part in batch))
        losses.append(values)
    return found, tree_map(lambda *parts: torch.cat(parts), *losses)


class _OneByOne:
    """Losses and gradients of one model after another, by ordinary automatic differentiation. It takes any module, and
    holds the activations of one model at a time."""

    def __init__(self, model: FlatModel, loss: Callable[..., Any], has_aux: bool):
        self._model, self._loss, self._has_aux = model, loss, has_aux
        self._room: Tensor | None = None  # for gradients
        self._checked = False  # whether the first call drew from no generator but the nodes' streams

    def __call__(self, rows: Tensor, *batch: Tree) -> Any:
        before = None if self._checked or not values_readable(rows) else GeneratorStates.now()
        found, values = self._room_like(rows), []
        with _side_streams(rows.device) as stream:
            for k, row in enumerate(rows):
                own = [trees.at(part, k) for part in batch]
                with stream(k):
                    values.append(self._model.with_gradient(self._loss, row, own, found[k], self._has_aux))
        if before is not None:
            refuse_moved(before)
            self._checked = True
        return found, tree_map(lambda *parts: torch.stack(parts), *values)

    def _room_like(self, rows: Tensor) -> Tensor:
        """Returns memory for gradients, written again in every round: a CPU clears every page of newly allocated
        memory, which for large models takes a tenth of a round or more. Memory that an algorithm still holds is left
        to it."""
        if not values_readable(rows):  # a GPU keeps its memory, and a replayed trace must not share it
            return torch.empty_like(rows)
        room = self._room
        if room is None or (room.shape, room.dtype) != (rows.shape, rows.dtype) or _owners(room) > 1:
            room = self._room = torch.empty_like(rows)
        return room.detach()


def _owners(tensor: Tensor) -> int:
    """Returns how many tensors share this tensor's memory, itself included."""
    memory = tensor.untyped_storage()  # an owner too
    return torch._C._storage_Use_Count(memory._cdata) - 1  # type: ignore[attr-defined]


@contextmanager
def _side_streams(device: torch.device) -> Iterator[Callable[[int], AbstractContextManager[Any]]]:
    """Yields a function that gives the stream of the k-th model: one model of usual size leaves most of a GPU idle."""
    if device.type != "cuda":
        yield lambda k: nullcontext()
        return
    here, streams = torch.cuda.current_stream(device), _streams_of(device)
    for stream in streams:
        stream.wait_stream(here)
    yield lambda k: torch.cuda.stream(streams[k % len(streams)])
    for stream in streams:
        here.wait_stream(stream)


@functools.cache
def _streams_of(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(_STREAMS)]


def _in_tf32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with products and convolutions of float32 in TF32. All else, such as mixing, is exact."""

    def changed(*arguments: Tensor) -> Any:
        places: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
        before = [place.fp32_precision for place in places]
        try:
            for place in places:
                place.fp32_precision = "tf32"
            return function(*arguments)
        finally:
            for place, value in zip(places, before):
                place.fp32_precision = value

    return changed


def refuse_moved(before: GeneratorStates, who: str = "the model, loss or augmentation") -> None:
    """Raises BadInput if a generator of the process was used since then."""
    if moved := before.moved():
        raise BadInput(
            f"{who} draws from the generator of {' and '.join(moved)}, so runs could not be repeated; a model may use "
            "torch's dropout layers, torch.rand, torch.randn, torch.bernoulli and the like, whose numbers fairmesh "
            "replaces by its own: make its random numbers of these; augment(inputs, draw) takes uniforms from "
            "draw(*shape)"
        )


class _NotImported(ModuleType):
    """Stands for TorchDynamo where it was never imported: then compiled autograd is off. All else imports it."""

    compiled_autograd = SimpleNamespace(_disable=nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def _without_dynamo() -> Iterator[None]:
    """Within it, `torch.func` does not import TorchDynamo only to switch off its compiled autograd."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    stand_in = _NotImported("torch._dynamo")
    torch.__dict__["_dynamo"] = stand_in
    try:
        yield
    finally:
        if torch.__dict__.get("_dynamo") is stand_in:  # else it was imported in the meantime
            del torch.__dict__["_dynamo"]


def grad_and_value(function: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Returns what `torch.func.grad_and_value` gives."""
    differentiated = torch.func.grad_and_value(function, has_aux=has_aux)

    def call(*arguments: Any) -> Any:
        with _without_dynamo():
            return differentiated(*arguments)

    return call
