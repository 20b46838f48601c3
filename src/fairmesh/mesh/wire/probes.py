"""Measures the line to a neighbour: round trips and bandwidth, over a stream that is authenticated already.

Only a check (`fairmesh mesh check`) sends probes, and a node answers those of its neighbours alone. What it receives
and sends for them is limited per neighbour, in bytes at once and per minute, so that probes cannot hold up its rounds.
"""

import asyncio
import math
import statistics
import time
from contextlib import suppress
from typing import NamedTuple

from fairmesh.mesh.wire import frames
from fairmesh.mesh.wire.carrier import Peer
from fairmesh.mesh.wire.connections import ConnectionLost
from fairmesh.mesh.wire.frames import Kind, Refused, read_frame
from fairmesh.mesh.wire.limits import TokenBucket

PROBING_S = 15.0  # then a check has ended
_PRICE = 1 << 10  # bytes that a probe costs besides its own, since the smallest one needs work too
_AT_ONCE, _PER_MINUTE = 4 << 20, 2 << 20  # bytes from and to one neighbour: two checks, and then about one a minute
_ROUND_TRIPS = 9
_MESSAGES = 3
_ECHOED = 1 << 16  # bytes; the time of a longer message follows from the bandwidth
_PIECES = (1 << 14, 1 << 16, frames.PROBE_AT_MOST)  # bytes; with the messages less than 1 MB in each direction
_DIRECTION_S = 2.0
_UNANSWERED = "not measured: no answer in time; a node answers few probes per minute, so try again in 2 minutes"


class Line(NamedTuple):
    """What was measured of the line to a neighbour."""

    rtt_s: float = math.nan  # of the smallest frame
    up: float = math.nan  # bytes per second to the neighbour
    down: float = math.nan
    at_least: bool = False  # the longest piece took so few round trips that the line may be faster
    message_s: float = math.nan  # from when a message is sent until it has arrived, the slower way

    def in_words(self) -> str:
        """Returns the measurements for people."""
        if math.isnan(self.rtt_s):
            return f"line {_UNANSWERED}"
        bandwidth = f"{'at least ' * self.at_least}{_megabits(self.up)} there and {_megabits(self.down)} back"
        if math.isnan(self.up):
            bandwidth = f"bandwidth {_UNANSWERED}"
        return f"round trip {milliseconds(self.rtt_s)}, {bandwidth}"


def milliseconds(seconds: float) -> str:
    """Returns a duration in milliseconds, with two digits or more."""
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.0095 else f"{1000 * seconds:.2g} ms"


def _megabits(bytes_per_s: float) -> str:
    """Returns a bandwidth as people write it."""
    return f"{8e-6 * bytes_per_s:,.0f} Mbit/s" if bytes_per_s > 1.2e6 else f"{8e-6 * bytes_per_s:.2g} Mbit/s"


def probes_allowed() -> TokenBucket:
    """Returns how many bytes of probes one neighbour may cause."""
    return TokenBucket(_PER_MINUTE / 60, _AT_ONCE)


async def answer_probes(connection: Peer, allowed: TokenBucket) -> None:
    """Answers the probes of a check until the neighbour closes the connection, has had its share, or takes too long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PROBING_S):
            while (data := await connection.receive()) is not None:
                wanted = frames.read_probe(data)
                if not allowed.spend(_PRICE + len(data) + wanted):
                    return
                await connection.send(frames.probe(wanted))


async def measured_line(connection: Peer, message_bytes: int) -> Line:
    """Measures the line to a neighbour that has answered the greeting of a check. What the neighbour does not answer,
    since it was checked a moment ago, is NaN.

    Args:
        connection: The stream.
        message_bytes: The size of a message of the run.

    Raises:
        Refused: The neighbour refuses the greeting.
    """
    line, size = Line(), min(message_bytes, _ECHOED)
    with suppress(ConnectionLost, TimeoutError):
        await _round_trip(connection, 0, 0)  # may wait for what the neighbour does when a check begins
        rtt_s = await _typical(connection, 0, 0, _ROUND_TRIPS)
        line = Line(rtt_s, message_s=rtt_s / 2)
        there, back = [await _typical(connection, *sizes, _MESSAGES) for sizes in ((size, 0), (0, size))]
        message_s = max(there, back, rtt_s) - rtt_s / 2
        line = line._replace(message_s=message_s)
        (up, up_faster), (down, down_faster) = [await _rate(connection, rtt_s, up) for up in (True, False)]
        message_s += (message_bytes - size) / min(up, down)
        line = Line(rtt_s, up, down, up_faster or down_faster, message_s)
    return line


async def _rate(connection: Peer, rtt_s: float, up: bool) -> tuple[float, bool]:
    """Returns the bytes per second of the longest piece that the time allows, and whether the line may be faster, since
    TCP begins slowly. Raises TimeoutError if not even the first arrives in time."""
    began, rate, soon = time.perf_counter(), math.inf, False
    async with asyncio.timeout(_DIRECTION_S):
        for size in _PIECES:
            if rate < math.inf and time.perf_counter() - began + 2 * rtt_s + size / rate > _DIRECTION_S:
                break
            took = await _round_trip(connection, size * up, size * (not up))
            rate = size / max(took - rtt_s, 1e-6)
            soon = took < 4 * rtt_s
    return rate, soon


async def _typical(connection: Peer, size: int, wanted: int, count: int) -> float:
    """Returns the median of some round trips, of fewer if they take long."""
    times: list[float] = []
    while len(times) < count and sum(times) < _DIRECTION_S:
        times.append(await _round_trip(connection, size, wanted))
    return statistics.median(times)


async def _round_trip(connection: Peer, size: int, wanted: int) -> float:
    """Returns the seconds until a probe is answered."""
    began = time.perf_counter()
    await connection.send(frames.probe(size, wanted))
    answer = await connection.receive()
    took = time.perf_counter() - began
    if answer is None:
        raise ConnectionLost("it answers no more probes")
    if answer[0:1] != bytes([Kind.PROBE]):
        raise Refused(f"it refuses: {read_frame(answer).reason()}")
    return took
