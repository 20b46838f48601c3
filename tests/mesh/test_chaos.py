"""Peers that are killed, cut off and robbed of their disks end where peers left alone end."""

import errno
import json
import os
import statistics

import pytest

from tests.mesh.chaos import NAMES, POINTS
from tests.mesh.scenarios import ROOT, played


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The short form, in a process of its own: nodes are forked, which one that has many threads must not be."""
    figures = tmp_path_factory.mktemp("chaos") / "figures.json"
    played("tests.mesh.chaos", "--short", "--write", str(figures), seconds=400)
    return json.loads(figures.read_text())


@pytest.fixture(scope="module")
def recorded():
    return json.loads((ROOT / "benchmarks" / "results" / "chaos-cpu.json").read_text())


def run(figures, what):
    (found,) = [one for one in figures["runs"] if one["what"] == what]
    return found


@pytest.mark.slow  # test_leaving.py kills nodes too
def test_killed_nodes_end_bit_for_bit_where_they_would_have(short):
    assert short["recoveries"] >= 4
    assert short["recovery_median_s"] <= 5
    assert [one["what"] for one in short["runs"] if not one["identical"]] == []
    done = run(short, "a little of it")
    assert done["kills"] == 3
    assert [point for point, _, _ in done["points"]] == ["sent", "segment begun", "noted"]
    assert ".safetensors" in done["said"]


def test_chaos_results_record_every_disturbance_and_no_changed_bit(recorded):
    assert recorded["nodes"] == len(NAMES) == 6
    assert [one["what"] for one in recorded["runs"] if not one["identical"]] == []
    assert run(recorded, "kill -9 at random moments")["kills"] == 20
    points = [point for point, _, _ in run(recorded, "kill -9 at injected points")["points"]]
    assert sorted(points[: len(POINTS)]) == sorted(POINTS)  # acknowledgements of their own are rare
    assert set(run(recorded, "links between two halves cut")["cut"]) == {"reset", "black hole"}
    assert run(recorded, "kill -9 of all, twice")["kills"] == 2 * len(NAMES)
    assert ".safetensors" in run(recorded, "newest checkpoint cut short")["said"]
    assert "round" in run(recorded, "asked to stop")["said"]
    assert os.strerror(errno.ENOSPC) in run(recorded, "disk full")["said"]
    assert min(run(recorded, "power cut")["journal_bytes_lost"]) > 0


def test_recorded_recoveries_take_less_than_five_seconds_in_the_median_and_the_whole_less_than_five_minutes(recorded):
    seconds = [one for found in recorded["runs"] for one in found.get("recovery_s", ())]
    assert len(seconds) > 40
    assert statistics.median(seconds) <= 5
    assert recorded["seconds"] < 300


def test_recorded_state_of_a_node_does_not_grow(recorded):
    alone = run(recorded, "left alone")
    assert 0 < alone["disk_bytes_late"] <= 1.1 * alone["disk_bytes_early"]
