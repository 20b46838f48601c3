"""Connections between sites: frames over mutual TLS 1.3, of bounded size, in bounded number, watched for silence.

Each frame is preceded by its length: four bytes, little-endian. A length of 0xffffffff is a heartbeat, without a frame.
Each side sends a heartbeat after a few seconds without a frame, so that a peer that hangs or cannot be reached any more
is noticed.
"""

import asyncio
import errno
import ipaddress
import os
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.mesh.enrol.roster import host_and_port
from fairmesh.mesh.wire.carrier import Answer, Carrier, TurnedAway
from fairmesh.mesh.wire.frames import LENGTH, Refused, check_length
from fairmesh.mesh.wire.limits import TokenBucket
from fairmesh.mesh.wire.tls_stream import READ_AHEAD, Credentials, TlsStream, reason_of

FRAME_OVERHEAD_BYTES = 1 << 20  # that a frame may have beyond the largest message, which is checked exactly later
_HEARTBEAT = 0xFFFFFFFF
_HEARTBEAT_S, _SILENCE_S = 6.0, 15.0
_HEARTBEATS_PER_S, _HEARTBEATS_AT_ONCE = 2.0, 8.0  # that are taken of a peer; a delayed network brings some at once
_TURN_FRAMES, _TURN_BYTES = 64, 1 << 18  # handled of one peer before it is the others' turn
_DIAL_S = 5.0
_HANDSHAKE_S = 10.0  # then a stranger who sends nothing is disconnected
_BOTH_FAMILIES_S = 0.25  # then the next address of a host is tried in parallel
_BACKLOG = 256
_WITHIN = "it closed the connection within a frame"
_OPEN_FILES = 8192
_CONNECTIONS = 2048  # at once, strangers included; about 55 kB each during a handshake
_OF_AN_ADDRESS, _FEWEST_OF_IT = 1 / 8, 16  # of them may be in their handshake; with more, the oldest has to go
_listening: list[Any] = []  # sockets that belong to this process alone


class CannotConnect(ConnectionError):
    """No connection could be made, or it ended before the peer's first frame. The text says why."""

    def __init__(self, reason: str, in_handshake: bool):
        super().__init__(reason)
        self.in_handshake = in_handshake  # a peer was reached


class ConnectionLost(ConnectionError):
    """A connection ended without being closed. The text says why."""


@dataclass(eq=False)
class Connection(TlsStream):
    """Frames to and from one peer with a certificate of the mesh's authority. Use it in `async with` after the
    handshake. A frame with a message may have `largest` bytes more than its overhead."""

    largest: int = 0

    async def __aenter__(self) -> "Connection":
        self._received_any = False  # frame of the peer
        self._heartbeats = TokenBucket(_HEARTBEATS_PER_S, _HEARTBEATS_AT_ONCE)
        self._frames, self._turn_ends = 0, 0  # of this turn; and the bytes from the socket by which it ends
        self._heart = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._heart.cancel()
        await self.close()

    async def receive(self) -> bytes | None:
        """Returns the next frame, or None when the peer has closed the connection. Checks a frame's length against the
        bound for its kind, which is its first byte, before it reads the rest."""
        self._frames += 1
        if self._frames >= _TURN_FRAMES or self.wire_in >= self._turn_ends:
            self._frames, self._turn_ends = 0, self.wire_in + _TURN_BYTES
            await asyncio.sleep(0)  # reading what has arrived already would not let other connections go on
        while True:
            head = await self._exactly(LENGTH.size)
            if not head:
                return None
            if len(head) < LENGTH.size:
                raise ConnectionLost(_WITHIN)
            length = LENGTH.unpack(head)[0]
            if length != _HEARTBEAT:
                break
            if not self._heartbeats.spend(1):
                raise Refused(f"more than {_HEARTBEATS_PER_S:.0f} heartbeats per second")
        first = await self._exactly(min(length, 1))
        check_length(first[0] if first else 0, length, min(self.largest + FRAME_OVERHEAD_BYTES, _HEARTBEAT - 1))
        frame = first + await self._exactly(length - len(first))
        if len(frame) < length:
            raise ConnectionLost(_WITHIN)
        return frame

    async def send(self, *frames: bytes) -> None:
        """Queues frames, small ones in one record of TLS, then waits until the peer reads. If the wait is cancelled,
        they stay queued."""
        try:
            self.write(b"".join([LENGTH.pack(len(frame)) + frame for frame in frames]))
            self._wrote_at = time.monotonic()
            await self.drain()
        except OSError as error:
            raise ConnectionLost(reason_of(error)) from None

    async def _exactly(self, count: int) -> bytes:
        """Returns `count` bytes, or fewer if the peer closes the connection first."""
        try:
            found = await self.read(count, _SILENCE_S)
        except TimeoutError:
            raise ConnectionLost(f"it has sent nothing for {_SILENCE_S:.0f} s") from None
        except OSError as error:
            if self._received_any:
                raise ConnectionLost(reason_of(error)) from None
            # In TLS 1.3 the handshake ends for the dialling side before the other side has seen its certificate.
            raise CannotConnect(reason_of(error), in_handshake=True) from None
        self._received_any = True
        return found

    async def _beat(self) -> None:
        self._wrote_at = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, self._wrote_at + _HEARTBEAT_S - time.monotonic()))
            if time.monotonic() - self._wrote_at < _HEARTBEAT_S:  # a frame has told the same
                continue
            self._wrote_at = time.monotonic()
            if not self.writer.transport.get_write_buffer_size():  # otherwise the peer already has bytes to read
                with suppress(OSError):  # the reading task reports it
                    self.write(LENGTH.pack(_HEARTBEAT))


@asynccontextmanager
async def dialled(address: str, name: str, context: ssl.SSLContext, largest: int) -> AsyncIterator[Connection]:
    """Connects to the peer at an address, which must have a certificate for `name`. Raises CannotConnect."""
    host, port = host_and_port(address, name)
    connection = None
    try:
        async with asyncio.timeout(_DIAL_S):
            opened = await asyncio.open_connection(host, port, limit=READ_AHEAD, happy_eyeballs_delay=_BOTH_FAMILIES_S)
            connection = Connection(*opened, context, name, largest)
            await connection.handshake()
    except BaseException as error:
        if connection is not None:
            connection.abort()
        if isinstance(error, TimeoutError | OSError):
            raise CannotConnect(reason_of(error), in_handshake=connection is not None) from None
        raise
    async with connection:
        yield connection


def keep_from_forks(sockets: Iterable[Any]) -> None:
    """Closes listening sockets in every process that this one forks from now on. A port is taken as long as any process
    holds it: workers that read data outlive a killed node by a moment, and the node could not start again."""
    _listening[:] = [*(opened for opened in _listening if opened.fileno() >= 0), *sockets]


def _let_go() -> None:
    if not _listening:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for opened in _listening:
        if opened.fileno() >= 0:  # it is replaced, not closed, since the object will close its number once more
            os.dup2(nothing, opened.fileno(), inheritable=False)
    os.close(nothing)
    _listening.clear()


os.register_at_fork(after_in_child=_let_go)


@dataclass(eq=False)
class Listener:
    """Accepts connections and passes each peer with a certificate of the mesh's authority to `answer`. Reports a peer
    that fails in the handshake by its address and the reason."""

    context: ssl.SSLContext
    largest: int
    answer: Callable[[Connection], Awaitable[None]]
    refused: Callable[[str, str], None]

    def __post_init__(self):
        self._most = _connections()
        self._open: set[asyncio.Task[None]] = set()
        self._in_handshake: dict[str, dict[Connection, None]] = {}  # by address, the oldest first
        self._server: asyncio.Server | None = None

    async def start(self, address: str) -> None:
        host, port = host_and_port(address, "listen")
        given: dict[str, Any] = {"host": host, "port": port, "reuse_port": False}
        try:
            if host in ("0.0.0.0", "::"):
                given = {"sock": _on_all_interfaces(port)}
            self._server = await asyncio.start_server(self._accepted, limit=READ_AHEAD, backlog=_BACKLOG, **given)
            keep_from_forks(self._server.sockets)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise BadInput(f"cannot listen on {address}: another program uses the port") from error
            raise BadInput(f"cannot listen on {address}: {error.strerror or error}") from error

    async def close(self) -> None:
        """Ends every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = _shown(writer.get_extra_info("peername"))
        if len(self._open) >= self._most:
            self.refused(address, f"{self._most} connections are open already")
            writer.transport.abort()
            return
        stream = Connection(reader, writer, self.context, largest=self.largest)
        # Members behind one address get in next to a stranger there who holds connections open: their handshake is
        # done before theirs is the oldest.
        waiting = self._in_handshake.setdefault(address, {})
        if len(waiting) >= max(_FEWEST_OF_IT, _OF_AN_ADDRESS * self._most):
            self.refused(address, f"{len(waiting)} connections of this address are in their handshake already")
            oldest = next(iter(waiting))
            del waiting[oldest]
            oldest.abort()
        waiting[stream] = None
        task = asyncio.create_task(self._serve(stream, address))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, stream: Connection, address: str) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await self._shake_hands(stream, address)
        except TimeoutError:
            self.refused(address, f"no handshake within {_HANDSHAKE_S:.0f} s")
            stream.abort()
        except OSError as error:
            self.refused(address, reason_of(error))
            await stream.close()
        except asyncio.CancelledError:
            stream.abort()
            raise
        else:
            async with stream:
                await self.answer(stream)

    async def _shake_hands(self, stream: Connection, address: str) -> None:
        try:
            await stream.handshake()
        finally:
            waiting = self._in_handshake.get(address, {})
            waiting.pop(stream, None)  # unless it had to go for a newer one
            if not waiting:
                self._in_handshake.pop(address, None)


class TlsCarrier(Carrier):
    """Carries frames over connections of its own, with mutual TLS.

    Args:
        credentials: Those of this site.
        listen: host:port; "": nobody dials this site.
    """

    def __init__(self, credentials: Credentials, listen: str):
        self._credentials, self._listen = credentials, listen
        self._listener: Listener | None = None

    async def open(self, largest: int, answer: Answer, turned_away: TurnedAway) -> None:
        self._largest, self._context = largest, self._credentials.for_dialling()
        self._listener = Listener(self._credentials.for_listening(), largest, answer, turned_away)
        if self._listen:
            await self._listener.start(self._listen)

    def dialled(self, address: str, name: str) -> AbstractAsyncContextManager[Connection]:
        return dialled(address, name, self._context, self._largest)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()


def _on_all_interfaces(port: int) -> socket.socket:
    """Returns one socket for IPv4 and IPv6 where the system has both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _shown(peer: tuple[Any, ...] | None) -> str:
    """Returns a peer's address without its port, which differs for each connection."""
    if not peer:
        return "unknown"
    found = ipaddress.ip_address(peer[0].partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def _connections() -> int:
    """Returns how many connections to allow at once: at most half of the files that a process may open. The others
    remain for what a node must write. Many systems allow 1,024 by default, and strangers could use up all of them."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    return min(_CONNECTIONS, wanted // 2)
