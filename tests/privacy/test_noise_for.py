"""The noise for a budget: within it, hardly more than needed, and found quickly for sites of many sizes."""

import time

import pytest

from fairmesh.errors import BadInput
from fairmesh.privacy import accounting
from fairmesh.privacy.accounting import Releases, epsilon_of, noise_for, static_shape

pytest.importorskip("dp_accounting")


def _releases(units: int, batch: int, noise: float, count: int) -> Releases:
    return Releases(units, min(1.0, batch / units), static_shape(units, batch), noise, count)


@pytest.mark.parametrize(
    ("epsilon", "delta", "units", "batch", "count"),
    [
        (4.0, 1e-4, 1000, 50, 400),
        (1.0, 1e-5, 60, 50, 20),
        (0.5, 1e-4, 200, 32, 60),
        (8.0, 1e-6, 50, 50, 1),
        (1.0, 1e-4, 1000, 50, 20),
        (4.0, 1e-5, 5000, 50, 4000),
        (30.0, 1e-3, 143, 50, 400),
    ],
)
@pytest.mark.quick_cases("all")
def test_noise_spends_at_most_the_budget_and_at_most_one_percent_less(epsilon, delta, units, batch, count):
    noise = noise_for(epsilon, delta, units, batch, count)
    spent = epsilon_of([_releases(units, batch, noise, count)], delta)
    assert 0.99 * epsilon <= spent <= epsilon


def test_noise_makes_room_for_what_was_released_before():
    before = [_releases(200, 50, 8.0, 100)]
    used = epsilon_of(before, 1e-4)
    noise = noise_for(4.0, 1e-4, 200, 50, 300, before)
    spent = epsilon_of([*before, _releases(200, 50, noise, 300)], 1e-4)
    assert used < 0.99 * 4.0 <= spent <= 4.0
    with pytest.raises(BadInput):
        noise_for(0.9 * used, 1e-4, 200, 50, 300, before)


def test_noise_for_a_site_is_found_in_few_evaluations():
    """So that those of 60 unequal sites take seconds, at 0.01 to 0.1 s each; it took six for large sites."""
    accounting._epsilon.cache_clear()
    accounting._noise.cache_clear()
    sizes = [150, 400, 1000, 2400]
    begun = time.process_time()
    for units in sizes:
        noise_for(4.0, 1e-4, units, 50, 400)
    assert accounting._epsilon.cache_info().misses <= 3 * len(sizes)
    assert time.process_time() - begun < 2.0  # 0.3 on 2 cores


def test_noise_does_not_depend_on_what_was_asked_before():
    alone = noise_for(4.0, 1e-4, 700, 50, 100)
    accounting._epsilon.cache_clear()
    accounting._noise.cache_clear()
    for units in (600, 650, 800):
        noise_for(4.0, 1e-4, units, 50, 100)
    assert noise_for(4.0, 1e-4, 700, 50, 100) == alone
