"""What a site spends: releases of noised sums over random units, and the noise that a budget allows.

Privacy loss distributions of dp-accounting do the sums. Neighbouring data sets differ in one unit, whose rows are there
or not. Gradient and loss of one draw of units are one release, of one Gaussian mechanism.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import bdtrc, log_ndtr, ndtr

from fairmesh.errors import BadInput, optional

_CUT = 1e-5  # chance that a draw has more units than the static shape holds; accounted for
_INTERVAL = 2e-3  # of the discretized privacy loss, which is rounded up: epsilon is less than 0.1 % too large
_COARSE = 4e-3  # relative; how much larger epsilon is, about, on the grid on which noise is sought
_COARSEST = 8  # intervals of the usual grid in one of a coarser grid
TOLERANCE = 3e-3  # relative; the noise that is found spends at most the budget, and at least this share less
_LARGEST_NOISE = 1e6
ACCOUNTANT = "dp-accounting, privacy loss distributions of truncated Poisson sampling"


class Releases(NamedTuple):
    """Equal releases of one site: each draws every unit by chance, and adds noise to the sum over those drawn."""

    units: int  # of the site, which is public
    rate: float  # the chance of a unit to be drawn
    most: int  # units that a draw has at most; of more, a random subset is taken
    noise: float  # standard deviation over the largest contribution of a unit
    times: int  # how many releases

    def table(self) -> dict[str, float]:
        """Returns it as a table of numbers."""
        return dict(self._asdict())


def static_shape(units: int, batch: int) -> int:
    """Returns how many units a draw has at most, so that more are drawn once in 100,000 rounds."""
    beyond = bdtrc(np.arange(units + 1), units, min(1.0, batch / units))  # the chance of more units than each number
    return min(units, int(np.argmax(beyond <= _CUT)) + 1)


def epsilon_of(releases: Sequence[Releases], delta: float) -> float:
    """Returns the epsilon that all these releases spend together, at this delta. It is an upper bound."""
    spent = [part for part in releases if part.times]
    return _epsilon(tuple(spent), delta) if spent else 0.0


@functools.lru_cache(maxsize=4096)
def _epsilon(releases: tuple[Releases, ...], delta: float, intervals: int = 1) -> float:
    """Returns the epsilon of releases by a grid that has every so many points of the usual one, and whose result is
    therefore larger."""
    if any(not 0 < part.noise < math.inf for part in releases):
        return math.inf
    return float(_accountant(releases, intervals).get_epsilon(delta))


def deltas_of(releases: Sequence[Releases], epsilons: Sequence[float]) -> list[float]:
    """Returns the delta that these releases have at each epsilon: upper bounds, on a coarser grid, which together say
    how well anybody can tell two neighbouring data sets apart."""
    accountant = _accountant(releases, _COARSEST // 2)
    return [float(accountant.get_delta(epsilon)) for epsilon in epsilons]


def _accountant(releases: Sequence[Releases], intervals: int) -> Any:
    with optional("privacy"):
        import dp_accounting
        from dp_accounting import pld
    accountant = pld.PLDAccountant(value_discretization_interval=intervals * _INTERVAL)
    for part in releases:
        event = dp_accounting.TruncatedSubsampledGaussianDpEvent(part.units, part.rate, part.most, part.noise)
        accountant.compose(dp_accounting.SelfComposedDpEvent(event, part.times))
    return accountant


def noise_for(
    epsilon: float, delta: float, units: int, batch: int, count: int, before: Sequence[Releases] = ()
) -> float:
    """Returns the least noise, as a multiple of a unit's largest contribution, with which a site stays in its budget.

    Args:
        epsilon: The budget, together with what was spent before.
        delta: The delta of the budget.
        units: How many units the site has.
        batch: How many of them are expected in a draw.
        count: How many releases there are.
        before: What the site has released before. Default: ().

    Raises:
        BadInput: No noise is enough.
    """
    return _noise(epsilon, delta, units, batch, count, tuple(before))


@functools.lru_cache(maxsize=4096)
def _noise(epsilon: float, delta: float, units: int, batch: int, count: int, before: tuple[Releases, ...]) -> float:
    rate, most = min(1.0, batch / units), static_shape(units, batch)
    in_all = max(1, count + sum(part.times for part in before))
    # What rounding adds grows with the releases and with the square of the interval (measured).
    coarse = round(math.sqrt(_COARSE * epsilon**1.5 / in_all) / _INTERVAL)
    intervals = max(1, min(_COARSEST, coarse))

    def spent(noise: float) -> float:
        return _epsilon((*before, Releases(units, rate, most, noise, count)), delta, intervals)

    if epsilon_of(before, delta) >= epsilon:
        raise BadInput(
            f"privacy.epsilon = {epsilon:g} is spent: what was released before has used {epsilon_of(before, delta):.3g}"
        )
    # In logarithms epsilon falls nearly as a line, so a secant finds it in a few steps; the bracket keeps it safe.
    low, high = 1e-2, _LARGEST_NOISE  # spends too much, spends little enough
    noise, less = _by_limit(epsilon, delta, rate, count), _by_limit(1.1 * epsilon, delta, rate, count)
    slope = math.log(1.1) / math.log(less / noise) if 0 < less < noise else -1.0
    noise = min(max(noise, 2 * low), high / 2)
    target = math.log(epsilon * (1 - TOLERANCE / 2))
    points: list[tuple[float, float]] = []
    for _ in range(60):
        found = spent(noise)
        low, high = (low, noise) if found <= epsilon else (noise, high)
        if found <= epsilon <= found * (1 + TOLERANCE) or high / low < 1 + 1e-5:
            break
        points.append((math.log(noise), math.log(max(found, 1e-9)) if found < math.inf else math.inf))
        noise = _next(points, target, low, high, slope)
    if high >= _LARGEST_NOISE or not spent(high) <= epsilon:
        raise BadInput(f"no noise keeps {count} releases of {units} units within privacy.epsilon = {epsilon:g}")
    return high


def _by_limit(epsilon: float, delta: float, rate: float, count: int) -> float:
    """Returns about the noise for a budget, by the central limit theorem of Gaussian differential privacy (Bu, Dong,
    Long, Su, 2020). It is where the search begins, and no bound."""

    low, high = 1e-9, 1e4  # of mu, the distance between the two Gaussians that the releases are about as good as
    while high / low > 1 + 1e-6:
        mu = math.sqrt(low * high)
        less = math.exp(min(epsilon + log_ndtr(-mu / 2 - epsilon / mu), 0.0))
        low, high = (mu, high) if ndtr(mu / 2 - epsilon / mu) - less < delta else (low, mu)
    mu = low
    spread = math.log1p((mu / rate) ** 2 / max(1, count))
    return 1 / math.sqrt(spread) if spread > 0 else _LARGEST_NOISE


def _next(points: Sequence[tuple[float, float]], target: float, low: float, high: float, slope: float) -> float:
    """Returns the noise to try next: by a secant through the last two points, or first by a slope, if it lies between
    the bounds."""
    x, y = points[-1]
    if len(points) > 1 and points[-2][1] != y and math.isfinite(points[-2][1]) and math.isfinite(y):
        slope = (y - points[-2][1]) / (x - points[-2][0])
    if math.isfinite(y) and slope < -0.05:
        guess = math.exp(min(x + (target - y) / slope, 30.0))
        if low < guess < high:
            return guess
    return math.sqrt(low * min(high, 4 * max(low, math.exp(x))))


def shared_noise(noise: float, loss_share: float) -> tuple[float, float]:
    """Returns the noise multiples of gradient and loss, which together are one release with multiple `noise`:
    noise^-2 = gradient^-2 + loss^-2.

    Args:
        noise: That of the release.
        loss_share: The share of the budget for the loss, in [0, 1].
    """
    gradient = math.inf if loss_share == 1 else noise / math.sqrt(1 - loss_share)
    return gradient, math.inf if loss_share == 0 else noise / math.sqrt(loss_share)
