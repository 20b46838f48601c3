"""Sums of clipped gradients of units: by the gradient of every unit, or, for chains of dense layers, layer by layer."""

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
_ROUNDED = 1 << 14  # m n above, so that with a unit and without it two sums are rounded by 2^-9 of the clip at most
_LARGEST = 1e15
Factors = Callable[[Tensor], Tensor]  # norms of units' gradients (nodes, units) -> what each is multiplied with


class UnitBatch(NamedTuple):
    """The rows of units."""

    inputs: Tree  # (nodes, units, rows, ...)
    targets: Tree
    weights: Tensor  # what each row counts in its unit (nodes, units, rows)
    keys: Tensor  # of the model's public random numbers (nodes, units)


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
        scale = factors(_norms(gradients))
        scaled = torch.where((scale > 0).unsqueeze(-1), gradients, 0.0)
        return _summed(scale.to(rows.dtype).unsqueeze(-1), scaled).squeeze(1), losses

    def numbers(self, nodes: int, dim: int) -> int:
        return nodes * dim


class ByLayers(UnitGradients):
    """Computes norms and sums from the inputs and the gradients of each dense layer, so that no unit's own gradient is
    held: for one row, a dense layer's gradient is a product of these two. Of units of several rows, whose gradients may
    cancel, a norm that is computed in this way could be too small, and so the clip too large.

    Args:
        problem: The problem.
        model: Its model.
        layers: The chain, from `dense_chain`.
    """

    def __init__(self, problem: Prepared, model: FlatModel, layers: list[nn.Module]):
        self._layers, self._layout = layers, model.layout
        self._each = sample_losses_of(model, problem.loss)
        self._width = sum(
            layer.in_features + 2 * layer.out_features for layer in layers if isinstance(layer, nn.Linear)
        )

    def sums(self, rows: Tensor, batch: UnitBatch, factors: Factors) -> tuple[Tensor, Tensor]:
        (nodes, units, _), places = batch.weights.shape, iter(self._layout)
        x, read, made = batch.inputs.flatten(1, 2).to(rows.dtype), [], []
        with torch.enable_grad():
            for layer in self._layers:
                if isinstance(layer, nn.Linear):
                    x = x.flatten(2) if x.ndim > 3 else x
                    read.append(x.detach())
                    x = self._linear(layer, rows, x, places).requires_grad_()
                    made.append(x)
                else:
                    x = x.flatten(2) if isinstance(layer, nn.Flatten) else layer(x)
            losses = self._each(x.flatten(0, 1), batch.targets.flatten(0, 2)).view(nodes, units)
            slopes = torch.autograd.grad(losses.sum(), made)
        dense = [layer for layer in self._layers if isinstance(layer, nn.Linear)]
        squares = torch.zeros(nodes, units, dtype=torch.float64, device=rows.device)
        for layer, a, g in zip(dense, read, slopes):
            squares += (_norms(a).square() + (layer.bias is not None)) * _norms(g).square()
        scale, parts = factors(squares.sqrt()).unsqueeze(-1), []
        for layer, a, g in zip(dense, read, slopes):
            scaled = torch.where(scale > 0, g * scale, 0.0).to(rows.dtype)
            parts.append(_summed(scaled, torch.where(scale > 0, a, 0.0)).flatten(1))
            if layer.bias is not None:
                parts.append(scaled.sum(dim=1, dtype=torch.float64))
        return torch.cat(parts, dim=1), losses.detach()

    @staticmethod
    def _linear(layer: nn.Linear, rows: Tensor, x: Tensor, places: Any) -> Tensor:
        """Returns the outputs of a layer, whose parameters are the next ones in the models' rows."""
        _, shape, place = next(places)
        weight = rows[:, place].unflatten(1, shape).mT
        if layer.bias is None:
            return x @ weight
        _, _, place = next(places)
        return torch.baddbmm(rows[:, place].unsqueeze(1), x, weight)

    def numbers(self, nodes: int, dim: int) -> int:
        return nodes * self._width


def dense_chain(problem: Prepared, model: FlatModel) -> list[nn.Module] | None:
    """Returns the layers of a model that is a chain of dense layers and functions of single numbers, with a loss that
    fairmesh or torch defines per sample; None for other models."""
    module, loss, names = model.evaluated, problem.loss, list(model.layout.names)
    known = isinstance(loss, NamedLoss) or loss in (nn.functional.cross_entropy, squared_error)
    plain = problem.structured is None and problem.augmenter is None and problem.task not in ("masks", "several")
    layers = _flat(module) if known and plain else None
    if layers is None:
        return None
    dense = [layer for layer in layers if isinstance(layer, nn.Linear)]
    own = sum(1 + (layer.bias is not None) for layer in dense)
    all_trained = all(p.requires_grad for layer in dense for p in layer.parameters())
    first = next((k for k, layer in enumerate(layers) if isinstance(layer, nn.Linear)), 0)
    flat_input = trees.leaves(problem.example.inputs)[0].ndim == 2 or any(
        isinstance(layer, nn.Flatten) for layer in layers[:first]
    )
    return layers if dense and own == len(names) and all_trained and flat_input else None


def _flat(module: nn.Module) -> list[nn.Module] | None:
    """Returns the layers of nested `nn.Sequential`, each used once; None if there is another kind of layer."""
    if type(module) is nn.Sequential:
        parts = [_flat(child) for child in module]
        found = [layer for part in parts if part is not None for layer in part]
        repeated = len({id(layer) for layer in found}) < len(found)
        return None if repeated or any(part is None for part in parts) else found
    plain = type(module) in (nn.Linear, *_ELEMENTWISE)
    flat = type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    return [module] if plain or flat else None


def unit_gradients(problem: Prepared, model: FlatModel, rows_per_unit: int) -> UnitGradients:
    """Returns how the gradients of units are computed for a model."""
    layers = dense_chain(problem, model) if rows_per_unit == 1 else None
    return EveryUnit(problem, model) if layers is None else ByLayers(problem, model, layers)
