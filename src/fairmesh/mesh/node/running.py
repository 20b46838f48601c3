"""The life of a node: it connects to the others, does its rounds, computes the average of all sites, and ends."""

import functools
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

import fairmesh
from fairmesh.mesh.agreement import COMPATIBILITY
from fairmesh.mesh.approval import approved_at
from fairmesh.mesh.certificates import fingerprint
from fairmesh.mesh.node import divergence, versus_local
from fairmesh.mesh.node.data_agreement import DataAgreement
from fairmesh.mesh.node.deciding import Deciding
from fairmesh.mesh.node.ending import (
    Announced,
    compare_with_neighbours,
    settings_of,
    sums_of,
    undefined_metrics,
    wait_for_all_to_end,
    write_personal,
    write_progress,
    write_result,
    write_site_model,
)
from fairmesh.mesh.node.finished import is_finished, mark_finished
from fairmesh.mesh.node.machine import pinned
from fairmesh.mesh.node.measurements import Schedule
from fairmesh.mesh.node.membership import (
    Membership,
    own_data,
)
from fairmesh.mesh.node.node import Node
from fairmesh.mesh.node.oversight import COMPARING, Decide, Notices
from fairmesh.mesh.node.rounds import Rounds, branch_of, restoring_step
from fairmesh.mesh.node.state_lock import LEFT_S, StateLock, locked
from fairmesh.mesh.node.store import (
    LOCAL,
    PERSONAL,
    PROGRESS,
    RESULT,
    Store,
    forget_run,
    put_in_place,
)
from fairmesh.mesh.node.watching import Log, Monitor
from fairmesh.mesh.roster import host_and_port
from fairmesh.mesh.wire.links import Links
from fairmesh.mesh.wire.mailroom import Mailroom, Observe
from fairmesh.mesh.wire.transport import FIRST_ROUND
from fairmesh.problems.problem import Problem
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
    public_draws: bool = False,
    trackers: Sequence[Tracker] = (),
    lock: StateLock | None = None,
) -> Path:
    """Runs the node of a site file to the end of its run.

    Args:
        path: The site's file, site.toml.
        patience_s: How many seconds to wait for a neighbour at most. Default: no limit.
        monitor_port: A port of 127.0.0.1 for Prometheus metrics. Default: none.
        observe: Called at each point where tests let a node crash.
        stream: Where to log. Default: stderr.
        public_draws: Whether batches and other random numbers are drawn as a simulation draws them, from the
            experiment's seed. For tests only: a neighbour that knows them can solve for the training rows. Default:
            False, from a secret of the site.
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
        membership = membership if public_draws else membership.with_secret()
        result = state / RESULT
        if is_finished(state, membership.manifest):
            forget_run(state)  # a crash may have cut this short
            return result
        log = Log(state, stream)
        _log_start(membership, log)
        if public_draws:
            log("warning", "random draws are public, so neighbours can solve for the training rows; for tests only")
        if membership.experiment.options.compare_weights:
            log("warning", "options that only simulations measure are ignored", options="compare_weights")
        monitor = None if monitor_port is None else Monitor(monitor_port)
        with closing(log), pinned(membership.experiment.options):
            node = Node(membership, own_data(membership), log, patience_s, monitor, observe)
            life, stop = _Life(node, trackers), node.oversight.request_stop
            with _tracked(trackers, result, log), _stop_requests(stop), node.oversight.watching():
                life.run()
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


class _Life:
    """The life of a node over all generations of the mesh: it decides with the others, trains, and ends."""

    def __init__(self, node: Node, trackers: Sequence[Tracker]):
        self._node, self._data, self._trackers = node, DataAgreement(node), trackers
        self._decisions = Deciding(node, self._data)

    def run(self) -> None:
        """Continues the run to its end."""
        node = self._node
        ledger = node.ledger
        if not ledger.begun and not ledger.awaits_restoring:
            ledger.begin(0)
        deciding = ledger.pending
        if deciding and ledger.begun:
            node.membership = node.in_generation(ledger.begun[-1].generation)
        deciding = deciding or self._decisions.votes_are_in()
        while True:
            try:
                if not ledger.begun and not deciding:
                    self._decisions.await_restoring()
                if deciding:
                    self._decisions.decide()
                    deciding = False
                if ledger.begun:
                    self._generation()
                    return
            except Decide:
                deciding = True
            except divergence.SiteDiverged as error:
                self._decisions.after_divergence(error)
                deciding = True
            except Exception as error:
                self._decisions.after_failure(error)
                deciding = True

    def _generation(self) -> None:
        """Continues the run to its end, within one generation of the mesh."""
        node = self._node
        membership, oversight = node.membership, node.oversight
        diverged = divergence.told(node.bulletin, membership).get(membership.name)
        node.ledger.vote()
        if diverged and node.ledger.without_vote() is None:  # else it must compute again how far it had come
            raise diverged
        store = Store(node.folder, membership.mesh.generation, node.log)
        done, node.rounds = store.newest or 0, None
        first = done + FIRST_ROUND if done else 0
        owed = self._decisions.to_restore() if done and done == node.ledger.begun[-1].start else []
        with node.opened(first) as mailroom:
            for position in owed:
                mailroom.owe(position, restoring_step(done))
            node.machines.begin(membership.mesh.generation, first)
            if mailroom.other_machine is not None:
                said = "this machine differs from before; messages that were sent stay as they are"
                node.log("warning", said, difference=mailroom.other_machine)
            self._data.settle(mailroom)
            problem = node.problem(membership)
            self._data.show(problem)
            start = node.start_of(problem, membership)
            node.expect_messages(mailroom, problem, start)
            with node.linked(mailroom) as links:
                if not done:
                    oversight.activity = "agreeing on the model to start from"
                    neighbours = [one.position for one in membership.neighbours]
                    start.agree(mailroom, branch_of(membership), neighbours, membership.present)
                    problem = node.problem(membership)
                self._enter(problem, store)
                node.rounds = Rounds(
                    membership,
                    problem,
                    mailroom,
                    store,
                    oversight,
                    lambda: node.ledger.pinned,
                    node.measurements,
                    node.ledger.somebody_goes_back,
                )
                if owed:
                    node.rounds.share(done, owed, start)
                node.rounds.train(done)
                self._end(node.rounds, links, mailroom)

    def _end(self, rounds: Rounds, links: Links, mailroom: Mailroom) -> None:
        """Sums up, confirms the result with all sites, and stays until nobody needs this node."""
        node, membership, oversight = self._node, self._node.membership, self._node.oversight
        result = node.folder / RESULT
        if not result.exists():
            oversight.activity = "waiting for the metrics of all"
            table = node.measurements
            node.wait(lambda: not table.open_questions(), table.open_questions)
            oversight.activity = "summing up"
            unconfirmed = node.folder / f"unconfirmed-{membership.mesh.generation}"
            write_result(membership, rounds, mailroom, table, unconfirmed)
            self._confirm(unconfirmed, sums_of(membership, rounds, mailroom).source)
            self._compare_with_local(rounds, unconfirmed)
            oversight.reached("result confirmed", membership.experiment.rounds)
            write_site_model(membership, rounds, unconfirmed, node.folder / PERSONAL)
            put_in_place(unconfirmed, result)
            node.aside.tried("the look at undefined metrics", lambda: self._log_undefined(result), None)
        compare_with_neighbours(membership, rounds, mailroom, result)
        if membership.experiment.personalization is not None:
            oversight.activity = "choosing the site's own model"
        write_personal(membership, rounds, result, node.folder / PERSONAL, oversight.raise_if_stopped)
        oversight.reached("result written", membership.experiment.rounds)
        oversight.activity = "waiting until all have the result"
        wait_for_all_to_end(membership, rounds, mailroom)
        oversight.activity = "finished"
        node.log("info", "finished", rounds=membership.experiment.rounds, folder=RESULT)
        self._part(links, mailroom)
        node.ledger.forget_earlier()

    def _enter(self, problem: Problem, store: Store) -> None:
        """Begins or continues what all sites measure in this generation."""
        node = self._node
        membership, experiment = node.membership, node.membership.experiment
        options = experiment.options
        since = node.ledger.measured_since()
        schedule = Schedule(
            experiment.rounds,
            options.measure_every,
            options.best_by,
            experiment.seeds[0],
            options.cvar_level,
            since,
        )
        names = [member.name for member in membership.mesh.present]
        start = node.ledger.begun[-1].start
        progress = node.folder / PROGRESS
        for tracker in self._trackers:
            settings, run = settings_of(membership) | {"site": membership.name}, membership.mesh.name
            tracker.begin(names, node.folder)
            tracker.add_replica(0, TrackedReplica(f"{run}, seen from {membership.name}", run, settings, "0"))

        def after_record(records: Sequence[Record]) -> None:
            write_progress(membership, problem, records, progress)
            for tracker in self._trackers:
                tracker.add_records(records)

        node.measurements.after_record = after_record
        node.measurements.enter(
            membership.mesh.generation, start, schedule, problem, names, lambda: tuple(store.landmarks)
        )

    def _confirm(self, unconfirmed: Path, source: str | None) -> None:
        """Waits until all sites have announced the result that this site has. A difference is named; it ends when the
        other site announces another result, or is voted out."""
        node = self._node
        mine, told = Announced.read(unconfirmed, node.membership), set[str]()
        mine.announce(node.bulletin, node.membership)
        node.oversight.activity = "waiting for the results of all"

        def open_questions() -> list[str]:
            silent, apart = mine.compared(node.bulletin, node.membership)
            for site, reason in apart.items():
                if site not in told:
                    told.add(site)
                    node.oversight.activity = "results differ; the log says which"
                    sums = "computed by this site" if source is None else f"from {source}"
                    node.log("error", "results differ", site=site, reason=reason, sums=sums, kept=unconfirmed.name)
            return [*silent, *apart]

        node.wait(lambda: not open_questions(), open_questions)

    def _compare_with_local(self, rounds: Rounds, unconfirmed: Path) -> None:
        """Tells all sites how the common model compares with the one that this site trains alone, waits until all have
        told theirs, and adds the verdicts to the result."""
        node, mesh = self._node, self._node.membership.mesh
        oversight, bulletin = node.oversight, node.bulletin
        oversight.activity = COMPARING
        common = unconfirmed / "model.safetensors"
        folder, go_on = node.folder / LOCAL, functools.partial(oversight.trains_alone, what=COMPARING)
        body = versus_local.compared(node.membership, rounds, common, folder, go_on, node.log)
        if body["why_not"]:
            node.log("warning", "not compared with this site's model alone", reason=body["why_not"])
        bulletin.announce(versus_local.KIND, body, mesh.generation)
        oversight.activity = "waiting for the comparisons of all"
        names = [member.name for member in mesh.present]

        def silent() -> list[str]:
            told = bulletin.of_all(versus_local.KIND)
            return [name for name in names if told.get(name, {}).get("generation") != mesh.generation]

        node.wait(lambda: not silent(), silent)
        told, same = bulletin.of_all(versus_local.KIND), rounds.state.own is None
        same = same and "accuracy" not in rounds.problem.metrics_by_name  # which may be another one

        def evidence() -> dict[str, Any] | None:
            return versus_local.evidence(unconfirmed, told, names, same, node.aside)

        versus_local.with_evidence(unconfirmed, node.aside.tried("the comparison of all sites", evidence, None))

    def _log_undefined(self, result: Path) -> None:
        node = self._node
        names = [member.name for member in node.membership.mesh.present]
        for metric, sites in undefined_metrics(result, names).items():
            node.log("warning", "a metric has no value at some sites", metric=metric, sites=", ".join(sites))

    def _part(self, links: Links, mailroom: Mailroom) -> None:
        """Stays until no neighbour needs anything. Then waits for their last messages, but not forever, since these may
        be lost."""
        node = self._node
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
                node.oversight.stop_if_waited_too_long(
                    notices.seconds, ", ".join(node.membership.mesh.names[p] for p in waiting)
                )
            if waiting and notices.due():
                names = ", ".join(node.membership.mesh.names[position] for position in waiting)
                node.log("warning", "finished; others still need messages of this node", sites=names)
        time.sleep(0.3)  # for last messages on their way


@contextmanager
def _stop_requests(request: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(number: int, frame: Any) -> None:
        request()

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
