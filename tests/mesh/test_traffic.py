"""What has left a site is counted over restarts."""

import json

import pytest

from fairmesh.mesh.node.traffic import TrafficCount
from fairmesh.storage.run_folder import TRAFFIC
from tests.mesh.test_damaged_files import DAMAGES, damage


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


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.quick_cases("all")
def test_damaged_count_begins_again_and_is_known_as_damaged(tmp_path, how):
    count = TrafficCount(tmp_path, "north")
    _sent(count, "east", 100)
    count.keep()
    assert not TrafficCount(tmp_path, "north").damaged
    damage(tmp_path / TRAFFIC, how)
    again = TrafficCount(tmp_path, "north")
    assert again.damaged
    assert again.total("wire_out") == 0
