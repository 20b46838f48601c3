"""Problems for the check of the theorems: one with a known saddle point, one smooth and non-convex."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, hessian, vmap

from fairmesh.data.site import Site
from fairmesh.problems.batches import Sampling
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.problem import Problem, prepare
from fairmesh.regularizers.builtin import ChiSquare, worst_case

NODES = 8  # m


class Sites:
    """The exact loss functions f_i of the sites: over all samples, in float64, for any models."""

    def __init__(self, problem: Prepared, regularizer: ChiSquare):
        model = problem.flat_model.to(torch.device("cpu"), torch.float64)
        self.inputs = torch.stack([site.train.inputs for site in problem.sites])
        self.targets = torch.stack([site.train.targets for site in problem.sites])
        self.problem, self.regularizer = problem, regularizer
        self.prior = problem.prior_of_sites.unsqueeze(0)  # (1, n)

        def loss(row: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
            return problem.loss(model(row, inputs), targets)

        self._loss = loss

    def _at(self, function: Callable, rows: Tensor) -> Any:
        """Evaluates `function` for every site at rows (..., dim) shared by all sites, or (..., n, dim) of their own."""
        each = rows.ndim > 2
        return vmap(vmap(function, (0 if each else None, 0, 0)), (0, None, None))(rows, self.inputs, self.targets)

    def losses(self, rows: Tensor) -> Tensor:
        """Returns the losses (replicas, n)."""
        return self._at(self._loss, rows)

    def gradients(self, rows: Tensor) -> Tensor:
        """Returns the gradients (replicas, n, dim)."""
        return self._at(grad(self._loss), rows)

    def worst_case(self, rows: Tensor) -> Tensor:
        """Returns Phi (replicas,) of rows (replicas, dim)."""
        losses = self.losses(rows).unsqueeze(-2)
        return worst_case(self.regularizer, losses, self.prior.expand_as(losses)).flatten()

    def worst_weights(self, rows: Tensor) -> Tensor:
        """Returns lambda*(theta) (replicas, n)."""
        return self._worst(self.losses(rows))

    def _worst(self, losses: Tensor) -> Tensor:
        return self.regularizer.maximiser(losses.unsqueeze(-2), self.prior.expand(len(losses), 1, -1)).squeeze(-2)

    def gradient_of_worst_case(self, rows: Tensor) -> Tensor:
        """Returns the gradient of Phi (replicas, dim): by Danskin's theorem, (1/m) sum_i lambda*_i grad f_i."""
        gradients, losses = self._at(grad_and_value(self._loss), rows)
        return (self._worst(losses).unsqueeze(-1) * gradients).mean(dim=-2)

    def smoothness(self, models: Tensor, weights: Tensor) -> float:
        """Returns L at these points: the largest spectral norm of the Hessian of any g_i in (theta, lambda).

        Takes models (replicas, n, dim) and each node's own weight (replicas, n). g_i couples only entry i of lambda to
        theta."""
        gradients, hessians = self.gradients(models), self._at(hessian(self._loss), models)
        curvatures = 2 * self.regularizer.strength / self.prior.flatten()
        corner = -curvatures.expand(len(models), -1)[..., None, None]
        top = torch.cat([weights[..., None, None] * hessians, gradients.unsqueeze(-1)], dim=-1)
        joint = torch.cat([top, torch.cat([gradients.unsqueeze(-2), corner], dim=-1)], dim=-2)
        return max(float(torch.linalg.eigvalsh(joint).abs().max()), float(curvatures.max()))


@dataclass(frozen=True, eq=False)
class Saddle:
    """A convex problem, its regularizer, and its saddle point."""

    problem: Prepared
    regularizer: ChiSquare
    model: Tensor  # theta* (dim,)
    weights: Tensor  # lambda* (n,)

    def sites(self) -> Sites:
        return Sites(self.problem, self.regularizer)

    def best_response(self, weights: Tensor) -> Tensor:
        """Returns theta*(lambda) (replicas, dim), the least-squares solution for weights (replicas, n)."""
        inputs, targets = self.sites().inputs, self.sites().targets
        scales = weights[..., None, None] / inputs.shape[-2]
        hessian = (scales * (inputs.mT @ inputs)).sum(dim=-3)
        return torch.linalg.solve(hessian, (scales * (inputs.mT @ targets)).sum(dim=-3)).squeeze(-1)


def _half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean() / 2


def _linear(sites: Sequence[tuple[Tensor, Tensor]], loss: Callable, sampling: Sampling) -> Prepared:
    """Returns a problem with a linear model that starts from zero, like its public copies."""
    layer = nn.Linear(sites[0][0].shape[-1], 1, bias=False)
    nn.init.zeros_(layer.weight)
    return prepare(Problem(layer, [Site(held) for held in sites], loss=loss, sampling=sampling))


def known_saddle(sampling: Sampling) -> Saddle:
    """Returns least squares at eight sites whose targets make theta* and lambda* a saddle point.

    The conditions are sum_i lambda*_i grad f_i(theta*) = 0, and that f_i(theta*) / m + alpha r'_i(lambda*) is equal at
    all sites with lambda*_i > 0 and less at the two others.

    The curvatures are spread evenly over 3.5 decades, and theta* is equally far in all their directions. So at any T
    some directions are not yet learned, the gap of gradient descent falls no faster than 1 / sqrt(T), and a slope near
    -0.5 is the law itself. Sites pull theta* in different directions, so without gossip the gap stays."""
    dim, samples, strength, apart = 20, 80, 1 / 64, 0.2
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    weights = torch.tensor([0.3, 0.22, 0.16, 0.12, 0.1, 0.1, 0.0, 0.0], dtype=torch.float64)
    curvatures = torch.logspace(-2.5, 1.0, dim, dtype=torch.float64)
    turn = torch.linalg.qr(normal(dim, dim)).Q  # so that no direction is a coordinate
    model = apart * turn.sum(dim=-1)
    inputs = normal(NODES, samples, dim) * curvatures.sqrt() @ turn.T
    hessians = inputs.mT @ inputs / samples
    pulls = (apart / 2 * normal(NODES, dim) * curvatures) @ turn.T  # -grad f_i(theta*)
    pulls = pulls - weights @ pulls
    own = inputs @ torch.linalg.solve(hessians, pulls.unsqueeze(-1))  # residuals that cause these pulls
    noise = normal(NODES, samples, 1)
    noise = noise - inputs @ torch.linalg.solve(hessians, inputs.mT @ noise / samples)  # residuals without a pull
    level, slack = 0.08, 0.1 * (weights == 0)
    losses = NODES * (level + 2 * strength * (NODES * weights - 1 - slack))  # f_i(theta*)
    left = 2 * losses - own.square().mean(dim=1).flatten()
    noise = noise * (left / noise.square().mean(dim=1).flatten()).sqrt()[:, None, None]
    targets = inputs @ model.unsqueeze(-1) + own + noise
    problem = _linear(list(zip(inputs, targets)), _half_squares, sampling)
    return Saddle(problem, ChiSquare(strength), model, weights)


def _bounded(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean of r^2 / (1 + r^2), which is smooth, and not convex beyond |r| = 1 / sqrt(3)."""
    squares = (outputs - targets).square()
    return (squares / (1 + squares)).mean()


def robust_regression(sampling: Sampling) -> tuple[Prepared, ChiSquare]:
    """Returns regression with a bounded loss at eight sites of different noise, started where Phi is not convex.

    Theorem 2 makes models 16 (kappa + 1)^2 times slower than weights, and the mean squared gradient begins to fall only
    when descent ends. So the regularizer is strong (kappa near 1), and theta* is near enough to be reached in 1,000
    rounds."""
    dim, samples, scale = 6, 40, 4.0
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    inputs = scale * normal(NODES, samples, dim)
    own = (0.3 * normal(dim) + 0.2 * normal(NODES, dim)) / scale
    noise = torch.linspace(0.3, 1.0, NODES, dtype=torch.float64)[:, None, None] * normal(NODES, samples, 1)
    targets = inputs @ own.unsqueeze(-1) + noise
    return _linear(list(zip(inputs, targets)), _bounded, sampling), ChiSquare(1 / 4)
