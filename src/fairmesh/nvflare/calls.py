"""Carries the frames of a mesh by confirmed calls from site to site, such as those of NVFlare's client-to-client API.

A connection is a public key that the dialling side draws and one that the answering side draws. Each signs its own in
its name. Every later call carries both, who calls whom and the run, and is sealed with the keys that follow from them.
So a relay that makes, repeats or splices calls is found out, whatever the engine believes about who calls. Each
direction has one call in flight, which is repeated until it is confirmed; the receiver takes each number once.

What makes messages survive a restart is the mailroom: a message is kept until the neighbour has synced it to its disk,
and is sent again over the next connection.
"""

import asyncio
import json
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
from fairmesh.nvflare.seals import ANSWERS, OPENS, PUBLIC, Half, Identity, Seal

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
_HEAD_BYTES = 300  # and about how many it has, with its seal

Call = Callable[[str, bytes, float], bytes]  # (site, what to deliver, within seconds) -> its answer; raises CallFailed


class CallFailed(FairmeshError):
    """A call did not get through, or was not answered in time. The text says why."""


class Stopped(FairmeshError):
    """The engine has ended the job: no call will get through any more."""


def head_of(**fields: Any) -> bytes:
    """Returns how what one call delivers begins."""
    text = json.dumps(fields, sort_keys=True).encode()
    return LENGTH.pack(len(text)) + text


def unpacked(envelope: bytes) -> tuple[dict[str, Any], bytes, bytes]:
    """Returns the head of what a call delivered, its bytes, and those after it: of an opening the signature, else the
    sealed frames. Nothing of it is authenticated yet. Raises Refused if it is not whole."""
    if not isinstance(envelope, bytes | bytearray | memoryview) or len(envelope) < LENGTH.size:
        raise Refused("a call that delivers no bytes of fairmesh")
    envelope = bytes(envelope)
    length = LENGTH.unpack_from(envelope)[0]
    begins = LENGTH.size + length
    if length > _HEAD or len(envelope) < begins:
        raise Refused("a call whose head is cut short")
    try:
        head = read_json(envelope[LENGTH.size : begins])
    except ValueError as error:
        raise Refused("a call whose head cannot be read") from error
    if not isinstance(head, dict):
        raise Refused("a call whose head is no table")
    return head, envelope[:begins], envelope[begins:]


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
        if length == 0:
            raise Refused("a frame without a byte")
        check_length(body[at], length, largest + FRAME_OVERHEAD_BYTES)
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
        dialled: The public key of the side that dials. With that of the other side, it tells this connection from all
            others, also from those of earlier jobs.
    """

    def __init__(self, carrier: "CallCarrier", peer: str, dialled: str):
        self._carrier, self.peer, self.dialled = carrier, peer, dialled
        self.answered = ""  # the public key of the side that answers, once it has signed it
        self._seal: Seal | None = None  # from then on
        self.opened: dict[str, Any] = {}  # what this side has answered to the opening
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
        return self._carrier.identity.certificate_of(self.peer)

    def agree(self, answered: str, seal: Seal) -> None:
        """Takes the key of the side that answers. No call before this is taken."""
        self.answered, self._seal = answered, seal

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
        envelope = self.packed({"number": self._sent, **more}, body)
        answer = await self._carrier.called(self.peer, envelope)
        self.wire_out += len(envelope)
        if "gone" in answer:
            self.end()
            raise ConnectionLost(str(answer["gone"])[:300])
        self._sent += 1
        self._told_at = self._heard_at = time.monotonic()

    def packed(self, fields: Mapping[str, Any], body: bytes) -> bytes:
        """Returns what one call delivers: its head, and its frames, sealed."""
        if self._seal is None:
            raise ConnectionLost("it has not answered yet")
        head = self._carrier.head_to(self.peer, dialled=self.dialled, answered=self.answered, **fields)
        return head + self._seal.sealed(body, head)

    async def take(self, head: Mapping[str, Any], begins: bytes, sealed: bytes) -> dict[str, Any]:
        """Takes what a call of the peer delivers, once. Returns the answer. Raises Refused if it is not the peer's."""
        if self._seal is None:
            return {"again": True}  # the answer to this side's opening is on its way
        if head.get("answered") != self.answered:
            return {"gone": "it has closed this connection"}
        return await self._take(head, self._seal.opened(sealed, begins))

    async def _take(self, head: Mapping[str, Any], body: bytes) -> dict[str, Any]:
        number = head.get("number")
        if head.get("end") is True:
            self.end()
            return {"taken": number}
        if number == self._taken - 1:  # the answer to its first call was lost
            return {"taken": number}
        if self.ended or number != self._taken:
            return {"gone": "this connection has ended"}
        frames = frames_of(body, self._carrier.largest)
        waiting = self._arrived.qsize()
        if waiting and (waiting >= _FRAMES or self._waiting_bytes + len(body) > _BYTES):
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
        identity: By which this site signs its openings, and knows those of the others.
    """

    def __init__(self, run: str, site: str, call: Call, identity: Identity):
        self._run, self._site, self._call, self.identity = run, site, call, identity
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
        half = Half()
        connection = CallConnection(self, name, half.public)
        self._connections[name, half.public] = connection  # its first call may come before it has answered
        opening = self.head_to(name, dialled=half.public, answered="", number=-1)
        try:
            try:
                answer = await self.called(name, opening + self.identity.signed(OPENS + opening))
                connection.agree(*self._agreed(name, half, opening, answer))
            except ConnectionLost as error:
                raise CannotConnect(str(error), in_handshake=False) from None
            except Refused as error:
                raise CannotConnect(str(error), in_handshake=True) from None
            async with connection:
                yield connection
        finally:
            self.forget(connection)

    def _agreed(self, peer: str, half: Half, opening: bytes, answer: Mapping[str, Any]) -> tuple[str, Seal]:
        """Returns the key of the side that has answered, and the seal. Raises Refused if it did not sign its answer."""
        answered, signature = answer.get("answered"), answer.get("signature")
        if not isinstance(answered, str) or not isinstance(signature, str):
            raise Refused(str(answer.get("gone", "it gives no answer that this site knows"))[:300])
        transcript = opening + answered.encode()
        if not self.identity.signed_by(peer, ANSWERS + transcript, _bytes_of(signature)):
            raise Refused(f"an answer that {peer} has not signed: somebody between the sites answers in its name")
        return answered, half.agreed(answered, transcript, dialled=True)

    def forget(self, connection: CallConnection) -> None:
        self._connections.pop((connection.peer, connection.dialled), None)

    def head_to(self, peer: str, **fields: Any) -> bytes:
        return head_of(run=self._run, to=peer, **{"from": self._site}, **fields)

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
            caller: The site that calls, as the engine says; its signature and its seal must say the same.
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
        head, begins, rest = unpacked(envelope)
        expected = {"run": self._run, "from": caller, "to": self._site}
        for what, value in expected.items():
            if head.get(what) != value:
                raise Refused(f"a call of {caller} that says {what} = {str(head.get(what))[:80]!r}, not {value!r}")
        drawn = head.get("dialled")
        if not isinstance(drawn, str) or len(drawn) != PUBLIC:
            raise Refused(f"a call of {caller} without a connection")
        with self._lock:
            if self._loop is None:
                return {"gone": "it is not ready yet"}
            taking = self._taken(caller, head, begins, rest)
            done: Future[dict[str, Any]] = asyncio.run_coroutine_threadsafe(taking, self._loop)
        try:
            answer = done.result(CALL_S)
        except TimeoutError:
            done.cancel()
            return {"again": True}
        except CancelledError:
            return {"gone": "it has ended"}
        return answer

    async def _taken(self, caller: str, head: Mapping[str, Any], begins: bytes, rest: bytes) -> dict[str, Any]:
        connection = self._connections.get((caller, str(head["dialled"])))
        if head.get("number") == -1:
            return self._opened(caller, str(head["dialled"]), begins, rest, connection)
        if connection is None:
            return {"gone": "it has closed this connection"}
        return await connection.take(head, begins, rest)

    def _opened(
        self, caller: str, drawn: str, opening: bytes, signature: bytes, known: CallConnection | None
    ) -> dict[str, Any]:
        """Begins a connection that a peer opens, unless it has begun and only the answer was lost."""
        if not self.identity.signed_by(caller, OPENS + opening, signature):
            raise Refused(f"an opening that {caller} has not signed: somebody between the sites calls in its name")
        if known is None:
            if sum(peer == caller for peer, _ in self._connections) >= _OPEN:
                return {"gone": f"{caller} has {_OPEN} connections to this site, which it must close first"}
            half, known = Half(), CallConnection(self, caller, drawn)
            transcript = opening + half.public.encode()
            known.agree(half.public, half.agreed(drawn, transcript, dialled=False))
            known.opened = {"answered": half.public, "signature": self.identity.signed(ANSWERS + transcript).hex()}
            self._connections[caller, drawn] = known
            task = asyncio.create_task(self._serve(known))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        return known.opened

    async def _serve(self, connection: CallConnection) -> None:
        async with connection:
            await self._answer(connection)


def _bytes_of(signature: str) -> bytes:
    try:
        return bytes.fromhex(signature)
    except ValueError:
        return b""
