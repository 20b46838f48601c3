"""A trained model as one module from raw inputs to predictions: what exported files hold."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fairmesh.data.columns import Column
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.tables import column_of, encoded

Output = Literal[
    "logits", "log-probabilities", "logit", "numbers", "scores", "structure"
]  # what a trained module returns


class TableInputs(nn.Module):
    """The preprocessing of a table as tensor operations.

    It takes one float64 number per row and column, in the order of the columns: numbers as they are, yes and no as 1
    and 0, a date as days since 1970-01-01, a category as its place in `categories`, from 0, and -1 for any other. NaN
    stands for a missing value.

    Args:
        preprocessing: The preprocessing, frozen with the run.
    """

    def __init__(self, preprocessing: Preprocessing):
        super().__init__()
        rows: list[dict[str, Any]] = []
        for k, column in enumerate(preprocessing.columns):
            fill = torch.nan if column.constant is None else _code(column, column.constant)
            shared = {"source": k, "fill": fill, "center": column.center, "scale": column.scale}
            if column.kind == "category":
                rows += [shared | {"is_equal": 1, "code": code} for code in range(len(column.classes))]
                marked = column.indicator and column.constant is None
                rows.append(shared | {"is_other": 1, "count": len(column.classes), "missing_is_other": not marked})
            else:
                rows.append(shared | {"is_number": 1})
            if column.indicator:
                rows.append(shared | {"is_missing": 1})
        for name in ("fill", "center", "scale", "code", "count"):
            values = [float(row.get(name, 0.0)) for row in rows]
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64), persistent=False)
        for name in ("is_number", "is_equal", "is_other", "missing_is_other"):
            values = [bool(row.get(name, False)) for row in rows]
            self.register_buffer(name, torch.tensor(values), persistent=False)
        self.register_buffer("source", torch.tensor([int(row["source"]) for row in rows]), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        """Returns the inputs that the model sees (rows, inputs), float32.

        Args:
            values: The raw values (rows, columns), float64.
        """
        chosen = values.index_select(1, self.source)  # type: ignore[arg-type]
        missing = chosen.isnan()
        filled = torch.where(missing, self.fill, chosen)  # type: ignore[call-overload]
        still = filled.isnan()
        number = (filled - self.center) / self.scale  # type: ignore[operator]
        equal = (filled == self.code).double()
        outside = (filled < 0) | (filled >= self.count)  # type: ignore[operator]
        other = (outside | (still & self.missing_is_other)).double()  # type: ignore[operator]
        made = torch.where(self.is_other, other, missing.double())  # type: ignore[call-overload]
        made = torch.where(self.is_equal, equal, made)  # type: ignore[call-overload]
        return torch.where(self.is_number, number, made).float()  # type: ignore[call-overload]


def _code(column: Column, value: Any) -> float:
    if column.kind != "category":
        return float(value)
    return float(column.classes.index(value)) if value in column.classes else -1.0


def raw_values(preprocessing: Preprocessing, columns: Mapping[str, Any], where: str) -> np.ndarray:
    """Returns a table as `TableInputs` takes it (rows, columns), float64."""
    made = []
    for column in preprocessing.columns:
        values = encoded(column_of(columns, column.name, where), column.kind, column.name, where)
        if column.kind == "category":
            values = np.array([np.nan if value is None else _code(column, value) for value in values], np.float64)
        made.append(values)
    return np.stack(made, axis=1)


class Predictor(nn.Module):
    """A trained module from raw inputs to predictions.

    Args:
        module: The trained module.
        output: What it returns.
        preprocessing: How rows of a table become its inputs; None if its inputs are arrays. Default: None.
    """

    def __init__(self, module: nn.Module, output: Output, preprocessing: Preprocessing | None = None):
        super().__init__()
        self.module = module
        self.output: Output = output
        self.table = None if preprocessing is None else TableInputs(preprocessing)
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the predictions: probabilities of the classes, or numbers.

        Args:
            inputs: Raw values of a table as `TableInputs` takes them, or arrays as the sites' data has them: bytes are
                scaled to [0, 1].
        """
        if self.table is not None:
            inputs = self.table(inputs)
        elif inputs.dtype == torch.uint8:
            inputs = inputs.float() * (1.0 / 255.0)
        elif inputs.is_floating_point():
            inputs = inputs.float()
        return finished(self.module(inputs), self.output)


def finished(outputs: Tensor, output: Output) -> Tensor:
    """Returns predictions from what a module returns."""
    if output == "logits":
        return outputs.softmax(dim=-1)
    if output == "log-probabilities":
        return outputs.exp()
    return outputs.sigmoid() if output == "logit" else outputs
