"""Rows of a site that are kept out of the common training, to choose the site's own model by."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.data.units import FEWEST_UNITS, drawn_units, too_few_units, units_of, with_units
from fairmesh.errors import BadInput, counted
from fairmesh.numerics import random_streams

FEWEST_ROWS = 10  # a site with fewer holds nothing out: two rows could not tell models apart


def order_by_class(samples: Samples, purpose: str) -> Tensor:
    """Returns a random order of the rows in which those of a class are together. Every k-th row of it has the classes
    in their proportions. The order depends on the targets alone, so it is the same wherever the site's data is."""
    order = random_streams.bits(key_for(purpose), len(samples)).argsort(stable=True)
    targets = samples.labels if samples.stream else samples.targets
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.ndim != 1:
        return order
    return order[targets[order].argsort(stable=True)]


def key_for(purpose: str) -> Tensor:
    """Returns the key of the random numbers that divide a site's rows for a purpose."""
    zero = torch.zeros((), dtype=torch.int64)
    return random_streams.keys(zero, purpose, 0, zero.view(1)).squeeze(-1)


def can_hold_out(samples: Samples, rows: int = FEWEST_ROWS, units: int = FEWEST_UNITS) -> bool:
    """Returns whether a set has enough rows and units to hold some out."""
    return len(samples) >= rows and not too_few_units(samples, units)


def too_few_in_words(samples: Samples, rows: int = FEWEST_ROWS, units: int = FEWEST_UNITS) -> str:
    """Returns why nothing is held out of a set that is too small."""
    if len(samples) < rows:
        return f"{counted(len(samples), 'row')} {_are(len(samples))} too few to hold any out; {rows} are needed"
    count = units_of(samples)
    return f"rows of {counted(count, 'unit')} are too few to hold any out; {units} units are needed"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def spread_over(order: Tensor, count: int) -> Tensor:
    """Returns a mask of `count` rows that lie at even distances in an order."""
    chosen = torch.zeros(len(order), dtype=torch.bool)
    chosen[order[((torch.arange(count) + 0.5) * len(order) / max(1, count)).long()]] = True
    return chosen


def reserve(sites: Sequence[Site], share: float = 0.2) -> list[Site]:
    """Moves a share of every site's training rows into its `reserved` set, which the common model is not trained on.

    A model looks better on rows that it was trained on. So a site that chooses between the common model and its own
    needs rows that neither has seen. `fm.personalize` compares them there, and then trains the site's own models on
    all rows. Classes keep their proportions. Rows of one unit stay together. Left as they are: a site with fewer than
    10 rows or 4 units, one that has reserved rows already, and one with a validation set of its own, which serves the
    same purpose.

    Args:
        sites: The sites.
        share: The share of the training rows to reserve, in (0, 1). Default: 0.2.

    Returns:
        The sites, with fewer training rows.

    Raises:
        BadInput: The share is not between 0 and 1.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> inputs, labels = torch.randn(50, 3), torch.arange(50) % 2
        >>> (site,) = fm.data.reserve([fm.Site((inputs, labels))])
        >>> len(site.train), len(site.reserved)
        (40, 10)
    """
    if not 0 < share < 1:
        raise BadInput(f"share must lie in (0, 1), got {share}")
    sites = with_units(sites)
    uses = Counter(id(site.validation) for site in sites)
    return [
        site
        if site.reserved is not None or (site.validation is not None and uses[id(site.validation)] == 1)
        else _reserved(i, site, share)
        for i, site in enumerate(sites)
    ]


def _reserved(i: int, site: Site, share: float) -> Site:
    rows = Samples.of(site.train, f"site {i} ({site.name or 'unnamed'})")
    count = len(rows)
    taken = min(max(1, round(share * count)), count - 1)
    if not can_hold_out(rows):
        return site
    if not rows.here:
        kept, away = Samples.elsewhere(count - taken, rows), Samples.elsewhere(taken, rows)
        return dataclasses.replace(site, train=kept, reserved=away)
    if rows.units is None:
        away = spread_over(order_by_class(rows, "reserved rows"), taken)
    else:
        away = drawn_units(rows, taken, key_for("reserved rows"))
    return dataclasses.replace(site, train=rows.take(~away), reserved=rows.take(away))
