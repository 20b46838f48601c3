"""How the rows of a table become the inputs of a model: one object, fitted once over all sites and then frozen.

It is fitted from sums that each site computes over its own training rows. Simulations and nodes between organisations
compute it from the same sums in exact arithmetic, so that it is the same to the last bit.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairmesh.data.columns import MEAN, Column
from fairmesh.data.site import Site
from fairmesh.data.tables import (
    LARGEST,
    NAME_AT_MOST,
    Kind,
    absent,
    column_of,
    encoded,
    no_value,
    numbered_labels,
    whole_number_text,
)
from fairmesh.errors import BadInput, listed

FEWEST = 5  # rows of a site behind anything that it says about them
_FORMAT = 1
_HOW = (
    "Inputs are float32, in the order of `inputs`. For each of `columns`, in order: if kind is number, yes-no or date, "
    "read the value x as a number (yes and true are 1, no and false 0; a date is its number of days since 1970-01-01), "
    "put `fill` for a missing one, and give (x - center) / scale; then, if `indicator`, give 1 if it was missing, else "
    "0. If kind is category, put `fill` for a missing value if there is one; give 1 or 0 for each of `categories`, "
    "then 1 if the value is none of them; then, if `indicator`, give 1 if it was missing (and 0 for all others). "
    "A missing value without `fill` or `indicator` counts as none of the categories, or is an error if `required`. If "
    "the target is a label, output k belongs to classes[k]; if it is a number, the output is in its own units."
)


# The plan: what is decided before any row is looked at


@dataclass(frozen=True)
class Plan:
    """How all columns of a table are to be treated.

    Args:
        columns: The input columns, in order. A category without classes has those that the sites have.
        target: The column to predict. A label without classes has those that the sites have.
        by_sites: The columns of numbers whose center and scale are the mean and the standard deviation over all sites'
            training rows. Default: none.
        indicators: Whether missing values get an input that says so. Default: True.
    """

    columns: tuple[Column, ...]
    target: Column
    by_sites: frozenset[str] = frozenset()
    indicators: bool = True

    @staticmethod
    def of(
        columns: Sequence[Column], target: Column, standardize: bool, scale_target: bool, indicators: bool
    ) -> "Plan":
        """Returns the plan in which columns without a center and a scale of their own are scaled by what all sites
        have, if asked for; and likewise numbers to predict."""
        scaled = [c.name for c in columns if standardize and not c.has_classes and (c.center, c.scale) == (0.0, 1.0)]
        scaled += [target.name] if scale_target and target.type != "label" else []
        return Plan(tuple(columns), target, frozenset(scaled), indicators)

    @property
    def fixed(self) -> bool:
        """Whether nothing about the sites' rows is needed."""
        return all(map(self.is_fixed, (*self.columns, self.target)))

    def is_fixed(self, column: Column) -> bool:
        """Returns whether nothing about the sites' rows is needed to prepare a column."""
        known = bool(column.classes) if column.has_classes else column.name not in self.by_sites
        return known and column.fill != MEAN

    def to_table(self) -> dict[str, Any]:
        """Returns it as a JSON table, as sites tell it each other."""
        columns = []
        for column in self.columns:
            opened = {"categories": list(column.classes) or None}
            if column.has_classes or column.name in self.by_sites:
                opened |= {"center": None, "scale": None}
            columns.append(_described(column) | opened)
        labels = self.target.type == "label"
        return {
            "columns": columns,
            "target": self.target.name,
            "predict": "labels" if labels else "numbers",
            "classes": list(self.target.classes),
            "scale_target": self.target.name in self.by_sites,
            "indicators": self.indicators,
        }

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> "Plan":
        """Reads a plan that another site tells. Refuses, by any error, what this one would not write."""
        columns, name = tuple(map(_column, table["columns"])), _text(table["target"])
        by_sites = {row["name"] for row in table["columns"] if row["kind"] != "category" and row["center"] is None}
        by_sites |= {name} if table["scale_target"] else set()
        kind = {"labels": "label", "numbers": "number"}[table["predict"]]
        target = Column(name, kind, classes=_texts(table["classes"]))  # type: ignore[arg-type]
        made = Plan(columns, target, frozenset(by_sites), table["indicators"])
        if made.to_table() != table or {type(table["scale_target"]), type(made.indicators)} != {bool}:
            raise ValueError("settings of another form")
        for column in columns:
            _texts([column.name, *column.classes, *([column.fill] if isinstance(column.fill, str) else [])])
            numbers = [number for number in (column.center, column.scale, column.fill) if isinstance(number, float)]
            if max(map(abs, numbers)) > LARGEST:
                raise ValueError("a number that is too large")
        return made


def _described(column: Column) -> dict[str, Any]:
    """Returns a column as files and sites describe it."""
    return {
        "name": column.name,
        "kind": column.kind,
        "fill": column.constant,
        "required": column.required,
        "center": column.center,
        "scale": column.scale,
        "categories": list(column.classes),
    }


def _column(row: Mapping[str, Any]) -> Column:
    """Reads what `_described` returns. A center that is left open is 0."""
    fill = row["fill"] if row["required"] or row["fill"] is not None else MEAN
    center, scale = (0.0, 1.0) if row["center"] is None else (row["center"], row["scale"])
    return Column(row["name"], row["kind"], classes=row["categories"] or (), fill=fill, center=center, scale=scale)


# Sums: what a site computes over its training rows, and tells the others


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

    plan: Plan
    columns: tuple[Sums, ...]
    target: Sums

    def withheld(self) -> "TableSums":
        """Returns the same without any number, for a site that tells nothing about its values."""
        return replace(self, columns=tuple(Sums() for _ in self.columns), target=Sums(names=self.target.names))

    def to_table(self) -> dict[str, Any]:
        """Returns it as a JSON table."""
        table = {"plan": self.plan.to_table(), "columns": self.columns, "target": self.target}
        return json.loads(json.dumps(table))

    def contradiction(self, rows: int, ranges: Mapping[str, tuple[float, float]]) -> str:
        """Returns why these cannot be sums over the training rows that a site declares, "" if they can.

        Args:
            rows: How many it declares.
            ranges: The smallest and the largest value that a contract allows, by column.
        """
        for column, sums in zip((self.plan.target, *self.plan.columns), (self.target, *self.columns)):
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
            made = TableSums(
                Plan.from_table(table["plan"]), tuple(map(_sums, table["columns"])), _sums(table["target"])
            )
            if len(made.columns) != len(made.plan.columns) or not made.columns:
                raise ValueError("another number of columns than planned")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"sums of a table cannot be read: {error}") from error
        return made


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > NAME_AT_MOST or not value.isprintable():
        raise ValueError("a name that is too long or cannot be printed")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(map(_text, values))


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
    plan: Plan, columns: Mapping[str, np.ndarray], target: np.ndarray, labels: Sequence[str] = ()
) -> TableSums:
    """Returns what a site tells about its training rows.

    Args:
        plan: The plan.
        columns: The values of the input columns in the training rows, as `encoded` returns them.
        target: The targets of the training rows, if they are numbers.
        labels: The labels that the site has in all its rows, if targets are labels. Default: ().
    """
    sums_of_columns = [
        Sums() if plan.is_fixed(column) else _sums_of(columns[column.name], column.kind) for column in plan.columns
    ]
    sums_of_target = Sums(names=() if plan.target.classes else tuple(labels))
    if plan.target.name in plan.by_sites:
        sums_of_target = _sums_of(np.asarray(target, np.float64), "number")
    return TableSums(plan, tuple(sums_of_columns), sums_of_target)


class Misfit(BadInput):
    """The tables of the sites do not fit together. `sites` are those to ask."""

    def __init__(self, sites: Sequence[str], reason: str):
        super().__init__(reason)
        self.sites, self.reason = list(sites), reason


# The fitted object


@dataclass(frozen=True)
class FittedColumn(Column):
    """A column with all that is needed to make inputs of its values.

    Args:
        indicator: Whether there is an input that says whether the value was missing. Default: False.
    """

    indicator: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of its inputs."""
        own = [self.name]
        if self.kind == "category":
            own = [*(f"{self.name} = {one}" for one in self.classes), f"{self.name} = other"]
        return (*own, f"{self.name} missing") if self.indicator else tuple(own)

    def transform(self, values: np.ndarray, where: str) -> np.ndarray:
        """Returns the inputs (rows, inputs) in float64, from values as `encoded` returns them."""
        missing = absent(values)
        if self.required and missing.any():
            raise BadInput(no_value(where, self.name, missing))
        filled = values if self.constant is None else np.where(missing, self.constant, values)
        if self.kind == "category":
            known = filled[:, None] == np.array(self.classes, object)
            marked = missing if self.indicator and self.constant is None else np.zeros_like(missing)
            parts = [known, (~known.any(1) & ~marked)[:, None]]
        else:
            parts = [((filled.astype(np.float64) - self.center) / self.scale)[:, None]]
        if self.indicator:
            parts.append(missing[:, None])
        return np.concatenate([np.asarray(part, np.float64) for part in parts], axis=1)


@dataclass(frozen=True)
class Preprocessing:
    """How the rows of a table become inputs of a model, fitted over the training rows of all sites and frozen.

    A run's folder has it as `preprocessing.json`, which describes itself: it can be applied without fairmesh.

    Args:
        columns: The columns, in the order of their inputs.
        target: The column to predict. Of a number, center and scale are those of the model's own scale.

    Example:
        >>> import fairmesh as fm
        >>> from fairmesh.data.preprocessing import FittedColumn
        >>> age = FittedColumn("age", fill=50.0, center=50.0, scale=10.0, indicator=True)
        >>> ward = FittedColumn("ward", "category", classes=("north", "south"), fill="mean")
        >>> made = fm.data.Preprocessing((age, ward), fm.data.Column("ill", "label", classes=("no", "yes")))
        >>> made.inputs
        ('age', 'age missing', 'ward = north', 'ward = south', 'ward = other')
        >>> made.transform({"ward": ["south", "east"], "age": [60, ""]}).tolist()
        [[1.0, 0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0, 1.0]]
        >>> fm.data.Preprocessing.from_json(made.to_json()) == made
        True
    """

    columns: tuple[FittedColumn, ...]
    target: Column

    @staticmethod
    def fitted(sums: Mapping[str, TableSums]) -> "Preprocessing":
        """Returns the preprocessing that follows from what the sites tell about their tables.

        Args:
            sums: What each site tells, by its name. The first one's order of columns is that of the inputs.

        Raises:
            Misfit: The tables do not have the same columns, kinds or settings.
        """
        plan = _common_plan({site: one.plan for site, one in sums.items()})
        by_name = [{c.name: s for c, s in zip(one.plan.columns, one.columns)} for one in sums.values()]
        columns = []
        for column in plan.columns:
            told = [sums_of_site[column.name] for sums_of_site in by_name]
            any_missing = not plan.is_fixed(column) and any(one.missing for one in told)
            indicator = plan.indicators and any_missing and not column.required
            columns.append(FittedColumn(**vars(_fitted(column, told, plan)), indicator=indicator))
        return Preprocessing(tuple(columns), _fitted(plan.target, [one.target for one in sums.values()], plan))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the model's inputs, in order."""
        return tuple(name for column in self.columns for name in column.inputs)

    @property
    def classes(self) -> tuple[str, ...]:
        """The labels, in the order of the model's outputs; empty if it predicts a number."""
        return self.target.classes

    def transform(self, columns: Mapping[str, Any], where: str = "the table") -> np.ndarray:
        """Returns the inputs (rows, inputs) in float32 that the model sees.

        Args:
            columns: The columns by name, with values as a file has them. Other columns than those needed are ignored.
            where: What the table is, for error messages. Default: "the table".

        Raises:
            BadInput: A column is missing, or a value cannot be read; the message names column and row.
        """
        given = {column: column_of(columns, column.name, where) for column in self.columns}
        read = {column.name: encoded(values, column.kind, column.name, where) for column, values in given.items()}
        return self.transform_encoded(read, where)

    def transform_encoded(self, columns: Mapping[str, np.ndarray], where: str = "the table") -> np.ndarray:
        """Returns the inputs (rows, inputs) in float32, from columns as `encoded` returns them."""
        parts = [column.transform(columns[column.name], where) for column in self.columns]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def labels(self, values: Any, where: str = "the table") -> np.ndarray:
        """Returns the number of each label among `classes`.

        Args:
            values: The labels.
            where: What the table is, for error messages. Default: "the table".

        Raises:
            BadInput: A label is not among the classes.
        """
        texts = [whole_number_text(value) for value in np.asarray(values).tolist()]
        return numbered_labels(texts, self.classes, f"{where}, column {self.target.name!r}")

    def to_json(self) -> str:
        """Returns it as JSON text, which describes itself."""
        columns = [_described(column) | {"indicator": column.indicator} for column in self.columns]
        target = {"name": self.target.name, "kind": self.target.type, "classes": self.classes}
        target |= {"center": self.target.center, "scale": self.target.scale}
        table = {"format": _FORMAT, "how": _HOW, "inputs": self.inputs, "columns": columns, "target": target}
        return json.dumps(table, indent=1, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str) -> "Preprocessing":
        """Reads what `to_json` returns.

        Raises:
            BadInput: The text has another form.
        """
        try:
            table = json.loads(text)
            if table["format"] != _FORMAT:
                raise BadInput(f"preprocessing of format {table['format']}, but this version reads {_FORMAT}")
            columns = [FittedColumn(**vars(_column(row)), indicator=row["indicator"]) for row in table["columns"]]
            target = dict(table["target"])
            return Preprocessing(tuple(columns), Column(type=target.pop("kind"), **target))
        except BadInput:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"this is not a preprocessing.json: {error}") from error

    def in_words(self) -> list[str]:
        """Returns what it does, in sentences."""
        groups: dict[str, list[str]] = {
            "numbers, scaled by one mean and spread for all sites": [],
            "numbers, used as they are": [],
            "categories, one input each and one for all others": [],
            "missing values are filled and marked by an input": [],
        }
        scaled, as_they_are, categories, missing = groups.values()
        for column in self.columns:
            name = column.name if column.kind == "number" else f"{column.name} ({column.kind})"
            if column.kind == "category":
                categories.append(f"{column.name} ({listed(column.classes) or 'none'})")
            else:
                (as_they_are if (column.center, column.scale) == (0.0, 1.0) else scaled).append(name)
            if column.indicator:
                fill = column.constant if isinstance(column.fill, str) else f"{column.fill:.4g}"
                missing.append(f"{column.name} ({fill})" if fill else column.name)
        said = [f"{len(self.columns)} columns become {len(self.inputs)} inputs"]
        said += [f"{how}: {listed(names)}" for how, names in groups.items() if names]
        target = self.target
        if target.type == "label":
            said.append(f"{target.name} has the classes {listed(target.classes)}")
        elif target.scale != 1.0:
            said.append(f"{target.name} is a number; the loss counts in multiples of its spread, {target.scale:.3g}")
        return said


def _common_plan(plans: Mapping[str, Plan]) -> Plan:
    """Returns the plan of all sites, which may differ in the order of columns. Refuses others, and names the sites."""
    tables = {site: plan.to_table() for site, plan in plans.items()}
    columns_of = {site: {row["name"]: row for row in table["columns"]} for site, table in tables.items()}
    forms = {site: json.dumps(table | {"columns": columns_of[site]}, sort_keys=True) for site, table in tables.items()}
    most_common = Counter(forms.values()).most_common(1)[0][0]
    first = next(site for site, form in forms.items() if form == most_common)
    for site, table in tables.items():
        columns, theirs = columns_of[first], columns_of[site]
        for name in [*columns, *theirs]:
            if name not in columns or name not in theirs:
                lacking, having = (site, first) if name in columns else (first, site)
                raise Misfit(
                    [site], f"{lacking} has no column {name!r}, but {having} has; add or rename it, or leave it out at "
                    f'all sites: exclude = ["{name}"]'
                )  # fmt: skip
        pairs = [(f"column {name!r}: ", columns[name], theirs[name]) for name in columns]
        for what, usual, other in [*pairs, ("", tables[first], table)]:
            for key in usual:
                if key != "columns" and usual[key] != other[key]:
                    raise Misfit(
                        [site], f"{what}{key} is {json.dumps(usual[key])} at {first}, but {json.dumps(other[key])} at "
                        f"{site}; write it in the same way, and give all tables the same settings"
                    )  # fmt: skip
    return plans[first]


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


def _fitted(column: Column, sums: Sequence[Sums], plan: Plan) -> Column:
    """Returns a column with the classes, the center, the scale and the fill that follow from all sites' sums."""
    if column.has_classes:
        names = {name for told in sums for name in told.names}
        in_files = in_order(names) if column.type == "label" else tuple(sorted(names))
        return Column(column.name, column.type, classes=column.classes or in_files, fill=column.fill)
    mean, spread = _moments(sums)
    center, scale = (mean, spread) if column.name in plan.by_sites else (column.center, column.scale)
    fill = mean if column.fill == MEAN else column.fill
    return Column(column.name, column.kind, fill=fill, center=center, scale=scale)


def in_order(labels: Sequence[str] | set[str]) -> tuple[str, ...]:
    """Returns labels in the order of their numbers: by size if all are whole numbers, else by name."""
    texts = {whole_number_text(label) for label in labels}
    whole = all(re.fullmatch(r"-?\d+", text) for text in texts)  # what `int` reads
    return tuple(sorted(texts, key=int) if whole else sorted(texts))


# The rows of a site


@dataclass(frozen=True, eq=False)
class SiteTable:
    """The table of a site: its rows, and the preprocessing that made its samples of them.

    Args:
        plan: How its columns are treated.
        columns: The input columns of all rows of the file, as `encoded` returns them.
        target: The target of each row: a label as text, or a number.
        rows: The rows of each set of samples ("train", "test", "validation"); None if the samples were changed since,
            so that they cannot be made again.
        subgroups: The subgroup of each row; None for none. Default: None.
        file: The name of the file, for error messages. Default: "".
        preprocessing: What made the samples. Default: None.
    """

    plan: Plan
    columns: Mapping[str, np.ndarray]
    target: np.ndarray
    rows: Mapping[str, np.ndarray] | None
    subgroups: np.ndarray | None = None
    file: str = ""
    preprocessing: Preprocessing | None = None

    def without_rows(self) -> "SiteTable":
        """Returns only the plan and the preprocessing, for a site whose samples have been changed."""
        return replace(self, columns={}, target=np.array([]), rows=None, subgroups=None)

    def sums(self) -> TableSums:
        """Returns what the site tells about its training rows."""
        if self.rows is None:
            raise BadInput("the samples of this site were changed after they were read, so their table is not known")
        train = self.rows["train"]
        labels = []
        if self.plan.target.type == "label":
            labels = sorted({whole_number_text(self.target[i]) for rows in self.rows.values() for i in rows.tolist()})
        return table_sums(self.plan, {name: v[train] for name, v in self.columns.items()}, self.target[train], labels)

    @property
    def number_names(self) -> tuple[str, ...]:
        """The names of the columns that have numbers, in alphabetical order."""
        return tuple(sorted(column.name for column in self.plan.columns if column.kind != "category"))

    def numbers(self) -> np.ndarray:
        """Returns the numbers of the training rows as the file has them (rows, columns), in the order of
        `number_names`; a missing one is the mean of the column."""
        rows = (self.rows or {})["train"]
        found = np.stack([self.columns[name][rows] for name in self.number_names] or [np.zeros(len(rows))], axis=1)
        known = ~absent(found)
        means = np.where(known, found, 0.0).sum(0) / np.maximum(known.sum(0), 1)
        return np.where(known, found, means)

    def samples(self, rows: np.ndarray, preprocessing: Preprocessing) -> tuple[Any, ...]:
        """Returns some rows as inputs and targets, with the names of the subgroups if there are any."""
        inputs = preprocessing.transform_encoded({name: v[rows] for name, v in self.columns.items()}, self.file)
        if self.plan.target.type == "label":
            targets = preprocessing.labels(self.target[rows], self.file)
        else:
            targets = self.target[rows].astype(np.float32)
        pair: tuple[Tensor, Tensor] = torch.from_numpy(inputs), torch.from_numpy(targets)
        return pair if self.subgroups is None else (*pair, self.subgroups[rows].tolist())


def is_fitted(site: Site) -> bool:
    """Returns whether the samples of a site come from a table whose preprocessing depends on all sites' rows."""
    return site.table is not None and not site.table.plan.fixed


def fitted_sites(sites: Sequence[Site]) -> list[Site]:
    """Returns sites of tables with their samples made by one preprocessing, fitted over all of them."""
    made = Preprocessing.fitted({site.name or f"site {i}": site.table.sums() for i, site in enumerate(sites)})
    done: dict[int, Any] = {}  # sites that share a set share its samples
    return [refitted(site, made, done) for site in sites]


def aligned(every: Sequence[Sequence[Site]]) -> list[Sequence[Site]]:
    """Returns the sites of several splits of the same data, with the same inputs in all of them. A category that is too
    rare in some split, or a column with too few missing values, still has its input there."""
    made = [sites[0].table.preprocessing if sites[0].table is not None else None for sites in every]
    known = [one for one in made if one is not None]
    if len(known) < len(every) or len({one.inputs for one in known}) == 1 or every[0][0].table.rows is None:
        return list(every)
    done = []
    for sites, mine in zip(every, known):
        columns = [
            replace(
                column,
                classes=tuple(sorted({name for one in known for name in one.columns[k].classes})),
                indicator=any(one.columns[k].indicator for one in known),
            )
            for k, column in enumerate(mine.columns)
        ]
        common, shared = replace(mine, columns=tuple(columns)), {}
        done.append([refitted(site, common, shared) for site in sites])
    return done


def refitted(site: Site, preprocessing: Preprocessing, done: dict[int, Any] | None = None) -> Site:
    """Returns a site of a table with its samples made by this preprocessing."""
    table: SiteTable = site.table
    done = {} if done is None else done
    parts = {}
    for part, rows in (table.rows or {}).items():
        if id(rows) not in done:
            done[id(rows)] = table.samples(rows, preprocessing)
        parts[part] = done[id(rows)]
    return replace(site, table=replace(table, preprocessing=preprocessing), reserved=None, **parts)
