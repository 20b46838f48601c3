"""The frontier: recipes, claims and page agree with the recorded results, and the recipes run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fairmesh as fm
from fairmesh.config.overrides import flat_table
from fairmesh.config.tables import to_table
from reproduction.__main__ import app
from reproduction.frontier import claims, page, recipes
from reproduction.frontier.recipes import CIFAR, FASHION, FRONTIER
from reproduction.lines import is_as_its_recipe, lines_of, write_lines
from reproduction.recipes import miniature, rows_of
from reproduction.running import reproduce
from reproduction.verdicts import RECORDED
from tests.refusals import refused

PAGE = Path(__file__).parents[1] / "frontier.md"


@pytest.mark.parametrize("recipe", FRONTIER)
def test_recorded_rows_are_those_of_the_recipes(recipe):
    lines = lines_of(RECORDED, recipe)
    assert [line["row"] for line in lines] == [row.name for row in rows_of(recipe)]
    for line in lines:
        assert is_as_its_recipe(line), line["row"]


def test_ablation_rows_try_twelve_candidates_and_have_five_placements():
    for line in lines_of(RECORDED, "frontier_ablation"):
        assert len(line["search"]["tried"]) == 12, line["row"]
        assert line["seeds"] == [0, 1, 2, 3, 4]


def test_defaults_of_tracked_ad_gda_are_those_that_the_choice_gives():
    chosen, _ = claims.chosen_defaults(RECORDED)
    ours = flat_table(to_table(fm.TrackedADGDA()))
    assert {name: ours[name] for name in chosen} == chosen


def test_defaults_are_judged_on_problems_that_were_not_used_to_choose_them():
    judged = {repr(row.experiment.data) for row in recipes.defaults()}
    assert not judged & {repr(row.experiment.data) for row in recipes.choice()}


def test_coarse_images_are_the_means_of_their_tiles(monkeypatch):
    images = torch.arange(2 * 28 * 28).reshape(2, 28, 28).remainder(251).to(torch.uint8)
    held = images, torch.tensor([3, 4])
    monkeypatch.setattr(fm.data.FashionMNIST, "sites", lambda self: [fm.Site(held, held, name="one")])
    data = fm.data.ImportedData("reproduction.frontier.coarse:sites", {"nodes": 20, "pixels": 7})
    (site,) = data.sites()
    expected = images[1, 4:8, 24:28].double().mean() / 255
    for inputs, targets in (site.train, site.test):
        assert inputs.shape == (2, 7, 7)
        assert float(inputs[1, 1, 6]) == pytest.approx(float(expected), rel=1e-5)
        assert targets.tolist() == [3, 4]
    other = fm.data.ImportedData(data.path, {"nodes": 20, "pixels": 10})
    with refused("pixels", 28, 10):
        other.sites()
    assert len({data, replace(data), other}) == 2  # rows are grouped by their data, and their problems kept by model
    models = [fm.models.ImportedModel("somewhere:made", {"units": units}) for units in (3, 3, 4)]
    assert len(set(models)) == 2


def test_page_has_the_recorded_tables():
    text = PAGE.read_text()
    for name in page.tables(RECORDED):
        assert f"<!-- {name} -->" in text
    assert page.filled(text, RECORDED) == text
    assert PAGE.with_suffix(".svg").read_text().startswith("<?xml")


def test_frontier_command_shows_the_claims():
    shown = CliRunner().invoke(app, ["frontier", "--show", "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)["claims"]
    assert found == claims.claims(RECORDED)
    assert all(set(one) == {"claim", "measured", "required", "holds"} for one in found)
    assert any(CIFAR in one["claim"] for one in found)
    assert any(FASHION in one["claim"] for one in found)


def test_claims_that_do_not_hold_are_discussed_on_the_page():
    failing = [one for one in claims.claims(RECORDED) if not one["holds"]]
    short = {one["claim"] for one in failing}
    prose = "\n".join(line for line in PAGE.read_text().splitlines() if not line.startswith("|"))
    for one in failing:  # the text outside of the tables gives both numbers
        assert f"{one['measured']:g}" in prose
        assert f"{one['required']:g} bits" in prose
    assert short == {
        "Fashion-MNIST-50: bits a parameter and edge until worst-node accuracy is 53.5 %, at most (moonshot)",
    }


def _line(row: str, worst: list[float], at: list[float], sent: list[int], diverged: list[int]) -> dict:
    return {
        "recipe": "frontier_best",
        "row": row,
        "protocol": "frontier",
        "parameters": 100,
        "final": {"worst": worst, "worst_group": worst},
        "curve": {"worst": at, "worst_group": at, "bytes_busiest_node": sent},
        "diverged": diverged,
    }


def _of(found: list[dict], text: str) -> dict:
    (one,) = [claim for claim in found if text in claim["claim"]]
    return one


def test_claims_hold_by_the_recorded_numbers(tmp_path):
    long = _line(f"{FASHION}: compressed, long", [60.0, 74.0], [67.0], [1], [])
    short = _line(f"{FASHION}: compressed, short", [60.0], [50.0, 53.5, 60.0], [10_000, 60_000, 90_000], [])
    write_lines(tmp_path, "frontier_best", [long, short])
    found = claims.claims(tmp_path)
    assert _of(found, f"{FASHION}: worst-node accuracy, compressed") == {
        "claim": f"{FASHION}: worst-node accuracy, compressed, percent, at least",
        "measured": 67.0,
        "required": 66.0,
        "holds": True,
    }
    bits = [one for one in found if one["claim"].startswith(f"{FASHION}: bits")]
    assert [(one["measured"], one["holds"]) for one in bits] == [(1200, True), (1200, False)]  # 8 * 60,000 / (4 * 100)
    missing = _of(found, f"{CIFAR}: worst-contrast accuracy")
    assert missing["measured"] is None
    assert missing["holds"] is False


def test_claims_ignore_a_run_that_diverged(tmp_path):
    write_lines(tmp_path, "frontier_best", [_line(f"{FASHION}: compressed, long", [80.0, 80.0], [80.0], [1], [1])])
    one = _of(claims.claims(tmp_path), f"{FASHION}: worst-node accuracy, compressed")
    assert (one["measured"], one["holds"]) == (None, False)


@pytest.mark.slow
@pytest.mark.parametrize("tracked", [True, False])
def test_ablation_rows_run_in_miniature(tmp_path, monkeypatch, tracked):
    """On digits, because the recipes' own data need files."""
    rows = [row for row in recipes.ablation() if isinstance(row.experiment.algorithm, fm.TrackedADGDA) == tracked]
    row = next(row for row in rows if row.name.startswith(FASHION))
    small = replace(
        row, experiment=replace(row.experiment, data=fm.data.Digits(split="class"), model=fm.models.Logistic())
    )
    monkeypatch.setitem(FRONTIER, "frontier_ablation", lambda: [small])
    assert reproduce(["frontier_ablation"], tmp_path, change=miniature) == {}
    (line,) = lines_of(tmp_path, "frontier_ablation")
    assert line["row"] == row.name
    assert len(line["search"]["tried"]) == 2
