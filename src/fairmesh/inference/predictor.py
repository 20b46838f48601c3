"""A trained model as one module from raw inputs to predictions: what exported files hold."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fairmesh.data.columns import Column
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.numerics import trees
from fairmesh.problems.flat_model import called_with
from fairmesh.problems.outputs import tensors_of
from fairmesh.problems.row_loss import as_floats

# What a trained module returns.
Output = Literal["logits", "log-probabilities", "logit", "numbers", "scores", "structure"]
Form = Any  # [dtype, shape] of one sample of a tensor, or lists and tables of these, as `trees.form` gives them


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


class Predictor(nn.Module):
    """A trained module from raw inputs to predictions.

    Args:
        module: The trained module.
        output: What it returns.
        form: What its inputs are, as `trees.form` gives it; None for one tensor. Default: None.
        preprocessing: How rows of a table become its inputs; None if its inputs are arrays. Default: None.
    """

    def __init__(
        self, module: nn.Module, output: Output, form: Form = None, preprocessing: Preprocessing | None = None
    ):
        super().__init__()
        self.module, self.form = module, form
        self.output: Output = output
        self.table = None if preprocessing is None else TableInputs(preprocessing)
        self.eval()

    def forward(self, *inputs: Tensor) -> Any:
        """Returns the predictions: probabilities of the classes, or numbers; or a tuple of all tensors that the module
        returns, if it returns several.

        Args:
            inputs: Raw values of a table as `TableInputs` takes them; or arrays as the sites' data has them, in the
                order of `named_parts`: bytes are scaled to [0, 1].
        """
        returned = self._returned(*inputs)
        if self.output != "structure":
            return finished(returned, self.output)
        return tuple(part for part in tree_leaves(returned) if isinstance(part, Tensor))

    def _returned(self, *inputs: Tensor) -> Any:
        if self.table is not None:
            return self.module(self.table(*inputs))
        seen = (as_floats(part, torch.float32) for part in inputs)
        return tensors_of(called_with(self.module, next(seen) if self.form is None else _filled(self.form, seen)))

    def output_names(self, *inputs: Tensor) -> list[str]:
        """Returns the names of several outputs: keys of a dictionary, or places in a tuple."""
        with torch.no_grad():
            return [name.strip("[]'") or "outputs" for name, _ in trees.named(self._returned(*inputs), "")]


def is_leaf(form: Form) -> bool:
    """Returns whether a form is that of one tensor."""
    return isinstance(form, list) and len(form) == 2 and isinstance(form[0], str)


def named_parts(form: Form, name: str = "") -> Iterator[tuple[str, str, list[int]]]:
    """Yields name, dtype and shape of each tensor of a form, in a fixed order."""
    if is_leaf(form):
        yield name or "inputs", form[0].removeprefix("torch."), list(form[1])
        return
    for key, part in form.items() if isinstance(form, dict) else enumerate(form):
        yield from named_parts(part, f"{name}.{key}" if name else (key if isinstance(key, str) else f"inputs.{key}"))


def _filled(form: Form, tensors: Iterator[Tensor]) -> Any:
    if is_leaf(form):
        return next(tensors)
    if isinstance(form, dict):
        return {key: _filled(part, tensors) for key, part in form.items()}
    return tuple(_filled(part, tensors) for part in form)


def finished(outputs: Tensor, output: Output) -> Tensor:
    """Returns predictions from what a module returns."""
    if output == "logits":
        return outputs.softmax(dim=-1)
    if output == "log-probabilities":
        return outputs.exp()
    return outputs.sigmoid() if output == "logit" else outputs
