"""The processes that together host the nodes of one run, in the terms of MPI."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fairmesh.errors import FairmeshError, LostProcess
from fairmesh.topology.mixing import Mixing

if TYPE_CHECKING:
    from fairmesh.networks.base import Network


class ProcessGroup(ABC):
    """The processes of a run. Every process calls the same methods in the same order. Their communication is not
    counted as the algorithm's traffic, except for the sums that a server forms."""

    world_size: int
    rank: int  # of this process; rank 0 leads: it writes files and reports for all
    local_world_size: int  # processes that share this machine's memory
    job: str | None  # names this run and its restarts, so that a restarted run resumes by itself

    @abstractmethod
    def all_gather(self, payload: bytes) -> list[bytes]:
        """Returns every process's payload at every process, ordered by rank."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum over all processes, added in the order of their ranks; only the leader sees the terms."""

    @abstractmethod
    def nodes(self, n: int) -> Sequence[int]:
        """Returns the positions, among n nodes, of those hosted here."""

    @abstractmethod
    def network(
        self, cycle: Sequence[Mixing], *, device: torch.device, dtype: torch.dtype, count_bytes: bool
    ) -> "Network":
        """Returns the network of the nodes hosted here."""

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


_KINDS = {kind.__name__: kind for kind in FairmeshError.__subclasses__()}
