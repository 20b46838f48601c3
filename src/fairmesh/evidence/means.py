"""The mean over sites and its interval. Every set of test rows is a stratum; the sites are taken as they are.

Its variance is the sum of unbiased estimates, one per stratum. No site is pulled anywhere: the interval of a share is
Wilson's with as many rows as have this variance, that of other numbers is Student's t, corrected for skewness.
docs/concepts/evidence.md has the measured coverage.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fairmesh.evidence.intervals import ANY, Estimate, Number, PairedShare, Share
from fairmesh.evidence.scores import Scores, interactions_of, moments_of, moments_of_units, share_above_zero, spread
from fairmesh.evidence.units import Additions


@dataclass(frozen=True, eq=False)
class Stratum:
    """A set of test rows, and what the models of one or more sites scored there.

    Args:
        scores: The mean over these sites of their scores: one array (seeds, rows) per split.
        weight: The share of these sites among all.
        rows: A number for each row, equal for equal rows: one array per split; None if that is not known. Default:
            None.
        overlap: The share of its rows that a split has in common with another, if `rows` are not known. Default: 0.0.
        additions: What units of rows add to the metric, one entry per split; None if every row is its own unit.
            Default: None.
    """

    scores: Scores
    weight: float
    rows: Sequence[np.ndarray] | None = None
    overlap: float = 0.0
    additions: Sequence[Additions] | None = None


def mean_share(strata: Sequence[Stratum], training: float = 1.0) -> Share:
    """Returns the mean over sites of shares.

    Args:
        strata: What models scored: 1 where an answer is right, else 0.
        training: As of `share`. Default: 1.0.
    """
    if not strata:
        return Share(math.nan, 0)
    total = _sum_of(strata, training)
    effective, freedom = total.effective(total.value * (1.0 - total.value))
    return Share(min(max(total.value, 0.0), 1.0), total.row_count, effective, freedom)


def mean_paired_share(strata: Sequence[Stratum], training: float = 1.0) -> PairedShare:
    """Returns the mean over sites of the difference of two shares.

    Args:
        strata: By how much the scores of two models differ at each row.
        training: As of `share`. Default: 1.0.
    """
    if not strata:
        return PairedShare(math.nan, math.nan, 0)
    total = _sum_of(strata, training)
    only_a, only_b = (
        sum(stratum.weight * share_above_zero([sign * scores for scores in stratum.scores]) for stratum in strata)
        for sign in (1.0, -1.0)
    )
    effective, freedom = total.effective(only_a + only_b - (only_a - only_b) ** 2)
    return PairedShare(only_a, only_b, total.row_count, effective, freedom)


def mean_number(strata: Sequence[Stratum], training: float = 1.0, limits: tuple[float, float] = ANY) -> Number:
    """Returns the mean over sites of a number per row, such as a loss.

    Args:
        strata: The number at each row.
        training: As of `share`. Default: 1.0.
        limits: The lowest and the highest possible value. Default: (-inf, inf).
    """
    if not strata:
        return Number(math.nan, 0, math.nan)
    total = _sum_of(strata, training)
    return Number(
        total.value,
        total.row_count,
        error=math.sqrt(total.variance) if total.variance >= 0 else math.nan,
        freedom=_freedom(total.variance, [*total.parts, (total.variance, total.freedom)]),
        skew=total.third / total.variance**1.5 if total.variance > 0 else 0.0,
        limits=limits,
    )


def mean_of(parts: Sequence[Estimate]) -> Share | Number:
    """Returns the mean of independent estimates that have a value, such as of one metric at several sites. An estimate
    without an interval counts as if its rows varied like those of the others.

    Args:
        parts: The estimates: all that have a value are a `Share`, or all are a `Number`.
    """
    defined = [part for part in parts if not math.isnan(part.value)]
    if not defined:
        return Share(math.nan, 0)
    shares = [part for part in defined if isinstance(part, Share)]
    return _mean_of_shares(shares) if shares else _mean_of_numbers([p for p in defined if isinstance(p, Number)])


def _mean_of_shares(shares: Sequence[Share]) -> Share:
    values, weights = np.array([share.value for share in shares]), np.full(len(shares), 1.0 / len(shares))
    sizes = np.array([share.rows if share.effective is None else share.effective for share in shares], dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):  # without bias, as in the strata
        of_row = np.where(sizes > 1, values * (1.0 - values) * sizes / (sizes - 1.0), math.nan)
        squares = np.where(sizes > 0, weights**2 / sizes, math.nan)
    variance = float(_filled(of_row, sizes - 1.0, values) @ squares)
    freedom = _freedom(variance, [(part, share.freedom) for part, share in zip(of_row * squares, shares)])
    rows = 1.0 / float(np.nansum(squares)) if sizes.any() else 0.0
    variance, value = max(variance, _floor(values, weights, squares)), float(values.mean())
    count = sum(share.rows for share in shares)
    return Share(value, count, *_effective(value * (1.0 - value), variance, freedom, rows))


def _mean_of_numbers(numbers: Sequence[Number]) -> Number:
    value, count = float(np.mean([number.value for number in numbers])), sum(number.rows for number in numbers)
    errors = np.array([number.error for number in numbers])
    if np.isnan(errors).all():
        return Number(value, count, math.nan)
    variances = (np.where(np.isnan(errors), np.nanmean(errors), errors) * (1.0 / len(numbers))) ** 2
    variance = float(variances.sum())
    lows, highs = zip(*(number.limits for number in numbers))
    freedom = _freedom(variance, [(part, number.freedom) for part, number in zip(variances, numbers)])
    return Number(value, count, math.sqrt(variance), freedom, limits=(min(lows), max(highs)))


def _freedom(variance: float, parts: Iterable[tuple[float, float]]) -> float:
    """Returns the degrees of freedom of a sum of variances, given each with its own (Satterthwaite); inf for many."""
    uncertain = float(sum(part * part / freedom for part, freedom in parts if freedom and not math.isnan(part)))
    return variance * variance / uncertain if uncertain > 0 and variance > 0 else math.inf


def _effective(of_one: float, variance: float, freedom: float, rows: float) -> tuple[float, float]:
    """Returns how many independent rows have this variance, if one has the variance `of_one`, and its degrees of
    freedom. The product of two estimated shares is too low by the variance, hence one row more."""
    if of_one <= 1e-12 or not variance > 0:
        return rows, math.inf
    return of_one / variance + 1.0, freedom


def _filled(of_row: np.ndarray, freedoms: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the variance of a row in each stratum. A stratum with a single row, whose variance is NaN, takes the mean
    of the others; if all have a single one, the variance between them stands for that of a row.

    Args:
        of_row: The variance of a row in each stratum; NaN if it is not known.
        freedoms: Its degrees of freedom.
        values: The mean of each stratum.
    """
    known = ~np.isnan(of_row)
    if known.any():
        pooled = np.average(of_row[known], weights=freedoms[known])
    else:
        pooled = np.var(values, ddof=1) if len(values) > 1 else math.nan
    return np.where(known, of_row, pooled)


def _floor(values: np.ndarray, weights: np.ndarray, squares: np.ndarray) -> float:
    """Returns the least variance of a mean of shares. Strata whose rows are all alike, such as all right, have no
    variance of their own; together they have that of their number of rows by Laplace's rule."""
    least = 0.0
    for end in (-1.0, 0.0, 1.0):
        weight, square = (float(column[values == end].sum()) for column in (weights, squares))
        if square > 0:
            rows = weight * weight / square
            least += weight * weight * (rows + 1.0) / (rows + 2.0) ** 2 / rows
    return least


class _Sum(NamedTuple):
    """A weighted sum over strata, its variance, and what intervals need of its parts."""

    value: float
    row_count: int  # the mean over splits
    variance: float
    freedom: float  # of what seeds and splits differ by; of all, if there are units
    floor: float
    rows: float  # independent rows, if all have the same variance
    parts: list[tuple[float, float]]  # the variance due to each stratum's rows, and its degrees of freedom
    third: float  # the third cumulant
    by_unit: bool  # whether rows belong to units

    def effective(self, of_one: float) -> tuple[float, float]:
        if math.isnan(self.variance) and self.by_unit:  # one unit in all
            return 0.0, math.inf
        return _effective(of_one, max(self.variance, self.floor), self.freedom, self.rows)


def _sum_of(strata: Sequence[Stratum], training: float) -> _Sum:
    by_unit = any(stratum.additions is not None for stratum in strata)
    strata, evenness = zip(*map(_unit_by_unit, strata))
    splits = len(strata[0].scores)
    by_row = [[np.asarray(scores, dtype=np.float64).mean(axis=0) for scores in one.scores] for one in strata]
    weights = np.array([stratum.weight for stratum in strata])
    means = np.array([np.mean([rows.mean() for rows in of_splits]) for of_splits in by_row])
    moments = [
        moments_of(of_splits) if one.additions is None else moments_of_units(of_splits, one.rows or ())
        for one, of_splits in zip(strata, by_row)
    ]
    variances, thirds, freedoms = (np.array(column) for column in zip(*moments))
    of_row = _filled(variances, freedoms, means)
    common = [_common(stratum, of_splits) for stratum, of_splits in zip(strata, by_row)]
    shares, pairs, products, expected, distinct = (np.array(column) for column in zip(*common))
    expected = float(expected @ of_row)
    # How much the same row scores alike in two splits: with models that answer it differently, more splits say more.
    alike = min(1.0, max(0.0, float(products.sum()) / expected)) if expected > 0 else 1.0
    squares = weights**2 * [np.mean([1.0 / len(rows) for rows in of_splits]) for of_splits in by_row]
    pairs = weights**2 * pairs
    of_split, together = float(of_row @ squares), alike * float(of_row @ pairs)
    between = np.array([interactions_of(stratum.scores) for stratum in strata])
    value, variance, freedom = spread(
        [np.sum([one.weight * one.scores[k].mean(axis=1) for one in strata], axis=0) for k in range(splits)],
        [of_split] * splits,
        (weights**2 @ between).tolist(),
        float(shares.mean()),
        training,
        together / of_split if of_split > 0 else 0.0,
    )
    over_splits = squares / splits + (1.0 - 1.0 / splits) * alike * pairs
    if_alike = squares / splits + (1.0 - 1.0 / splits) * pairs
    own_freedoms = np.where(freedoms > 0, np.minimum(freedoms, distinct - 1.0), max(1.0, freedoms.sum()))
    parts = list(zip(of_row * over_splits, own_freedoms * evenness if by_unit else own_freedoms))
    if by_unit:
        freedom = _freedom(variance, [*parts, (variance, freedom)])
    return _Sum(
        value,
        round(sum(len(rows) for of_splits in by_row for rows in of_splits) / splits),
        variance,
        freedom,
        _floor(np.where(variances > 0, math.nan, means), weights, if_alike),
        1.0 / float(if_alike.sum()),
        parts,
        float((thirds * over_splits**2 / weights).sum()),
        by_unit,
    )


def _unit_by_unit(stratum: Stratum) -> tuple[Stratum, float]:
    """Returns a stratum with what its units add to the mean instead of rows, and the degrees of freedom of that in
    relation to those of units of equal size. One without units stays as it is."""
    additions = stratum.additions
    if additions is None:
        return stratum, 1.0
    evenness = [part.freedom / (len(part.numbers) - 1) for part in additions if len(part.numbers) > 1]
    of_units = replace(stratum, scores=[part.scores for part in additions], rows=[part.numbers for part in additions])
    return of_units, float(np.mean(evenness)) if evenness else 1.0


class _Common(NamedTuple):
    """Which rows the splits of a stratum have in common."""

    share: float  # of its rows that a split has in common with another
    pairs: float  # the mean over pairs of splits of common rows / (rows of the one * rows of the other)
    products: float  # the sum of the products of two splits' residuals at common rows
    expected: float  # what that sum would be if rows scored alike in both, for rows with variance 1
    distinct: float  # how many different rows there are


def _common(stratum: Stratum, by_row: Sequence[np.ndarray]) -> _Common:
    sizes = np.array([len(rows) for rows in by_row])
    if len(by_row) < 2 or stratum.rows is None:
        share = stratum.overlap if len(by_row) > 1 else 0.0
        return _Common(share, share / sizes.mean(), 0.0, 0.0, max(sizes.mean(), sizes.sum() * (1.0 - share)))
    names, places = np.unique(np.concatenate(list(stratum.rows)), return_inverse=True)
    at = np.repeat(np.arange(len(by_row)) * len(names), sizes) + places.reshape(-1)
    rest = np.concatenate([rows - rows.mean() for rows in by_row])
    counts, sums = (
        np.bincount(at, weights, minlength=len(by_row) * len(names)).reshape(len(by_row), -1)
        for weights in (None, rest)
    )
    first, second = np.triu_indices(len(by_row), k=1)
    both, products = (counts @ counts.T)[first, second].astype(float), (sums @ sums.T)[first, second]
    n, m = sizes[first].astype(float), sizes[second].astype(float)
    alike = both * np.maximum(0.0, 1.0 - 1.0 / n - 1.0 / m + both / (n * m))
    share = min(1.0, float((both / np.minimum(n, m)).mean()))
    return _Common(share, (both / (n * m)).mean(), products.sum(), alike.sum(), len(names))
