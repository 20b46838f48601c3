"""The adversary's side: weights on the simplex, the regularizers that hold them near the prior, the exact worst case.

The objective is g(theta, lambda) = (1/m) sum_i lambda_i f_i(theta) + alpha r(lambda), r concave. (The paper prints
chi-square and KL with the convex sign; r is their negative.)
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairmesh.errors import BadInput
from fairmesh.settings import family
from fairmesh.simplex import (
    capped_threshold,
    capped_tilt,
    filled_from_the_worst,
    project_onto_simplex,
    weighted_threshold,
)

_STEEPEST = 4.0  # a weight of 50 times the prior's is as far as one round goes before the price has followed


def _check_strength(strength: float, positive: bool = True) -> None:
    if not math.isfinite(strength) or strength < 0 or (positive and strength == 0):
        raise BadInput(f"strength, alpha, must be a finite number > 0, got {strength}; for none use NoRegularizer")


class Regularizer(ABC):
    """alpha r(lambda). `duals` are rows (..., nodes, n) on the simplex, `prior` is (..., 1, n), `own` marks (nodes, n)
    each hosted node's own coordinate."""

    @abstractmethod
    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        """alpha r(lambda) of each row: (..., nodes, 1)."""

    @abstractmethod
    def slope(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        """alpha times the gradient of r that a node's ascent adds: (..., nodes, n)."""

    @abstractmethod
    def project(self, rows: Tensor, prior: Tensor) -> Tensor:
        """Euclidean projection of each row onto the ambiguity set, the weights that the adversary may choose."""

    @abstractmethod
    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        """lambda*, the exact argmax over the ambiguity set of (1/m) <lambda, losses> + alpha r(lambda): (..., 1, n)."""

    @abstractmethod
    def largest_step(self, prior: Tensor) -> float:
        """The dual step size at which ascent stops being stable; infinite where there is no such bound."""


class Cappable(Regularizer, ABC):
    """A regularizer over the whole simplex whose inner maximum is also known where every weight has a cap."""

    @abstractmethod
    def capped_maximiser(self, losses: Tensor, prior: Tensor, caps: Tensor) -> Tensor:
        """The argmax over the weights lambda_i <= caps_i, caps a multiple of the prior: (..., 1, n)."""


class Priced(Cappable, ABC):
    """A regularizer under which lambda_i / p_i is a function of x_i = f_i / softness - price alone, one at x_i = 0."""

    @abstractmethod
    def softness(self) -> float | Tensor:
        """By how much losses must differ for weights to differ by their size, in the units of sum_i lambda_i f_i +
        alpha r(lambda)."""

    @abstractmethod
    def ratio(self, x: Tensor) -> Tensor:
        """lambda_i / p_i."""


def check_priced(regularizer: "Regularizer") -> None:
    inner = regularizer.inner if isinstance(regularizer, Capped) else regularizer
    if not isinstance(inner, Priced):
        raise BadInput(
            f"a {type(inner).__name__} has no weights that follow from a price; use ChiSquare or KullbackLeibler, "
            "or find the weights by an Ascent"
        )


def ratio_at(regularizer: "Regularizer", losses: Tensor, prices: Tensor) -> Tensor:
    """lambda_i / p_i of the inner maximum of sum_i lambda_i f_i + alpha r(lambda), given its price."""
    if isinstance(regularizer, Capped):
        return ratio_at(regularizer.inner, losses, prices).clamp(max=1.0 / regularizer.level)
    if not isinstance(regularizer, Priced):
        raise TypeError("check_priced lets no such regularizer through")
    return regularizer.ratio(losses / regularizer.softness() - prices)


def worst_case(regularizer: Regularizer, losses: Tensor, prior: Tensor) -> Tensor:
    """Phi: the value of the objective at the exact inner maximum, for losses (..., 1, n): (..., 1, 1)."""
    weights = regularizer.maximiser(losses, prior)
    mean = (weights * losses).sum(dim=-1, keepdim=True) / losses.shape[-1]
    return mean + regularizer.value(weights, prior)


@dataclass(frozen=True)
class ChiSquare(Priced):
    """r = -sum_i (lambda_i - p_i)^2 / p_i."""

    strength: float = 0.01  # alpha

    def __post_init__(self):
        _check_strength(self.strength)

    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        return -self.strength * ((duals - prior).square() / prior).sum(dim=-1, keepdim=True)

    def slope(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return (-2.0 * self.strength) * (duals / prior - 1.0)

    def project(self, rows: Tensor, prior: Tensor) -> Tensor:
        return project_onto_simplex(rows)

    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        return weighted_threshold(self._scores(losses), prior)

    def capped_maximiser(self, losses: Tensor, prior: Tensor, caps: Tensor) -> Tensor:
        return capped_threshold(self._scores(losses), prior, caps)

    def _scores(self, losses: Tensor) -> Tensor:
        return 1.0 + losses / (2.0 * self.strength * losses.shape[-1])

    def softness(self) -> float | Tensor:
        return 2.0 * self.strength

    def ratio(self, x: Tensor) -> Tensor:
        return (1.0 + x).clamp(min=0.0)

    def largest_step(self, prior: Tensor) -> float:
        return float(prior.min()) / self.strength  # curvature 2 alpha / p: ascent overshoots for ever past 2 / that


@dataclass(frozen=True)
class KullbackLeibler(Priced):
    """r = -sum_i lambda_i log(lambda_i / p_i). Its slope is infinite at lambda_i = 0, where projection puts weights, so
    lambda_i / p_i is taken as at least `floor` in the slope."""

    strength: float = 0.01  # alpha
    floor: float = 1e-3

    def __post_init__(self):
        _check_strength(self.strength)
        if not 0 < self.floor < 1:
            raise BadInput(f"floor, the least lambda_i / p_i in the slope, lies in (0, 1), got {self.floor}")

    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        return -self.strength * torch.xlogy(duals, duals / prior).sum(dim=-1, keepdim=True)

    def slope(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return -self.strength * ((duals / prior).clamp(min=self.floor).log() + 1.0)

    def project(self, rows: Tensor, prior: Tensor) -> Tensor:
        return project_onto_simplex(rows)

    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        return (prior.log() + losses / (self.strength * losses.shape[-1])).softmax(dim=-1)

    def capped_maximiser(self, losses: Tensor, prior: Tensor, caps: Tensor) -> Tensor:
        return capped_tilt(losses / (self.strength * losses.shape[-1]), prior, caps)

    def softness(self) -> float | Tensor:
        return self.strength

    def ratio(self, x: Tensor) -> Tensor:
        return x.clamp(max=_STEEPEST).exp()

    def largest_step(self, prior: Tensor) -> float:
        return 2.0 * float(prior.min()) / self.strength  # curvature alpha / lambda, at the prior


@dataclass(frozen=True)
class NoRegularizer(Cappable):
    """r = 0: the adversary may put all weight on one node."""

    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        return torch.zeros_like(duals[..., :1])

    def slope(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return torch.zeros_like(duals)

    def project(self, rows: Tensor, prior: Tensor) -> Tensor:
        return project_onto_simplex(rows)

    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        worst = losses.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(losses).scatter(-1, worst, 1.0)

    def capped_maximiser(self, losses: Tensor, prior: Tensor, caps: Tensor) -> Tensor:
        """The tail mean at the cap's level: CVaR."""
        return filled_from_the_worst(losses, caps)

    def largest_step(self, prior: Tensor) -> float:
        return math.inf


@dataclass(frozen=True)
class OwnCoordinate(Cappable):
    """What the published runs did: node i adds -mu (lambda_i - p_i) to its own coordinate only. After averaging this
    is -(mu / 2m) sum_i (lambda_i - p_i)^2; for equal nodes, chi-square of strength mu / (2 m^2)."""

    strength: float = 0.01  # mu, the tables' alpha

    def __post_init__(self):
        _check_strength(self.strength)

    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        scale = self.strength / (2.0 * duals.shape[-1])
        return -scale * (duals - prior).square().sum(dim=-1, keepdim=True)

    def slope(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return -self.strength * (duals - prior) * own

    def project(self, rows: Tensor, prior: Tensor) -> Tensor:
        return project_onto_simplex(rows)

    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        return project_onto_simplex(prior + losses / self.strength)

    def capped_maximiser(self, losses: Tensor, prior: Tensor, caps: Tensor) -> Tensor:
        return capped_threshold(prior + losses / self.strength, torch.ones_like(prior), caps)

    def largest_step(self, prior: Tensor) -> float:
        return 2.0 / self.strength


@dataclass(frozen=True)
class Custom(Regularizer):
    """Any concave r given as a function (lambda (n,), prior (n,)) -> scalar, differentiable by torch."""

    function: Callable[[Tensor, Tensor], Tensor]
    strength: float = 0.01  # alpha

    def __post_init__(self):
        _check_strength(self.strength)

    def check(self, prior: Tensor) -> None:
        """Refuses a function that is not a scalar or that lies above itself between random points of the simplex."""
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

    def slope(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return self.strength * self._over_rows(torch.func.grad(self.function), duals, prior)

    def project(self, rows: Tensor, prior: Tensor) -> Tensor:
        return project_onto_simplex(rows)

    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        """By a primal-dual interior point method in float64 (Boyd and Vandenberghe, Convex Optimization, 11.7): with
        shadow prices z >= 0 of lambda >= 0, Newton steps on gradient + z = level, lambda z = target -> 0."""
        scores = losses.double() / losses.shape[-1]
        p = prior.double().expand_as(scores)
        strength = torch.as_tensor(self.strength, dtype=torch.float64, device=scores.device)[..., None]
        own = torch.ones_like(p)

        def gradient(rows: Tensor) -> Tensor:
            return scores + self.slope(rows, p, own)

        def residuals(rows: Tensor, prices: Tensor, level: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            return gradient(rows) + prices - level, rows * prices - target

        def size(parts: tuple[Tensor, Tensor]) -> Tensor:
            return torch.cat(parts, dim=-1).norm(dim=-1, keepdim=True)

        # Not from the prior itself: a distance to it, the likely function, may have no second derivative there.
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
            for _ in range(25):  # halve the step until it pays
                trial = (weights + length * moves, prices + length * price_moves, level + length * rise)
                pays = size(residuals(*trial, target)) <= (1 - 0.01 * length) * before
                if bool(pays.all()):
                    break
                length = torch.where(pays, length, length / 2)
            if not bool((length * pays > 0).any()):
                break  # rounding leaves nothing to gain
            weights, prices, level = (torch.where(pays, new, old) for new, old in zip(trial, (weights, prices, level)))
        return (weights / weights.sum(dim=-1, keepdim=True)).to(losses.dtype)

    def largest_step(self, prior: Tensor) -> float:
        return math.inf


@dataclass(frozen=True)
class Capped(Regularizer):
    """Another regularizer over the weights with lambda_i <= p_i / level, the ambiguity set of CVaR: the adversary picks
    a share `level` of the data, so no site, were it broken or lying, attracts more. At 1 only the prior is left."""

    level: float = 0.5
    inner: Regularizer = field(default_factory=ChiSquare)

    def __post_init__(self):
        if not 0 < self.level <= 1:
            raise BadInput(
                f"level, the least share of the data that lambda spreads over, is in (0, 1], got {self.level}"
            )
        if not isinstance(self.inner, Cappable):
            raise BadInput(
                f"a {type(self.inner).__name__} cannot be capped, for its inner maximum under a cap is not known; give "
                "inner = ChiSquare, KullbackLeibler, NoRegularizer or OwnCoordinate"
            )

    def _caps(self, prior: Tensor) -> Tensor:
        return prior / self.level

    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        return self.inner.value(duals, prior)

    def slope(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return self.inner.slope(duals, prior, own)

    def project(self, rows: Tensor, prior: Tensor) -> Tensor:
        return capped_threshold(rows, torch.ones_like(prior), self._caps(prior))

    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        return self.inner.capped_maximiser(losses, prior, self._caps(prior))  # type: ignore[attr-defined]

    def largest_step(self, prior: Tensor) -> float:
        return self.inner.largest_step(prior)


family(
    Regularizer,
    {
        "chi-square": ChiSquare,
        "kl": KullbackLeibler,
        "none": NoRegularizer,
        "own-coordinate": OwnCoordinate,
        "capped": Capped,
        "custom": Custom,
    },
)
