"""The processes that together host the nodes of one run, in the terms of MPI."""

import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fairmesh.errors import FairmeshError, LostProcess
from fairmesh.topology.mixing import Mixing

if TYPE_CHECKING:
    from fairmesh.networks.base import Network

_BEAT_S = 1.0  # between two signs of life during long work


class ProcessGroup:
    """The processes of a run. This base class is a single process.

    Every process calls the same methods in the same order. Their communication is not counted as the algorithm's
    traffic, except for the sums that a server forms."""

    world_size: int = 1
    rank: int = 0  # of this process; rank 0 leads: it writes files and reports for all
    local_world_size: int = 1  # processes that share this machine's memory
    job: str | None = None  # names this run and its restarts, so that a restarted run resumes by itself

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Returns every process's payload at every process, ordered by rank."""
        return [payload]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum over all processes, added in the order of their ranks; only the leader sees the terms."""
        return tensor

    def nodes(self, n: int) -> Sequence[int]:
        """Returns the positions, among n nodes, of those hosted here. Default: all."""
        return range(n)

    def network(
        self, cycle: Sequence[Mixing], *, device: torch.device, dtype: torch.dtype, count_bytes: bool
    ) -> "Network":
        """Returns the network of the nodes hosted here."""
        raise NotImplementedError("the caller makes the network of these processes")

    def duplicate(self) -> "ProcessGroup":
        """Returns a group of the same processes whose messages do not mix with those of this one, so that another
        thread may use it."""
        return self

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def all_gather_json(self, value: Any) -> list[Any]:
        """Returns every process's value, which JSON must be able to represent, ordered by rank."""
        if self.world_size == 1:
            return [value]
        return [json.loads(text) for text in self.all_gather(json.dumps(value).encode())]

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """If one process raises inside, all raise the same error after it. No collective call is allowed inside."""
        refusal: FairmeshError | None = None
        try:
            yield
        except FairmeshError as error:
            if self.world_size == 1 or isinstance(error, LostProcess):
                raise
            refusal = error
        if self.world_size == 1:
            return
        reasons = self.all_gather_json(refusal and [type(refusal).__name__, str(refusal)])
        for kind, text in filter(None, reasons):
            error = _KINDS.get(kind, FairmeshError)(text)
            error.reported_elsewhere = not self.is_leader
            raise error from refusal

    @contextmanager
    def long_work(self, doing: Callable[[], Any], seen: Callable[[list[Any]], None]) -> Iterator[None]:
        """As `fail_together`, for work that may take hours at one process. Meanwhile the processes give each other
        signs of life, so that those that have finished wait as long as the others live.

        Args:
            doing: Returns what this process does, which JSON must be able to represent.
            seen: Is called about once per second, by another thread, with what the processes that still work do.
        """
        over, failures = threading.Event(), []
        others = self if self.world_size == 1 else self._beats

        def beat() -> None:
            try:
                finished = []
                while not (finished and all(finished)):
                    mine = over.wait(_BEAT_S)
                    every = others.all_gather_json([mine, None if mine else doing()])
                    finished = [ready for ready, _ in every]
                    seen([what for ready, what in every if not ready])
            except Exception as error:
                failures.append(error)

        with self.fail_together():
            thread = threading.Thread(target=beat, name="long work", daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
            for failure in failures:
                raise failure

    @functools.cached_property
    def _beats(self) -> "ProcessGroup":
        return self.duplicate()


_KINDS = {kind.__name__: kind for kind in FairmeshError.__subclasses__()}
