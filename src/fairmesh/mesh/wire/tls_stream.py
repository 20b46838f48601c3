"""TLS over an asyncio stream. The handshake is a coroutine, so its caller sees why it failed and who the peer is.

This module does not use asyncio's own TLS: an asyncio server does not report failed handshakes, and it allocates
256 KiB per connection, even for a stranger.
"""

import asyncio
import os
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fairmesh.errors import BadInput

_PIECE = 1 << 18  # bytes read from the socket at once
READ_AHEAD = 1 << 20  # bytes that may wait to be decrypted; with more, the peer is slowed down
_RECORD = 1 << 14  # bytes; TLS decrypts no more at once
_ENCRYPT = 1 << 20  # bytes encrypted at once
_LINGER_S = 1.0
_WORDS = {  # what to say instead of these texts of TLS and of sockets; the first that is found counts
    "no certificate": ["PEER_DID_NOT_RETURN_A_CERTIFICATE"],
    "a certificate of another authority": [
        "unable to get local issuer certificate", "self signed certificate", "self-signed certificate",
        "certificate signature failure",
    ],
    "an expired certificate": ["certificate has expired"],
    "a certificate that is not valid yet; do the clocks agree?": ["certificate is not yet valid"],
    "a certificate of another site": ["Hostname mismatch", "Hostname Verification Check failed"],
    "a certificate that cannot be verified": ["CERTIFICATE_VERIFY_FAILED"],
    "an old version of TLS; TLS 1.3 is needed": ["UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION"],
    "not TLS: a request of plain HTTP": ["HTTP_REQUEST"],
    "not TLS: a request to a proxy": ["HTTPS_PROXY_REQUEST"],
    "not TLS": ["WRONG_VERSION_NUMBER"],
    "it does not know the authority of this site's certificate": ["ALERT_UNKNOWN_CA"],
    "it says that this site's certificate has expired": ["ALERT_CERTIFICATE_EXPIRED"],
    "it does not accept this site's certificate": ["ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE_UNKNOWN"],
    "it requires a certificate": ["CERTIFICATE_REQUIRED"],
    "connection refused: nobody listens there": ["Connection refused"],
    "no route to it": ["No route to host", "Network is unreachable"],
    "it closed the connection": [
        "Connection reset", "Connection lost", "Broken pipe", "EOF occurred in violation of protocol",
    ],
    "no answer in time": ["timed out"],
    "its name cannot be resolved": [
        "Name or service not known", "Temporary failure in name resolution", "No address associated with hostname",
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Credentials:
    """The PEM texts of a site: its key, its certificate, and the authority's certificate."""

    key: bytes
    certificate: bytes
    authority: bytes

    def for_dialling(self) -> ssl.SSLContext:
        """Returns a context that requires a certificate of this authority for the dialled name."""
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = True
        context.hostname_checks_common_name = False
        return context

    def for_listening(self) -> ssl.SSLContext:
        """Returns a context that requires a certificate of this authority; the caller checks the name in it."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # no resumption: every connection shows its certificate
        return context

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=self.authority.decode("ascii"))
            with _as_file(self.certificate) as certificate, _as_file(self.key) as key:
                context.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ValueError) as error:
            raise BadInput(f"this site's certificate or key cannot be used ({error})") from None
        return context


@dataclass(eq=False)
class TlsStream:
    """Encrypted bytes in both directions over an asyncio stream. Call `handshake` first."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    context: ssl.SSLContext
    server_name: str | None = None  # the dialled name; None on the listening side

    def __post_init__(self):
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: Any = None  # an ssl.SSLObject, from the handshake on
        self.wire_in = self.wire_out = 0  # bytes from and to the socket: records of TLS, and its handshake
        # asyncio sets this too, but only for sockets made with IPPROTO_TCP, and those of socket.create_server have 0.
        with suppress(OSError):  # the peer is gone already
            self.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def handshake(self) -> None:
        """Does the handshake. Raises ssl.SSLError or another OSError if it fails; TLS sends the peer an alert."""
        listening = self.server_name is None
        if listening:
            await self._fetch()  # a stranger who sends nothing costs no TLS object
        self._tls = self.context.wrap_bio(self._incoming, self._outgoing, listening, self.server_name)
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    return
                except ssl.SSLWantReadError:
                    self._flush()
                    await self._fetch()
        finally:
            self._flush()

    @property
    def peer_names(self) -> list[str]:
        """Returns every alternative name in the peer's certificate, which the handshake has verified."""
        entries = (self._tls.getpeercert() or {}).get("subjectAltName", ())
        return [name if kind == "DNS" else f"{kind}:{name}" for kind, name in entries]

    def peer_certificate(self) -> bytes:
        """Returns the peer's certificate, as PEM."""
        return ssl.DER_cert_to_PEM_cert(self._tls.getpeercert(binary_form=True)).encode()

    async def read(self, count: int, silence_s: float) -> bytes:
        """Returns `count` bytes, or fewer if the stream ends first. Raises TimeoutError if the peer sends nothing for
        `silence_s` seconds."""
        pieces: list[bytes] = []
        while count:
            try:
                piece = self._tls.read(min(count, _RECORD))
            except ssl.SSLWantReadError:
                self._flush()
                async with asyncio.timeout(silence_s):
                    await self._fetch()
                continue
            except ssl.SSLZeroReturnError:
                piece = b""
            if not piece:
                break
            pieces.append(piece)
            count -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def write(self, data: bytes) -> None:
        """Encrypts the data and queues all of it for the socket at once, so that no other write can interleave. Call
        `drain` afterwards."""
        if self.writer.transport.is_closing():
            raise ConnectionResetError("Connection lost")
        left = memoryview(data)
        while left:
            left = left[self._tls.write(left[:_ENCRYPT]) :]
            self._flush()

    async def drain(self) -> None:
        """Waits until the socket has accepted most of what is queued."""
        await self.writer.drain()

    async def close(self) -> None:
        """Ends the stream and waits a moment for the peer to end it too. Closing a socket with unread bytes resets the
        connection, and the peer could lose the last bytes sent to it, which may say why the stream ends."""
        try:
            if self._tls is not None:
                with suppress(ssl.SSLError):  # the peer has not ended its side yet, or the handshake failed
                    self._tls.unwrap()
                self._flush()
            self.writer.write_eof()
            async with asyncio.timeout(_LINGER_S):
                while await self.reader.read(_PIECE):
                    pass
        except (OSError, TimeoutError):
            pass
        finally:
            self.abort()

    def abort(self) -> None:
        """Closes the socket at once."""
        self.writer.transport.abort()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self.wire_out += self._outgoing.pending
            self.writer.write(self._outgoing.read())

    async def _fetch(self) -> None:
        data = await self.reader.read(_PIECE)
        self.wire_in += len(data)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Yields the path of a pipe that contains the content. `ssl` reads keys only from files, and a pipe keeps the key
    off the disk."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        try:
            if os.write(writing, content) != len(content):
                raise ValueError("the file is too large")
        finally:
            os.close(writing)
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)


def _no_password() -> str:
    """Refuses an encrypted key. Without this function, OpenSSL would ask for a password on the terminal."""
    raise ValueError("the key is encrypted; a node needs one without a password")


def in_words(said: str) -> str:
    """Returns the words for an error text, or the text itself where there are none."""
    return next((words for words, signs in _WORDS.items() if any(sign in said for sign in signs)), said)


def reason_of(error: Exception) -> str:
    """Returns the words for an error of a socket or of TLS."""
    if isinstance(error, TimeoutError):
        return in_words("timed out")
    # asyncio gives only the error number of a failed connect.
    said = re.sub(r"\[Errno (\d+)\] Connect call failed", lambda found: os.strerror(int(found[1])), str(error))
    return in_words(said or type(error).__name__)
