"""Checks whether a site reaches its neighbours, and whether they are the expected sites with the same experiment."""

import asyncio
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.mesh import clocks
from fairmesh.mesh.certificates import SOON_DAYS, valid_until
from fairmesh.mesh.roster import Mesh, SiteFile
from fairmesh.mesh.wire.connections import CannotConnect, ConnectionLost, dialled
from fairmesh.mesh.wire.frames import REFUSALS, Refused, hello, read_frame, read_hello
from fairmesh.mesh.wire.tls_stream import Credentials

_WAIT_S = 5.0

Compare = Callable[[str, Mapping[str, Any]], None]  # raises Refused for a neighbour's greeting that does not fit


@dataclass(frozen=True)
class Check:
    """One check: what was found, and what to do if it failed."""

    what: str
    ok: bool
    found: str
    advice: str = ""


class _Wrong(Exception):
    def __init__(self, found: str, advice: str):
        self.found, self.advice = found, advice


@dataclass(frozen=True)
class _Answer:
    """What a neighbour answered."""

    greeting: bytes  # its first frame
    at: float  # when it was read, by this clock
    certificate: bytes  # DER
    refusal: str | None  # why it refuses this site's greeting, if it does


def neighbour_checks(
    site_file: SiteFile,
    mesh: Mesh,
    greeting: Mapping[str, Any] | None,  # None if the experiment cannot be read
    compare: Compare,
    connected: Mapping[str, bool] | None,  # as this site's own node sees it; None if that is not running
) -> Iterator[Check]:
    """Yields one check per neighbour: a handshake and a greeting if this site dials it."""
    for other in mesh.neighbours(site_file.name):
        what, address = f"neighbour {other}", mesh.member(other).address
        if address is None or not mesh.dials(site_file.name, other):
            yield _dials_us(what, other, connected)
            continue
        try:
            answer = _asked(site_file, other, address, greeting)
            days = (valid_until(ssl.DER_cert_to_PEM_cert(answer.certificate).encode()) - datetime.now(UTC)).days
            said = "" if greeting is None else _compared(answer, other, mesh, compare)
        except _Wrong as wrong:
            yield Check(what, False, f"{address}: {wrong.found}", wrong.advice)
        else:
            until = f"its certificate is valid for {days} more days{'; remind it' if days < SOON_DAYS else ''}"
            yield Check(what, True, f"{address} answers as {other}{said}; {until}")


def _dials_us(what: str, other: str, connected: Mapping[str, bool] | None) -> Check:
    if connected is None:
        return Check(what, True, "dials this site; not checked, since this site's node is not running")
    if connected.get(other):
        return Check(what, True, "dials this site, and is connected to its node")
    advice = f"is {other}'s node running, and can it reach this site's address? `fairmesh mesh check` there tries it"
    return Check(what, False, "dials this site, but is not connected to its node", advice)


def _context(site_file: SiteFile) -> ssl.SSLContext:
    try:
        files = (site_file.key, site_file.certificate, site_file.authority)
        return Credentials(*(path.read_bytes() for path in files)).for_dialling()
    except (OSError, BadInput) as error:
        raise _Wrong(f"not tried: {error}", "fix the site's files first") from None


def _asked(site_file: SiteFile, other: str, address: str, greeting: Mapping[str, Any] | None) -> _Answer:
    """Connects as the node does. Sends the greeting, if there is one, marked as a check, which changes nothing at the
    neighbour."""
    try:
        return asyncio.run(_exchange(address, other, _context(site_file), greeting))
    except CannotConnect as error:
        there = _who_answers(site_file, address) if error.in_handshake else None
        if there:
            raise _Wrong(
                f"{there} answers there, not {other}",
                f"let both compare their ports with mesh.toml: `fairmesh mesh check` at {there} and at {other} does it",
            ) from None
        if error.in_handshake:
            raise _Wrong(
                f"no handshake: {error}",
                f"compare certificate and authority with {other}: both must be valid, and of this mesh and these names",
            ) from None
        raise _Wrong(
            str(error),
            f"is its node running, and may this machine open a connection to {address}? `fairmesh mesh check` at "
            f"{other} says whether it listens on that port",
        ) from None
    except TimeoutError:
        raise _Wrong(f"no greeting within {_WAIT_S:.0f} s", f"see {other}'s log") from None
    except (ConnectionLost, Refused) as error:
        raise _Wrong(str(error), f"see {other}'s log") from None


def _who_answers(site_file: SiteFile, address: str) -> str | None:
    """Returns which site of this mesh answers at an address, or None."""
    context = _context(site_file)
    context.check_hostname = False  # the authority is checked; the name is what is asked

    async def names() -> list[str]:
        async with dialled(address, site_file.name, context, 0) as connection:
            return connection.peer_names

    try:
        return ", ".join(asyncio.run(names())) or None
    except CannotConnect:
        return None


async def _exchange(address: str, other: str, context: ssl.SSLContext, greeting: Mapping[str, Any] | None) -> _Answer:
    async with dialled(address, other, context, 0) as connection, asyncio.timeout(_WAIT_S):
        if greeting is not None:
            mine = {**greeting, "check": True, "holds": [0, 0], "clock": time.time()}
            await connection.send(hello(mine))
        first = await connection.receive()
        at = time.time()
        if first is None:
            raise Refused("it closed the connection without a greeting")
        if refusal := _refusal_in(first):
            raise Refused(refusal)
        last = None if greeting is None else await connection.receive()
        return _Answer(first, at, connection.peer_certificate(), _refusal_in(last))


def _refusal_in(frame: bytes | None) -> str | None:
    return f"it refuses: {read_frame(frame).reason()}" if frame and frame[0] in REFUSALS else None


def _compared(answer: _Answer, other: str, mesh: Mesh, compare: Compare) -> str:
    """Compares both greetings; returns what to show if they agree."""
    try:
        theirs = read_hello(answer.greeting)
        compare(other, theirs)
        if answer.refusal:
            raise Refused(answer.refusal)
    except Refused as error:
        raise _Wrong(str(error), f"agree with {other} on which of the two is right") from None
    apart = clocks.seconds_ahead(theirs, answer.at)
    if abs(apart) > clocks.APART_S:
        raise _Wrong(f"its clock is {clocks.in_words(apart)}", "set the one that is wrong")
    if theirs.get("generation") != mesh.generation:
        found = f"generation {theirs.get('generation')} of the mesh there, {mesh.generation} here: a site has left"
        raise _Wrong(found, f"wait until this site's node has caught up, or get mesh.toml from {other}")
    return f"; the same experiment and versions; clocks {abs(apart):.1f} s apart"
