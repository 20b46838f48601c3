"""A regularizer given as a function."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fairmesh.errors import BadInput
from fairmesh.regularizers.base import Regularizer, check_strength
from fairmesh.regularizers.simplex import (
    project_onto_simplex,
)


@dataclass(frozen=True)
class Custom(Regularizer):
    """Any concave r, given as a function.

    Its inner maximum is found by an interior point method in float64.

    Args:
        function: r(lambda, prior) -> scalar tensor, for lambda and prior of shape (n,). It must be concave in lambda
            and twice differentiable by torch.
        strength: alpha, > 0. Default: 0.01.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> def minus_distance(weights, prior):
        ...     return -(weights - prior).square().sum()
        >>> regularizer = fm.regularizers.Custom(minus_distance, strength=2.0)
        >>> regularizer.value(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]))
        tensor([[-1.]])
    """

    function: Callable[[Tensor, Tensor], Tensor]
    strength: float = 0.01

    fast_maximiser: ClassVar[bool] = False

    def __post_init__(self):
        check_strength(self.strength)

    def check(self, prior: Tensor) -> None:
        """Raises BadInput if the function is not scalar, or not concave between random points of the simplex."""
        prior = prior.flatten()[: prior.shape[-1]].double()
        generator = torch.Generator().manual_seed(0)
        ends = torch.rand(32, 2, len(prior), generator=generator, dtype=torch.float64).clamp(min=1e-9).log().neg()
        ends = (ends / ends.sum(dim=-1, keepdim=True)).to(prior.device)
        for a, b in ends:
            values = [self.function(point, prior) for point in (a, b, (a + b) / 2)]
            if not isinstance(values[0], Tensor):
                raise BadInput(f"the regularizer must return a scalar tensor, got a {type(values[0]).__name__}")
            if any(value.ndim for value in values):
                raise BadInput(f"the regularizer must return a scalar, got shape {tuple(values[0].shape)}")
            left, right, middle = map(float, values)
            if not middle >= (left + right) / 2 - 1e-9 * (1 + abs(left) + abs(right)):
                raise BadInput(
                    "the regularizer is not concave: between two points of the simplex it is "
                    f"{middle:.6g}, below the mean {(left + right) / 2:.6g} of its ends; give r, not its negative"
                )

    def _over_rows(self, function: Callable, duals: Tensor, prior: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(duals.shape, prior.shape)
        rows = [t.expand(shape).reshape(-1, shape[-1]) for t in (duals, prior)]
        return torch.func.vmap(function)(*rows).unflatten(0, shape[:-1])

    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        return self.strength * self._over_rows(self.function, duals, prior).unsqueeze(-1)

    def gradient(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return self.strength * self._over_rows(torch.func.grad(self.function), duals, prior)

    def project(self, rows: Tensor, prior: Tensor) -> Tensor:
        return project_onto_simplex(rows)

    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        """Returns lambda* by a primal-dual interior point method in float64.

        With shadow prices z >= 0 of the constraints lambda >= 0 it takes Newton steps on gradient + z = level and
        lambda z = target -> 0 (Boyd and Vandenberghe, Convex Optimization, 11.7)."""
        scores = losses.double() / losses.shape[-1]
        p = prior.double().expand_as(scores)
        strength = torch.as_tensor(self.strength, dtype=torch.float64, device=scores.device)[..., None]
        own = torch.ones_like(p)

        def gradient(rows: Tensor) -> Tensor:
            return scores + self.gradient(rows, p, own)

        def residuals(rows: Tensor, prices: Tensor, level: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            return gradient(rows) + prices - level, rows * prices - target

        def size(parts: tuple[Tensor, Tensor]) -> Tensor:
            return torch.cat(parts, dim=-1).norm(dim=-1, keepdim=True)

        # Does not start at the prior, because the function is often a distance to it without a second derivative there.
        weights = p * torch.linspace(0.9, 1.1, losses.shape[-1], dtype=torch.float64, device=p.device)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        slopes = gradient(weights)
        spread = (slopes.amax(dim=-1, keepdim=True) - slopes.amin(dim=-1, keepdim=True)).clamp(min=1e-30)
        small = 1e-13 * (spread + slopes.abs().amax(dim=-1, keepdim=True))
        level = slopes.amax(dim=-1, keepdim=True) + spread
        prices = level - slopes
        for _ in range(100):
            gap = (weights * prices).sum(dim=-1, keepdim=True)
            target = 0.1 * gap / losses.shape[-1]
            dual, centre = residuals(weights, prices, level, target)
            running = (gap > small) | (dual.abs().amax(dim=-1, keepdim=True) > small)
            if not bool(running.any()):
                break
            hessians = strength * self._over_rows(torch.func.jacrev(torch.func.grad(self.function)), weights, p)
            right = torch.stack([dual - centre / weights, torch.ones_like(dual)], dim=-1)
            solved = torch.linalg.solve_ex(torch.diag_embed(prices / weights) - hessians, right).result
            rise = solved[..., 0].sum(dim=-1, keepdim=True) / solved[..., 1].sum(dim=-1, keepdim=True)
            moves = solved[..., 0] - rise * solved[..., 1]
            price_moves = -(centre + prices * moves) / weights
            shrinking = torch.cat([-moves / weights, -price_moves / prices], dim=-1).amax(dim=-1, keepdim=True)
            length = (0.99 / shrinking.clamp(min=0.99)) * running
            before, trial, pays = size((dual, centre)), (weights, prices, level), running
            for _ in range(25):  # halve the step until it improves enough
                trial = (weights + length * moves, prices + length * price_moves, level + length * rise)
                pays = size(residuals(*trial, target)) <= (1 - 0.01 * length) * before
                if bool(pays.all()):
                    break
                length = torch.where(pays, length, length / 2)
            if not bool((length * pays > 0).any()):
                break  # no improvement beyond rounding is left
            weights, prices, level = (torch.where(pays, new, old) for new, old in zip(trial, (weights, prices, level)))
        return (weights / weights.sum(dim=-1, keepdim=True)).to(losses.dtype)

    def max_stable_dual_step(self, prior: Tensor) -> float:
        return math.inf
