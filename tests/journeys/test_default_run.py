"""A table with all defaults, up to the model that each site should use: predicted, exported, moved, and reported."""

import json
import shutil

import pytest

from tests.journeys.patients import COLUMNS, patients, write_table
from tests.journeys.user import User


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    user = User(tmp_path_factory.mktemp("default-run"))
    other = {"yes": "no", "no": "yes"}  # hospital 2 writes down who is well
    rows = [[*row[:-1], other[row[-1]] if row[1] == "hospital 2" else row[-1]] for row in patients(7, seed=3)]
    write_table(user.folder / "patients.csv", COLUMNS, rows)
    write_table(user.folder / "new.csv", COLUMNS[2:5], [row[2:5] for row in rows[:20]])
    seen = user.runs("fairmesh run patients.csv --target outcome --site hospital --unit patient_id --set rounds=150")
    user.runs("fairmesh report runs/patients")
    moved = shutil.move(user.folder / "runs" / "patients", user.folder / "archive")
    return user, seen, moved


def probabilities(user: User, run, options: str = "") -> list[str]:
    user.runs(f"fairmesh predict {run} new.csv --out predicted.csv {options}")
    return (user.folder / "predicted.csv").read_text().splitlines()


@pytest.mark.slow
def test_terminal_report_and_card_begin_with_what_the_run_brought(walked):
    _, seen, run = walked
    told = json.loads((run / "report.json").read_text())["runs"][0]
    assert [text.split(":")[0] for text in told["headline"]] == ["Training together", "Weights", "Which model"]
    card = (run / "model-card.md").read_text()
    for text in told["headline"]:
        assert text in seen
        assert text.split(": ", 1)[1][:60] in card
    assert len(told["site_models"]) == 7
    assert all(site["sentence"] in card for site in told["site_models"])


@pytest.mark.slow
def test_moved_run_predicts_and_exports_with_the_model_that_a_site_should_use(walked):
    user, _, run = walked
    personal = json.loads((run / "summary.json").read_text())["personal"][0]["sites"]
    assert next(site["uses"] for site in personal if site["name"] == "hospital 2") != "common"
    common, own = probabilities(user, run), probabilities(user, run, "--site 'hospital 2'")
    assert len(common) == len(own) == 21
    assert common != own
    assert "--site NAME" in user.runs(f"fairmesh predict {run} new.csv")
    user.runs(f"fairmesh export {run} --onnx --site 'hospital 2' --out own.onnx")
    assert (user.folder / "own.onnx").stat().st_size > 0
    assert "hospital 7" in user.runs(f"fairmesh predict {run} new.csv --site 'hospital 77'", code=2)
