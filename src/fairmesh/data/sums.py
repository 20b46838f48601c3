"""What sites tell each other about their tables: sums over their own training rows, and what follows from all of them.

Simulations and nodes between organisations compute it in exact arithmetic, so that it is the same to the last bit.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from fairmesh.config.tables import from_table, to_table
from fairmesh.data.columns import MEAN, Column
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.site_files import two_writings, without_common
from fairmesh.data.tables import CATEGORIES_AT_MOST, LARGEST, NAME_AT_MOST, Kind, absent, in_order
from fairmesh.errors import BadInput, listed

FEWEST = 5  # rows of a site behind anything that it says about them
COLUMNS_AT_MOST, LABELS_AT_MOST = 2_000, 1_000  # of a table between organisations, unless its labels are named


class Sums(NamedTuple):
    """What a site tells about one column of its training rows."""

    known: int = 0  # rows with a value; 0 if too few to tell anything
    missing: int = 0
    mean: float = 0.0
    squares: float = 0.0  # the sum of squared deviations from this mean
    names: tuple[str, ...] = ()  # categories or labels that it has

    def contradiction(self, rows: int, low: float = -math.inf, high: float = math.inf) -> str:
        """Returns why these cannot be sums over `rows` rows, of values between `low` and `high`; "" if they can."""
        if self.missing > rows or (self.known and self.known + self.missing != rows):
            return f"it counts {self.known} values and {self.missing} missing ones in {rows} training rows"
        if not self.known:
            return "it has a mean or a spread of no values" if self.mean or self.squares else ""
        rounding = 1e-9 * max([1.0, *(abs(end) for end in (low, high) if math.isfinite(end))])
        below, above = self.mean - low + rounding, high - self.mean + rounding
        if min(below, above) < 0:
            return f"the mean is {self.mean:.6g}, but values are {low:.6g} to {high:.6g}"
        if self.squares > self.known * above * below:  # if all values are at the ends of the range
            return f"values between {low:.6g} and {high:.6g} with this mean cannot be so far apart"
        return ""


@dataclass(frozen=True)
class TableSums:
    """What a site tells about its table: the plan, and sums over its training rows.

    A column with fewer than 5 known values at the site, and a category in fewer than 5 rows, is left out. So is a value
    in fewer than 5 rows where there are at most two different ones. Fewer than 5 missing values count as none.
    """

    plan: Preprocessing
    columns: Mapping[str, Sums]  # by the column's name
    target: Sums

    def each(self) -> Iterable[tuple[str, Sums]]:
        """Yields every column with what is told about it, the target last."""
        yield from self.columns.items()
        yield self.plan.target.name, self.target

    @property
    def lacking(self) -> Sums:
        """What counts for a column that the site does not have: it is missing, in 5 rows or more if the site tells of
        as many."""
        return Sums(missing=FEWEST) if any(one.known or one.missing or one.names for _, one in self.each()) else Sums()

    def withheld(self) -> "TableSums":
        """Returns the same without any number, for a site that tells nothing about its values."""
        return replace(self, columns=dict.fromkeys(self.columns, Sums()), target=Sums(names=self.target.names))

    @property
    def too_many(self) -> bool:
        """Whether it has more columns, categories or labels than other sites accept."""
        categories = max(len(sums.names) for sums in self.columns.values())
        labels = len(self.target.names)
        return len(self.columns) > COLUMNS_AT_MOST or categories > CATEGORIES_AT_MOST or labels > LABELS_AT_MOST

    def to_table(self) -> dict[str, Any]:
        """Returns it as a JSON table."""
        plan = self.plan.reading({})  # how a site writes missing values is its own affair
        table = {"plan": to_table(plan, defaults=False), "columns": self.columns, "target": self.target}
        return json.loads(json.dumps(table))

    def contradiction(self, rows: int, ranges: Mapping[str, tuple[float, float]]) -> str:
        """Returns why these cannot be sums over the training rows that a site declares, "" if they can.

        Args:
            rows: How many it declares.
            ranges: The smallest and the largest value that a contract allows, by column.
        """
        told = [(column, self.columns[column.name]) for column in self.plan.columns]
        for column, sums in [(self.plan.target, self.target), *told]:
            ends = (0.0, 1.0) if column.type == "yes-no" else ranges.get(column.name, (-math.inf, math.inf))
            reason = sums.contradiction(rows, *ends)
            if not reason and column.type == "category" and FEWEST * len(sums.names) > rows:
                reason = f"it tells {len(sums.names)} categories, each in {FEWEST} rows or more, of {rows} rows"
            if reason:
                return f"column {column.name!r}: {reason}"
        return ""

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> "TableSums":
        """Reads what `to_table` returns.

        Raises:
            BadInput: It has another form.
        """
        try:
            columns = {name: _sums(row) for name, row in table["columns"].items()}
            made = TableSums(_plan(table["plan"]), columns, _sums(table["target"]))
            if sorted(columns) != sorted(column.name for column in made.plan.columns) or not columns:
                raise ValueError("other columns than planned")
            if made.plan.target.name in columns:
                raise ValueError("the target is an input too")
            if made.too_many:
                raise ValueError("too many columns, categories or labels")
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"sums of a table cannot be read: {error}") from error
        return made


def _plan(table: Mapping[str, Any]) -> Preprocessing:
    """Reads a plan that another site tells. Refuses, by any error, what this one would not write."""
    made = from_table(Preprocessing, table, "plan")
    if to_table(made, defaults=False) != table:
        raise ValueError("settings of another form")
    for column in (*made.columns, made.target):
        _texts([column.name, column.unit, *column.classes, *([column.fill] if isinstance(column.fill, str) else [])])
        numbers = [number for number in (column.center, column.scale, column.fill) if isinstance(number, float)]
        if max(map(abs, numbers)) > LARGEST:
            raise ValueError("a number that is too large")
        if column.missing_values:
            raise ValueError("missing_values, which a site does not tell")
    return made


def _texts(values: Any) -> tuple[str, ...]:
    for value in values:
        if not isinstance(value, str) or len(value) > NAME_AT_MOST or not value.isprintable():
            raise ValueError("a name that is too long or cannot be printed")
    return tuple(values)


def _sums(row: Sequence[Any]) -> Sums:
    known, missing, mean, squares, names = row
    if not all(type(count) is int and 0 <= count <= LARGEST for count in (known, missing)):
        raise ValueError("a count that is none")
    numbers = {type(mean), type(squares)} <= {int, float}
    if not (numbers and abs(mean) <= LARGEST and 0 <= squares <= LARGEST**3):
        raise ValueError("a number that is negative, too large or not finite")
    return Sums(known, missing, float(mean), float(squares), _texts(names))


def _sums_of(column: np.ndarray, kind: Kind) -> Sums:
    """Returns what a site tells about a column, as `encoded` returns it."""
    known = column[~absent(column)]
    missing = len(column) - len(known)
    missing = missing if missing >= FEWEST else 0
    values, counts = np.unique(known.astype(str) if kind == "category" else known, return_counts=True)
    frequent = values[counts >= FEWEST]
    if kind == "category":
        return Sums(missing=missing, names=tuple(frequent.tolist()))
    if len(values) <= 2:
        known = known[np.isin(known, frequent)]
    if len(known) < FEWEST:
        return Sums(missing=missing)
    mean = math.fsum(known.tolist()) / len(known)  # exact sums do not depend on the order of the rows
    squares = math.fsum(np.square(known - mean).tolist())
    return Sums(len(column) - missing, missing, mean, squares * (len(column) - missing) / len(known))


def table_sums(
    plan: Preprocessing, columns: Mapping[str, np.ndarray], target: np.ndarray, labels: Sequence[str] = ()
) -> TableSums:
    """Returns what a site tells about its training rows.

    Args:
        plan: The plan.
        columns: The values of the input columns in the training rows, as `encoded` returns them.
        target: The targets of the training rows, if they are numbers.
        labels: The labels that the site has in all its rows, if targets are labels. Default: ().
    """
    told = {c.name: _sums_of(columns[c.name], c.kind) if c.open else Sums() for c in plan.columns}
    if plan.target.standardize:
        return TableSums(plan, told, _sums_of(np.asarray(target, np.float64), "number"))
    return TableSums(plan, told, Sums(names=() if plan.target.classes else tuple(labels)))


def columns_of_two_sites(sums: Mapping[str, TableSums]) -> tuple[dict[str, TableSums], dict[str, str]]:
    """Leaves out columns that one site alone has: it could have invented them, and each is an input of everybody's
    model.

    Returns:
        The sums without them, by site; and which site has them, by column.
    """
    counts = Counter(name for told in sums.values() for name in told.columns)
    alone = {name: site for site, told in sums.items() for name in told.columns if counts[name] == 1}
    left = {}
    for site, told in sums.items():
        plan = replace(told.plan, columns=tuple(column for column in told.plan.columns if column.name not in alone))
        left[site] = replace(told, plan=plan, columns={n: one for n, one in told.columns.items() if n not in alone})
    return left, alone


def of_two_sites(sums: Mapping[str, TableSums]) -> tuple[dict[str, TableSums], dict[str, dict[str, str]]]:
    """Leaves out categories and labels that one site alone tells: it could have invented them, and each is an input or
    an output of everybody's model.

    Returns:
        The sums without them, by site; and which site tells them, by column and name.
    """
    counts = Counter((column, name) for told in sums.values() for column, one in told.each() for name in set(one.names))
    left, alone = dict[str, TableSums](), dict[str, dict[str, str]]()
    for site, told in sums.items():
        kept = dict[str, Sums]()
        for column, one in told.each():
            kept[column] = one._replace(names=tuple(name for name in one.names if counts[column, name] > 1))
            for name in one.names:
                if counts[column, name] == 1:
                    alone.setdefault(column, {})[name] = site
        left[site] = replace(told, target=kept.pop(told.plan.target.name), columns=kept)
    return left, alone


class Misfit(BadInput):
    """The tables of the sites do not fit together. `sites` are those to ask."""

    def __init__(self, sites: Sequence[str], reason: str):
        super().__init__(reason)
        self.sites, self.reason = list(sites), reason


def fitted(sums: Mapping[str, TableSums]) -> Preprocessing:
    """Returns the preprocessing that follows from what the sites tell about their tables. It has all their columns. One
    that a site lacks counts as missing there.

    Args:
        sums: What each site tells, by its name. The first one's order of columns is that of the inputs.

    Raises:
        Misfit: The tables do not have the same kinds or settings, or no column in common.
    """
    plan = _common_plan({site: told.plan for site, told in sums.items()})
    columns = [
        _completed(column, [told.columns.get(column.name, told.lacking) for told in sums.values()])
        for column in plan.columns
    ]
    return Preprocessing(tuple(columns), _completed(plan.target, [told.target for told in sums.values()]))


def _common_plan(plans: Mapping[str, Preprocessing]) -> Preprocessing:
    """Returns the plan of all sites, which may differ in their columns. Refuses those that contradict each other, and
    names the sites."""
    holders: dict[str, dict[str, Column]] = {}
    for site, plan in plans.items():
        for column in plan.columns:
            holders.setdefault(column.name, {})[site] = column
    if written := two_writings({site: [c.name for c in plan.columns] for site, plan in plans.items()}):
        usual, rarer = sorted(written, key=lambda name: -len(holders[name]))
        tied = holders[usual] if len(holders[usual]) == len(holders[rarer]) else {}  # either may be wrong, or lie
        raise Misfit(
            [*tied, *holders[rarer]],
            f"{listed(holders[rarer])} has a column {rarer!r}, but {listed(holders[usual])} a column {usual!r}; write "
            "the name in the same way, or rename one",
        )
    columns = [_usual(f"column {name!r}", by_site) for name, by_site in holders.items()]
    target = _usual("the target", {site: plan.target for site, plan in plans.items()})
    for column in columns:
        having = list(holders[column.name])
        lacking = [site for site in plans if site not in having]
        if lacking and column.required:
            raise Misfit(
                min(lacking, having, key=len), f"{listed(lacking)} has no column {column.name!r}, of which no value "
                f'may be missing, but {listed(having)} has; add or rename it, write missing = "impute" at all sites, '
                f'or leave it out: exclude = ["{column.name}"]'
            )  # fmt: skip
    if apart := without_common({site: {c.name for c in plan.columns} for site, plan in plans.items()}):
        said = f"{listed(apart)} has no column in common with the others"
        if len(apart) == len(plans):
            said = (
                f"some of {listed(apart)} have no column in common with the others, and no group of them is the largest"
            )
        raise Misfit(apart, f"{said}; give columns the same names")
    if len(columns) > COLUMNS_AT_MOST:
        most = max(plans, key=lambda site: sum(len(holders[c.name]) == 1 for c in plans[site].columns))
        raise Misfit([most], f"the tables have {len(columns):,} columns, more than {COLUMNS_AT_MOST:,}; name fewer")
    return Preprocessing(tuple(columns), target)


def _usual(place: str, columns: Mapping[str, Column]) -> Column:
    """Returns what most sites say about a column. Refuses another description, and names the sites."""
    usual = Counter(columns.values()).most_common(1)[0][0]
    first = next(site for site, column in columns.items() if column == usual)
    unlike = [site for site, column in columns.items() if column != usual]
    for site in unlike:
        other = vars(columns[site])
        key, value = next((key, value) for key, value in vars(usual).items() if value != other[key])
        raise Misfit(
            list(columns) if len(columns) == 2 else unlike,  # of two, either may be wrong, or lie
            f"{place}: {key} is {json.dumps(value)} at {first}, but {json.dumps(other[key])} at {site}; write "
            "it in the same way, and give all tables the same settings",
        )
    return usual


def _completed(column: Column, sums: Sequence[Sums]) -> Column:
    """Returns a column with the classes, the center, the scale and the fill that follow from all sites' sums."""
    marked = column.indicator and column.open and not column.required and any(told.missing for told in sums)
    if column.has_classes:
        names = {name for told in sums for name in told.names}
        in_files = in_order(names) if column.type == "label" else tuple(sorted(names))
        return replace(column, classes=column.classes or in_files, indicator=marked)
    mean, spread = _moments(sums)
    center, scale = (mean, spread) if column.standardize else (column.center, column.scale)
    fill = mean if column.fill == MEAN else column.fill
    return replace(column, fill=fill, center=center, scale=scale, standardize=False, indicator=marked)


def _moments(sums: Sequence[Sums]) -> tuple[float, float]:
    """Returns mean and standard deviation over all sites, from exact sums; (0, 1) if nothing is known. The deviation of
    a constant is 1, since numbers are divided by it."""
    told = [one for one in sums if one.known]
    count = sum(one.known for one in told)
    if not count:
        return 0.0, 1.0
    mean = sum((one.known * Fraction(one.mean) for one in told), Fraction()) / count
    squares = sum((Fraction(one.squares) + one.known * (Fraction(one.mean) - mean) ** 2 for one in told), Fraction())
    spread = math.sqrt(squares / count)
    return float(mean), spread if spread > 1e-12 * abs(float(mean)) else 1.0
