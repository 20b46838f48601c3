"""Intervals: for one site, for the worst of several, for their mean, and for paired differences.

Scores are arrays (seeds, rows), one per split of the data: what each seed's model scored at each test row. An interval
covers the choice of the test rows; with several seeds it also covers the seeds, with several splits also the splits.
docs/concepts/evidence.md has the measured coverage.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betainc, betaincinv, ndtr, ndtri, stdtrit

LEVEL = 0.95
_RESAMPLES = 400  # of a metric that is no mean over rows; only its variance is used
_MOST_SKEWED = 0.8  # times 1 / quantile: beyond 1, Hall's polynomial is flat and its inverse leaps
_HEAVY = 0.6  # skewness of a mean beyond which its interval may be too narrow (docs/concepts/evidence.md)
_LARGEST_RATIO = 20.0  # of the logarithm of a bound to its value
_SCORES = np.linspace(-5.0, 5.0, 40)  # normal scores at which a confidence distribution is tabulated; none is 0
_UNSURE = 0.3  # standard errors by which a site may be nearer to the worst than it seems (docs/concepts/evidence.md)
_LEAN = 0.1  # by so much of a row the prior of a paired difference leans towards a bound: counts are whole numbers
_NODES = (np.arange(128) + 0.5) / 128  # quantiles by which a distribution is averaged over

Scores = Sequence[np.ndarray]  # one array (seeds, rows) per split


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
        freedom: The degrees of freedom of that variance; None for infinitely many. Default: None.

    Example:
        >>> from fairmesh.evidence import Share
        >>> low, high = Share(1.0, rows=20).interval()
        >>> round(low, 3), high
        (0.839, 1.0)
    """

    value: float
    rows: int
    effective: float | None = None
    freedom: float | None = None

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
        freedom: The degrees of freedom of that variance; None for infinitely many. Default: None.

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
    freedom: float | None = None

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
        freedom: The degrees of freedom of the error; None for infinitely many. Default: None.
        skew: The skewness of the number's distribution: that of a row over the root of the rows. Default: 0.0.
        limits: The lowest and the highest possible value; None for any. Default: None.
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
    freedom: float | None = None
    skew: float = 0.0
    limits: tuple[float, float] | None = None
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
        least, most = self.limits or (-math.inf, math.inf)
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


def quantile(probability: float, freedom: float | None) -> float:
    """Returns a quantile of Student's t; of the normal distribution if `freedom` is None.

    Args:
        probability: The probability of a lower value.
        freedom: The degrees of freedom.
    """
    return float(ndtri(probability) if freedom is None else stdtrit(freedom, probability))


def share(scores: Scores, overlap: float = 0.0, training: float | None = None) -> Share:
    """Returns the estimate of a share.

    Args:
        scores: 1 where the answer is right and 0 where it is wrong: one array (seeds, rows) per split.
        overlap: The share of its test rows that a split has in common with another. Default: 0.0.
        training: The share of its training rows that a split has in common with another, where that is less; None for
            `overlap`. Default: None.

    Example:
        >>> import numpy as np
        >>> from fairmesh.evidence import share
        >>> low, high = share([np.array([[1, 1, 1, 0, 1, 1, 1, 1, 1, 1]])]).interval()
        >>> round(low, 2), round(high, 2)
        (0.6, 0.98)
    """
    arrays = _arrays(scores)
    if not arrays:
        return Share(math.nan, 0)
    of_rows = [float(a.mean(axis=0).var()) / a.shape[1] for a in arrays]
    return _as_share(*_spread_of(arrays, of_rows, overlap, training), arrays)


def _as_share(value: float, variance: float, freedom: float | None, arrays: Sequence[np.ndarray]) -> Share:
    if not 0.0 <= value <= 1.0:
        return Share(math.nan, _rows(arrays))
    return Share(value, _rows(arrays), *_effective(value * (1 - value), variance, freedom, arrays))


def _effective(
    of_one: float, variance: float, freedom: float | None, arrays: Sequence[np.ndarray]
) -> tuple[float, float | None]:
    """Returns how many independent rows have this variance, if one has the variance `of_one`, and its degrees of
    freedom."""
    if of_one <= 0:
        return float(_rows(arrays)), None
    most = float(sum(one.size for one in arrays))
    return min(most, of_one / variance if variance > 0 else most), freedom


def mean(
    scores: Scores,
    overlap: float = 0.0,
    training: float | None = None,
    skewness: float | None = None,
    limits: tuple[float, float] | None = None,
) -> Number:
    """Returns the estimate of a mean over rows, such as a loss.

    Args:
        scores: The number at each row: one array (seeds, rows) per split.
        overlap: The share of its test rows that a split has in common with another. Default: 0.0.
        training: The share of its training rows that a split has in common with another, where that is less; None for
            `overlap`. Default: None.
        skewness: The skewness of a row, where more rows than these tell it, such as those of all sites; None for that
            of these. Default: None.
        limits: The lowest and the highest possible value; None for any. Default: None.

    Example:
        >>> import numpy as np
        >>> from fairmesh.evidence import mean
        >>> losses = np.random.default_rng(0).exponential(size=(1, 50))
        >>> low, high = mean([losses]).interval()
        >>> bool(low < losses.mean() < high)
        True
    """
    arrays = _arrays(scores)
    if not arrays:
        return Number(math.nan, 0, math.nan)
    by_row = [a.mean(axis=0) for a in arrays]
    moments = moments_of(by_row)
    of_rows = [moments.variance / len(a) for a in by_row]
    value, variance, freedom = _spread_of(arrays, of_rows, overlap, training)
    if freedom is None:
        freedom = max(1.0, float(moments.freedom))
    if not variance > 0:
        return Number(value, _rows(arrays), 0.0 if variance == 0 else math.nan, freedom, limits=limits)
    skew = 0.0
    if moments.variance > 0:
        due_to_rows = float(np.mean(of_rows)) * (1.0 / len(by_row) + (1.0 - 1.0 / len(by_row)) * overlap)
        of_one = moments.third / moments.variance**1.5 if skewness is None else skewness
        skew = of_one * due_to_rows**2 / math.sqrt(moments.variance) / variance**1.5
    return Number(value, _rows(arrays), math.sqrt(variance), freedom, skew, limits)


class Moments(NamedTuple):
    """The variance and the third cumulant of a row, without bias, from all splits; NaN and 0 of a single row."""

    variance: float
    third: float
    freedom: int  # how many rows beyond the first of each split there are


def moments_of(by_row: Sequence[np.ndarray]) -> Moments:
    """Returns the moments of rows around the mean of each split.

    Args:
        by_row: A number for each row (rows,), one array per split.
    """
    freedom = sum(len(one) - 1 for one in by_row)
    if not freedom:
        return Moments(math.nan, 0.0, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        rest = [one - one.mean() for one in by_row]
        squares, cubes = (sum(float((one**power).sum()) for one in rest) for power in (2, 3))
    weight = sum((n - 1) * (n - 2) / n for n in map(len, by_row))
    return Moments(squares / freedom, cubes / weight if weight > 0 and math.isfinite(cubes) else 0.0, freedom)


def paired(a: Scores, b: Scores, overlap: float = 0.0, shares: bool = True, training: float | None = None) -> Estimate:
    """Returns the estimate of the difference a - b of two models that answered the same test rows.

    For shares it is a `PairedShare`, which has an interval also where two models agree at all rows. Other numbers take
    a studentised bootstrap.

    Args:
        a: The scores of the one: one array (seeds, rows) per split.
        b: The scores of the other at the same rows.
        overlap: The share of its test rows that a split has in common with another. Default: 0.0.
        shares: Whether scores are right (1) or wrong (0). Default: True.
        training: The share of its training rows that a split has in common with another, where that is less; None for
            `overlap`. Default: None.

    Example:
        >>> import numpy as np
        >>> from fairmesh.evidence import paired
        >>> one, other = np.ones((1, 100)), np.repeat([[0.0, 1.0]], [10, 90], axis=1)
        >>> found = paired([one], [other])
        >>> found.value, [round(end, 2) for end in found.interval()]
        (0.1, [0.04, 0.17])
    """
    differences = [row_differences(x, y) for x, y in zip(_arrays(a), _arrays(b), strict=True)]
    if not shares:
        return mean(differences, overlap, training)
    if not differences:
        return PairedShare(math.nan, math.nan, 0)
    of_rows = [float(d.mean(axis=0).var()) / d.shape[1] for d in differences]
    _, variance, freedom = _spread_of(differences, of_rows, overlap, training)
    only_a, only_b = (share_above_zero([sign * d for d in differences]) for sign in (1.0, -1.0))
    of_one = only_a + only_b - (only_a - only_b) ** 2
    return PairedShare(only_a, only_b, _rows(differences), *_effective(of_one, variance, freedom, differences))


def share_above_zero(differences: Scores) -> float:
    """Returns the mean of the differences that are positive, with 0 for the others.

    Args:
        differences: One array (seeds, rows) per split.
    """
    return float(np.mean([np.maximum(d, 0.0).mean() for d in differences]))


def paired_counts(rows: int, only_a: int, only_b: int) -> PairedShare:
    """Returns the estimate of a difference of shares from counts alone.

    Args:
        rows: How many test rows there are.
        only_a: How many of them only the first model answers right.
        only_b: How many of them only the second model answers right.

    Example:
        >>> from fairmesh.evidence import paired_counts
        >>> paired_counts(100, only_a=10, only_b=0).value
        0.1
    """
    if rows < 1 or only_a < 0 or only_b < 0 or only_a + only_b > rows:
        raise ValueError(f"{only_a} + {only_b} of {rows} rows are no counts of a comparison")
    return PairedShare(only_a / rows, only_b / rows, rows)


def row_differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the scores a - b by seed; the mean over seeds first, where they have different numbers of them.

    Args:
        a: The scores of the one (seeds, rows).
        b: The scores of the other at the same rows.
    """
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"{a.shape[1]} and {b.shape[1]} rows are not the same rows")
    return a - b if len(a) == len(b) else a.mean(axis=0, keepdims=True) - b.mean(axis=0, keepdims=True)


def bootstrapped(
    metric: Callable[[int, int, np.ndarray], np.ndarray],
    rows: Sequence[int],
    seeds: Sequence[int],
    overlap: float = 0.0,
    bounded: bool = False,
    difference: bool = False,
    training: float | None = None,
    limits: tuple[float, float] | None = None,
) -> Estimate:
    """Returns the estimate of a metric of all rows together, such as an AUROC. A bootstrap finds its error.

    Args:
        metric: (split, seed, counts) -> the metric of each resample, NaN where it is not defined. The counts
            (resamples, rows) say how often each resample contains each row.
        rows: The number of test rows in each split.
        seeds: The number of seeds in each split.
        overlap: The share of its test rows that a split has in common with another. Default: 0.0.
        bounded: Whether the metric lies in [0, 1]; its interval is then that of a share with the same variance.
            Default: False.
        difference: Whether it is the difference of two such metrics. Default: False.
        training: The share of its training rows that a split has in common with another, where that is less; None for
            `overlap`. Default: None.
        limits: The lowest and the highest possible value of a metric that is not `bounded`; None for any. If it cannot
            be negative, its interval is that of its logarithm. Default: None.

    Example:
        >>> import numpy as np
        >>> from fairmesh.evidence import bootstrapped
        >>> values = np.random.default_rng(0).normal(size=50)
        >>> def root_mean_square(split, seed, counts):
        ...     return np.sqrt(counts @ values**2 / counts.sum(axis=1))
        >>> found = bootstrapped(root_mean_square, [50], [1])
        >>> low, high = found.interval()
        >>> low < found.value < high
        True
    """
    points, variances = [], []
    for k, (count, repeats) in enumerate(zip(rows, seeds)):
        once, counts = np.ones((1, count)), _table(_width(count))[:, :count].astype(np.float64)
        points.append(np.array([float(metric(k, s, once)[0]) for s in range(repeats)]))
        drawn = np.mean([metric(k, s, counts) for s in range(repeats)], axis=0)
        drawn = drawn[np.isfinite(drawn)]  # a resample may hold one class only
        enough = count > 1 and len(drawn) >= _RESAMPLES // 10
        variance = float(drawn.var(ddof=1)) if enough else math.nan
        variances.append(max(variance, (count + 1.0) ** -2) if bounded and difference and enough else variance)
    value, variance, freedom = spread(points, variances, [0.0] * len(points), overlap, training)
    empty = [np.zeros((s, n)) for s, n in zip(seeds, rows)]
    if bounded and not difference:
        return _as_share(value, variance, freedom, empty)
    if freedom is None:
        freedom = max(1.0, float(sum(rows) - len(rows)))
    error = math.sqrt(variance) if variance >= 0 else math.nan
    limits = (-1.0, 1.0) if bounded else limits
    relative = limits is not None and limits[0] == 0.0 and not difference
    return Number(value, _rows(empty), error, freedom, limits=limits, relative=relative)


def spread(
    points: Sequence[np.ndarray],
    of_rows: Sequence[float],
    interactions: Sequence[float],
    overlap: float = 0.0,
    training: float | None = None,
    correlation: float | None = None,
) -> tuple[float, float, float | None]:
    """Returns a mean over splits and seeds, its variance and the degrees of freedom of that, None for many.

    Splits have test rows in common, so their means are correlated. The variance due to rows counts this exactly. What
    splits differ by beyond their rows counts as in the corrected resampled t-test (Nadeau and Bengio, 2003). That test
    takes the share of common test rows as the correlation of the models' effects; models whose training sets have fewer
    rows in common are less correlated.

    Args:
        points: For each split, the value of every seed.
        of_rows: For each split, the variance of its mean over seeds, due to the choice of its test rows.
        interactions: For each split, how much of the variance between its seeds is due to the choice of test rows.
        overlap: The share of its test rows that a split has in common with another. Default: 0.0.
        training: The share of its training rows that a split has in common with another, where that is less; None for
            `overlap`. Default: None.
        correlation: The correlation of two splits' means that is due to common rows; None for `overlap`, which is right
            where models answer a row alike in both. Default: None.
    """
    correlation = overlap if correlation is None else correlation
    splits, means = len(points), np.array([one.mean() for one in points])
    value, rows = float(means.mean()), float(np.mean(of_rows))
    variance, uncertain = rows * (1.0 / splits + (1.0 - 1.0 / splits) * correlation), 0.0
    between, freedom = 0.0, sum(len(one) - 1 for one in points)
    if freedom:
        of_seeds = [
            max(0.0, float(one.var(ddof=1)) - extra) for one, extra in zip(points, interactions) if len(one) > 1
        ]
        between = float(np.mean(of_seeds))
        variance += (of_mean := between * float(np.mean([1.0 / len(one) for one in points])) / splits)
        uncertain += of_mean**2 / freedom
    if splits > 1:
        found = float(means.var(ddof=1))
        explained = (1.0 - correlation) * rows + between * float(np.mean([1.0 / len(one) for one in points]))
        common = overlap if training is None else min(overlap, training)
        trained_apart = common / (1.0 - common) if common < 1.0 else 0.0
        if found > explained:
            factor = 1.0 / splits + trained_apart
            variance += (found - explained) * factor
            uncertain += min(variance**2, (found - explained) * found * factor**2) / (splits - 1)
    return value, variance, variance * variance / uncertain if uncertain > 0 else None


def _spread_of(
    arrays: Scores, of_rows: Sequence[float], overlap: float, training: float | None
) -> tuple[float, float, float | None]:
    return spread([a.mean(axis=1) for a in arrays], of_rows, interactions_of(arrays), overlap, training)


def _arrays(scores: Scores) -> list[np.ndarray]:
    found = [np.atleast_2d(np.asarray(one, dtype=np.float64)) for one in scores]
    return [one for one in found if one.size]


def _rows(arrays: Sequence[np.ndarray]) -> int:
    """Returns the number of test rows of a split; the mean, rounded, where splits differ."""
    return round(sum(one.shape[1] for one in arrays) / len(arrays))


def interactions_of(arrays: Scores) -> list[float]:
    """Returns, for each split, the variance between seeds that is due to the choice of rows.

    Args:
        arrays: The scores: one array (seeds, rows) per split.
    """
    found = []
    for one in arrays:
        seeds, rows = one.shape
        if seeds < 2 or rows < 2:
            found.append(0.0)
            continue
        rest = one - one.mean(axis=0) - one.mean(axis=1, keepdims=True) + one.mean()
        found.append(float(np.square(rest).sum()) / ((seeds - 1) * (rows - 1)) / rows)
    return found


def _width(rows: int) -> int:
    """Returns the width of the table for this number of rows. Few different widths serve all sites."""
    return max(64, 1 << (rows - 1).bit_length())


@lru_cache(maxsize=4)
def _table(rows: int) -> np.ndarray:
    """Returns how often each row is drawn, in every resample: (resamples, rows). Each is drawn a Poisson number of
    times, independently of the others, so that one table serves all sites."""
    return np.random.default_rng(rows).poisson(1.0, size=(_RESAMPLES, rows)).astype(np.float32)
