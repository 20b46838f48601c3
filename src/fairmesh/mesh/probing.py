"""Whether a site reaches its neighbours, and whether they are who and what they should be."""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fairmesh.mesh.certificates import SOON_DAYS, valid_until
from fairmesh.mesh.members import Mesh, SiteFile, host_and_port
from fairmesh.mesh.wire.frames import (
    Kind,
    Refused,
    hello,
    read_frame,
    read_hello,
)
from fairmesh.mesh.wire.tls_errors import in_words

_WAIT_S = 5.0
CLOCKS_APART_S = 300.0

Compare = Callable[[str, Mapping[str, Any]], None]  # refuses a neighbour's greeting by its reason


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: what was found, and what to do where it is not well."""

    what: str
    ok: bool
    found: str
    advice: str = ""


class _Wrong(Exception):
    def __init__(self, found: str, advice: str):
        self.found, self.advice = found, advice


def neighbour_checks(
    site_file: SiteFile,
    mesh: Mesh,
    greeting: Mapping[str, Any] | None,  # none where the experiment cannot be read
    compare: Compare,
    connected: Mapping[str, bool] | None,  # as this site's own node sees it, where that is running
) -> Iterator[Check]:
    """One check for each neighbour: a handshake and a greeting where this site dials it."""
    for other in mesh.neighbours(site_file.name):
        what, address = f"neighbour {other}", mesh.member(other).address
        if address is None or not mesh.dials(site_file.name, other):
            yield _dials_us(what, other, connected)
            continue
        try:
            days = _handshake(site_file, other, address)
            said = "" if greeting is None else _greeted(site_file, other, address, mesh, greeting, compare)
        except _Wrong as wrong:
            yield Check(what, False, f"{address}: {wrong.found}", wrong.advice)
        else:
            until = f"its certificate is valid for {days} more days{'; remind it' if days < SOON_DAYS else ''}"
            yield Check(what, True, f"{address} answers as {other}{said}; {until}")


def _dials_us(what: str, other: str, connected: Mapping[str, bool] | None) -> Check:
    if connected is None:
        return Check(what, True, "dials this site; nothing to try from here, and this site's node is not running")
    if connected.get(other):
        return Check(what, True, "dials this site, and is connected to its node")
    advice = f"is {other}'s node running, and can it reach this site's address? `fairmesh mesh check` there tries it"
    return Check(what, False, "dials this site, but is not connected to its node", advice)


def _handshake(site_file: SiteFile, other: str, address: str) -> int:
    """TLS 1.3 as the node speaks it. Gives the days for which the other's certificate is valid."""
    reach = f"is its node running, and may this machine open a connection to {address}?"
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(site_file.authority)
        context.load_cert_chain(site_file.certificate, site_file.key)
        context.set_alpn_protocols(["h2"])
    except (OSError, ValueError) as error:
        raise _Wrong(
            f"not tried: this site's certificate or key cannot be used ({error})", "mend these first"
        ) from None
    try:
        plain = socket.create_connection(host_and_port(address, other), timeout=_WAIT_S)
    except OSError as error:
        raise _Wrong(in_words(str(error)), reach) from None
    with plain:
        try:
            with context.wrap_socket(plain, server_hostname=other) as secured:
                shown = secured.getpeercert(binary_form=True) or b""
                answered = secured.recv(1)  # by TLS 1.3 the server refuses this site's certificate only now
        except ssl.SSLError as error:
            raise _Wrong(f"no handshake: {in_words(str(error))}", _mend_handshake(other)) from None
        except OSError as error:
            raise _Wrong(f"no handshake: {in_words(str(error))}", f"is it {other}'s node that listens there?") from None
    if not answered:
        raise _Wrong("it closed the connection on seeing this site's certificate", f"{other}'s log says why")
    return (valid_until(ssl.DER_cert_to_PEM_cert(shown).encode()) - datetime.now(UTC)).days


def _mend_handshake(other: str) -> str:
    return f"compare certificate and authority with {other}: both must be of this mesh, valid, and for these names"


def _greeted(
    site_file: SiteFile, other: str, address: str, mesh: Mesh, greeting: Mapping[str, Any], compare: Compare
) -> str:
    """Greets as the node would, but only to check, which changes nothing there; gives what was found."""
    try:
        theirs, here, refusal = asyncio.run(_exchange(site_file, other, address, greeting))
        compare(other, theirs)
        if refusal:
            raise Refused(refusal)
    except TimeoutError:
        raise _Wrong(f"no greeting within {_WAIT_S:.0f} s", f"see {other}'s log") from None
    except Refused as error:
        raise _Wrong(str(error), f"agree with {other} on which of the two is right") from None
    clock = theirs.get("clock")
    apart = clock - here if isinstance(clock, int | float) and abs(clock) < 1e15 else 0.0
    if abs(apart) > CLOCKS_APART_S:
        raise _Wrong(
            f"its clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} this one", "set the clocks"
        )
    if theirs.get("generation") != mesh.generation:
        found = f"generation {theirs.get('generation')} of the mesh there, {mesh.generation} here: a site has left"
        raise _Wrong(found, f"wait until this site's node has followed, or take mesh.toml from {other}")
    return f"; the same experiment and versions; clocks {abs(apart):.1f} s apart"


async def _exchange(
    site_file: SiteFile, other: str, address: str, greeting: Mapping[str, Any]
) -> tuple[dict[str, Any], float, str | None]:
    """The other's greeting, when it was read by this clock, and why it refuses this site's, if it does."""
    from fairmesh.mesh.wire import channels

    files = (site_file.key, site_file.certificate, site_file.authority)
    given = channels.Credentials(*(path.read_bytes() for path in files))
    async with asyncio.timeout(_WAIT_S), channels.dialled(address, other, given, 0) as channel:
        call = channel.stream_stream(channels.METHOD)()
        read = channels.frames_of(call)
        try:
            await call.write(hello({**greeting, "check": True, "holds": [0, 0], "clock": time.time()}))
            first = await read()
            here = time.time()
            last = await read() if first is not None else None
            status = await call.details() if last is None else None
        except channels.RpcError as error:
            raise Refused(in_words(error.details() or error.code().name)) from None
    if first is None:
        raise Refused(f"it refuses: {status}" if status else "it ended the stream without a greeting")
    refusal = None if last is None else read_frame(last)
    if refusal is not None and refusal.kind == Kind.REFUSED:
        return read_hello(first), here, f"it refuses: {refusal.reason()}"
    return read_hello(first), here, f"it refuses: {status}" if status else None
