"""What a WAN costs stays within its bounds, as recorded and, in the slow tests, here and now."""

import json
import socket

import pytest

from benchmarks import wan
from fairmesh.mesh.wire.tls_stream import TlsStream

HEAD, RECORD = 21, 22  # bytes of a message's head and length, and of a record of TLS


@pytest.fixture
def possible():
    reason = wan.why_not()
    if reason:
        pytest.skip(f"no network namespaces with a TUN device: {reason}")


def _slope(seconds: float = 5.0) -> float:
    with wan.running(3, "0.2 kB") as mesh:
        return wan.slope([mesh.measured(rtt_ms, seconds) for rtt_ms in (100, 20)])


@pytest.mark.slow
def test_round_takes_half_a_round_trip_longer_for_each_that_the_network_has(possible):
    assert _slope() <= 0.55


@pytest.mark.slow
def test_round_takes_a_whole_round_trip_if_the_kernel_keeps_small_frames_back(possible, monkeypatch):
    made = TlsStream.__post_init__

    def with_nagle(stream: TlsStream) -> None:
        made(stream)
        stream.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)

    monkeypatch.setattr(TlsStream, "__post_init__", with_nagle)
    assert _slope() > 0.55


@pytest.mark.slow
def test_nodes_that_wait_send_at_most_100_bytes_per_second_over_an_edge(possible):
    with wan.running(3, "0.2 kB") as mesh:
        assert mesh.idle(before=20, seconds=30).bytes_per_s <= 100


def test_recorded_rounds_take_half_a_round_trip_more_and_waiting_costs_at_most_100_bytes_per_second():
    recorded = json.loads(wan.RESULTS.read_text())["after"]
    assert all(slope <= 0.55 for slope in recorded["slope"].values())
    assert [idle["bytes_per_s"] <= 100 for idle in recorded["idle"]] == [True]


def test_recorded_announcements_take_at_most_a_fifth_of_the_payload_or_100_bytes_per_round_and_neighbour():
    for case in json.loads(wan.RESULTS.read_text())["after"]["rounds"]:
        neighbours = 2  # rings
        announced = case["claimed_bytes"] - case["payload_bytes"] - neighbours * (HEAD + RECORD)
        assert announced / neighbours <= max(100, 0.2 * case["payload_bytes"] / neighbours), case
