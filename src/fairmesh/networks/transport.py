"""What carries messages between processes: the base class of transports."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fairmesh.networks.process_group import ProcessGroup

Edge = tuple[int, int]  # (sender, receiver), positions among all nodes
Read = Callable[[Edge, bytes], Any]  # decodes a message; raises DecodeError if it must be refused
Arrivals = Callable[[], Mapping[Edge, Any]]  # waits for the expected messages and returns them decoded


class Transport(ABC):
    """Carries bytes between the processes of a network. Every process calls the same methods in the same order."""

    process_group: ProcessGroup

    @abstractmethod
    def exchange(
        self, round_index: int, outgoing: Mapping[Edge, bytes], expected: Sequence[Edge], read: Read
    ) -> Arrivals:
        """Starts to send the messages of nodes hosted here to nodes elsewhere. Returns a function that waits for the
        expected messages, so that sending overlaps with computing."""
