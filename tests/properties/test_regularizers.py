"""Regularizers: slope = derivative of value, the exact inner maximum, and the dual steps that are stable."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fairmesh as fm
from fairmesh.algorithms.base import check_dual_step
from fairmesh.regularizers.builtin import worst_case
from fairmesh.regularizers.simplex import project_onto_simplex
from tests import toys
from tests.examples import examples
from tests.refusals import refused


def entropy(weights: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    return -torch.xlogy(weights, weights / prior).sum()


def chi_square(weights: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    return -((weights - prior).square() / prior).sum()


def barrier(weights: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    return (prior * weights.log()).sum()


def quartic(weights: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    return -(weights - prior).pow(4).sum() - (weights[0] - weights[-1]).square()


def convex(weights: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    return (weights - prior).square().sum()


def not_scalar(weights: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    return -(weights - prior).square()


def not_tensor(weights: torch.Tensor, prior: torch.Tensor) -> float:
    return -1.0


REGULARIZERS = {
    **toys.REGULARIZERS,
    "weak chi-square": fm.ChiSquare(1e-3),
    "strong chi-square": fm.ChiSquare(5.0),
    "weak kl": fm.regularizers.KullbackLeibler(5e-3, floor=1e-6),
    "strong kl": fm.regularizers.KullbackLeibler(3.0),
    "custom entropy": fm.regularizers.Custom(entropy, 0.05),
    "custom barrier": fm.regularizers.Custom(barrier, 0.2),
    "custom quartic": fm.regularizers.Custom(quartic, 0.7),
}
EVERY = pytest.mark.parametrize("name", REGULARIZERS)


def simplex_points(seed: int, count: int, n: int) -> torch.Tensor:
    """Interior points of the simplex, (count, 1, n), some near its faces."""
    generator = np.random.default_rng(seed)
    points = generator.dirichlet(np.full(n, 0.5 + seed % 3), size=count) + 1e-4
    return torch.tensor(points / points.sum(axis=1, keepdims=True)).unsqueeze(1)


def case(seed: int, replicas: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses (replicas, 1, n) and a prior (1, n) that is not uniform."""
    generator = np.random.default_rng(seed)
    n = int(generator.integers(2, 8))
    losses = torch.tensor(generator.exponential(size=(replicas, 1, n)) * 10.0 ** generator.integers(-1, 2))
    prior = generator.uniform(0.2, 1.0, size=(1, n))
    return losses, torch.tensor(prior / prior.sum())


def gradient_of_value(regularizer, weights, prior) -> torch.Tensor:
    weights = weights.clone().requires_grad_()
    nothing = 0 * weights.sum()  # so that a value that does not depend on the weights has a gradient too
    return torch.autograd.grad(regularizer.value(weights, prior).sum() + nothing, weights)[0]


def test_regularizer_values_are_the_papers_formulas_by_hand():
    weights = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    prior = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64)
    # chi-square: 0.25^2/0.25 + 0.25^2/0.25 + 0.5^2/0.5 = 1; KL: 2 * 0.5 log 2 + 0 log 0; squares: 0.375
    assert fm.ChiSquare(0.3).value(weights, prior).item() == pytest.approx(-0.3)
    assert fm.regularizers.KullbackLeibler(0.3).value(weights, prior).item() == pytest.approx(-0.3 * math.log(2))
    assert fm.regularizers.OwnCoordinate(0.3).value(weights, prior).item() == pytest.approx(-0.3 / 6 * 0.375)


def test_kl_gradient_stays_where_it_is_below_its_floor():
    kl = fm.regularizers.KullbackLeibler(0.1, floor=1e-2)
    prior = torch.full((1, 4), 0.25, dtype=torch.float64)
    weights = torch.tensor([[0.0, 1e-9, 0.0025, 0.9975]], dtype=torch.float64)
    slope = kl.gradient(weights, prior, torch.ones_like(prior)).squeeze()
    assert slope[:3].tolist() == pytest.approx([-0.1 * (math.log(1e-2) + 1)] * 3)
    assert slope.isfinite().all()


@given(seed=st.integers(0, 10**6), strength=st.floats(0.01, 10))
def test_own_coordinate_moves_only_its_own_and_on_average_along_the_gradient_of_the_value(seed, strength):
    regularizer = fm.regularizers.OwnCoordinate(strength)
    _, prior = case(seed)
    n = prior.shape[-1]
    own = torch.eye(n, dtype=torch.float64)
    weights = simplex_points(seed, 2, n)
    slopes = regularizer.gradient(weights.expand(2, n, n), prior, own)  # every node holds the same weights
    assert torch.equal(slopes * (1 - own), torch.zeros_like(slopes))
    gradient = gradient_of_value(regularizer, weights, prior)
    torch.testing.assert_close(slopes.mean(dim=-2, keepdim=True), gradient, rtol=1e-12, atol=1e-15)


@given(seed=st.integers(0, 10**6), mu=st.floats(0.05, 10))
def test_own_coordinate_is_a_chi_square_for_a_uniform_prior(seed, mu):
    losses, _ = case(seed)
    m = losses.shape[-1]
    prior = torch.full((1, m), 1 / m, dtype=torch.float64)
    own, chi = fm.regularizers.OwnCoordinate(mu), fm.ChiSquare(mu / (2 * m**2))
    weights = simplex_points(seed, 3, m)
    torch.testing.assert_close(own.value(weights, prior), chi.value(weights, prior), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(own.maximiser(losses, prior), chi.maximiser(losses, prior), rtol=0, atol=1e-10)


def is_on_simplex(weights: torch.Tensor, tolerance: float) -> bool:
    return bool((weights >= 0).all() and ((weights.sum(dim=-1) - 1).abs() <= tolerance).all())


@EVERY
@given(seed=st.integers(0, 10**6))
@examples(3)
def test_maximiser_has_no_vertex_uphill(name, seed):
    # g is concave, so <gradient, v - lambda*> <= 0 for every vertex v of the set is the same as being the maximiser
    regularizer = REGULARIZERS[name]
    losses, prior = case(seed)
    best = regularizer.maximiser(losses, prior).clamp(min=1e-200)
    gradient = losses / losses.shape[-1] + gradient_of_value(regularizer, best, prior)
    caps = prior / getattr(regularizer, "level", 1e-9)
    uphill = most_under_caps(gradient, caps) - (gradient * best).sum(dim=-1)
    assert (uphill <= 1e-8 * (1 + gradient.abs().amax(dim=-1))).all()


def most_under_caps(slopes: torch.Tensor, caps: torch.Tensor) -> torch.Tensor:
    """The largest <slopes, weights> over weights under caps: each node in turn, from the steepest down, takes all that
    its cap lets it."""
    found = []
    for row in slopes.reshape(-1, slopes.shape[-1]).tolist():
        left, total = 1.0, 0.0
        for slope, cap in sorted(zip(row, caps.flatten().tolist()), reverse=True):
            total, left = total + slope * min(cap, left), left - min(cap, left)
        found.append(total)
    return torch.tensor(found, dtype=torch.float64).view(slopes.shape[:-1])


@given(seed=st.integers(0, 10**6), strength=st.floats(1e-3, 10))
def test_maximiser_under_kl_is_the_prior_tilted_by_exp_of_the_losses(seed, strength):
    losses, prior = case(seed)
    exponent = losses / (losses.shape[-1] * strength)
    tilted = prior * (exponent - exponent.amax(dim=-1, keepdim=True)).exp()
    expected = tilted / tilted.sum(dim=-1, keepdim=True)
    found = fm.regularizers.KullbackLeibler(strength).maximiser(losses, prior)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-15)


def chi_square_by_trying_every_support(losses: np.ndarray, prior: np.ndarray, strength: float) -> np.ndarray:
    """Brute force: for each set of nodes that carry weight, the stationary point; the best that is feasible."""
    m = len(losses)
    best, best_value = None, -math.inf
    for size in range(1, m + 1):
        for support in map(list, itertools.combinations(range(m), size)):
            # stationary: losses/m - 2 alpha (lambda/p - 1) = nu on the support, sum of lambda = 1
            p, f = prior[support], losses[support] / m
            nu = ((p * (1 + f / (2 * strength))).sum() - 1) * 2 * strength / p.sum()
            weights = np.zeros(m)
            weights[support] = p * (1 + (f - nu) / (2 * strength))
            value = weights @ losses / m - strength * ((weights - prior) ** 2 / prior).sum()
            if weights.min() >= -1e-13 and value > best_value:
                best, best_value = weights, value
    assert best is not None
    return best


@given(seed=st.integers(0, 10**6), exponent=st.integers(-3, 1))
def test_maximiser_under_chi_square_is_the_one_a_search_over_all_supports_finds(seed, exponent):
    losses, prior = case(seed, replicas=1)
    found = fm.ChiSquare(10.0**exponent).maximiser(losses, prior)
    expected = chi_square_by_trying_every_support(losses.numpy().ravel(), prior.numpy().ravel(), 10.0**exponent)
    np.testing.assert_allclose(found.numpy().ravel(), expected, atol=1e-9)


def test_maximiser_without_a_regularizer_gives_all_weight_to_the_worst_node():
    losses = torch.tensor([[[0.1, 3.0, 2.0]], [[5.0, 0.0, 1.0]]], dtype=torch.float64)
    prior = torch.full((1, 3), 1 / 3, dtype=torch.float64)
    assert fm.regularizers.NoRegularizer().maximiser(losses, prior).tolist() == [[[0, 1, 0]], [[1, 0, 0]]]
    assert worst_case(fm.regularizers.NoRegularizer(), losses, prior).flatten().tolist() == [
        1.0,
        5 / 3,
    ]  # with the 1/m of g


@pytest.mark.parametrize("name", [name for name in REGULARIZERS if name != "custom barrier"])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_maximiser_is_on_the_simplex_for_losses_of_any_magnitude(name, scale, dtype):
    losses = torch.tensor([[[3.0, 1.0, 2.9, 0.5, 2.0]]], dtype=dtype) * scale
    prior = torch.tensor([[0.1, 0.3, 0.2, 0.2, 0.2]], dtype=dtype)
    best = REGULARIZERS[name].maximiser(losses, prior)
    assert best.dtype == dtype
    assert is_on_simplex(best, 20 * torch.finfo(dtype).eps)
    if scale == 1e8:
        largest = min(1.0, 0.1 / getattr(REGULARIZERS[name], "level", 0.1))  # the worst node takes what it may
        assert float(best[..., 0]) == pytest.approx(largest, abs=1e-6)


# The stable range of the dual step.


def ascended(regularizer, prior: torch.Tensor, step: float, rounds: int, nudge: float) -> float:
    """How far from the prior ascent on the regularizer alone ends, starting a nudge away from it."""
    n = prior.shape[-1]
    start = torch.zeros_like(prior)
    start[..., 0], start[..., 1] = nudge, -nudge
    weights, own = prior + start, torch.ones(1, n, dtype=torch.float64)
    for _ in range(rounds):
        weights = project_onto_simplex(weights + step * regularizer.gradient(weights, prior, own))
    return float((weights - prior).abs().max())


@given(n=st.integers(2, 8), strength=st.floats(1e-3, 10))
@examples(5)
def test_chi_square_ascent_converges_just_under_p_over_alpha_and_not_just_over(n, strength):
    prior = torch.full((1, n), 1 / n, dtype=torch.float64)
    regularizer = fm.ChiSquare(strength)
    bound = regularizer.max_stable_dual_step(prior)
    assert bound == pytest.approx(1 / (n * strength))
    assert ascended(regularizer, prior, 0.97 * bound, 300, 0.1 / n) < 1e-4 / n
    assert ascended(regularizer, prior, 1.03 * bound, 300, 1e-4 / n) > 1e-2 / n


@given(seed=st.integers(0, 10**6), strength=st.floats(1e-3, 10))
@examples(5)
def test_chi_square_ascent_converges_under_the_bound_of_the_smallest_of_unequal_priors(seed, strength):
    _, prior = case(seed)
    regularizer = fm.ChiSquare(strength)
    bound = regularizer.max_stable_dual_step(prior)
    assert bound == pytest.approx(float(prior.min()) / strength)
    assert ascended(regularizer, prior, 0.9 * bound, 300, 0.1 * float(prior.min())) < 1e-9


@given(n=st.integers(2, 8), strength=st.floats(1e-3, 10))
@examples(5)
def test_kl_ascent_near_the_prior_converges_just_under_2_p_over_alpha_and_not_just_over(n, strength):
    prior = torch.full((1, n), 1 / n, dtype=torch.float64)
    regularizer = fm.regularizers.KullbackLeibler(strength)
    bound = regularizer.max_stable_dual_step(prior)
    assert bound == pytest.approx(2 / (n * strength))
    assert ascended(regularizer, prior, 0.97 * bound, 300, 1e-3 / n) < 1e-6 / n
    assert ascended(regularizer, prior, 1.03 * bound, 300, 1e-4 / n) > 1e-2 / n


@pytest.mark.parametrize(
    ("regularizer", "bound"),
    [(fm.ChiSquare(0.5), 0.2), (fm.regularizers.KullbackLeibler(0.5), 0.4), (fm.regularizers.OwnCoordinate(0.5), 4.0)],
    ids=lambda value: type(value).__name__,
)
def test_check_dual_step_refuses_a_step_beyond_the_bound_with_the_bound(regularizer, bound):
    prior = torch.tensor([0.1, 0.4, 0.5], dtype=torch.float64)
    check_dual_step(bound * 0.999, regularizer, prior)
    check_dual_step(fm.schedules.Geometric(bound * 0.999, 0.5), regularizer, prior)
    for step in (bound * 1.01, fm.schedules.Geometric(bound * 1.01, 0.5), fm.schedules.Constant(bound * 1.01)):
        with refused("dual_step", f"{bound:.3g}"):
            check_dual_step(step, regularizer, prior)


def test_check_dual_step_accepts_any_step_without_curvature():
    prior = torch.full((4,), 0.25)
    check_dual_step(1e6, fm.regularizers.NoRegularizer(), prior)
    check_dual_step(1e6, toys.REGULARIZERS["custom"], prior)


# What a user's own function may be.

PRIOR = torch.tensor([0.2, 0.5, 0.3])


@pytest.mark.parametrize("function", [entropy, chi_square, barrier, quartic], ids=lambda f: f.__name__)
def test_custom_accepts_a_concave_function(function):
    fm.regularizers.Custom(function, 0.1).check(PRIOR)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (convex, ["regularizer", "concave"]),
        (not_scalar, ["regularizer", "scalar", "(3,)"]),
        (not_tensor, ["regularizer", "tensor", "float"]),
    ],
)
def test_custom_function_that_is_convex_or_no_scalar_is_refused(function, names):
    with refused(*names):
        check_dual_step(0.01, fm.regularizers.Custom(function, 0.1), PRIOR)


@pytest.mark.parametrize(
    ("function", "member"), [(chi_square, fm.ChiSquare), (entropy, fm.regularizers.KullbackLeibler)]
)
@given(seed=st.integers(0, 10**6), strength=st.floats(0.02, 5))
@examples(3)
def test_custom_copy_of_a_known_regularizer_gives_what_that_gives(function, member, seed, strength):
    losses, prior = case(seed)
    mine, known = fm.regularizers.Custom(function, strength), member(strength)
    torch.testing.assert_close(mine.maximiser(losses, prior), known.maximiser(losses, prior), rtol=0, atol=1e-7)
    phi = worst_case(known, losses, prior)
    torch.testing.assert_close(worst_case(mine, losses, prior), phi, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("member", [fm.ChiSquare, fm.regularizers.KullbackLeibler, fm.regularizers.OwnCoordinate])
@pytest.mark.parametrize("strength", [0.0, -1.0, math.nan, math.inf])
def test_regularizer_refuses_a_strength_that_is_not_positive_and_finite(member, strength):
    with refused("strength", "> 0", strength, "NoRegularizer"):
        member(strength)


@pytest.mark.parametrize("floor", [0.0, 1.0, -0.5])
def test_kl_refuses_a_floor_outside_0_1(floor):
    with refused("floor", "(0, 1)"):
        fm.regularizers.KullbackLeibler(0.1, floor)
