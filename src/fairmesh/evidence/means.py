"""The mean over sites and its interval. Every set of test rows is a stratum; the sites are taken as they are.

Its variance is the sum of unbiased estimates, one per stratum. No site is pulled anywhere: the interval of a share is
Wilson's with as many rows as have this variance, that of other numbers is Student's t, corrected for skewness.
docs/concepts/evidence.md has the measured coverage.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fairmesh.evidence.intervals import (
    Estimate,
    Number,
    PairedShare,
    Scores,
    Share,
    interactions_of,
    moments_of,
    spread,
)


@dataclass(frozen=True, eq=False)
class Stratum:
    """A set of test rows, and what the models of one or more sites scored there.

    Args:
        scores: The mean over these sites of their scores: one array (seeds, rows) per split.
        weight: The share of these sites among all.
        rows: A number for each row, equal for equal rows: one array per split; None if that is not known. Default:
            None.
        overlap: The share of its rows that a split has in common with another, if `rows` are not known. Default: 0.0.
    """

    scores: Scores
    weight: float
    rows: Sequence[np.ndarray] | None = None
    overlap: float = 0.0


def strata_of(
    scores: Mapping[int, Scores],
    keys: Mapping[int, Hashable],
    rows: Mapping[int, Sequence[np.ndarray] | None],
    overlaps: Sequence[float],
) -> list[Stratum]:
    """Returns the strata of sites. Sites that are judged by the same rows are one.

    Args:
        scores: The scores at each site: one array (seeds, rows) per split.
        keys: By site, what is equal for sites with the same rows.
        rows: The numbers of each site's rows.
        overlaps: For each site, the share of its rows that a split has in common with another.
    """
    groups: dict[Hashable, list[int]] = {}
    for i in scores:
        groups.setdefault(keys[i], []).append(i)
    return [
        Stratum(
            [np.mean([scores[i][k] for i in sites], axis=0) for k in range(len(scores[sites[0]]))],
            len(sites) / len(scores),
            rows[sites[0]],
            overlaps[sites[0]],
        )
        for sites in groups.values()
    ]


def mean_share(strata: Sequence[Stratum], training: float | None = None) -> Share:
    """Returns the mean over sites of shares.

    Args:
        strata: What models scored: 1 where an answer is right, else 0.
        training: As of `share`. Default: None.
    """
    if not strata:
        return Share(math.nan, 0)
    found = _Sum.of(strata, training)
    effective, freedom = found.effective(found.value * (1.0 - found.value))
    return Share(min(max(found.value, 0.0), 1.0), found.count, effective, freedom)


def mean_paired_share(strata: Sequence[Stratum], training: float | None = None) -> PairedShare:
    """Returns the mean over sites of the difference of two shares.

    Args:
        strata: By how much the scores of two models differ at each row.
        training: As of `share`. Default: None.
    """
    if not strata:
        return PairedShare(math.nan, math.nan, 0)
    found = _Sum.of(strata, training)
    of_signs = [
        sum(one.weight * float(np.mean([np.maximum(sign * d, 0.0).mean() for d in one.scores])) for one in strata)
        for sign in (1.0, -1.0)
    ]
    only_a, only_b = of_signs
    effective, freedom = found.effective(only_a + only_b - (only_a - only_b) ** 2)
    return PairedShare(only_a, only_b, found.count, effective, freedom)


def mean_number(
    strata: Sequence[Stratum], training: float | None = None, limits: tuple[float, float] | None = None
) -> Number:
    """Returns the mean over sites of a number per row, such as a loss.

    Args:
        strata: The number at each row.
        training: As of `share`. Default: None.
        limits: The lowest and the highest possible value; None for any. Default: None.
    """
    if not strata:
        return Number(math.nan, 0, math.nan)
    found = _Sum.of(strata, training)
    square = found.variance * found.variance
    uncertain = sum(part * part / freedom for part, freedom in found.parts if freedom > 0)
    uncertain += 0.0 if found.freedom is None else square / found.freedom
    return Number(
        found.value,
        found.count,
        error=math.sqrt(found.variance) if found.variance >= 0 else math.nan,
        freedom=square / uncertain if uncertain > 0 else None,
        skew=found.third / found.variance**1.5 if found.variance > 0 else 0.0,
        limits=limits,
    )


def mean_of(parts: Sequence[Estimate]) -> Estimate:
    """Returns the mean of independent estimates that have a value, such as of one metric at several sites. An estimate
    without an interval counts as if its rows varied like those of the others.

    Args:
        parts: The estimates.
    """
    known = [part for part in parts if not math.isnan(part.value)]
    if not known:
        return Share(math.nan, 0)
    value, count = float(np.mean([part.value for part in known])), sum(part.rows for part in known)
    shares = [part for part in known if isinstance(part, Share)]
    if len(shares) == len(known):
        sizes = [float(part.rows if part.effective is None else part.effective) for part in shares]
        of_row = [
            p.value * (1.0 - p.value) * n / (n - 1.0) if n > 1 else math.nan for p, n in zip(shares, sizes)
        ]  # without bias, as in the strata
        squares = [1.0 / len(known) ** 2 / n if n > 0 else math.nan for n in sizes]
        variance, _ = _variance(of_row, [n - 1.0 for n in sizes], squares, [part.value for part in shares])
        floor = _floor([p.value for p in shares], [1.0 / len(known)] * len(known), squares)
        freedom = _freedom(variance, [(v * s, p.freedom) for v, s, p in zip(of_row, squares, shares)])
        total = 1.0 / sum(one for one in squares if not math.isnan(one)) if sum(sizes) > 0 else 0.0
        return Share(value, count, *_effective(value * (1.0 - value), max(variance, floor), freedom, total))
    errors = [_error(part) for part in known]
    measured = [error for error in errors if not math.isnan(error)]
    if not measured:
        return Number(value, count, math.nan)
    errors = [float(np.mean(measured)) if math.isnan(error) else error for error in errors]
    variances = [(error / len(known)) ** 2 for error in errors]
    freedom = _freedom(sum(variances), list(zip(variances, [getattr(part, "freedom", None) for part in known])))
    limits = [getattr(part, "limits", None) or (-math.inf, math.inf) for part in known]
    ends = min(low for low, _ in limits), max(high for _, high in limits)
    return Number(value, count, math.sqrt(sum(variances)), freedom, limits=ends)


def _error(part: Estimate) -> float:
    """Returns the standard error of an estimate; NaN if it is not known."""
    if isinstance(part, Number):
        return part.error
    low, high = part.interval()
    return (high - low) / (2 * 1.96)


def _freedom(variance: float, parts: Sequence[tuple[float, float | None]]) -> float | None:
    """Returns the degrees of freedom of a sum of variances (Satterthwaite)."""
    uncertain = sum(part * part / freedom for part, freedom in parts if freedom is not None and not math.isnan(part))
    return variance * variance / uncertain if uncertain > 0 and variance > 0 else None


def _effective(of_one: float, variance: float, freedom: float | None, rows: float) -> tuple[float, float | None]:
    """Returns how many independent rows have this variance, if one has the variance `of_one`, and its degrees of
    freedom. The product of two estimated shares is too low by the variance, hence one row more."""
    if of_one <= 1e-12 or not variance > 0:
        return rows, None
    return of_one / variance + 1.0, freedom


def _variance(
    of_row: Sequence[float], freedoms: Sequence[float], squares: Sequence[float], values: Sequence[float]
) -> tuple[float, list[float]]:
    """Returns the variance of a mean over strata, and that of a row in each stratum. A stratum with a single row takes
    the mean of the others; if all have a single one, the variance between them stands for that of a row.

    Args:
        of_row: The variance of a row in each stratum; NaN if it is not known.
        freedoms: Its degrees of freedom.
        squares: The squared weight of each stratum, over its rows.
        values: The mean of each stratum.
    """
    known = [(v, f) for v, f in zip(of_row, freedoms) if not math.isnan(v)]
    if known:
        pooled = sum(v * f for v, f in known) / sum(f for _, f in known)
    else:
        pooled = float(np.var(values, ddof=1)) if len(values) > 1 else math.nan
    filled = [pooled if math.isnan(v) else v for v in of_row]
    return sum(v * square for v, square in zip(filled, squares)), filled


def _floor(values: Sequence[float], weights: Sequence[float], squares: Sequence[float]) -> float:
    """Returns the least variance of a mean of shares. Strata whose rows are all alike, such as all right, have no
    variance of their own; together they have that of their number of rows by Laplace's rule."""
    found = 0.0
    for end in (-1.0, 0.0, 1.0):
        alike = [k for k, value in enumerate(values) if value == end]
        weight, square = (sum(one[k] for k in alike) for one in (weights, squares))
        if square > 0:
            rows = weight * weight / square
            found += weight * weight * (rows + 1.0) / (rows + 2.0) ** 2 / rows
    return found


@dataclass(frozen=True)
class _Sum:
    """A weighted sum over strata, its variance, and what intervals need of its parts."""

    value: float
    count: int  # rows, the mean over splits
    variance: float
    freedom: float | None  # of what seeds and splits differ by
    floor: float
    rows: float  # independent rows, if all have the same variance
    parts: tuple[tuple[float, float], ...]  # the variance due to each stratum's rows, and its degrees of freedom
    third: float  # the third cumulant

    @staticmethod
    def of(strata: Sequence[Stratum], training: float | None) -> "_Sum":
        splits = len(strata[0].scores)
        by_row = [[np.asarray(one, dtype=np.float64).mean(axis=0) for one in stratum.scores] for stratum in strata]
        sizes = [[len(one) for one in of_splits] for of_splits in by_row]
        weights = [stratum.weight for stratum in strata]
        means = [float(np.mean([one.mean() for one in of_splits])) for of_splits in by_row]
        moments = [moments_of(of_splits) for of_splits in by_row]
        common = [_Common.of(stratum, of_splits) for stratum, of_splits in zip(strata, by_row)]
        squares = [w * w * float(np.mean([1.0 / n for n in of_splits])) for w, of_splits in zip(weights, sizes)]
        of_split, of_row = _variance(
            [one.variance for one in moments], [one.freedom for one in moments], squares, means
        )
        alike = _correlation(common, of_row)
        pairs = [w * w * one.pairs for w, one in zip(weights, common)]
        together = alike * sum(v * pair for v, pair in zip(of_row, pairs))
        seeds = [np.asarray(one).shape[0] for one in strata[0].scores]
        points = [
            sum((w * np.asarray(s.scores[k]).mean(axis=1) for w, s in zip(weights, strata)), np.zeros(seeds[k]))
            for k in range(splits)
        ]
        between = np.sum(
            [w * w * np.array(interactions_of([*s.scores])) for w, s in zip(weights, strata)], axis=0
        ).tolist()
        value, variance, freedom = spread(
            points,
            [of_split] * splits,
            between,
            float(np.mean([one.share for one in common])),
            training,
            together / of_split if of_split > 0 else 0.0,
        )
        over_splits = [square / splits + (1.0 - 1.0 / splits) * alike * pair for square, pair in zip(squares, pairs)]
        whole = sum(square / splits + (1.0 - 1.0 / splits) * pair for square, pair in zip(squares, pairs))
        pooled = max(1.0, sum(one.freedom for one in moments))
        parts = tuple(
            (v * part, min(float(one.freedom), known.distinct - 1.0) if one.freedom else pooled)
            for v, part, one, known in zip(of_row, over_splits, moments, common)
        )
        third = sum(one.third * part**2 / w if w > 0 else 0.0 for one, part, w in zip(moments, over_splits, weights))
        floor = _floor(
            [m if one.variance == 0 or math.isnan(one.variance) else math.nan for m, one in zip(means, moments)],
            weights,
            [square / splits + (1.0 - 1.0 / splits) * pair for square, pair in zip(squares, pairs)],
        )
        count = round(sum(sum(of_splits) for of_splits in sizes) / splits)
        return _Sum(value, count, variance, freedom, floor, 1.0 / whole, parts, third)

    def effective(self, of_one: float) -> tuple[float, float | None]:
        return _effective(of_one, max(self.variance, self.floor), self.freedom, self.rows)


@dataclass(frozen=True)
class _Common:
    """Which rows the splits of a stratum have in common.

    Args:
        share: The share of its rows that a split has in common with another.
        pairs: The mean over pairs of splits of common rows / (rows of the one * rows of the other).
        products: The sum of the products of two splits' residuals at common rows.
        expected: What that sum would be if rows scored alike in both, for rows with variance 1.
        distinct: How many different rows there are.
    """

    share: float
    pairs: float
    products: float
    expected: float
    distinct: float

    @staticmethod
    def of(stratum: Stratum, by_row: Sequence[np.ndarray]) -> "_Common":
        every = float(sum(map(len, by_row)))
        if len(by_row) < 2 or stratum.rows is None:
            share = stratum.overlap if len(by_row) > 1 else 0.0
            rows = every / len(by_row)
            return _Common(share, share / rows, 0.0, 0.0, max(rows, every * (1.0 - share)))
        names, places = np.unique(np.concatenate(list(stratum.rows)), return_inverse=True)
        sizes = np.array([len(one) for one in by_row])
        at = np.repeat(np.arange(len(by_row)) * len(names), sizes) + places.reshape(-1)
        rest = np.concatenate([one - one.mean() for one in by_row])
        counts, sums = (
            np.bincount(at, weights, minlength=len(by_row) * len(names)).reshape(len(by_row), -1)
            for weights in (None, rest)
        )
        first, second = np.triu_indices(len(by_row), k=1)
        both, products = (counts @ counts.T)[first, second].astype(float), (sums @ sums.T)[first, second]
        n, m = sizes[first].astype(float), sizes[second].astype(float)
        alike = both * np.maximum(0.0, 1.0 - 1.0 / n - 1.0 / m + both / (n * m))
        return _Common(
            min(1.0, float((both / np.minimum(n, m)).mean())),
            float((both / (n * m)).mean()),
            float(products.sum()),
            float(alike.sum()),
            float(len(names)),
        )


def _correlation(common: Sequence[_Common], of_row: Sequence[float]) -> float:
    """Returns how much the same row scores alike in two splits, in [0, 1]: with models that answer it differently, more
    splits say more."""
    expected = sum(one.expected * v for one, v in zip(common, of_row))
    found = sum(one.products for one in common)
    return min(1.0, max(0.0, found / expected)) if expected > 0 else 1.0
