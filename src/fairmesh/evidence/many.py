"""Which of many sites differ clearly: the more are compared, the more look different by chance."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fairmesh.evidence.intervals import LEVEL, Estimate, Number

_ROWS, _ROWS_PER_DOUBLING = 5, 3  # a mean of fewer has no tails that are known well enough (docs/concepts/evidence.md)


class Clear(NamedTuple):
    """Which of several estimates differ clearly from 0, by their positions, and the level of the intervals that show
    it."""

    which: frozenset[int]
    level: float


def clear_among(estimates: Sequence[Estimate], among: int = 1) -> Clear:
    """Returns which estimates differ clearly from 0 if all of them are looked at.

    By the procedure of Benjamini and Hochberg (1995), of those that it names at most 5 % are named by chance, on
    average. If it names R of m, their intervals at the level 1 - 0.05 R / m are those of Benjamini and Yekutieli
    (2005): they cover in spite of the selection, and none contains 0. A single estimate is judged by its 95 % interval.

    Args:
        estimates: The estimates; those without an interval do not count.
        among: How many are looked at, if others know the rest: then a single estimate is judged by the interval of
            Bonferroni. Default: 1.

    Example:
        >>> from fairmesh.evidence import Number
        >>> from fairmesh.evidence.many import clear_among
        >>> equal, apart = Number(0.0, rows=100, error=1.0), Number(2.5, rows=100, error=1.0)
        >>> sorted(clear_among([apart]).which), sorted(clear_among([apart, *9 * [equal]]).which)
        ([0], [])
        >>> sorted(clear_among([*5 * [apart], *5 * [equal]]).which)
        [0, 1, 2, 3, 4]
    """
    intervals = [estimate.interval() for estimate in estimates]
    compared = max(among, sum(low <= high for low, high in intervals))  # false of NaN
    by_itself = frozenset(i for i, interval in enumerate(intervals) if excludes_zero(interval))
    # How many rows are needed depends on how many differ, and not on how many of these have enough rows.
    needed = _rows_needed(len(_passing(estimates, by_itself, compared).which), compared)
    known_well = {i for i in by_itself if estimates[i].rows >= needed or not isinstance(estimates[i], Number)}
    return _passing(estimates, frozenset(known_well), compared)


def _passing(estimates: Sequence[Estimate], remaining: frozenset[int], compared: int) -> Clear:
    """Returns which of the remaining estimates differ clearly from 0, given how many were compared."""
    level, before = LEVEL, compared
    while 0 < len(remaining) < before:  # from above, so that it ends at the largest set that passes
        before = len(remaining)
        level = 1.0 - (1.0 - LEVEL) * before / compared
        remaining = frozenset(i for i in remaining if excludes_zero(estimates[i].interval(level)))
    return Clear(remaining, level)


def _rows_needed(differing: int, compared: int) -> float:
    """Returns how many rows a mean needs for a verdict, given how many of the compared ones differ. A single one needs
    no more than its interval does."""
    if compared == 1 or differing == compared:
        return 0.0
    return _ROWS - _ROWS_PER_DOUBLING * math.log2(max(1, differing) / compared)


def excludes_zero(interval: Iterable[float]) -> bool:
    """Returns whether an interval holds positive numbers only, or negative ones only."""
    low, high = interval
    return low > 0 or high < 0


def chance_in_words(by_themselves: int, remaining: int, compared: int) -> str:
    """Returns how many sites look different without regard to their number, and how many do so by chance; nothing if
    all of them remain when their number is accounted for.

    Args:
        by_themselves: How many sites have a 95 % interval without 0.
        remaining: How many sites are called better or worse.
        compared: How many were compared.

    Example:
        >>> from fairmesh.evidence.many import chance_in_words
        >>> chance_in_words(6, 0, 160)[:72]
        '6 of 160 sites look different by themselves, and about 8 would by chance'
    """
    if by_themselves <= remaining:
        return ""
    look = "looks different by itself" if by_themselves == 1 else "look different by themselves"
    left = "none remains" if not remaining else "1 remains" if remaining == 1 else f"{remaining} remain"
    return (
        f"{by_themselves} of {compared} sites {look}, and about {(1 - LEVEL) * compared:.2g} would by chance; adjusted "
        f"for their number, and with enough rows to tell, {left}"
    )
