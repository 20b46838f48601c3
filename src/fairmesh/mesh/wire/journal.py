"""The journal of a node: the messages it received and sent since its oldest kept checkpoint, for use after a restart.

The journal is a series of segments of records. Each record has its length and a checksum; a record that a crash cut
short ends the journal. Every checkpoint begins a new segment. Segments that contain only rounds before the oldest kept
checkpoint are removed.
"""

import os
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from fairmesh.errors import BadInput, FairmeshError
from fairmesh.storage.files import sync_folder

_HEAD = struct.Struct("<II")  # length and CRC-32 of what follows
_RECEIVED = struct.Struct("<BQH")  # kind, step, sender
_SENT = struct.Struct("<BQH")  # kind, step, number of receivers; their positions follow
_POSITION = struct.Struct("<H")
_IS_RECEIVED, _IS_SENT, _IS_ACK = 1, 2, 3


class StorageError(FairmeshError):
    """The state folder cannot be written. What is there stays valid, and the node can continue from it later."""


class _Place(NamedTuple):
    path: Path
    start: int
    length: int


class Journal:
    """A journal in a folder. The training thread appends; `settle` syncs to disk and may run in another thread."""

    def __init__(self, folder: Path):
        self._folder, self._lock = folder, threading.Lock()
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
        """Opens a new last segment. Segments are numbered and not named by rounds, since rounds can be repeated."""
        last = int(self._segments[-1].stem.removeprefix("journal-")) if self._segments else 0
        path = _segment(self._folder, last + 1)
        file = open(path, "xb", buffering=0)  # noqa: SIM115
        sync_folder(self._folder)
        self._segments.append(path)
        return file

    def _read(self, path: Path, last: bool) -> None:
        at = 0
        with open(path, "rb") as file:
            while head := file.read(_HEAD.size):
                length, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
                body = file.read(length)
                if len(head) < _HEAD.size or len(body) < length or zlib.crc32(body) != checksum or not body:
                    break
                self._note(path, at + _HEAD.size, body)
                at += _HEAD.size + length
        if at < path.stat().st_size:
            if not last:
                raise StorageError(
                    f"{path} is damaged after byte {at}; restore it from a backup, or remove this site from the mesh"
                )
            os.truncate(path, at)  # a record that a crash cut short was neither acknowledged nor sent

    def _note(self, path: Path, start: int, body: bytes) -> None:
        kind, step, whom = _RECEIVED.unpack_from(body)
        head = _RECEIVED.size
        if kind == _IS_ACK:
            self.acknowledged[whom] = max(step, self.acknowledged.get(whom, 0))
            return
        if kind == _IS_RECEIVED:
            self._received[whom, step] = _Place(path, start + head, len(body) - head)
        else:
            head += whom * _POSITION.size
            positions = tuple(p for (p,) in _POSITION.iter_unpack(body[_SENT.size : head]))
            self._sent.setdefault(step, []).append((positions, _Place(path, start + head, len(body) - head)))
        self._last_step[path] = max(step, self._last_step.get(path, -1))

    def _append(self, body: bytes) -> None:
        record = _HEAD.pack(len(body), zlib.crc32(body)) + body
        with self._lock, storing(self._folder):
            start, left = self._file.tell(), memoryview(record)
            while left:  # on a full disk, part of a record may be written before the error
                left = left[self._file.write(left) :]
            self._note(self._segments[-1], start + _HEAD.size, body)
            self.bytes_since_segment += len(record)

    def log_received(self, whom: int, step: int, payload: bytes) -> None:
        self._append(_RECEIVED.pack(_IS_RECEIVED, step, whom) + payload)

    def log_ack(self, whom: int, step: int) -> None:
        """Logs an acknowledgement, so that a node that restarts at the end knows whether a neighbour still needs it."""
        self._append(_RECEIVED.pack(_IS_ACK, step, whom))

    def log_sent(self, step: int, payloads: Mapping[int, bytes]) -> None:
        """Logs the messages of a step, with one record for all receivers of the same bytes."""
        receivers: dict[bytes, list[int]] = {}
        for position, payload in payloads.items():
            receivers.setdefault(payload, []).append(position)
        for payload, positions in receivers.items():
            self._append(
                _SENT.pack(_IS_SENT, step, len(positions)) + b"".join(map(_POSITION.pack, positions)) + payload
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

    def next_from(self, whom: int) -> int | None:
        """Returns the step after the last one received from a neighbour, or None if nothing was received."""
        return max((step + 1 for who, step in self._received if who == whom), default=None)

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
            kept = {step: [e for e in entries if e[1].path not in gone] for step, entries in self._sent.items()}
            self._sent = {step: entries for step, entries in kept.items() if entries}
            for path in gone:
                path.unlink()

    def size(self) -> int:
        """Returns the bytes on disk."""
        return sum(path.stat().st_size for path in self._segments)

    def close(self) -> None:
        with self._lock:
            self._file.close()


def _segment(folder: Path, number: int) -> Path:
    return folder / f"journal-{number:012d}.log"


def first_segment(folder: Path) -> Path:
    """Returns the path of a journal's first segment. While it exists, the journal has every message since the start."""
    return _segment(folder, 1)


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Turns an error of the file system into a StorageError that says what to do."""
    try:
        yield
    except (OSError, BadInput) as error:
        reason = error.__cause__ if isinstance(error, BadInput) else error
        if not isinstance(reason, OSError):
            raise
        raise StorageError(
            f"cannot write the state in {folder}: {reason.strerror or reason}; nothing is lost: free space or repair "
            "the disk and start the node again, and it continues where it was"
        ) from error
