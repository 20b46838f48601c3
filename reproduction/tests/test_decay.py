"""The recorded tables of what keeps models from learning rows by heart."""

import json

import pytest

from reproduction import alone, decay

DECAY = json.loads(decay.FILE.read_text())
ALONE = json.loads(alone.FILE.read_text())


def test_all_problems_are_recorded():
    assert list(DECAY) == list(decay.NAMES)
    assert list(ALONE) == list(alone.PROBLEMS)


@pytest.mark.parametrize("name", decay.NAMES)
@pytest.mark.quick_cases("all")
def test_decay_makes_no_problem_worse_beyond_its_interval(name):
    *_, gain, half = decay.differences(DECAY[name])
    assert gain >= -half


@pytest.mark.parametrize("name", ["correlated columns", "network, few rows", "network, many rows"])
def test_decay_helps_where_rows_are_learned_by_heart(name):
    before, after, gain, half = decay.differences(DECAY[name])
    assert gain > half
    assert after < 0.92 * before


@pytest.mark.parametrize("name", list(alone.PROBLEMS))
@pytest.mark.quick_cases("all")
def test_site_alone_is_as_good_as_its_rival_and_no_worse_than_before(name):
    row = ALONE[name]
    assert row["alone"] <= 1.02 * min(row.get("rival", row["before"]), 2.0)
    assert row["alone"] <= 1.02 * row["before"]
