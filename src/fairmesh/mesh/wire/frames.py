"""The frames that two neighbours exchange over their stream; every frame is checked when it is read."""

import json
import math
import os
import struct
import zlib
from enum import IntEnum
from typing import Any, NamedTuple

from fairmesh.errors import FairmeshError
from fairmesh.mesh.fields import shortened

PROTOCOL = 2
_MAGIC = b"fairmesh"
_HELLO = struct.Struct("<B8sH")  # kind, magic, protocol
_STEP = struct.Struct("<BQ")  # kind, step
_PROBE = struct.Struct("<BI")  # kind, and how many bytes the answer should have after these
_MESSAGE = struct.Struct("<BQQ")  # kind, step, and the acknowledgement: the receiver's messages before it are durable
LENGTH = struct.Struct("<I")  # precedes every frame on a connection
_HELLO_AT_MOST = 1 << 18
_REASON_AT_MOST = 2000
PROBE_AT_MOST = 1 << 19  # bytes that a probe or its answer may have besides its head
_NEWS_AT_MOST = 1 << 19  # more than the largest announcement and a frame of others
# Most news are a status, whose words are in here: what is left of one is about its signature and its numbers.
_WORDS = (
    b'"}, {"site": "kind": "measured", "body": {"generation": 1, "columns": ["accuracy", "loss", "weight", "bits", '
    b'"bytes"], "rows": [["complete": , "kept": null}, "signature": "0123456789abcdef"}][{"site": "a", "kind": '
    b'"status", "number": 17, "body": {"round": 1, "activity": "training", "metric": 0.9, "metric_round": 50, '
    b'"weight": 0.3, "waiting_for": {}, "bytes_out": 1, "time": 17, "again_s": 120}, "signature": "'
)


class Refused(FairmeshError):
    """What came over an edge cannot be accepted. The text says why, and is sent to the sender."""


class StateLost(Refused):
    """A neighbour has lost the state it had. Only people can help, so the stream stays open for announcements."""


class RefusedThere(Refused):
    """The other side refuses what came from this one."""


class Kind(IntEnum):
    """The first byte of a frame."""

    HELLO = 1  # who I am, what we must agree on, and how far I have received your messages
    MESSAGE = 2  # the message of a step; carries an acknowledgement too
    ACK = 3  # every message before this step is durable here
    NEWS = 4  # announcements of sites
    FINISHED = 5  # I need nothing more from you
    REFUSED = 6  # why I close the stream
    STATE_LOST = 7  # why I take and send no more messages: you have lost the state that you had; announcements go on
    PROBE = 8  # bytes that mean nothing, to measure a line; only where the greeting says that it is a check
    AGAIN = 9  # tell me all announcements again: I could not take some


REFUSALS = (Kind.REFUSED, Kind.STATE_LOST)


_AT_MOST: dict[
    int, int
] = {  # bytes of a frame; those with a message have a bound of their own, and others that of a greeting
    Kind.ACK: 2 * _STEP.size,  # slightly wrong ones are refused by their own reason
    Kind.NEWS: _NEWS_AT_MOST,
    Kind.FINISHED: 1,
    Kind.AGAIN: 1,
    Kind.REFUSED: 1 + _REASON_AT_MOST,
    Kind.STATE_LOST: 1 + _REASON_AT_MOST,
    Kind.PROBE: _PROBE.size + PROBE_AT_MOST,
}


def check_length(kind: int, length: int, largest: int) -> None:
    """Refuses a frame that is longer than frames of its kind may be, if one with a message may have `largest` bytes."""
    bound = largest if kind == Kind.MESSAGE else _AT_MOST.get(kind, _HELLO_AT_MOST)
    if length > bound:
        name = Kind(kind).name.lower() if kind in set(Kind) else "unknown"
        raise Refused(f"a frame ({name}) of {length:,} bytes; at most {bound:,} are taken")


class Frame(NamedTuple):
    kind: Kind
    step: int = 0
    durable: int = 0
    body: bytes = b""

    def reason(self) -> str:
        """Returns the text of a refusal, printable and of bounded length."""
        return shortened(self.body[:_REASON_AT_MOST].decode(errors="replace"), _REASON_AT_MOST)


def hello(table: dict[str, Any], protocol: int = PROTOCOL) -> bytes:
    return _HELLO.pack(Kind.HELLO, _MAGIC, protocol) + json.dumps(table).encode()


def read_hello(data: bytes) -> dict[str, Any]:
    """Returns the table of a first frame. Refuses another protocol by its version number, before it reads the rest."""
    if len(data) < _HELLO.size or len(data) > _HELLO_AT_MOST:
        raise Refused(f"a first frame of {len(data)} bytes is no greeting")
    kind, magic, protocol = _HELLO.unpack_from(data)
    if kind != Kind.HELLO or magic != _MAGIC:
        raise Refused("the first frame is no greeting of fairmesh")
    if protocol != PROTOCOL:
        raise Refused(f"protocol version {protocol}, this side speaks {PROTOCOL}; run the same version of fairmesh")
    try:
        table = read_json(data[_HELLO.size :])
    except ValueError as error:
        raise Refused("the greeting is not JSON") from error
    if not isinstance(table, dict):
        raise Refused("the greeting is not a table")
    return table


def read_json(data: bytes) -> Any:
    """Parses JSON from a peer strictly. Raises ValueError also for NaN, infinities and very deep nesting."""

    def refuse(text: str) -> float:
        raise ValueError(f"{text} is not JSON")

    def finite(text: str) -> float:
        return float(text) if math.isfinite(float(text)) else refuse(text)

    try:
        return json.loads(data, parse_constant=refuse, parse_float=finite)
    except RecursionError as error:
        raise ValueError("too many brackets") from error


def message(step: int, durable: int, payload: bytes) -> bytes:
    return _MESSAGE.pack(Kind.MESSAGE, step, durable) + payload


def ack(step: int) -> bytes:
    return _STEP.pack(Kind.ACK, step)


def news(entries: bytes) -> bytes:
    """Returns a frame with announcements. Each is compressed by itself, so that one that is dropped costs nothing."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=_WORDS)
    return bytes([Kind.NEWS]) + packer.compress(entries) + packer.flush()


def entries_in(body: bytes) -> bytes:
    """Returns the announcements in the body of a frame of news. Never makes more of it than may be in one."""
    unpacker = zlib.decompressobj(-15, zdict=_WORDS)
    try:
        entries = unpacker.decompress(body, _NEWS_AT_MOST)
    except zlib.error as error:
        raise Refused("news that cannot be read") from error
    if not unpacker.eof or unpacker.unused_data:
        raise Refused(f"news that cannot be read, or with more than {_NEWS_AT_MOST:,} bytes")
    return entries


def finished() -> bytes:
    return bytes([Kind.FINISHED])


def again() -> bytes:
    return bytes([Kind.AGAIN])


def refused(reason: Refused) -> bytes:
    kind = Kind.STATE_LOST if isinstance(reason, StateLost) else Kind.REFUSED
    return bytes([kind]) + str(reason).encode(errors="replace")[:_REASON_AT_MOST]


def probe(size: int, wanted: int = 0) -> bytes:
    """Returns a probe with `size` bytes that mean nothing and cannot be compressed on the way."""
    return _PROBE.pack(Kind.PROBE, wanted) + os.urandom(size)


def read_probe(data: bytes) -> int:
    """Returns how many bytes the answer to a probe should have."""
    if len(data) < _PROBE.size or data[0] != Kind.PROBE:
        raise Refused("only probes may follow the greeting of a check")
    wanted = _PROBE.unpack_from(data)[1]
    if wanted > PROBE_AT_MOST:
        raise Refused(f"a probe that asks for {wanted:,} bytes; at most {PROBE_AT_MOST:,} are sent")
    return wanted


def read_frame(data: bytes) -> Frame:
    """Reads any frame after the first."""
    kind = data[0] if data else 0
    if kind == Kind.MESSAGE:
        if len(data) < _MESSAGE.size:
            raise Refused("a message ends within its header")
        _, step, durable = _MESSAGE.unpack_from(data)
        return Frame(Kind.MESSAGE, step, durable, data[_MESSAGE.size :])
    if kind == Kind.ACK:
        if len(data) != _STEP.size:
            raise Refused(f"an acknowledgement of {len(data)} bytes; it has {_STEP.size}")
        return Frame(Kind.ACK, durable=_STEP.unpack(data)[1])
    if kind in (Kind.NEWS, *REFUSALS):
        return Frame(Kind(kind), body=data[1:])
    if kind in (Kind.FINISHED, Kind.AGAIN) and len(data) == 1:
        return Frame(Kind(kind))
    raise Refused(f"a frame of unknown kind {kind}")
