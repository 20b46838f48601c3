"""Estimates and their intervals: of one site, of the worst of several, of sums, and of paired differences.
docs/concepts/evidence.md has the measured coverage."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import betainc, betaincinv, ndtr, ndtri, stdtrit

LEVEL = 0.95
ANY = -math.inf, math.inf  # limits of a number that has none
_MOST_SKEWED = 0.8  # times 1 / quantile: beyond 1, Hall's polynomial is flat and its inverse leaps
_HEAVY = 0.6  # skewness of a mean beyond which its interval may be too narrow (docs/concepts/evidence.md)
_LARGEST_RATIO = 20.0  # of the logarithm of a bound to its value
_SCORES = np.linspace(-5.0, 5.0, 40)  # normal scores at which a confidence distribution is tabulated; none is 0
_UNSURE = 0.3  # standard errors by which a site may be nearer to the worst than it seems (docs/concepts/evidence.md)
_LEAN = 0.1  # by so much of a row the prior of a paired difference leans towards a bound: counts are whole numbers
_NODES = (np.arange(128) + 0.5) / 128  # quantiles by which a distribution is averaged over


class Estimate(ABC):
    """A number that was estimated from test rows: its value, the rows behind it, and its interval."""

    value: float
    rows: int

    @abstractmethod
    def bound(self, tail: float, upper: bool) -> float:
        """Returns the bound that the truth lies beyond with probability `tail`; NaN if it is not known."""

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Returns the interval that covers the truth with probability `level`.

        Args:
            level: The probability, in (0, 1). Default: 0.95.
        """
        tail = (1.0 - level) / 2
        return self.bound(tail, upper=False), self.bound(tail, upper=True)

    def centred(self, level: float = LEVEL) -> tuple[float, float, float]:
        """Returns lower end, centre and upper end as sums of estimates need them: the centre has no bias.

        Args:
            level: The probability, in (0, 1). Default: 0.95.
        """
        low, high = self.interval(level)
        return low, self.value, high


@dataclass(frozen=True)
class Share(Estimate):
    """A share, such as that of right answers, or another metric in [0, 1].

    Its interval is Wilson's, and its one-sided bounds are those of Clopper and Pearson. Both use the number of
    independent rows that would have the same variance.

    Args:
        value: The share.
        rows: How many test rows there are.
        effective: The number of independent rows with the same variance; None for `rows`. Default: None.
        freedom: The degrees of freedom of that variance; inf for many. Default: inf.

    Example:
        >>> from fairmesh.evidence import Share
        >>> low, high = Share(1.0, rows=20).interval()
        >>> round(low, 3), high
        (0.839, 1.0)
    """

    value: float
    rows: int
    effective: float | None = None
    freedom: float = math.inf

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        tail = (1.0 - level) / 2
        n, z = _sure_rows(self, tail), float(ndtri(1.0 - tail))
        if math.isnan(self.value) or n <= 0:
            return math.nan, math.nan
        centre = (self.value + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(self.value * (1 - self.value) / n + (z / (2 * n)) ** 2) / (1 + z * z / n)
        return (0.0 if self.value == 0 else max(0.0, centre - half)), (
            1.0 if self.value == 1 else min(1.0, centre + half)
        )

    def bound(self, tail: float, upper: bool) -> float:
        n = _sure_rows(self, tail)
        if math.isnan(self.value) or n <= 0:
            return math.nan
        if self.value == float(upper):
            return self.value
        return float(_clopper_pearson(self.value, n, 1.0 - tail if upper else tail, upper))


def _clopper_pearson(value: float, rows: Any, probability: Any, upper: bool) -> Any:
    """Returns quantiles of the confidence distribution whose bounds on the side `upper` are exact. Rows that are all
    right or all wrong count as if half a row were of the other kind."""
    right, wrong = value * rows, (1.0 - value) * rows
    right, wrong = (right + 1.0, np.maximum(wrong, 0.5)) if upper else (np.maximum(right, 0.5), wrong + 1.0)
    return betaincinv(right, wrong, probability)


@dataclass(frozen=True)
class PairedShare(Estimate):
    """The difference of two shares of the same rows, such as that of two models' right answers.

    Its bounds are quantiles of its distribution given the rows, under Jeffreys' prior for a trinomial distribution:
    half a row is added to those where only the first is right, only the second, and to the others. Of these, a tenth of
    a row moves to the side of the bound from the opposite one, since counts are whole numbers.

    Args:
        only_a: The share of the rows at which only the first is right.
        only_b: The share of the rows at which only the second is right.
        rows: How many test rows there are.
        effective: The number of independent rows with the same variance; None for `rows`. Default: None.
        freedom: The degrees of freedom of that variance; inf for many. Default: inf.

    Example:
        >>> from fairmesh.evidence import PairedShare
        >>> low, high = PairedShare(0.1, 0.0, rows=100).interval()
        >>> round(low, 2), round(high, 2)
        (0.04, 0.17)
    """

    only_a: float
    only_b: float
    rows: int
    effective: float | None = None
    freedom: float = math.inf

    @property
    def value(self) -> float:  # type: ignore[override]
        """The difference."""
        return self.only_a - self.only_b

    def bound(self, tail: float, upper: bool) -> float:
        n = _sure_rows(self, tail)
        if math.isnan(self.value) or n <= 0:
            return math.nan
        if upper:
            return max(self.value, _trinomial_quantile(n * self.only_a, n * self.only_b, n, 1.0 - tail))
        return min(self.value, -_trinomial_quantile(n * self.only_b, n * self.only_a, n, 1.0 - tail))


@lru_cache(maxsize=4096)  # few rows give the same counts again and again
def _trinomial_quantile(a: float, b: float, n: float, probability: float) -> float:
    """Returns a quantile of the difference of two shares, given that a and b of n rows fall to them. It is
    meant as an upper bound, so the prior leans to a."""
    apart = betaincinv(a + b + 1.0, max(0.0, n - a - b) + 0.5, _NODES)  # the share of rows that differ

    def excess(difference: float) -> float:
        of_first = np.clip((1.0 + difference / apart) / 2, 0.0, 1.0)  # of the rows that differ
        return float(betainc(a + 0.5 + _LEAN, b + 0.5 - _LEAN, of_first).mean()) - probability

    return _root(excess, -1.0, 1.0)


def _root(function: Callable[[float], float], low: float, high: float, tolerance: float = 1e-9) -> float:
    from scipy.optimize import brentq  # takes a tenth of a second to import, and most runs need none

    return float(brentq(function, low, high, xtol=tolerance))  # type: ignore[arg-type]


def _sure_rows(estimate: Share | PairedShare, tail: float) -> float:
    """Returns the effective number of rows, fewer if their variance is itself uncertain."""
    rows = float(estimate.rows if estimate.effective is None else estimate.effective)
    return rows * (float(ndtri(tail)) / quantile(tail, estimate.freedom)) ** 2


@dataclass(frozen=True)
class Number(Estimate):
    """A number, such as a mean loss.

    Its interval is Student's t with Hall's (1992) correction for skewness. The correction is limited, so that no end
    moves away by more than about a half; `is_heavy` says where the tails need more.

    Args:
        value: The number.
        rows: How many test rows there are.
        error: Its standard error; NaN if that is not known, as for one row.
        freedom: The degrees of freedom of the error; inf for many. Default: inf.
        skew: The skewness of the number's distribution: that of a row over the root of the rows. Default: 0.0.
        limits: The lowest and the highest possible value. Default: (-inf, inf).
        relative: Whether the interval is that of the logarithm, for a positive number. Default: False.

    Example:
        >>> from fairmesh.evidence import Number
        >>> low, high = Number(2.0, rows=100, error=0.1).interval()
        >>> round(low, 2), round(high, 2)
        (1.8, 2.2)
    """

    value: float
    rows: int
    error: float
    freedom: float = math.inf
    skew: float = 0.0
    limits: tuple[float, float] = ANY
    relative: bool = False

    @property
    def is_heavy(self) -> bool:
        """Whether the rows have so heavy a tail that intervals are too narrow."""
        return abs(self.skew) > _HEAVY

    def bound(self, tail: float, upper: bool) -> float:
        if math.isnan(self.value) or math.isnan(self.error):
            return math.nan
        away = _without_skewness(quantile(tail if upper else 1.0 - tail, self.freedom), self.skew) * self.error
        if self.relative and self.value > 0:
            return self.value * math.exp(min(-away / self.value, _LARGEST_RATIO))
        least, most = self.limits
        moved = min(max(self.value - away, least), most)
        return max(moved, self.value) if upper else min(moved, self.value)


def _without_skewness(score: float, skew: float) -> float:
    """Returns the quantile of a studentised mean whose transform by Hall's cubic polynomial is `score`."""
    limit = _MOST_SKEWED / max(abs(score), 1e-9)
    skew = min(max(skew, -limit), limit)
    if abs(skew) < 1e-6:
        return score
    return 3.0 * (float(np.cbrt(1.0 + skew * (score - skew / 6.0))) - 1.0) / skew


@dataclass(frozen=True)
class Combined(Estimate):
    """A sum of estimates, each times a factor. Its bounds follow from theirs (the MOVER method of Zou and Donner), so
    they are as lopsided as theirs.

    Args:
        parts: The estimates.
        factors: The factor of each.
        correlation: The correlation of two parts; others are independent. Default: 0.0.
        debiased: Whether parts are centred without the bias of a worst site. Default: False.
    """

    parts: tuple[Estimate, ...]
    factors: tuple[float, ...]
    correlation: float = 0.0
    debiased: bool = False

    @property
    def value(self) -> float:  # type: ignore[override]
        """The sum."""
        return sum(factor * part.value for factor, part in zip(self.factors, self.parts))

    @property
    def rows(self) -> int:  # type: ignore[override]
        """How many test rows there are in all."""
        return sum(part.rows for part in self.parts)

    def bound(self, tail: float, upper: bool) -> float:
        centre, moves = 0.0, []
        for part, factor in zip(self.parts, self.factors):
            centred = type(part).centred if self.debiased else Estimate.centred
            low, middle, high = centred(part, 1.0 - 2 * tail)
            ends = factor * (low - middle), factor * (high - middle)
            centre += factor * middle
            moves.append(max(ends) if upper else min(ends))
        if any(map(math.isnan, moves)):
            return math.nan
        squares = sum(move * move for move in moves)
        if self.correlation:
            signs = math.copysign(1.0, self.factors[0]) * math.copysign(1.0, self.factors[-1])
            squares += signs * (2 * self.correlation * moves[0] * moves[1])
        length = math.sqrt(max(0.0, squares))
        return max(self.value, centre + length) if upper else min(self.value, centre - length)


@dataclass(frozen=True)
class Worst(Estimate):
    """The worst of several sites.

    The lowest of many estimates is too low, since chance helps to choose it. Its bound on the side of the better values
    inverts a test of the minimum. A value t is refused if some site is so clearly worse that sites of which the worst
    has t would hardly look like this. The others are taken to be as far above t as they seem to be, so the bound is
    that of one site if one is clearly the worst, and simultaneous for all sites if they seem equal. The other bound is
    the lowest of all. Tests of this kind: Andrews and Soares (2010), Chernozhukov, Lee and Rosen (2013).

    Args:
        parts: The estimates of the sites.
        higher_is_better: Whether the worst is the lowest. Default: True.

    Example:
        >>> from fairmesh.evidence import Share, Worst
        >>> sites = [Share(share, rows=20) for share in (0.7, 0.75, 0.8)]
        >>> low, high = Worst(tuple(sites)).interval()
        >>> round(low, 2), round(high, 2)  # of the first alone: 0.48 to 0.85
        (0.48, 0.89)
    """

    parts: tuple[Estimate, ...]
    higher_is_better: bool = True

    @property
    def _known(self) -> list[int]:
        return [i for i, part in enumerate(self.parts) if not math.isnan(part.value)]

    @property
    def which(self) -> int | None:
        """The number of the worst site; None if no site has a value."""
        sign = 1.0 if self.higher_is_better else -1.0
        return min(self._known, key=lambda i: sign * self.parts[i].value, default=None)

    @property
    def value(self) -> float:  # type: ignore[override]
        """The value at the worst site; NaN if no site has one."""
        return math.nan if self.which is None else self.parts[self.which].value

    @property
    def rows(self) -> int:  # type: ignore[override]
        """How many test rows the worst site has."""
        return 0 if self.which is None else self.parts[self.which].rows

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        parts = [self.parts[i] for i in self._known]
        if not parts:
            return math.nan, math.nan
        extreme, side = (min, 0) if self.higher_is_better else (max, 1)
        ends = [part.interval(level)[side] for part in parts]
        far = extreme((end for end in ends if not math.isnan(end)), default=math.nan)
        near = self._near_bound((1.0 - level) / 2)
        return (far, near) if self.higher_is_better else (near, far)

    def bound(self, tail: float, upper: bool) -> float:
        if upper == self.higher_is_better:
            return self._near_bound(tail)
        return self.interval(1.0 - 2 * tail)[int(upper)]

    def centred(self, level: float = LEVEL) -> tuple[float, float, float]:
        tail, test = (1.0 - level) / 2, _MinimumTest.of(self)
        if test is None:
            return math.nan, math.nan, math.nan
        low, centre, high = (test.solved(lambda t, p=p: p) for p in (1.0 - tail, 0.5, tail))  # type: ignore[misc]
        return (low, centre, high) if self.higher_is_better else (-high, -centre, -low)

    def _near_bound(self, tail: float) -> float:
        """Returns the bound on the side of the better values. It spends what the other side leaves of both tails: with
        several candidates, that one is hardly ever missed."""
        test = _MinimumTest.of(self)
        if test is None:
            return math.nan
        sign = 1.0 if self.higher_is_better else -1.0
        found = max(test.solved(lambda t: 2 * tail - test.far_miss(t, tail)), sign * self.value)
        return sign * found


@dataclass(frozen=True)
class _MinimumTest:
    """Tests whether the lowest of several truths is t, from the confidence distributions of the sites.

    Args:
        values: Where the truth of each site lies with the confidence of `_SCORES`: (sites, scores).
        unknown: How many sites have a value and no distribution; they may be the worst.
    """

    values: np.ndarray
    unknown: int

    @staticmethod
    def of(worst: Worst) -> "_MinimumTest | None":
        """Returns the test, of the negative values if less is better; None if no site has a distribution."""
        parts = [part for part in worst.parts if not math.isnan(part.value)]
        tables = [_confidence(part, worst.higher_is_better) for part in parts]
        values = np.array([table for table in tables if not np.isnan(table).any()])
        if not len(values):
            return None
        values = values if worst.higher_is_better else -values[:, ::-1]
        return _MinimumTest(values, len(parts) - len(values))

    def _scores(self, t: float) -> tuple[float, np.ndarray]:
        """Returns how clearly the clearest site lies below t, and how clearly the others lie above it, at least 0."""
        sites = np.arange(len(self.values))
        k = np.clip((self.values <= t).sum(axis=1) - 1, 0, len(_SCORES) - 2)  # interpolates at all sites at once
        low, high = self.values[sites, k], self.values[sites, k + 1]
        part = np.clip((t - low) / np.where(high > low, high - low, 1.0), 0.0, 1.0)
        scores = _SCORES[k] + part * (_SCORES[k + 1] - _SCORES[k])
        first = int(scores.argmax())
        return float(scores[first]), np.append(np.maximum(0.0, -np.delete(scores, first)), np.zeros(self.unknown))

    def chance(self, t: float) -> float:
        """Returns how likely some site lies below t so clearly by chance, if the lowest truth is t."""
        clearest, above = self._scores(t)
        return 1.0 - float(ndtr(clearest) * ndtr(clearest + np.maximum(0.0, above - _UNSURE)).prod())

    def far_miss(self, t: float, tail: float) -> float:
        """Returns how likely the lower bounds of all sites, each with this tail, lie above t."""
        _, above = self._scores(t)
        return tail * float(ndtr(above + ndtri(tail)).prod())

    def solved(self, chance: Callable[[float], float]) -> float:
        """Returns the lowest t whose chance is no more than this, which may depend on t."""
        low, high = float(self.values.min()), float(self.values.max())

        def excess(t: float) -> float:
            return self.chance(t) - chance(t)

        if low == high or excess(high) > 0:
            return high
        if excess(low) <= 0:
            return low
        return _root(excess, low, high, 1e-9 * (high - low))


@lru_cache(maxsize=1024)
def _confidence(part: Estimate, upper: bool) -> np.ndarray:
    """Returns where the truth of an estimate lies with the confidence of `_SCORES`, in rising order: its bounds. For a
    share, those on the side `upper` are exact. With few rows the next count is far away, so that approximate ones would
    miss the worst of equal sites too often."""
    tails = ndtr(-np.abs(_SCORES)).tolist()
    if isinstance(part, Share):
        rows = np.array([_sure_rows(part, tail) for tail in tails])
        found = (
            _clopper_pearson(part.value, rows, ndtr(_SCORES), upper) if rows.min() > 0 else np.full(len(rows), np.nan)
        )
    else:
        found = [part.bound(tail, bool(z > 0)) for tail, z in zip(tails, _SCORES)]
    return np.maximum.accumulate(found)


def quantile(probability: float, freedom: float) -> float:
    """Returns a quantile of Student's t; of the normal distribution if `freedom` is infinite.

    Args:
        probability: The probability of a lower value.
        freedom: The degrees of freedom.
    """
    return float(ndtri(probability) if math.isinf(freedom) else stdtrit(freedom, probability))
