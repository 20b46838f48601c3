"""Runs the node of a site: from its files, through the states of its life, to the end of its run."""

import math
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

import fairmesh
from fairmesh.errors import BadInput
from fairmesh.mesh.enrol.approval import approved_at
from fairmesh.mesh.enrol.certificates import fingerprint
from fairmesh.mesh.enrol.roster import host_and_port
from fairmesh.mesh.node import data_agreement, deciding, life
from fairmesh.mesh.node.machine import pinned
from fairmesh.mesh.node.membership import Membership, own_data
from fairmesh.mesh.node.node import CarrierOf, Node, over_tls
from fairmesh.mesh.node.oversight import Oversight
from fairmesh.mesh.node.private_site import PrivateSite
from fairmesh.mesh.node.state_lock import LEFT_S, locked
from fairmesh.mesh.node.store import RESULT, forget_run, is_finished, mark_finished
from fairmesh.mesh.node.watching import Log, Monitor
from fairmesh.mesh.wire.greeting import COMPATIBILITY
from fairmesh.mesh.wire.mailroom import Observe
from fairmesh.storage.files import private_files
from fairmesh.storage.run_folder import read_summary
from fairmesh.trackers import Tracker

_FIXED = (
    "only a simulation can compare them with fixed ones; to deploy fixed ones, the experiment says [algorithm] name = "
    '"tracked-ad-gda", weighting = "prior-weights", and [personalization] name = "choice"'
)


def run_node(
    path: str | Path,
    *,
    patience_s: float = math.inf,
    monitor_port: int | None = None,
    observe: Observe = lambda point, step: None,
    stream: Any = None,
    trackers: Sequence[Tracker] = (),
    lock: ExitStack | None = None,
    carrier_of: CarrierOf = over_tls,
    stoppable: Callable[[Callable[[str], None]], None] = lambda stop: None,
) -> Path:
    """Runs the node of a site file to the end of its run.

    Args:
        path: The site's file, site.toml.
        patience_s: How many seconds to wait for a neighbour at most. Default: no limit.
        monitor_port: A port of 127.0.0.1 for Prometheus metrics. Default: none.
        observe: Called at each point where tests let a node crash.
        stream: Where to log. Default: stderr.
        trackers: What the measurements of all sites are also written to. Default: none.
        lock: The lock of the state folder, if the caller has it already. Default: None, it is locked here.
        carrier_of: What carries the messages of this site. Default: connections of its own, with mutual TLS.
        stoppable: Called with a function that stops the node, for a reason, from any thread. Default: nobody is told;
            Ctrl-C and SIGTERM stop it.

    Returns:
        The folder of the result.

    Raises:
        Interrupted: After `patience_s`, on Ctrl-C and on SIGTERM. All that a restart needs is on disk.
    """
    membership = Membership.read(path)
    if membership.site.engine and carrier_of is over_tls:
        raise BadInput(
            f"{path} is of a run inside NVFlare, which starts its nodes; submit the run's job again, at the admin's: "
            "fairmesh nvflare keep JOB --kit ADMIN"
        )
    state = membership.site.state
    with private_files(), lock or locked(state, LEFT_S):
        membership = membership.with_secret()
        result = state / RESULT
        if is_finished(state, membership.manifest):
            forget_run(state)  # a crash may have cut this short
            return result
        log = Log(state, stream)
        _log_start(membership, log)
        if membership.experiment.options.compare_weights:
            log("warning", "options that only simulations measure are ignored", options="compare_weights")
        if membership.experiment.options.choose_weights:
            log("info", "the common model has robust weights", reason=_FIXED)
        monitor = None if monitor_port is None else Monitor(monitor_port)
        with closing(log), pinned(membership.experiment.options), ExitStack() as opened:
            private = None
            if membership.experiment.privacy is not None:
                private = opened.enter_context(closing(PrivateSite(membership, log)))
            node = Node(
                membership, own_data(membership), log, patience_s, monitor, observe, trackers, private, carrier_of
            )
            stoppable(node.oversight.request_stop)
            data_agreement.announce(node)
            with _tracked(trackers, result, log), _stop_requests(node.oversight), node.oversight.watching():
                _live(node)
        mark_finished(state, membership.manifest)
        forget_run(state)
        return result


def _log_start(membership: Membership, log: Log) -> None:
    """Logs what runs here, and that this site has approved it."""
    mesh, manifest = membership.mesh, membership.manifest
    log(
        "info",
        "started",
        site=membership.name,
        mesh=mesh.name,
        generation=mesh.generation,
        fairmesh=fairmesh.__version__,
        compatibility=COMPATIBILITY,
        torch=torch.__version__,
        python=platform.python_version(),
        threads=torch.get_num_threads(),
        device=membership.experiment.options.device,
        manifest=manifest.digest(),
        files=", ".join(f"{name} {digest}" for name, digest in manifest.files.items()),
        certificate=fingerprint(membership.credentials.certificate),
    )
    when = approved_at(membership.site)
    moment = "" if when is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when))
    log("info", "approved", manifest=manifest.digest(), since=moment, signed=manifest.date())
    listen, address = membership.site.listen, mesh.member(membership.name).address
    if listen and address and host_and_port(listen, "listen")[1] != host_and_port(address, "address")[1]:
        what = "others dial another port than the one that this node listens on; a firewall must forward it"
        log("warning", what, listen=listen, dialled=address)


@contextmanager
def _tracked(trackers: Sequence[Tracker], result: Path, log: Log) -> Iterator[None]:
    """Ends the trackers: with the run's result, or because it stopped."""
    for tracker in trackers:
        tracker.report = lambda text: log("warning", text)
    try:
        yield
    except BaseException as error:
        for tracker in trackers:
            tracker.finish(error)
        raise
    for tracker in trackers:
        tracker.end_with(read_summary(result))


def start(node: Node) -> str:
    """Takes up a run where it was: in the middle of a decision, without a state, or in a generation."""
    ledger = node.ledger
    if not ledger.begun and not ledger.awaits_restoring:
        ledger.begin(0)
    if ledger.pending and ledger.begun:
        node.membership = node.in_generation(ledger.begun[-1].generation)
    if ledger.pending or deciding.votes_are_in(node):
        return life.DECIDING
    return life.ON_DATA if ledger.begun else life.LOST


def _live(node: Node) -> None:
    """Goes from state to state until the node has ended."""
    following = life.STARTING
    try:
        while following:
            node.life.enter(following)
            try:
                following = node.life.act(node)
            except Exception as error:
                node.open.close()
                deciding.after_failure(node, error)
                following = life.DECIDING
    finally:
        node.open.close()


@contextmanager
def _stop_requests(oversight: Oversight) -> Iterator[None]:
    """Stops the node on Ctrl-C and on SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: oversight.request_stop()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
