"""The journal of a node: the messages it received and sent since its oldest kept checkpoint, for use after a restart.

The journal is a series of segments of records. Each record has its length and a checksum; a record that a crash cut
short ends the journal. Every checkpoint begins a new segment. Segments that contain only rounds before the oldest kept
checkpoint are removed.

An intact record after a bad one means that the disk has damaged the segment. Its intact records are kept, and so is the
damaged file. The mailroom asks the neighbours again for the received messages that are lost; the lost sent ones are
computed again.
"""

import mmap
import os
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from fairmesh.errors import BadInput, FairmeshError
from fairmesh.storage.files import sync_folder, write_atomically

_HEAD = struct.Struct("<II")  # length and CRC-32 of what follows
_RECORD = struct.Struct("<BQH")  # kind, step, and the sender; or the number of receivers, whose positions follow
_POSITION = struct.Struct("<H")
_IS_RECEIVED, _IS_SENT, _IS_ACK = 1, 2, 3
_STEPS = 1 << 40  # more than any run has
# How a record begins: any length and checksum, a known kind, and a step whose three highest bytes are zero.
_BEGINNING = re.compile(rb"(?s)(?=.{8}[\x01-\x03].{5}\x00{3})")

Report = Callable[..., None]


class StorageError(FairmeshError):
    """The state folder cannot be written. What is there stays valid, and the node can continue from it later."""


class _Place(NamedTuple):
    path: Path
    start: int
    length: int


class Journal:
    """A journal in a folder. The training thread appends; `settle` syncs to disk and may run in another thread.

    Args:
        folder: Where the segments are.
        report: Called as `report(level, what, **fields)` for each segment that the disk has damaged.
    """

    def __init__(self, folder: Path, report: Report = lambda *event, **fields: None):
        self._folder, self._lock, self._report = folder, threading.Lock(), report
        self._received: dict[tuple[int, int], _Place] = {}  # (sender, step)
        self._sent: dict[int, list[tuple[tuple[int, ...], _Place]]] = {}  # step -> receivers and where
        self.acknowledged: dict[int, int] = {}  # neighbour -> it has every message before this step
        self._last_step: dict[Path, int] = {}  # the last step in a segment
        self.bytes_since_segment = 0
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._segments = sorted(folder.glob("journal-*.log"))
            for path in self._segments:
                self._read(path, path == self._segments[-1])
            self._file = open(self._segments[-1], "ab", buffering=0) if self._segments else self._begun()  # noqa: SIM115
            os.fdatasync(self._file.fileno())  # what was read will be acknowledged, so it must be on disk

    def _begun(self) -> FileIO:
        """Opens a new last segment. Segments are numbered and not named by rounds, since rounds can be repeated. The
        name also has a random salt of the checksums. A neighbour does not know it, so what looks like a record within
        a neighbour's message is never mistaken for one when a damaged segment is searched."""
        last = int(self._segments[-1].stem.split("-")[1]) if self._segments else 0
        path = self._folder / f"journal-{last + 1:012d}-{os.urandom(4).hex()}.log"
        file = open(path, "xb", buffering=0)  # noqa: SIM115
        sync_folder(self._folder)
        self._segments.append(path)
        return file

    def _read(self, path: Path, last: bool) -> None:
        size, salt = path.stat().st_size, _salt_of(path)
        if not size:
            return
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            records, end, damaged = _intact(content, salt)
            damaged = damaged or (end < size and not last)  # all segments but the last were synced as a whole
            if not damaged:
                for start, length in records:
                    self._note(path, start, content[start : start + length])
            kept = b"".join(content[start - _HEAD.size : start + n] for start, n in records) if damaged else b""
        if damaged:
            self._mend(path, kept, size - len(kept))
            self._read(path, last)
        elif end < size:
            os.truncate(path, end)  # a record that a crash cut short was neither acknowledged nor sent
            what = "the journal ends within a record, as after a crash; that record is dropped"
            self._report("info", what, file=path.name, lost_bytes=size - end)

    def _mend(self, path: Path, kept: bytes, lost: int) -> None:
        """Keeps a damaged segment under another name, and replaces it by one with only its intact records."""
        aside = path.with_name(f"damaged-{path.name}")
        aside.unlink(missing_ok=True)  # of an attempt that a crash ended, or of earlier damage to the same segment
        os.link(path, aside)
        write_atomically(path, kept)
        self._report(
            "warning",
            "a segment of the journal is damaged; its intact records are used, and neighbours are asked again for the "
            "messages that are lost; check this disk",
            file=path.name,
            lost_bytes=lost,
            kept_as=aside.name,
        )

    def _note(self, path: Path, start: int, body: bytes) -> None:
        kind, step, whom = _RECORD.unpack_from(body)
        head = _RECORD.size
        if kind == _IS_ACK:
            self.acknowledged[whom] = step
            return
        if kind == _IS_RECEIVED:
            self._received[whom, step] = _Place(path, start + head, len(body) - head)
        else:
            head += whom * _POSITION.size
            positions = tuple(p for (p,) in _POSITION.iter_unpack(body[_RECORD.size : head]))
            self._sent.setdefault(step, []).append((positions, _Place(path, start + head, len(body) - head)))
        self._last_step[path] = max(step, self._last_step.get(path, -1))

    def _append(self, body: bytes) -> None:
        with self._lock, storing(self._folder):
            record = _HEAD.pack(len(body), zlib.crc32(body, _salt_of(self._segments[-1]))) + body
            start, left = self._file.tell(), memoryview(record)
            while left:  # on a full disk, part of a record may be written before the error
                left = left[self._file.write(left) :]
            self._note(self._segments[-1], start + _HEAD.size, body)
            self.bytes_since_segment += len(record)

    def log_received(self, whom: int, step: int, payload: bytes) -> None:
        self._append(_RECORD.pack(_IS_RECEIVED, step, whom) + payload)

    def log_ack(self, whom: int, step: int) -> None:
        """Logs an acknowledgement, so that a node that restarts at the end knows whether a neighbour still needs it."""
        self._append(_RECORD.pack(_IS_ACK, step, whom))

    def log_sent(self, step: int, payloads: Mapping[int, bytes]) -> None:
        """Logs the messages of a step, with one record for all receivers of the same bytes."""
        receivers: dict[bytes, list[int]] = {}
        for position, payload in payloads.items():
            receivers.setdefault(payload, []).append(position)
        for payload, positions in receivers.items():
            self._append(
                _RECORD.pack(_IS_SENT, step, len(positions)) + b"".join(map(_POSITION.pack, positions)) + payload
            )

    def received(self, whom: int, step: int) -> bytes | None:
        with self._lock:
            return self._at(self._received.get((whom, step)))

    def sent(self, step: int) -> dict[int, bytes]:
        """Returns what was sent in a step, by receiver; empty if the journal no longer has it."""
        with self._lock:
            return {p: self._at(place) or b"" for positions, place in self._sent.get(step, ()) for p in positions}

    def receivers(self, step: int) -> list[int]:
        """Returns the receivers of a step's messages."""
        return [position for positions, _ in self._sent.get(step, ()) for position in positions]

    def missing_from(self, whom: int, first: int) -> int:
        """Returns the first step, from `first` on, whose message from a neighbour is not in the journal."""
        while (whom, first) in self._received:
            first += 1
        return first

    def next_from(self, whom: int) -> int:
        """Returns the step after the last one received from a neighbour, or 0 if nothing was received."""
        return max((step + 1 for who, step in self._received if who == whom), default=0)

    def steps_sent(self) -> list[int]:
        return sorted(self._sent)

    def _at(self, place: _Place | None) -> bytes | None:
        if place is None:
            return None
        with storing(self._folder), open(place.path, "rb") as file:
            file.seek(place.start)
            return file.read(place.length)

    def settle(self) -> None:
        """Syncs everything appended so far, so that it survives a power cut."""
        with self._lock:
            number = os.dup(self._file.fileno())
        try:
            with storing(self._folder):
                os.fdatasync(number)
        finally:
            os.close(number)

    def begin_segment(self, unsettled: Mapping[int, Mapping[int, bytes]]) -> None:
        """Begins a segment at a checkpoint, with the sent messages that a neighbour still needs."""
        with self._lock, storing(self._folder):
            os.fdatasync(self._file.fileno())
            before, self._file = self._file, self._begun()
            before.close()
            self.bytes_since_segment = 0
        for step, payloads in unsettled.items():
            self.log_sent(step, payloads)
        self.settle()

    def drop_before(self, keep_from: int) -> None:
        """Removes the segments that contain only steps before this one."""
        with self._lock, storing(self._folder):
            gone = [p for p in self._segments[:-1] if self._last_step.get(p, -1) < keep_from]
            self._segments = [path for path in self._segments if path not in gone]
            self._last_step = {path: step for path, step in self._last_step.items() if path not in gone}
            self._received = {key: place for key, place in self._received.items() if place.path not in gone}
            left = {step: [e for e in entries if e[1].path not in gone] for step, entries in self._sent.items()}
            self._sent = {step: entries for step, entries in left.items() if entries}
            for path in gone:
                path.unlink()

    def size(self) -> int:
        """Returns the bytes on disk."""
        return sum(path.stat().st_size for path in self._segments)

    def close(self) -> None:
        with self._lock:
            self._file.close()


def is_complete(folder: Path) -> bool:
    """Returns whether a folder's journal has every message since the start: its first segment is there, and the disk
    has damaged none."""
    return any(folder.glob("journal-000000000001*.log")) and not any(folder.glob("damaged-journal-*"))


def _salt_of(path: Path) -> int:
    return int(path.stem.split("-")[2], 16)


def _intact(content: mmap.mmap, salt: int) -> tuple[list[tuple[int, int]], int, bool]:
    """Returns the start and length of every intact record, where the last one ends, and whether there is anything else
    between them."""
    records, at, damaged = [], 0, False
    while at < len(content):
        length = _length_at(content, at, salt)
        if length is None:
            later = _next_after(content, at, salt)
            if later is None:
                break
            at, damaged = later, True
            continue
        records.append((at + _HEAD.size, length))
        at += _HEAD.size + length
    return records, at, damaged


def _length_at(content: mmap.mmap, at: int, salt: int) -> int | None:
    """Returns the length of the intact record at an offset, or None if there is none."""
    start = at + _HEAD.size
    if start + _RECORD.size > len(content):
        return None
    length, checksum = _HEAD.unpack_from(content, at)
    kind, step, whom = _RECORD.unpack_from(content, start)
    least = _RECORD.size + whom * _POSITION.size if kind == _IS_SENT else _RECORD.size
    possible = kind in (_IS_RECEIVED, _IS_SENT, _IS_ACK) and step < _STEPS and least <= length <= len(content) - start
    return length if possible and zlib.crc32(content[start : start + length], salt) == checksum else None


def _next_after(content: mmap.mmap, at: int, salt: int) -> int | None:
    """Returns where the next intact record after a bad one begins, or None. Tries first where the bad one says that it
    ends, then everywhere."""
    if at + _HEAD.size <= len(content):
        end = at + _HEAD.size + _HEAD.unpack_from(content, at)[0]
        if _length_at(content, end, salt) is not None:
            return end
    found = (match.start() for match in _BEGINNING.finditer(content, at + 1))
    return next((offset for offset in found if _length_at(content, offset, salt) is not None), None)


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Turns an error of the file system into a StorageError that says what to do."""
    try:
        yield
    except (OSError, BadInput) as error:
        reason = error.__cause__ if isinstance(error, BadInput) else error
        if not isinstance(reason, OSError):
            raise
        where = f" ({reason.filename})" if reason.filename else ""
        raise StorageError(
            f"cannot write the state in {folder}: {reason.strerror or reason}{where}; nothing is lost: free space, "
            "repair the disk or put the file back from a backup, and start the node again; it continues where it was"
        ) from error
