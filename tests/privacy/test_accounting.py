"""What releases spend: against two other accountants, against the exact mechanism, and as the noise is chosen by it."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import comb

from fairmesh.privacy.accounting import Releases, epsilon_of, noise_for, shared_noise, static_shape
from tests.refusals import refused

DELTA = 1e-5


def _untruncated(rate: float, noise: float, times: int, units: int = 1000) -> Releases:
    return Releases(units, rate, units, noise, times)


@pytest.mark.parametrize(
    ("rate", "noise", "times"),
    [(0.01, 0.7, 10), (0.05, 1.0, 400), (0.3, 3.0, 100), (0.2, 1.5, 1), (0.01, 2.0, 2000)],
)
def test_epsilon_of_lies_within_the_interval_of_prv_accountant(rate, noise, times):
    """Its interval holds the true epsilon, so an upper bound lies above its lower end, and a tight one at its upper
    end at most."""
    prv_accountant = pytest.importorskip("prv_accountant")
    sampled = prv_accountant.privacy_random_variables.PoissonSubsampledGaussianMechanism(rate, noise)
    other = prv_accountant.PRVAccountant(sampled, max_self_compositions=times, eps_error=0.01, delta_error=DELTA / 1000)
    low, _, high = other.compute_epsilon(DELTA, times)
    found = epsilon_of([_untruncated(rate, noise, times)], DELTA)
    assert low <= found <= high * 1.001


@pytest.mark.parametrize(("noise", "times"), [(4.0, 1), (10.0, 20)])
def test_epsilon_of_all_units_lies_above_the_lower_bound_of_pld_accounting_and_near_it(noise, times):
    """Its lower bounds are for a unit that is in a fixed number of steps: here in the only one of every epoch."""
    api = pytest.importorskip("PLD_accounting.random_allocation_api")
    _, low = api.gaussian_allocation_epsilon_range(
        delta=DELTA, sigma=noise, num_steps=1, num_selected=1, num_epochs=times, epsilon_accuracy=0.01
    )
    found = epsilon_of([_untruncated(1.0, noise, times)], DELTA)
    assert low <= found <= low + 0.02


def _delta_of_gaussian(epsilon: float, shift: float) -> float:
    return float(
        stats.norm.cdf(shift / 2 - epsilon / shift) - math.exp(epsilon) * stats.norm.cdf(-shift / 2 - epsilon / shift)
    )


@pytest.mark.parametrize(("noise", "times"), [(1.0, 1), (5.0, 3), (20.0, 400)])
def test_epsilon_of_all_units_is_that_of_the_gaussian_mechanism(noise, times):
    found = epsilon_of([_untruncated(1.0, noise, times)], DELTA)
    shift = math.sqrt(times) / noise
    assert _delta_of_gaussian(found, shift) <= DELTA
    assert _delta_of_gaussian(found / 1.002, shift) >= DELTA


def _deltas(units: int, rate: float, most: int, noise: float, other: float) -> dict[float, float]:
    """Returns the exact delta of one release by epsilon, larger of both directions, if one unit contributes 1,
    or nothing, and all others contribute `other`."""
    inside = outside = 0.0
    x = np.linspace(-8 * noise - most - 1, 8 * noise + most + 1, 8_001)
    for drawn in range(units):  # of the others
        chance = comb(units - 1, drawn) * rate**drawn * (1 - rate) ** (units - 1 - drawn)
        taken = min(1.0, most / (drawn + 1))  # whether the unit stays in the draw, if it is drawn
        with_it = min(drawn + 1, most) - 1
        without = min(drawn + 1, most)  # others that are taken, if the unit is drawn and cut off
        parts = [((1 - rate), min(drawn, most), 0.0), (rate * (1 - taken), without, 0.0), (rate * taken, with_it, 1.0)]
        for weight, others, there in parts:
            inside = inside + chance * weight * stats.norm.pdf(x, others * other + there, noise)
            outside = outside + chance * weight * stats.norm.pdf(x, others * other, noise)
    step = x[1] - x[0]
    return {
        epsilon: step * max(
            float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) for p, q in ((inside, outside), (outside, inside))
        )
        for epsilon in (0.1, 0.5, 1.0, 2.0)
    }  # fmt: skip


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("units", "rate", "most", "noise"), [(30, 0.03, 1, 0.5), (4, 0.5, 2, 1.0), (5, 0.9, 1, 2.0)])
def test_epsilon_of_covers_a_unit_replaced_by_nothing_also_where_draws_are_cut_off(units, rate, most, noise):
    """The accountant's event is about a unit that is there or not. Here the empty unit still takes a place in a draw,
    which matters when draws are cut off, so the exact mechanism is computed."""
    for other in (-1.0, -0.5, 0.0, 0.5, 1.0):
        for epsilon, exact in _deltas(units, rate, most, noise, other).items():
            if exact > 1e-9:
                assert epsilon_of([Releases(units, rate, most, noise, 1)], exact) >= epsilon - 1e-6


def test_epsilon_of_rises_with_rounds_and_falls_with_noise_and_delta():
    at = Releases(1000, 0.05, 90, 1.5, 100)
    spent = [epsilon_of([at._replace(times=times)], DELTA) for times in (0, 1, 10, 100, 1000)]
    assert spent[0] == 0
    assert spent == sorted(set(spent))
    spent = [epsilon_of([at._replace(noise=noise)], DELTA) for noise in (0.5, 1.0, 2.0, 8.0)]
    assert spent == sorted(set(spent), reverse=True)
    spent = [epsilon_of([at], delta) for delta in (1e-7, 1e-6, 1e-5, 1e-3)]
    assert spent == sorted(set(spent), reverse=True)


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan])
def test_epsilon_of_a_release_without_noise_is_infinite(noise):
    assert epsilon_of([_untruncated(0.1, noise, 1)], DELTA) == math.inf


def test_epsilon_of_several_releases_does_not_depend_on_their_order_nor_on_how_they_are_written():
    some, others = _untruncated(0.1, 1.5, 30), _untruncated(0.02, 0.8, 10)
    apart = [some._replace(times=10), others, some._replace(times=20)]
    assert epsilon_of(apart, DELTA) == pytest.approx(epsilon_of([others, some], DELTA), rel=1e-3)


@pytest.mark.parametrize(
    ("epsilon", "delta", "units", "batch", "count"),
    [(4, 1e-3, 143, 50, 400), (1, 1e-4, 999, 50, 9), (8, 1e-5, 5000, 50, 40), (2, 0.01, 9, 9, 3), (1, 0.01, 8, 4, 1)],
)
def test_noise_for_spends_at_most_the_budget_and_nearly_all_of_it(epsilon, delta, units, batch, count):
    noise = noise_for(epsilon, delta, units, batch, count)
    spent = epsilon_of([Releases(units, batch / units, static_shape(units, batch), noise, count)], delta)
    assert 0.99 * epsilon <= spent <= epsilon


def test_noise_for_counts_what_was_released_before():
    before = [Releases(1000, 0.05, static_shape(1000, 50), 1.5, 100)]
    noise = noise_for(4, 1e-4, 1000, 50, 200, before)
    both = [*before, Releases(1000, 0.05, static_shape(1000, 50), noise, 200)]
    assert 0.99 * 4 <= epsilon_of(both, 1e-4) <= 4
    assert noise > noise_for(4, 1e-4, 1000, 50, 200)
    spent = epsilon_of(before, 1e-4)
    with refused("privacy.epsilon", "spent"):
        noise_for(spent / 2, 1e-4, 1000, 50, 1, before)


def test_noise_for_refuses_a_budget_that_no_noise_keeps():
    with refused("privacy.epsilon", 1e-9):
        noise_for(1e-9, 1e-12, 100, 50, 10_000)


@pytest.mark.parametrize(("units", "batch"), [(143, 50), (1000, 50), (20_000, 200), (10, 10), (60, 59)])
def test_static_shape_holds_all_but_one_of_a_hundred_thousand_draws(units, batch):
    shape = static_shape(units, batch)
    assert batch <= shape <= units
    assert stats.binom.sf(shape, units, batch / units) <= 1e-5
    assert shape == units or stats.binom.sf(shape - 2, units, batch / units) > 1e-5


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_shared_noise_makes_gradient_and_loss_together_one_release(share):
    gradient, loss = shared_noise(1.7, share)
    assert gradient**-2 + loss**-2 == pytest.approx(1.7**-2)
    assert (loss == math.inf) == (share == 0)
    assert (gradient == math.inf) == (share == 1)


@pytest.mark.parametrize("rate", [0.02, 0.1])
def test_two_events_of_their_own_spend_less_than_one_event_that_releases_both(rate):
    """One draw for both means that whoever sees one of them learns about the other: accounted as two sampled events, a
    release would be thought cheaper than it is."""
    gradient, loss = shared_noise(1.0, 0.5)
    apart = [_untruncated(rate, gradient, 1), _untruncated(rate, loss, 1)]
    assert epsilon_of(apart, DELTA) < 0.9 * epsilon_of([_untruncated(rate, 1.0, 1)], DELTA)


def test_without_sampling_two_events_spend_what_one_event_does():
    gradient, loss = shared_noise(2.0, 0.3)
    apart = [_untruncated(1.0, gradient, 1), _untruncated(1.0, loss, 1)]
    assert epsilon_of(apart, DELTA) == pytest.approx(epsilon_of([_untruncated(1.0, 2.0, 1)], DELTA), rel=2e-3)
