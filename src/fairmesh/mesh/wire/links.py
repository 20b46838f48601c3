"""The streams of a node: one connection to each neighbour. One end dials, the other listens.

The carrier authenticates peers; over TLS, a stranger without a certificate of the mesh's authority fails in the
handshake. A peer is known by its authenticated name, and only neighbours are answered.
"""

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fairmesh.errors import FairmeshError, in_a_line
from fairmesh.mesh.announcements import BYTES_PER_SECOND
from fairmesh.mesh.enrol import certificates
from fairmesh.mesh.wire import frames
from fairmesh.mesh.wire.bulletin import A_FRAME, Bulletin
from fairmesh.mesh.wire.carrier import Carrier, Peer
from fairmesh.mesh.wire.connections import CannotConnect, ConnectionLost
from fairmesh.mesh.wire.frames import Kind, Refused, RefusedThere, StateLost
from fairmesh.mesh.wire.limits import LogLimiter, Report, TokenBucket
from fairmesh.mesh.wire.mailroom import Mailroom, Observe, Progress
from fairmesh.mesh.wire.probes import answer_probes, probes_allowed
from fairmesh.mesh.wire.tls_stream import Credentials

_FIRST_TELLING_S, _TELL_EVERY_S = 1.0, 60.0
_GREETING_S = 20.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 15.0
_ACK_S = 0.05
_ROUTINE_S = 0.5  # so long routine news wait for a message to ride on
_AT_ONCE_BYTES = 1 << 16  # of frames that are sent in one piece
_STREAMS = 8  # per neighbour at once: the current one, those it replaces, and checks
_REPORT_EVERY_S = 5.0
_NEWS_AGAIN_S = 120.0
_LOOK_AT_CLOCK_S = 30.0  # whether a certificate has expired; people may have set the clock
# From one neighbour: what two members that flood all others can say. News have their price packed and unpacked.
_NEWS_BYTES_PER_S = 4 * BYTES_PER_SECOND
_NEWS_BYTES_AT_ONCE, _NEWS_BYTES_PER_SITE = 1 << 20, 1 << 16
_FRAME_BYTES = 100  # that a frame of news costs its sender besides what is in it
_USELESS_PER_S, _USELESS_AT_ONCE = 10.0, 100.0  # frames that are not read over a stream for news only
_TOLD_AGAIN_PER_S, _TOLD_AGAIN_AT_ONCE = 1 / 60, 3.0  # that a neighbour may ask for all news


@dataclass(frozen=True)
class Neighbour:
    """A site that this node exchanges messages with."""

    name: str
    position: int
    address: str  # "" if the neighbour dials this side


class _Stream:
    """One connection after its greeting; either side can end it."""

    def __init__(self, connection: Peer):
        self.connection, self.wire_in, self.wire_out = connection, 0, 0  # bytes of it that are counted
        self.useless = TokenBucket(_USELESS_PER_S, _USELESS_AT_ONCE)
        self.finished_there = False
        self.wake, self.room, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.reason = ""  # why it must end
        self.news_sent = 0
        self.finished_sent = False
        self.only_news = False
        self.process: Any = None  # which start of the neighbour's node this is
        self.ack_due = False  # send an acknowledgement of its own, since no message carried one
        self.missed = False  # news that could not be taken,
        self.ask_again = False  # which the neighbour is to tell again


@dataclass(eq=False)
class Links:
    """The connections to all neighbours, in a thread of their own between `start` and `stop`."""

    neighbours: Sequence[Neighbour]
    credentials: Credentials
    carrier: Carrier
    mailroom: Mailroom
    bulletin: Bulletin
    greeting: Callable[[], dict[str, Any]]  # who this is, and what both sides must agree on
    check: Callable[[str, Mapping[str, Any]], bool]  # raises Refused; False: exchange news only
    report: Report
    largest: int  # bytes per message
    observe: Observe
    left: Collection[Neighbour] = ()  # former neighbours that are no longer in the mesh
    refusal: Callable[[str, bytes], str] = lambda name, certificate: ""  # of a key that is not confirmed

    def __post_init__(self):
        self._by_name = {neighbour.name: neighbour for neighbour in self.neighbours}
        self._limiter, self._open = LogLimiter(self.report), Counter[str]()
        at_once = (
            _NEWS_BYTES_AT_ONCE + len(self.bulletin.terms.neighbours) * _NEWS_BYTES_PER_SITE
        )  # all is told when a stream begins
        self._news_allowed = {name: TokenBucket(_NEWS_BYTES_PER_S, at_once) for name in self._by_name}
        self._asked_again = {name: TokenBucket(_TOLD_AGAIN_PER_S, _TOLD_AGAIN_AT_ONCE) for name in self._by_name}
        self._probes_allowed = {name: probes_allowed() for name in self._by_name}
        self._streams: dict[str, _Stream] = {}
        self._loop: Any = None  # of the thread, once it runs
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._ready, self._stopping = threading.Event(), asyncio.Event()
        self._failed: FairmeshError | None = None
        self._finished: set[str] = set()  # neighbours with whom this node is done, in both directions
        self._finished_there: set[str] = set()
        self._finished_sent: set[str] = set()
        self._routine = False  # there are news that need not go at once
        self.all_finished = threading.Event()

    # From the training thread

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()
        if self._failed:
            raise self._failed

    def stop(self) -> None:
        if self._thread.is_alive():
            self._call(self._stopping.set)
            self._thread.join(10)

    def finish(self, needed_by: Sequence[int] = ()) -> None:
        """Tells neighbours that this node needs nothing more from them. Leaves out those in `needed_by`, which still
        need something from this node. So a neighbour that gets this message may exit: this node knows, also after a
        restart, that it needs nothing more."""
        free = {neighbour.name for neighbour in self.neighbours if neighbour.position not in needed_by}
        if not free <= self._finished:
            self._finished |= free
            self._wake_all()

    def _wake(self, positions: Iterable[int]) -> None:
        """Lets the streams of these neighbours look for something to send. Can be called from any thread."""
        names = [neighbour.name for neighbour in self.neighbours if neighbour.position in positions]

        def wake() -> None:
            for stream in filter(None, map(self._streams.get, names)):
                stream.wake.set()
                stream.room.set()

        self._call(wake)

    def _call(self, function: Callable[[], None]) -> None:
        """Calls a function in the thread, if that runs. Can be called from any thread."""
        if self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _end(self, stream: Any, reason: str) -> None:
        """Ends a stream. Can be called from any thread."""
        stream.reason = stream.reason or reason
        self._call(stream.ended.set)

    def _wake_all(self) -> None:
        self._wake([neighbour.position for neighbour in self.neighbours])

    # The thread

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except FairmeshError as error:
            self._failed = error
        except Exception as error:
            self._failed = FairmeshError(f"the links of this node failed: {in_a_line(error)}")
            self.mailroom.stop(self._failed)
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._unexpected)
        self.mailroom.serve(self._wake, self._end)
        self.bulletin.changed = self._news_came
        await self.carrier.open(self.largest, self._answer, self._turned_away)
        work = [self._dial(neighbour) for neighbour in self.neighbours if neighbour.address]
        work += [self._tell(former) for former in self.left if former.address]
        work += [_every(_REPORT_EVERY_S, self._limiter.flush), _every(_ACK_S, self._send_acks)]
        work += [_every(_ROUTINE_S, self._send_routine), _every(_NEWS_AGAIN_S, self._ask_again)]
        tasks = [asyncio.create_task(task) for task in work]
        self._ready.set()
        await self._stopping.wait()
        for stream in self._streams.values():
            stream.ended.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self.carrier.close(), return_exceptions=True)
        self._limiter.close()

    def _turned_away(self, address: str, reason: str) -> None:
        self._limiter("warning", "refused", address=address, reason=reason)

    def _unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs what asyncio would print, such as that the system cannot accept more connections."""
        self._limiter("warning", "network", reason=f"{context['message']}: {context.get('exception')}")

    def _send_acks(self) -> None:
        """Acknowledges what has become durable, where no message has carried the acknowledgement."""
        for name, stream in self._streams.items():
            stream.room.set()
            self._count(self._by_name[name], stream)
            if self.mailroom.ack_due(self._by_name[name].position):
                stream.ack_due = True
                stream.wake.set()

    def _count(self, neighbour: Neighbour, stream: _Stream) -> None:
        """Counts what has gone over a stream's connection since this was called last."""
        wire_in, wire_out = stream.connection.wire_in, stream.connection.wire_out
        self.mailroom.carried(neighbour.position, wire_in - stream.wire_in, wire_out - stream.wire_out)
        stream.wire_in, stream.wire_out = wire_in, wire_out

    def _news_came(self, urgent: bool = True) -> None:
        """Sends news at once, or with the next message. Can be called from any thread."""
        if urgent:
            self._wake_all()
        self._routine = True

    def _send_routine(self) -> None:
        """Sends news on which no message has come by."""
        if self._routine:
            self._routine = False
            for stream in self._streams.values():
                stream.wake.set()

    def _ask_again(self) -> None:
        """Asks neighbours for all news where some could not be taken."""
        for stream in self._streams.values():
            stream.ask_again, stream.missed = stream.missed or self.bulletin.waits_for_keys(), False
            if stream.ask_again:
                stream.wake.set()

    async def _dial(self, neighbour: Neighbour) -> None:
        lost = time.monotonic()
        pause = _FIRST_PAUSE_S
        while True:
            met = math.inf
            try:
                async with self.carrier.dialled(neighbour.address, neighbour.name) as connection:
                    met = time.monotonic()
                    await self._converse(neighbour, connection)
            except CannotConnect as error:
                self._limiter("warning", "cannot connect", neighbour.name, str(error))
            except Exception as error:
                self._log_end(neighbour.name, error)
            if time.monotonic() - met > 5:  # the connection had worked
                lost, pause = time.monotonic(), _FIRST_PAUSE_S
            # Pauses grow with the length of the absence, so that a short absence costs little time.
            pause = min(max(1.5 * pause, _FIRST_PAUSE_S), 0.2 * (time.monotonic() - lost) + 0.2, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause)

    def _log_end(self, name: str, error: Exception) -> None:
        """Logs why a connection ended."""
        known = isinstance(error, Refused | CannotConnect | ConnectionLost)
        what = "refused" if isinstance(error, Refused) else "connection lost"
        self._limiter("warning", what, name, str(error) if known else in_a_line(error))

    @contextmanager
    def _counted(self, who: str) -> Iterator[None]:
        """Counts a stream as open."""
        self._open[who] += 1
        try:
            yield
        finally:
            self._open[who] -= 1

    async def _answer(self, connection: Peer) -> None:
        """Serves a connection that a neighbour opened."""
        who = ", ".join(connection.peer_names) or "a peer without a name"
        neighbour, refusal = self._by_name.get(who), ""
        if any(former.name == who for former in self.left):
            refusal = "it has left the mesh: the others voted to continue without it"
            if self._open[who] < _STREAMS:
                with self._counted(who):
                    await self._tell_why(connection)
        elif neighbour is None:
            refusal = "it is not a neighbour"
        elif neighbour.address:
            refusal = "this side dials it"
        elif self._open[who] >= _STREAMS:
            refusal = f"it has {_STREAMS} streams open already"
        if neighbour is None or refusal:
            self._limiter("warning", "refused", who, refusal)
            await _send_refusal(connection, Refused(f"{who}: {refusal}"))
            return
        with self._counted(who):
            try:
                await self._converse(neighbour, connection, answering=True)
            except Exception as error:
                self._log_end(who, error)

    async def _tell(self, former: Neighbour) -> None:
        """Dials a former neighbour that cannot dial this node, to tell it that it is no longer in the mesh. Tells it
        again from time to time, since it may have been started again."""
        pause = _FIRST_TELLING_S
        while True:
            told = False
            with suppress(CannotConnect, ConnectionLost, Refused, OSError):
                async with self.carrier.dialled(former.address, former.name) as connection:
                    told = await self._tell_why(connection)
            pause = _TELL_EVERY_S if told else min(2 * pause, _TELL_EVERY_S)
            await asyncio.sleep(pause)

    async def _tell_why(self, connection: Peer) -> bool:
        """Gives a site that has left the certificate by which the others continue without it, and nothing else."""
        with suppress(ConnectionLost, Refused, ConnectionError, TimeoutError):
            async with asyncio.timeout(_GREETING_S):
                await connection.send(frames.hello(self.greeting() | {"holds": [0, 0], "clock": time.time()}))
                if await connection.receive() is None:
                    return False
                for entries in self.bulletin.quoted("certificate", "follow"):
                    await connection.send(frames.news(entries))
                await asyncio.sleep(1.0)  # so that it is read before the connection ends
                return True
        return False

    async def _converse(self, neighbour: Neighbour, connection: Peer, answering: bool = False) -> None:
        """Exchanges greetings, then frames in both directions until one side ends the stream."""
        stream = await self._greeted(neighbour, connection, answering)
        if stream is not None:
            await self._exchange(neighbour, stream, connection)

    async def _greeted(self, neighbour: Neighbour, connection: Peer, answering: bool) -> _Stream | None:
        """Exchanges greetings. Returns the stream that begins then, or None if none does."""
        unknown = self.refusal(neighbour.name, connection.peer_certificate())
        if unknown:
            await _send_refusal(connection, Refused(unknown))
            raise Refused(unknown)
        mine = self.mailroom.progress(neighbour.position)
        greeting = frames.hello(self.greeting() | {"holds": list(mine), "clock": time.time()})
        await connection.send(greeting)
        try:
            async with asyncio.timeout(_GREETING_S):  # wait_for of Python 3.11 may let a cancellation pass
                first = await connection.receive()
        except TimeoutError:
            raise Refused(f"no greeting within {_GREETING_S:.0f} s") from None
        except Refused as error:
            await self._refuse(neighbour, connection, error)
            raise
        if first is None:
            return None
        stream, replaced = _Stream(connection), self._streams.get(neighbour.name)
        if first and first[0] in frames.REFUSALS:
            raise self._refused_there(neighbour, stream, frames.read_frame(first))
        try:
            table = frames.read_hello(first)
            stream.only_news = not self.check(neighbour.name, table)
            if answering and table.get("check") is True:
                self._limiter("info", "checked", neighbour.name)
                await answer_probes(connection, self._probes_allowed[neighbour.name])
                return None
            theirs = _progress(table)
            stream.process = table.get("process")
            if replaced is not None and replaced.process != stream.process:
                raise Refused(
                    f"another node of {neighbour.name} is connected here; two nodes of one site would contradict each "
                    "other. Stop one of them, and never run a copy of a site's folder"
                )
            if not stream.only_news:
                self.mailroom.connected(neighbour.position, stream, theirs, mine.durable)
        except StateLost as error:  # news go on, so that its people see how far the others are, and who votes for what
            self._limiter("warning", "refused", neighbour.name, str(error))
            stream.only_news = True
            await self._refuse(neighbour, connection, error)
        except Refused as error:
            await self._refuse(neighbour, connection, error)
            raise
        if replaced is not None:
            replaced.ended.set()
            if self.mailroom.progress(neighbour.position).due != mine.due:  # more arrived over it
                self.mailroom.disconnected(neighbour.position, stream)
                return None
        self._streams[neighbour.name] = stream
        self.mailroom.open[neighbour.position] = True
        self._count(neighbour, stream)
        self._limiter("info", "connected", neighbour.name, at_once=_STREAMS)
        return stream

    async def _exchange(self, neighbour: Neighbour, stream: _Stream, connection: Peer) -> None:
        """Exchanges frames. A connection that is lost is logged here and raises no error."""
        tasks = [
            asyncio.create_task(self._reading(neighbour, stream, connection)),
            asyncio.create_task(self._writing(neighbour, stream, connection)),
            asyncio.create_task(stream.ended.wait()),
            asyncio.create_task(self._until_expiry(connection)),
        ]
        why = None
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stream.reason:
                raise Refused(stream.reason)
            for task in done:
                task.result()
            why = "it closed the connection" if tasks[0] in done else None
        except RefusedThere:
            raise
        except Refused as error:
            if stream.only_news:
                self.mailroom.note_refusal(neighbour.position, str(error))
            self.mailroom.refuse(neighbour.position, str(error), stream)
            await _send_refusal(connection, error)
            raise
        except ConnectionLost as error:
            why = str(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._count(neighbour, stream)
            self.mailroom.disconnected(neighbour.position, stream)
            if self._streams.get(neighbour.name) is stream:
                del self._streams[neighbour.name]
                self.mailroom.open[neighbour.position] = False
                if not self._stopping.is_set():
                    self._limiter("info", "disconnected", neighbour.name, why, at_once=_STREAMS)

    async def _until_expiry(self, connection: Peer) -> None:
        """Raises ConnectionLost once this site's certificate or the peer's has expired: TLS looks at the dates only in
        the handshake, and a stream may last for weeks."""
        ends = {
            "its certificate": certificates.valid_until(connection.peer_certificate()),
            "this site's certificate": certificates.valid_until(self.credentials.certificate),
        }
        whose, until = min(ends.items(), key=lambda item: item[1])
        while (left := (until - datetime.now(UTC)).total_seconds()) > 0:
            await asyncio.sleep(min(left, _LOOK_AT_CLOCK_S))
        raise ConnectionLost(f"{whose} has expired, on {until:%Y-%m-%d %H:%M} UTC; it must be renewed")

    async def _refuse(self, neighbour: Neighbour, connection: Peer, reason: Refused) -> None:
        self.mailroom.note_refusal(neighbour.position, str(reason))
        await _send_refusal(connection, reason)

    async def _reading(self, neighbour: Neighbour, stream: _Stream, connection: Peer) -> None:
        position = neighbour.position
        while (data := await connection.receive()) is not None:
            frame = frames.read_frame(data)
            if stream.only_news and frame.kind not in (Kind.NEWS, Kind.AGAIN, *frames.REFUSALS):
                if not stream.useless.spend(1):
                    raise Refused("messages over a stream for announcements only")
                continue
            if frame.kind in (Kind.MESSAGE, Kind.ACK):
                self.mailroom.acknowledged(position, stream, frame.durable, alone=frame.kind == Kind.ACK)
                self.observe("ack received", frame.durable)
            if frame.kind == Kind.MESSAGE:
                while not self.mailroom.arrived(position, stream, frame.step, frame.body):
                    stream.room.clear()  # set when the node has taken messages, and from time to time
                    await stream.room.wait()
            elif frame.kind == Kind.NEWS:
                self._hear(neighbour, stream, frame.body)
            elif frame.kind == Kind.AGAIN:
                self._tell_again(neighbour, stream)
            elif frame.kind == Kind.FINISHED:
                self._note_finished(neighbour, stream)
            elif frame.kind in frames.REFUSALS:
                refused = self._refused_there(neighbour, stream, frame)
                if frame.kind == Kind.REFUSED:
                    raise refused
                self._limiter("warning", "refused", neighbour.name, str(refused))

    def _tell_again(self, neighbour: Neighbour, stream: _Stream) -> None:
        """Tells a neighbour all news again, which says that it could not take some."""
        if not self._asked_again[neighbour.name].spend(1):
            raise Refused("it asks for all announcements again and again")
        stream.news_sent = 0
        stream.wake.set()

    def _note_finished(self, neighbour: Neighbour, stream: _Stream) -> None:
        if stream.finished_there:
            raise Refused("it says again that it has finished")
        stream.finished_there = True
        self._finished_there.add(neighbour.name)
        self._see_whether_finished()

    def _refused_there(self, neighbour: Neighbour, stream: _Stream, frame: frames.Frame) -> RefusedThere:
        """Returns why a neighbour refuses this side. That this side has lost its state is only its claim."""
        if frame.kind == Kind.STATE_LOST:
            stream.only_news = True
            self.mailroom.note_state_lost(neighbour.position, stream, frame.reason())
            return RefusedThere(f"it says that this site has lost its state: {frame.reason()}")
        return RefusedThere(f"it refuses: {frame.reason()}")

    def _hear(self, neighbour: Neighbour, stream: _Stream, news: bytes) -> None:
        """Takes news, unless the neighbour sends more than any honest one has to say."""
        allowed, entries = self._news_allowed[neighbour.name], b""
        if not allowed.spend(_FRAME_BYTES + len(news)) or not allowed.spend(len(entries := frames.entries_in(news))):
            stream.missed = True
            self._limiter("warning", "announcements dropped", neighbour.name, "it sends too many")
            return
        for site in self.bulletin.heard(entries, neighbour.name, stream):
            stream.missed = True
            self._limiter("warning", "announcements dropped", site, f"{neighbour.name} passes on too many of it")

    async def _writing(self, neighbour: Neighbour, stream: _Stream, connection: Peer) -> None:
        while True:
            stream.wake.clear()
            if going := self._next_frames(neighbour, stream):
                together = len(going) == 1 or sum(len(frame) for _, frame in going) <= _AT_ONCE_BYTES
                for batch in [going] if together else [[single] for single in going]:
                    await connection.send(*[frame for _, frame in batch])
                    for sent, _ in batch:
                        if sent:
                            self.observe(*sent)
                self._count(neighbour, stream)
            if stream.wake.is_set():
                continue
            if neighbour.name in self._finished and not stream.finished_sent and not stream.only_news:
                await connection.send(frames.finished())
                stream.finished_sent = True
                self._finished_sent.add(neighbour.name)
                self._see_whether_finished()
            if not stream.wake.is_set():
                await stream.wake.wait()

    def _next_frames(self, neighbour: Neighbour, stream: _Stream) -> list[tuple[tuple[str, int] | None, bytes]]:
        """Returns the frames that go next, each with what is observed once it is sent; wakes the stream if there may be
        more. News go before messages, since a node that has just connected needs them first, and a few news together
        with them."""
        going: list[tuple[tuple[str, int] | None, bytes]] = []
        if stream.ask_again:
            stream.ask_again = False
            going.append((None, frames.again()))
        stream.news_sent, entries = self.bulletin.news(stream.news_sent, stream)
        if entries:
            going.append((None, frames.news(entries)))
        if len(entries) <= A_FRAME:
            for step, frame in self.mailroom.outgoing(neighbour.position, stream, stream.ack_due):
                going.append((("ack sent" if step < 0 else "sent", step), frame))
            stream.ack_due = False
        if len(going) > 1 or len(entries) > A_FRAME:
            stream.wake.set()
        return going

    def _see_whether_finished(self) -> None:
        if self._finished_sent & self._finished_there >= self._by_name.keys():
            self.all_finished.set()


async def _every(seconds: float, work: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        work()


async def _send_refusal(connection: Peer, reason: Refused) -> None:
    """Sends the reason why this side ends the connection. Does not wait for a peer that does not read."""
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(1.0):
            await connection.send(frames.refused(reason))


def _progress(table: Mapping[str, Any]) -> Progress:
    given = table.get("holds")
    if not isinstance(given, list) or len(given) != 2 or not all(type(v) is int and v >= 0 for v in given):
        raise Refused("the greeting does not say which steps it holds")
    durable, due = given
    if durable > due:
        raise Refused(f"the greeting says that step {durable} is durable but {due} is due")
    return Progress(durable, due)
