"""Exported files: their outputs, their description, and predictions by a stranger who has no fairmesh."""

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import fairmesh as fm
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.tables import encoded
from fairmesh.inference import export as exporting
from fairmesh.inference.predictor import Predictor, TableInputs
from tests import toys
from tests.inference.runs import table_run, write_table
from tests.refusals import refused

EXAMPLE = Path(__file__).parents[2] / "examples" / "predict_without_fairmesh.py"
SLOW = [pytest.param(format, marks=pytest.mark.slow) for format in ("onnx", "torch-export")]
FORMATS = ["safetensors", *SLOW]


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    return table_run(tmp_path_factory.mktemp("labels"), "outcome")


def digits_model(**changes):
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3))
    return replace(fm.inference.TrainedModel(module.eval(), (2, 3), "uint8", "logits"), **changes)


@pytest.mark.parametrize("format", FORMATS)
def test_export_of_arrays_says_what_it_takes(tmp_path, format):
    about = fm.export(digits_model(classes=("a", "b", "c")), tmp_path / "file", format)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert about["largest_difference"] < 1e-5
    assert (about["input"]["shape"], about["input"]["dtype"]) == ([2, 3], "uint8")
    assert about["output"]["classes"] == ["a", "b", "c"]
    assert about["fairmesh"] == fm.__version__


def test_export_of_weights_has_the_description(tmp_path):
    fm.export(digits_model(), tmp_path / "file", "safetensors")
    with safe_open(tmp_path / "file", "pt") as file:
        about = json.loads(file.metadata()["fairmesh"])
        assert set(file.keys()) == {"1.weight", "1.bias"}
    assert len(about["weights_sha256"]) == 64


@pytest.mark.parametrize("format", FORMATS)
def test_export_that_differs_from_pytorch_leaves_no_file(tmp_path, monkeypatch, format):
    write, read = exporting._FORMATS[format]

    def read_wrongly(model, path):
        run = read(model, path)
        return lambda *inputs: tuple(part + 0.01 for part in run(*inputs))

    monkeypatch.setattr(exporting, "_FORMATS", {format: (write, read_wrongly)})
    with refused("PyTorch", 0.01):
        fm.export(digits_model(), tmp_path / "file", format)
    assert list(tmp_path.iterdir()) == []


def test_unknown_format_is_refused(tmp_path):
    with refused("format", "tflite"):
        fm.export(digits_model(), tmp_path / "file", "tflite")


@pytest.mark.slow
def test_model_that_cannot_be_traced_is_refused_with_a_remedy(tmp_path):
    module = toys.module(lambda self, inputs: inputs if float(inputs.sum()) > 0 else -inputs)
    model = fm.inference.TrainedModel(module, (3,), "float32", "numbers")
    with refused("torch.export", "safetensors"):
        fm.export(model, tmp_path / "file", "torch-export")
    assert list(tmp_path.iterdir()) == []


COLUMNS = (
    fm.data.Column("age", "number", fill=50.0, center=50.0, scale=10.0, indicator=True),
    fm.data.Column("ward", "category", classes=("north", "south"), fill="mean", indicator=True),
    fm.data.Column("unit", "category", fill="b", classes=("a", "b")),
    fm.data.Column("kind", "category", classes=("x", "y"), fill="mean"),
    fm.data.Column("smokes", "yes-no", fill=0.25, center=0.25, scale=0.5),
    fm.data.Column("since", "date", fill=100.0, center=100.0, scale=30.0),
)
VALUES = {
    "age": ["61.5", "", "48"],
    "ward": ["south", "", "attic"],
    "unit": ["a", "", "z"],
    "kind": ["y", "", "z"],
    "smokes": ["yes", "", "no"],
    "since": ["1970-03-01", "", "2020-02-29"],
}


def raw_values(table: Preprocessing, columns) -> torch.Tensor:
    """Returns columns as `TableInputs` takes them."""
    made = []
    for column in table.columns:
        values = encoded(columns[column.name], column.kind, column.name, "here")
        if column.kind == "category":
            place = {None: np.nan} | {name: k for k, name in enumerate(column.classes)}
            values = np.array([place.get(value, -1.0) for value in values], np.float64)
        made.append(values)
    return torch.from_numpy(np.stack(made, axis=1))


def test_table_in_the_graph_is_the_preprocessing():
    made = Preprocessing(COLUMNS, fm.data.Column("ill", "label", classes=("no", "yes")))
    columns = {name: np.array(values) for name, values in VALUES.items()}
    found = TableInputs(made)(raw_values(made, columns))
    np.testing.assert_array_equal(found.numpy(), made.transform(columns))


@pytest.mark.parametrize(
    ("output", "wanted"),
    [("logits", [0.5, 0.5]), ("log-probabilities", [1.0, 1.0]), ("logit", [0.5, 0.5]), ("numbers", [0.0, 0.0])],
)
def test_predictor_finishes_what_the_module_returns(output, wanted):
    assert Predictor(torch.nn.Identity(), output)(torch.zeros(1, 2))[0].tolist() == wanted


@pytest.mark.parametrize("ending", [".onnx", pytest.param(".pt2", marks=pytest.mark.slow)])
@pytest.mark.quick_cases(1)
def test_stranger_gets_the_predictions_from_the_file_alone(labels, tmp_path, ending):
    file, table = tmp_path / f"model{ending}", tmp_path / "new.csv"
    write_table(table, rows=40, seed=7)
    fm.export(labels, file, "onnx" if ending == ".onnx" else "torch-export")
    without = f"import runpy, sys; sys.modules['fairmesh'] = None; sys.argv = {['x', str(file), str(table)]!r}; "
    code = without + f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, check=True)
    header, *rows = csv.reader(done.stdout.splitlines())
    wanted = fm.predict(fm.inference.load_model(labels), table)
    assert header == ["prediction", *wanted.classes]
    assert [row[0] for row in rows] == wanted.labels
    np.testing.assert_allclose([[float(v) for v in row[1:]] for row in rows], wanted.values, atol=1e-5)
