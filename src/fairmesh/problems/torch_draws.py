"""torch's own random functions, drawing from a node's stream while its model runs.

Dropout, stochastic depth, attention dropout and noise then depend on seed, round and node only. They do not depend on
placement, device or how many models are evaluated at once."""

import itertools
import math
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from fairmesh.errors import BadInput
from fairmesh.numerics import random_streams
from fairmesh.problems.convolutions import of_one_pixel

_SELU_FLOOR = -1.7580993408473766  # what alpha dropout puts in place of a dropped number: -scale * alpha of SELU


class TorchDraws(TorchFunctionMode):
    """Answers calls of torch's random functions with numbers from the stream of a key. The k-th draw of a pass has its
    own numbers.

    Args:
        key: The key.
        one_by_one: Whether the model runs by itself on a CPU, where convolutions of one pixel are cut. Default: False.
    """

    def __init__(self, key: Tensor, one_by_one: bool = False):
        super().__init__()
        self._key, self._draws = key, itertools.count()
        self._ways = _ONE_BY_ONE if one_by_one else _WAYS  # in this mode: a mode more costs time at every call

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        way = self._ways.get(function)
        if way is not None:
            return way(self, function, *args, **_from_the_stream(function, kwargs))
        return function(*args, **kwargs)

    def uniforms(self, shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Tensor:
        """Returns uniform numbers in [0, 1) of a shape."""
        if _within_checkpoint():
            raise draw_computed_again()
        one = torch.zeros(1, dtype=torch.int64, device=self._key.device)
        key = random_streams.keys(self._key, "torch", next(self._draws), one).squeeze(-1)
        drawn = random_streams.uniform(key, math.prod(shape), dtype if dtype.is_floating_point else torch.float32)
        return drawn.reshape(tuple(shape)).to(device=device)

    def normals(self, shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Tensor:
        """Returns standard normal numbers of a shape."""
        centred = self.uniforms(shape, dtype, device) * 2.0 + (2.0**-24 - 1.0)  # in (-1, 1), never at its ends
        return torch.erfinv(centred) * math.sqrt(2.0)


def draw_computed_again() -> BadInput:
    return BadInput(
        "the model draws random numbers in a part that activation checkpointing computes again, where they would be "
        "others; use nn.Dropout layers there, each once in a pass, or switch checkpointing off"
    )


def _within_checkpoint() -> bool:
    """Returns whether torch's activation checkpointing runs this code. Gradients compute it again, without a mode."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


_Way = Callable[..., Any]  # (the draws, the function that was called, its arguments) -> its result
_WAYS: dict[Any, _Way] = {}


def _answers(*functions: Any) -> Callable[[_Way], _Way]:
    def register(way: _Way) -> _Way:
        _WAYS.update(dict.fromkeys(functions, way))
        return way

    return register


def _from_the_stream(function: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a draw. Raises BadInput if it is asked for from a generator of the user's own, whose
    state would go from one node to the next."""
    for name in ("generator", "out"):
        if settings.get(name) is not None:
            raise BadInput(
                f"the model calls torch.{function.__name__} with {name}=..., so its numbers cannot come from the "
                "node's stream; leave that argument out"
            )
    return {name: value for name, value in settings.items() if name not in ("generator", "out")}


def _shape(size: Sequence[Any]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


def _like(tensor: Tensor, dtype: torch.dtype | None = None, device: Any = None) -> tuple[Any, torch.dtype, Any]:
    return tensor.shape, dtype or tensor.dtype, tensor.device if device is None else device


@_answers(torch.rand, torch.randn)
def _of_size(
    draws: TorchDraws, function: Any, *sizes: Any, size: Any = None, dtype: torch.dtype | None = None,
    device: Any = None, requires_grad: bool = False, **form: Any,
) -> Tensor:  # fmt: skip
    draw = draws.normals if function is torch.randn else draws.uniforms
    drawn = draw(_shape(sizes if size is None else (size,)), dtype or torch.get_default_dtype(), device)
    return drawn.requires_grad_() if requires_grad else drawn


@_answers(torch.randint)
def _randint(
    draws: TorchDraws, function: Any, *bounds: Any, low: int = 0, high: int = 0, size: Any = None,
    dtype: torch.dtype = torch.int64, device: Any = None, **form: Any,
) -> Tensor:  # fmt: skip
    *numbers, shape = bounds if size is None else (*bounds, size)
    *lowest, beyond = numbers or [high]
    low = lowest[0] if lowest else low
    return (low + (draws.uniforms(shape, torch.float64, device) * (beyond - low)).floor()).to(dtype)


_SIZED = {torch.rand_like: torch.rand, torch.randn_like: torch.randn, torch.randint_like: torch.randint}


@_answers(*_SIZED)
def _of_likeness(
    draws: TorchDraws, function: Any, input: Tensor, *bounds: int, dtype: torch.dtype | None = None,
    device: Any = None, **form: Any,
) -> Tensor:  # fmt: skip
    size, dtype, device = _like(input, dtype, device)
    sized = _SIZED[function]
    return _WAYS[sized](draws, sized, *bounds, size=size, dtype=dtype, device=device, **form)


@_answers(torch.randperm)
def _randperm(
    draws: TorchDraws, function: Any, n: int, *, dtype: Any = torch.int64, device: Any = None, **form: Any
) -> Tensor:
    return draws.uniforms((n,), torch.float64, device).argsort(stable=True).to(dtype)


@_answers(torch.bernoulli, Tensor.bernoulli)
def _bernoulli(draws: TorchDraws, function: Any, input: Tensor, p: Any = None) -> Tensor:
    return (draws.uniforms(*_like(input)) < (input if p is None else p)).to(input.dtype)


@_answers(torch.normal)
def _normal(
    draws: TorchDraws, function: Any, mean: Any = 0.0, std: Any = 1.0, size: Any = None, *,
    dtype: torch.dtype | None = None, device: Any = None, **form: Any,
) -> Tensor:  # fmt: skip
    if size is None:
        tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
        size = torch.broadcast_shapes(*(t.shape for t in tensors))
        dtype, device = tensors[0].dtype, tensors[0].device
    return mean + std * draws.normals(tuple(size), dtype or torch.get_default_dtype(), device)


def _fills(values: Callable[..., Tensor]) -> _Way:
    """Returns how a tensor is filled with what a function of the draws and the tensor gives."""

    def way(draws: TorchDraws, function: Any, target: Tensor, *arguments: Any, **settings: Any) -> Tensor:
        with torch.no_grad():
            return target.copy_(values(draws, target, *arguments, **settings))

    return way


@_answers(Tensor.uniform_)
@_fills
def _uniform_(draws: TorchDraws, target: Tensor, low: float = 0.0, to: float = 1.0, **form: Any) -> Tensor:
    low = form.get("from", low)
    return low + (to - low) * draws.uniforms(*_like(target))


@_answers(Tensor.normal_)
@_fills
def _normal_(draws: TorchDraws, target: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return mean + std * draws.normals(*_like(target))


@_answers(Tensor.exponential_)
@_fills
def _exponential_(draws: TorchDraws, target: Tensor, lambd: float = 1.0) -> Tensor:
    return -torch.log1p(-draws.uniforms(*_like(target))) / lambd


@_answers(Tensor.bernoulli_)
@_fills
def _bernoulli_(draws: TorchDraws, target: Tensor, p: Any = 0.5) -> Tensor:
    return (draws.uniforms(*_like(target)) < p).to(target.dtype)


@_answers(torch.empty, torch.empty_like, Tensor.new_empty)
def _empty(draws: TorchDraws, function: Any, *arguments: Any, **form: Any) -> Tensor:
    """Under vmap, an empty tensor has one row per model, so that it can be filled with what each model draws."""
    made = function(*arguments, **form)
    if not torch._C._functorch.is_functorch_wrapped_tensor(draws._key):  # type: ignore[attr-defined]
        return made
    return made.zero_() + (draws._key * 0).to(device=made.device, dtype=made.dtype)


@_answers(F.one_hot)
def _one_hot(draws: TorchDraws, function: Any, tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Under vmap, torch's own function would read the values of the labels."""
    if num_classes < 0 or not torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # type: ignore[attr-defined]
        return function(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def _kept(draws: TorchDraws, inputs: Tensor, p: float, spatial: int) -> Tensor:
    """Returns where dropout keeps its input: each number, or whole channels where there are spatial axes."""
    shape = inputs.shape[: inputs.ndim - spatial]
    return (draws.uniforms(shape, inputs.dtype, inputs.device) >= p).reshape(*shape, *[1] * spatial)


def _replaced(inputs: Tensor, values: Tensor, inplace: bool) -> Tensor:
    return inputs.copy_(values) if inplace else values


def _dropped(draws: TorchDraws, inputs: Tensor, p: float, training: bool, inplace: bool, spatial: int = 0) -> Tensor:
    if not training or p == 0:
        return inputs
    return _replaced(inputs, inputs * _kept(draws, inputs, p, spatial) / (1.0 - p or 1.0), inplace)


_SPATIAL_AXES = {F.dropout: 0, torch.dropout: 0, torch.dropout_: 0, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}


@_answers(*_SPATIAL_AXES)
def _dropout(
    draws: TorchDraws, function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False,
    *, train: bool = True,
) -> Tensor:  # fmt: skip
    inplace = inplace or function is torch.dropout_
    return _dropped(draws, input, p, training and train, inplace, _SPATIAL_AXES[function])


@_answers(F.alpha_dropout, F.feature_alpha_dropout)
def _alpha_dropout(
    draws: TorchDraws, function: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """Returns alpha dropout, which keeps mean and variance of what a SELU gives."""
    if not training or p == 0:
        return input
    kept = _kept(draws, input, p, max(0, input.ndim - 2) if function is F.feature_alpha_dropout else 0)
    if p == 1:
        return _replaced(input, input * 0.0, inplace)
    scale = ((1.0 - p) * (1.0 + p * _SELU_FLOOR**2)) ** -0.5
    values = scale * (torch.where(kept, input, _SELU_FLOOR) - p * _SELU_FLOOR)
    return _replaced(input, values, inplace)


@_answers(F.rrelu, torch.rrelu, torch.rrelu_)
def _rrelu(
    draws: TorchDraws, function: Any, input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3,
    training: bool = False, inplace: bool = False,
) -> Tensor:  # fmt: skip
    """Returns a leaky ReLU. In training mode the slope of each negative number is drawn between two bounds."""
    if not training:
        return function(input, lower, upper)
    slopes = lower + (upper - lower) * draws.uniforms(*_like(input))
    return _replaced(input, torch.where(input <= 0, input * slopes, input), inplace or function is torch.rrelu_)


@_answers(F.fractional_max_pool2d, F.fractional_max_pool3d)
def _fractional_max_pool(draws: TorchDraws, function: Any, input: Tensor, *arguments: Any, **settings: Any) -> Any:
    axes = 2 if function is F.fractional_max_pool2d else 3
    if settings.get("_random_samples") is None:
        batch = len(input) if input.ndim == axes + 2 else 1
        shape = (batch, input.shape[-axes - 1], axes)
        settings["_random_samples"] = draws.uniforms(shape, input.dtype, input.device)
    return function(input, *arguments, **settings)


@_answers(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def _recurrent(draws: TorchDraws, function: Any, *arguments: Any) -> tuple[Tensor, ...]:
    """Runs recurrent layers one by one, with dropout between them by the node's stream."""
    first = 2 if isinstance(arguments[3], list | tuple) else 1  # of a packed sequence: (data, sizes of batches, ...)
    states, weights, biases, layers, p, training, both_ways = arguments[first : first + 7]
    if not training or p == 0 or layers == 1:
        return function(*arguments)
    lstm = function is torch.lstm  # which has two states, hidden and cell
    starts = list(zip(*(part.chunk(layers) for part in states))) if lstm else states.chunk(layers)
    outputs, ends, per_layer = arguments[0], [], len(weights) // layers
    for layer in range(layers):
        inputs = _dropped(draws, outputs, p, True, False) if layer else outputs
        mine = weights[layer * per_layer : (layer + 1) * per_layer]
        settings = (biases, 1, 0.0, True, both_ways, *arguments[first + 7 :])
        outputs, *end = function(inputs, *arguments[1:first], starts[layer], mine, *settings)
        ends.append(end)
    return outputs, *(torch.cat(parts) for parts in zip(*ends))


@_answers(F.scaled_dot_product_attention)
def _attention(
    draws: TorchDraws, function: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, **settings: Any,
) -> Tensor:  # fmt: skip
    """Returns attention as torch's documentation defines it, with its weights dropped by the node's stream."""
    if dropout_p == 0:
        return function(query, key, value, attn_mask, dropout_p, is_causal, **settings)
    scale = settings.get("scale")
    if settings.get("enable_gqa"):
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return _dropped(draws, scores.softmax(dim=-1), dropout_p, True, False) @ value


@_answers(F.multi_head_attention_forward, F.gumbel_softmax)
def _of_parts(draws: TorchDraws, function: Any, *arguments: Any, **settings: Any) -> Any:
    """Runs the body of a function of torch that calls others, so that these are answered too. torch would run it
    without a mode."""
    inside = function.__globals__ | dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False
    )
    body = types.FunctionType(function.__code__, inside, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    with draws:
        return body(*arguments, **settings)


_ONE_BY_ONE = _WAYS | {F.conv2d: of_one_pixel, torch.conv2d: of_one_pixel}
