"""What a live page costs stays within its bounds, as recorded."""

import json

import pytest

from benchmarks import watch


@pytest.fixture(scope="module")
def recorded():
    return json.loads(watch.RESULTS.read_text())


def test_recorded_run_is_of_the_size_that_was_promised(recorded):
    assert (recorded["sites"], recorded["records"], recorded["news_every_s"]) == (200, 100_000, 0.1)


def test_recorded_page_costs_a_run_less_than_a_hundredth_of_its_own_processor_time(recorded):
    assert recorded["lost_of_processor"] < 0.01


def test_recorded_memory_does_not_grow(recorded):
    for name in ("command_mb", "page_mb"):
        samples = recorded[name]
        third = len(samples) // 3
        assert third >= 3
        first, last = (sum(part) / third for part in (samples[third : 2 * third], samples[-third:]))
        assert last < 1.1 * first + 5, name


def test_recorded_page_stays_under_200_mb(recorded):
    assert max(recorded["page_mb"]) < 200
    assert max(recorded["command_mb"]) < 200
