"""The adversary's side: weights on the simplex, the regularizers that hold them near the prior, the exact worst case.

The objective is g(theta, lambda) = (1/m) sum_i lambda_i f_i(theta) + alpha r(lambda), r concave. (The paper prints
chi-square and KL with the convex sign; r is their negative.)
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairmesh.config.tables import register
from fairmesh.errors import BadInput
from fairmesh.regularizers.base import Cappable, Priced, Regularizer, check_strength
from fairmesh.regularizers.custom import Custom
from fairmesh.regularizers.simplex import (
    capped_softmax,
    capped_threshold,
    cvar_weights,
    project_onto_simplex,
    weighted_threshold,
)

_STEEPEST = 4.0  # a weight of 50 times the prior's is as far as one round goes before the price has followed


def check_priced(regularizer: "Regularizer") -> None:
    inner = regularizer.inner if isinstance(regularizer, Capped) else regularizer
    if not isinstance(inner, Priced):
        raise BadInput(
            f"a {type(inner).__name__} has no weights that follow from a price; use ChiSquare or KullbackLeibler, "
            "or find the weights by a ProjectedAscent"
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
        check_strength(self.strength)

    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        return -self.strength * ((duals - prior).square() / prior).sum(dim=-1, keepdim=True)

    def gradient(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
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

    def max_stable_dual_step(self, prior: Tensor) -> float:
        return float(prior.min()) / self.strength  # curvature 2 alpha / p: ascent overshoots for ever past 2 / that


@dataclass(frozen=True)
class KullbackLeibler(Priced):
    """r = -sum_i lambda_i log(lambda_i / p_i). Its slope is infinite at lambda_i = 0, where projection puts weights, so
    lambda_i / p_i is taken as at least `floor` in the slope."""

    strength: float = 0.01  # alpha
    floor: float = 1e-3

    def __post_init__(self):
        check_strength(self.strength)
        if not 0 < self.floor < 1:
            raise BadInput(f"floor, the least lambda_i / p_i in the slope, lies in (0, 1), got {self.floor}")

    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        return -self.strength * torch.xlogy(duals, duals / prior).sum(dim=-1, keepdim=True)

    def gradient(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return -self.strength * ((duals / prior).clamp(min=self.floor).log() + 1.0)

    def project(self, rows: Tensor, prior: Tensor) -> Tensor:
        return project_onto_simplex(rows)

    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        return (prior.log() + losses / (self.strength * losses.shape[-1])).softmax(dim=-1)

    def capped_maximiser(self, losses: Tensor, prior: Tensor, caps: Tensor) -> Tensor:
        return capped_softmax(losses / (self.strength * losses.shape[-1]), prior, caps)

    def softness(self) -> float | Tensor:
        return self.strength

    def ratio(self, x: Tensor) -> Tensor:
        return x.clamp(max=_STEEPEST).exp()

    def max_stable_dual_step(self, prior: Tensor) -> float:
        return 2.0 * float(prior.min()) / self.strength  # curvature alpha / lambda, at the prior


@dataclass(frozen=True)
class NoRegularizer(Cappable):
    """r = 0: the adversary may put all weight on one node."""

    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        return torch.zeros_like(duals[..., :1])

    def gradient(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return torch.zeros_like(duals)

    def project(self, rows: Tensor, prior: Tensor) -> Tensor:
        return project_onto_simplex(rows)

    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        worst = losses.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(losses).scatter(-1, worst, 1.0)

    def capped_maximiser(self, losses: Tensor, prior: Tensor, caps: Tensor) -> Tensor:
        """The tail mean at the cap's level: CVaR."""
        return cvar_weights(losses, caps)

    def max_stable_dual_step(self, prior: Tensor) -> float:
        return math.inf


@dataclass(frozen=True)
class OwnCoordinate(Cappable):
    """What the published runs did: node i adds -mu (lambda_i - p_i) to its own coordinate only. After averaging this
    is -(mu / 2m) sum_i (lambda_i - p_i)^2; for equal nodes, chi-square of strength mu / (2 m^2)."""

    strength: float = 0.01  # mu, the tables' alpha

    def __post_init__(self):
        check_strength(self.strength)

    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        scale = self.strength / (2.0 * duals.shape[-1])
        return -scale * (duals - prior).square().sum(dim=-1, keepdim=True)

    def gradient(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return -self.strength * (duals - prior) * own

    def project(self, rows: Tensor, prior: Tensor) -> Tensor:
        return project_onto_simplex(rows)

    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        return project_onto_simplex(prior + losses / self.strength)

    def capped_maximiser(self, losses: Tensor, prior: Tensor, caps: Tensor) -> Tensor:
        return capped_threshold(prior + losses / self.strength, torch.ones_like(prior), caps)

    def max_stable_dual_step(self, prior: Tensor) -> float:
        return 2.0 / self.strength


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

    def gradient(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return self.inner.gradient(duals, prior, own)

    def project(self, rows: Tensor, prior: Tensor) -> Tensor:
        return capped_threshold(rows, torch.ones_like(prior), self._caps(prior))

    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        return self.inner.capped_maximiser(losses, prior, self._caps(prior))  # type: ignore[attr-defined]

    def max_stable_dual_step(self, prior: Tensor) -> float:
        return self.inner.max_stable_dual_step(prior)


register(
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
