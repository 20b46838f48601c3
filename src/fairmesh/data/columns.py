"""One column of a table, from what a contract says about it to the inputs that a model sees.

A contract declares it, or a table's settings and values do. What they leave open, such as a mean over all sites,
follows from the sums that sites tell each other. Then it is complete, and turns values into inputs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fairmesh.config.tables import checked
from fairmesh.data import tables
from fairmesh.data.tables import Kind
from fairmesh.errors import BadInput

MEAN = "mean"  # of a column's fill: by what all sites have


@checked
@dataclass(frozen=True)
class Column:
    """One column of a table: what its values must be, and what the model sees of them.

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
        standardize: Whether center and scale are the mean and the standard deviation over the training rows of all
            sites, instead. Default: False.
        indicator: Whether a further input says that a value is missing, if a site has at least 5 such rows. Default:
            False.
        missing_values: What stands for a missing value, besides empty cells, NA, NaN, null and none, such as ("?",
            "-9"). Numbers are compared as numbers. Default: ().

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
    standardize: bool = False
    indicator: bool = False
    missing_values: tuple[str | float, ...] = ()

    def completed(self) -> dict[str, tuple[str, ...]]:
        """Returns its classes as values are compared with them: 4 for 4.0."""
        text = tables.whole_number_text if self.type == "label" else tables.category_text
        return {
            "classes": tuple(map(text, self.classes)),
            "missing_values": tuple(dict.fromkeys(map(tables.category_text, self.missing_values))),
        }

    def __post_init__(self):
        given = (self.min, self.max, self.fill, self.center, self.scale)
        if not all(math.isfinite(value) for value in given if value is not None and not isinstance(value, str)):
            raise BadInput(f"column {self.name!r}: min, max, fill, center and scale must be finite")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise BadInput(f"column {self.name!r}: min = {self.min:g} is larger than max = {self.max:g}")
        if self.scale <= 0:
            raise BadInput(f"column {self.name!r}: scale must be > 0, got {self.scale:g}")
        if self.classes and not self.has_classes:
            raise BadInput(f'column {self.name!r}: only type = "label" or "category" has classes, not {self.type}')
        if isinstance(self.fill, str) and self.fill != MEAN and not self.has_classes:
            raise BadInput(f'column {self.name!r}: fill is a number or "{MEAN}", got {self.fill!r}')
        if self.standardize and (self.has_classes or self.has_scale):
            raise BadInput(f"column {self.name!r}: standardize is for numbers that have no center and scale")
        if len(set(self.classes)) < len(self.classes):
            raise BadInput(f"column {self.name!r}: classes lists {named_twice(self.classes)!r} twice")
        for marker in self.missing_values:
            if marker in self.classes:
                raise BadInput(
                    f"column {self.name!r}: {marker!r} is one of its classes, so it cannot stand for a missing value; "
                    "remove it from missing_values or from the classes"
                )

    def known(self, values: np.ndarray) -> np.ndarray:
        """Returns the values of a table with gaps for those that stand for a missing one."""
        return tables.with_gaps(values, self.missing_values)

    @property
    def has_classes(self) -> bool:
        """Whether its values are labels or categories."""
        return self.type in ("label", "category")

    @property
    def has_scale(self) -> bool:
        """Whether it has a center or a scale of its own."""
        return (self.center, self.scale) != (0.0, 1.0)

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest plausible value."""
        return -math.inf if self.min is None else self.min, math.inf if self.max is None else self.max

    @property
    def range(self) -> str:
        """The plausible range in words."""
        if self.min is None or self.max is None:
            ends = {"at least": self.min, "at most": self.max}
            said = " ".join(f"{words} {end:g}" for words, end in ends.items() if end is not None) or "any number"
        else:
            said = f"{self.min:g} to {self.max:g}"
        return f"{said} {self.unit}".rstrip()

    @property
    def kind(self) -> Kind:
        """What the column has, as a table names it."""
        return {"whole": "number", "label": "category"}.get(self.type, self.type)  # type: ignore[return-value]

    @property
    def required(self) -> bool:
        """Whether no value may be missing."""
        return self.fill is None

    @property
    def constant(self) -> float | str | None:
        """The constant that stands for a missing value; None if there is none."""
        return None if self.fill == MEAN else self.fill

    @property
    def open(self) -> bool:
        """Whether something about it follows from the rows of all sites."""
        return self.standardize or self.fill == MEAN or (self.has_classes and not self.classes)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of its inputs, if it is complete."""
        own = [self.name]
        if self.kind == "category":
            own = [*(f"{self.name} = {name}" for name in self.classes), f"{self.name} = other"]
        return (*own, f"{self.name} missing") if self.indicator else tuple(own)

    def transform(self, values: np.ndarray, where: str) -> np.ndarray:
        """Returns the inputs (rows, inputs) in float64, from values as `encoded` returns them, if it is complete."""
        missing = tables.absent(values)
        if self.required and missing.any():
            raise BadInput(tables.no_value(where, self.name, values, missing))
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

    def complaints(self, values: np.ndarray, where: str) -> list[str]:
        """Returns what is wrong with the values of a table, in sentences."""
        try:
            read = tables.encoded(values, self.kind, self.name, where)
        except BadInput as error:
            return [str(error)]
        missing = tables.absent(read)
        wrong = [tables.no_value(where, self.name, values, missing)] if missing.any() and self.required else []
        place = f"{where}, column {self.name!r}"
        if self.kind == "number":
            return wrong + self.implausible(read, place)
        if not self.has_classes:
            return wrong
        as_text = tables.whole_number_text if self.type == "label" else tables.category_text
        texts = np.array([as_text(value) for value in values.tolist()])
        unknown = ~missing & ~np.isin(texts, self.classes)
        if unknown.any():
            kinds = "classes" if self.type == "label" else "categories"
            wrong.append(
                f"{place}, {tables.rows_in_words(unknown)}: {str(texts[unknown][0])!r}, but the contract's {kinds} are "
                f"{list(self.classes)}; write them as the contract does"
            )
        return wrong

    def implausible(self, numbers: np.ndarray, where: str) -> list[str]:
        """Returns what is wrong with the numbers that are there."""
        known = np.isfinite(numbers)
        broken = known & (numbers != np.round(numbers))
        low, high = self.limits
        outside = known & ((numbers < low) | (numbers > high))
        wrong = []
        if self.type == "whole" and broken.any():
            wrong.append(
                f"{where}, {tables.rows_in_words(broken)}: {numbers[broken][0]:g}, but the contract says whole "
                "numbers; is it another column?"
            )
        if outside.any():
            most = outside.sum() > known.sum() / 2
            unit = "most rows are outside, so it is probably another unit or another column: convert it"
            advice = unit if most else "correct the values"
            wrong.append(
                f"{where}, {tables.rows_in_words(outside)}: {numbers[outside][0]:g}, but the contract says "
                f"{self.range}; {advice}, or, if the values are right, ask the founder to widen the range"
            )
        return wrong


def named_twice(names: Sequence[str]) -> str:
    """Returns the first name that is there a second time."""
    return next(name for k, name in enumerate(names) if name in names[:k])
