"""The processes that together host all nodes: what observers ask of them, and how they come to agree."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fairmesh.errors import FairmeshError, LostHost
from fairmesh.topology.mixing import Mixing

if TYPE_CHECKING:
    from fairmesh.networks.base import Network


class Hosts(ABC):
    """Every host calls the same methods in the same order. None of what they carry is the algorithms' traffic, but for
    the sums that a server forms."""

    number: int
    here: int  # this one's place among them; the first, 0, writes and speaks for all
    beside: int  # how many share this machine's memory
    job: str | None  # what names this run and its restarts, so that a restarted one goes on by itself

    @abstractmethod
    def everywhere(self, payload: bytes) -> list[bytes]:
        """Every host's payload at every host, in the order of the hosts."""

    @abstractmethod
    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over the hosts, in their order, at every host; none but the first gets the others' terms."""

    @abstractmethod
    def nodes(self, n: int) -> Sequence[int]:
        """The positions, among n nodes, of those hosted here."""

    @abstractmethod
    def network(
        self, cycle: Sequence[Mixing], *, device: torch.device, dtype: torch.dtype, count_bytes: bool
    ) -> "Network":
        """The network of the nodes hosted here."""

    @property
    def first(self) -> bool:
        return self.here == 0

    def gathered(self, value: Any) -> list[Any]:
        """Every host's value, such as JSON can say, in the order of the hosts."""
        if self.number == 1:
            return [value]
        return [json.loads(text) for text in self.everywhere(json.dumps(value).encode())]

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """What one host refuses, all refuse, with the words of the first that did. Inside, hosts do not meet."""
        refusal: FairmeshError | None = None
        try:
            yield
        except FairmeshError as error:
            if self.number == 1 or isinstance(error, LostHost):
                raise
            refusal = error
        if self.number == 1:
            return
        reasons = self.gathered(refusal and [type(refusal).__name__, str(refusal)])
        for kind, text in filter(None, reasons):
            error = _KINDS.get(kind, FairmeshError)(text)
            error.told_elsewhere = not self.first
            raise error from refusal


_KINDS = {kind.__name__: kind for kind in FairmeshError.__subclasses__()}
