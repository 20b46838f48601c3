"""A table of a user's own: rows of a .csv or .parquet file, or of one such file per site."""

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from fairmesh.config.ranges import Natural, Share
from fairmesh.data import tables
from fairmesh.data.columns import MEAN, Column
from fairmesh.data.datasets.base import Data, check_split
from fairmesh.data.datasets.own import indexed, split_by_site
from fairmesh.data.partitions import BySite, Contrast, Instrument, Partition
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.site import Site, with_sets
from fairmesh.data.site_files import Columns, are_several, in_words, read_files
from fairmesh.data.site_tables import SiteTable, fitted_sites
from fairmesh.data.tables import Kind
from fairmesh.data.units import divided, read_groups
from fairmesh.errors import BadInput, listed

_MANY_LABELS = 100  # different numbers among the labels, from which on they look like numbers to predict
_SHOWN = 4  # names in a sentence


@dataclass(frozen=True)
class Table(Data):
    """Rows of a .csv file with a header, or of a .parquet file (`pip install 'fairmesh[parquet]'`).

    Every site may have a file of its own. These may have different columns: the table has all of them, and a column
    that a file lacks is missing in all its rows.

    Columns go by their names, so their order does not matter. Numbers, yes and no, dates (2026-11-30) and categories
    are told apart by their values, unless `types` names them. Categories become one input each, and one for all others.
    Missing values are filled, and marked by an input. What is needed for this, such as means and the names of
    categories, is computed over the training rows of all sites and then frozen: `Preprocessing`.

    Args:
        file: The path of the file. If every site has a file of its own: a folder, a pattern such as
            `"hospitals/*.csv"`, or a list of paths, where sites are called as their files, or a table of paths by the
            names of the sites.
        target: The column to predict.
        site: The column that says where a row was taken; None if every site has a file, or the partition does not need
            it. Default: None.
        inputs: The columns to predict from; empty for all columns but `target`, `site`, `subgroup`, `unit`, `time` and
            `exclude`. Default: ().
        predict: What the target is: "labels", numbered in order or as `classes` lists them, or "numbers". Default:
            "labels".
        standardize: Whether to scale each number to mean 0 and variance 1 over the training rows of all sites. Default:
            True.
        partition: How the rows are dealt to nodes. Default: BySite(), one node per site.
        test_share: Share of each site's rows, drawn at random, that judges it, in (0, 1). Default: 0.2.
        seed: Seed of the split into training and test rows, >= 0. Default: 0.
        classes: The labels, in the order of their numbers; empty to number them in order. Default: ().
        subgroup: The column that names the subgroup of each row, such as its scanner, for `objective.subgroups` and
            `result.subgroups()`. It never leaves the site, and is an input only if `inputs` names it. None for no
            subgroups. Default: None.
        exclude: Columns that are not inputs, such as identifiers. Default: ().
        types: What a column has, by its name: "number", "yes-no", "date" or "category". Others are found by their
            values. Default: {}.
        categories: The categories of a column, by its name; of others, those with at least 5 training rows at some
            site. Default: {}.
        missing: "impute" fills missing values: numbers by their mean over all sites, categories by an input of their
            own. "refuse" allows none. Default: "impute".
        fill: What stands for a missing value of a column, by its name, instead; "mean" for what "impute" does. Default:
            {}.
        indicators: Whether an input marks missing values, if a site has at least 5 in a column. Default: True.
        scale_target: Whether the model learns numbers to predict in multiples of their standard deviation over all
            sites. Metrics and predictions are in the target's own units. Default: True.
        validation_share: Share of each site's rows, from those that are not test rows, that `keep_best` chooses the
            round by, in [0, 1 - test_share). Default: 0.0.
        missing_values: What stands for a missing value, besides empty cells, NA, NaN, null and none: a list for all
            columns, or lists by column, with `"*"` for all. Numbers are compared as numbers. Default: ().
        unit: The column that says what each row belongs to, such as its patient or device, if several rows belong
            together. Rows of one unit are not divided between training, test, validation and held-out rows, and
            intervals count units. It never leaves the site, and cannot be an input. None if every row is a unit of its
            own. Default: None.
        time: The column with the time of each row, a date such as 2026-11-30 or a number. The latest rows of each site
            are then its test rows; with `unit`, those of the units that begin last, and rows of other units that are
            not before all test rows are left out. None to draw test rows at random. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> data = fm.data.Table("patients.csv", target="outcome", site="hospital", types={"ward": "category"})
        >>> data.predict
        'labels'
        >>> fm.data.Table("hospitals/*.csv", "outcome", missing_values={"*": ["?"], "age": [-9]}).markers("age")
        ('?', '-9')
    """

    file: str | tuple[str, ...] | Mapping[str, str] = field(hash=False)
    target: str
    site: str | None = None
    inputs: tuple[str, ...] = ()
    predict: Literal["labels", "numbers"] = "labels"
    standardize: bool = True
    partition: Partition = field(default_factory=BySite)
    test_share: Share = 0.2
    seed: Natural = 0
    classes: tuple[str, ...] = ()
    subgroup: str | None = None
    exclude: tuple[str, ...] = ()
    types: Mapping[str, Kind] = field(default_factory=dict, hash=False)
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    missing: Literal["impute", "refuse"] = "impute"
    fill: Mapping[str, float | str] = field(default_factory=dict, hash=False)
    indicators: bool = True
    scale_target: bool = True
    validation_share: float = 0.0
    missing_values: tuple[str | float, ...] | Mapping[str, tuple[str | float, ...]] = field(default=(), hash=False)
    unit: str | None = None
    time: str | None = None

    def __post_init__(self):
        check_split(self)
        if isinstance(self.partition, Contrast | Instrument):
            kind = type(self.partition).__name__
            raise BadInput(f"partition {kind} changes images, and a table has none; use another, such as by-site")
        for name in self.exclude:
            if name in self.inputs or name == self.target:
                raise BadInput(f"exclude names {name!r}, which is the target or among the inputs")
        for name in self.categories:
            if self.types.get(name, "category") != "category":
                raise BadInput(f"categories lists those of {name!r}, but types says that it is {self.types[name]}")
        for name, classes in {**self.categories, self.target: self.classes}.items():
            Column(name, "category", classes=classes, missing_values=self.markers(name))  # refuses one that is both

    @property
    def has_files(self) -> bool:
        """Whether every site has a file of its own."""
        return are_several(self.file)

    @property
    def where(self) -> str:
        """What the file or the files are called in a sentence."""
        return in_words(self.file)

    def markers(self, name: str) -> tuple[str, ...]:
        """Returns what stands for a missing value of a column."""
        given = self.missing_values
        markers = (*given.get("*", ()), *given.get(name, ())) if isinstance(given, Mapping) else given
        return tuple(map(tables.category_text, markers))

    def sites(self) -> list[Site]:
        return self.sites_of(self.read())

    def read(self) -> Columns:
        """Returns the columns of the files, by name, with gaps for what stands for a missing value."""
        return read_files(self.file).without(self.markers)

    def input_names(self, columns: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """Returns which of the columns are inputs, in order."""
        others = (self.target, self.site, self.subgroup, self.unit, self.time, *self.exclude)
        marked = self.missing_values if isinstance(self.missing_values, Mapping) else ()
        named = (*filter(None, others), *self.inputs, *self.types, *self.categories, *self.fill)
        for name in (*named, *(name for name in marked if name != "*")):
            tables.column_of(columns, name, self.where)
        names = self.inputs or tuple(name for name in columns if name not in others)
        if not names:
            raise BadInput(
                f"{self.where} has no column to predict from other than target, site, subgroup, unit and time"
            )
        Columns.of(columns, self.where).refuse_apart(names)
        return names

    def plan(self, columns: Mapping[str, np.ndarray]) -> Preprocessing:
        """Returns how the columns of the file are to be treated.

        Raises:
            BadInput: A column is missing, or has values that are not understood.
        """
        planned = [self._column(columns, name) for name in self.input_names(columns)]
        return Preprocessing.planned(planned, self.predicted, self.standardize, self.scale_target, self.indicators)

    @property
    def predicted(self) -> Column:
        """The column to predict."""
        if self.predict == "numbers":
            return Column(self.target, missing_values=self.markers(self.target))
        return Column(self.target, "label", classes=self.classes, missing_values=self.markers(self.target))

    def _column(self, columns: Mapping[str, np.ndarray], name: str) -> Column:
        values = tables.column_of(columns, name, self.where)
        kind = self.kind_of_column(columns, name)
        fill = self.fill.get(name, None if self.missing == "refuse" else MEAN)
        markers = self.markers(name)
        if kind == "category":
            if name not in self.categories:
                tables.refuse_many_categories(values, name, self.where)
            self._warn_of_spellings(
                [tables.category_text(v) for v in values.tolist() if not tables.is_missing(v)], name
            )
            classes = tuple(map(tables.category_text, self.categories.get(name, ())))
            fill = None if fill is None else tables.category_text(fill)
            return Column(name, kind, classes=classes, fill=fill, missing_values=markers)
        if isinstance(fill, str) and fill != MEAN:
            fill = float(tables.encoded(np.array([fill]), kind, name, f"fill of {self.where}")[0])
        return Column(name, kind, fill=fill, missing_values=markers)

    def kind_of_column(self, columns: Mapping[str, np.ndarray], name: str) -> Kind:
        """Returns what a column has, as the settings say or as its values look. Refuses one that is not the same in all
        files."""
        if name in self.categories:
            return "category"
        if name in self.types:
            return self.types[name]
        paths_by_kind: dict[Kind, list[str]] = {}
        for part in Columns.of(columns, self.where).parts:
            values = columns[name][part.rows]
            if not tables.missing_in(values).all():
                paths_by_kind.setdefault(tables.kind_of(values, name, part.path), []).append(part.path)
        if len(paths_by_kind) > 1:
            said = "; ".join(f"{kind} in {listed(paths, _SHOWN)}" for kind, paths in paths_by_kind.items())
            raise BadInput(
                f"column {name!r} is not the same in all files: {said}; write it in the same way, say what it is, such "
                f'as types = {{ "{name}" = "category" }}, or leave it out: exclude = ["{name}"]'
            )
        return next(iter(paths_by_kind)) if paths_by_kind else "number"

    def encoded(self, columns: Mapping[str, np.ndarray], name: str, kind: Kind) -> np.ndarray:
        """Returns a column as `tables.encoded` does. Errors name the file and its row."""
        return Columns.of(columns, self.where).read(name, lambda v, path: tables.encoded(v, kind, name, path))

    def site_of_rows(self, columns: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Returns the name of the site of every row: by the site column, or by its file. None if there is neither."""
        if self.site:
            return _whole_numbers(_known(columns, self.site, self.where))
        sites = Columns.of(columns, self.where).sites
        return None if sites is None else _whole_numbers(sites)

    def _warn_of_spellings(self, texts: Iterable[str], name: str) -> None:
        if said := tables.two_spellings(texts):
            warnings.warn(f"{self.where}, column {name!r}: {said}", UserWarning, stacklevel=2)

    def sites_of(self, columns: Mapping[str, np.ndarray], plan: Preprocessing | None = None) -> list[Site]:
        """Returns the sites if these are the columns of the file.

        Args:
            columns: The columns, by name.
            plan: How they are treated; None for as the settings say. Default: None.
        """
        declared, plan = plan is not None, plan or self.plan(columns)
        read = {column.name: self._read(columns, column) for column in plan.columns}
        name = plan.target.name
        target = _known(columns, name, self.where)
        if plan.target.type == "label":
            target = _texts(target)
            self._warn_of_spellings(target.tolist(), name)
            if not plan.target.classes:
                _refuse_numbers(target, name, self.where)
            classes = plan.target.classes or tables.in_order(set(target.tolist()))
            pooled = torch.from_numpy(
                tables.numbered_labels(target.tolist(), classes, f"{self.where}, column {name!r}")
            )
        else:
            target = self.encoded(columns, name, "number")
            pooled = torch.from_numpy(target.astype(np.float32))
        where = self.site_of_rows(columns)
        subgroups = _texts(_known(columns, self.subgroup, self.where)).tolist() if self.subgroup else ()
        grouped = read_groups(self, Columns.of(columns, self.where).in_all_files)
        pool = split_by_site((torch.arange(len(target)), pooled), where, self.test_share, self.seed, grouped, self.unit)
        table = SiteTable(
            plan, read, target, plan, subgroups=subgroups, file=self.where, grouped=grouped, declared=declared
        )
        # What is dealt to sites are the numbers of rows.
        sites = with_sets(self.partition.sites(pool), lambda pair, _: pair[0].numpy(), ("train", "test"))
        return fitted_sites([self._with_rows(i, site, table) for i, site in enumerate(sites)])

    def _read(self, columns: Mapping[str, np.ndarray], column: Column) -> np.ndarray:
        values = tables.column_of(columns, column.name, self.where)
        read = self.encoded(columns, column.name, column.kind)
        if column.required and (missing := tables.absent(read)).any():
            lacking = Columns.of(columns, self.where).lacking([column.name]).get(column.name)
            said = (
                f"{listed(lacking, _SHOWN)} has no column {column.name!r}, and none may be missing" if lacking else ""
            )
            said = said or tables.no_value(self.where, column.name, values, missing)
            raise BadInput(f'{said}; or write missing = "impute"')
        return read

    def _with_rows(self, i: int, site: Site, table: SiteTable) -> Site:
        """Returns a site with its table, whose rows are divided for training, testing and validation."""
        train, validation = site.train, None
        if self.validation_share and len(train) > 1:
            units, targets = table.grouped.of_rows(train), torch.from_numpy(indexed(table.target[train])[1])
            share, generator = self.validation_share / (1 - self.test_share), np.random.default_rng((self.seed, i))
            kept, held = divided(len(train), share, generator, units, targets)
            train, validation = train[kept], train[held] if len(held) else None
        rows = {"train": train, "test": site.test, "validation": validation}
        return replace(site, table=replace(table, rows={name: some for name, some in rows.items() if some is not None}))


def _refuse_numbers(labels: np.ndarray, name: str, file: str) -> None:
    """Refuses labels that are numbers, another one in almost every row."""
    distinct = len(set(labels.tolist()))
    if distinct > max(_MANY_LABELS, len(labels) / 2) and not np.isnan(tables.parsed(labels)[0]).any():
        raise BadInput(
            f"{file}: the target {name!r} has {distinct:,} different numbers in {len(labels):,} rows, too many for "
            'labels; to predict a number, write predict = "numbers"; if they are labels, list them as classes'
        )


def _known(columns: Mapping[str, np.ndarray], name: str, file: str) -> np.ndarray:
    """Returns a column's values; refuses missing ones, and files that lack the column."""
    for path, values in Columns.of(columns, file).by_file(name):
        for row, value in enumerate(values.tolist(), 1):
            if value is None or value != value or not str(value).strip():  # words such as "none" are names
                raise BadInput(f"{path}: row {row} of column {name!r} is empty; fill it, or leave the row out")
    return columns[name]


def _texts(column: np.ndarray) -> np.ndarray:
    return np.array([tables.whole_number_text(value) for value in column.tolist()])


def _whole_numbers(column: np.ndarray) -> np.ndarray:
    """Returns names; whole numbers written as text become numbers, so that 10 comes after 9."""
    text = np.array([tables.category_text(value) for value in column.tolist()])
    return text.astype(np.int64) if all(re.fullmatch(r"-?\d{1,18}", value) for value in text) else text
