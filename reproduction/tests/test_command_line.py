"""`python -m reproduction` as a person types it."""

import json

import pytest
from typer.testing import CliRunner

from reproduction.__main__ import app
from reproduction.page import MINIATURE_NOTE, page
from reproduction.paper import CELLS
from reproduction.recipes import rows_of
from tests.data.test_sources import write_mnist
from tests.refusals import refused


def _called(*arguments: str):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@pytest.mark.slow
def test_verdicts_command_prints_one_json_object_with_every_number_of_the_paper():
    answer = json.loads(_called("verdicts", "--json").stdout)
    cells = {cell["cell"]: cell for cell in answer["cells"]}
    assert list(cells) == [cell.name for cell in CELLS]
    for cell in CELLS:
        found = cells[cell.name]
        assert found["paper"] == {"mean": cell.mean, "std": cell.std}
        assert {"formula", "published", "verdict"} <= set(found)
        if "COOS7" not in cell.name and cell.recipe != "table4b":
            assert {"mean", "std"} <= set(found["published"]) & set(found["formula"])
            assert 10 < found["published"]["mean"] < 100


def test_verdicts_command_prints_a_table_and_the_orderings():
    lines = _called("verdicts").stdout.splitlines()
    assert lines[0].split("\t") == ["cell", "paper", "formula", "published", "verdict"]
    assert len(lines) > 1 + len(CELLS)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["table7"], ["'table7'", "all, theory, ", "table2"]),
        (["all", "table2"], ["'all'", "table2"]),
        (["verdicts", "--out", "nowhere"], ["nowhere", "'results'"]),
        (["table2", "--device", "tpu"], ["'tpu'"]),
        (["table2", "--data", "nowhere"], ["--data", "nowhere"]),
        (["table2", "--show"], ["--show", "frontier", "table2"]),
    ],
)
def test_command_refuses_bad_arguments_and_writes_nothing(arguments, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(*names):
        _called(*arguments)
    assert not any(tmp_path.iterdir())


def test_quick_recipe_writes_results_and_a_page_and_resumes(tmp_path):
    write_mnist(tmp_path / "data" / "fashion-mnist", train=1000, test=100)
    command = ["table4a", "--quick", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIRMESH_DATA", "")  # the command sets it; this restores it
        patch.setattr("reproduction.running.rows_of", lambda recipe: rows_of(recipe)[-1:])
        first = _called(*command)
        again = _called(*command)
    assert first.exit_code == again.exit_code == 0
    assert "[1/1]" in first.stderr
    assert "/1]" not in again.stderr
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert MINIATURE_NOTE in text
    assert text == page(tmp_path / "out" / "results", "figures")
    assert len((tmp_path / "out" / "results" / "table4a.jsonl").read_text().splitlines()) == 1


def test_quick_results_and_full_results_do_not_share_a_folder(tmp_path):
    results = tmp_path / "out" / "results"
    results.mkdir(parents=True)
    (results / "table4a.jsonl").write_text("")
    with refused("full", "--out"):
        _called("table4a", "--quick", "--out", str(tmp_path / "out"))
    (results / "MINIATURE").touch()
    with refused("miniature", "--out"):
        _called("table4a", "--out", str(tmp_path / "out"))
