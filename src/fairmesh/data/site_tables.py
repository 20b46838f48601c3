"""The rows of a site's table, and the samples that a preprocessing makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fairmesh.data.columns import Column
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.site import Site, with_sets
from fairmesh.data.sums import TableSums, fitted, table_sums
from fairmesh.data.tables import absent, whole_number_text
from fairmesh.data.units import UNGROUPED, Grouped
from fairmesh.errors import BadInput


@dataclass(frozen=True, eq=False)
class SiteTable:
    """The table of a site: its rows, and the preprocessing that made its samples of them.

    Args:
        plan: How its columns are treated.
        columns: The input columns of all rows of the file, as `encoded` returns them.
        target: The target of each row: a label as text, or a number.
        preprocessing: What made the samples. Before that, the plan.
        rows: The rows of each set of samples ("train", "test", "validation"); none if the samples were changed since,
            so that they cannot be made again. Default: {}.
        subgroups: The subgroup of each row; empty for none. Default: ().
        file: The name of the file, for error messages. Default: "".
        grouped: The units and times of the rows. Default: none.
        declared: Whether the plan was given, as by a contract; else what columns are was found by their values.
            Default: True.
    """

    plan: Preprocessing
    columns: Mapping[str, np.ndarray]
    target: np.ndarray
    preprocessing: Preprocessing
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    subgroups: Sequence[str] = ()
    file: str = ""
    grouped: Grouped = UNGROUPED
    declared: bool = True

    def without_rows(self) -> "SiteTable":
        """Returns only the plan and the preprocessing, for a site whose samples have been changed."""
        return replace(self, columns={}, target=np.array([]), rows={}, subgroups=(), grouped=UNGROUPED)

    def sums(self) -> TableSums:
        """Returns what the site tells about its training rows."""
        if not self.rows:
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
        rows = self.rows["train"]
        found = np.stack([self.columns[name][rows] for name in self.number_names] or [np.zeros(len(rows))], axis=1)
        known = ~absent(found)
        means = np.where(known, found, 0.0).sum(0) / np.maximum(known.sum(0), 1)
        return np.where(known, found, means)

    def samples(self, rows: np.ndarray, preprocessing: Preprocessing) -> tuple[Any, ...]:
        """Returns some rows as inputs and targets, with the names of the subgroups if there are any."""
        read = {column.name: self._values(column)[rows] for column in preprocessing.columns}
        inputs = preprocessing.transform_encoded(read, self.file)
        if self.plan.target.type == "label":
            targets = preprocessing.labels(self.target[rows], self.file)
        else:
            targets = self.target[rows].astype(np.float32)
        named = ([self.subgroups[row] for row in rows.tolist()],) if self.subgroups else ()
        return torch.from_numpy(inputs), torch.from_numpy(targets), *named

    def _values(self, column: Column) -> np.ndarray:
        """Returns the values of a column. All are missing if only other sites have it."""
        gap, dtype = (None, object) if column.kind == "category" else (np.nan, np.float64)
        return self.columns.get(column.name, np.full(len(self.target), gap, dtype))


def without_values(sites: Sequence[Site]) -> dict[str, list[str]]:
    """Returns the sites at which a column of their table has no values, by column."""
    found: dict[str, list[str]] = {}
    for i, site in enumerate(sites):
        table = site.table
        if table and table.rows:
            rows = np.concatenate(list(table.rows.values()))
            for column in table.preprocessing.columns:
                if absent(table._values(column)[rows]).all():
                    found.setdefault(column.name, []).append(site.name or f"node {i}")
    return found


def is_fitted(site: Site) -> bool:
    """Returns whether the samples of a site come from a table whose preprocessing depends on all sites' rows."""
    return bool(site.table) and site.table.plan.open


def follows_rows(site: Site) -> bool:
    """Returns whether anything about the inputs or the classes of a site follows from values in its table's rows."""
    return bool(site.table) and (site.table.plan.open or not site.table.declared)


def fitted_sites(sites: Sequence[Site]) -> list[Site]:
    """Returns sites of tables with their samples made by one preprocessing, fitted over all of them."""
    return refitted(sites, fitted({site.name or f"site {i}": site.table.sums() for i, site in enumerate(sites)}))


def aligned(every: Sequence[Sequence[Site]]) -> list[Sequence[Site]]:
    """Returns the sites of several splits of the same data, with the same inputs in all of them. A category that is too
    rare in some split, or a column with too few missing values, still has its input there."""
    if not all(sites[0].table and sites[0].table.rows for sites in every):
        return list(every)
    made: list[Preprocessing] = [sites[0].table.preprocessing for sites in every]
    if len({preprocessing.inputs for preprocessing in made}) == 1:
        return list(every)
    alike = list(zip(*(preprocessing.columns for preprocessing in made)))
    classes = [tuple(sorted({name for column in columns for name in column.classes})) for columns in alike]
    marked = [any(column.indicator for column in columns) for columns in alike]
    done = []
    for sites, own in zip(every, made):
        columns = [replace(c, classes=names, indicator=mark) for c, names, mark in zip(own.columns, classes, marked)]
        done.append(refitted(sites, replace(own, columns=tuple(columns))))
    return done


def refitted(sites: Sequence[Site], preprocessing: Preprocessing) -> list[Site]:
    """Returns sites of one table with their samples made by this preprocessing."""
    table: SiteTable = sites[0].table
    made = [
        replace(site, table=replace(site.table, preprocessing=preprocessing), reserved=None, **site.table.rows)
        for site in sites
    ]
    made = with_sets(made, lambda rows, _: table.samples(rows, preprocessing))
    return [table.grouped.named(site, site.table.rows) for site in made]
