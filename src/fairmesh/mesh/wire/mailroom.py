"""Delivers every message of a step exactly once, even if streams are lost, repeated or reordered.

The training thread posts the messages of a step and takes those of its neighbours. Streams come and go in another
thread. Outgoing messages are logged before they are sent, and kept until the neighbour acknowledges them. Incoming
messages are logged once decoded, and acknowledged only after fsync. So a node that restarts finds all messages it needs
in its journal, or its neighbours send them again. A node whose journal was damaged asks for steps that it had
acknowledged; its neighbours send them from their journals, which go back to their oldest kept checkpoint.
"""

import hashlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from fairmesh.compression import DecodeError
from fairmesh.errors import FairmeshError, in_a_line
from fairmesh.mesh.fields import shortened
from fairmesh.mesh.wire.chains import Chains
from fairmesh.mesh.wire.frames import Refused, StateLost, ack, message
from fairmesh.mesh.wire.journal import Journal

_WINDOW = 64  # messages that a neighbour has not acknowledged; with more, the node waits
_AHEAD = 2  # messages of a neighbour kept in memory: it sends step t + 1 once it has our step t
_AT_ONCE = 16  # messages put on a stream before others are read from the journal
_LOOK_EVERY_S = 1.0
_ACK_STEPS, _ACK_S = 2.0, (0.05, 5.0)  # so long an acknowledgement waits for a message to ride on; at least and at most
BEFORE_THE_CHOICE, _LAST = 3, 1  # steps after the rounds: two sums and the comparison of results; that all have one
_BEFORE_THE_MODEL_IS_KNOWN = 1 << 16
_REASON = 500  # characters that are kept of a reason, which may quote what a neighbour sent

_HELP = (
    "put back its newest state from a backup, let all sites vote to give it a new one with `fairmesh mesh restore`, or "
    "vote it out"
)

Observe = Callable[[str, int], None]  # observe(point, step): called at each point where tests let a node crash


class Progress(NamedTuple):
    """How far one side has received the other's messages; sent when a stream begins."""

    durable: int  # all steps before this one are on disk and are never needed again
    due: int  # the next step to send


@dataclass
class Counters:
    """Traffic over one edge since the site began, also before restarts of its node."""

    messages_out: int = 0
    messages_in: int = 0
    bytes_out: int = 0  # the payload: the algorithm's messages as encoded, which a simulation counts too
    bytes_in: int = 0
    wire_out: int = 0  # bytes given to the socket: all records of TLS with its handshake
    wire_in: int = 0
    connections: int = 0
    refused: int = 0

    def view(self) -> dict[str, int]:
        """Returns the counts, with what on the wire is no payload: TLS, greetings, heads of messages, acknowledgements,
        announcements, heartbeats, and the sums at the end."""
        return vars(self) | {
            "overhead_out": max(0, self.wire_out - self.bytes_out),
            "overhead_in": max(0, self.wire_in - self.bytes_in),
        }


@dataclass(frozen=True)
class Refusal:
    """Why what a neighbour sent was refused last, until a message of it is accepted again."""

    reason: str = ""
    since: float = 0.0  # seconds since the epoch
    times: int = 0  # 0: nothing was refused
    step: int | None = None  # of the refused message; None if it was none
    digest: str | None = None  # its SHA-256

    def again(self, reason: str, step: int | None = None, digest: str | None = None) -> "Refusal":
        """Returns the refusal after one more, for this reason."""
        return Refusal(shortened(reason, _REASON), self.since or time.time(), self.times + 1, step, digest)


@dataclass
class _Edge:
    """The state of the exchange with one neighbour."""

    taken: int  # the next step to take from it
    durable: int  # every earlier step is durable here
    acknowledged: int = 0  # every earlier step is durable there
    repeated: int = 0  # the journal lost a step before this one, so that earlier ones may come again
    posted: int = 0  # every earlier step was sent to it, before a restart or since
    had: int = -1  # it had every earlier step when its first stream since the restart began; -1: there was none
    next_post: int = 0  # every earlier step was sent to it and is not computed again
    outbox: dict[int, bytes | None] = field(default_factory=dict)  # by step, until acknowledged; None: in the journal
    inbox: dict[int, bytes] = field(default_factory=dict)  # arrived, not yet read
    cursor: int = 0  # the next step to put on the current stream
    ack_sent: int = -1  # the last `durable` sent on the current stream
    posted_at: float = 0.0  # when the last step was posted, by time.monotonic(),
    step_s: float = 0.0  # and how long after the one before
    stream: Any = None
    last_seen: float = 0.0  # seconds since the epoch; 0: never
    counters: Counters = field(default_factory=Counters)
    refusal: Refusal = Refusal()
    state_lost: Refusal = Refusal()  # what it says if it says that this side has lost its state

    def has_room(self) -> bool:
        return sum(payload is not None for payload in self.outbox.values()) < _WINDOW

    def due(self) -> int:
        """Returns the next step that must arrive: after those in memory, read or logged."""
        return max(self.inbox) + 1 if self.inbox else max(self.taken, self.durable)


class Mailroom:
    """The messages between this node and its neighbours.

    Args:
        neighbours: Their positions among all nodes.
        journal: Where messages are logged.
        first: The step that this node does next, according to its checkpoint.
        observe: Called at each point where tests let a node crash.
        counters: What has gone over the edges before, by position. They go on counting. Default: nothing.
    """

    def __init__(
        self,
        neighbours: Sequence[int],
        journal: Journal,
        first: int,
        observe: Observe,
        counters: Mapping[int, Counters] = MappingProxyType({}),
    ):
        self._journal, self._observe, self.first = journal, observe, first
        self.largest = _BEFORE_THE_MODEL_IS_KNOWN  # bytes per message
        self.rounds = range(0)  # the steps that are rounds of the algorithm
        self.choice = 0  # steps in which sites choose their own models
        self.chains = Chains()  # of the messages of rounds
        self._changed = threading.Condition()
        self._edges = {}
        for position in neighbours:
            durable, known = journal.missing_from(position, first), journal.acknowledged.get(position, 0)
            counted = counters.get(position) or Counters()
            self._edges[position] = _Edge(first, durable, known, next_post=first, counters=counted)
            if durable < journal.next_from(position):  # a step in between is lost
                self._edges[position].repeated = journal.next_from(position)
        for step in journal.steps_sent():
            for position in journal.receivers(step):
                if position in self._edges:
                    self._edges[position].posted = step + 1
                    if step >= self._edges[position].acknowledged:
                        self._edges[position].outbox[step] = None
        self._wake: Callable[[Iterable[int]], None] = lambda positions: None
        self._close: Callable[[object, str], None] = lambda stream, reason: None
        self._stop: FairmeshError | None = None
        self.waiting_for: dict[int, float] = {}  # position -> since when, by time.monotonic(), while waiting
        self._unsettled, self._settling = threading.Event(), True
        self.open: dict[int, bool] = {}  # by position: whether there is a stream, if only for announcements
        self.alone = False  # nothing can arrive that the journal does not have
        self.other_machine = ""  # how this machine differs from the one that sent what the journal has, if it does
        self.syncing_since: float | None = None  # by time.monotonic(), while the journal is synced to disk
        self._spent: deque[float] = deque(maxlen=1000)  # seconds per step
        self._failure: FairmeshError | None = None
        self._posting_s = 0.0
        self._settler = threading.Thread(target=self._settle, name="journal", daemon=True)
        self._settler.start()

    def serve(self, wake: Callable[[Iterable[int]], None], close: Callable[[object, str], None]) -> None:
        """Connects the streams. `wake(positions)` is called when there is something to send, and
        `close(stream, reason)` when a stream must end."""
        self._wake, self._close = wake, close

    # The training thread

    def as_sent(self, step: int, payloads: Mapping[int, bytes]) -> dict[int, bytes]:
        """Returns the messages of a step as they were sent before a restart, or else as they are given. What was sent
        is final, since neighbours may have used it, but another machine may compute other last bits.

        Raises:
            FairmeshError: If a neighbour may have a message that the journal has lost and this machine may not be able
                to compute again.
        """
        before = self._journal.sent(step)
        known = {payload: before[position] for position, payload in payloads.items() if position in before}
        lost = [p for p, payload in payloads.items() if p not in before and payload not in known]
        if lost and self.other_machine:  # they may have it, though the journal does not
            refusal = (
                f"the journal has lost the message of step {step}, which a neighbour has, and this machine may compute "
                f"another one ({self.other_machine}). Start the node once on a machine and with settings as before, "
                "until the log says that it trains; then it can move. Or let the other sites vote this site out"
            )
            self._wait_for(lambda: [p for p in lost if self._edges[p].had < 0], time.monotonic(), refusal)
            if any(step < self._edges[position].had for position in lost):
                raise FairmeshError(refusal)
        return {position: before.get(position, known.get(text, text)) for position, text in payloads.items()}

    def _wait_for(self, awaited: Callable[[], Iterable[int]], since: float, if_alone: str = "") -> None:
        """Waits as long as there are neighbours to wait for, from a moment on by time.monotonic(). Raises an error with
        the text `if_alone`, if one is given and none can answer."""
        with self._changed:
            while positions := awaited():
                self._raise_if_stopped()
                if self.alone and if_alone:
                    raise FairmeshError(if_alone)
                self.waiting_for = dict.fromkeys(positions, since)
                self._changed.wait(_LOOK_EVERY_S)
            self.waiting_for = {}

    def post(self, step: int, payloads: Mapping[int, bytes]) -> None:
        """Logs the messages of a step and hands them to the streams.

        Raises:
            FairmeshError: If a message differs from the one logged for this step before a restart; see `as_sent`.
        """
        began = time.perf_counter()
        before = self._journal.sent(step)
        for position, payload in payloads.items():
            if position in before and before[position] != payload:
                raise FairmeshError(
                    f"step {step} gives a different message than the one that was sent before a restart"
                )
        fresh = {position: payload for position, payload in payloads.items() if position not in before}
        if fresh:  # a node that must stop first repeats what it had done before a restart
            # Neighbours that have not acknowledged the last messages, or their disks, hang.
            self._wait_for(lambda: [p for p in fresh if not self._edges[p].has_room()], time.monotonic())
            self._raise_if_stopped()
            self._observe("computed", step)
            self._journal.log_sent(step, fresh)
            self._observe("logged", step)
        with self._changed:
            for position, payload in fresh.items():
                if step >= self._edges[position].acknowledged:  # else the neighbour has it; a power cut lost it here
                    self._edges[position].outbox[step] = payload
            for position in payloads:
                edge, now = self._edges[position], time.monotonic()
                edge.next_post, edge.posted = step + 1, max(edge.posted, step + 1)
                edge.posted_at, edge.step_s = now, now - edge.posted_at if edge.posted_at else 0.0
        self._wake(fresh)
        self._posting_s = time.perf_counter() - began

    def owe(self, position: int, step: int) -> None:
        """Notes that a neighbour will be sent a message of this step, which is before this node's next round."""
        with self._changed:
            edge = self._edges[position]
            edge.next_post = step

    def take(
        self,
        step: int,
        positions: Sequence[int],
        read: Callable[[int, bytes], Any],
        check: Callable[[int, Any], None] = lambda position, found: None,
    ) -> dict[int, Any]:
        """Waits for the messages of a step.

        Args:
            step: The step.
            positions: From whom.
            read: Decodes a message. Raises DecodeError if it must be refused.
            check: Raises DecodeError if a decoded message must be refused. It is not asked about messages in the
                journal, which have been accepted before. Default: accept all.

        Returns:
            For each position, what `read` makes of its message. A message that is refused is awaited again.
        """
        began, since = time.perf_counter(), time.monotonic()
        found: dict[int, Any] = {}
        for position in positions:
            logged = self._journal.received(position, step)
            if logged is not None:
                found[position] = read(position, logged)
                with self._changed:
                    edge = self._edges[position]
                    edge.taken = max(edge.taken, step + 1)
                    edge.inbox.pop(step, None)  # it came again after one that the journal had lost
        missing = [position for position in positions if position not in found]
        while missing:
            for position, payload in self._arrived(step, missing, since):
                try:
                    decoded = read(position, payload)
                    check(position, decoded)
                except DecodeError as error:
                    reason = f"message of step {step}: {error}"
                    self.refuse(position, reason, message=(step, hashlib.sha256(payload).hexdigest()))
                    continue
                found[position] = decoded
                self._observe("received", step)
                self._journal.log_received(position, step, payload)
                self._observe("noted", step)
                with self._changed:
                    edge = self._edges[position]
                    edge.inbox.pop(step, None)
                    edge.taken, edge.refusal = step + 1, Refusal()
                missing.remove(position)
                self._unsettled.set()
        self._spent.append(self._posting_s + time.perf_counter() - began)
        return found

    def _arrived(self, step: int, missing: Sequence[int], since: float) -> list[tuple[int, bytes]]:
        """Waits for at least one missing message of a step; returns those that are there."""

        lost = (
            f"the journal has lost messages of step {step}, which this node needs to go back; put back its state from "
            "a backup, or let all sites vote to give it a new one with `fairmesh mesh restore`"
        )

        def arrived() -> list[tuple[int, bytes]]:
            inboxes = [(position, self._edges[position].inbox) for position in missing]
            return [(position, inbox[step]) for position, inbox in inboxes if step in inbox]

        with self._changed:
            self._wait_for(lambda: () if arrived() else missing, since, lost)
            return arrived()

    def stop(self, reason: FairmeshError) -> None:
        """Ends any wait of the training thread with this error."""
        with self._changed:
            self._stop = self._stop or reason
            self._changed.notify_all()

    def resume(self) -> None:
        """Undoes `stop`."""
        with self._changed:
            self._stop = None

    def _raise_if_stopped(self) -> None:
        if self._failure or self._stop:
            raise self._failure or self._stop  # type: ignore[misc]

    # Durability

    def _settle(self) -> None:
        """Syncs the journal to disk, then allows acknowledgements of what it contains."""
        while True:
            self._unsettled.wait()
            if not self._settling:
                return
            self._unsettled.clear()
            with self._changed:
                noted = {position: edge.taken for position, edge in self._edges.items()}
            self.syncing_since = time.monotonic()
            try:
                self._journal.settle()
            except Exception as error:
                with self._changed:
                    self._failure = error if isinstance(error, FairmeshError) else FairmeshError(in_a_line(error))
                    self._changed.notify_all()
                return
            self.syncing_since = None
            self._observe("settled", max(noted.values(), default=0))
            with self._changed:
                for position, step in noted.items():
                    self._edges[position].durable = max(self._edges[position].durable, step)

    def unacknowledged_by(self) -> list[int]:
        """Returns the neighbours that have not acknowledged everything; logs to disk that the others have."""
        with self._changed:
            waiting = {position for position, edge in self._edges.items() if edge.acknowledged < edge.posted}
            free = {position: edge.acknowledged for position, edge in self._edges.items() if position not in waiting}
        known = self._journal.acknowledged
        unlogged = [position for position, step in free.items() if known.get(position, 0) < step]
        for position in unlogged:
            self._journal.log_ack(position, free[position])
        if unlogged:
            self._journal.settle()
        return sorted(waiting)

    def unsettled(self) -> dict[int, dict[int, bytes]]:
        """Returns the messages that a neighbour may still need, by step and receiver."""
        found: dict[int, dict[int, bytes]] = {}
        with self._changed:
            for position, edge in self._edges.items():
                for step in edge.outbox:
                    payload = self._payload(position, step)
                    if payload is not None:
                        found.setdefault(step, {})[position] = payload
        return found

    def rotate(self, keep_from: int) -> None:
        """Begins a new journal segment at a checkpoint; keeps what was received from step `keep_from` on."""
        self._journal.begin_segment(self.unsettled())
        self.unacknowledged_by()
        self._observe("segment begun", keep_from)
        self._journal.drop_before(keep_from)

    def first_unfinished(self, first: int) -> int:
        """Returns the first step, from `first` on, whose messages are not all in the journal, or after which this node
        has sent nothing: it may not have finished it."""
        received = min((self._journal.missing_from(position, first) for position in self._edges), default=first)
        return max(first, min(received, max(self._journal.steps_sent(), default=first)))

    def rounds_sent(self) -> int:
        """Returns of how many rounds this node has sent its messages, or has them to send."""
        with self._changed:
            posted = max((edge.posted for edge in self._edges.values()), default=0)
        return max(0, min(posted - self.rounds.start, len(self.rounds)))

    def journal_bytes(self) -> int:
        """Returns the bytes written since the last checkpoint."""
        return self._journal.bytes_since_segment

    def median_ms(self) -> float | None:
        """Returns the median time per step in which the training thread logged, sent and waited, over recent steps."""
        return 1000 * statistics.median(self._spent) if self._spent else None

    def close(self) -> None:
        self._settling = False
        self._unsettled.set()
        self._settler.join()

    # The streams' thread

    def progress(self, position: int) -> Progress:
        """Returns how far this side has received a neighbour's messages."""
        with self._changed:
            edge = self._edges[position]
            return Progress(edge.durable, edge.due())

    def connected(self, position: int, stream: object, theirs: Progress, told: int = -1) -> None:
        """Begins a stream, which replaces the previous one. The greeting has `told` the neighbour that all steps before
        this one are durable here."""
        with self._changed:
            edge = self._edges[position]
            after_rounds = BEFORE_THE_CHOICE + self.choice + _LAST
            if self.rounds and theirs.due > self.rounds.stop + after_rounds:
                raise Refused(f"it claims to have step {theirs.due - 1}, which this run does not have")
            edge.had = theirs.due if edge.had < 0 else edge.had
            asked = range(theirs.due, edge.next_post)
            lost = next((s for s in asked if s not in edge.outbox and position not in self._journal.receivers(s)), None)
            if theirs.due == 0 and edge.posted and edge.durable > 1 and 0 not in edge.outbox:
                raise StateLost(
                    "it begins again, but it has taken part in this run already: what it computes now may differ from "
                    f"what it has sent; {_HELP}"
                )
            if lost is not None:
                raise StateLost(
                    f"it asks for step {lost}, which it had acknowledged and which is no longer kept here: it has "
                    f"lost what it had; {_HELP}"
                )
            if theirs.durable < edge.acknowledged:
                edge.acknowledged = theirs.durable
                self._journal.log_ack(position, theirs.durable)
            edge.stream = stream
            edge.cursor, edge.ack_sent = theirs.due, told
            edge.counters.connections += 1
            self._forget(edge, theirs.durable)
            self._changed.notify_all()

    def disconnected(self, position: int, stream: object) -> None:
        with self._changed:
            edge = self._edges[position]
            if edge.stream is stream:
                edge.stream = None

    def ack_due(self, position: int) -> bool:
        """Returns whether messages have become durable here that are not acknowledged yet, and no message has carried
        the acknowledgement, though one was to be expected."""
        edge, (least, most) = self._edges[position], _ACK_S
        patience = min(max(least, _ACK_STEPS * edge.step_s), most)
        return edge.ack_sent < edge.durable and time.monotonic() - edge.posted_at >= patience

    def outgoing(self, position: int, stream: object, with_ack: bool) -> list[tuple[int, bytes]]:
        """Returns the next frames to put on a stream, with their steps. Messages carry an acknowledgement; with
        `with_ack`, a frame of its own (step -1) follows where one is due."""
        frames: list[tuple[int, bytes]] = []
        with self._changed:
            edge = self._edges[position]
            if edge.stream is not stream:
                return []
            while edge.cursor < edge.posted and len(frames) < _AT_ONCE:
                step, payload = edge.cursor, self._payload(position, edge.cursor)
                if payload is None:  # the journal has lost it, and the rounds done again have not come to it yet
                    break
                frames.append((step, message(step, edge.durable, payload)))
                edge.cursor, edge.ack_sent = step + 1, edge.durable
                edge.counters.messages_out += step in self.rounds
                edge.counters.bytes_out += len(payload) * (step in self.rounds)
            if with_ack and edge.ack_sent < edge.durable:
                edge.ack_sent = edge.durable
                frames.append((-1, ack(edge.durable)))
            return frames

    def arrived(self, position: int, stream: object, step: int, payload: bytes) -> bool:
        """Takes a message that came over a stream. Returns False if there is no room until others have been read."""
        with self._changed:
            edge = self._edges[position]
            if edge.stream is not stream:
                return True
            edge.last_seen = time.time()
            due = edge.due()
            if step < due and step < edge.repeated:
                return True
            if step < due:
                raise Refused(f"a replayed message of step {step}; step {due} is due")
            if step > due:
                raise Refused(f"a message of step {step}, which lies in the future; step {due} is due")
            if len(payload) > self.largest:
                raise Refused(f"a message of {len(payload)} bytes; the largest of this experiment has {self.largest}")
            if len(edge.inbox) >= _AHEAD:  # the neighbour is sending again what a power cut lost here
                return False
            edge.inbox[step] = payload
            edge.counters.messages_in += step in self.rounds
            edge.counters.bytes_in += len(payload) * (step in self.rounds)
            self._changed.notify_all()
            return True

    def acknowledged(self, position: int, stream: object, step: int, alone: bool = False) -> None:
        """Takes a neighbour's acknowledgement of every message before this step. One that is `alone` and not part of a
        message is refused if it says nothing new."""
        with self._changed:
            edge = self._edges[position]
            if edge.stream is not stream:
                return
            edge.last_seen, edge.state_lost = time.time(), Refusal()
            if step > edge.cursor:
                raise Refused(f"it acknowledges step {step}, but was sent only those before {edge.cursor}")
            if alone and step <= edge.acknowledged:
                raise Refused(f"it acknowledges step {step} again; {edge.acknowledged} was acknowledged before")
            self._forget(edge, step)
            self._changed.notify_all()

    def _payload(self, position: int, step: int) -> bytes | None:
        """Returns what is sent to a neighbour in a step, or None if it is neither in memory nor in the journal."""
        kept = self._edges[position].outbox.get(step)
        return self._journal.sent(step).get(position) if kept is None else kept

    def _forget(self, edge: _Edge, before: int) -> None:
        edge.acknowledged = max(edge.acknowledged, before)
        edge.outbox = {step: payload for step, payload in edge.outbox.items() if step >= before}

    def carried(self, position: int, wire_in: int = 0, wire_out: int = 0) -> None:
        """Counts bytes of an edge's connection."""
        edge = self._edges[position]
        if wire_in:
            edge.last_seen = time.time()
        edge.counters.wire_in += wire_in
        edge.counters.wire_out += wire_out

    def met_all(self) -> bool:
        """Returns whether every neighbour has been connected since this was opened, if only for announcements."""
        with self._changed:
            return all(edge.last_seen for edge in self._edges.values())

    def refuse(
        self, position: int, reason: str, over: object = None, message: tuple[int | None, str | None] = (None, None)
    ) -> None:
        """Drops what a neighbour sent and nobody took yet, and closes its stream with the reason. Does nothing for a
        stream that has been replaced.

        Args:
            position: The neighbour.
            reason: Why.
            over: The stream over which it came. Default: the current one.
            message: The step and the SHA-256 of the refused message. Default: it was none.
        """
        with self._changed:
            edge = self._edges[position]
            if over is not None and edge.stream is not over:
                return
            edge.inbox.clear()
            self.note_refusal(position, reason, *message)
            stream, edge.stream = edge.stream, None
        if stream is not None:
            self._close(stream, reason)

    def note_refusal(self, position: int, reason: str, step: int | None = None, digest: str | None = None) -> None:
        """Notes that something a neighbour sent was refused: a message of a step, or something else."""
        with self._changed:
            edge = self._edges[position]
            edge.counters.refused += 1
            edge.refusal = edge.refusal.again(reason, step, digest)

    def has_sent(self, position: int, step: int, digest: str) -> bool | None:
        """Returns whether this node has sent a neighbour a message of a step with this SHA-256; None if it no longer
        has what it sent then."""
        with self._changed:
            edge = self._edges.get(position)
            if edge is None or step >= edge.posted:
                return False
            payload = self._payload(position, step)
        return None if payload is None else hashlib.sha256(payload).hexdigest() == digest

    def has_taken(self, position: int, step: int, digest: str) -> bool | None:
        """Returns whether this node has accepted a neighbour's message of a step with this SHA-256; None if it has none
        of that step."""
        with self._changed:
            payload = self._journal.received(position, step) if position in self._edges else None
        return None if payload is None else hashlib.sha256(payload).hexdigest() == digest

    def note_state_lost(self, position: int, stream: object, reason: str) -> None:
        """Notes that a neighbour says that this side has lost its state, and takes no messages over this stream."""
        self.disconnected(position, stream)
        with self._changed:
            edge = self._edges[position]
            edge.state_lost = edge.state_lost.again(reason)

    def state_lost(self) -> dict[int, Refusal]:
        """Returns what neighbours say who say that this side has lost its state, and have taken nothing since."""
        with self._changed:
            return {position: edge.state_lost for position, edge in self._edges.items() if edge.state_lost.times}

    def refusals(self) -> dict[int, Refusal]:
        """Returns the refusals of neighbours, none of whose messages were accepted since."""
        with self._changed:
            return {position: edge.refusal for position, edge in self._edges.items() if edge.refusal.times}

    def view(self) -> dict[int, dict[str, Any]]:
        """Returns the state and the counters of each edge, for status and monitoring."""
        with self._changed:
            return {
                position: {
                    "connected": edge.stream is not None or self.open.get(position, False),
                    "last_seen": edge.last_seen or None,
                    "unacknowledged": len(edge.outbox),
                    **edge.counters.view(),
                }
                for position, edge in self._edges.items()
            }
