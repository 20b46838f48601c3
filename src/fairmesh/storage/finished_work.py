"""Finished local work of training functions, kept on disk so that no site does it twice: a file per round and node."""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor

from fairmesh.errors import CheckpointError
from fairmesh.problems.local_work import Done, Node, Work
from fairmesh.storage.checkpoint import read_stored, write_stored

WORTH_WRITING_S = 0.2  # in a simulation, work that took less is written only if the round fails


class FinishedWork(Done):
    """The finished work of some rounds.

    Between organisations it is on disk before anything of it is sent, so that a node that was killed sends the same
    again (`before_sending`). In a simulation only what took long is written, and what was finished when another node
    failed. There it is used again only from the same start, since rounds are repeated from a checkpoint.

    Args:
        folder: Where to keep it. It is made when something is written.
        before_sending: Whether all work is written at once. Default: False.
        damaged: Is called with the name of a damaged file and the reason. Default: they are passed over.
        storing: Surrounds every write, to say what to do if the disk fails. Default: nullcontext.
    """

    def __init__(
        self,
        folder: Path,
        *,
        before_sending: bool = False,
        damaged: Callable[[str, str], None] = lambda file, reason: None,
        storing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self._folder, self._before_sending, self._damaged, self._storing = folder, before_sending, damaged, storing
        self._unwritten: list[tuple[int, Node, Tensor, Work]] = []

    def read(self, round_number: int, node: Node, start: Tensor) -> Work | None:
        """Returns the finished work of a node in a round, or None.

        Args:
            round_number: The number of the round.
            node: The node.
            start: Its row before the work.
        """
        path = self._path(round_number, node)
        if not path.exists():
            return None
        try:
            stored = read_stored(path, {})
        except CheckpointError as error:
            self._damaged(path.name, error.what)
            return None
        if not self._before_sending and stored.more.get("start") != _digest(start):
            return None
        return Work(*(stored.tensors[name] for name in Work._fields))

    def write(self, round_number: int, node: Node, start: Tensor, work: Work, seconds: float) -> None:
        """Keeps the work of a node in a round.

        Args:
            round_number: The number of the round.
            node: The node.
            start: Its row before the work.
            work: The work.
            seconds: How long it took.
        """
        self._unwritten = [one for one in self._unwritten if one[0] == round_number]
        self._unwritten.append((round_number, node, start, work))
        if self._before_sending or seconds >= WORTH_WRITING_S:
            self.flush()

    def flush(self) -> None:
        """Writes what is not on disk yet of the last round."""
        with self._storing():
            for number, node, start, work in self._unwritten:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_stored(self._path(number, node), work._asdict(), number, {}, start=_digest(start))
        self._unwritten = []

    def nbytes(self, since: int = 0) -> int:
        """Returns the size on disk of the work of a round and those after it.

        Args:
            since: The first round. Default: 0.
        """
        return sum(path.stat().st_size for number, path in self._files() if number >= since)

    def drop_before(self, round_number: int) -> None:
        """Removes the work of earlier rounds, which nobody can ask to repeat."""
        for number, path in self._files():
            if number < round_number:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Removes the folder, if nothing is in it."""
        with suppress(OSError):
            self._folder.rmdir()

    def _path(self, round_number: int, node: Node) -> Path:
        return self._folder / f"work-{round_number:012d}-{node.replica}-{node.number}.safetensors"

    def _files(self) -> list[tuple[int, Path]]:
        found: list[Path] = []
        with suppress(FileNotFoundError):  # another process has just removed the folder, since nothing was in it
            found += self._folder.glob("work-*.safetensors")
        return [(int(path.stem.split("-")[1]), path) for path in found]


def _digest(start: Tensor) -> str:
    return hashlib.sha256(start.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
