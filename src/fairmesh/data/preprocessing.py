"""How the rows of a table become the inputs of a model: its columns, complete, and frozen with a run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fairmesh.config.tables import from_table, to_table
from fairmesh.data.columns import Column
from fairmesh.data.tables import column_of, encoded, numbered_labels, whole_number_text
from fairmesh.errors import BadInput, listed

_FORMAT = 2
_SCALED = "numbers, scaled by one center and scale for all sites"
_AS_THEY_ARE = "numbers, used as they are"
_CATEGORIES = "categories, one input each and one for all others"
_MARKED = "missing values are filled and marked by an input"
_HOW = (
    "Inputs are float32, in the order of `inputs`. A value is missing if it is empty, NA, N/A, NaN, null or none, or "
    "one of the column's `missing_values`, of which -9 is also -9.0. A category or a label that is a whole number has "
    "no decimals: 4 for 4.0. For each of `columns`, in order: if type is number, whole, yes-no or date, read the value "
    "x as a number (yes and true are 1, no and false 0; a date is its number of days since "
    "1970-01-01), put `fill` for a missing one, and give (x - center) / scale; then, if `indicator`, give 1 if it was "
    "missing, else 0. If type is category, put `fill` for a missing value unless it is `mean`; give 1 or 0 for each of "
    "`classes`, then 1 if the value is none of them; then, if `indicator`, give 1 if it was missing (and 0 for all "
    "others). A missing category with `fill` = mean and without `indicator` counts as none of the classes. Without "
    "`fill`, a missing value is an error. If the target is a label, output k belongs to classes[k]; if it is a number, "
    "the output is in its own units."
)


@dataclass(frozen=True)
class Preprocessing:
    """How the rows of a table become inputs of a model.

    Its columns are those of a contract, or those that a table's settings and values describe. What they leave open is
    completed by the training rows of all sites, and then frozen. A run's folder has it as `preprocessing.json`, which
    describes itself: it can be applied without fairmesh.

    Args:
        columns: The columns, in the order of their inputs.
        target: The column to predict. Of a number, center and scale are those of the model's own scale.

    Example:
        >>> import fairmesh as fm
        >>> age = fm.data.Column("age", fill=50.0, center=50.0, scale=10.0, indicator=True)
        >>> ward = fm.data.Column("ward", "category", classes=("north", "south"), fill="mean")
        >>> made = fm.data.Preprocessing((age, ward), fm.data.Column("ill", "label", classes=("no", "yes")))
        >>> made.inputs
        ('age', 'age missing', 'ward = north', 'ward = south', 'ward = other')
        >>> made.transform({"ward": ["south", "east"], "age": [60, ""]}).tolist()
        [[1.0, 0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0, 1.0]]
        >>> fm.data.Preprocessing.from_json(made.to_json()) == made
        True
    """

    columns: tuple[Column, ...]
    target: Column

    @staticmethod
    def planned(
        columns: Sequence[Column], target: Column, standardize: bool, scale_target: bool, indicators: bool
    ) -> "Preprocessing":
        """Returns how columns are to be treated, before any row is looked at.

        Args:
            columns: The input columns, in order.
            target: The column to predict.
            standardize: Whether numbers without a center and a scale are scaled by what all sites have.
            scale_target: Whether numbers to predict are.
            indicators: Whether inputs mark missing values.
        """
        own_scale = [not standardize or column.has_classes or column.has_scale for column in columns]
        planned = [
            replace(column, standardize=column.standardize or not own, indicator=column.indicator or indicators)
            for column, own in zip(columns, own_scale)
        ]
        if scale_target and target.type != "label":
            target = replace(target, center=0.0, scale=1.0, standardize=True)
        return Preprocessing(tuple(planned), target)

    def reading(self, markers: Mapping[str, Sequence[str | float]]) -> "Preprocessing":
        """Returns the same for tables in which these stand for missing values, by column."""
        columns = [replace(column, missing_values=tuple(markers.get(column.name, ()))) for column in self.columns]
        target = replace(self.target, missing_values=tuple(markers.get(self.target.name, ())))
        return Preprocessing(tuple(columns), target)

    @property
    def markers(self) -> dict[str, tuple[str | float, ...]]:
        """What stands for a missing value, by column."""
        return {column.name: column.missing_values for column in (*self.columns, self.target)}

    @property
    def open(self) -> bool:
        """Whether something about it follows from the rows of all sites."""
        return any(column.open for column in (*self.columns, self.target))

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
        given = {column: column.known(column_of(columns, column.name, where)) for column in self.columns}
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
        table = {"format": _FORMAT, "how": _HOW, "inputs": self.inputs, **to_table(self)}
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
                raise BadInput(f"format {table['format']}, but this version reads {_FORMAT}")
            return from_table(Preprocessing, {name: table[name] for name in ("columns", "target")})
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"this is not a preprocessing.json: {error}") from error

    def in_words(self) -> list[str]:
        """Returns what it does, in sentences."""
        groups: dict[str, list[str]] = {_SCALED: [], _AS_THEY_ARE: [], _CATEGORIES: [], _MARKED: []}
        for column in self.columns:
            name = column.name if column.kind == "number" else f"{column.name} ({column.kind})"
            if column.kind == "category":
                groups[_CATEGORIES].append(f"{column.name} ({listed(column.classes) or 'none'})")
            else:
                groups[_SCALED if column.has_scale else _AS_THEY_ARE].append(name)
            if column.indicator:
                fill = f"{column.fill:.4g}" if isinstance(column.fill, float) else column.constant
                groups[_MARKED].append(f"{column.name} ({fill})" if fill else column.name)
        said = [f"{len(self.columns)} columns become {len(self.inputs)} inputs"]
        said += [f"{how}: {listed(names)}" for how, names in groups.items() if names]
        target = self.target
        if target.type == "label":
            said.append(f"{target.name} has the classes {listed(target.classes)}")
        elif target.scale != 1.0:
            said.append(f"{target.name} is a number; the loss counts in multiples of its spread, {target.scale:.3g}")
        return said
