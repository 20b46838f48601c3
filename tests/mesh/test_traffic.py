"""What has left a site is counted over restarts."""

import json

import pytest

from fairmesh.mesh.node.traffic import TrafficCount
from fairmesh.storage.run_folder import TRAFFIC


def _sent(count: TrafficCount, whom: str, size: int) -> None:
    counters = count.over(whom)
    counters.messages_out += 1
    counters.bytes_out += size
    counters.wire_out += size + 40


def test_count_goes_on_after_a_restart_and_when_a_neighbour_has_left(tmp_path):
    before = TrafficCount(tmp_path, "north")
    _sent(before, "east", 100)
    _sent(before, "south", 200)
    before.keep()
    again = TrafficCount(tmp_path, "north")
    _sent(again, "south", 5)
    again.keep()
    assert (again.total("bytes_out"), again.total("wire_out")) == (305, 425)
    told = json.loads((tmp_path / TRAFFIC).read_text())
    assert (told["site"], told["payload_out"], told["overhead_out"]) == ("north", 305, 120)
    assert again.over("south").messages_out == 2


def test_count_is_written_only_if_it_has_changed(tmp_path):
    count = TrafficCount(tmp_path, "north")
    _sent(count, "east", 1)
    count.keep()
    (tmp_path / TRAFFIC).unlink()
    count.keep()
    assert not (tmp_path / TRAFFIC).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"neighbours": {"east": {"bytes_out": "x"}}}', "\x00"])
@pytest.mark.quick_cases("all")
def test_file_that_is_damaged_ends_no_node(tmp_path, text):
    (tmp_path / TRAFFIC).write_text(text)
    assert TrafficCount(tmp_path, "north").total("wire_out") == 0
