"""[contract] What the data of every site must look like: columns, types, units, plausible ranges, classes and shapes.

It is part of the experiment file, so all sites have agreed on it. All that changes what the model sees, such as the
order of columns and classes and how values are scaled, is in it and is not a site's own choice.
"""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairmesh.config.tables import checked, from_table, to_table
from fairmesh.data.datasets.base import Data
from fairmesh.data.datasets.own import ImageFolder
from fairmesh.data.datasets.table import Table
from fairmesh.data.partitions import Even
from fairmesh.data.preprocessing import ColumnPlan, Plan
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.data.tables import (
    NAME_AT_MOST,
    Kind,
    category_text,
    encoded,
    is_missing,
    kind_of,
    missing_in,
    number_in,
    parsed,
    refuse_many_categories,
    whole_number_text,
)
from fairmesh.data.tables import rows_in_words as _rows
from fairmesh.errors import BadInput, nearest

_TOLD = 5  # complaints
_MEAN = "mean"  # of a column's fill: by what all sites have
_IDENTIFIERS = 10  # rows from which consecutive numbers are taken for identifiers
_RARE = 5  # rows; a category of fewer may say who it is
_WIDER = 0.25  # of the range that was seen, on either side


@checked
@dataclass(frozen=True)
class Column:
    """One column of a table, as a contract describes it.

    Args:
        name: The column's name in the header. Where samples have no names, such as in arrays, columns are matched by
            position.
        type: "number", "whole" for whole numbers, "yes-no", "date" (2026-11-30) or "category"; of the target "number",
            "whole" or "label". Default: "number".
        unit: The unit, in words, for people. Default: "".
        min: The smallest plausible value; None for no limit. Default: None.
        max: The largest plausible value; None for no limit. Default: None.
        classes: Of a label, the allowed classes, in the order of their numbers; of a category, the allowed ones.
            Default: ().
        fill: The value that stands for a missing one; "mean" for the mean over all sites or, of a category, an input of
            its own; None if no value may be missing. Default: None.
        center: What is subtracted from every value before the model sees it. Default: 0.0.
        scale: What every value is divided by after that, > 0. Default: 1.0.

    Example:
        >>> import fairmesh as fm
        >>> fm.data.Column("age", "whole", unit="years", min=18, max=110, center=54.0, scale=17.0).max
        110.0
    """

    name: str
    type: Literal["number", "whole", "label", "yes-no", "date", "category"] = "number"
    unit: str = ""
    min: float | None = None
    max: float | None = None
    classes: tuple[str, ...] = ()
    fill: float | str | None = None
    center: float = 0.0
    scale: float = 1.0

    def __post_init__(self):
        given = (self.min, self.max, self.fill, self.center, self.scale)
        if not all(math.isfinite(value) for value in given if value is not None and not isinstance(value, str)):
            raise BadInput(f"column {self.name!r}: min, max, fill, center and scale must be finite")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise BadInput(f"column {self.name!r}: min = {self.min:g} is larger than max = {self.max:g}")
        if self.scale <= 0:
            raise BadInput(f"column {self.name!r}: scale must be > 0, got {self.scale:g}")
        if (self.type in ("label", "category")) != bool(self.classes):
            raise BadInput(f'column {self.name!r}: classes belong to type = "label" or "category", which need them')
        if isinstance(self.fill, str) and self.fill not in (_MEAN, *self.classes):
            words = "one of its classes or" if self.classes else "a number or"
            raise BadInput(f'column {self.name!r}: fill is {words} "{_MEAN}", got {self.fill!r}')
        if len(set(self.classes)) < len(self.classes):
            raise BadInput(f"column {self.name!r}: classes lists {_twice(self.classes)!r} twice")

    @property
    def range(self) -> str:
        """Returns the plausible range in words."""
        unit = f" {self.unit}" if self.unit else ""
        if self.min is None and self.max is None:
            return f"any number{unit}"
        if self.min is None or self.max is None:
            return f"at least {self.min:g}{unit}" if self.max is None else f"at most {self.max:g}{unit}"
        return f"{self.min:g} to {self.max:g}{unit}"

    @property
    def kind(self) -> Kind:
        """What the column has, as a table names it."""
        return {"whole": "number", "label": "category"}.get(self.type, self.type)  # type: ignore[return-value]

    def plan(self, standardize: bool) -> ColumnPlan:
        """Returns how the column is treated where a table has it.

        Args:
            standardize: Whether numbers without center and scale are scaled by what all sites have.
        """
        fill = None if self.fill == _MEAN else self.fill
        form = {"name": self.name, "kind": self.kind, "fill": fill, "required": self.fill is None}
        if self.type == "category":
            return ColumnPlan(**form, categories=self.classes)
        by_sites = standardize and (self.center, self.scale) == (0.0, 1.0)
        return ColumnPlan(**form) if by_sites else ColumnPlan(**form, center=self.center, scale=self.scale)

    def read(self, values: np.ndarray, where: str) -> tuple[np.ndarray, list[str]]:
        """Returns the numbers or labels of a column, NaN for missing numbers, and what is wrong with them, in
        sentences."""
        where = f"{where}, column {self.name!r}"
        if self.type in ("yes-no", "date", "category"):
            return self._read_texts(values, where)
        numbers, missing = parsed(values)
        wrong = []
        if missing.any() and self.fill is None:
            wrong.append(
                f"{where}, {_rows(missing)}: no value, but the contract allows no missing values; fill them, or leave "
                "the rows out"
            )
        if self.type == "label":
            texts = np.array([whole_number_text(value) for value in values])
            unknown = ~missing & ~np.isin(texts, self.classes)
            if unknown.any():
                wrong.append(
                    f"{where}, {_rows(unknown)}: {str(texts[unknown][0])!r}, but the contract's classes are "
                    f"{list(self.classes)}; write the classes as the contract does"
                )
            return texts, wrong
        odd = ~missing & ~np.isfinite(numbers)
        if odd.any():
            wrong.append(
                f"{where}, {_rows(odd)}: {str(values[odd][0])!r}, but the contract says a number; write numbers, with "
                "a point for decimals and no unit"
            )
        return numbers, wrong + self._implausible(numbers, where)

    def _read_texts(self, values: np.ndarray, where: str) -> tuple[np.ndarray, list[str]]:
        missing, wrong = missing_in(values.tolist()), []
        if missing.any() and self.fill is None:
            wrong.append(
                f"{where}, {_rows(missing)}: no value, but the contract allows no missing values; fill them, or leave "
                "the rows out"
            )
        if self.type != "category":
            try:
                encoded(values, self.kind, self.name, where)
            except BadInput as error:
                wrong.append(str(error))
            return values, wrong
        texts = [category_text(value) for value in values.tolist()]
        unknown = ~missing & ~np.isin(texts, self.classes)
        if unknown.any():
            wrong.append(
                f"{where}, {_rows(unknown)}: {texts[int(unknown.argmax())]!r}, but the contract's categories are "
                f"{list(self.classes)}; write them as the contract does"
            )
        return values, wrong

    def scaled(self, numbers: np.ndarray) -> np.ndarray:
        """Returns numbers as the model sees them, where samples are arrays."""
        filled = numbers if self.fill is None else np.where(np.isnan(numbers), self.fill, numbers)
        return (filled - self.center) / self.scale

    def _implausible(self, numbers: np.ndarray, where: str) -> list[str]:
        """Returns what is wrong with the numbers that are there."""
        known = np.isfinite(numbers)
        broken = known & (numbers != np.round(numbers)) if self.type == "whole" else np.zeros_like(known)
        low, high = -math.inf if self.min is None else self.min, math.inf if self.max is None else self.max
        outside = known & ((numbers < low) | (numbers > high))
        wrong = []
        if broken.any():
            wrong.append(
                f"{where}, {_rows(broken)}: {numbers[broken][0]:g}, but the contract says whole numbers; is it another "
                "column?"
            )
        if outside.any():
            advice = (
                "most rows are outside, so it is probably another unit or another column: convert it"
                if outside.sum() > known.sum() / 2
                else "correct the values"
            )
            wrong.append(
                f"{where}, {_rows(outside)}: {numbers[outside][0]:g}, but the contract says {self.range}; {advice}, "
                "or, if the values are right, ask the founder to widen the range"
            )
        return wrong


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
        for end in (values.amin(1), values.amax(1)):
            wrong = numbers._implausible(end.numpy(), where)
            if wrong:
                return wrong
        return []


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
        standardize: Whether columns of a table without center and scale are scaled to mean 0 and variance 1 over the
            training rows of all sites. Between organisations, sites then tell each other sums. Default: False.

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

    def __post_init__(self):
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise BadInput(f"columns lists {_twice(names)!r} twice")
        if self.columns and self.inputs:
            raise BadInput("inputs are columns of a table or arrays, not both")
        for column in self.columns:
            if column.type == "label":
                raise BadInput(f"column {column.name!r} is an input, so it is a number or a category, not a label")
        if self.target is not None and self.target.type in ("yes-no", "date", "category"):
            raise BadInput(f'target {self.target.name!r} is a "number", "whole" or a "label", not {self.target.type}')
        if self.target is not None and (self.target.name in names or self.target.fill is not None):
            raise BadInput(f"target {self.target.name!r} is not an input, and no target may be missing")

    @property
    def classes(self) -> tuple[str, ...]:
        """Returns the classes of the target, in the order of their numbers; empty if it is not a label."""
        return () if self.target is None else self.target.classes

    def sites(self, data: Data) -> list[Site]:
        """Returns the sites of a source, checked and as the model sees them.

        Raises:
            BadInput: Some data is not as the contract says; the message names column, rows, value and remedy.
        """
        if _has_settings(data):
            data = from_table(Data, self.settled(to_table(data, defaults=False)), "data")
        return self._loaded(data)

    def settled(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of a source, completed by the contract. Refuses those that contradict it."""
        done = dict(table)
        if isinstance(table.get("data"), Mapping):
            done["data"] = self.settled(table["data"])
        for key, wanted in self._settings(table.get("name")).items():
            if key in table and _listed(table[key]) != _listed(wanted):
                raise BadInput(
                    f"data.{key} = {json.dumps(table[key])} here, but the experiment's contract says "
                    f"{json.dumps(wanted)}; it decides what the model sees, so remove {key} here"
                )
            done[key] = wanted
        return done

    def _settings(self, name: Any) -> dict[str, Any]:
        """Returns what the contract says about the settings of a kind of source."""
        target, found = self.target, dict[str, Any]()
        if name == "table":
            if not self.columns:
                raise BadInput("data is a table, but the experiment's contract has no columns; add them")
            found = {"inputs": [column.name for column in self.columns], "standardize": self.standardize}
            if target is not None:
                predict = "labels" if target.type == "label" else "numbers"
                found |= {"target": target.name, "predict": predict, "classes": list(target.classes)}
        if name == "image-folder":
            found |= {"classes": list(self.classes)} if self.classes else {}
            if self.inputs is not None and self.inputs.shape is not None:
                found["size"] = list(self.inputs.shape[-2:])
        return found

    def _loaded(self, data: Data) -> list[Site]:
        inner = getattr(data, "data", None)
        if isinstance(inner, Data):
            return replace(data, data=_Loaded(tuple(self._loaded(inner)))).sites()  # type: ignore[type-var]
        if isinstance(data, Table):
            columns = self._prepared(data.read(), data.file)
            data.input_names(columns)  # refuses settings that name a column which is not there
            planned = tuple(column.plan(self.standardize) for column in self.columns)
            scaled = data.predict == "numbers" and self.standardize
            plan = Plan(planned, data.target, data.predict, data.classes, scaled, data.indicators)
            return data.sites_of(columns, plan)
        return self.checked(data.sites())

    def _prepared(self, columns: Mapping[str, np.ndarray], file: str) -> dict[str, np.ndarray]:
        """Returns the columns of a table, of which those in the contract are checked."""
        done, wrong = dict(columns), []
        for column in (*self.columns, *filter(None, [self.target])):
            if column.name not in columns:
                wrong.append(
                    f"{file} has no column {column.name!r}, which the contract lists{nearest(column.name, columns)}; "
                    "rename or add it"
                )
                continue
            done[column.name], found = column.read(columns[column.name], file)
            wrong += found
        _refuse(wrong)
        return done

    def checked(self, sites: Sequence[Site]) -> list[Site]:
        """Returns sites whose samples have no names, checked and as the model sees them. Columns are matched by
        position."""
        done: dict[int, Any] = {}

        def taken(samples: Any, where: str) -> Any:
            if samples is not None and id(samples) not in done:
                done[id(samples)] = self._taken(Samples.of(samples, where), where).parts()
            return None if samples is None else done[id(samples)]

        made = []
        for i, site in enumerate(sites):
            name = site.name or f"site {i}"
            parts = {
                part: taken(getattr(site, part), f"{name}, {words}")
                for part, words in (
                    ("train", "training samples"),
                    ("test", "test samples"),
                    ("validation", "validation samples"),
                    ("reserved", "reserved samples"),
                )
            }
            made.append(replace(site, **parts))
        return made

    def _taken(self, samples: Samples, where: str) -> Samples:
        if not (isinstance(samples.inputs, Tensor) and isinstance(samples.targets, Tensor)):
            raise BadInput(
                f"{where}: samples have several inputs or targets, which a contract cannot describe; remove [contract]"
            )
        looked_at = samples.some()
        wrong = self.inputs.complaints(looked_at.inputs, where) if self.inputs is not None else []
        inputs = samples.inputs
        if self.columns and samples.stream is not None:
            raise BadInput(f"{where}: a contract with columns needs samples in memory; give arrays, or use inputs")
        if self.columns:
            shape = tuple(inputs.shape[1:])
            if shape != (len(self.columns),):
                names = ", ".join(column.name for column in self.columns)
                _refuse([f"{where}: a sample has the shape {list(shape)}, but the contract has the columns {names}"])
            self._refuse_unlike_arrays(where)
            read = [column.read(inputs[:, k].numpy(), where) for k, column in enumerate(self.columns)]
            wrong += [one for _, found in read for one in found]
            dtype = inputs.dtype if inputs.is_floating_point() else torch.get_default_dtype()
            scaled = [column.scaled(values) for column, (values, _) in zip(self.columns, read)]
            _refuse(wrong)
            inputs = torch.from_numpy(np.stack(scaled, axis=1)).to(dtype)
        wrong += self._target_complaints(looked_at.targets, where)
        _refuse(wrong)
        return replace(samples, inputs=inputs)

    def _refuse_unlike_arrays(self, where: str) -> None:
        for column in self.columns:
            if column.type not in ("number", "whole") or column.fill == _MEAN:
                raise BadInput(
                    f"{where}: column {column.name!r} of the contract has the type {column.type} and fill = "
                    f"{column.fill!r}, which only tables can have, but these samples are arrays; give a table"
                )
        if self.standardize:
            raise BadInput(f"{where}: the contract says standardize, which only tables can, but these are arrays")

    def _target_complaints(self, targets: Tensor, where: str) -> list[str]:
        target = self.target
        if target is None:
            return []
        where = f"{where}, target {target.name!r}"
        if target.type != "label":
            if targets.ndim == 1:
                return target._implausible(targets.double().numpy(), where)
            return []
        if targets.is_floating_point() or targets.ndim != 1:
            return [f"{where}: targets are {targets.dtype}, but the contract says classes; give their numbers from 0"]
        outside = ((targets < 0) | (targets >= len(target.classes))).numpy()
        if not outside.any():
            return []
        last = len(target.classes) - 1
        return [
            f"{where}, {_rows(outside)}: class number {int(targets[int(outside.argmax())])}, but the contract has the "
            f"classes 0 to {last}: {list(target.classes)}; number them in this order"
        ]


@dataclass(frozen=True)
class _Loaded(Data):
    made: tuple[Site, ...]

    def sites(self) -> list[Site]:
        return list(self.made)


def _has_settings(data: Data) -> bool:
    """Returns whether the contract says something about the settings of this source or of one inside it."""
    inside = getattr(data, "data", None)
    return type(data) in (Table, ImageFolder) or (isinstance(inside, Data) and _has_settings(inside))


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def _twice(names: Sequence[str]) -> str:
    return next(name for k, name in enumerate(names) if name in names[:k])


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        more = f" (and {len(wrong) - _TOLD} more)" if len(wrong) > _TOLD else ""
        raise BadInput(" | ".join(wrong[:_TOLD]) + more)


# Writing a contract


class Draft(NamedTuple):
    """A [contract] section, and the columns in it that are numbers but look like identifiers."""

    text: str
    identifiers: tuple[str, ...] = ()


def drafted(data: Data, without: Sequence[str] = ()) -> Draft:
    """Returns the [contract] section that some data fulfils, to be edited: ranges are a little wider than seen.

    Args:
        data: The data.
        without: Columns of a table that are not inputs. Default: ().
    """
    if isinstance(data, Table):
        return _of_table(data, without)
    if without:
        raise BadInput(f"--without {without[0]}: only a table has columns, and this data is not one")
    return Draft("\n".join(_of_arrays(data)))


def drafted_from_table(
    file: str, target: str, predict: Literal["labels", "numbers"], without: Sequence[str] = ()
) -> Draft:
    """Returns the [contract] section that a table fulfils, with all other columns but those `without` as inputs."""
    return drafted(Table(file, target, predict=predict, partition=Even(1)), without)


def _of_table(table: Table, without: Sequence[str]) -> Draft:
    columns = table.read()
    for name in without:
        if name == table.target or name not in columns:
            why = "is the column to predict" if name == table.target else f"is no column{nearest(name, columns)}"
            raise BadInput(f"--without {name}: {name!r} {why} in {table.file}")
    names = [name for name in table.input_names(columns) if name not in without]
    if not names:
        raise BadInput(f"{table.file} has no column to predict from; leave out fewer with --without")
    _refuse([one for name in names for one in _unusable(table, columns[name], name)])
    identifiers = tuple(name for name in names if _is_identifier(columns[name], name))
    return Draft("\n".join(_drafted_columns(table, columns, names, identifiers)), identifiers)


def _kind(table: Table, values: np.ndarray, name: str) -> Kind:
    """Returns what a column has, as the table says or as its values look."""
    given = "category" if name in table.categories else table.types.get(name)
    return given or kind_of(values, name, table.file)  # type: ignore[return-value]


def _unusable(table: Table, values: np.ndarray, name: str) -> Iterator[str]:
    """Yields why a column cannot be an input, and what to do."""
    leave_out = f"--without {shlex.quote(name)}"
    known = [category_text(value) for value in values.tolist() if not is_missing(value)]
    if not known:
        yield f"{table.file}: column {name!r} has no values; leave it out: {leave_out}"
        return
    try:
        kind = _kind(table, values, name)
        if kind == "category" and name not in table.categories:
            refuse_many_categories(values, name, table.file)
        encoded(values, kind, name, table.file)
    except BadInput as error:
        said = str(error).replace(f'exclude = ["{name}"]', leave_out)
        yield said.replace("or say types", "or draft from an experiment file whose [data] has types")
        return
    if kind == "category" and len(known) > 1 and len(set(known)) == len(known):
        yield f"{table.file}: column {name!r} has another text in every row: an identifier? Leave it out: {leave_out}"
    elif kind == "category" and len(longest := max(known, key=len)) > NAME_AT_MOST:
        yield (
            f"{table.file}: column {name!r} has a text of {len(longest):,} characters, as a remark has, and categories "
            f"have at most {NAME_AT_MOST}; leave it out: {leave_out}"
        )


def _is_identifier(values: np.ndarray, name: str) -> bool:
    """Returns whether a column of numbers looks like an identifier: whole numbers, in every row another one, that are
    consecutive or have such a name."""
    numbers, missing = parsed(values)
    if len(numbers) < _IDENTIFIERS or missing.any() or (numbers != np.round(numbers)).any():
        return False
    if len(np.unique(numbers)) < len(numbers):
        return False
    consecutive = numbers.max() - numbers.min() == len(numbers) - 1
    return bool(consecutive) or re.search(r"(^|[^a-z])id$", name.lower()) is not None


def _drafted_columns(
    table: Table, columns: Mapping[str, np.ndarray], names: Sequence[str], identifiers: Sequence[str]
) -> Iterator[str]:
    yield "# Unit and range of every column, in words and numbers: correct them. Ranges are wider than those seen."
    yield "# The model sees (value - center) / scale. Columns are matched by name at every site."
    for name in names:
        if name in identifiers:
            yield "# This looks like an identifier: a different whole number in every row. If it is one, remove it."
        yield "[[contract.columns]]"
        yield f"name = {json.dumps(name, ensure_ascii=False)}"
        kind = _kind(table, columns[name], name)
        if kind == "number":
            yield from _drafted_column(columns[name], name, table.file, scaled=True)
        else:
            yield from _drafted_texts(columns[name], kind, table.categories.get(name, ()), name, table.file)
        yield ""
    yield "[contract.target]"
    yield f"name = {json.dumps(table.target, ensure_ascii=False)}"
    if table.predict == "numbers":
        yield from _drafted_column(columns[table.target], table.target, table.file, scaled=False)
        return
    classes = table.classes or tuple(
        dict.fromkeys(sorted(map(whole_number_text, columns[table.target]), key=_in_order))
    )
    yield 'type = "label"'
    yield f"classes = {json.dumps(list(classes), ensure_ascii=False)}  # in the order of their numbers"


def _in_order(text: str) -> tuple[bool, float, str]:
    return (not math.isfinite(number_in(text)), number_in(text) if math.isfinite(number_in(text)) else 0.0, text)


def _drafted_column(values: np.ndarray, name: str, file: str, scaled: bool) -> Iterator[str]:
    numbers, missing = parsed(values)
    odd = ~missing & ~np.isfinite(numbers)
    if odd.any() or missing.all():  # of the target; inputs have been checked
        found = f"{_rows(odd)}: {str(values[odd][0])!r} is not a number" if odd.any() else "no values"
        raise BadInput(f"{file}: column {name!r}, {found}; leave out --numbers if the target is a label")
    numbers = numbers[~missing]
    whole = bool((numbers == np.round(numbers)).all())
    low, high = _wider(numbers, whole)
    yield f'type = "{"whole" if whole else "number"}"'
    yield 'unit = ""'
    yield f"min = {low:.10g}"
    yield f"max = {high:.10g}"
    if missing.any() and scaled:
        yield f"fill = {float(f'{np.median(numbers):.3g}'):g}  # stands for a missing value; else none may be missing"
    if scaled and len(set(numbers.tolist())) > 2:
        yield f"center = {float(f'{numbers.mean():.2g}'):g}"
        yield f"scale = {float(f'{numbers.std():.2g}'):g}"


def _drafted_texts(values: np.ndarray, kind: Kind, listed: Sequence[str], name: str, file: str) -> Iterator[str]:
    """Yields the rest of a column of categories, of yes and no, or of dates."""
    yield f'type = "{kind}"'
    read = encoded(values, kind, name, file)
    missing = missing_in(values.tolist())
    if kind == "category":
        counts = Counter(text for text in read.tolist() if text is not None)
        rare = sorted(text for text, count in counts.items() if count < _RARE)
        classes = [*listed, *sorted(counts.keys() - set(listed))]
        yield f"classes = {json.dumps(classes, ensure_ascii=False)}  # one input each; add those of other sites"
        if rare:
            shown = json.dumps(rare[:_TOLD], ensure_ascii=False) + (" and others" if len(rare) > _TOLD else "")
            yield f"# In fewer than {_RARE} rows of this table, and all sites will see them: {shown}"
    if kind == "date":  # the model sees days
        days = read[~missing]
        yield f"center = {float(f'{days.mean():.4g}'):g}  # days since 1970-01-01"
        yield f"scale = {float(f'{days.std():.2g}') or 1.0:g}"
    if missing.any():
        what = "missing values get an input of their own" if kind == "category" else "of all sites, for a missing value"
        yield f'fill = "{_MEAN}"  # {what}; else none may be missing'


def _wider(numbers: np.ndarray, whole: bool) -> tuple[float, float]:
    """Returns a range that is a little wider than that of the numbers, and rounded. Only those of one sign keep it."""
    low, high = float(numbers.min()), float(numbers.max())
    if whole and high - low <= 1:
        return low, high
    span = high - low or abs(high) or 1.0
    step = 10.0 ** (math.floor(math.log10(span)) - 1)
    step = max(step, 1.0) if whole else step
    down, up = (math.floor((low - _WIDER * span) / step) * step, math.ceil((high + _WIDER * span) / step) * step)
    return (max(0.0, down) if low >= 0 else down), (min(0.0, up) if high <= 0 else up)


def _of_arrays(data: Data) -> Iterator[str]:
    every = [Samples.of(site.train, f"site {i}") for i, site in enumerate(data.sites())]
    samples, targets = [one.some() for one in every], [one.known_targets() for one in every]
    inputs = samples[0].inputs
    if not (isinstance(inputs, Tensor) and isinstance(targets[0], Tensor)):
        raise BadInput("data: samples have several inputs or targets, which a contract cannot describe")
    yield "# The range is wider than that seen: correct it, and say in unit what the numbers are."
    yield "[contract.inputs]"
    yield f"shape = {list(inputs.shape[1:])}"
    yield f'dtype = "{str(inputs.dtype).removeprefix("torch.")}"'
    if inputs.dtype == torch.uint8:
        low, high = 0.0, 255.0
    else:
        ends = [float(end) for one in samples for end in (one.inputs.min(), one.inputs.max())]
        low, high = _wider(np.array(ends), not inputs.is_floating_point())
    yield f"min = {low:.10g}"
    yield f"max = {high:.10g}"
    yield 'unit = ""'
    if not targets[0].is_floating_point() and targets[0].ndim == 1:
        named = getattr(data, "classes", ()) or [str(k) for k in range(1 + max(int(one.max()) for one in targets))]
        yield ""
        yield "[contract.target]"
        yield 'name = "class"'
        yield 'type = "label"'
        yield f"classes = {json.dumps(list(named), ensure_ascii=False)}  # in the order of their numbers"
