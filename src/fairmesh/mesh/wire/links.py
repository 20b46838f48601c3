"""The streams of a node: one connection to each neighbour, with mutual TLS 1.3; one end dials, the other listens.

A stranger without a certificate of the mesh's authority does not get past the handshake; whoever has one is known by
the name in it, and only a neighbour is answered.
"""

import asyncio
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fairmesh.errors import FairmeshError
from fairmesh.mesh.wire import frames
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.mesh.wire.connections import CannotConnect, Connection, ConnectionLost, Listener, dialled
from fairmesh.mesh.wire.frames import Kind, Refused
from fairmesh.mesh.wire.log_limiter import Report, Sparing
from fairmesh.mesh.wire.mailroom import Holdings, Mailroom
from fairmesh.mesh.wire.tls_stream import Credentials

_GREETING_S = 20.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 15.0
_TELL_S = 0.05
_STREAMS = 8  # of one neighbour at once: the present one, those it replaces, and checks
_REPORT_EVERY_S = 5.0


@dataclass(frozen=True)
class Neighbour:
    """Somebody to talk to."""

    name: str
    position: int
    address: str | None  # given where this side dials


class _Stream:
    """One conversation, which either side can end."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.wake, self.room, self.ended, self._loop = asyncio.Event(), asyncio.Event(), asyncio.Event(), loop
        self.reason: str | None = None
        self.news_told = 0
        self.finished_told = False
        self.only_news = False
        self.tells = False  # what is durable is told with messages, or else from time to time

    def end(self, reason: str | None) -> None:
        """From any thread."""
        self.reason = self.reason or reason
        self._loop.call_soon_threadsafe(self.ended.set)


class Links:
    """Runs in a thread of its own between `start` and `stop`."""

    def __init__(
        self,
        neighbours: list[Neighbour],
        credentials: Credentials,
        listen: str | None,
        mailroom: Mailroom,
        bulletin: Bulletin,
        greeting: Callable[[], dict[str, Any]],  # what both sides must have alike, and who this is
        check: Callable[[str, Mapping[str, Any]], bool],  # refuses a neighbour's greeting, or says: for news only
        report: Report,
        largest: int,  # message, in bytes
        observe: Callable[[str, int], None],
    ):
        self._neighbours = {one.name: one for one in neighbours}
        self._name_at = {one.position: one.name for one in neighbours}
        self._credentials, self._listen, self._mailroom, self._bulletin = credentials, listen, mailroom, bulletin
        self._greeting, self._check, self._observe = greeting, check, observe
        self._sparing, self._largest, self._open = Sparing(report), largest, Counter[str]()
        self._streams: dict[str, _Stream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._ready, self._failed, self._stopping = threading.Event(), None, None
        self._finished: set[str] = set()  # from whom nothing more is needed, nor by whom
        self._finished_there: set[str] = set()
        self._finished_told: set[str] = set()
        self.all_finished = threading.Event()

    # From the training thread

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()
        if self._failed:
            raise self._failed

    def stop(self) -> None:
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(10)

    def finish(self, needed_by: Sequence[int] = ()) -> None:
        """Tells neighbours that nothing more is needed from them; but not those that need something from here, so that
        whoever is told so is known here, also after a restart, to need nothing, and may go."""
        free = {name for name, one in self._neighbours.items() if one.position not in needed_by}
        if not free <= self._finished:
            self._finished |= free
            self._wake_all()

    def _wake(self, positions: Iterable[int]) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return

        def set_() -> None:
            for position in positions:
                stream = self._streams.get(self._name_at[position])
                if stream is not None:
                    stream.wake.set()
                    stream.room.set()

        loop.call_soon_threadsafe(set_)

    def _wake_all(self) -> None:
        self._wake(list(self._name_at))

    # The thread

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except FairmeshError as error:
            self._failed = error
        except Exception as error:
            self._failed = FairmeshError(f"the links of this node failed: {type(error).__name__}: {error}")
            self._mailroom.stop(self._failed)
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(self._unexpected)
        self._mailroom.serve(self._wake, lambda stream, reason: stream.end(reason))  # type: ignore[attr-defined]
        self._bulletin.serve(self._wake_all)
        context, listener = self._credentials.for_dialling(), None
        if self._listen is not None:
            listener = Listener(self._credentials.for_listening(), self._largest, self._answer, self._turned_away)
            await listener.start(self._listen)
        tasks = [asyncio.create_task(self._dial(one, context)) for one in self._neighbours.values() if one.address]
        tasks += [asyncio.create_task(self._tell_again()), asyncio.create_task(self._tell_durable())]
        self._ready.set()
        await self._stopping.wait()
        for stream in self._streams.values():
            stream.ended.set()
        for task in tasks:
            task.cancel()
        closing = [] if listener is None else [listener.close()]
        await asyncio.gather(*tasks, *closing, return_exceptions=True)
        self._sparing.close()

    def _turned_away(self, address: str, reason: str) -> None:
        self._sparing("warning", "refused", address=address, reason=reason)

    def _unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What asyncio would print, such as that the system has no more room for connections."""
        self._sparing("warning", "network", reason=f"{context['message']}: {context.get('exception')}")

    async def _tell_again(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            self._sparing.flush()

    async def _tell_durable(self) -> None:
        """What has become durable, where no message has told so in the meantime."""
        while True:
            await asyncio.sleep(_TELL_S)
            for name, stream in self._streams.items():
                stream.room.set()
                if self._mailroom.untold(self._neighbours[name].position):
                    stream.tells = True
                    stream.wake.set()

    async def _dial(self, neighbour: Neighbour, context: ssl.SSLContext) -> None:
        lost = time.monotonic()
        pause = _FIRST_PAUSE_S
        while True:
            met = None
            try:
                async with dialled(neighbour.address or "", neighbour.name, context, self._largest) as connection:
                    met = time.monotonic()
                    await self._converse(neighbour, connection)
            except CannotConnect as error:
                self._sparing("warning", "cannot connect", neighbour.name, str(error))
            except Refused as error:
                self._sparing("warning", "refused", neighbour.name, str(error))
            except ConnectionLost as error:
                self._sparing("warning", "connection lost", neighbour.name, str(error))
            except Exception as error:
                self._sparing("warning", "connection lost", neighbour.name, f"{type(error).__name__}: {error}")
            if met is not None and time.monotonic() - met > 5:  # it had worked
                lost, pause = time.monotonic(), _FIRST_PAUSE_S
            # Pauses grow with the time it has been away, so that a short absence costs little.
            pause = min(max(1.5 * pause, _FIRST_PAUSE_S), 0.2 * (time.monotonic() - lost) + 0.2, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause)

    async def _answer(self, connection: Connection) -> None:
        """Serves a connection that a neighbour opened."""
        names = connection.peer_names
        neighbour = self._neighbours.get(names[0]) if len(names) == 1 else None
        who = ", ".join(names) or "somebody without a name"
        refusal = None
        if neighbour is None:
            refusal = "it is not a neighbour"
        elif neighbour.address is not None:
            refusal = "this side dials it"
        elif self._open[who] >= _STREAMS:
            refusal = f"it has {_STREAMS} streams open already"
        if neighbour is None or refusal:
            self._sparing("warning", "refused", who, refusal)
            await _tell(connection, f"{who}: {refusal}")
            return
        self._open[who] += 1
        try:
            await self._converse(neighbour, connection, answering=True)
        except Refused as error:
            self._sparing("warning", "refused", who, str(error))
        except (CannotConnect, ConnectionLost) as error:
            self._sparing("warning", "connection lost", who, str(error))
        except Exception as error:
            self._sparing("warning", "connection lost", who, f"{type(error).__name__}: {error}")
        finally:
            self._open[who] -= 1

    async def _converse(self, neighbour: Neighbour, connection: Connection, answering: bool = False) -> None:
        """Greets, then carries frames both ways until one side ends it. A connection that is lost afterwards is logged
        here and is no error."""
        loop = asyncio.get_running_loop()
        mine = self._mailroom.holdings(neighbour.position)
        greeting = frames.hello(self._greeting() | {"holds": list(mine), "clock": time.time()})
        await connection.send(greeting)
        try:
            async with asyncio.timeout(_GREETING_S):  # wait_for of Python 3.11 may let a cancellation pass
                first = await connection.receive()
        except TimeoutError:
            raise Refused(f"no greeting within {_GREETING_S:.0f} s") from None
        except Refused as error:
            await _tell(connection, str(error))
            raise
        if first is None:
            return
        if first[:1] == bytes([Kind.REFUSED]):
            raise Refused(f"it refuses: {frames.read_frame(first).reason()}")
        stream = _Stream(loop)
        try:
            table = frames.read_hello(first)
            stream.only_news = not self._check(neighbour.name, table)
            if answering and table.get("check") is True:
                self._sparing("info", "checked", neighbour.name)
                return
            theirs = _holdings(table)
            replaced = self._streams.get(neighbour.name)
            if not stream.only_news:
                self._mailroom.connected(neighbour.position, stream, theirs)
        except Refused as error:
            await _tell(connection, str(error))
            raise
        if replaced is not None:
            replaced.ended.set()
            if self._mailroom.holdings(neighbour.position).here != mine.here:  # more came over it after the greeting
                self._mailroom.disconnected(neighbour.position, stream)
                return
        self._streams[neighbour.name] = stream
        self._mailroom.seen(neighbour.position, frames.size(first), frames.size(greeting))
        self._sparing("info", "connected", neighbour.name, at_once=_STREAMS)
        tasks = [
            asyncio.create_task(self._reading(neighbour, stream, connection)),
            asyncio.create_task(self._writing(neighbour, stream, connection)),
            asyncio.create_task(stream.ended.wait()),
        ]
        why = None
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stream.reason:
                raise Refused(stream.reason)
            for task in done:
                task.result()
            why = "it closed the connection" if tasks[0] in done else None
        except Refused as error:
            self._mailroom.refuse(neighbour.position, str(error), stream)
            await _tell(connection, str(error))
            raise
        except ConnectionLost as error:
            why = str(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._mailroom.disconnected(neighbour.position, stream)
            if self._streams.get(neighbour.name) is stream:
                del self._streams[neighbour.name]
                if not self._stopping.is_set():  # type: ignore[union-attr]
                    self._sparing("info", "disconnected", neighbour.name, why, at_once=_STREAMS)

    async def _reading(self, neighbour: Neighbour, stream: _Stream, connection: Connection) -> None:
        position = neighbour.position
        while (data := await connection.receive()) is not None:
            frame = frames.read_frame(data)
            if stream.only_news and frame.kind not in (Kind.NEWS, Kind.REFUSED):
                continue
            if frame.kind in (Kind.MESSAGE, Kind.HELD):
                self._mailroom.held_there(position, stream, frame.durable)
                self._observe("held there", frame.durable)
            if frame.kind == Kind.MESSAGE:
                while not self._mailroom.arrived(position, stream, frame.step, frame.body):
                    stream.room.clear()  # set when the node has gone on, and from time to time
                    await stream.room.wait()
                continue
            self._mailroom.seen(position, beside_in=frames.size(data))
            if frame.kind == Kind.HELD:
                continue
            if frame.kind == Kind.NEWS:
                self._bulletin.heard(frame.body)
            elif frame.kind == Kind.FINISHED:
                self._finished_there.add(neighbour.name)
                self._see_whether_finished()
            elif frame.kind == Kind.REFUSED:
                raise Refused(f"it refuses: {frame.reason()}")

    async def _writing(self, neighbour: Neighbour, stream: _Stream, connection: Connection) -> None:
        position = neighbour.position
        while True:
            stream.wake.clear()
            while True:  # before messages: a node that meets the others needs news first
                stream.news_told, entries = self._bulletin.news(stream.news_told)
                if entries is None:
                    break
                frame = frames.news(entries)
                await connection.send(frame)
                self._mailroom.seen(position, beside_out=frames.size(frame))
            going = self._mailroom.outgoing(position, stream, stream.tells)
            stream.tells = False
            for step, frame in going:
                await connection.send(frame)
                if step < 0:
                    self._mailroom.seen(position, beside_out=frames.size(frame))
                    self._observe("told durable", -1)
                else:
                    self._observe("sent", step)
            if neighbour.name in self._finished and not stream.finished_told and not stream.only_news:
                await connection.send(frames.finished())
                stream.finished_told = True
                self._finished_told.add(neighbour.name)
                self._see_whether_finished()
            if not stream.wake.is_set():
                await stream.wake.wait()

    def _see_whether_finished(self) -> None:
        if self._finished_told & self._finished_there >= self._neighbours.keys():
            self.all_finished.set()


async def _tell(connection: Connection, reason: str) -> None:
    """Says why this side ends the connection; a peer that does not read is not waited for."""
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(1.0):
            await connection.send(frames.refused(reason))


def _holdings(table: Mapping[str, Any]) -> Holdings:
    given = table.get("holds")
    if not isinstance(given, list) or len(given) != 2 or not all(type(v) is int and v >= 0 for v in given):
        raise Refused("the greeting does not say which steps it holds")
    durable, here = given
    if durable > here:
        raise Refused(f"the greeting says that step {durable} is durable but {here} is due")
    return Holdings(durable, here)
