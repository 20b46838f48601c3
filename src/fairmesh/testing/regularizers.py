"""The contract of a regularizer."""

import torch
from torch import Tensor

from fairmesh.algorithms.ad_gda import ADGDA
from fairmesh.regularizers.base import Regularizer
from fairmesh.testing.algorithms import check_replicas
from fairmesh.testing.problems import small_problem
from fairmesh.testing.stacks import mixed_up
from fairmesh.testing.violations import checked_settings, require, require_close, running
from fairmesh.topology.graphs import Ring

_DTYPES = (torch.float32, torch.float64)


def check_regularizer(regularizer: Regularizer, nodes: int = 6) -> None:
    """Checks that a regularizer keeps the contract that the ascent in lambda counts on. Takes about a second.

    1. It is a frozen dataclass that survives being written to TOML and read again.
    2. Every method keeps dtype and shape, and changes nothing that it is given.
    3. `gradient`, averaged over all nodes, is the gradient of `value`, and `value` is concave.
    4. `project` gives the nearest point of a convex set on the simplex that holds the prior.
    5. `maximiser` lies in that set, and no point of the set has a larger objective.
    6. New names for the nodes rename the results.
    7. Replicas may differ in its numbers.

    Args:
        regularizer: The object to check.
        nodes: The number of weights in a row. Default: 6.

    Raises:
        ContractViolation: An AssertionError that says what was violated, with numbers.

    Example:
        >>> import fairmesh as fm
        >>> fm.testing.check_regularizer(fm.ChiSquare(0.02))
    """
    regularizer = checked_settings(regularizer, Regularizer)
    with running("a method of the regularizer"):
        for dtype in _DTYPES:
            _check_forms(regularizer, nodes, dtype)
        _check_gradient(regularizer, nodes)
        _check_projection(regularizer, nodes)
        _check_maximiser(regularizer, nodes)
        _check_names(regularizer, nodes)
    prior = torch.full((nodes,), 1.0 / nodes, dtype=torch.float64)
    largest = regularizer.max_stable_dual_step(prior)
    require(largest > 0, f"max_stable_dual_step is {largest}, not above 0")
    algorithm = ADGDA(primal_step=0.1, dual_step=min(0.01, largest / 100), consensus_step=0.5, regularizer=regularizer)
    with running("a batch of replicas", "numbers that differ between replicas are tensors (replicas, 1, 1)"):
        check_replicas(algorithm, small_problem(), Ring(), 4, 1e-10)


def _rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _priors(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return _rows(*shape, seed=1).softmax(dim=-1).to(dtype)


def _check_forms(regularizer: Regularizer, n: int, dtype: torch.dtype) -> None:
    duals, prior, own = (
        _rows(2, n, n).softmax(dim=-1).to(dtype),
        _priors(2, 1, n, dtype=dtype),
        torch.eye(n, dtype=dtype),
    )
    before = [t.clone() for t in (duals, prior, own)]
    found = {
        "value": (regularizer.value(duals, prior), (2, n, 1)),
        "gradient": (regularizer.gradient(duals, prior, own), (2, n, n)),
        "project": (regularizer.project(duals, prior), (2, n, n)),
        "maximiser": (regularizer.maximiser(duals[:, :1], prior), (2, 1, n)),
    }
    for name, (tensor, shape) in found.items():
        require(tuple(tensor.shape) == shape, f"{name} gives {tuple(tensor.shape)} where {shape} is expected")
        require(tensor.dtype == dtype, f"{name} turns {str(dtype)[6:]} into {str(tensor.dtype)[6:]}")
    for name, old, new in zip(("duals", "prior", "own"), before, (duals, prior, own)):
        require_close(new, old, 0.0, f"{name} after the methods were called with it")


def _check_gradient(regularizer: Regularizer, n: int) -> None:
    prior, own = _priors(1, 1, n), torch.eye(n, dtype=torch.float64)
    for seed in range(5):
        row = regularizer.project(_rows(1, 1, n, seed=seed).softmax(dim=-1), prior).clamp(min=1e-2)
        leaf = (row / row.sum(dim=-1, keepdim=True)).requires_grad_()
        value = regularizer.value(leaf, prior).sum()
        slope = torch.autograd.grad(value, leaf)[0] if value.requires_grad else torch.zeros_like(leaf)
        everyone = leaf.detach().expand(1, n, n).clone()  # all nodes hold the same row
        found = regularizer.gradient(everyone, prior, own).mean(dim=-2, keepdim=True)
        size = 1.0 + float(slope.abs().max())
        require_close(found, slope, 1e-8 * size, "the gradient, averaged over nodes, and the derivative of value")
    ends = [regularizer.project(_rows(1, 16, n, seed=seed).softmax(dim=-1), prior) for seed in (2, 3)]
    left, right, middle = (regularizer.value(rows, prior) for rows in (*ends, (ends[0] + ends[1]) / 2))
    below = float(((left + right) / 2 - middle).max())
    require(below <= 1e-9, f"value is not concave: between two points it is {below:.3g} below the mean of its ends")


def _feasible(regularizer: Regularizer, prior: Tensor, n: int) -> Tensor:
    """Points of the set that the adversary may choose from: (1, points, n)."""
    spread = torch.cat([_rows(1, 32, n, seed=s) * size for s, size in ((4, 0.2), (5, 1.0), (6, 5.0))], dim=1)
    corners = 10.0 * torch.eye(n, dtype=torch.float64).unsqueeze(0)
    return torch.cat([regularizer.project(torch.cat([spread, corners], dim=1), prior), prior], dim=1)


def _check_projection(regularizer: Regularizer, n: int) -> None:
    prior = _priors(1, 1, n)
    rows = torch.cat([_rows(1, 16, n, seed=7), 5.0 * _rows(1, 16, n, seed=8)], dim=1)
    found = regularizer.project(rows, prior)
    low, off = float(found.min()), float((found.sum(dim=-1) - 1).abs().max())
    require(low >= 0, f"project gives a negative weight, {low:.3g}")
    require(off < 1e-12, f"project gives weights whose sum is off 1 by {off:.3g}")
    require_close(regularizer.project(found, prior), found, 1e-12, "a projected row, projected again")
    require_close(regularizer.project(prior, prior), prior, 1e-12, "the prior, projected")
    inside = _feasible(regularizer, prior, n)
    require_close(regularizer.project(inside.mean(dim=1, keepdim=True), prior), inside.mean(dim=1, keepdim=True), 1e-12,
                  "the mean of rows of the set, projected (as gossip averages them)")  # fmt: skip
    angles = ((rows - found).unsqueeze(2) * (inside.unsqueeze(1) - found.unsqueeze(2))).sum(dim=-1)
    worst = float(angles.max())
    require(
        worst <= 1e-9, f"project is not the nearest point: <x - P(x), y - P(x)> is {worst:.3g}, above 0, for some y"
    )


def _check_maximiser(regularizer: Regularizer, n: int) -> None:
    prior = _priors(1, 1, n)
    inside = _feasible(regularizer, prior, n)

    def objective(weights: Tensor, losses: Tensor) -> Tensor:
        return (weights * losses).sum(dim=-1, keepdim=True) / n + regularizer.value(weights, prior)

    for seed in range(4):
        losses = _rows(1, 1, n, seed=seed).abs() * 10.0 ** (seed - 2)
        best = regularizer.maximiser(losses, prior)
        require_close(regularizer.project(best, prior), best, 1e-9, "the maximiser, projected onto the set")
        value, other = float(objective(best, losses)), float(objective(inside, losses).max())
        slack = 1e-9 * (1 + abs(value))
        require(
            other <= value + slack, f"the objective is {value:.9g} at the maximiser, and {other:.9g} at another point"
        )


def _check_names(regularizer: Regularizer, n: int) -> None:
    order, own = mixed_up(n), torch.eye(n, dtype=torch.float64)
    duals, prior = _rows(1, n, n).softmax(dim=-1), _priors(1, 1, n)
    moved = duals[:, order][..., order], prior[..., order]
    slopes = regularizer.gradient(duals, prior, own), regularizer.gradient(*moved, own)
    require_close(slopes[1], slopes[0][:, order][..., order], 1e-12, "the gradient with other names for the nodes")
    allowed = regularizer.project(duals, prior), regularizer.project(*moved)
    require_close(allowed[1], allowed[0][:, order][..., order], 1e-12, "the projection with other names for the nodes")
