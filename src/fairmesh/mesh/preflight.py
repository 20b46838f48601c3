"""Checks whether a site is ready to take part: its files, certificate, port, data and neighbours.

A check is a function that returns what to say if all is well, and raises an error otherwise.
"""

import asyncio
import errno
import math
import secrets
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fairmesh.data.check import check_inputs
from fairmesh.data.site import Site
from fairmesh.data.site_tables import without_values
from fairmesh.data.units import units_of
from fairmesh.errors import BadInput, in_a_line, listed
from fairmesh.experiment import Experiment
from fairmesh.mesh.enrol.agreement import agreed, problem_of, refuse_undeployable
from fairmesh.mesh.enrol.approval import import_allowed, refuse_unapproved
from fairmesh.mesh.enrol.certificates import SOON_DAYS, check_certificate, secret_of, valid_until
from fairmesh.mesh.enrol.manifest import Handout, handed_out
from fairmesh.mesh.enrol.revealing import ALLOW, LEAST_ROWS, refuse_revealing, revealing
from fairmesh.mesh.enrol.roster import Mesh, SiteFile, host_and_port
from fairmesh.mesh.node.disk import alike_everywhere, disk_of
from fairmesh.mesh.node.membership import Membership, facts, frozen_facts, refuse_lost_secret
from fairmesh.mesh.node.privacy_ledger import PrivacyLedger
from fairmesh.mesh.node.private_site import refuse_spent
from fairmesh.mesh.node.rounds import cost_of_a_round
from fairmesh.mesh.node.store import FINISHED, is_finished
from fairmesh.mesh.node.watching import live_status
from fairmesh.mesh.wire.connections import CannotConnect, ConnectionLost, dialled
from fairmesh.mesh.wire.frames import REFUSALS, Refused, hello, read_frame, read_hello
from fairmesh.mesh.wire.greeting import APART_S, apart_in_words, greeting, refuse_unlike, seconds_ahead
from fairmesh.mesh.wire.probes import PROBING_S, Line, measured_line, milliseconds
from fairmesh.mesh.wire.tls_stream import Credentials
from fairmesh.privacy.accounting import epsilon_of
from fairmesh.storage.files import open_to_others, read_bytes
from fairmesh.training.pace import NODE_S, Pace, RoundCost, duration

T = TypeVar("T")

_WAIT_S = 5.0
_HERE_S = 2.0  # for a connection to this machine itself


@dataclass(frozen=True)
class Check:
    """One check: what was found, and what to do if it failed."""

    what: str
    ok: bool
    found: str
    advice: str = ""


class _Wrong(Exception):
    """A check failed, and this is what to do."""

    def __init__(self, found: object, advice: str):
        super().__init__(str(found))
        self.advice = advice


def _tried(
    what: str, read: Callable[[], T], advice: str = "do what is named", good: str = ""
) -> Generator[Check, None, T | None]:
    """Yields the check that something can be read, and returns what was read, or None. Without `good`, this is also
    what the check says if all is well."""
    try:
        value = read()
    except Exception as error:  # an experiment file and a site's entry point import a user's modules
        said = str(error) if isinstance(error, BadInput | _Wrong) else in_a_line(error)
        yield Check(what, False, said, error.advice if isinstance(error, _Wrong) else advice)
        return None
    yield Check(what, True, good or str(value))
    return value


def checks(path: Path) -> Iterator[Check]:
    """Yields every check of a site as soon as it is done. Checks that need an unreadable file are left out."""
    readable = "can be read"
    site_file = yield from _tried("site file", lambda: SiteFile.read(path), good=readable)
    if site_file is None:
        return
    mesh = yield from _tried("mesh file", lambda: _mesh(site_file), "ask the mesh's founder for mesh.toml", readable)
    handout = approved = experiment = None
    if mesh:
        signed = "signed by the mesh's authority, and every file is as it was signed"
        handout = yield from _tried("manifest", lambda: handed_out(site_file, mesh), good=signed)
    if handout:
        reasons = "; ".join(revealing(handout.table))
        sent = f"{ALLOW}: {reasons}" if reasons else "no training rows could be read from such messages so far"
        yield from _tried("messages", lambda: refuse_revealing(site_file, handout), good=sent)
        good = "this site has approved the manifest"
        approved = yield from _tried("approval", lambda: refuse_unapproved(site_file, handout), good=good)
    if handout and approved:
        advice = "do what is named; or agree on another experiment and found the mesh again"
        good = "can be imported and deployed"
        experiment = yield from _tried("experiment", lambda: _deployable(site_file, handout), advice, good)
    request = site_file.certificate.with_suffix(".csr").name
    advice = f"do what is named, or have {request} signed again: fairmesh mesh sign {request}"
    yield from _tried("certificate", lambda: _certificate(site_file), advice)
    if not secret_of(site_file.key).exists():
        yield from _tried("secret of the draws", lambda: refuse_lost_secret(site_file), good="is made at the start")
    yield from privacy_checks(site_file)
    if handout and (site_file.state / FINISHED).exists():
        done = "the run has finished, and its result is there"
        yield from _tried("state", lambda: is_finished(site_file.state, handout.manifest), good=done)
    if mesh:
        yield from _tried("listening", lambda: _listening(site_file, mesh))
    met = _Neighbourhood()
    if mesh and handout and experiment:
        cost = yield from _data_checks(site_file, experiment, mesh)
        met = _Neighbourhood(greeting(site_file.name, agreed(experiment), mesh, handout.manifest.files), cost)
    if mesh:
        for other in mesh.neighbours(site_file.name):
            ask = _asked if mesh.dials(site_file.name, other) else _dials_us
            yield from _tried(f"neighbour {other}", partial(ask, site_file, mesh, other, met))
    if experiment and met.cost:
        yield Check("time of the run", True, _expected(site_file, experiment, met.cost, met.lines))


def privacy_checks(site_file: SiteFile) -> Iterator[Check]:
    """Yields whether others on this machine can read the secret of the draws, or the state."""
    private = {"secret of the draws": (secret_of(site_file.key), 600), "state folder": (site_file.state, 700)}
    for what, (path, mode) in private.items():
        if path.exists() and open_to_others(path):
            yield Check(what, False, f"{path} can be read by others on this machine", f"chmod {mode} {path}")
        elif path.exists():
            yield Check(what, True, "is its owner's alone")


def _mesh(site_file: SiteFile) -> Mesh:
    mesh = Mesh.read(site_file.mesh)
    mesh.refuse_gone([site_file.name])
    return mesh


def _deployable(site_file: SiteFile, handout: Handout) -> Experiment:
    experiment = import_allowed(site_file, handout)
    refuse_undeployable(experiment)
    return experiment


def _certificate(site_file: SiteFile) -> str:
    """Checks that certificate and key are this site's, signed by this mesh's authority, valid now and private."""
    held, authority = (read_bytes(path) for path in (site_file.certificate, site_file.authority))
    wrong = check_certificate(held, authority, site_file.name, key=site_file.key)
    if wrong:
        raise BadInput("; ".join(wrong))
    return f"for {site_file.name}, {_valid_for(held, 'have it signed again soon')}"


def _valid_for(certificate: bytes, if_soon: str) -> str:
    days = (valid_until(certificate) - datetime.now(UTC)).days
    return f"valid for {days} more days{f'; {if_soon}' if days < SOON_DAYS else ''}"


def _listening(site_file: SiteFile, mesh: Mesh) -> str:
    """Checks that this site can listen where others dial it: the port is free, or this site's own node uses it."""
    address, listen = mesh.member(site_file.name).address, site_file.listen
    dialled_by = [name for name in mesh.neighbours(site_file.name) if mesh.dials(name, site_file.name)]
    if not listen:
        if not dialled_by:
            return "not needed: this site dials all its neighbours"
        raise _Wrong(
            f"{', '.join(dialled_by)} dial {address}",
            f"add listen = '0.0.0.0:{host_and_port(address, 'address')[1]}'",
        )
    host, port = host_and_port(listen, "listen")
    reached, dialled_port = host_and_port(address or listen, "address")
    # If the ports are equal, the address leads here: many networks do not let a machine dial its own public address.
    leads_here = not dialled_by or dialled_port == port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family[0], socket.SOCK_STREAM) as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(family[4])
            opened.listen(1)
            leads_here = leads_here or _arrives(opened, reached, dialled_port)
        found = f"{listen} is free; others dial {address or 'nothing'}"
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not _is_own_node(site_file, host, port):
            raise _Wrong(
                f"cannot listen on {listen}: {error.strerror or error}",
                "free the port, or set another one as listen and as the mesh's address",
            ) from error
        leads_here = leads_here or _is_own_node(site_file, reached, dialled_port)
        found = f"this site's node listens on {listen}"
    if leads_here:
        return found
    raise _Wrong(
        f"this site listens on port {port}, but {', '.join(dialled_by)} dial {address}, the address in "
        f"{site_file.mesh.name}, and that does not lead here",
        f"set the port of listen in {site_file.path.name} to {dialled_port}; or, if a firewall forwards {dialled_port} "
        f"to {port}, let {dialled_by[0]} try it with `fairmesh mesh check`",
    )


def _arrives(listening: socket.socket, host: str, port: int) -> bool:
    """Returns whether a connection to an address arrives at this socket."""
    sign = secrets.token_bytes(16)
    listening.settimeout(_HERE_S)
    try:
        with socket.create_connection((host, port), timeout=_HERE_S) as dialling:
            dialling.sendall(sign)
            with listening.accept()[0] as accepted:
                accepted.settimeout(_HERE_S)
                return accepted.recv(len(sign), socket.MSG_WAITALL) == sign
    except OSError:
        return False


def _is_own_node(site_file: SiteFile, host: str, port: int) -> bool:
    """Returns whether the process that listens there shows this site's certificate."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        shown = ssl.get_server_certificate((reached, port), timeout=_WAIT_S)
        return ssl.PEM_cert_to_DER_cert(shown) == ssl.PEM_cert_to_DER_cert(site_file.certificate.read_text())
    except (OSError, ValueError):
        return False


def _data_checks(site_file: SiteFile, experiment: Experiment, mesh: Mesh) -> Generator[Check, None, RoundCost | None]:
    """Yields whether this site's data can be read, is as the contract says, fits the model and the loss, and is what
    the run began with; and if so, whether the run fits on the disk, and what a round costs, which it returns."""
    sites: list[Site] = []

    def data() -> str:
        problem = problem_of(site_file, experiment, mesh)
        site = problem.sites[0]
        frozen_facts(site_file.state, site_file.name, facts(site), problem.digests_here()[0])
        sites.append(site)
        judged = f", {len(site.test):,} test samples" if site.test is not None else ", no test samples"
        if site.train.sealed:  # of which nothing but the number of units is known
            return f"{len(site.train):,} training units{judged}, whose rows are sealed; they fit the model"
        labels = site.train.known_targets()
        one_class = isinstance(labels, Tensor) and not labels.is_floating_point() and len(labels.unique()) == 1
        judged += ", all of one class: is the label column right?" if one_class else ""
        judged += ", so few that messages tell much about each" if len(site.train) < LEAST_ROWS else ""
        empty = listed(without_values([site]))
        judged += f", no values of {empty}, which count as missing" if empty else ""
        checked = " and the contract" if experiment.contract else "; there is no contract to check them by"
        grouped = "" if site.train.units is None else f" of {units_of(site.train):,} units"
        reserved = 0 if site.reserved is None else len(site.reserved)
        apart = f" and {reserved:,} reserved to choose this site's model by" if reserved else ""
        return f"{len(site.train):,} training samples{grouped}{apart}{judged}; they fit the model{checked}"

    yield from _tried("data", data, f"see data in {site_file.path.name}")
    for site in sites:
        for finding in () if experiment.contract else check_inputs(site):
            yield Check("inputs", True, f"look again: {finding.sentence}")
        if experiment.privacy is not None:
            yield from _tried("privacy", lambda: _spent(site_file, experiment), "see its advice, then check again")
        yield from disk_checks(site_file, site)
        return (yield from _round_checks(site_file, site))
    return None


def _spent(site_file: SiteFile, experiment: Experiment) -> str:
    """Returns what this site has spent of its privacy before this run."""
    ledger, privacy = PrivacyLedger(site_file.ledger_path, to_write=False), experiment.privacy
    if privacy is None:
        raise ValueError("the experiment has no privacy")
    refuse_spent(ledger, Membership.read(site_file.path))
    spent, runs = epsilon_of(ledger.spent(), privacy.delta), len({of["run"] for of, _ in ledger.plans})
    so_far = f"{spent:.3g} of it spent by {runs} run{'s' * (runs != 1)}" if runs else "nothing of it spent"
    where = f"{site_file.ledger_path.name} counts what all runs on these rows spend; keep it with the secret"
    return f"epsilon at most {privacy.epsilon:g} at delta {privacy.delta:g}, {so_far} so far; {where}"


def _round_checks(site_file: SiteFile, own: Site) -> Generator[Check, None, RoundCost | None]:
    """Yields what a round costs this machine, and returns it. Trains some rounds alone, unless a training function does
    that, and keeps nothing of them. Yields nothing if a file cannot be used."""
    try:
        membership = Membership.read(site_file.path)
    except BadInput:
        return None
    if membership.experiment.trainer is not None:
        return RoundCost(0.0, 0)
    costs: list[RoundCost] = []

    def measured() -> str:
        costs.append(cost_of_a_round(membership, alike_everywhere(membership, own)))
        seconds, size = costs[0]
        return f"takes this machine {milliseconds(seconds)}, and sends {size:,} bytes to each neighbour"

    yield from _tried("a round", measured, "this site's rounds would end like this too; see its data and the model")
    return next(iter(costs), None)


def _expected(site_file: SiteFile, experiment: Experiment, cost: RoundCost, lines: Mapping[str, Line]) -> str:
    """Returns how long the run will take, as far as this site can know."""
    compares = site_file.compare_with_local and experiment.privacy is None
    alone = (experiment.objective.needs_local_models + compares) * experiment.rounds * cost.seconds
    more = f"; and this site trains alone for at most about {duration(alone)} before and after" if alone > 1 else ""
    if experiment.trainer is not None:
        more = "; with what the training function takes in each"
    if not lines:
        pace = Pace(cost.seconds + NODE_S, 0.0)
        return f"{pace.in_words(experiment.rounds)}{more}; no line to a neighbour was measured, so without any waiting"
    slowest = max(lines, key=lambda name: lines[name].message_s)
    pace = Pace(cost.seconds + NODE_S, lines[slowest].message_s)
    said = (
        f"{pace.in_words(experiment.rounds)}{more}. Of {milliseconds(pace.seconds)} per round, "
        f"{milliseconds(pace.waiting_s)} are waiting for {slowest}; slower lines elsewhere in the mesh slow all"
    )
    if pace.mostly_waits:
        said += f"; `fairmesh advise` with --rtt {1000 * lines[slowest].rtt_s:.0f} says whether local steps help"
    return said


def disk_checks(site_file: SiteFile, own: Site) -> Iterator[Check]:
    """Yields whether the run fits on the disk, with what this node has written already. Yields nothing if a file cannot
    be used; the checks of the files say so."""
    try:
        needed = disk_of(Membership.read(site_file.path), own)
    except BadInput:
        return
    folder = next(parent for parent in (site_file.state, *site_file.state.absolute().parents) if parent.exists())
    used = sum(path.stat().st_size for path in site_file.state.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + used
    work = f", and what the training function makes of a round {_gigabytes(needed.work)}, if it keeps as much as Adam"
    said = (
        f"the run takes at most {_gigabytes(needed.at_most)} in {site_file.state} and leaves "
        f"{_gigabytes(needed.at_the_end)} at most; a checkpoint has at most {_gigabytes(needed.checkpoint)}, the "
        f"model {_gigabytes(needed.model)}{work if needed.work else ''}"
    )
    if free >= needed.at_most:
        yield Check("disk", True, said)
    else:
        advice = f"free some space, or set state in {site_file.path.name} to a folder on another disk"
        yield Check("disk", False, f"{said}; only {_gigabytes(free)} are there", advice)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


@dataclass(frozen=True)
class _Neighbourhood:
    """What a check tells its neighbours, and what it measures of the lines to them."""

    greeting: Mapping[str, Any] = field(default_factory=dict)  # empty if this site has none yet
    cost: RoundCost | None = None
    lines: dict[str, Line] = field(default_factory=dict)


def _dials_us(site_file: SiteFile, mesh: Mesh, other: str, met: _Neighbourhood) -> str:
    """Checks whether a neighbour that dials this site is connected to its node, if that is running. Nothing can be
    measured from here: this site cannot open a connection of its own to it."""
    status: dict[str, Any] = {}
    with suppress(BadInput):  # the node was never started
        status = live_status(site_file.state)
    if not status.get("running"):
        return "dials this site; not checked, since this site's node is not running"
    if status.get("edges", {}).get(other, {}).get("connected"):
        return f"dials this site, and is connected to its node; `fairmesh mesh check` at {other} measures the line"
    raise _Wrong(
        "dials this site, but is not connected to its node",
        f"is {other}'s node running, and can it reach this site's address? `fairmesh mesh check` there tries it",
    )


def _asked(site_file: SiteFile, mesh: Mesh, other: str, met: _Neighbourhood) -> str:
    """Connects to a neighbour as the node does, and compares both greetings, if this site has one; then measures the
    line. The greeting is marked as a check, which changes nothing at the neighbour."""
    address = mesh.member(other).address
    try:
        certificate, said = asyncio.run(_exchange(address, other, _context(site_file), met))
    except _Wrong as wrong:
        raise _Wrong(f"{address}: {wrong}", wrong.advice) from None
    except CannotConnect as error:
        there = _who_answers(site_file, address) if error.in_handshake else ""
        if there:
            found = f"{there} answers there, not {other}"
            advice = f"let both compare their ports with mesh.toml: run `fairmesh mesh check` at {there} and at {other}"
        elif error.in_handshake:
            found = f"no handshake: {error}"
            advice = f"compare certificate and authority with {other}: both must be valid, of this mesh and these names"
        else:
            found = str(error)
            advice = f"is its node running, and may this machine dial {address}? Run `fairmesh mesh check` at {other}"
        raise _Wrong(f"{address}: {found}", advice) from None
    except (TimeoutError, ConnectionLost, Refused) as error:
        reason = str(error) or f"no greeting within {_WAIT_S:.0f} s"
        raise _Wrong(f"{address}: {reason}", f"see {other}'s log") from None
    return f"{address} answers as {other}{said}; its certificate is {_valid_for(certificate, 'remind it')}"


def _context(site_file: SiteFile) -> ssl.SSLContext:
    try:
        files = (site_file.key, site_file.certificate, site_file.authority)
        return Credentials(*map(read_bytes, files)).for_dialling()
    except BadInput as error:
        raise _Wrong(f"not tried: {error}", "fix the site's files first") from None


def _who_answers(site_file: SiteFile, address: str) -> str:
    """Returns which site of this mesh answers at an address, "" if none does."""
    context = _context(site_file)
    context.check_hostname = False  # the authority is checked; the name is what is asked

    async def names() -> list[str]:
        async with dialled(address, site_file.name, context, 0) as connection:
            return connection.peer_names

    try:
        return ", ".join(asyncio.run(names()))
    except CannotConnect:
        return ""


async def _exchange(address: str, other: str, context: ssl.SSLContext, met: _Neighbourhood) -> tuple[bytes, str]:
    """Exchanges greetings with a neighbour, if this site has one. Returns its certificate, and what to say about the
    comparison of both greetings and about the line."""
    mine = met.greeting
    async with dialled(address, other, context, 0) as connection, asyncio.timeout(_WAIT_S + PROBING_S):
        async with asyncio.timeout(_WAIT_S):
            if mine:
                await connection.send(hello({**mine, "check": True, "holds": [0, 0], "clock": time.time()}))
            first = await connection.receive()
        at, certificate = time.time(), connection.peer_certificate()
        if first is None:
            raise Refused("it closed the connection without a greeting")
        _raise_refusal(first)
        if not mine:
            return certificate, ""
        try:
            theirs = read_hello(first)
            refuse_unlike(mine, other, theirs)
            line = await measured_line(connection, met.cost.message_bytes if met.cost else 0)
        except Refused as error:
            raise _Wrong(error, f"agree with {other} on which of the two is right") from None
        if not math.isnan(line.rtt_s):
            met.lines[other] = line
        return certificate, f"{_compared(mine, other, theirs, at)}; {line.in_words()}"


def _raise_refusal(frame: bytes | None) -> None:
    if frame and frame[0] in REFUSALS:
        raise Refused(f"it refuses: {read_frame(frame).reason()}")


def _compared(mine: Mapping[str, Any], other: str, theirs: Mapping[str, Any], at: float) -> str:
    """Compares clocks and generations in both greetings; returns what to say if they agree."""
    apart = seconds_ahead(theirs, at)
    if abs(apart) > APART_S:
        raise _Wrong(f"its clock is {apart_in_words(apart)}", "set the one that is wrong")
    here, there = mine["generation"], theirs.get("generation")
    if there != here:
        raise _Wrong(
            f"generation {there} of the mesh there, {here} here: a site has left",
            f"wait until this site's node has caught up, or get mesh.toml from {other}",
        )
    return f"; the same experiment and versions; clocks {abs(apart):.1f} s apart"
