"""[contract] What the data of every site must look like: columns, types, units, plausible ranges, classes and shapes.

It is part of the experiment file, so all sites have agreed on it. All that changes what the model sees, such as the
order of columns and classes and how values are scaled, is in it and is not a site's own choice.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairmesh.config.tables import checked, from_table, to_table
from fairmesh.data.columns import MEAN, Column, named_twice
from fairmesh.data.datasets.base import Data
from fairmesh.data.datasets.own import ImageFolder
from fairmesh.data.datasets.table import Table
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site, with_sets
from fairmesh.data.site_files import Columns, almost
from fairmesh.data.tables import rows_in_words
from fairmesh.errors import BadInput, nearest

_TOLD = 5  # complaints


@checked
@dataclass(frozen=True)
class Arrays:
    """Inputs that are arrays, such as images, as a contract describes them.

    Args:
        shape: The shape of one sample; None for any. Default: None.
        dtype: The type of the numbers, such as "float32" or "uint8"; None for any. Default: None.
        min: The smallest plausible value; None for no limit. Default: None.
        max: The largest plausible value; None for no limit. Default: None.
        unit: What the numbers are, in words, for people. Default: "".

    Example:
        >>> import fairmesh as fm
        >>> fm.data.Arrays((28, 28), "uint8", min=0, max=255).shape
        (28, 28)
    """

    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    min: float | None = None
    max: float | None = None
    unit: str = ""

    def __post_init__(self):
        if self.dtype is not None and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise BadInput(f"dtype {self.dtype!r} is not a type of torch, such as 'float32' or 'uint8'")

    def complaints(self, inputs: Tensor, where: str) -> list[str]:
        """Returns what is wrong with the inputs, in sentences."""
        shape, dtype = tuple(inputs.shape[1:]), str(inputs.dtype).removeprefix("torch.")
        if self.shape is not None and shape != self.shape:
            return [
                f"{where}: a sample has the shape {list(shape)}, but the contract says {list(self.shape)}; resize it"
            ]
        if self.dtype is not None and dtype != self.dtype:
            return [f"{where}: inputs are {dtype}, but the contract says {self.dtype}; convert them"]
        values = inputs.reshape(len(inputs), -1).double()
        numbers = Column("inputs", unit=self.unit, min=self.min, max=self.max)
        ends = (values.amin(1), values.amax(1))
        return next(filter(None, (numbers.implausible(end.numpy(), where) for end in ends)), [])


@checked
@dataclass(frozen=True)
class Contract:
    """What the data of every site must look like. It is checked where a site's data is loaded.

    Sites match columns of tables by name, so that their order in a file does not matter. A site cannot set what the
    contract says: the inputs and their order, the target, the classes, and how values are scaled.

    Args:
        columns: The input columns, in the order in which the model sees them. Default: ().
        target: The column to predict; None for any. Default: None.
        inputs: The inputs if they are arrays, such as images; None for any. Default: None.
        standardize: Whether columns of a table without center and scale, and a target that is a number, are scaled to
            mean 0 and variance 1 over the training rows of all sites. Between organisations, sites then tell each other
            sums. Default: False.
        unit: The column of a table that says what each row belongs to, such as its patient: rows of one unit are not
            divided at any site. Samples that are no table name theirs in `Site(units=...)`. None for what each site
            says. Default: None.
        time: The column of a table with the time of each row: every site's latest rows are its test rows. None for
            what each site says. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> age = fm.data.Column("age", unit="years", min=18, max=110)
        >>> ill = fm.data.Column("ill", "label", classes=("no", "yes"))
        >>> contract = fm.data.Contract((age,), ill)
        >>> contract.target.classes
        ('no', 'yes')
    """

    columns: tuple[Column, ...] = ()
    target: Column | None = None
    inputs: Arrays | None = None
    standardize: bool = False
    unit: str | None = None
    time: str | None = None

    def __post_init__(self):
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise BadInput(f"columns lists {named_twice(names)!r} twice")
        if self.columns and self.inputs:
            raise BadInput("inputs are columns of a table or arrays, not both")
        for column in self.columns:
            _check_input(column)
        if self.target:
            _check_target(self.target, names)
        for key, name in (("unit", self.unit), ("time", self.time)):
            if name is not None and (self.inputs or (self.target and name == self.target.name)):
                raise BadInput(f"{key} = {name!r} is a column of a table other than the target")
        if self.unit in names:
            raise BadInput(f"unit = {self.unit!r} is among the columns, which are inputs; remove it there, or here")

    @property
    def classes(self) -> tuple[str, ...]:
        """Returns the classes of the target, in the order of their numbers; empty if it is not a label."""
        return self.target.classes if self.target else ()

    def sites(self, data: Data) -> list[Site]:
        """Returns the sites of a source, checked and as the model sees them.

        Raises:
            BadInput: Some data is not as the contract says; the message names column, rows, value and remedy.
        """
        if isinstance(data.innermost, Table | ImageFolder):
            data = from_table(Data, self.settled(to_table(data, defaults=False)), "data")
        return self._loaded(data)

    def settled(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of a source, completed by the contract. Refuses those that contradict it."""
        done = dict(table)
        if isinstance(table.get("data"), Mapping):
            done["data"] = self.settled(table["data"])
        if table.get("scale_target", self.standardize) != self.standardize:
            raise BadInput(
                f"data.scale_target = {json.dumps(table['scale_target'])} here, but with a contract its standardize "
                f"says whether the target is scaled, now {json.dumps(self.standardize)}; remove scale_target here, and "
                "write standardize in [contract]"
            )
        for key, wanted in self.settings(table.get("name")).items():
            if key in table and table[key] != wanted:
                raise BadInput(
                    f"data.{key} = {json.dumps(table[key])} here, but the experiment's contract says "
                    f"{json.dumps(wanted)}; it decides what the model sees, so remove {key} here"
                )
            done[key] = wanted
        return done

    def settings(self, name: Any) -> dict[str, Any]:
        """Returns what the contract says about the settings of a kind of source."""
        settings: dict[str, Any] = {}
        if name == "table":
            if not self.columns:
                raise BadInput("data is a table, but the experiment's contract has no columns; add them")
            settings = {"inputs": [column.name for column in self.columns], "standardize": self.standardize}
            if self.target:
                predict = "labels" if self.target.type == "label" else "numbers"
                settings |= {"target": self.target.name, "predict": predict, "classes": list(self.classes)}
            said = {"unit": self.unit, "time": self.time}
            settings |= {key: name for key, name in said.items() if name is not None}
        if name == "image-folder":
            settings |= {"classes": list(self.classes)} if self.classes else {}
            settings |= {"size": list(self.inputs.shape[-2:])} if self.inputs and self.inputs.shape else {}
        return settings

    def _loaded(self, data: Data) -> list[Site]:
        if data.innermost is not data:
            return replace(data, data=_Loaded(tuple(self._loaded(data.data)))).sites()  # type: ignore[type-var]
        if isinstance(data, Table):
            agreed = self.reading(data)
            columns = agreed._taken_from(data.read())
            data.input_names(columns)  # refuses settings that name a column which is not there
            return data.sites_of(columns, agreed.plan(agreed.predicted(data), data.indicators))
        return self.checked(data.sites())

    def plan(self, target: Column, indicators: bool = True) -> Preprocessing:
        """Returns how a table is treated."""
        return Preprocessing.planned(self.columns, target, self.standardize, self.standardize, indicators)

    def reading(self, table: Table) -> "Contract":
        """Returns the contract with what stands for a missing value in this table, too."""
        columns = [replace(c, missing_values=(*c.missing_values, *table.markers(c.name))) for c in self.columns]
        return replace(self, columns=tuple(columns))

    def predicted(self, table: Table) -> Column:
        """Returns the column to predict, as the preprocessing of this table has it."""
        unit, markers = (self.target.unit, self.target.missing_values) if self.target else ("", ())
        return replace(table.predicted, unit=unit, missing_values=(*table.predicted.missing_values, *markers))

    def _taken_from(self, columns: Columns) -> Columns:
        """Returns the columns of a table. Refuses those that are not as the contract says. One that a file lacks is
        missing there, if the contract allows it."""
        listed = [column for column in (*self.columns, self.target) if column]
        markers = {column.name: column.missing_values for column in listed}
        columns = columns.without(lambda name: markers.get(name, ()))
        wrong = []
        for column in listed:
            for part in columns.parts:
                if column.name in part.names:
                    wrong += column.complaints(columns[column.name][part.rows], part.path)
                elif column.required or almost(column.name, part.names - markers.keys()):
                    lacking = f"{part.path} has no column {column.name!r}, which the contract lists"
                    wrong.append(f"{lacking}{nearest(column.name, part.names - markers.keys())}; rename or add it")
        refuse(wrong)
        return columns.with_empty([column.name for column in listed])

    def checked(self, sites: Sequence[Site]) -> list[Site]:
        """Returns sites whose samples have no names, checked and as the model sees them. Columns are matched by
        position."""
        for site in sites if self.unit else ():
            if site.units is None and getattr(site.train, "units", None) is None:
                raise BadInput(
                    f"{site.name or 'a site'}: the contract says unit = {self.unit!r}, but these samples do not say "
                    "which of them belong together; give them in fm.Site(..., units=...)"
                )
        named = [
            replace(site, unit=self.unit or site.unit, left_to_rows=self.not_settled(site.left_to_rows))
            for site in sites
        ]
        return with_sets(named, lambda samples, where: self._taken(Samples.of(samples, where), where).parts())

    def not_settled(self, left_to_rows: Mapping[str, str]) -> dict[str, str]:
        """Returns what is still left to single rows: not the form of inputs whose shape the contract has."""
        shaped = self.inputs is not None and self.inputs.shape is not None
        return {name: told for name, told in left_to_rows.items() if not (shaped and name == "form")}

    def _taken(self, samples: Samples, where: str) -> Samples:
        if not (isinstance(samples.inputs, Tensor) and isinstance(samples.targets, Tensor)):
            raise BadInput(
                f"{where}: samples have several inputs or targets, which a contract cannot describe; remove [contract]"
            )
        looked_at = samples.some()
        wrong = self.inputs.complaints(looked_at.inputs, where) if self.inputs else []
        inputs = self._scaled(samples, where) if self.columns else samples.inputs
        refuse(wrong + self._target_complaints(looked_at.targets, where))
        return replace(samples, inputs=inputs)

    def _scaled(self, samples: Samples, where: str) -> Tensor:
        """Returns inputs that are arrays as the model sees them. Refuses those that are not as the columns say."""
        if samples.stream:
            raise BadInput(f"{where}: a contract with columns needs samples in memory; give arrays, or use inputs")
        inputs: Tensor = samples.inputs
        shape = list(inputs.shape[1:])
        if shape != [len(self.columns)]:
            names = ", ".join(column.name for column in self.columns)
            raise BadInput(f"{where}: a sample has the shape {shape}, but the contract has the columns {names}")
        for column in self.columns:
            if column.type not in ("number", "whole") or column.open or column.indicator:
                raise BadInput(
                    f"{where}: column {column.name!r} of the contract has the type {column.type}, fill = "
                    f"{column.fill!r}, standardize or indicator, which only tables can have, but these samples are "
                    "arrays; give a table"
                )
        if self.standardize:
            raise BadInput(f"{where}: the contract says standardize, which only tables can, but these are arrays")
        given = [(column, column.known(values)) for column, values in zip(self.columns, inputs.double().T.numpy())]
        refuse([complaint for column, values in given for complaint in column.complaints(values, where)])
        scaled = [column.transform(values, where) for column, values in given]
        dtype = inputs.dtype if inputs.is_floating_point() else torch.get_default_dtype()
        return torch.from_numpy(np.concatenate(scaled, axis=1)).to(dtype)

    def _target_complaints(self, targets: Tensor, where: str) -> list[str]:
        target = self.target
        if not target:
            return []
        where = f"{where}, target {target.name!r}"
        if target.type != "label":
            return target.implausible(targets.double().numpy(), where) if targets.ndim == 1 else []
        if targets.is_floating_point() or targets.ndim != 1:
            return [f"{where}: targets are {targets.dtype}, but the contract says classes; give their numbers from 0"]
        outside = ((targets < 0) | (targets >= len(target.classes))).numpy()
        if not outside.any():
            return []
        return [
            f"{where}, {rows_in_words(outside)}: class number {int(targets[int(outside.argmax())])}, but the contract "
            f"has the classes 0 to {len(target.classes) - 1}: {list(target.classes)}; number them in this order"
        ]


@dataclass(frozen=True)
class _Loaded(Data):
    made: tuple[Site, ...]

    def sites(self) -> list[Site]:
        return list(self.made)


def _check_input(column: Column) -> None:
    if column.type == "label":
        raise BadInput(f"column {column.name!r} is an input, so it is a number or a category, not a label")
    _check_classes(column)
    if column.has_classes and isinstance(column.fill, str) and column.fill not in (MEAN, *column.classes):
        raise BadInput(f'column {column.name!r}: fill is one of its classes or "{MEAN}", got {column.fill!r}')


def _check_target(target: Column, inputs: Sequence[str]) -> None:
    if target.type in ("yes-no", "date", "category"):
        raise BadInput(f'target {target.name!r} is a "number", "whole" or a "label", not {target.type}')
    _check_classes(target)
    if target.name in inputs or not target.required or target.indicator:
        raise BadInput(f"target {target.name!r} is not an input, and no target may be missing")
    if target.has_scale:
        raise BadInput(
            f"target {target.name!r}: center and scale are for inputs; with standardize = true in [contract], the "
            "model learns the target in multiples of its standard deviation over all sites"
        )
    if target.standardize:
        raise BadInput(f"target {target.name!r}: it is scaled like the columns; write standardize in [contract]")


def _check_classes(column: Column) -> None:
    if column.has_classes and not column.classes:
        raise BadInput(f"column {column.name!r} of type {column.type} needs classes; list them")


def refuse(wrong: Sequence[str]) -> None:
    """Raises BadInput with the first few of the complaints, if there are any."""
    if wrong:
        more = f" (and {len(wrong) - _TOLD} more)" if len(wrong) > _TOLD else ""
        raise BadInput(" | ".join(wrong[:_TOLD]) + more)
