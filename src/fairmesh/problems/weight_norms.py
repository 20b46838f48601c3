"""Layers whose weight is computed before each use: spectral norm as a function of the weight alone, and copies of
modules with hooks of torch's old `spectral_norm` and `weight_norm`.

torch's spectral norm estimates the largest singular value by one step of a power iteration per pass, and keeps its
vectors u and v in buffers from one pass to the next. Here it iterates to convergence in every pass and keeps nothing.
So a node's loss stays a function of its parameters, and the average of several nodes' models has a norm of its own.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm as _OldSpectralNorm
from torch.nn.utils.weight_norm import WeightNorm as _OldWeightNorm

_SQUARINGS, _STEPS = 8, 4
ITERATIONS = 2**_SQUARINGS * _STEPS  # of the power method


@torch.library.custom_op("fairmesh::singular_vectors", mutates_args=())
def singular_vectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the singular vectors u (..., rows) and v (..., columns) that belong to the largest singular value of a
    matrix (..., rows, columns), or of each matrix in a stack. A trace holds it as one operation.

    It is a power iteration of a fixed number of steps from a fixed start, by products of matrices only, so that a GPU
    can capture it. The Gram matrix is squared several times: then one product stands for many steps. Where the largest
    singular values are nearly equal, u' matrix v may be too low by about 0.1 %. A matrix of zeros has no such vectors,
    and gives NaN, as torch's spectral norm does.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if tall else matrix
    with torch.autocast(matrix.device.type, enabled=False):
        wide = wide / torch.linalg.matrix_norm(wide, keepdim=True)
        power = wide @ wide.mT
        for _ in range(_SQUARINGS):
            power = power / torch.linalg.matrix_norm(power, keepdim=True)
            power = power @ power
        power = power / torch.linalg.matrix_norm(power, keepdim=True)
        start = torch.arange(power.shape[-1], dtype=matrix.dtype, device=matrix.device)
        short = (1.5 + start.cos()).unsqueeze(-1)  # orthogonal to no vector that a weight is likely to have
        for _ in range(_STEPS):
            short = power @ short
        short, long = (
            (vector / torch.linalg.matrix_norm(vector, keepdim=True)).squeeze(-1) for vector in (short, wide.mT @ short)
        )
    return (long, short) if tall else (short, long)


@singular_vectors.register_fake
def _shapes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(matrix[..., 0]), torch.empty_like(matrix[..., 0, :])


@singular_vectors.register_vmap
def _of_stack(info: object, in_dims: tuple[int, ...], matrix: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    return singular_vectors(matrix.movedim(in_dims[0], 0)), (0, 0)


class SpectralNorm(nn.Module):
    """torch's parametrization `spectral_norm` without a state.

    Args:
        dim: The axis of the weight that counts the rows of its matrix.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def vectors(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns u and v of a weight, as constants."""
        return singular_vectors(self._matrix(weight.detach()))

    def forward(self, weight: Tensor) -> Tensor:
        u, v = self.vectors(weight)
        with torch.autocast(weight.device.type, enabled=False):
            return weight / (u @ self._matrix(weight) @ v)

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.movedim(self.dim, 0).flatten(1)


class _Hook:
    """The hook of torch's old `spectral_norm` without a state."""

    def __init__(self, name: str, dim: int):
        self.name, self.norm = name, SpectralNorm(dim)

    def original(self, layer: nn.Module) -> Tensor:
        found: Tensor = getattr(layer, f"{self.name}_orig")
        return found

    def __call__(self, layer: nn.Module, inputs: object) -> None:
        setattr(layer, self.name, self.norm(self.original(layer)))


def replace_spectral_norms(module: nn.Module) -> int:
    """Makes torch's spectral norms in training mode functions of the weight alone, and returns how many there are."""
    count = 0
    for path, layer in list(module.named_modules()):
        if isinstance(layer, ParametrizationList):
            for name, norm in layer.named_children():
                if type(norm) is _SpectralNorm and norm.training and hasattr(norm, "_u"):  # a vector needs no state
                    module.set_submodule(f"{path}.{name}", SpectralNorm(norm.dim))
                    count += 1
        for key, hook in _hooks(layer):
            if type(hook) is _OldSpectralNorm and layer.training:
                layer._forward_pre_hooks[key] = _Hook(hook.name, hook.dim)
                count += 1
    return count


def buffers_of_spectral_norms(module: nn.Module) -> dict[str, Tensor]:
    """Returns u and v of a module in which spectral norms were replaced, by the names of torch's buffers."""
    found: dict[str, Tensor] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, SpectralNorm):
            weight = _given(layer, module.get_submodule(path.rpartition(".")[0]))
            found[f"{path}._u"], found[f"{path}._v"] = layer.vectors(weight)
        for _, hook in _hooks(layer):
            if isinstance(hook, _Hook):
                name = f"{path}.{hook.name}" if path else hook.name
                found[f"{name}_u"], found[f"{name}_v"] = hook.norm.vectors(hook.original(layer))
    return found


def _given(norm: SpectralNorm, parametrizations: nn.Module) -> Tensor:
    """Returns the weight that a spectral norm gets, since other parametrizations may come before it."""
    given: list[Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    try:
        parametrizations()
    finally:
        handle.remove()
    return given[0]


def copied(module: nn.Module, kept: dict[int, Tensor] | None = None) -> nn.Module:
    """Returns a deep copy of a module. torch does not copy a weight that a hook has computed from trained parameters;
    the copy's hook computes it again before each use.

    Args:
        module: Any module.
        kept: Tensors that the copy has in common with the module, by their `id`. Default: None.
    """
    memo: dict[int, object] = dict(kept or {})
    for layer in module.modules():
        for _, hook in _hooks(layer):
            if isinstance(hook, _OldSpectralNorm | _OldWeightNorm | _Hook):
                computed = getattr(layer, hook.name)
                memo[id(computed)] = computed.detach().clone()
    return copy.deepcopy(module, memo)


def _hooks(layer: nn.Module) -> Iterator[tuple[int, object]]:
    return iter(list(layer._forward_pre_hooks.items()))
