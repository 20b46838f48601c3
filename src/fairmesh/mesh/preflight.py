"""Checks whether a site is ready to take part: its files, certificate, port, data and neighbours."""

import errno
import secrets
import shutil
import socket
import ssl
from collections.abc import Callable, Generator, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from fairmesh.data.site import Site
from fairmesh.errors import BadInput, in_a_line
from fairmesh.experiment import Experiment
from fairmesh.mesh.agreement import greeting, own_problem, own_site, refuse_undeployable, refuse_unlike
from fairmesh.mesh.approval import import_allowed, refuse_unapproved
from fairmesh.mesh.certificates import SOON_DAYS, check_certificate, secret_of, valid_until
from fairmesh.mesh.manifest import Handout, handed_out
from fairmesh.mesh.node.disk import disk_of
from fairmesh.mesh.node.membership import Membership, facts, frozen_facts, refuse_lost_secret
from fairmesh.mesh.node.store import FINISHED, is_finished
from fairmesh.mesh.node.watching import live_status
from fairmesh.mesh.probing import Check, neighbour_checks
from fairmesh.mesh.revealing import ALLOW, LEAST_ROWS, refuse_revealing, revealing
from fairmesh.mesh.roster import Mesh, SiteFile, host_and_port
from fairmesh.storage.files import open_to_others, read_bytes

T = TypeVar("T")

_WAIT_S = 5.0
_HERE_S = 2.0  # for a connection to this machine itself


def checks(path: Path) -> Iterator[Check]:
    """Yields every check of a site as soon as it is done. Checks that need an unreadable file are left out."""
    site_file = yield from _tried("site file", lambda: SiteFile.read(path), "fix the file, or make a new site folder")
    if site_file is None:
        return
    mesh = yield from _tried("mesh file", lambda: _mesh(site_file), "ask the mesh's founder for mesh.toml")
    handout = experiment = None
    if mesh:
        handout = yield from _tried(
            "manifest",
            lambda: handed_out(site_file, mesh),
            "get the file that is named from the mesh's founder; nothing was imported",
            "signed by the mesh's authority, and every file is as it was signed",
        )
    if handout:
        reasons = "; ".join(revealing(handout.table))
        sent = f"{ALLOW}: {reasons}" if reasons else "no training rows could be read from such messages so far"
        yield from _tried("messages", lambda: refuse_revealing(site_file, handout), good=sent)
        approved = yield from _tried(
            "approval",
            lambda: refuse_unapproved(site_file, handout),
            "read what is shown, and approve it; nothing was imported",
            "this site has approved the manifest",
        )
        if approved:
            experiment = yield from _tried(
                "experiment",
                lambda: _deployable(site_file, handout),
                "do what is named; or agree on another experiment and found the mesh again",
                "can be imported and deployed",
            )
    yield from certificate_checks(site_file)
    if not secret_of(site_file.key).exists():
        yield from _tried("secret of the draws", lambda: refuse_lost_secret(site_file), good="is made at the start")
    yield from privacy_checks(site_file)
    if handout and (site_file.state / FINISHED).exists():
        done = "the run has finished, and its result is there"
        yield from _tried("state", lambda: is_finished(site_file.state, handout.manifest), good=done)
    if mesh:
        yield listen_check(site_file, mesh)
    if mesh and experiment:
        data, own = data_check(site_file, experiment, mesh)
        yield data
        if own is not None:
            yield from disk_checks(site_file, own)
    if mesh:
        mine = greeting(site_file.name, experiment, mesh, handout.manifest.files) if handout and experiment else None
        yield from neighbour_checks(site_file, mesh, mine, partial(refuse_unlike, mine or {}), _connected(site_file))


def privacy_checks(site_file: SiteFile) -> Iterator[Check]:
    """Yields whether others on this machine can read the secret of the draws, or the state."""
    for what, path, mode in (
        ("secret of the draws", secret_of(site_file.key), 600),
        ("state folder", site_file.state, 700),
    ):
        if path.exists():
            wide = open_to_others(path)
            found = f"{path} can be read by others on this machine" if wide else "is its owner's alone"
            yield Check(what, not wide, found, f"chmod {mode} {path}" if wide else "")


def _connected(site_file: SiteFile) -> dict[str, bool] | None:
    """Returns which neighbours are connected to this site's node, or None if the node is not running."""
    try:
        status = live_status(site_file.state)
    except BadInput:
        return None
    edges = status.get("edges", {}) if status["running"] else None
    return None if edges is None else {name: edge["connected"] for name, edge in edges.items()}


def _tried(
    what: str, read: Callable[[], T], advice: str = "do what is named", good: str = "can be read"
) -> Generator[Check, None, T | None]:
    """Yields the check that something can be read; returns what was read, or None."""
    try:
        found = read()
    except Exception as error:  # an experiment file imports a user's modules
        yield Check(what, False, _said(error), advice)
        return None
    yield Check(what, True, good)
    return found


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, BadInput) else in_a_line(error)


def _mesh(site_file: SiteFile) -> Mesh:
    mesh = Mesh.read(site_file.mesh)
    mesh.member(site_file.name)
    if site_file.name in mesh.removed:
        raise BadInput(f"site {site_file.name} has left the mesh {mesh.name}")
    return mesh


def _deployable(site_file: SiteFile, handout: Handout) -> Experiment:
    experiment = import_allowed(site_file, handout)
    refuse_undeployable(experiment)
    return experiment


def certificate_checks(site_file: SiteFile) -> Iterator[Check]:
    """Checks that certificate and key are this site's, signed by this mesh's authority, valid now and private."""
    try:
        held, authority = (read_bytes(path) for path in (site_file.certificate, site_file.authority))
    except BadInput as error:
        request = site_file.certificate.with_suffix(".csr").name
        yield Check("certificate", False, str(error), f"have {request} signed: fairmesh mesh sign {request}")
        return
    now = datetime.now(UTC)
    wrong = check_certificate(held, authority, site_file.name, now, site_file.key)
    if wrong:
        yield Check("certificate", False, "; ".join(wrong), "fix what is named; `fairmesh mesh sign` signs again")
        return
    days = (valid_until(held) - now).days
    ends = f"for {site_file.name}, valid for {days} more days"
    yield Check("certificate", True, f"{ends}; have it signed again soon" if days < SOON_DAYS else ends)


def listen_check(site_file: SiteFile, mesh: Mesh) -> Check:
    """Checks that this site can listen where others dial it: the port is free, or this site's own node uses it."""
    what, address = "listening", mesh.member(site_file.name).address
    dialled_by = [name for name in mesh.neighbours(site_file.name) if mesh.dials(name, site_file.name)]
    if site_file.listen is None:
        if not dialled_by:
            return Check(what, True, "not needed: this site dials all its neighbours")
        port = host_and_port(address or "", what)[1]
        return Check(what, False, f"{', '.join(dialled_by)} dial {address}", f"add listen = '0.0.0.0:{port}'")
    host, port = host_and_port(site_file.listen, what)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family[0], socket.SOCK_STREAM) as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(family[4])
            opened.listen(1)
            if dialled_by and address and not _leads_to(opened, port, address):
                return _another_port(site_file, port, address, dialled_by)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and _is_own_node(site_file, host, port):
            reached = host_and_port(address or site_file.listen, what)
            if dialled_by and reached[1] != port and not _is_own_node(site_file, *reached):
                return _another_port(site_file, port, address or "", dialled_by)
            return Check(what, True, f"this site's node listens on {site_file.listen}")
        taken = f"cannot listen on {site_file.listen}: {error.strerror or error}"
        return Check(what, False, taken, "free the port, or set another one as listen and as the mesh's address")
    return Check(what, True, f"{site_file.listen} is free; others dial {address or 'nothing'}")


def _another_port(site_file: SiteFile, port: int, address: str, dialled_by: list[str]) -> Check:
    dialled = host_and_port(address, "address")[1]
    found = (
        f"this site listens on port {port}, but {', '.join(dialled_by)} dial {address}, the address in "
        f"{site_file.mesh.name}, and that does not lead here"
    )
    advice = (
        f"set the port of listen in {site_file.path.name} to {dialled}; or, if a firewall forwards {dialled} to "
        f"{port}, let {dialled_by[0]} try it with `fairmesh mesh check`"
    )
    return Check("listening", False, found, advice)


def _leads_to(listening: socket.socket, port: int, address: str) -> bool:
    """Returns whether a connection to the address arrives at a socket that listens on `port`. If the ports are equal,
    this is taken for granted: many networks do not let a machine dial its own public address."""
    host, dialled = host_and_port(address, "address")
    if dialled == port:
        return True
    sign = secrets.token_bytes(16)
    listening.settimeout(_HERE_S)
    try:
        with socket.create_connection((host, dialled), timeout=_HERE_S) as dialling:
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


def data_check(site_file: SiteFile, experiment: Experiment, mesh: Mesh) -> tuple[Check, Site | None]:
    """Checks that this site's data can be read, is as the contract says, fits the model and the loss, and is what the
    run began with. Returns the data too, if so."""
    try:
        problem = own_problem(own_site(site_file, experiment, mesh), experiment)
        frozen_facts(site_file.state, site_file.name, facts(problem.sites[0]), problem.digests_here()[0])
    except Exception as error:  # a user's entry point may raise anything
        return Check("data", False, _said(error), f"see data in {site_file.path.name}"), None
    site = problem.sites[0]
    judged = f", {len(site.test):,} test samples" if site.test is not None else ", no test samples"
    labels = site.train.known_targets()
    one_class = isinstance(labels, Tensor) and not labels.is_floating_point() and len(labels.unique()) == 1
    judged += ", all of one class: is the label column right?" if one_class else ""
    judged += ", so few that messages tell much about each" if len(site.train) < LEAST_ROWS else ""
    checked = " and the contract" if experiment.contract else "; there is no contract to check them by"
    return Check("data", True, f"{len(site.train):,} training samples{judged}; they fit the model{checked}"), site


def disk_checks(site_file: SiteFile, own: Site) -> Iterator[Check]:
    """Yields whether the run fits on the disk, with what this node has written already. Yields nothing if a file cannot
    be used; the checks of the files say so."""
    try:
        needed = disk_of(Membership.read(site_file.path), own)
    except BadInput:
        return
    folder = next(one for one in (site_file.state, *site_file.state.absolute().parents) if one.exists())
    used = sum(path.stat().st_size for path in site_file.state.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + used
    said = (
        f"the run takes at most {_gigabytes(needed.at_most)} in {site_file.state} and leaves "
        f"{_gigabytes(needed.at_the_end)} at most; a checkpoint has at most {_gigabytes(needed.checkpoint)}, the "
        f"model {_gigabytes(needed.model)}"
    )
    if needed.work:
        said += (
            f", and what the training function makes of a round {_gigabytes(needed.work)}, if it keeps as much as Adam"
        )
    if free < needed.at_most:
        advice = f"free some space, or set state in {site_file.path.name} to a folder on another disk"
        yield Check("disk", False, f"{said}; only {_gigabytes(free)} are there", advice)
    else:
        yield Check("disk", True, said)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
