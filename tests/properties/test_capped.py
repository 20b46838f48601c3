"""Caps on weights, lambda_i <= p_i / level: the projection, the inner maxima, and what both ends of the level mean."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fairmesh as fm
from fairmesh.algorithms.base import capped, check_dual_step
from tests import toys
from tests.examples import examples
from tests.properties.test_regularizers import case, most_under_caps
from tests.refusals import refused

INNER = {name: toys.REGULARIZERS[name] for name in ("chi-square", "kl", "none", "own-coordinate")}
EVERY = pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
LEVELS = st.floats(0.02, 1.0)
SEEDS = st.integers(0, 10**6)


def projected_under_caps(point: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """The nearest point of the simplex where no weight is above its cap: the threshold lies between two of those at
    which an entry leaves zero or meets its cap, and there the sum is linear."""

    def clipped(threshold: float) -> np.ndarray:
        return np.clip(point - threshold, 0.0, caps)

    thresholds = sorted([*point, *(point - caps)], reverse=True)
    for above, below in itertools.pairwise(thresholds):
        high, low = clipped(below).sum(), clipped(above).sum()
        if high >= 1 and high > low:
            return clipped(above + (below - above) * (1 - low) / (high - low))
    return caps.copy()  # they sum to one


def rows_of(seed: int, n: int) -> torch.Tensor:
    """Rows (3, 2, n) of some magnitude, some with ties, one with an entry beyond all others."""
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(3, 2, n)) * 10.0 ** generator.integers(-3, 4)
    rows[1] = rows[1].round(1)
    rows[2, 0, generator.integers(n)] = 1e9
    return torch.tensor(rows)


@given(seed=SEEDS, level=LEVELS)
def test_capped_projection_is_feasible_and_optimal(seed, level):
    # p is the projection of x iff <x - p, v - p> <= 0 for every vertex v; the largest <x - p, v> is a greedy filling
    _, prior = case(seed)
    rows = rows_of(seed, prior.shape[-1])
    found, caps = fm.regularizers.Capped(level).project(rows, prior), prior / level
    assert found.shape == rows.shape
    assert (found >= 0).all()
    assert (found <= caps).all()
    assert (found.sum(dim=-1) - 1).abs().max() < 1e-12
    beyond = rows - found
    uphill = most_under_caps(beyond, caps) - (beyond * found).sum(dim=-1)
    assert (uphill <= 1e-12 * (1 + rows.abs().amax(dim=-1))).all()


@given(seed=SEEDS, level=LEVELS)
def test_capped_projection_of_one_huge_entry_projects_the_rest_as_if_alone(seed, level):
    _, prior = case(seed)
    n = prior.shape[-1]
    rows = rows_of(seed, n)[0].clamp(-1, 1).float()
    far = rows.clone()
    far[:, 0] = 1e9  # float32: one unit of it is 64
    found = fm.regularizers.Capped(level).project(far, prior.float()).double()
    cap = min(1.0, float(prior[0, 0]) / level)
    assert found[:, 0].tolist() == pytest.approx([cap] * 2, abs=1e-6)
    if cap < 1 - 1e-3:
        caps = (prior[0, 1:] / level / (1 - cap)).numpy()
        for row, one in zip(rows[:, 1:].double().numpy(), found[:, 1:].numpy()):
            np.testing.assert_allclose(one, (1 - cap) * projected_under_caps(row / (1 - cap), caps), atol=2e-6)


@given(seed=SEEDS)
def test_capped_projection_of_a_batch_is_row_by_row_and_changes_nothing(seed):
    _, prior = case(seed)
    rows, member = rows_of(seed, prior.shape[-1]), fm.regularizers.Capped(0.6)
    before, together = rows.clone(), member.project(rows, prior)
    assert torch.equal(rows, before)
    for k, i in itertools.product(range(3), range(2)):
        torch.testing.assert_close(member.project(rows[k, i : i + 1], prior)[0], together[k, i], rtol=0, atol=1e-14)


@EVERY
@given(seed=SEEDS)
@examples(8)
def test_capped_at_level_1_allows_only_the_prior(inner, seed):
    losses, prior = case(seed)
    member = fm.regularizers.Capped(1.0, inner)
    for found in (member.project(rows_of(seed, prior.shape[-1]), prior), member.maximiser(losses, prior)):
        torch.testing.assert_close(found, prior.expand_as(found), rtol=0, atol=1e-14)


@EVERY
@given(seed=SEEDS)
@examples(8)
def test_capped_below_every_prior_caps_nothing(inner, seed):
    losses, prior = case(seed)
    member, rows = fm.regularizers.Capped(float(prior.min()) * 0.99, inner), rows_of(seed, prior.shape[-1])
    torch.testing.assert_close(member.project(rows, prior), inner.project(rows, prior), rtol=0, atol=1e-12)
    torch.testing.assert_close(member.maximiser(losses, prior), inner.maximiser(losses, prior), rtol=0, atol=1e-11)


@given(seed=SEEDS, level=LEVELS)
def test_capped_without_regularizer_gives_the_conditional_value_at_risk(seed, level):
    # Rockafellar and Uryasev: the least over t of t + E[(f - t)+] / level, attained at one of the losses
    losses, prior = case(seed)
    n = losses.shape[-1]
    found = (
        (fm.regularizers.Capped(level, fm.regularizers.NoRegularizer()).maximiser(losses, prior) * losses)
        .sum(dim=-1)
        .flatten()
    )
    for value, f in zip(found.tolist(), losses.reshape(-1, n)):
        bounds = [float(t + (prior[0] * (f - t).clamp(min=0)).sum() / level) for t in f]
        assert value == pytest.approx(min(bounds), rel=1e-12)


def by_trying_every_split(gradient, curvature: np.ndarray, centre: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """Brute force for <gradient, x> - sum curvature (x - centre)^2 / 2: each node at zero, at its cap or in between."""
    best, best_value = None, -math.inf
    for split in itertools.product((0, 1, 2), repeat=len(caps)):
        chosen = np.array(split)
        free, weights = chosen == 2, np.where(chosen == 1, caps, 0.0)
        if free.any():
            inverse = 1 / curvature[free]
            left = 1 - weights[~free].sum()
            price = ((centre[free] + gradient[free] * inverse).sum() - left) / inverse.sum()
            weights[free] = centre[free] + (gradient[free] - price) * inverse
        value = gradient @ weights - (curvature * (weights - centre) ** 2).sum() / 2
        feasible = abs(weights.sum() - 1) < 1e-9 and (weights >= -1e-12).all() and (weights <= caps + 1e-12).all()
        if feasible and value > best_value:
            best, best_value = weights, value
    assert best is not None
    return best


@pytest.mark.parametrize("name", ["chi-square", "own-coordinate"])
@given(seed=SEEDS, level=LEVELS, exponent=st.integers(-3, 1))
@examples(8)
def test_capped_squares_have_the_maximum_found_by_searching_all_splits(name, seed, level, exponent):
    losses, prior = case(seed, replicas=1)
    losses, prior = losses[..., :5], prior[..., :5] / prior[..., :5].sum()
    n, strength, p = losses.shape[-1], 10.0**exponent, prior.numpy().ravel()
    inner = toys.of_strength(INNER[name], strength)
    curvature = 2 * strength / p if name == "chi-square" else np.full(n, strength / n)
    expected = by_trying_every_split(losses.numpy().ravel() / n, curvature, p, p / level)
    found = fm.regularizers.Capped(level, inner).maximiser(losses, prior)
    np.testing.assert_allclose(found.numpy().ravel(), expected, atol=1e-8)


@given(seed=SEEDS, level=LEVELS, strength=st.floats(1e-3, 10))
def test_capped_kl_is_the_tilted_prior_cut_off_and_scaled_to_one(seed, level, strength):
    losses, prior = case(seed, replicas=1)
    scores, p = losses.numpy().ravel() / (losses.shape[-1] * strength), prior.numpy().ravel()
    low, high, weights = scores.min() - 100, scores.max() + 100, p
    for _ in range(200):
        middle = (low + high) / 2
        with np.errstate(over="ignore"):
            weights = np.minimum(p * np.exp(scores - middle), p / level)
        low, high = (middle, high) if weights.sum() > 1 else (low, middle)
    found = fm.regularizers.Capped(level, fm.regularizers.KullbackLeibler(strength)).maximiser(losses, prior)
    np.testing.assert_allclose(found.numpy().ravel(), weights, atol=1e-9)


@EVERY
def test_capped_keeps_value_gradient_and_stable_steps(inner):
    _, prior = case(3)
    n = prior.shape[-1]
    weights, own = rows_of(3, n)[0].softmax(dim=-1), torch.eye(n, dtype=torch.float64)[:2]
    member = fm.regularizers.Capped(0.5, inner)
    assert torch.equal(member.value(weights, prior), inner.value(weights, prior))
    assert torch.equal(member.gradient(weights, prior, own), inner.gradient(weights, prior, own))
    assert member.max_stable_dual_step(prior) == inner.max_stable_dual_step(prior)


def test_capped_regularizer_is_named_when_a_dual_step_is_too_long():
    with refused("Capped(level=0.5, inner=ChiSquare(strength=0.5))"):
        check_dual_step(0.3, fm.regularizers.Capped(0.5, fm.ChiSquare(0.5)), torch.tensor([0.1, 0.9]))


@pytest.mark.parametrize("level", [0.0, -0.1, 1.01, math.nan])
def test_capped_refuses_a_level_outside_zero_to_one(level):
    with refused("level", "(0, 1]", level):
        fm.regularizers.Capped(level)


@pytest.mark.parametrize("inner", [toys.REGULARIZERS["custom"], fm.regularizers.Capped(0.5)], ids=["custom", "capped"])
def test_capped_refuses_what_has_no_known_maximum_under_a_cap(inner):
    with refused("inner", "ChiSquare", "KullbackLeibler"):
        fm.regularizers.Capped(0.5, inner)


# Clipped losses.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_loss_cap_cuts_losses_and_takes_nan_as_the_cap(dtype):
    losses = torch.tensor([[0.5], [2.0], [9.0], [math.nan], [math.inf], [-math.inf]], dtype=dtype)
    seen = capped(losses, 2.5)
    assert seen.dtype == dtype
    assert seen.flatten().tolist() == [0.5, 2.0, 2.5, 2.5, 2.5, 2.5]
    assert capped(losses, None) is losses


def test_loss_cap_above_every_loss_changes_nothing_and_below_all_makes_them_equal():
    problem = toys.problem()
    plain, above, below = (
        fm.train(problem, fm.Ring(), fm.ADGDA(1.0, 0.3, loss_cap=cap), 10, dtype="float64").state.algorithm
        for cap in (None, 1e6, 1e-6)
    )
    assert torch.equal(plain.duals, above.duals)
    assert torch.equal(plain.models, above.models)
    spread = (below.duals - problem.prior_of_sites).abs().max()
    assert spread < 1e-4 < (plain.duals - problem.prior_of_sites).abs().max()
