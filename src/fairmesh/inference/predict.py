"""Applies a trained model to a user's data: rows of a table, arrays or images."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairmesh.data.datasets.own import IMAGES, image_planes, read_arrays, read_image
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.site_files import almost
from fairmesh.data.tables import column_of, encoded, is_missing, read_table
from fairmesh.errors import BadInput, listed
from fairmesh.inference.predictor import finished
from fairmesh.inference.trained import TrainedModel, as_trained
from fairmesh.metrics.base import chosen_metrics
from fairmesh.problems.row_loss import as_floats
from fairmesh.training.result import Result

_BAD_AT_MOST = 1000  # rows that cannot be read; with more, the table is another one
_AT_ONCE = 4096  # rows that the model sees together


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of a model, one per row.

    Args:
        values: Probabilities of the classes, or numbers in the target's units (rows, outputs); NaN for a bad row.
        classes: The names of the classes, in the order of the outputs; empty for numbers.
        rows: What each row is called: its number from 1, or a file.
        bad: Why a row has no prediction, by its place from 0. Default: {}.
        notes: What a reader should know, in sentences. Default: ().
        metrics: Metrics over the rows whose target is known; empty if no targets were given. Default: {}.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> result = fm.run(fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=20))
        >>> images = result.problem.sites[0].test.inputs[:3]
        >>> predictions = fm.predict(fm.inference.TrainedModel.of(result), images)
        >>> len(predictions.labels), predictions.values.shape
        (3, (3, 10))
    """

    values: np.ndarray
    classes: tuple[str, ...]
    rows: Sequence[str]
    bad: Mapping[int, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def labels(self) -> list[str | None]:
        """The most probable class of each row, or None for a bad row. Nothing for numbers."""
        if not self.classes:
            return []
        if len(self.classes) == 2 and self.values.shape[1] == 1:  # the probability of the second one
            best = (self.values[:, 0] > 0.5).astype(int)
        else:
            best = np.nan_to_num(self.values, nan=-np.inf).argmax(1)
        return [None if k in self.bad else self.classes[int(one)] for k, one in enumerate(best)]

    def table(self) -> list[list[Any]]:
        """Returns a header and one line per row, as a .csv file has them. Cells of bad rows are empty."""
        width, labels = self.values.shape[1], self.labels
        if not self.classes:
            header = ["row", *(["prediction"] if width == 1 else [f"prediction {k}" for k in range(width)])]
        elif width == len(self.classes):
            header = ["row", "prediction", *(f"probability {name}" for name in self.classes)]
        else:
            header = ["row", "prediction", "probability"]
        lines: list[list[Any]] = [header]
        for k, row in enumerate(self.rows):
            cells = [""] * width if k in self.bad else [float(f"{value:.7g}") for value in self.values[k]]
            lines.append([row, *([labels[k] or ""] if self.classes else []), *cells])
        return lines


def predict(
    model: TrainedModel | Result | str | os.PathLike,
    data: Mapping[str, Any] | np.ndarray | Tensor | str | os.PathLike,
    *,
    site: str | None = None,
) -> Predictions:
    """Applies a model to data, with the preprocessing that it was trained with.

    Args:
        model: The result of a run, the run's folder, or a model, such as
            `fm.inference.load_model("runs/mine", site="north")`.
        data: Of a model of a table: its columns by name, or a .csv or .parquet file. Of other models: an array of
            inputs, a .npz file with `x`, an image, or a folder of images. If the target is there, too
            (the target's column, or `y`), metrics are computed.
        site: The site whose model is wanted, of a result or a folder; None for the common model. Default: None.

    Returns:
        One prediction per row. A row that cannot be read has none, and `bad` says why.

    Raises:
        BadInput: The data has another form than the training data, or lacks a column of which no value may be missing.

    Example:
        >>> import fairmesh as fm
        >>> result = fm.run(fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=20))
        >>> predictions = fm.predict(result, result.problem.sites[0].test.inputs[:2])
        >>> predictions.labels[0] in [str(digit) for digit in range(10)]
        True
    """
    model = as_trained(model, site=site)
    if model.form is not None:
        raise BadInput(
            "the model has several inputs or outputs, and fm.predict does not know how to read them; call it yourself, "
            "model.module(**inputs), or fm.export it for other programs"
        )
    if model.preprocessing is not None:
        return _of_table(model, model.preprocessing, data)
    inputs, targets, rows = _read_inputs(model, data)
    if tuple(inputs.shape[1:]) != model.shape:
        raise BadInput(
            f"one input has the shape {tuple(inputs.shape[1:])}, but the model was trained with {model.shape}"
        )
    wanted = getattr(torch, model.dtype)
    if inputs.dtype != wanted and torch.uint8 in (inputs.dtype, wanted):
        raise BadInput(
            f"inputs are {inputs.dtype}, but the model was trained with {wanted}; bytes are scaled to [0, 1], other "
            "numbers are not"
        )
    outputs = _outputs(model, inputs if inputs.dtype == torch.uint8 else inputs.to(wanted))
    names = _class_names(model, outputs.shape[1])
    metrics = {} if targets is None else _metrics(model, outputs, torch.as_tensor(targets))
    return Predictions(finished(outputs, model.output).numpy(), names, rows, {}, [], metrics)


def _class_names(model: TrainedModel, width: int) -> tuple[str, ...]:
    if model.output == "numbers":
        return ()
    return model.classes or tuple(str(k) for k in range(max(2, width)))


def _outputs(model: TrainedModel, inputs: Tensor) -> Tensor:
    """Returns what the module returns for inputs after their preprocessing (rows, outputs)."""
    module = model.predictor.module
    with torch.no_grad():
        outputs = torch.cat([module(as_floats(piece, torch.float32)) for piece in inputs.split(_AT_ONCE)])
    return outputs.reshape(len(outputs), -1)


# Tables


def _of_table(model: TrainedModel, table: Preprocessing, data: Any) -> Predictions:
    if isinstance(data, str | os.PathLike):
        columns, where = read_table(Path(data)), str(data)
    elif isinstance(data, Mapping):
        columns, where = {name: np.asarray(values) for name, values in data.items()}, "the table"
    else:
        names = ", ".join(column.name for column in table.columns)
        raise BadInput(f"the model was trained on a table; give columns by name, or a .csv file, with {names}")
    columns, lacking = _with_empty(table, columns, where)
    needed = {column.name: column.known(column_of(columns, column.name, where)) for column in table.columns}
    count = len(next(iter(needed.values())))
    bad = _unreadable(table, needed)
    if len(bad) > _BAD_AT_MOST or len(bad) == count:
        first = min(bad)
        raise BadInput(f"{where}: {len(bad)} of {count} rows cannot be read; row {first + 1}: {bad[first]}")
    good = np.array([k for k in range(count) if k not in bad])
    outputs = _outputs(model, torch.from_numpy(table.transform({n: v[good] for n, v in needed.items()}, where)))
    values = np.full((count, outputs.shape[1]), np.nan)
    values[good] = finished(outputs, model.output).numpy()
    metrics, notes = {}, lacking + _unknown_categories(table, needed, good)
    if table.target.name in columns:
        target = table.target.known(np.asarray(columns[table.target.name])[good])
        known = np.array([not is_missing(value) for value in target.tolist()], bool)
        if known.any():
            if table.target.type == "label":
                targets = torch.from_numpy(table.labels(target[known], where))
            else:
                targets = torch.from_numpy(encoded(target[known], "number", table.target.name, where))
            metrics = _metrics(model, outputs[torch.from_numpy(known)], targets)
        if not known.all():
            notes.append(f"{int((~known).sum())} rows have no {table.target.name}, so metrics leave them out")
    names = _class_names(model, outputs.shape[1]) if table.target.type == "label" else ()
    return Predictions(values, names, [str(k + 1) for k in range(count)], bad, notes, metrics)


def _with_empty(
    table: Preprocessing, columns: Mapping[str, np.ndarray], where: str
) -> tuple[Mapping[str, np.ndarray], list[str]]:
    """Returns the columns, with missing values for those that a site may lack, and a sentence that names them. Refuses
    a table that lacks others or all of them, or has one under almost the same name."""
    inputs = [column.name for column in table.columns]
    there = [name for name in inputs if name in columns]
    others = columns.keys() - {*inputs, table.target.name}
    lacking = []
    for column in table.columns:
        if column.name in columns:
            continue
        if column.required or not there or almost(column.name, others):
            column_of(columns, column.name, where)
        lacking.append(column.name)
    if not lacking:
        return columns, []
    empty = np.full(len(columns[there[0]]), "")
    note = f"{where} has no column {listed(map(repr, lacking))}; it counts as missing in all rows"
    return {**columns, **dict.fromkeys(lacking, empty)}, [note]


def _unreadable(table: Preprocessing, columns: Mapping[str, np.ndarray]) -> dict[int, str]:
    """Returns why rows cannot be read, by their place from 0."""
    bad: dict[int, str] = {}
    for column in table.columns:
        values = columns[column.name]
        try:
            encoded(values, column.kind, column.name, "")
        except BadInput:
            for k, value in enumerate(values.tolist()):
                try:
                    encoded(np.array([value]), column.kind, column.name, "")
                except BadInput:
                    bad.setdefault(k, f"column {column.name!r} is {str(value)!r}, not a {column.kind}")
        if column.required:
            for k, value in enumerate(values.tolist()):
                if is_missing(value):
                    bad.setdefault(k, f"column {column.name!r} has no value, but none may be missing")
    return bad


def _unknown_categories(table: Preprocessing, columns: Mapping[str, np.ndarray], rows: np.ndarray) -> list[str]:
    notes = []
    for column in table.columns:
        if column.kind != "category":
            continue
        texts = encoded(columns[column.name][rows], column.kind, column.name, "")
        unknown = [text for text in texts if text is not None and text not in column.classes]
        if unknown:
            shown = ", ".join(repr(text) for text in list(dict.fromkeys(unknown))[:3])
            notes.append(
                f"{len(unknown)} rows have a {column.name} that was not in the training data, such as {shown}; it "
                "counts as another category"
            )
    return notes


# Arrays and images


def _read_inputs(model: TrainedModel, data: Any) -> tuple[Tensor, Any, list[str]]:
    """Returns inputs, targets if there are any, and what the rows are called."""
    if isinstance(data, np.ndarray | Tensor):
        inputs, targets = torch.as_tensor(data), None
    elif isinstance(data, Mapping):
        raise BadInput("the model was not trained on a table; give an array, a .npz file or images")
    else:
        path = Path(data)
        if path.is_dir() or path.suffix.lower() in IMAGES:
            return _read_images(model, path)
        if path.suffix.lower() != ".npz":
            raise BadInput(f"{path}: the model was not trained on a table; give a .npz file or images")
        arrays = read_arrays(path)
        if "x" not in arrays:
            raise BadInput(f"{path} has no array 'x'; it has {', '.join(arrays) or 'none'}")
        inputs, targets = torch.from_numpy(np.ascontiguousarray(arrays["x"])), arrays.get("y")
        if targets is not None and len(targets) != len(inputs):
            raise BadInput(f"{path}: x has {len(inputs)} rows, but y has {len(targets)}")
    if inputs.ndim == 0 or len(inputs) == 0:
        raise BadInput("there is no input to predict from")
    return inputs, targets, [str(k + 1) for k in range(len(inputs))]


def _read_images(model: TrainedModel, path: Path) -> tuple[Tensor, Any, list[str]]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGES)
    if not files:
        raise BadInput(f"{path} holds no image, of {', '.join(IMAGES)}")
    if len(model.shape) not in (2, 3) or model.dtype != "uint8":
        raise BadInput(f"the model was not trained on images of files, but on arrays {model.shape} of {model.dtype}")
    grey, size = len(model.shape) == 2, (model.shape[-2], model.shape[-1])
    made = []
    for file in files:
        image = read_image(file, size)
        if grey and image.ndim == 3:
            raise BadInput(f"{file} has colours, but the model was trained on grey images; convert it")
        made.append(image_planes(image, 1 if grey else 3))
    labels = [file.parent.name for file in files]
    place = {name: k for k, name in enumerate(model.classes)}
    targets = np.array([place[label] for label in labels]) if all(label in place for label in labels) else None
    base = path if path.is_dir() else path.parent
    return torch.from_numpy(np.stack(made)), targets, [str(file.relative_to(base)) for file in files]


# Metrics


def _metrics(model: TrainedModel, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Returns metrics of what the module returns; NaN where one is not defined."""
    if model.output == "numbers":
        names, outputs, targets = ["mae", "rmse", "r2"], outputs.reshape(targets.shape).double(), targets.double()
    else:
        names, targets = ["accuracy", "balanced-accuracy"], targets.long()
        names += [] if model.output == "scores" else ["auroc", "brier"]  # which need probabilities
    return {name: float(metric(outputs, targets)) for name, metric in chosen_metrics(names).items()}
