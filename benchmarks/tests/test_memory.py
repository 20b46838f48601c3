"""`python -m benchmarks memory`, and the results recorded with it."""

import json
from pathlib import Path

import pytest

from benchmarks import memory

RECORDED = json.loads((Path(__file__).parents[1] / "results" / "memory-cpu.json").read_text())["cases"]


@pytest.mark.parametrize("one", RECORDED, ids=lambda one: f"{one['case']} {one['tuned']}")
def test_recorded_runs_took_no_more_memory_than_they_announced(one):
    assert 1.0 <= memory.MemoryUse(**one).ratio <= 2.1


@pytest.mark.slow  # trains a transformer at eight nodes
def test_run_takes_no_more_memory_than_it_announces():
    for use in memory.uses(["vit-8 with dropout ad-gda"]):
        assert 1.0 <= use.ratio <= 2.5
