"""The built-in regularizers of g(theta, lambda) = (1/n) sum_i lambda_i f_i(theta) + alpha r(lambda)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fairmesh.config.ranges import Share, UpToOne, Within
from fairmesh.config.tables import register
from fairmesh.errors import BadInput
from fairmesh.regularizers.base import Cappable, Priced, Regularizer
from fairmesh.regularizers.simplex import (
    capped_softmax,
    capped_threshold,
    cvar_weights,
    project_onto_simplex,
    weighted_threshold,
)

_Strength = Annotated[float, Within("(0, inf)", "use NoRegularizer for no regularizer")]  # alpha
_STEEPEST = 4.0  # limits a weight to about 50 times the prior until the price has followed


def check_priced(regularizer: "Regularizer") -> None:
    inner = regularizer.inner if isinstance(regularizer, Capped) else regularizer
    if not isinstance(inner, Priced):
        raise BadInput(
            f"a {type(inner).__name__} does not work with ShadowPrice; use ChiSquare or KullbackLeibler, "
            "or the weighting ProjectedAscent"
        )


def ratio_at(regularizer: "Regularizer", losses: Tensor, prices: Tensor) -> Tensor:
    """Returns lambda_i / p_i at the inner maximum of sum_i lambda_i f_i + alpha r(lambda), given its price."""
    if isinstance(regularizer, Capped):
        return ratio_at(regularizer.inner, losses, prices).clamp(max=1.0 / regularizer.level)
    if not isinstance(regularizer, Priced):
        raise TypeError("check_priced should have refused this regularizer")
    return regularizer.ratio(losses / regularizer.softness() - prices)


def worst_case(regularizer: Regularizer, losses: Tensor, prior: Tensor) -> Tensor:
    """Returns Phi, the objective at the exact inner maximum, for losses (..., 1, n): (..., 1, 1)."""
    weights = regularizer.maximiser(losses, prior)
    mean = (weights * losses).sum(dim=-1, keepdim=True) / losses.shape[-1]
    return mean + regularizer.value(weights, prior)


@dataclass(frozen=True)
class ChiSquare(Priced):
    """Chi-square distance to the prior: r(lambda) = -sum_i (lambda_i - p_i)^2 / p_i.

    Args:
        strength: alpha, > 0. The smaller it is, the more weight the worst sites get. AD-GDA uses it as in
            (1/n) sum_i lambda_i f_i + alpha r(lambda); TrackedADGDA as in sum_i lambda_i f_i + alpha r(lambda), where
            the same robustness takes n times the strength. Default: 0.01.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> prior, losses = torch.tensor([[0.25, 0.75]]), torch.tensor([[3.0, 1.0]])
        >>> fm.ChiSquare(strength=1.0).maximiser(losses, prior)
        tensor([[0.3438, 0.6562]])
        >>> fm.ChiSquare(strength=0.01).maximiser(losses, prior)
        tensor([[1., 0.]])
    """

    strength: _Strength = 0.01

    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        return -self.strength * ((duals - prior).square() / prior).sum(dim=-1, keepdim=True)

    def gradient(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return (-2.0 * self.strength) * (duals / prior - 1.0)

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
        # The curvature is 2 alpha / p. Ascent with a step above 2 / that overshoots forever.
        return float(prior.min()) / self.strength


@dataclass(frozen=True)
class KullbackLeibler(Priced):
    """Kullback-Leibler divergence from the prior: r(lambda) = -sum_i lambda_i log(lambda_i / p_i).

    Its gradient is infinite at lambda_i = 0, where the projection of an ascent step may put a weight. The gradient
    therefore takes lambda_i / p_i to be at least `floor`.

    Args:
        strength: alpha, > 0, as in `ChiSquare`. Default: 0.01.
        floor: The smallest lambda_i / p_i in the gradient, in (0, 1). Default: 0.001.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> prior, losses = torch.tensor([[0.5, 0.5]]), torch.tensor([[3.0, 1.0]])
        >>> fm.regularizers.KullbackLeibler(strength=1.0).maximiser(losses, prior)
        tensor([[0.7311, 0.2689]])
    """

    strength: _Strength = 0.01
    floor: Share = 1e-3

    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        return -self.strength * torch.xlogy(duals, duals / prior).sum(dim=-1, keepdim=True)

    def gradient(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return -self.strength * ((duals / prior).clamp(min=self.floor).log() + 1.0)

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
    """r(lambda) = 0: all weight may go to one node, so training minimises the largest loss.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> prior, losses = torch.tensor([[0.5, 0.5]]), torch.tensor([[3.0, 1.0]])
        >>> fm.regularizers.NoRegularizer().maximiser(losses, prior)
        tensor([[1., 0.]])
    """

    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        return torch.zeros_like(duals[..., :1])

    def gradient(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return torch.zeros_like(duals)

    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        worst = losses.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(losses).scatter(-1, worst, 1.0)

    def capped_maximiser(self, losses: Tensor, prior: Tensor, caps: Tensor) -> Tensor:
        """Returns the weights of the worst losses, each at its cap: the conditional value at risk (CVaR)."""
        return cvar_weights(losses, caps)


@dataclass(frozen=True)
class OwnCoordinate(Cappable):
    """The regularizer of AD-GDA's published runs: node i adds -mu (lambda_i - p_i) to its own coordinate only.

    Averaged over the nodes, this is the gradient of -(mu / 2n) sum_i (lambda_i - p_i)^2. For sites of equal size it
    equals `ChiSquare` with strength mu / (2 n^2).

    Args:
        strength: mu, > 0, which the paper's tables call alpha. Default: 0.01.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> prior, losses = torch.tensor([[0.5, 0.5]]), torch.tensor([[3.0, 1.0]])
        >>> fm.regularizers.OwnCoordinate(strength=4.0).maximiser(losses, prior)
        tensor([[0.7500, 0.2500]])
    """

    strength: _Strength = 0.01

    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        scale = self.strength / (2.0 * duals.shape[-1])
        return -scale * (duals - prior).square().sum(dim=-1, keepdim=True)

    def gradient(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        return -self.strength * (duals - prior) * own

    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        return project_onto_simplex(prior + losses / self.strength)

    def capped_maximiser(self, losses: Tensor, prior: Tensor, caps: Tensor) -> Tensor:
        return capped_threshold(prior + losses / self.strength, torch.ones_like(prior), caps)

    def max_stable_dual_step(self, prior: Tensor) -> float:
        return 2.0 / self.strength


@dataclass(frozen=True)
class Capped(Regularizer):
    """Another regularizer, with every weight capped: lambda_i <= p_i / level, the ambiguity set of CVaR.

    The adversary must spread its weight over at least a share `level` of the data. So a site that is broken, or lies
    about its loss, cannot attract more than 1 / level times its prior weight.

    Args:
        level: The smallest share of the data that the weights spread over, in (0, 1]. At 1 only the prior is left.
            Default: 0.5.
        inner: The regularizer to cap: ChiSquare, KullbackLeibler, NoRegularizer or OwnCoordinate, with its own
            strength. Default: ChiSquare().

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> prior, losses = torch.tensor([[0.25, 0.25, 0.5]]), torch.tensor([[3.0, 2.0, 1.0]])
        >>> cvar = fm.regularizers.Capped(level=0.5, inner=fm.regularizers.NoRegularizer())
        >>> cvar.maximiser(losses, prior)
        tensor([[0.5000, 0.5000, 0.0000]])

    References:
        Rockafellar, Uryasev: Optimization of Conditional Value-at-Risk, Journal of Risk 2000.
    """

    level: UpToOne = 0.5
    inner: Regularizer = field(default_factory=ChiSquare)

    def __post_init__(self):
        if not isinstance(self.inner, Cappable):
            raise BadInput(
                f"a {type(self.inner).__name__} cannot be capped, because its inner maximum under a cap is not known; "
                "give inner = ChiSquare, KullbackLeibler, NoRegularizer or OwnCoordinate"
            )

    def check(self, prior: Tensor) -> None:
        self.inner.check(prior)

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
    strength: _Strength = 0.01

    fast_maximiser: ClassVar[bool] = False

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
