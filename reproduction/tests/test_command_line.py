"""`python -m reproduction` as a person types it."""

import json

import pytest
from typer.testing import CliRunner

from fairmesh.errors import BadInput
from reproduction.__main__ import app
from reproduction.paper import CELLS
from tests.data.test_sources import write_mnist


def _called(*arguments: str):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_verdicts_are_one_json_object_with_every_printed_number_of_the_paper():
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


def test_verdicts_are_also_a_table_with_the_orderings_under_it():
    lines = _called("verdicts").stdout.splitlines()
    assert lines[0].split("\t") == ["cell", "paper", "formula", "published", "verdict"]
    assert len(lines) > 1 + len(CELLS)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["table7"], "reproduce knows no 'table7': choose from all, theory"),
        (["all", "table2"], "'all' stands alone"),
        (["verdicts", "--out", "nowhere"], "nowhere holds no folder 'results'"),
        (["table2", "--device", "tpu"], "unknown device 'tpu'"),
        (["table2", "--data", "nowhere"], "--data nowhere: no such folder"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_with_the_reason(arguments, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=reason):
        _called(*arguments)
    assert not any(tmp_path.iterdir())


def test_a_recipe_in_miniature_leaves_results_figures_and_a_page_and_goes_on_where_it_was(tmp_path):
    write_mnist(tmp_path / "data" / "fashion-mnist", train=1000, test=100)
    command = ["table4a", "--quick", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIRMESH_DATA", "")  # and back to what it was: the command sets it
        first = _called(*command)
        again = _called(*command)
    assert first.exit_code == again.exit_code == 0
    assert "6 rows in 2 batched runs" in first.stderr
    assert "rows in" not in again.stderr
    page = (tmp_path / "out" / "REPRODUCTION.md").read_text(encoding="utf-8")
    assert "**In miniature**" in page
    assert len((tmp_path / "out" / "results" / "table4a.jsonl").read_text().splitlines()) == 6


def test_miniature_and_full_results_do_not_share_a_folder(tmp_path):
    results = tmp_path / "out" / "results"
    results.mkdir(parents=True)
    (results / "table4a.jsonl").write_text("")
    with pytest.raises(BadInput, match="holds results of full runs; give another --out"):
        _called("table4a", "--quick", "--out", str(tmp_path / "out"))
    (results / "MINIATURE").touch()
    with pytest.raises(BadInput, match="holds results in miniature; give another --out"):
        _called("table4a", "--out", str(tmp_path / "out"))
