"""Sums of clipped gradients of units: by the gradient of every unit, or, for chains of plain layers, layer by layer."""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from fairmesh.losses import NamedLoss
from fairmesh.losses.builtin import squared_error
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree
from fairmesh.problems.flat_model import FlatModel
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.row_loss import losses_of_rows, sample_losses_of
from fairmesh.problems.stacking import grad_and_value, over_models

_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity),
)
_POOLING = (nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d)
_ROUNDED = 1 << 14  # m n below, so that with a unit and without it two sums are rounded by 2^-9 of the clip at most
_LARGEST = 1e15
Factors = Callable[[Tensor], Tensor]  # norms of units' gradients (nodes, units) -> what each is multiplied with


class UnitBatch(NamedTuple):
    """The rows of units."""

    inputs: Tree  # (nodes, units, rows, ...)
    targets: Tree
    weights: Tensor  # what each row counts in its unit (nodes, units, rows)
    keys: Tensor  # of the model's public random numbers (nodes, units)

    def at(self, nodes: slice, units: slice) -> "UnitBatch":
        """Returns some units of some nodes."""
        return UnitBatch(*(trees.at(part, (nodes, units)) for part in self))


class UnitGradients(ABC):
    """Computes the gradients of units. No unit's gradient depends on the rows of another one."""

    @abstractmethod
    def sums(self, rows: Tensor, batch: UnitBatch, factors: Factors) -> tuple[Tensor, Tensor]:
        """Returns the sums of the units' gradients, each times its factor, (nodes, dim) in doubles, and the units'
        losses (nodes, units).

        Args:
            rows: The models (nodes, dim).
            batch: The units' rows.
            factors: What makes the factors of the norms.
        """

    @abstractmethod
    def numbers(self, nodes: int, dim: int) -> int:
        """Returns how many numbers are held per unit."""


def _norms(rows: Tensor) -> Tensor:
    """Returns norms (...) in doubles. Sums of floats lose 0.1 % at a million parameters and 2 % at thirty millions, and
    squares of small ones vanish, so that a norm that is too small would let more pass than the clip. Norms beyond 1e15
    are infinite, so that their units count nothing: what is divided by them has few digits left in floats."""
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return torch.where(norms < _LARGEST, norms, torch.inf)


def _summed(scaled: Tensor, gradients: Tensor) -> Tensor:
    """Returns the sums (nodes, k, dim) over the units of products of (nodes, units, k) and (nodes, units, dim). A few
    units are summed in floats, and such sums in doubles: in sums of m of n units, each of norm c at most, rounding
    changes the result by less than m n c 2^-24."""
    few = max(1, _ROUNDED // scaled.shape[1])
    parts = zip(scaled.split(few, dim=1), gradients.split(few, dim=1))
    return functools.reduce(torch.add, ((a.mT @ b).double() for a, b in parts))


class EveryUnit(UnitGradients):
    """Computes the gradient of every unit by vmap: for any model that has one.

    Args:
        problem: The problem.
        model: Its model, on the device that computes.
    """

    def __init__(self, problem: Prepared, model: FlatModel):
        each = losses_of_rows(model, problem.loss, problem.augmenter)

        def of_unit(row: Tensor, inputs: Any, targets: Any, key: Tensor, weights: Tensor) -> Tensor:
            return each(row, inputs, targets, key, weights)[0]

        of_units = vmap(grad_and_value(of_unit), in_dims=(None, 0, 0, 0, 0))
        self._of_units = over_models(of_units, problem.at_once(model.device))

    def sums(self, rows: Tensor, batch: UnitBatch, factors: Factors) -> tuple[Tensor, Tensor]:
        gradients, losses = self._of_units(rows, batch.inputs, batch.targets, batch.keys, batch.weights)
        scale = factors(_norms(gradients)).unsqueeze(-1)
        return _summed(scale.to(rows.dtype), torch.where(scale > 0, gradients, 0.0)).squeeze(1), losses

    def numbers(self, nodes: int, dim: int) -> int:
        return nodes * dim


class _Dense:
    """A dense layer of all nodes. The gradient of a unit of one row is the product of what the layer has read and the
    slope of the loss, so its norm is the product of their norms.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Linear):
        self._bias = layer.bias is not None
        self.width = layer.in_features + 2 * layer.out_features  # numbers per unit

    def read(self, x: Tensor) -> Tensor:
        """Returns what the layer reads: (nodes, units, features)."""
        return x.flatten(2) if x.ndim > 3 else x

    def made(self, read: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the layer's outputs, from parameters with one row per node."""
        return read @ weight.mT if bias is None else torch.baddbmm(bias.unsqueeze(1), read, weight.mT)

    def squares(self, read: Tensor, slopes: Tensor) -> tuple[Tensor, Any]:
        """Returns the squared norms of the units' gradients (nodes, units), and what `summed` needs."""
        return (_norms(read).square() + self._bias) * _norms(slopes).square(), (read, slopes)

    def summed(self, kept: Any, scale: Tensor) -> list[Tensor]:
        """Returns the sums of the units' gradients times a factor (nodes, units) each: of weight and bias."""
        read, slopes = kept
        counts = scale.unsqueeze(-1) > 0
        scaled = torch.where(counts, slopes * scale.unsqueeze(-1), 0.0).to(read.dtype)
        parts = [_summed(scaled, torch.where(counts, read, 0.0)).flatten(1)]
        return [*parts, scaled.sum(dim=1, dtype=torch.float64)] if self._bias else parts


class _Convolution:
    """A 2-D convolution of all nodes, as a dense layer over patches of the images.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Conv2d):
        self._layer, self._bias = layer, layer.bias is not None
        self.width = 0  # known when it has read

    def read(self, x: Tensor) -> Tensor:
        """Returns the patches of the images: (nodes, units, channels and places in the kernel, places)."""
        (up, left), (down, right) = self._layer.stride, self._layer.kernel_size
        high, wide = (int(size) for size in self._layer.padding)
        x = nn.functional.pad(x, (wide, wide, high, high)) if high or wide else x
        rows, columns = (x.shape[-2] - down) // up + 1, (x.shape[-1] - right) // left + 1
        windows = [
            x[..., i : i + (rows - 1) * up + 1 : up, j : j + (columns - 1) * left + 1 : left]
            for i in range(down)
            for j in range(right)
        ]
        self._form = rows, columns
        patches = torch.stack(windows, dim=3)  # (nodes, units, channels, places in the kernel, rows, columns)
        return patches.flatten(4).flatten(2, 3)

    def made(self, read: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the layer's outputs (nodes, units, channels, rows, columns)."""
        outputs = weight.flatten(2).unsqueeze(1) @ read
        outputs = outputs if bias is None else outputs + bias[:, None, :, None]
        return outputs.unflatten(-1, self._form)

    def squares(self, read: Tensor, slopes: Tensor) -> tuple[Tensor, Any]:
        """Returns the squared norms of the units' gradients (nodes, units), and these gradients."""
        slopes = slopes.flatten(3)
        gradients = [(slopes @ read.mT).flatten(2)]
        gradients += [slopes.sum(dim=-1)] if self._bias else []
        return functools.reduce(torch.add, (_norms(part).square() for part in gradients)), gradients

    def summed(self, kept: Any, scale: Tensor) -> list[Tensor]:
        """Returns the sums of the units' gradients times a factor (nodes, units) each: of weight and bias."""
        scale = scale.unsqueeze(-1)
        factors = scale.to(kept[0].dtype)
        return [_summed(factors, torch.where(scale > 0, part, 0.0)).squeeze(1) for part in kept]


class ByLayers(UnitGradients):
    """Computes norms and sums layer by layer, from what each layer reads and the slopes of the losses at its outputs.
    No unit's own gradient of a dense layer is held. Of units of several rows, whose gradients may cancel, a norm that
    is computed in this way could be too small, and so the clip too large.

    Args:
        problem: The problem.
        model: Its model.
        layers: The chain, from `chain_of_layers`.
    """

    def __init__(self, problem: Prepared, model: FlatModel, layers: list[nn.Module]):
        self._chain = [_KINDS[type(layer)](layer) if type(layer) in _KINDS else layer for layer in layers]
        self._layout, self._each = model.layout, sample_losses_of(model, problem.loss)
        self._biased = [getattr(layer, "bias", None) is not None for layer in layers]
        self._width = _numbers_of(layers, trees.leaves(problem.example.inputs)[0].shape[1:])

    def sums(self, rows: Tensor, batch: UnitBatch, factors: Factors) -> tuple[Tensor, Tensor]:
        (nodes, units, _), places = batch.weights.shape, iter(self._layout)
        x, read, made, kinds = batch.inputs.flatten(1, 2).to(rows.dtype), [], [], []
        with torch.enable_grad():
            for layer, biased in zip(self._chain, self._biased):
                if isinstance(layer, nn.Module):
                    x = layer(x.flatten(0, 1)).unflatten(0, (nodes, units))
                    continue
                weight, bias = _taken(rows, places), _taken(rows, places) if biased else None
                seen = layer.read(x)
                x = layer.made(seen, weight, bias)
                x = x if x.requires_grad else x.requires_grad_()
                kinds.append(layer)
                read.append(seen.detach())
                made.append(x)
            losses = self._each(x.flatten(0, 1), batch.targets.flatten(0, 2)).view(nodes, units)
            slopes = torch.autograd.grad(losses.sum(), made)
        found = [layer.squares(a, g) for layer, a, g in zip(kinds, read, slopes)]
        scale = factors(torch.stack([squares for squares, _ in found]).sum(dim=0).sqrt())
        parts = [part for layer, (_, kept) in zip(kinds, found) for part in layer.summed(kept, scale)]
        return torch.cat(parts, dim=1), losses.detach()

    def numbers(self, nodes: int, dim: int) -> int:
        return nodes * self._width


_KINDS: dict[type, Any] = {nn.Linear: _Dense, nn.Conv2d: _Convolution}


def _taken(rows: Tensor, places: Any) -> Tensor:
    """Returns the next parameter of all nodes."""
    _, shape, place = next(places)
    return rows[:, place].unflatten(1, shape)


def _numbers_of(layers: list[nn.Module], form: torch.Size) -> int:
    """Returns how many numbers a chain holds per unit: what its layers read and make, and gradients of convolutions."""
    x, numbers = torch.zeros(1, *form, device="meta"), 0
    for layer in layers:
        made = copy.deepcopy(layer).to("meta")(x)
        if isinstance(layer, nn.Conv2d):
            numbers += layer.weight[0].numel() * made[0, 0].numel() + layer.weight.numel()
        numbers += x.numel() + 2 * made.numel()
        x = made
    return numbers


def chain_of_layers(problem: Prepared, model: FlatModel) -> list[nn.Module] | None:
    """Returns the layers of a model that is a chain of dense layers, plain 2-D convolutions, pooling and functions of
    single numbers, with a loss that fairmesh or torch defines per sample; None for other models."""
    module, loss, names = model.evaluated, problem.loss, list(model.layout.names)
    known = isinstance(loss, NamedLoss) or loss in (nn.functional.cross_entropy, squared_error)
    plain = problem.structured is None and problem.augmenter is None and problem.task not in ("masks", "several")
    layers = _flat(module) if known and plain else None
    if layers is None:
        return None
    trained = [layer for layer in layers if type(layer) in _KINDS]
    own = sum(1 + (layer.bias is not None) for layer in trained)
    all_trained = all(p.requires_grad for layer in trained for p in layer.parameters())
    flat = trees.leaves(problem.example.inputs)[0].ndim == 2
    for layer in layers:  # a dense layer reads one vector per row, and all else a whole image
        if type(layer) is nn.Linear and not flat:
            return None
        flat = flat or type(layer) is nn.Flatten
    return layers if trained and own == len(names) and all_trained else None


def _flat(module: nn.Module) -> list[nn.Module] | None:
    """Returns the layers of nested `nn.Sequential`, each used once; None if there is another kind of layer."""
    if type(module) is nn.Sequential:
        parts = [_flat(child) for child in module]
        found = [layer for part in parts if part is not None for layer in part]
        repeated = len({id(layer) for layer in found}) < len(found)
        return None if repeated or any(part is None for part in parts) else found
    known = type(module) in (nn.Linear, *_ELEMENTWISE, *_POOLING) or (
        isinstance(module, nn.Conv2d) and _is_plain(module)
    )
    if getattr(module, "inplace", False):  # what it would write over is what the layer before has made
        module = copy.copy(module)
        vars(module)["inplace"] = False
    flat = type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    return [module] if known or flat else None


def _is_plain(layer: nn.Conv2d) -> bool:
    zeros = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is nn.Conv2d and layer.groups == 1 and layer.dilation == (1, 1) and zeros


def unit_gradients(problem: Prepared, model: FlatModel, rows_per_unit: int) -> UnitGradients:
    """Returns how the gradients of units are computed for a model."""
    layers = chain_of_layers(problem, model) if rows_per_unit == 1 else None
    return EveryUnit(problem, model) if layers is None else ByLayers(problem, model, layers)
