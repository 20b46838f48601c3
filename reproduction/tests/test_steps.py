"""The recorded table of default steps: what it shows, and that it is of the algorithms as they are."""

import math

import pytest

from reproduction.sites.problems import PROBLEMS
from reproduction.steps import (
    FORMER,
    NAMES,
    RESULTS,
    RIVALS,
    SPLITS,
    Task,
    behind,
    cell,
    default,
    grid,
    outcomes_of,
    read,
)

ROWS = read(RESULTS)
BY_ITS_AIM = {("AFL", "noise-numbers")}  # its weights have no limit, and all go to the site whose targets are noise


def test_table_has_every_split_of_every_problem_algorithm_and_step():
    wanted = {
        (problem, rival, what, split)
        for problem in NAMES
        for rival, algorithm in RIVALS.items()
        for what in ("former", *grid(algorithm))
        for split in range(SPLITS)
    }
    assert {(row["problem"], row["rival"], row["what"], row["split"]) for row in ROWS} == wanted


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.quick_cases("all")
def test_default_step_diverges_nowhere_and_ends_nowhere_above_a_constant(rival):
    cells = {problem: cell(ROWS, problem, rival, default(rival)) for problem in NAMES}
    assert not any(found.diverged for found in cells.values())
    above = {problem for problem, found in cells.items() if found.above}
    assert {(rival, problem) for problem in above} <= BY_ITS_AIM


def test_former_steps_diverged_or_ended_above_a_constant_on_the_twins():
    lost = {
        rival: [cell(ROWS, name, rival, "former") for name in NAMES if name.endswith("numbers")] for rival in FORMER
    }
    failing = {rival: sum(found.diverged + found.above for found in cells) for rival, cells in lost.items()}
    assert all(failing[rival] >= 18 for rival in ("AD-GDA", "CHOCO-SGD", "DSGD", "DR-DSGD", "FedAvg", "q-FFL", "TERM"))
    assert failing["DRFA"] == 0


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.quick_cases("all")
def test_default_step_is_near_the_best_of_its_grid(rival):
    gaps = {name: behind(ROWS, name, rival) for name in NAMES}
    labels = [gap for name, gap in gaps.items() if PROBLEMS[name].metric == "accuracy"]
    numbers = [gap for name, gap in gaps.items() if PROBLEMS[name].metric == "r2"]
    assert not any(map(math.isnan, gaps.values()))
    assert sum(labels) / len(labels) < 1.0  # points
    assert sum(numbers) / len(numbers) < 4.0  # percent of RMSE
    assert max(labels) < (7.0 if rival == "DR-DSGD" else 3.0)
    assert max(numbers) < 10.0


@pytest.mark.slow
def test_recorded_rows_can_be_made_again():
    for task in (Task("concept-table", "AD-GDA", "grid", 0), Task("noise-numbers", "FedAvg", "grid", 1)):
        for row in outcomes_of(task):
            (recorded,) = [
                one for one in ROWS if all(one[key] == row[key] for key in ("problem", "rival", "what", "split"))
            ]
            assert recorded["loss"] == pytest.approx(row["loss"], rel=0.02)
