"""Writes a trained model to a file that needs no fairmesh, after its outputs were compared with PyTorch's."""

import copy
import dataclasses
import hashlib
import json
import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import fairmesh
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.errors import BadInput, optional, refusing
from fairmesh.inference import adapters
from fairmesh.inference.predictor import finished
from fairmesh.inference.trained import TrainedModel, Which, as_trained
from fairmesh.numerics import random_streams
from fairmesh.personalization.outcome import PersonalModel
from fairmesh.storage.run_folder import ABOUT, model_file, read_model
from fairmesh.training.result import Result

Format = Literal["onnx", "torch-export", "safetensors", "peft", "merged"]
ENDINGS: dict[str, str] = {
    "onnx": ".onnx",
    "torch-export": ".pt2",
    "safetensors": ".safetensors",
    "peft": "-peft",  # a folder
    "merged": "-merged.safetensors",
}
EXTRA_FILE = f"{ABOUT}.json"  # in a file of torch.export
_ROWS = (1, 17)  # sizes of the batches that outputs are compared on
_RELATIVE, _ABSOLUTE = 1e-4, 1e-5  # the largest difference: rounding errors of float32
_INSTEAD = "its forward may depend on values or on the number of rows. Export its weights with --safetensors"
_HOW = {
    "table": "inputs (rows, columns), float64, in the order of input.columns: numbers as they are, yes and no as 1 and "
    "0, a date as days since 1970-01-01, a category as its place in categories from 0 and -1 for any other; NaN for a "
    "missing value",
    "array": "inputs (rows, ...) as input.shape and input.dtype say, as the training data had them",
    "structure": "the tensors of input.parts (rows, ...), in this order, as the training data had them",
}
_OUTPUTS = {
    "logits": "probabilities of output.classes",
    "log-probabilities": "probabilities of output.classes",
    "logit": "the probability that the target is 1",
    "numbers": "numbers in the target's units",
    "scores": "scores; the largest one is the class",
    "structure": "the tensors of output.parts, as the model returns them",
}


def export(
    source: TrainedModel | Result | str | os.PathLike,
    path: str | os.PathLike,
    format: Format = "onnx",
    *,
    which: Which = "final",
    site: str | None = None,
    replica: int | None = None,
) -> dict[str, Any]:
    """Writes a trained model to a file.

    Files of the formats "onnx" and "torch-export" hold the whole way from raw inputs to predictions: the preprocessing
    of a table, the model, and probabilities of the classes. A model with several inputs or outputs takes and gives its
    tensors in the order of `input.parts` and `output.parts` of the description. Outputs are compared with those of
    PyTorch before the file is left. A file of the format "safetensors" holds the weights. For models with LoRA
    adapters, "peft" is a folder with the adapter as `peft.PeftModel.from_pretrained` reads it, and "merged" a file with
    the weights of the base model, adapters merged, under its own names. All have a description of inputs, classes and
    preprocessing as JSON: in ONNX and safetensors as the metadata "fairmesh", in a file of torch.export as the extra
    file "fairmesh.json", and with an adapter as the file fairmesh.json.

    Args:
        source: The run's folder, a result, or a model.
        path: The file to write; the folder for "peft".
        format: "onnx", which needs `pip install 'fairmesh[export]'`, "torch-export", "safetensors", "peft" or "merged".
            Default: "onnx".
        which: "final", the "best" round or the "time-average"; not used if the source is a model.
            Default: "final".
        site: The site whose own model is wanted; None for the common model. Default: None.
        replica: The number of the replica; None for the chosen one. Default: None.

    Returns:
        The description that the file has, and `largest_difference` of the outputs from PyTorch's.

    Raises:
        BadInput: There is no such model, it cannot be exported, or the file's outputs differ.

    Example:
        >>> import tempfile
        >>> import fairmesh as fm
        >>> result = fm.run(fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=20))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     about = fm.export(result, f"{folder}/digits.safetensors", "safetensors")
        >>> about["input"]["shape"]
        [8, 8]
    """
    if format not in ENDINGS:
        raise BadInput(f"format must be one of {', '.join(ENDINGS)}, got {format!r}")
    model = as_trained(source, which, site=site, replica=replica)
    path, about = Path(path), described(model)
    partial = path.with_name(path.name + ".partial" + ENDINGS[format])
    write, read = _FORMATS[format]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _quiet():
            write(model, about, partial)
            difference = _compared(model, read(model, partial), path)
        if partial.is_dir():
            shutil.copytree(partial, path, dirs_exist_ok=True)
        else:
            os.replace(partial, path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
    return about | {"largest_difference": difference}


def described(model: TrainedModel) -> dict[str, Any]:
    """Returns the description of a model that its exported file has."""
    table, digest = model.preprocessing, hashlib.sha256()
    for name, tensor in sorted(model.module.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    parts: dict[str, Any] = {}
    if model.form is not None:
        taken = {"kind": "structure", "parts": [{"name": n, "dtype": d, "shape": s} for n, d, s in model.parts]}
        parts = {"parts": model.predictor.output_names(*_drawn(model, 2))}
    elif table is None:
        taken = {"kind": "array", "shape": list(model.shape), "dtype": model.dtype}
    else:
        columns = [
            {"name": c.name, "kind": c.kind, "categories": list(c.classes), "missing_values": list(c.missing_values)}
            for c in table.columns
        ]
        taken = {"kind": "table", "columns": columns}
    mixture = {"mixture": model.module.weights} if isinstance(model.module, PersonalModel) else {}
    return {
        "fairmesh": fairmesh.__version__,
        "model": dict(model.about) | mixture,
        "weights_sha256": digest.hexdigest(),
        "input": taken,
        "output": {"kind": model.output, "classes": list(model.classes)} | parts,
        "how": f"{_HOW[taken['kind']]}; outputs are {_OUTPUTS[model.output]}",
        "preprocessing": None if table is None else json.loads(table.to_json()),
    }


# Comparing with PyTorch


def _drawn(model: TrainedModel, rows: int) -> tuple[Tensor, ...]:
    """Returns inputs as the model's predictor takes them, drawn at random but always the same."""
    places = torch.arange(len(model.parts))
    keys = random_streams.keys(torch.tensor(rows), "inputs to compare an export by", 0, places)
    if model.preprocessing is not None:
        return (_drawn_table(keys[0], rows, model.preprocessing),)
    return tuple(_array(key, rows, shape, getattr(torch, dtype)) for key, (_, dtype, shape) in zip(keys, model.parts))


def _drawn_table(key: Tensor, rows: int, table: Preprocessing) -> Tensor:
    """Returns drawn rows of a table, as `TableInputs` takes them."""
    values = random_streams.uniform(key, rows * len(table.columns), torch.float64).reshape(rows, len(table.columns))
    for k, column in enumerate(table.columns):
        if column.kind == "category":
            values[:, k] = (values[:, k] * (len(column.classes) + 1)).floor() - 1  # also one that is not known
        else:
            values[:, k] = column.center + column.scale * (6 * values[:, k] - 3)
        if not column.required and rows > 1:
            values[k % rows, k] = torch.nan
    return values


def _array(key: Tensor, rows: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns drawn numbers (rows, ...): bytes, floats in [-2, 2), or 0 and 1, which any vocabulary has."""
    uniform = random_streams.uniform(key, rows * math.prod(shape), torch.float64).reshape(rows, *shape)
    if dtype == torch.uint8:
        return (uniform * 256).to(dtype)
    return (4 * uniform - 2).to(dtype) if dtype.is_floating_point else (2 * uniform).to(dtype)


def _expected(model: TrainedModel, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns what a file's outputs must be, by PyTorch and fairmesh's own preprocessing."""
    table = model.preprocessing
    if table is None:
        return _without_gradients(model.predictor)(*inputs)
    columns: dict[str, np.ndarray] = {}
    for k, column in enumerate(table.columns):
        values = inputs[0][:, k].numpy()
        if column.kind == "category":
            names = [*column.classes, "a category that no site has"]  # at place -1
            values = np.array([None if np.isnan(v) else names[int(v)] for v in values], object)
        columns[column.name] = values
    seen = torch.from_numpy(table.transform_encoded(columns)).float()
    with torch.no_grad():
        return (finished(model.predictor.module(seen), model.output),)


def _compared(model: TrainedModel, run: Callable[..., tuple[Tensor, ...]], path: Path) -> float:
    """Returns the largest difference between a file's outputs and PyTorch's. Refuses a file that differs."""
    largest = 0.0
    for rows in _ROWS:
        inputs = _drawn(model, rows)
        wanted, found = _expected(model, inputs), run(*inputs)
        shapes = [[tuple(one.shape) for one in outputs] for outputs in (wanted, found)]
        if shapes[0] != shapes[1]:
            raise BadInput(
                f"{path} was not written: for {rows} inputs it would return {shapes[1]} numbers, but PyTorch returns "
                f"{shapes[0]}"
            )
        for one, other in zip(wanted, found):
            apart = (one.double() - other.double()).abs()
            if not bool((apart <= _ABSOLUTE + _RELATIVE * one.double().abs()).all()):
                raise BadInput(
                    f"{path} was not written: its outputs would differ from PyTorch's by up to "
                    f"{float(apart.max()):.3g}; export to another format, and report this"
                )
            largest = max(largest, float(apart.max()) if apart.numel() else 0.0)
    return largest


# Formats


def _program(model: TrainedModel) -> tuple[Any, Any, Any]:
    """Returns the predictor, an example of its inputs, and which of their sizes may differ."""
    example, rows = _drawn(model, 3), {0: torch.export.Dim("rows")}
    return model.predictor, example, (tuple(rows for _ in example),)


def _write_onnx(model: TrainedModel, about: dict[str, Any], path: Path) -> None:
    with optional("export"):
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    module, example, sizes = _program(model)
    with refusing("the model cannot be exported to ONNX", advice=_INSTEAD):
        program: Any = torch.onnx.export(
            module, example, dynamo=True, dynamic_shapes=sizes, input_names=[name for name, _, _ in model.parts],
            output_names=["predictions"] if model.form is None else about["output"]["parts"], verbose=False,
        )  # fmt: skip
        program.model.metadata_props[ABOUT] = json.dumps(about, ensure_ascii=False)
        program.save(path)


def _read_onnx(model: TrainedModel, path: Path) -> Callable[..., tuple[Tensor, ...]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        found = session.run(None, {name: part.numpy() for (name, _, _), part in zip(model.parts, inputs)})
        return tuple(map(torch.from_numpy, found))

    return run


def _write_torch_export(model: TrainedModel, about: dict[str, Any], path: Path) -> None:
    module, example, sizes = _program(model)
    with refusing("the model cannot be exported to torch.export", advice=_INSTEAD):
        program = torch.export.export(module, example, dynamic_shapes=sizes)
        torch.export.save(program, path, extra_files={EXTRA_FILE: json.dumps(about, ensure_ascii=False)})


def _read_torch_export(model: TrainedModel, path: Path) -> Callable[..., tuple[Tensor, ...]]:
    return _without_gradients(torch.export.load(path).module())


def _without_gradients(module: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """Returns a module as a function of its inputs that always gives a tuple."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            found = module(*inputs)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    return run


def _write_safetensors(model: TrainedModel, about: dict[str, Any], path: Path) -> None:
    path.write_bytes(model_file(model.module.state_dict(), about))


def _read_safetensors(model: TrainedModel, path: Path) -> Callable[..., tuple[Tensor, ...]]:
    """Returns the model's own predictor with the weights of the file."""
    return _with_weights(model, copy.deepcopy(model.module), path)


def _with_weights(model: TrainedModel, module: nn.Module, path: Path) -> Callable[..., tuple[Tensor, ...]]:
    module.load_state_dict(read_model(path)[0])
    return _without_gradients(dataclasses.replace(model, module=module).predictor)


def _write_peft(model: TrainedModel, about: dict[str, Any], path: Path) -> None:
    path.mkdir(exist_ok=True)
    adapters.write_adapter(model.module, path)
    (path / EXTRA_FILE).write_text(json.dumps(about, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _read_peft(model: TrainedModel, path: Path) -> Callable[..., tuple[Tensor, ...]]:
    from peft import PeftModel

    def from_folder(inner: Any) -> Any:
        return PeftModel.from_pretrained(inner.unload(), str(path))

    read = dataclasses.replace(model, module=adapters.with_adapters_changed(model.module, from_folder))
    return _without_gradients(read.predictor)


def _write_merged(model: TrainedModel, about: dict[str, Any], path: Path) -> None:
    merged = adapters.with_adapters_changed(model.module, lambda inner: inner.merge_and_unload(safe_merge=True))
    path.write_bytes(model_file(merged.state_dict(), about))


def _read_merged(model: TrainedModel, path: Path) -> Callable[..., tuple[Tensor, ...]]:
    return _with_weights(model, adapters.with_adapters_changed(model.module, lambda inner: inner.unload()), path)


_FORMATS: dict[str, tuple[Callable[..., None], Callable[..., Callable[..., tuple[Tensor, ...]]]]] = {
    "onnx": (_write_onnx, _read_onnx),
    "torch-export": (_write_torch_export, _read_torch_export),
    "safetensors": (_write_safetensors, _read_safetensors),
    "peft": (_write_peft, _read_peft),
    "merged": (_write_merged, _read_merged),
}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch's exporters from printing warnings about themselves."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
