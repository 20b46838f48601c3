"""Rows that belong together, such as those of one patient: intervals count these units instead of rows.

A metric is that of all rows. How much it would change with other units follows from what each unit adds to it: for a
mean over rows exactly, from the units' totals; for other metrics by leaving out one unit after another. These numbers,
one per unit, take the place of rows in all estimates. docs/concepts/evidence.md has the measured coverage.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_GROUPS = 100  # of units that are left out together, at most: more would take longer and change little


class Additions(NamedTuple):
    """What the units of one split add to a metric."""

    values: np.ndarray  # (seeds,): the metric
    scores: np.ndarray  # (seeds, units): the mean is the metric, the variance over the units' number is its variance
    numbers: np.ndarray  # (units,): which units these are
    freedom: float  # the degrees of freedom of the variance between units


def additions_to_mean(scores: np.ndarray, units: np.ndarray) -> Additions:
    """Returns what units add to a mean over rows: by how much their totals exceed those of as many mean rows.

    Args:
        scores: A number for each row (seeds, rows).
        units: The number of the unit of each row (rows,).
    """
    numbers, places, sizes = _parts_of(units)
    totals = np.stack([np.bincount(places, row, minlength=len(sizes)) for row in scores])
    means = scores.mean(axis=1, keepdims=True)
    return _scaled(means, (totals - means * sizes) / sizes.sum(), numbers, sizes)


def additions_to_metric(metric: Callable[[np.ndarray], np.ndarray], units: np.ndarray) -> Additions:
    """Returns what units add to a metric of all rows together: by how much it changes without them (jackknife). Their
    scores are NaN if it is not defined without some of them.

    Args:
        metric: counts -> the metric of each resample (resamples, seeds). The counts (resamples, rows) say how often
            each resample contains each row.
        units: The number of the unit of each row (rows,).
    """
    numbers, places, sizes = _parts_of(units)
    if len(sizes) > _GROUPS:
        places = places % _GROUPS
        numbers, sizes = np.arange(_GROUPS), np.bincount(places)
    value = metric(np.ones((1, len(places)))).T
    without = metric((places != np.arange(len(sizes))[:, None]).astype(np.float64)).T if len(sizes) > 1 else value
    changes = (value - without) * (1.0 - sizes / sizes.sum())
    return _scaled(value, changes - changes.mean(axis=1, keepdims=True), numbers, sizes)


def totals_by_unit(scores: np.ndarray, units: np.ndarray | None) -> np.ndarray:
    """Returns the sum of the rows' numbers of each unit; the numbers themselves if there are no units."""
    if units is None:
        return scores
    _, places, sizes = _parts_of(units)
    return np.bincount(places, scores, minlength=len(sizes))


def unit_freedom(parts: Sequence[Additions]) -> float:
    """Returns the degrees of freedom of the variance between units, of several splits that may have units in common."""
    most = sum(len(part.numbers) - 1 for part in parts)
    distinct = len(np.unique(np.concatenate([part.numbers for part in parts])))
    if not most:  # a single unit in every split
        return distinct - 1.0
    return sum(part.freedom for part in parts) * min(1.0, (distinct - 1) / most)


def _parts_of(units: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the numbers of the units in rising order, the place of each row's unit among them, and their sizes."""
    numbers, places = np.unique(units, return_inverse=True)
    places = places.reshape(-1)
    return numbers, places, np.bincount(places)


def _scaled(value: np.ndarray, changes: np.ndarray, numbers: np.ndarray, sizes: np.ndarray) -> Additions:
    """Returns changes of a metric (seeds, units) as additions. Their squares are too small, by as much as they would be
    for independent rows (the correction CR2 of Bell and McCaffrey, 2002), and so are their degrees of freedom where
    sizes are unequal."""
    count, shares = len(sizes), sizes / sizes.sum()
    squares, cubes = float((shares**2).sum()), float((shares**3).sum())
    if count < 2:
        return Additions(value[:, 0], value + changes, numbers, 0.0)
    scale = count * math.sqrt((count - 1) / (count * (1.0 - squares)))
    freedom = (1.0 - squares) ** 2 / (squares - 2.0 * cubes + squares**2)
    return Additions(value[:, 0], value + changes * scale, numbers, max(1.0, freedom))
