"""Every message of a step exactly once, whatever streams are lost, repeated or reordered.

The training thread posts a step's messages and takes its neighbours'; streams come and go in another thread. A message
is logged before it is sent and after it was read, told durable only when it is, and kept until the other side says it
is durable there. So whoever restarts finds in its journal, or is sent again, all that it needs.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fairmesh.compression import DecodeError
from fairmesh.errors import FairmeshError, in_a_line
from fairmesh.mesh.wire.frames import (
    MESSAGE_HEAD_BYTES,
    Refused,
    held,
    message,
)
from fairmesh.mesh.wire.journal import Journal

_WINDOW = 64  # messages that a neighbour has not yet told durable; then the node waits
_AHEAD = 2  # messages of a neighbour held in memory: it sends step t + 1 once it has our step t
_LOOK_EVERY_S = 1.0
_AFTER_ROUNDS = 2  # steps: sums at the end
_BEFORE_THE_MODEL_IS_KNOWN = 1 << 16

Observe = Callable[[str, int], None]  # told of the points between which a crash may fall, and of the step there


class Holdings(NamedTuple):
    """What a side tells of the other's messages when a stream begins."""

    durable: int  # it never needs a step before this one again
    here: int  # the next step to send


@dataclass
class Counters:
    """Bytes over one edge, by what they were."""

    messages_out: int = 0
    messages_in: int = 0
    bytes_out: int = 0  # of the algorithm's messages, as the codec made them
    bytes_in: int = 0
    beside_out: int = 0  # greetings, heads and lengths of messages, acknowledgements, news, sums at the end
    beside_in: int = 0
    connections: int = 0
    refused: int = 0

    def sent(self, size: int, of_a_round: bool) -> None:
        self.messages_out += of_a_round
        self.bytes_out += size * of_a_round
        self.beside_out += MESSAGE_HEAD_BYTES + size * (not of_a_round)

    def received(self, size: int, of_a_round: bool) -> None:
        self.messages_in += of_a_round
        self.bytes_in += size * of_a_round
        self.beside_in += MESSAGE_HEAD_BYTES + size * (not of_a_round)


@dataclass
class _Edge:
    """One neighbour as this node sees it."""

    taken: int  # the next step to take from it
    durable: int  # every step before is durable here
    held: int = 0  # every step before is durable there
    outbox: dict[int, bytes | None] = field(default_factory=dict)  # by step, until durable there; None: in the journal
    inbox: dict[int, bytes] = field(default_factory=dict)  # arrived, not yet read
    cursor: int = 0  # the next step to put on the present stream
    told: int = -1  # the last `durable` told on the present stream
    stream: object | None = None
    last_seen: float | None = None  # seconds since the epoch
    counters: Counters = field(default_factory=Counters)

    def has_room(self) -> bool:
        return sum(payload is not None for payload in self.outbox.values()) < _WINDOW

    def due(self) -> int:
        """The next step that must arrive: after those in memory, or those read or logged."""
        return max(self.inbox) + 1 if self.inbox else max(self.taken, self.durable)


class Mailroom:
    """The messages between this node and its neighbours, by position among all nodes."""

    def __init__(self, neighbours: Sequence[int], journal: Journal, first: int, observe: Observe):
        """`first` is the step that this node will do next, as its checkpoint says."""
        self._journal, self._observe = journal, observe
        self.largest = _BEFORE_THE_MODEL_IS_KNOWN  # bytes of a message
        self.rounds = range(0)  # the steps that are an algorithm's rounds
        self._changed = threading.Condition()
        self._edges = {}
        for position in neighbours:
            known = journal.next_from(position)
            self._edges[position] = _Edge(first, max(first, known or 0), journal.held.get(position, 0))
        for step in journal.steps_sent():
            for position in journal.receivers(step):
                if position in self._edges and step >= self._edges[position].held:
                    self._edges[position].outbox[step] = None
        self._wake: Callable[[Iterable[int]], None] = lambda positions: None
        self._close: Callable[[object, str], None] = lambda stream, reason: None
        self._stop: FairmeshError | None = None
        self.waiting_for: dict[int, float] = {}  # position -> since when, while waiting
        self._unsettled, self._settling = threading.Event(), True
        self._spent: deque[float] = deque(maxlen=1000)  # seconds a step
        self._failure: FairmeshError | None = None
        self._posting_s = 0.0
        self._settler = threading.Thread(target=self._settle, name="journal", daemon=True)
        self._settler.start()

    def serve(self, wake: Callable[[Iterable[int]], None], close: Callable[[object, str], None]) -> None:
        """Connects the streams: `wake(positions)` when there is something to send, `close(stream, reason)`."""
        self._wake, self._close = wake, close

    # The training thread

    def post(self, step: int, payloads: Mapping[int, bytes]) -> None:
        """Logs and hands over a step's messages. What was logged before a restart must be what is posted now."""
        began = time.perf_counter()
        before = self._journal.sent(step)
        for position, payload in payloads.items():
            if position in before and before[position] != payload:
                raise FairmeshError(
                    f"step {step} gives another message now than before the restart: this machine does not compute the "
                    "same twice (another version of torch, or another number of threads?); restore what was changed"
                )
        fresh = {position: payload for position, payload in payloads.items() if position not in before}
        with self._changed:
            self._changed.wait_for(lambda: all(self._edges[p].has_room() for p in fresh) or self._stopped())
            self._raise_if_stopped()
        if fresh:
            self._observe("computed", step)
            self._journal.log_sent(step, fresh)
            self._observe("logged", step)
        with self._changed:
            for position, payload in fresh.items():
                if step >= self._edges[position].held:  # else a power cut lost it here, but not there
                    self._edges[position].outbox[step] = payload
        self._wake(fresh)
        self._posting_s = time.perf_counter() - began

    def take(self, step: int, positions: Sequence[int], read: Callable[[int, bytes], Any]) -> dict[int, Any]:
        """Each neighbour's message of a step as `read` gives it; one that `read` refuses is waited for again."""
        began = time.perf_counter()
        found: dict[int, Any] = {}
        for position in positions:
            logged = self._journal.received(position, step)
            if logged is not None:
                found[position] = read(position, logged)
                with self._changed:
                    self._edges[position].taken = max(self._edges[position].taken, step + 1)
        missing = [position for position in positions if position not in found]
        while missing:
            for position, payload in self._arrived(step, missing):
                try:
                    found[position] = read(position, payload)
                except DecodeError as error:
                    self.refuse(position, f"message of step {step}: {error}")
                    continue
                self._observe("received", step)
                self._journal.log_received(position, step, payload)
                self._observe("noted", step)
                with self._changed:
                    edge = self._edges[position]
                    edge.inbox.pop(step, None)
                    edge.taken = step + 1
                missing.remove(position)
                self.waiting_for = {other: since for other, since in self.waiting_for.items() if other != position}
                self._unsettled.set()
        self._spent.append(self._posting_s + time.perf_counter() - began)
        return found

    def _arrived(self, step: int, missing: Sequence[int]) -> list[tuple[int, bytes]]:
        """What is there of a step, as soon as there is something."""
        now = time.time()

        def there() -> list[tuple[int, bytes]]:
            edges = [(position, self._edges[position].inbox.get(step)) for position in missing]
            return [(position, payload) for position, payload in edges if payload is not None]

        with self._changed:
            while not (found := there()):
                self._raise_if_stopped()
                self.waiting_for = {position: self.waiting_for.get(position, now) for position in missing}
                self._changed.wait(_LOOK_EVERY_S)
        return found

    def stop(self, reason: FairmeshError) -> None:
        """Ends a wait of the training thread with this error."""
        with self._changed:
            self._stop = self._stop or reason
            self._changed.notify_all()

    def go_on(self) -> None:
        """Takes a stop back."""
        with self._changed:
            self._stop = None

    def _stopped(self) -> bool:
        return self._stop is not None or self._failure is not None

    def _raise_if_stopped(self) -> None:
        if self._failure or self._stop:
            raise self._failure or self._stop  # type: ignore[misc]

    # Durability

    def _settle(self) -> None:
        """Makes what was noted durable, and then lets it be told so."""
        while True:
            self._unsettled.wait()
            if not self._settling:
                return
            self._unsettled.clear()
            with self._changed:
                noted = {position: edge.taken for position, edge in self._edges.items()}
            try:
                self._journal.settle()
            except Exception as error:
                with self._changed:
                    self._failure = error if isinstance(error, FairmeshError) else FairmeshError(in_a_line(error))
                    self._changed.notify_all()
                return
            self._observe("settled", max(noted.values(), default=0))
            with self._changed:
                for position, step in noted.items():
                    self._edges[position].durable = max(self._edges[position].durable, step)

    def owed_to(self) -> list[int]:
        """Neighbours that have not told everything durable yet; of the others that is noted on disk."""
        with self._changed:
            owed = {position for position, edge in self._edges.items() if edge.outbox}
            free = {position: edge.held for position, edge in self._edges.items() if position not in owed}
        unnoted = {position: step for position, step in free.items() if self._journal.held.get(position, 0) < step}
        for position, step in unnoted.items():
            self._journal.log_held(position, step)
        if unnoted:
            self._journal.settle()
        return sorted(owed)

    def unsettled(self) -> dict[int, dict[int, bytes]]:
        """Messages that a neighbour may still need, by step and receiver."""
        found: dict[int, dict[int, bytes]] = {}
        with self._changed:
            for position, edge in self._edges.items():
                for step in edge.outbox:
                    found.setdefault(step, {})[position] = self._payload(position, step)
        return found

    def rotate(self, keep_from: int) -> None:
        """Begins a new segment of the journal at a checkpoint; what was received from step `keep_from` on stays."""
        self._journal.begin_segment(self.unsettled())
        self.owed_to()
        self._observe("segment begun", keep_from)
        self._journal.drop_before(keep_from)

    def journal_bytes(self) -> int:
        """Written since the last checkpoint."""
        return self._journal.bytes_since_segment

    def median_ms(self) -> float | None:
        """Of the last steps: the time in which the training thread logged, sent and waited."""
        return 1000 * statistics.median(self._spent) if self._spent else None

    def close(self) -> None:
        self._settling = False
        self._unsettled.set()
        self._settler.join()

    # The streams' thread

    def holdings(self, position: int) -> Holdings:
        """What to tell a neighbour of its messages."""
        with self._changed:
            edge = self._edges[position]
            return Holdings(edge.durable, edge.due())

    def connected(self, position: int, stream: object, theirs: Holdings) -> None:
        """A stream begins, and replaces the one there was."""
        with self._changed:
            edge = self._edges[position]
            if self.rounds and theirs.here > self.rounds.stop + _AFTER_ROUNDS:
                raise Refused(f"it says that it holds step {theirs.here - 1}, which this run does not have")
            first = min(edge.outbox, default=None)
            if first is not None and theirs.here < first:
                raise Refused(
                    f"it asks for step {theirs.here}, which it had told durable (the first kept is {first}): its state "
                    "is older than it was; restore the newest, or leave the mesh with it"
                )
            edge.stream = stream
            edge.cursor, edge.told = theirs.here, -1
            edge.counters.connections += 1
            self._forget(edge, theirs.durable)
            self._changed.notify_all()

    def disconnected(self, position: int, stream: object) -> None:
        with self._changed:
            if self._edges[position].stream is stream:
                self._edges[position].stream = None

    def untold(self, position: int) -> bool:
        """Whether something has become durable that no message has told yet."""
        edge = self._edges[position]
        return edge.told < edge.durable

    def outgoing(self, position: int, stream: object, tell: bool) -> list[tuple[int, bytes]]:
        """Messages to put on a stream now, with their steps; they also tell what is durable here, or, with `tell`, a
        frame of its own does (step -1)."""
        frames: list[tuple[int, bytes]] = []
        with self._changed:
            edge = self._edges[position]
            if edge.stream is not stream:
                return []
            for step in sorted(edge.outbox):
                if step >= edge.cursor:
                    payload = self._payload(position, step)
                    frames.append((step, message(step, edge.durable, payload)))
                    edge.cursor, edge.told = step + 1, edge.durable
                    edge.counters.sent(len(payload), step in self.rounds)
            if tell and edge.told < edge.durable:
                edge.told = edge.durable
                frames.append((-1, held(edge.durable)))
            return frames

    def arrived(self, position: int, stream: object, step: int, payload: bytes) -> bool:
        """Takes a message that came over a stream, or says that there is no room for it until others were read."""
        with self._changed:
            edge = self._edges[position]
            if edge.stream is not stream:
                return True
            edge.last_seen = time.time()
            due = edge.due()
            if step < due:
                raise Refused(f"a replayed message of step {step}; step {due} is due")
            if step > due:
                raise Refused(f"a message of step {step}, which lies in the future; step {due} is due")
            if len(payload) > self.largest:
                raise Refused(f"a message of {len(payload)} bytes; the largest of this experiment has {self.largest}")
            if len(edge.inbox) >= _AHEAD:  # it sends again what a power cut here lost
                return False
            edge.inbox[step] = payload
            edge.counters.received(len(payload), step in self.rounds)
            self._changed.notify_all()
            return True

    def held_there(self, position: int, stream: object, step: int) -> None:
        """A neighbour holds every message before this step durably."""
        with self._changed:
            edge = self._edges[position]
            if edge.stream is not stream:
                return
            edge.last_seen = time.time()
            if step > edge.cursor:
                raise Refused(f"it tells step {step} durable, but was sent only those before {edge.cursor}")
            self._forget(edge, step)
            self._changed.notify_all()

    def _payload(self, position: int, step: int) -> bytes:
        kept = self._edges[position].outbox[step]
        return self._journal.sent(step)[position] if kept is None else kept

    def _forget(self, edge: _Edge, before: int) -> None:
        edge.held = max(edge.held, before)
        edge.outbox = {step: payload for step, payload in edge.outbox.items() if step >= before}

    def seen(self, position: int, beside_in: int = 0, beside_out: int = 0) -> None:
        """Bytes other than messages went over an edge."""
        edge = self._edges[position]
        if beside_in:
            edge.last_seen = time.time()
        edge.counters.beside_in += beside_in
        edge.counters.beside_out += beside_out

    def refuse(self, position: int, reason: str, over: object = None) -> None:
        """Drops what a neighbour sent and was not taken, and closes its stream with the reason; one that has been
        replaced is none of its any more."""
        with self._changed:
            edge = self._edges[position]
            if over is not None and edge.stream is not over:
                return
            edge.inbox.clear()
            edge.counters.refused += 1
            stream, edge.stream = edge.stream, None
        if stream is not None:
            self._close(stream, reason)

    def view(self) -> dict[int, dict[str, Any]]:
        """Each edge in numbers, for people and monitors."""
        with self._changed:
            return {
                position: {
                    "connected": edge.stream is not None,
                    "last_seen": edge.last_seen,
                    "kept_for_it": len(edge.outbox),
                    **vars(edge.counters),
                }
                for position, edge in self._edges.items()
            }
