"""Convolutions in the way that is fastest for how models are evaluated (measured: benchmarks/notes.md).

On a GPU, vmap turns those of many small models into one grouped convolution. cuDNN is fast for layers with several
input channels, and slow for a first layer with one to three. Such a layer becomes a product of patches and weights if
there are many models, and is padded with channels of zeros to four if there are few.

On a CPU, models that are evaluated one by one cut kernels to the numbers that meet an input: in the last layers of a
ResNet-18 on images of 32 x 32 pixels, that is one of nine."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Out = TypeVar("Out")
_FEW_CHANNELS = 8
_MANY_MODELS = 64
_PADDED_TO = 4  # channels


class _FewChannels(TorchFunctionMode):
    """Computes 2-D convolutions with few input channels in the way that is fastest for this number of models."""

    def __init__(self, models: int):
        super().__init__()
        self._way = by_product if models >= _MANY_MODELS else _padded

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (nn.functional.conv2d, torch.conv2d) and (plain := _plain(*args, **kwargs)) is not None:
            return self._way(*plain)
        return function(*args, **kwargs)


def of_many(function: Callable[..., Out], models: int) -> Callable[..., Out]:
    """Returns the same function, to be run on a GPU by vmap for this number of models."""

    def changed(*arguments: Tensor) -> Out:
        with _FewChannels(models):
            return function(*arguments)

    return changed


class _Counted(TorchFunctionMode):
    """Counts the products of numbers in convolutions whose weights are views of a row."""

    def __init__(self, row: Tensor):
        super().__init__()
        self._memory, self.products = row.untyped_storage().data_ptr(), 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in _CONVOLUTIONS:
            weight = args[1] if len(args) > 1 else (kwargs or {})["weight"]
            trained = weight.untyped_storage().data_ptr() == self._memory
            self.products += found.numel() * weight[0].numel() if trained else 0
        return found


_CONVOLUTIONS = {getattr(place, f"conv{n}d") for place in (torch, nn.functional) for n in (1, 2, 3)}


def products_in(model: Callable[[Tensor, Any], Any], row: Tensor, inputs: Any) -> int:
    """Returns how many products of numbers the convolutions of a model with this row's weights compute."""
    with torch.no_grad(), _Counted(row) as counted:
        model(row, inputs)
    return counted.products


def of_one_pixel(
    _: Any, function: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Returns a 2-D convolution, of one padded pixel with the one number of each kernel that meets it."""
    one_pixel = input.shape[-2:] == (1, 1) and weight.shape[-2:] != (1, 1)
    if one_pixel and not isinstance(padding, str) and _pair(dilation) == (1, 1):
        high, wide = _pair(padding)
        sizes = zip((high, wide), weight.shape[-2:], _pair(stride))
        if all(p < k and not (1 + 2 * p - k) // s for p, k, s in sizes):
            return function(input, weight[..., high : high + 1, wide : wide + 1], bias, groups=groups)
    return function(input, weight, bias, stride, padding, dilation, groups)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _padded(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    more = (0, 0, 0, 0, 0, -images.shape[1] % _PADDED_TO)
    return nn.functional.conv2d(nn.functional.pad(images, more), nn.functional.pad(weight, more), bias)


def _plain(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None] | None:  # fmt: skip
    """Returns padded inputs (batch, channels, height, width), weights and bias, or None if it cannot be a product."""
    if groups != 1 or _pair(stride) != (1, 1) or _pair(dilation) != (1, 1) or isinstance(padding, str):
        return None
    if input.ndim != 4 or weight.shape[1] >= _FEW_CHANNELS:
        return None
    high, wide = _pair(padding)
    return nn.functional.pad(input, (wide, wide, high, high)) if high or wide else input, weight, bias


def by_product(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns a convolution of stride 1 without padding, as one product of weights and all patches of all images."""
    batch, channels, height, width = images.shape
    outputs, _, kernel_height, kernel_width = weight.shape
    high, wide = height - kernel_height + 1, width - kernel_width + 1
    moved = images.transpose(0, 1)
    windows = [moved[:, :, i : i + high, j : j + wide] for i in range(kernel_height) for j in range(kernel_width)]
    patches = torch.stack(windows, dim=1).reshape(channels * kernel_height * kernel_width, batch * high * wide)
    result = (weight.flatten(1) @ patches).view(outputs, batch, high, wide).transpose(0, 1)
    return result if bias is None else result + bias[:, None, None]
