"""BatchNorm at nodes with different data: what its statistics are, by a policy that the user names.

A layer's running statistics are coordinates of its node's own row. In place of a gradient, these coordinates get the
difference to the statistics of the batch. So one pass gives gradients and statistics, stacked or one model at a time,
and nothing is changed in place.
"""

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fairmesh.errors import BadInput

BatchNormPolicy = Literal["refuse", "frozen", "local", "shared", "convert"]
STATISTICS = ("running_mean", "running_var")

POLICIES = (
    '"frozen" (statistics as given, for pretrained networks), "local" (statistics and affine parameters stay at the '
    'site, as in FedBN), "shared" (affine parameters are shared, statistics are averaged for the common model) or '
    '"convert" (nn.GroupNorm instead)'
)
_GROUPS = 32  # of channels, at most


def layers_of(module: nn.Module) -> dict[str, _BatchNorm]:
    """Returns the BatchNorm layers of a module by their paths."""
    return {path: layer for path, layer in module.named_modules() if isinstance(layer, _BatchNorm)}


def under_policy(module: nn.Module, policy: BatchNormPolicy, frozen: tuple[str, ...] = ()) -> nn.Module:
    """Returns a module whose BatchNorm layers obey a policy: those in training mode follow their site's data, and those
    in evaluation mode keep their statistics. It changes the module.

    Args:
        module: The user's module.
        policy: What to do with BatchNorm layers.
        frozen: Patterns of names; layers with such names keep their statistics whatever the policy is. Default: ().
    """
    for path, layer in layers_of(module).items():
        where = f"layer {path or 'itself'} ({type(layer).__name__})"
        if policy == "convert":
            if path:
                module.set_submodule(path, _group_norm(layer))
            else:
                module = _group_norm(layer)
            continue
        kept = any(fnmatchcase(f"{path}.{name}", pattern) for name in ("weight", *STATISTICS) for pattern in frozen)
        if kept or policy == "frozen":
            layer.eval()
        elif policy in ("local", "shared"):
            layer.train()
        if layer.running_mean is None:
            raise BadInput(
                f"{where} has no running statistics (track_running_stats=False), so one batch would decide how another "
                f'is judged; set track_running_stats=True, or choose batch_norm = "convert"'
            )
        if layer.training and policy == "refuse":
            raise BadInput(
                f"{where} keeps batch statistics, which nodes with different data cannot share as they are; call "
                f".eval() on pretrained layers, or choose batch_norm = {POLICIES}"
            )
        if layer.training and layer.momentum is None:
            raise BadInput(f"{where} has momentum=None; give it a number, such as 0.1, or choose another batch_norm")
    return module


def _group_norm(layer: _BatchNorm) -> nn.GroupNorm:
    """Returns a GroupNorm with the weights of a BatchNorm layer. Groups of images have two channels at least; vectors
    are one group, since two numbers normalised together keep only their order."""
    channels = layer.num_features
    most = 1 if isinstance(layer, nn.BatchNorm1d) else max(1, min(_GROUPS, channels // 2))
    groups = next(count for count in range(most, 0, -1) if channels % count == 0)
    made = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        made.weight, made.bias = layer.weight, layer.bias
    return made.train(layer.training)


class _Emit(torch.autograd.Function):
    """Passes a small tensor on, and gives the running statistics what they are to be moved by as their gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scale: Tensor, mean: Tensor, variance: Tensor, of_mean: Tensor, of_variance: Tensor) -> Tensor:
        return scale.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[3], inputs[4])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_mean, of_variance = ctx.saved_tensors
        return gradient, of_mean, of_variance, None, None


class SiteBatchNorm(nn.Module):
    """A BatchNorm layer whose running statistics are state of its node.

    Args:
        layer: The user's layer; its tensors are shared.
        path: Its path in the model.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, layer: _BatchNorm, path: str):
        super().__init__()
        self.path, self.eps, self.momentum = path, layer.eps, float(layer.momentum or 0.0)
        self.weight, self.bias = layer.weight, layer.bias
        for name in STATISTICS:
            self.register_buffer(name, getattr(layer, name))
        self.uses = 0  # of this layer in the current pass
        self.again = False  # whether a part of the pass is computed again, to save memory
        self._now: tuple[Tensor, Tensor] | None = None  # the statistics after the uses so far
        self.train(layer.training)

    def forward(self, inputs: Tensor) -> Tensor:
        normalise = torch.nn.functional.batch_norm
        if not self.training:
            return normalise(inputs, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        axes = [axis for axis in range(inputs.ndim) if axis != 1]
        if math.prod(inputs.shape[axis] for axis in axes) < 2:
            raise BadInput(
                f"layer {self.path} (BatchNorm) sees one number per channel, of which there is no variance; use "
                'batches of 2 samples or more, or batch_norm = "convert"'
            )
        if self.again and self.uses > 1:  # which of its uses is this?
            raise BadInput(
                f"layer {self.path} (BatchNorm) is used {self.uses} times in a part of the model that activation "
                "checkpointing computes again; give each use a layer of its own, or switch checkpointing off"
            )
        first = self._now is None or self.uses == 0 or self.again
        before = (self.running_mean, self.running_var) if first else self._now
        var, mean = torch.var_mean(inputs.detach().to(self.running_mean.dtype), axes, correction=1)
        apart = tuple(old.detach() - new for old, new in zip(before, (mean, var)))  # type: ignore[arg-type]
        if not self.again:
            self.uses += 1
            self._now = tuple(old.detach() - self.momentum * one for old, one in zip(before, apart))  # type: ignore
        scale = torch.ones_like(self.running_mean) if self.weight is None else self.weight
        scale = _Emit.apply(scale, self.running_mean, self.running_var, *apart)  # type: ignore[no-untyped-call]
        bias = torch.zeros_like(self.running_mean) if self.bias is None else self.bias
        return normalise(inputs, None, None, scale, bias, True, 0.0, self.eps)


def moments(statistics: Tensor, sizes: list[int]) -> Tensor:
    """Returns means and mean squares in place of means and variances: those of several sites can be averaged.

    Args:
        statistics: Means and variances of each layer in turn, (..., numbers).
        sizes: How many numbers each piece has: mean, variance, mean, variance, ...
    """
    return _with_seconds(statistics.double(), sizes, lambda mean, variance: variance + mean.square())


def statistics_of(moments: Tensor, sizes: list[int]) -> Tensor:
    """Returns means and variances from means and mean squares: the variance within sites and between them."""
    return _with_seconds(moments, sizes, lambda mean, squares: (squares - mean.square()).clamp(min=0.0))


def _with_seconds(numbers: Tensor, sizes: list[int], second: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Returns first and second moments of each layer, the second ones changed by a function of both."""
    pieces = numbers.split(sizes, dim=-1)
    return torch.cat([part for a, b in zip(pieces[::2], pieces[1::2]) for part in (a, second(a, b))], dim=-1)
