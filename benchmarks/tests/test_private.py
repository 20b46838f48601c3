"""What a private round takes next to a plain one, recorded with `python -m benchmarks private --device cuda --json`."""

import json
from pathlib import Path

import pytest

from benchmarks.private import CASES, timing
from benchmarks.rounds import Setting
from fairmesh.problems.models import Logistic

RECORDED = json.loads((Path(__file__).parents[1] / "results" / "private-h200.json").read_text())


@pytest.mark.parametrize("how", ["captured", "fused"])
def test_recorded_private_rounds_take_at_most_three_times_as_long_and_five_times_for_a_cnn(how):
    ratios = {row["case"]: row["private_ms"] / row["plain_ms"] for row in RECORDED[how]}
    assert set(ratios) == set(CASES)
    for case, ratio in ratios.items():
        assert 1.0 < ratio <= (5.0 if "cnn" in case else 3.0)


def test_private_round_is_timed_next_to_a_plain_one():
    row = timing("small", Setting(3, 100, (1, 4, 4), 3, Logistic(), 20), "cpu")
    assert min(row.plain_ms, row.private_ms) > 0
    assert 20 < row.units <= 100
