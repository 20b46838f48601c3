"""Writes runs for TensorBoard."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fairmesh.trackers.base import FinalTable, Status, TrackedReplica, Tracker, file_name


@dataclass
class TensorBoard(Tracker):
    """Writes every measurement to event files. `tensorboard --logdir FOLDER` shows them.

    Args:
        folder: The folder; each of several replicas has a folder of its own in it. A new run hides what is in it. None
            for `trackers/tensorboard` in the run's folder, or `tensorboard` here if the run has none. Default: None.

    Example:
        >>> import tempfile
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=10)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = fm.run(experiment, observers=[fm.trackers.TensorBoard(folder)])
    """

    folder: str | None = None

    extra: ClassVar[str] = "tensorboard"

    def load(self) -> None:
        import tensorboard  # noqa: F401

    def open(self, replica: TrackedReplica, folder: Path, alone: bool) -> None:
        base = Path(self.folder) if self.folder else folder / "tensorboard"
        known = replica.id is not None
        replica.id = str(base if alone else base / f"{replica.key}-{file_name(replica.name)}")
        replica.handle = _EventFile(Path(replica.id), forget_from=replica.written + 1)
        if not known:  # readers forget curves, but no texts
            rows = [[key, str(value)] for key, value in replica.flat_settings.items()]
            replica.handle.write(0, {}, {"settings": FinalTable(["setting", "value"], rows).markdown()})

    def write(self, replica: TrackedReplica, round: int, numbers: Mapping[str, float]) -> None:
        replica.handle.write(round, numbers, {})

    def write_result(
        self, replica: TrackedReplica, round: int, intervals: Mapping[str, float], table: FinalTable
    ) -> None:
        replica.handle.write(round, intervals, {"result": table.markdown()})

    def close(self, replica: TrackedReplica, status: Status) -> None:
        replica.handle.close()


class _EventFile:
    """A file of events. The library's own writer has a thread, which prints a traceback when the disk is full.

    Args:
        folder: Where the file is made.
        forget_from: Readers forget what earlier files have from this step on: the last events of a process that was
            killed, or those of another run.
    """

    def __init__(self, folder: Path, forget_from: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]  # made by protobuf
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1000:018d}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(open(folder / name, "wb"))  # noqa: SIM115  closed with the run
        self._put(Event(file_version="brain.Event:2"))
        self._put(Event(step=forget_from, session_log=SessionLog(status=SessionLog.START)))
        self._records.flush()

    def _put(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())

    def write(self, step: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]  # made by protobuf
        from torch.utils.tensorboard import summary

        for one in [
            *(summary.scalar(name, number) for name, number in numbers.items()),
            *(summary.text(name, words) for name, words in texts.items()),
        ]:
            self._put(Event(step=step, summary=one))
        self._records.flush()

    def close(self) -> None:
        self._records.close()
