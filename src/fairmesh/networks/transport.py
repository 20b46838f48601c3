"""What carries messages between processes: the base class of transports."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairmesh.networks.process_group import ProcessGroup

Edge = tuple[int, int]  # (sender, receiver), positions among all nodes
Arrivals = Callable[[], Mapping[Edge, Any]]  # waits for the expected messages and returns them decoded


@dataclass(frozen=True)
class Read:
    """How messages are read. Both functions raise DecodeError if a message must be refused."""

    decode: Callable[[Edge, bytes], Any]
    check: Callable[[Edge, Any], None]  # of a decoded message that has not been accepted before

    def __call__(self, edge: Edge, message: bytes) -> Any:
        """Returns a message decoded and checked."""
        found = self.decode(edge, message)
        self.check(edge, found)
        return found


class Transport(ABC):
    """Carries bytes between the processes of a network. Every process calls the same methods in the same order."""

    process_group: ProcessGroup

    def as_sent(self, round_index: int, outgoing: Mapping[Edge, bytes]) -> Mapping[Edge, bytes]:
        """Returns the messages of a round as nodes hosted here have sent them before a restart. By default a restarted
        process sends nothing again, so these are the given ones."""
        return outgoing

    @abstractmethod
    def exchange(
        self, round_index: int, outgoing: Mapping[Edge, bytes], expected: Sequence[Edge], read: Read
    ) -> Arrivals:
        """Starts to send the messages of nodes hosted here to nodes elsewhere. Returns a function that waits for the
        expected messages, so that sending overlaps with computing."""
