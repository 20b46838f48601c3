"""The rows of a site's table, and the samples that a preprocessing makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.site import Site
from fairmesh.data.sums import TableSums, fitted, table_sums
from fairmesh.data.tables import absent, whole_number_text
from fairmesh.errors import BadInput


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

    plan: Preprocessing
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
    return site.table is not None and site.table.plan.open


def fitted_sites(sites: Sequence[Site]) -> list[Site]:
    """Returns sites of tables with their samples made by one preprocessing, fitted over all of them."""
    made = fitted({site.name or f"site {i}": site.table.sums() for i, site in enumerate(sites)})
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
