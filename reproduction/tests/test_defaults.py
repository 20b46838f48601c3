"""The page on how to choose has the recorded rows, and its claims hold for them."""

import json
from pathlib import Path
from statistics import mean

import pytest

from reproduction.defaults import ALGORITHMS, PROBLEMS, RESULTS, measured, table

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "choosing.md"
ROWS = json.loads(RESULTS.read_text())


def worst(problem: str, what: str) -> float:
    [row] = [row for row in ROWS if row["problem"] == problem and row["what"].partition(",")[0] == what]
    assert not row["diverged"]
    return 100 * mean(row["worst"])


def test_page_has_the_recorded_rows():
    assert table(ROWS) in PAGE.read_text(encoding="utf-8"), "write it again: python -m reproduction.defaults --show"
    assert {row["problem"] for row in ROWS} == set(PROBLEMS)


@pytest.mark.parametrize("problem", [name for name in PROBLEMS if "digits" in name or "MLP" in name])
def test_defaults_and_advice_do_what_the_page_says(problem):
    assert worst(problem, "advice") >= worst(problem, "best of a grid") - 3
    assert all(worst(problem, "TrackedADGDA") >= worst(problem, name) - 0.5 for name in ALGORITHMS)


def test_objective_without_discount_does_what_the_page_says():
    gains = {name: worst(name, "advice without discount_noise") - worst(name, "advice") for name in PROBLEMS}
    assert gains["hospitals (examples/hospitals.toml)"] == pytest.approx(12.5)
    assert gains["digits, six unusual sites of thirty"] > 1
    assert gains["digits, one class per site"] < -2


@pytest.mark.slow
def test_advice_is_measured_again_within_three_points_of_the_best_of_the_grid():
    rows = {row["what"].partition(",")[0]: 100 * mean(row["worst"]) for row in measured("digits, one class per site")}
    assert rows["advice"] >= rows["best of a grid"] - 3
