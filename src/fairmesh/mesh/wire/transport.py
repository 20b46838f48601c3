"""The transport of a node between organisations: each round of an algorithm is a step of its mailroom."""

from collections.abc import Mapping, Sequence
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.mesh.wire.chains import OWN
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.networks.transport import Arrivals, Edge, Read, Transport

FIRST_ROUND = 1  # its step; in step 0 neighbours compare their initial models


class MeshProcess(ProcessGroup):
    """A process group of one node, which reaches its neighbours by messages only."""

    world_size, rank, local_world_size, job = 1, 0, 1, None

    def duplicate(self) -> "MeshProcess":
        return self

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise BadInput("between organisations there is no server and no broadcast; use ad-gda")

    all_gather = all_reduce = nodes = network = _refuse


class PeerTransport(Transport):
    """The transport of node number `own` of the run. Neighbours have numbers in the run and positions in the mesh; the
    two differ once a site has left. Every neighbour of any round gets a message, possibly empty, in every step, so that
    both ends count the same steps."""

    def __init__(self, own: int, neighbours: Sequence[int], positions: Sequence[int], mailroom: Mailroom):
        self._own, self._mailroom, self.process_group = own, mailroom, MeshProcess()
        self._position_of = dict(zip(neighbours, positions))
        self._number_at = dict(zip(positions, neighbours))

    def as_sent(self, round_index: int, outgoing: Mapping[Edge, bytes]) -> dict[Edge, bytes]:
        by_position = {self._position_of[other]: text for (_, other), text in outgoing.items()}
        sent = self._mailroom.as_sent(round_index + FIRST_ROUND, by_position)
        return {(self._own, self._number_at[position]): text for position, text in sent.items()}

    def exchange(
        self, round_index: int, outgoing: Mapping[Edge, bytes], expected: Sequence[Edge], read: Read
    ) -> Arrivals:
        step, awaited = round_index + FIRST_ROUND, {sender for sender, _ in expected}
        posted = {at: outgoing.get((self._own, other), b"") for other, at in self._position_of.items()}
        self._mailroom.post(step, posted)
        # With several graphs, neighbours of other rounds get a part of the message.
        messages = {OWN: max(posted.values(), key=len, default=b"")}

        def decode(position: int, text: bytes) -> Any:
            other, messages[position] = self._number_at[position], text
            return read.decode((other, self._own), text) if other in awaited else None

        def check(position: int, found: Any) -> None:
            other = self._number_at[position]
            if other in awaited:
                read.check((other, self._own), found)

        def arrivals() -> dict[Edge, Any]:
            taken = self._mailroom.take(step, list(self._number_at), decode, check)
            self._mailroom.chains.add(round_index, messages)
            found = {self._number_at[position]: message for position, message in taken.items()}
            return {(other, self._own): found[other] for other in awaited}

        return arrivals
