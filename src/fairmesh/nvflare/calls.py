"""Carries the frames of a mesh by confirmed calls from site to site, such as those of NVFlare's client-to-client API.

A connection is a number that the dialling side draws and one that the answering side draws. Every call carries both,
who calls whom, the run, and a digest of all of it, inside what the engine seals. So a relay that repeats or splices
sealed calls is found out. Each direction has one call in flight, which is repeated until it is confirmed; the receiver
takes each number once. What makes messages survive a restart is the mailroom: a message is kept until the neighbour has
synced it to its disk, and is sent again over the next connection.
"""

import asyncio
import hashlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from fairmesh.errors import FairmeshError, in_a_line
from fairmesh.mesh.wire.carrier import Answer, Carrier, TurnedAway
from fairmesh.mesh.wire.connections import FRAME_OVERHEAD_BYTES, CannotConnect, ConnectionLost
from fairmesh.mesh.wire.frames import LENGTH, Refused, check_length, read_json

CALL_S = 20.0  # a call that is not answered within this, and the time that its bytes take, is repeated
_SLOWEST = 1 << 18  # bytes per second
_GIVE_UP_S = 60.0  # after so long without an answer, a connection is lost; the mesh dials again
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between repetitions of a call
_BEAT_S, _SILENCE_S = 10.0, 45.0
_OPEN = 16  # connections of one peer; those that it has forgotten end by their silence
_FRAMES, _BYTES = 64, 1 << 22  # that wait to be read; with more, calls are told to come again
_ROOM_S = 10.0  # so long a call waits for room
_SMALL_BYTES = 1 << 20  # of small frames that may come in one call
_CLOSING_S = 2.0
_AT_ONCE = 100  # calls: one to each neighbour, and the ends of connections
_HEAD = 1 << 12  # bytes of a call's head at most,
_HEAD_BYTES = 300  # and about how many it has, with its digest
_DIGEST = hashlib.sha256().digest_size

Call = Callable[[str, bytes, float], bytes]  # (site, what to deliver, within seconds) -> its answer; raises CallFailed


class CallFailed(FairmeshError):
    """A call did not get through, or was not answered in time. The text says why."""


class Stopped(FairmeshError):
    """The engine has ended the job: no call will get through any more."""


def packed(head: Mapping[str, Any], body: bytes) -> bytes:
    """Returns what one call delivers: its head, its digest over all, and its frames."""
    text = json.dumps(head, sort_keys=True).encode()
    length = LENGTH.pack(len(text))
    return b"".join([length, text, hashlib.sha256(length + text + body).digest(), body])


def unpacked(envelope: bytes) -> tuple[dict[str, Any], bytes]:
    """Returns head and body of what a call delivered. Raises Refused if it is not whole."""
    if not isinstance(envelope, bytes | bytearray | memoryview) or len(envelope) < LENGTH.size:
        raise Refused("a call that delivers no bytes of fairmesh")
    envelope = bytes(envelope)
    length = LENGTH.unpack_from(envelope)[0]
    begins = LENGTH.size + length
    if length > _HEAD or len(envelope) < begins + _DIGEST:
        raise Refused("a call whose head is cut short")
    digest, body = envelope[begins : begins + _DIGEST], envelope[begins + _DIGEST :]
    if hashlib.sha256(envelope[:begins] + body).digest() != digest:
        raise Refused("a call whose digest is wrong: it was spliced or damaged on its way")
    try:
        head = read_json(envelope[LENGTH.size : begins])
    except ValueError as error:
        raise Refused("a call whose head cannot be read") from error
    if not isinstance(head, dict):
        raise Refused("a call whose head is no table")
    return head, body


def frames_of(body: bytes, largest: int) -> list[bytes]:
    """Returns the frames that one call carries, each of a length that its kind may have: several only if all together
    are small."""
    frames, at = [], 0
    while at < len(body):
        if len(body) - at < LENGTH.size:
            raise Refused("a frame that is cut short")
        length = LENGTH.unpack_from(body, at)[0]
        at += LENGTH.size
        if length > len(body) - at:
            raise Refused("a frame that is cut short")
        check_length(body[at] if length else 0, length, largest + FRAME_OVERHEAD_BYTES)
        frames.append(body[at : at + length])
        at += length
    if len(frames) > 1 and len(body) > _SMALL_BYTES:
        raise Refused(f"{len(frames)} frames of {len(body):,} bytes in one call")
    return frames


class CallConnection:
    """A connection to one neighbour by calls in both directions. Use it in `async with`.

    Args:
        carrier: What makes its calls.
        peer: The name of the neighbour.
        dialled: What the side that dials has drawn. With what the other side draws, it tells this connection from all
            others, also from those of earlier jobs.
        answered: What the side that answers has drawn; "" at the side that dials, until it is told.
    """

    def __init__(self, carrier: "CallCarrier", peer: str, dialled: str, answered: str):
        self._carrier, self.peer, self.dialled, self.answered = carrier, peer, dialled, answered
        self.wire_in = self.wire_out = 0
        self._sent, self._taken = 0, 0  # the numbers of the next call in each direction
        self._sending = asyncio.Lock()
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._waiting_bytes = 0  # in it
        self._room = asyncio.Event()
        self._heard_at = self._told_at = time.monotonic()
        self.ended = False  # by the peer, or done
        self._beat: asyncio.Task[None] | None = None

    @property
    def peer_names(self) -> list[str]:
        return [self.peer]

    def peer_certificate(self) -> bytes:
        return self._carrier.certificate_of(self.peer)

    async def __aenter__(self) -> "CallConnection":
        self._beat = asyncio.create_task(self._beating())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._beat is not None:
            self._beat.cancel()
        try:
            if not self.ended:  # by the peer; else it waits for this side until it is silent for long
                with suppress(ConnectionLost, TimeoutError):
                    async with asyncio.timeout(_CLOSING_S):
                        await self._deliver({"end": True}, b"")
        finally:
            self.ended = True
            self._carrier.forget(self)

    async def receive(self) -> bytes | None:
        while True:
            try:
                async with asyncio.timeout(max(1.0, _SILENCE_S - (time.monotonic() - self._heard_at))):
                    frame = await self._arrived.get()
            except TimeoutError:
                if time.monotonic() - self._heard_at < _SILENCE_S or self._sending.locked():  # it may take long
                    continue
                raise ConnectionLost(f"no call of it has come for {_SILENCE_S:.0f} s") from None
            self._waiting_bytes -= len(frame or b"")
            self._room.set()
            return frame

    async def send(self, *frames: bytes) -> None:
        async with self._sending:
            if self.ended:
                raise ConnectionLost("it closed the connection")
            await self._deliver({}, b"".join([LENGTH.pack(len(frame)) + frame for frame in frames]))

    async def _beating(self) -> None:
        """Calls from time to time, so that both sides notice when the other cannot be reached."""
        while True:
            await asyncio.sleep(_BEAT_S / 2)
            if time.monotonic() - self._told_at >= _BEAT_S and not self._sending.locked():
                with suppress(ConnectionLost):  # who reads sees the end
                    await self.send()

    async def _deliver(self, more: Mapping[str, Any], body: bytes) -> None:
        """Calls until the peer has taken this."""
        head = {"dialled": self.dialled, "answered": self.answered, "number": self._sent, **more}
        envelope = self._carrier.packed(self.peer, head, body)
        answer = await self._carrier.called(self.peer, envelope)
        self.wire_out += len(envelope)
        if "gone" in answer:
            self.end()
            raise ConnectionLost(str(answer["gone"])[:300])
        self._sent += 1
        self._told_at = self._heard_at = time.monotonic()

    async def take(self, head: Mapping[str, Any], body: bytes) -> dict[str, Any]:
        """Takes what a call of the peer delivers, once. Returns the answer."""
        number = head.get("number")
        if head.get("end") is True:
            self.end()
            return {"taken": number}
        if number == self._taken - 1:  # the answer to its first call was lost
            return {"taken": number}
        if self.ended or number != self._taken:
            return {"gone": "this connection has ended"}
        frames = frames_of(body, self._carrier.largest)
        if self._waiting_bytes and (self._arrived.qsize() >= _FRAMES or self._waiting_bytes + len(body) > _BYTES):
            self._room.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_ROOM_S):
                    await self._room.wait()
            return {"again": True}
        self._heard_at = time.monotonic()
        self.wire_in += len(body) + _HEAD_BYTES
        self._taken += 1
        for frame in frames:
            self._waiting_bytes += len(frame)
            self._arrived.put_nowait(frame)
        return {"taken": number}

    def end(self) -> None:
        """Lets who reads see the end, after what has arrived."""
        if not self.ended:
            self.ended = True
            self._arrived.put_nowait(None)


class CallCarrier(Carrier):
    """Carries messages by calls.

    Args:
        run: The name of the run, which is part of every call.
        site: The name of this site.
        call: Calls another site. It may block; it is called in threads of its own.
        certificate_of: Returns the certificate by which a site signs what it announces, as PEM.
    """

    def __init__(self, run: str, site: str, call: Call, certificate_of: Callable[[str], bytes]):
        self._run, self._site, self._call, self.certificate_of = run, site, call, certificate_of
        self._connections: dict[tuple[str, str], CallConnection] = {}  # by peer and what the dialling side drew
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self.largest = 0

    async def open(self, largest: int, answer: Answer, turned_away: TurnedAway) -> None:
        self.largest, self._answer, self._turned_away = largest, answer, turned_away
        self._threads = ThreadPoolExecutor(_AT_ONCE, "calls")
        with self._lock:
            self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        with self._lock:
            self._loop = None
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        until = time.monotonic() + _CLOSING_S
        while self._connections and time.monotonic() < until:  # those that this side has dialled tell their ends
            await asyncio.sleep(0.01)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def dialled(self, address: str, name: str) -> AsyncIterator[CallConnection]:
        connection = CallConnection(self, name, os.urandom(16).hex(), "")
        self._connections[name, connection.dialled] = connection  # its first call may come before it has answered
        opening = {"dialled": connection.dialled, "answered": "", "number": -1}
        try:
            try:
                answer = await self.called(name, self.packed(name, opening, b""))
            except ConnectionLost as error:
                raise CannotConnect(str(error), in_handshake=False) from None
            answered = answer.get("answered")
            if not isinstance(answered, str) or connection.answered not in ("", answered):
                raise CannotConnect(str(answer.get("gone", "it gives no answer that this site knows"))[:300], True)
            connection.answered = answered
            async with connection:
                yield connection
        finally:
            self.forget(connection)

    def forget(self, connection: CallConnection) -> None:
        self._connections.pop((connection.peer, connection.dialled), None)

    def packed(self, peer: str, head: Mapping[str, Any], body: bytes) -> bytes:
        return packed({"run": self._run, "from": self._site, "to": peer, **head}, body)

    async def called(self, peer: str, envelope: bytes) -> dict[str, Any]:
        """Calls a site until it answers. Raises ConnectionLost after a minute without an answer."""
        loop, threads = asyncio.get_running_loop(), self._threads
        if threads is None:
            raise ConnectionLost("this site has ended its calls")
        since, pause, seconds = time.monotonic(), _FIRST_PAUSE_S, CALL_S + len(envelope) / _SLOWEST
        while True:
            try:
                answer = read_json(await loop.run_in_executor(threads, self._call, peer, envelope, seconds))
                if not isinstance(answer, dict):
                    raise CallFailed("it answers in a form that this site does not know")
            except (CallFailed, ValueError) as error:
                if time.monotonic() - since > _GIVE_UP_S:
                    raise ConnectionLost(f"calls to it fail: {in_a_line(error)}") from None
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            except (Stopped, RuntimeError) as error:  # the job has ended, or this carrier
                raise ConnectionLost(in_a_line(error)) from None
            if answer.get("again") is not True:
                return answer
            await asyncio.sleep(_FIRST_PAUSE_S)
            since = time.monotonic()  # it is there, and has no room yet

    # In the engine's threads

    def arrived(self, caller: str, envelope: bytes) -> bytes:
        """Takes a call. Can be called from any thread.

        Args:
            caller: The site that calls, as the engine has authenticated it.
            envelope: What it delivers.

        Returns:
            The answer.
        """
        try:
            answer = self._answered(caller, envelope)
        except Refused as error:
            answer = {"gone": f"refused: {error}"}
            self._report(caller, str(error))
        return json.dumps(answer).encode()

    def _report(self, caller: str, reason: str) -> None:
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._turned_away, caller, reason)

    def _answered(self, caller: str, envelope: bytes) -> dict[str, Any]:
        head, body = unpacked(envelope)
        expected = {"run": self._run, "from": caller, "to": self._site}
        for what, value in expected.items():
            if head.get(what) != value:
                raise Refused(f"a call of {caller} that says {what} = {str(head.get(what))[:80]!r}, not {value!r}")
        drawn = head.get("dialled")
        if not isinstance(drawn, str) or len(drawn) > 64:
            raise Refused(f"a call of {caller} without a connection")
        with self._lock:
            if self._loop is None:
                return {"gone": "it is not ready yet"}
            done: Future[dict[str, Any]] = asyncio.run_coroutine_threadsafe(self._taken(caller, head, body), self._loop)
        try:
            answer = done.result(CALL_S)
        except TimeoutError:
            done.cancel()
            return {"again": True}
        except CancelledError:
            return {"gone": "it has ended"}
        return answer

    async def _taken(self, caller: str, head: Mapping[str, Any], body: bytes) -> dict[str, Any]:
        drawn, answered, number = str(head["dialled"]), head.get("answered"), head.get("number")
        connection = self._connections.get((caller, drawn))
        if number == -1 and answered == "":
            return self._opened(caller, drawn, connection)
        if connection is None or (connection.answered or answered) != answered:
            return {"gone": "it has closed this connection"}
        connection.answered = str(answered)
        return await connection.take(head, body)

    def _opened(self, caller: str, drawn: str, known: CallConnection | None) -> dict[str, Any]:
        """Begins a connection that a peer opens, unless it has begun and only the answer was lost."""
        if known is None:
            if sum(peer == caller for peer, _ in self._connections) >= _OPEN:
                return {"gone": f"{caller} has {_OPEN} connections to this site, which it must close first"}
            known = CallConnection(self, caller, drawn, os.urandom(16).hex())
            self._connections[caller, drawn] = known
            task = asyncio.create_task(self._serve(known))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        return {"answered": known.answered}

    async def _serve(self, connection: CallConnection) -> None:
        async with connection:
            await self._answer(connection)
