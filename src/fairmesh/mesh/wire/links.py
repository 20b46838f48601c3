"""The streams of a node: one to each neighbour, by gRPC with mutual TLS 1.3; one end dials, the other listens.

A stranger without a certificate of the mesh's authority does not get past the handshake; whoever has one is known by
the name in it, and only a neighbour is answered.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fairmesh.errors import FairmeshError
from fairmesh.mesh.wire import channels, frames
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.mesh.wire.channels import METHOD, Credentials, grpc
from fairmesh.mesh.wire.frames import Kind, Refused
from fairmesh.mesh.wire.log_limiter import Report, Sparing
from fairmesh.mesh.wire.mailroom import Holdings, Mailroom
from fairmesh.mesh.wire.tls_errors import in_words

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
        self._mailroom.serve(self._wake, lambda stream, reason: stream.end(reason))  # type: ignore[attr-defined]
        self._bulletin.serve(self._wake_all)
        server = None
        if self._listen is not None:
            streams = _STREAMS * len(self._neighbours)
            server = channels.listening(self._listen, self._credentials, self._largest, streams, self._answer)
            await server.start()
        tasks = {asyncio.create_task(self._dial(one)) for one in self._neighbours.values() if one.address}
        tasks |= {asyncio.create_task(self._tell_again()), asyncio.create_task(self._tell_durable())}
        self._ready.set()
        await self._stopping.wait()
        for stream in self._streams.values():
            stream.ended.set()
        while tasks:  # one that waits for a call may let a cancellation pass
            for task in tasks:
                task.cancel()
            tasks = (await asyncio.wait(tasks, timeout=0.2))[1]
        if server is not None:
            await server.stop(0.2)
        self._sparing.close()

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

    async def _dial(self, neighbour: Neighbour) -> None:
        lost = time.monotonic()
        pause = _FIRST_PAUSE_S
        while True:
            channel = channels.dialled(neighbour.address or "", neighbour.name, self._credentials, self._largest)
            began = time.monotonic()
            try:
                call = channel.stream_stream(METHOD)()
                await self._converse(neighbour, channels.frames_of(call), call.write)
                code = await call.code()
                if code != grpc.StatusCode.OK:
                    self._sparing("warning", "connection lost", neighbour.name, await call.details())
            except grpc.aio.AioRpcError as error:
                self._sparing(
                    "warning", "cannot connect", neighbour.name, in_words(error.details() or error.code().name)
                )
            except Refused as error:
                self._sparing("warning", "refused", neighbour.name, str(error))
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._sparing("warning", "connection lost", neighbour.name, f"{type(error).__name__}: {error}")
            finally:
                await channel.close()
            if time.monotonic() - began > 5:  # it had worked
                lost, pause = time.monotonic(), _FIRST_PAUSE_S
            # Pauses grow with the time it has been away, so that a short absence costs little.
            pause = min(max(1.5 * pause, _FIRST_PAUSE_S), 0.2 * (time.monotonic() - lost) + 0.2, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause)

    async def _answer(self, requests: Any, context: Any) -> None:
        """Serves a stream that a neighbour opened."""
        found = context.auth_context().get("x509_subject_alternative_name", [])
        names = [name.decode(errors="replace") for name in found]
        neighbour = self._neighbours.get(names[0]) if len(names) == 1 else None
        who = ", ".join(names) or "somebody without a name"
        if neighbour is None or neighbour.address is not None:
            reason = "it is not a neighbour" if neighbour is None else "this side dials it"
            self._sparing("warning", "refused", who, reason)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{who}: {reason}")
            return
        if self._open[who] >= _STREAMS:
            reason = f"it has {_STREAMS} streams open already"
            self._sparing("warning", "refused", who, reason)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{who}: {reason}")
            return
        self._open[who] += 1
        try:
            await self._converse(neighbour, channels.frames_of(context), context.write, answering=True)
        except Refused as error:
            self._sparing("warning", "refused", who, str(error))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error)[:1000])
        except Exception as error:
            self._sparing("warning", "connection lost", who, f"{type(error).__name__}: {error}")
            await context.abort(grpc.StatusCode.ABORTED, "the stream failed at the other end")
        finally:
            self._open[who] -= 1

    async def _converse(
        self,
        neighbour: Neighbour,
        read: Callable[[], Awaitable[bytes | None]],
        write: Callable[[bytes], Awaitable[None]],
        answering: bool = False,
    ) -> None:
        """Greets, then carries frames both ways until one side ends it."""
        loop = asyncio.get_running_loop()
        mine = self._mailroom.holdings(neighbour.position)
        greeting = frames.hello(self._greeting() | {"holds": list(mine), "clock": time.time()})
        await write(greeting)
        try:
            async with asyncio.timeout(_GREETING_S):  # wait_for of Python 3.11 may let a cancellation pass
                first = await read()
        except TimeoutError:
            raise Refused(f"no greeting within {_GREETING_S:.0f} s") from None
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
            await _tell(write, error)
            raise
        if replaced is not None:
            replaced.ended.set()
            if self._mailroom.holdings(neighbour.position).here != mine.here:  # more came over it after the greeting
                self._mailroom.disconnected(neighbour.position, stream)
                return
        self._streams[neighbour.name] = stream
        self._mailroom.seen(neighbour.position, len(first), len(greeting))
        self._sparing("info", "connected", neighbour.name, at_once=_STREAMS)
        tasks = [
            asyncio.create_task(self._reading(neighbour, stream, read)),
            asyncio.create_task(self._writing(neighbour, stream, write)),
            asyncio.create_task(stream.ended.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stream.reason:
                raise Refused(stream.reason)
            for task in done:
                task.result()
        except Refused as error:
            self._mailroom.refuse(neighbour.position, str(error), stream)
            tasks[1].cancel()  # a stream takes one frame at a time
            await asyncio.gather(tasks[1], return_exceptions=True)
            await _tell(write, error)
            raise
        finally:
            cut = self._cut() if tasks[0].done() and not stream.reason else None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._mailroom.disconnected(neighbour.position, stream)
            if self._streams.get(neighbour.name) is stream:
                del self._streams[neighbour.name]
                if not self._stopping.is_set():  # type: ignore[union-attr]
                    self._sparing("info", "disconnected", neighbour.name, cut, at_once=_STREAMS)

    async def _reading(
        self, neighbour: Neighbour, stream: _Stream, read: Callable[[], Awaitable[bytes | None]]
    ) -> None:
        position = neighbour.position
        while (data := await read()) is not None:
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
            self._mailroom.seen(position, beside_in=len(data))
            if frame.kind == Kind.HELD:
                continue
            if frame.kind == Kind.NEWS:
                self._bulletin.heard(frame.body)
            elif frame.kind == Kind.FINISHED:
                self._finished_there.add(neighbour.name)
                self._see_whether_finished()
            elif frame.kind == Kind.REFUSED:
                raise Refused(f"it refuses: {frame.reason()}")

    async def _writing(self, neighbour: Neighbour, stream: _Stream, write: Callable[[bytes], Awaitable[None]]) -> None:
        position = neighbour.position
        while True:
            stream.wake.clear()
            while True:  # before messages: a node that meets the others needs news first
                stream.news_told, entries = self._bulletin.news(stream.news_told)
                if entries is None:
                    break
                frame = frames.news(entries)
                await write(frame)
                self._mailroom.seen(position, beside_out=len(frame))
            going = self._mailroom.outgoing(position, stream, stream.tells)
            stream.tells = False
            for step, frame in going:
                await write(frame)
                if step < 0:
                    self._mailroom.seen(position, beside_out=len(frame))
                    self._observe("told durable", -1)
                else:
                    self._observe("sent", step)
            if neighbour.name in self._finished and not stream.finished_told and not stream.only_news:
                await write(frames.finished())
                stream.finished_told = True
                self._finished_told.add(neighbour.name)
                self._see_whether_finished()
            if not stream.wake.is_set():
                await stream.wake.wait()

    def _cut(self) -> str:
        """Why a stream ends without a word. gRPC tells only the sender when it does not take a frame for its size."""
        return f"it ended, was cut off, or sent a frame of more than {self._largest + channels.BESIDE:,} bytes"

    def _see_whether_finished(self) -> None:
        if self._finished_told & self._finished_there >= self._neighbours.keys():
            self.all_finished.set()


async def _tell(write: Callable[[bytes], Awaitable[None]], error: Refused) -> None:
    """Says why, if the other side still listens; one that does not read its stream is not waited for."""
    with suppress(Exception):
        await asyncio.wait_for(write(frames.refused(str(error))), 1.0)


def _holdings(table: Mapping[str, Any]) -> Holdings:
    given = table.get("holds")
    if not isinstance(given, list) or len(given) != 2 or not all(type(v) is int and v >= 0 for v in given):
        raise Refused("the greeting does not say which steps it holds")
    durable, here = given
    if durable > here:
        raise Refused(f"the greeting says that step {durable} is durable but {here} is due")
    return Holdings(durable, here)
