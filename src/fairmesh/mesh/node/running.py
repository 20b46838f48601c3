"""The life of a node: it connects to the others, does its rounds, computes the average of all sites, and ends."""

import platform
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

import fairmesh
from fairmesh.mesh.enrol.approval import approved_at
from fairmesh.mesh.enrol.certificates import fingerprint
from fairmesh.mesh.enrol.roster import host_and_port
from fairmesh.mesh.node import data_agreement, deciding, divergence, ending, versus_local
from fairmesh.mesh.node.machine import pinned
from fairmesh.mesh.node.measurements import Schedule
from fairmesh.mesh.node.membership import Membership, own_data
from fairmesh.mesh.node.node import Node
from fairmesh.mesh.node.oversight import CHOOSING, COMPARING, Decide, Notices, Oversight
from fairmesh.mesh.node.rounds import Rounds, branch_of, restoring_step
from fairmesh.mesh.node.state_lock import LEFT_S, locked
from fairmesh.mesh.node.store import (
    LOCAL,
    PROGRESS,
    RESULT,
    Store,
    forget_run,
    is_finished,
    mark_finished,
    put_in_place,
)
from fairmesh.mesh.node.watching import Log, Monitor
from fairmesh.mesh.wire.greeting import COMPATIBILITY
from fairmesh.mesh.wire.links import Links
from fairmesh.mesh.wire.mailroom import Mailroom, Observe
from fairmesh.mesh.wire.transport import FIRST_ROUND
from fairmesh.problems.prepared import Prepared
from fairmesh.storage.files import private_files
from fairmesh.storage.run_folder import Record, read_summary
from fairmesh.trackers import TrackedReplica, Tracker

_FAREWELL_S = 60.0  # wait for the neighbours' last messages, once nobody needs anything from this node


def run_node(
    path: str | Path,
    *,
    patience_s: float | None = None,
    monitor_port: int | None = None,
    observe: Observe = lambda point, step: None,
    stream: Any = None,
    trackers: Sequence[Tracker] = (),
    lock: ExitStack | None = None,
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

    Returns:
        The folder of the result.

    Raises:
        Interrupted: After `patience_s`, on Ctrl-C and on SIGTERM. All that a restart needs is on disk.
    """
    membership = Membership.read(path)
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
        monitor = None if monitor_port is None else Monitor(monitor_port)
        with closing(log), pinned(membership.experiment.options):
            node = Node(membership, own_data(membership), log, patience_s, monitor, observe)
            data_agreement.announce(node)
            with _tracked(trackers, result, log), _stop_requests(node.oversight), node.oversight.watching():
                _live(node, trackers)
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


def _live(node: Node, trackers: Sequence[Tracker]) -> None:
    """Continues the run to its end, over all generations of the mesh: decides with the others, trains, and ends."""
    ledger = node.ledger
    if not ledger.begun and not ledger.awaits_restoring:
        ledger.begin(0)
    due = ledger.pending
    if due and ledger.begun:
        node.membership = node.in_generation(ledger.begun[-1].generation)
    due = due or deciding.votes_are_in(node)
    while True:
        try:
            if not ledger.begun and not due:
                deciding.await_restoring(node)
            if due:
                deciding.decide(node)
                due = False
            if ledger.begun:
                _generation(node, trackers)
                return
        except Decide:
            due = True
        except divergence.SiteDiverged as error:
            deciding.after_divergence(node, error)
            due = True
        except Exception as error:
            deciding.after_failure(node, error)
            due = True


def _generation(node: Node, trackers: Sequence[Tracker]) -> None:
    """Continues the run to its end, within one generation of the mesh."""
    membership, oversight = node.membership, node.oversight
    diverged = divergence.told(node.bulletin, membership).get(membership.name)
    node.ledger.vote()
    if diverged and node.ledger.without_vote() is None:  # else it must compute again how far it had come
        raise diverged
    store = Store(node.folder, membership.mesh.generation, node.log)
    done, node.rounds = store.newest or 0, None
    first = done + FIRST_ROUND if done else 0
    # Neighbours that have lost their state get one from this generation's start.
    lost = node.ledger.restored() if done and done == node.ledger.begun[-1].start else []
    owed = [neighbour.position for neighbour in membership.neighbours if neighbour.name in lost]
    with node.opened(first) as mailroom:
        for position in owed:
            mailroom.owe(position, restoring_step(done))
        node.machines.begin(membership.mesh.generation, first)
        if mailroom.other_machine:
            said = "this machine differs from before; messages that were sent stay as they are"
            node.log("warning", said, difference=mailroom.other_machine)
        problem, start = data_agreement.settle(node, mailroom)
        data_agreement.show(node, problem)
        with node.linked(mailroom) as links:
            if not done:
                oversight.activity = "agreeing on the model to start from"
                start.agree(mailroom, branch_of(membership), membership.around, membership.present)
                problem = node.problem(membership)
            _enter(node, problem, store, trackers)
            node.rounds = Rounds(node, problem, mailroom, store)
            if owed:
                node.rounds.share(done, owed, start)
            node.rounds.train(done)
            _end(node, node.rounds, links)


def _enter(node: Node, problem: Prepared, store: Store, trackers: Sequence[Tracker]) -> None:
    """Begins or continues what all sites measure in this generation."""
    membership, experiment = node.membership, node.membership.experiment
    options = experiment.options
    schedule = Schedule(
        experiment.rounds,
        options.measure_every,
        options.best_by,
        experiment.seeds[0],
        options.cvar_level,
        node.ledger.measured_since(),
    )
    for tracker in trackers:
        settings, run = ending.settings_of(membership) | {"site": membership.name}, membership.mesh.name
        tracker.begin(membership.names, node.folder)
        tracker.add_replica(0, TrackedReplica(f"{run}, seen from {membership.name}", run, settings, "0"))

    def after_record(records: Sequence[Record]) -> None:
        ending.write_progress(membership, problem, records, node.folder / PROGRESS)
        for tracker in trackers:
            tracker.add_records(records)

    start, landmarks = node.ledger.begun[-1].start, lambda: tuple(store.landmarks)
    node.measurements.after_record = after_record
    node.measurements.enter(membership.mesh.generation, start, schedule, problem, membership.names, landmarks)


def _end(node: Node, rounds: Rounds, links: Links) -> None:
    """Sums up, confirms the result with all sites, and stays until nobody needs this node."""
    membership, oversight, last = node.membership, node.oversight, node.membership.experiment.rounds
    result = node.folder / RESULT
    if not result.exists():
        node.wait("waiting for the metrics of all", node.measurements.open_questions)
        oversight.activity = "summing up"
        unconfirmed = node.folder / f"unconfirmed-{membership.mesh.generation}"
        ending.write_result(rounds, unconfirmed)
        _confirm(node, unconfirmed, ending.sums_of(rounds).source)
        _compare_with_local(rounds, unconfirmed)
        node.observe("result confirmed", last)
        ending.write_site_model(rounds, unconfirmed)
        put_in_place(unconfirmed, result)
        names, what = membership.names, "the look at undefined metrics"
        for metric, sites in node.aside.tried(what, lambda: ending.undefined_metrics(result, names), {}).items():
            node.log("warning", "a metric has no value at some sites", metric=metric, sites=", ".join(sites))
    ending.compare_with_neighbours(rounds, result)
    if membership.experiment.personalization is not None:
        oversight.activity = CHOOSING
    ending.write_personal(rounds, result)
    node.observe("result written", last)
    oversight.activity = "waiting until all have the result"
    ending.wait_for_all_to_end(rounds)
    oversight.activity = "finished"
    node.log("info", "finished", rounds=last, folder=RESULT)
    _part(node, links, rounds.mailroom)
    node.ledger.forget_earlier()


def _confirm(node: Node, unconfirmed: Path, source: str | None) -> None:
    """Waits until all sites have announced the result that this site has. A difference is named; it ends when the
    other site announces another result, or is voted out."""
    expected = ending.expected_results(unconfirmed, node.membership)
    node.bulletin.announce("result", expected[node.membership.name], node.membership.mesh.generation)
    sums = {"sums": "computed by this site" if source is None else f"from {source}", "kept": unconfirmed.name}

    def open_questions() -> list[str]:
        apart = ending.results_apart(expected, node.bulletin)
        for site, reason in apart.items():
            node.oversight.activity = what = "results differ; the log says which"
            node.aside.once((what, site, unconfirmed), "error", "results differ", site=site, reason=reason, **sums)
        return [*node.silent("result"), *apart]

    node.wait("waiting for the results of all", open_questions)


def _compare_with_local(rounds: Rounds, unconfirmed: Path) -> None:
    """Tells all sites how the common model compares with the one that this site trains alone, waits until all have
    told theirs, and adds the verdicts to the result."""
    node, generation = rounds.node, rounds.membership.mesh.generation
    node.oversight.activity = COMPARING
    body = versus_local.compared(rounds, unconfirmed / "model.safetensors", node.folder / LOCAL)
    if body["why_not"]:
        node.log("warning", "not compared with this site's model alone", reason=body["why_not"])
    node.bulletin.announce(versus_local.KIND, body, generation)
    node.wait("waiting for the comparisons of all", lambda: node.silent(versus_local.KIND))
    versus_local.add_evidence(rounds, unconfirmed)


def _part(node: Node, links: Links, mailroom: Mailroom) -> None:
    """Stays until no neighbour needs anything. Then waits for their last messages, but not forever, since these may
    be lost."""
    notices, free_since = Notices(), None
    while not links.all_finished.wait(0.05):
        node.oversight.raise_if_deciding()
        waiting = mailroom.unacknowledged_by()
        if node.oversight.stopping and waiting:
            raise node.oversight.stopping
        if node.oversight.stopping:
            return
        links.finish(waiting)
        free_since = None if waiting else (free_since or time.monotonic())
        if free_since is not None and time.monotonic() - free_since > _FAREWELL_S:
            return
        if waiting:
            names = ", ".join(node.membership.mesh.names[position] for position in waiting)
            node.oversight.stop_if_waited_too_long(notices.seconds, names)
            if notices.due():
                node.log("warning", "finished; others still need messages of this node", sites=names)
    time.sleep(0.3)  # for last messages on their way


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
