"""Running hashes of the messages of rounds, by which sites find out who sends one neighbour something else than others.

In a round a node sends all neighbours the same message. So it keeps one hash of what it sends, and one of what it takes
from each neighbour: h(t + 1) = SHA-256(h(t), t, message of round t), from the first round of a generation of the mesh.
It announces the first, signed, with its measurements, and a neighbour compares that with its own. A hash is about all
rounds before, so every later one shows that a message was another."""

import hashlib
from collections.abc import Mapping

OWN = -1  # in place of a neighbour's position: what this node sends


class Chains:
    """The running hashes of one node in one generation, as 64 hex digits, by the positions of the senders."""

    def __init__(self):
        self._done, self._hashes = -1, dict[int, str]()
        self._before = self._hashes  # of one round less: a step may fail after its messages have come

    def begin(self, done: int, hashes: Mapping[int, str]) -> None:
        """Continues after some rounds with the hashes as they were then. Without any, none is known from here on."""
        self._done, self._hashes, self._before = done, dict(hashes), {}

    def add(self, round: int, messages: Mapping[int, bytes]) -> None:
        """Adds the messages of a round, by sender. Does nothing for a round that was added before. Where a message is
        missing, there is no hash any more: a wrong one would blame an honest site."""
        if round < self._done:
            return
        self._before = known = self._hashes if round == self._done else {}
        self._hashes = {who: _next(known[who], round, text) for who, text in messages.items() if who in known}
        self._done = round + 1

    def after(self, done: int) -> dict[int, str]:
        """Returns the hashes after so many rounds; none if that was more than one round ago."""
        return dict({self._done: self._hashes, self._done - 1: self._before}.get(done, {}))


def _next(before: str, round: int, message: bytes) -> str:
    digest = hashlib.sha256(f"{before} {round} ".encode())
    digest.update(message)
    return digest.hexdigest()


def first_hash(generation: int, start: int) -> str:
    """Returns what the running hashes of a generation begin with."""
    return hashlib.sha256(f"generation {generation} from round {start}".encode()).hexdigest()
