"""The time of reference models next to a run's."""

import pytest

from benchmarks.references import cost_of_references


@pytest.mark.slow
def test_references_take_at_most_twice_the_time_of_the_run():
    assert cost_of_references(rounds=400, splits=1).ratio < 2
