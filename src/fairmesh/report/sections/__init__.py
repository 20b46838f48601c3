"""The parts of a page about one run, in the order of their PLACE. A file in this folder is a part of the page, without
an entry elsewhere. It has

- PLACE, a number: the part with the smallest one comes first, and those below FIRST_SCREEN are the first screen;
- shown(view), which yields the part's elements on the page, none if there is nothing to show;
- told(run, chosen), if report.json says something about it: entries by name. `chosen` is a sweep's best variant.
"""

import importlib
import pkgutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fairmesh.metrics.units import Unit, defined
from fairmesh.report.elements import ROWS
from fairmesh.report.runs import Run
from fairmesh.report.sentences import ALONE, unit_of

Json = dict[str, Any]
Rows = list[list[str]]

FIRST_SCREEN = 20


@dataclass(frozen=True)
class View:
    """What a part of the page is made of.

    Args:
        card: What the report says of the run.
        variants: The run's variants, the best first; the run itself if it is no sweep.
        alone: Whether the page is about this run only.
    """

    card: Json
    variants: Sequence[Run]
    alone: bool

    @property
    def order(self) -> Sequence[int]:
        """The numbers of the sites from top to bottom."""
        return in_order(self.card)

    @property
    def sites(self) -> list[Json]:
        """The sites from top to bottom."""
        return [self.card["sites"][i] for i in self.order]

    def ordered(self, rows: Rows) -> Rows:
        """Returns a table of sites, with its header, in this order."""
        places = {" ".join(str(site["name"]).split()): place for place, site in enumerate(self.sites)}
        return rows[:1] + sorted(rows[1:], key=lambda row: places.get(" ".join(row[0].split()), len(places)))

    @property
    def unit(self) -> Unit:
        """How the primary metric is shown."""
        return unit_of(self.card)


def scaled(estimates: Iterable[tuple[Any, Any]], unit: Unit) -> tuple[list[float | None], list[list[float] | None]]:
    """Returns values and their intervals as charts take them, of which either may not be known."""
    values, intervals = [], []
    for value, interval in estimates:
        ends = [unit.scale * end for end in interval or () if defined(end)]
        values.append(unit.scale * value if defined(value) else None)
        intervals.append(ends if len(ends) == 2 else None)
    return values, intervals


def in_order(card: Json) -> Sequence[int]:
    """Returns the numbers of the sites in their own order; of many sites, those that are worse than alone come first,
    then the worst, both with the models that they are given."""
    sites = card["sites"]
    if len(sites) <= ROWS:
        return range(len(sites))
    given = {one["name"]: one["versus"] for one in card["site_models"] or sites}

    def is_not_worse(i: int) -> bool:
        return given.get(sites[i]["name"], {}).get(ALONE, {}).get("verdict") != "worse"

    return sorted(card["given_worst_first"], key=is_not_worse)


@cache
def sections() -> list[Any]:
    """Returns the parts of the page."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return sorted((importlib.import_module(f"{__name__}.{name}") for name in names), key=lambda module: module.PLACE)


def told_by_sections(run: Run, chosen: Run) -> Json:
    """Returns what all parts add to report.json."""
    told: Json = {}
    for section in sections():
        if hasattr(section, "told"):
            told = dict(**told, **section.told(run, chosen))  # an error if two sections take one key
    return told
