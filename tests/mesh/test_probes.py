"""What `mesh check` measures of the line to a neighbour, and how much of that a node lets a neighbour do."""

import asyncio
import functools
import json
import math
import re
import time
from contextlib import asynccontextmanager
from dataclasses import asdict

import pytest

from fairmesh.mesh.preflight import checks
from fairmesh.mesh.wire import frames
from fairmesh.mesh.wire.limits import TokenBucket
from fairmesh.mesh.wire.probes import _AT_ONCE, _PER_MINUTE, Line, answer_probes, measured_line, probes_allowed
from tests.mesh import fleet
from tests.mesh.credentials import signed
from tests.mesh.experiments import experiment
from tests.mesh.scenarios import Run
from tests.mesh.stranger import apart
from tests.mesh.test_connections import dial, listening, within_a_minute
from tests.mesh.wires import Wires
from tests.refusals import missing_from, refused


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    return signed(tmp_path_factory.mktemp("sites"), ("alpha", "beta"))


@asynccontextmanager
async def far(address: str, delay_s: float = 0.0, bytes_per_s: float = math.inf):
    """A proxy that passes bytes on after a delay, and not faster than a line of this bandwidth would."""
    host, _, port = address.rpartition(":")

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 15):
            await asyncio.sleep(len(data) / bytes_per_s)
            asyncio.get_running_loop().call_later(delay_s, writer.write, data)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(host, int(port))
        ways = [asyncio.create_task(way) for way in (carry(reader, there[1]), carry(there[0], writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(2 * delay_s)  # what is under way
        for end in (writer, there[1]):
            end.transport.abort()
        await asyncio.gather(*ways, return_exceptions=True)

    own = f"127.0.0.1:{fleet.free_ports(1)[0]}"
    server = await asyncio.start_server(answer, "127.0.0.1", int(own.rpartition(":")[2]))
    yield own
    server.close()


async def lines(sites, allowed: TokenBucket, count: int = 1, message_bytes: int = 200, **line: float) -> list[Line]:
    """Returns what so many checks of alpha measure of the line to beta."""
    async with (
        listening(sites["beta"], functools.partial(answer_probes, allowed=allowed)) as server,
        far(server.address, **line) as address,
    ):
        found = []
        for _ in range(count):
            async with dial(address, sites["alpha"]) as connection:
                found.append(await measured_line(connection, message_bytes))
        assert server.errors == []
    return found


@within_a_minute
async def test_line_is_measured_without_the_handshake_and_with_the_bandwidth_that_it_has(sites):
    (line,) = await lines(sites, probes_allowed(), message_bytes=50_000, delay_s=0.015, bytes_per_s=8e6)
    assert 0.03 < line.rtt_s < 0.045
    assert 2e6 < min(line.up, line.down) <= max(line.up, line.down) < 16e6
    assert 0.015 + 0.006 < line.message_s < 0.06
    assert missing_from(line.in_words(), f"{1000 * line.rtt_s:.0f} ms", "Mbit/s") == []


@within_a_minute
async def test_neighbour_that_checks_again_and_again_is_answered_no_more_and_told_when_to_come_back(sites):
    time_s = 0.0
    found = await lines(sites, TokenBucket(_PER_MINUTE / 60, _AT_ONCE, clock=lambda: time_s), count=9)
    assert not any(math.isnan(line.up) for line in found[:2])
    assert all(math.isnan(line.up) for line in found[-2:])
    assert missing_from(found[-1].in_words(), "not measured", "2 minutes") == []


def test_bytes_of_probes_are_limited_at_once_and_per_minute():
    time_s = 0.0
    bucket = TokenBucket(_PER_MINUTE / 60, _AT_ONCE, clock=lambda: time_s)
    assert bucket.spend(_AT_ONCE)
    assert not bucket.spend(1)
    time_s = 60.0
    assert bucket.spend(_PER_MINUTE)
    assert not bucket.spend(1)
    assert (probes_allowed().per_second, probes_allowed().at_once) == (_PER_MINUTE / 60, _AT_ONCE)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (frames.probe(0, frames.PROBE_AT_MOST + 1), [f"{frames.PROBE_AT_MOST + 1:,}", f"{frames.PROBE_AT_MOST:,}"]),
        (frames.ack(3), ["probes", "check"]),
        (b"", ["probes", "check"]),
    ],
)
def test_only_probes_of_bounded_size_may_follow_the_greeting_of_a_check(frame, words):
    with refused(*words, error=frames.Refused):
        frames.read_probe(frame)


@pytest.mark.slow
@pytest.mark.parametrize("rtt_ms", [100, 300])
def test_expected_rounds_per_second_are_those_of_three_nodes_that_are_far_apart(tmp_path, rtt_ms):
    names = ["a", "b", "c"]  # a dials both others
    run = Run(tmp_path, names, experiment(100_000))
    wires = Wires(tmp_path, run.mesh, rtt_ms / 2000)
    wires.start()
    try:
        with run:
            run.start("b", "c")
            run.until(lambda: all("edges" in run.status(name) for name in "bc"))
            given = apart(tmp_path, lambda: [asdict(check) for check in checks(tmp_path / "a" / fleet.SITE)])
            found = {check["what"]: check["found"] for check in given}
            for name in "bc":
                (measured,) = re.findall(r"round trip (\d+) ms", found[f"neighbour {name}"])
                assert rtt_ms <= int(measured) < rtt_ms + 20
            (expected,) = re.findall(r"about ([\d.]+) rounds per second", found["time of the run"])
            run.start("a")
            run.until(lambda: min(map(run.round, names)) > 20)
            began, first = _round_and_time(run)
            run.until(lambda: run.round("a") > first + 1000 / rtt_ms * 10)
            ended, last = _round_and_time(run)
    finally:
        wires.end()
    print(json.dumps({"rtt_ms": rtt_ms, "expected": expected, "measured": (last - first) / (ended - began)}))
    assert (last - first) / (ended - began) == pytest.approx(float(expected), rel=0.35)


def _round_and_time(run: Run) -> tuple[float, int]:
    return time.monotonic(), run.round("a")
