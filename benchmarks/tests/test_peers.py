"""The recorded cost of the network between organisations stays within its bounds."""

import json
from pathlib import Path

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "peers-cpu.json"


def test_recorded_network_cost_is_at_most_8_ms_per_round_in_the_median():
    cost = json.loads(RECORDED.read_text())
    assert (cost["nodes"], cost["parameters"]) == (8, 20_000)
    assert cost["steps"] >= 500
    assert cost["ms_median"] <= 8
    assert cost["bytes_of_messages"] == cost["message_bytes"] * 2 * cost["nodes"] * cost["steps"]
