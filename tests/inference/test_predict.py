"""Predictions for new rows of a table, arrays and images: values, classes, bad rows, notes and metrics."""

import csv
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fairmesh as fm
from fairmesh.cli.main import app
from fairmesh.errors import BadInput
from tests.inference.runs import table_run, write_table
from tests.refusals import missing_from, refused


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    return table_run(tmp_path_factory.mktemp("labels"), "outcome")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    return table_run(tmp_path_factory.mktemp("numbers"), "pressure", rounds=150)


def lines_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_predict_applies_the_preprocessing_of_the_training(labels, tmp_path):
    table = write_table(tmp_path / "new.csv", seed=3)
    found = fm.predict(fm.inference.load_model(labels), table)
    truths = [row["outcome"] for row in lines_of(table)]
    right = sum(a == b for a, b in zip(found.labels, truths)) / len(truths)
    assert right > 0.8
    assert found.metrics["accuracy"] == pytest.approx(right)
    assert found.classes == ("ill", "well")
    np.testing.assert_allclose(found.values.sum(1), 1.0, rtol=1e-5)


def test_predict_does_not_need_the_target_and_ignores_the_order_of_columns(labels, tmp_path):
    whole = write_table(tmp_path / "a.csv", rows=20)
    other = write_table(tmp_path / "b.csv", rows=20, columns=["smokes", "ward", "age"])
    model = fm.inference.load_model(labels)
    found = fm.predict(model, other)
    np.testing.assert_array_equal(found.values, fm.predict(model, whole).values)
    assert found.metrics == {}


def test_predict_takes_a_result_a_folder_or_a_model(tmp_path):
    experiment = fm.Experiment(fm.data.Digits(nodes=2, odd=0), algorithm=fm.algorithms.DSGD(0.5), rounds=3)
    result = fm.run(experiment, out=tmp_path / "run")
    images = result.problem.sites[0].test.inputs[:4]
    sources = (result, tmp_path / "run", fm.inference.load_model(tmp_path / "run"))
    first, *others = (fm.predict(source, images).values for source in sources)
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_predict_gives_numbers_in_the_targets_units(numbers, tmp_path):
    table = write_table(tmp_path / "new.csv", seed=3)
    found = fm.predict(fm.inference.load_model(numbers), table)
    truths = np.array([float(row["pressure"]) for row in lines_of(table)])
    assert np.corrcoef(found.values[:, 0], truths)[0, 1] > 0.8
    assert abs(found.values.mean() - truths.mean()) < 5
    assert found.metrics["rmse"] < truths.std()
    assert found.labels == []


def columns(**changes):
    return {"age": ["50", "60"], "ward": ["north", "south"], "smokes": ["yes", "no"]} | changes


def test_bad_rows_have_no_prediction_and_are_named(labels):
    found = fm.predict(fm.inference.load_model(labels), columns(age=["old", "60"]))
    assert list(found.bad) == [0]
    assert missing_from(found.bad[0], "age", "old") == []
    assert [label is None for label in found.labels] == [True, False]
    assert found.table()[1][1:] == ["", "", ""]


def test_unknown_categories_and_rows_without_a_target_are_told(labels):
    given = columns(ward=["attic", "south"], outcome=["ill", ""])
    found = fm.predict(fm.inference.load_model(labels), given)
    assert found.metrics["accuracy"] in (0.0, 1.0)  # of one row
    assert all(
        any(not missing_from(note, *words) for note in found.notes) for words in (("ward", "attic"), ("outcome",))
    )


def test_missing_column_and_table_of_bad_rows_are_refused(labels):
    model = fm.inference.load_model(labels)
    given = columns()
    with refused("'ward'", "'Ward'"):
        fm.predict(model, given | {"Ward": given.pop("ward")})
    with refused("'age'", "height"):
        fm.predict(model, {"height": [1, 2]})
    with refused("age", "row 1"):
        fm.predict(model, columns(age=["old", "young"]))


def array_model(dtype="float32"):
    return fm.inference.TrainedModel(torch.nn.Flatten(), (3,), dtype, "logits", ("a", "b", "c"))


def test_predict_of_arrays(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.eye(3), y=np.array([0, 1, 1]))
    found = fm.predict(array_model(), tmp_path / "x.npz")
    assert found.labels == ["a", "b", "c"]
    assert found.metrics["accuracy"] == pytest.approx(2 / 3)


def test_arrays_of_another_shape_or_type_are_refused():
    with refused("shape", "(4,)", "(3,)"):
        fm.predict(array_model(), np.zeros((2, 4)))
    with refused("uint8", "float32"):
        fm.predict(array_model(), np.zeros((2, 3), np.uint8))


def test_predict_of_images_takes_their_folders_as_classes(tmp_path):
    from PIL import Image

    for name, grey in (("dark", 10), ("light", 200)):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 2), grey).save(tmp_path / name / "one.png")
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8, 2))
    weight = torch.tensor([[-1.0], [1.0]]).expand(2, 8)
    module[1].load_state_dict({"weight": weight, "bias": torch.tensor([8.0, 0.0])})
    found = fm.predict(fm.inference.TrainedModel(module, (2, 4), "uint8", "logits", ("dark", "light")), tmp_path)
    assert found.labels == ["dark", "light"]
    assert list(found.rows) == ["dark/one.png", "light/one.png"]
    assert found.metrics["accuracy"] == 1.0


def test_command_writes_one_row_per_row_of_the_table(labels, tmp_path):
    table, out = write_table(tmp_path / "new.csv", rows=12), tmp_path / "predictions.csv"
    done = CliRunner().invoke(app, ["predict", str(labels), str(table), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(lines_of(out)) == len(found["predictions"]) == 12
    assert set(lines_of(out)[0]) == {"row", "prediction", "probability ill", "probability well"}
    assert found["bad_rows"] == []
    assert 0 <= found["metrics"]["accuracy"] <= 1


def test_command_exports_next_to_the_run(labels):
    done = CliRunner().invoke(app, ["export", str(labels), "--safetensors", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["file"] == str(labels / "exported.safetensors")
    assert (labels / "exported.safetensors").exists()
    for flags in ([], ["--onnx", "--safetensors"]):
        assert isinstance(CliRunner().invoke(app, ["export", str(labels), *flags]).exception, BadInput)
