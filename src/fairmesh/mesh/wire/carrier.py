"""What carries frames between neighbours: the base class of carriers, and what is asked of a connection."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol


class Peer(Protocol):
    """A connection to one neighbour, in `async with`. Its frames arrive in order and each once, or the connection
    ends."""

    wire_in: int  # bytes that have arrived, with all that carries the frames,
    wire_out: int  # and that have left

    @property
    def peer_names(self) -> list[str]:
        """Returns the names by which the peer is authenticated."""
        ...

    def peer_certificate(self) -> bytes:
        """Returns the certificate by which the peer signs what it announces, as PEM."""
        ...

    async def receive(self) -> bytes | None:
        """Returns the next frame, or None when the peer has closed the connection. Raises ConnectionLost, or Refused
        for a frame that is longer than its kind may be."""
        ...

    async def send(self, *frames: bytes) -> None:
        """Sends frames. Returns when the next ones may be given; that they have arrived is acknowledged elsewhere.
        Raises ConnectionLost."""
        ...


Answer = Callable[[Peer], Awaitable[None]]  # serves a connection that a peer has opened
TurnedAway = Callable[[str, str], None]  # from where somebody came who got no connection, and why


class Carrier(ABC):
    """Opens connections to neighbours, and takes those that they open. Authenticates both ends."""

    @abstractmethod
    async def open(self, largest: int, answer: Answer, turned_away: TurnedAway) -> None:
        """Begins to take connections; a message on them may have `largest` bytes. Raises BadInput if it cannot."""

    @abstractmethod
    def dialled(self, address: str, name: str) -> AbstractAsyncContextManager[Peer]:
        """Connects to a neighbour, known by its address in mesh.toml and its name. Raises CannotConnect."""

    @abstractmethod
    async def close(self) -> None:
        """Ends every connection that a peer has opened."""
