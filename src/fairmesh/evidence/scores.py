"""Estimates from scores.

Scores are arrays (seeds, rows), one per split of the data: what each seed's model scored at each test row. An interval
covers the choice of the test rows; with several seeds it also covers the seeds, with several splits also the splits. If
rows belong to units, such as patients, it covers the choice of the units.
docs/concepts/evidence.md has the measured coverage.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fairmesh.evidence.intervals import ANY, Estimate, Number, PairedShare, Share
from fairmesh.evidence.units import Additions, additions_to_mean, additions_to_metric, unit_freedom

_RESAMPLES = 400  # of a metric that is no mean over rows; only its variance is used

Scores = Sequence[np.ndarray]  # one array (seeds, rows) per split
Units = Sequence[np.ndarray] | None  # the number of each row's unit, one array (rows,) per split


def share(scores: Scores, overlap: float = 0.0, training: float = 1.0, units: Units = None) -> Share:
    """Returns the estimate of a share.

    Args:
        scores: 1 where the answer is right and 0 where it is wrong: one array (seeds, rows) per split.
        overlap: The share of its test rows, or units, that a split has in common with another. Default: 0.0.
        training: The share of its training rows that a split has in common with another, which counts where it is less.
            Default: 1.0.
        units: The number of each row's unit, one array (rows,) per split; None if every row is its own. Default: None.

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
    if units is not None:
        return OfUnits.mean(arrays, units, overlap, training).share(sum(a.shape[1] for a in arrays))
    of_rows = [float(a.mean(axis=0).var()) / a.shape[1] for a in arrays]
    return _as_share(*_spread_of(arrays, of_rows, overlap, training), arrays)


def _as_share(value: float, variance: float, freedom: float, arrays: Sequence[np.ndarray]) -> Share:
    if not 0.0 <= value <= 1.0:
        return Share(math.nan, _rows(arrays))
    return Share(value, _rows(arrays), *_effective(value * (1 - value), variance, freedom, arrays))


def _effective(of_one: float, variance: float, freedom: float, arrays: Sequence[np.ndarray]) -> tuple[float, float]:
    """Returns how many independent rows have this variance, if one has the variance `of_one`, and its degrees of
    freedom."""
    if of_one <= 0:
        return float(_rows(arrays)), math.inf
    most = float(sum(one.size for one in arrays))
    return min(most, of_one / variance if variance > 0 else most), freedom


def mean(
    scores: Scores,
    overlap: float = 0.0,
    training: float = 1.0,
    skewness: float | None = None,
    limits: tuple[float, float] = ANY,
    units: Units = None,
) -> Number:
    """Returns the estimate of a mean over rows, such as a loss.

    Args:
        scores: The number at each row: one array (seeds, rows) per split.
        overlap: The share of its test rows that a split has in common with another. Default: 0.0.
        training: The share of its training rows that a split has in common with another, which counts where it is less.
            Default: 1.0.
        skewness: The skewness of a row, where more rows than these tell it, such as those of all sites; None for that
            of these. Default: None.
        limits: The lowest and the highest possible value. Default: (-inf, inf).
        units: The number of each row's unit, one array (rows,) per split; None if every row is its own. Default: None.

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
    if units is not None:
        return OfUnits.mean(arrays, units, overlap, training, skewness).number(limits)
    by_row = [a.mean(axis=0) for a in arrays]
    moments = moments_of(by_row)
    of_rows = [moments.variance / len(a) for a in by_row]
    value, variance, freedom = _spread_of(arrays, of_rows, overlap, training)
    if math.isinf(freedom):
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


def moments_of_units(by_unit: Sequence[np.ndarray], numbers: Sequence[np.ndarray]) -> Moments:
    """Returns the moments of units around the mean of each split; those of the units of all splits, if every split has
    a single one.

    Args:
        by_unit: What each unit adds (units,), one array per split.
        numbers: Which units these are.
    """
    if any(len(one) > 1 for one in by_unit):
        return moments_of(by_unit)
    every, values = np.concatenate(list(numbers)), np.concatenate(list(by_unit))
    return moments_of([np.array([values[every == number].mean() for number in np.unique(every)])])


def paired(
    a: Scores,
    b: Scores,
    overlap: float = 0.0,
    shares: bool = True,
    training: float = 1.0,
    skewness: float | None = None,
    units: Units = None,
) -> Estimate:
    """Returns the estimate of the difference a - b of two models that answered the same test rows.

    For shares it is a `PairedShare`, which has an interval also where two models agree at all rows. Other numbers take
    a studentised bootstrap.

    Args:
        a: The scores of the one: one array (seeds, rows) per split.
        b: The scores of the other at the same rows.
        overlap: The share of its test rows that a split has in common with another. Default: 0.0.
        shares: Whether scores are right (1) or wrong (0). Default: True.
        training: The share of its training rows that a split has in common with another, which counts where it is less.
            Default: 1.0.
        skewness: The skewness of a row's difference, as in `mean`; shares have no use for it. Default: None.
        units: The number of each row's unit, one array (rows,) per split; None if every row is its own. Default: None.

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
        return mean(differences, overlap, training, skewness, units=units)
    if not differences:
        return PairedShare(math.nan, math.nan, 0)
    only_a, only_b = (share_above_zero([sign * d for d in differences]) for sign in (1.0, -1.0))
    of_one = only_a + only_b - (only_a - only_b) ** 2
    if units is not None:
        found = OfUnits.mean(differences, units, overlap, training)
        return PairedShare(
            only_a, only_b, found.unit_count, *found.effective(of_one, sum(d.shape[1] for d in differences))
        )
    of_rows = [float(d.mean(axis=0).var()) / d.shape[1] for d in differences]
    _, variance, freedom = _spread_of(differences, of_rows, overlap, training)
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
    training: float = 1.0,
    limits: tuple[float, float] = ANY,
    deciding: Sequence[int] = (),
    units: Units = None,
) -> Estimate:
    """Returns the estimate of a metric of all rows together, such as an AUROC. A bootstrap finds its error; of units,
    which may be few, each is left out once.

    Args:
        metric: (split, seed, counts) -> the metric of each resample, NaN where it is not defined. The counts
            (resamples, rows) say how often each resample contains each row.
        rows: The number of test rows in each split.
        seeds: The number of seeds in each split.
        overlap: The share of its test rows that a split has in common with another. Default: 0.0.
        bounded: Whether the metric lies in [0, 1]; its interval is then that of a share with the same variance.
            Default: False.
        difference: Whether it is the difference of two such metrics. Default: False.
        training: The share of its training rows that a split has in common with another, which counts where it is less.
            Default: 1.0.
        limits: The lowest and the highest possible value of a metric that is not `bounded`. If it cannot be negative,
            its interval is that of its logarithm. Default: (-inf, inf).
        deciding: How many rows decide the metric in each split, such as those of the rarer class; () for all. A
            bootstrap of few rows finds too small an error. Default: ().
        units: The number of each row's unit, one array (rows,) per split; None if every row is its own. Default: None.

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
    relative = not bounded and not difference and limits[0] == 0.0
    limits = (-1.0, 1.0) if bounded else limits
    if units is not None:
        additions = [
            additions_to_metric(lambda c, k=k, n=n: np.stack([metric(k, s, c) for s in range(n)], axis=1), of_split)
            for k, (n, of_split) in enumerate(zip(seeds, units))
        ]
        found = OfUnits.of(additions, overlap, training).of_metric(bounded)
        return found.share(sum(rows)) if bounded and not difference else found.number(limits, relative)
    points, variances, beyond = [], [], [max(0.5, count - 1.0) for count in deciding or rows]
    for k, (count, repeats) in enumerate(zip(rows, seeds)):
        once, counts = np.ones((1, count)), _table(_width(count))[:, :count].astype(np.float64)
        points.append(np.array([float(metric(k, s, once)[0]) for s in range(repeats)]))
        drawn = np.mean([metric(k, s, counts) for s in range(repeats)], axis=0)
        drawn = drawn[np.isfinite(drawn)]  # a resample may hold one class only
        enough = count > 1 and len(drawn) >= _RESAMPLES // 10
        variance = float(drawn.var(ddof=1)) if enough else math.nan
        variance *= 1.0 + 1.0 / beyond[k]
        variances.append(max(variance, (count + 1.0) ** -2) if bounded and difference and enough else variance)
    value, variance, freedom = spread(points, variances, [0.0] * len(points), overlap, training)
    freedom = min(freedom, max(1.0, sum(beyond)))
    empty = [np.zeros((s, n)) for s, n in zip(seeds, rows)]
    if bounded and not difference:
        if value in (0.0, 1.0):  # no resample differs, so that only the number of rows tells how sure it is
            return Share(value, _rows(empty), float(np.mean(deciding or rows)))
        return _as_share(value, variance, freedom, empty)
    error = math.sqrt(variance) if variance >= 0 else math.nan
    return Number(value, _rows(empty), error, freedom, limits=limits, relative=relative)


class OfUnits(NamedTuple):
    """What the additions of units say about a metric: its value, its variance and the skewness of its distribution."""

    value: float
    unit_count: int  # of a split
    variance: float
    freedom: float
    skew: float

    @staticmethod
    def mean(
        arrays: Scores, units: Sequence[np.ndarray], overlap: float, training: float, skewness: float | None = None
    ) -> "OfUnits":
        """Returns it for a mean over rows."""
        return OfUnits.of([additions_to_mean(a, of) for a, of in zip(arrays, units)], overlap, training, skewness)

    @staticmethod
    def of(additions: Sequence[Additions], overlap: float, training: float, skewness: float | None = None) -> "OfUnits":
        """Returns it for additions, one entry per split.

        Args:
            additions: What the units of each split add.
            overlap: The share of its test units that a split has in common with another.
            training: As of `share`.
            skewness: The skewness of a unit's addition; None for that of these. Default: None.
        """
        arrays = [part.scores for part in additions]
        by_unit = [a.mean(axis=0) for a in arrays]
        moments = moments_of_units(by_unit, [part.numbers for part in additions])
        of_units = [moments.variance / len(a) for a in by_unit]
        points = [part.values for part in additions]
        value, variance, freedom = spread(points, of_units, interactions_of(arrays), overlap, training)
        if not variance > 0:
            return OfUnits(value, _rows(arrays), variance, math.inf, 0.0)
        due = float(np.mean(of_units)) * (1.0 / len(by_unit) + (1.0 - 1.0 / len(by_unit)) * overlap)
        uncertain = due**2 / max(1.0, unit_freedom(additions)) + variance**2 / freedom
        of_one = moments.third / moments.variance**1.5 if skewness is None and moments.variance > 0 else skewness or 0.0
        skew = of_one * due**2 / math.sqrt(moments.variance) / variance**1.5 if moments.variance > 0 else 0.0
        return OfUnits(value, _rows(arrays), variance, variance**2 / uncertain, skew)

    def of_metric(self, bounded: bool) -> "OfUnits":
        """Returns the same for a metric that is no mean over rows. One in [0, 1] may compare rows of different units,
        as an AUROC does; with one of two units left out, there is nothing to compare."""
        return self._replace(variance=math.nan) if bounded and self.unit_count < 3 else self

    def effective(self, of_one: float, rows: int) -> tuple[float, float]:
        """Returns how many independent rows have this variance, if one has the variance `of_one`, and its degrees of
        freedom. Units that are all alike count once each. Counts are whole numbers, so the variance is not zero."""
        if math.isnan(self.variance):
            return 0.0, math.inf
        if of_one <= 0:
            return float(self.unit_count), math.inf
        return of_one / max(self.variance, self.unit_count / (12.0 * rows * rows)), self.freedom

    def share(self, rows: int) -> Share:
        """Returns the estimate of a share, or of another metric in [0, 1], of this number of rows."""
        if not 0.0 <= self.value <= 1.0:
            return Share(math.nan, self.unit_count)
        return Share(self.value, self.unit_count, *self.effective(self.value * (1.0 - self.value), rows))

    def number(self, limits: tuple[float, float], relative: bool = False) -> Number:
        """Returns the estimate of another number."""
        error = math.sqrt(self.variance) if self.variance >= 0 else math.nan
        return Number(self.value, self.unit_count, error, self.freedom, self.skew, limits, relative)


def spread(
    points: Sequence[np.ndarray],
    of_rows: Sequence[float],
    interactions: Sequence[float],
    overlap: float = 0.0,
    training: float = 1.0,
    correlation: float = math.nan,
) -> tuple[float, float, float]:
    """Returns a mean over splits and seeds, its variance and the degrees of freedom of that, inf for many.

    Splits have test rows in common, so their means are correlated. The variance due to rows counts this exactly. What
    splits differ by beyond their rows counts as in the corrected resampled t-test (Nadeau and Bengio, 2003). That test
    takes the share of common test rows as the correlation of the models' effects; models whose training sets have fewer
    rows in common are less correlated.

    Args:
        points: For each split, the value of every seed.
        of_rows: For each split, the variance of its mean over seeds, due to the choice of its test rows.
        interactions: For each split, how much of the variance between its seeds is due to the choice of test rows.
        overlap: The share of its test rows that a split has in common with another. Default: 0.0.
        training: The share of its training rows that a split has in common with another, which counts where it is less.
            Default: 1.0.
        correlation: The correlation of two splits' means that is due to common rows; NaN for `overlap`, which is right
            where models answer a row alike in both. Default: NaN.
    """
    correlation = overlap if math.isnan(correlation) else correlation
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
        common = min(overlap, training)
        trained_apart = common / (1.0 - common) if common < 1.0 else 0.0
        if found > explained:
            factor = 1.0 / splits + trained_apart
            variance += (found - explained) * factor
            uncertain += min(variance**2, (found - explained) * found * factor**2) / (splits - 1)
    return value, variance, variance * variance / uncertain if uncertain > 0 else math.inf


def _spread_of(arrays: Scores, of_rows: Sequence[float], overlap: float, training: float) -> tuple[float, float, float]:
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
