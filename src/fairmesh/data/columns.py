"""One column of a table: what a contract says about it, and so how it becomes inputs of a model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fairmesh.config.tables import checked
from fairmesh.data.tables import Kind, category_text, encoded, missing_in, no_value, rows_in_words, whole_number_text
from fairmesh.errors import BadInput

MEAN = "mean"  # of a column's fill: by what all sites have


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
        if self.classes and not self.has_classes:
            raise BadInput(f'column {self.name!r}: only type = "label" or "category" has classes, not {self.type}')
        if isinstance(self.fill, str) and self.fill != MEAN and not self.has_classes:
            raise BadInput(f'column {self.name!r}: fill is a number or "{MEAN}", got {self.fill!r}')
        if len(set(self.classes)) < len(self.classes):
            raise BadInput(f"column {self.name!r}: classes lists {named_twice(self.classes)!r} twice")

    @property
    def has_classes(self) -> bool:
        """Whether its values are labels or categories."""
        return self.type in ("label", "category")

    @property
    def range(self) -> str:
        """Returns the plausible range in words."""
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

    def read(self, values: np.ndarray, where: str) -> tuple[np.ndarray, list[str]]:
        """Returns the values of a column, as numbers, NaN for a missing one, if they are numbers, and as texts if they
        are labels; and what is wrong with them, in sentences."""
        missing = missing_in(values)
        wrong = [no_value(where, self.name, missing)] if missing.any() and self.required else []
        if self.has_classes:
            as_text = whole_number_text if self.type == "label" else category_text
            texts = np.array([as_text(value) for value in values.tolist()])
            unknown = ~missing & ~np.isin(texts, self.classes)
            if unknown.any():
                wrong.append(
                    f"{where}, column {self.name!r}, {rows_in_words(unknown)}: {str(texts[unknown][0])!r}, but the "
                    f"contract's {'classes' if self.type == 'label' else 'categories'} are {list(self.classes)}; write "
                    "them as the contract does"
                )
            return texts if self.type == "label" else values, wrong
        try:
            numbers = encoded(values, self.kind, self.name, where)
        except BadInput as error:
            return values, [*wrong, str(error)]
        if self.kind != "number":
            return values, wrong
        return numbers, wrong + self.implausible(numbers, f"{where}, column {self.name!r}")

    def scaled(self, numbers: np.ndarray) -> np.ndarray:
        """Returns numbers as the model sees them, where samples are arrays."""
        filled = numbers if self.fill is None else np.where(np.isnan(numbers), self.fill, numbers)
        return (filled - self.center) / self.scale

    def implausible(self, numbers: np.ndarray, where: str) -> list[str]:
        """Returns what is wrong with the numbers that are there."""
        known = np.isfinite(numbers)
        broken = known & (numbers != np.round(numbers))
        low, high = -math.inf if self.min is None else self.min, math.inf if self.max is None else self.max
        outside = known & ((numbers < low) | (numbers > high))
        wrong = []
        if self.type == "whole" and broken.any():
            wrong.append(
                f"{where}, {rows_in_words(broken)}: {numbers[broken][0]:g}, but the contract says whole numbers; is it "
                "another column?"
            )
        if outside.any():
            most = outside.sum() > known.sum() / 2
            unit = "most rows are outside, so it is probably another unit or another column: convert it"
            advice = unit if most else "correct the values"
            wrong.append(
                f"{where}, {rows_in_words(outside)}: {numbers[outside][0]:g}, but the contract says {self.range}; "
                f"{advice}, or, if the values are right, ask the founder to widen the range"
            )
        return wrong


def named_twice(names: Sequence[str]) -> str:
    """Returns the first name that is there a second time."""
    return next(name for k, name in enumerate(names) if name in names[:k])
