"""The life of a node: it connects to the others, does its rounds, computes the average of all sites, and ends."""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairmesh.data.site import Site
from fairmesh.mesh.node import leaving
from fairmesh.mesh.node.ending import write_personal, write_result
from fairmesh.mesh.node.leaving import Leave
from fairmesh.mesh.node.membership import (
    Membership,
    common_problem,
    facts,
    locked,
    own_data,
)
from fairmesh.mesh.node.oversight import Notices, Oversight
from fairmesh.mesh.node.rounds import Rounds, identity_of
from fairmesh.mesh.node.store import Store, folder_of
from fairmesh.mesh.node.watching import Log, Monitor
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.mesh.wire.journal import Journal
from fairmesh.mesh.wire.links import Links
from fairmesh.mesh.wire.log_limiter import LogLimiter
from fairmesh.mesh.wire.mailroom import Mailroom, Observe
from fairmesh.mesh.wire.transport import FIRST_ROUND
from fairmesh.problems.problem import Problem
from fairmesh.storage.files import private_files, write_atomically

PERSONAL = "personal"  # the folder of the site's own model
_FAREWELL_S = 60.0  # wait for the neighbours' last messages, once nobody needs anything from this node


def run_node(
    path: str | Path,
    *,
    patience_s: float | None = None,
    monitor_port: int | None = None,
    observe: Observe = lambda point, step: None,
    stream: Any = None,
    public_draws: bool = False,
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

    Returns:
        The folder of the result.

    Raises:
        Interrupted: After `patience_s`, on Ctrl-C and on SIGTERM. All that a restart needs is on disk.
    """
    membership = Membership.read(path)
    state = membership.site.state
    with private_files(), locked(state):
        membership = membership if public_draws else membership.with_secret()
        result, finished = state / "result", state / "finished"
        if finished.exists() and leaving.wished(state, membership.mesh) is None:
            return result
        finished.unlink(missing_ok=True)
        log = Log(state, stream)
        if public_draws:
            log("warning", "random draws are public, so neighbours can solve for the training rows; for tests only")
        if membership.not_measured:
            log(
                "warning",
                "options that only simulations measure are ignored",
                options=", ".join(membership.not_measured),
            )
        monitor = None if monitor_port is None else Monitor(monitor_port)
        node = _Node(membership, own_data(membership), log, patience_s, monitor, observe)
        with _stop_requests(node.oversight.request_stop), node.oversight.watching():
            node.run()
        write_atomically(finished, b"")
        return result


class _Node:
    """The node of one site: its links and its rounds, over all generations of the mesh."""

    def __init__(
        self,
        membership: Membership,
        own: Site,
        log: Log,
        patience_s: float | None,
        monitor: Monitor | None,
        observe: Observe,
    ):
        self._membership, self._own, self._log, self._observe = membership, own, log, observe
        self._folder, self._limiter = membership.site.state, LogLimiter(log)
        given = membership.credentials
        self._bulletin = Bulletin(membership.name, given.key, given.certificate, given.authority, membership.mesh.names)
        self._bulletin.restored(self._folder / "bulletin.json")
        self._bulletin.announce("facts", facts(own), self._bulletin.since)
        self._rounds: Rounds | None = None
        self.oversight = Oversight(membership, self._bulletin, log, patience_s, monitor, observe)

    def run(self) -> None:
        while True:
            try:
                self._generation()
                return
            except Leave as leave:
                if leave.generation == self._membership.mesh.generation:
                    self._continue_without(leave.sites)

    def _generation(self) -> None:
        """Continues the run to its end, within one generation of the mesh."""
        membership, oversight = self._membership, self.oversight
        store = Store(self._folder, membership.mesh.generation, self._log)
        store.forget_earlier()
        done, self._rounds = store.newest or 0, None
        met = done > 0 or membership.mesh.generation > 1
        with self._opened(done + FIRST_ROUND if met else 0) as mailroom:
            if self._unknown():
                with self._linked(mailroom, only_news=True):
                    oversight.activity = "connecting"
                    self._wait(lambda: not self._unknown(), self._unknown)
                self._remember()
            problem = self._problem(membership)
            mailroom.largest = _largest(problem.flat_model.dim, problem.n)
            mailroom.rounds = range(FIRST_ROUND, FIRST_ROUND + membership.experiment.rounds)
            with self._linked(mailroom) as links:
                self._rounds = Rounds(membership, problem, mailroom, store, oversight)
                if not met:
                    self._rounds.compare_starts()
                self._rounds.train(done)
                oversight.activity = "summing up"
                result = self._folder / "result"
                write_result(membership, self._rounds, mailroom, result)
                if membership.experiment.personalization is not None:
                    oversight.activity = "choosing the site's own model"
                write_personal(membership, self._rounds, result, self._folder / PERSONAL, oversight.raise_if_stopped)
                oversight.activity = "finished"
                oversight.reached("result written", membership.experiment.rounds)
                self._log("info", "finished", rounds=membership.experiment.rounds, folder="result")
                self._part(links, mailroom)

    @contextmanager
    def _opened(self, first: int) -> Iterator[Mailroom]:
        """Opens the mailroom over the journal of this generation."""
        journal = Journal(folder_of(self._folder, self._membership.mesh.generation))
        mailroom = Mailroom([one.position for one in self._membership.neighbours], journal, first, self._observe)
        self.oversight.oversee(self._membership, mailroom)
        try:
            yield mailroom
        finally:
            mailroom.close()
            journal.close()

    @contextmanager
    def _linked(self, mailroom: Mailroom, only_news: bool = False) -> Iterator[Links]:
        membership = self._membership
        links = Links(
            membership.neighbours,
            membership.credentials,
            membership.site.listen,
            mailroom,
            self._bulletin,
            membership.greeting,
            lambda name, theirs: self._check_greeting(name, theirs) and not only_news,
            self._log,
            mailroom.largest,
            self._observe,
        )
        links.start()
        try:
            yield links
        finally:
            links.stop()

    def _check_greeting(self, name: str, theirs: Mapping[str, Any]) -> bool:
        self._membership.refuse_unlike(name, theirs)
        apart = self._membership.clock_apart(theirs, time.time())
        if apart is not None:
            self._limiter("warning", "clocks differ", name, f"by {round(apart / 60)} minutes")
        return theirs.get("generation") == self._membership.mesh.generation

    def _unknown(self) -> list[str]:
        """Returns the sites that have not announced the form of their data yet. Each announces it once for the run."""
        known = self._bulletin.of_all("facts")
        return [member.name for member in self._membership.mesh.present if member.name not in known]

    def _remember(self) -> None:
        write_atomically(self._folder / "bulletin.json", self._bulletin.saved())

    def _wait(self, until: Callable[[], bool], whom: Callable[[], list[str]]) -> None:
        """Waits for announcements of other sites, and logs which sites are missing."""
        notices = Notices()
        while not until():
            self.oversight.raise_if_stopped()
            if notices.due():
                self._log("warning", "waiting", sites=", ".join(whom()), seconds=round(notices.seconds))
            self.oversight.stop_if_waited_too_long(notices.seconds, ", ".join(whom()))
            time.sleep(0.02)

    def _part(self, links: Links, mailroom: Mailroom) -> None:
        """Stays until no neighbour needs anything. Then waits for their last messages, but not forever, since these may
        be lost."""
        notices, free_since = Notices(), None
        while not links.all_finished.wait(0.05):
            self.oversight.raise_if_left()
            waiting = mailroom.unacknowledged_by()
            if self.oversight.stopping and waiting:
                raise self.oversight.stopping
            if self.oversight.stopping:
                return
            links.finish(waiting)
            free_since = None if waiting else (free_since or time.monotonic())
            if free_since is not None and time.monotonic() - free_since > _FAREWELL_S:
                return
            if waiting:
                self.oversight.stop_if_waited_too_long(
                    notices.seconds, ", ".join(self._membership.mesh.names[p] for p in waiting)
                )
            if waiting and notices.due():
                names = ", ".join(self._membership.mesh.names[position] for position in waiting)
                self._log("warning", "finished; others still need messages of this node", sites=names)
        time.sleep(0.3)  # for last messages on their way

    def _continue_without(self, gone: Sequence[str]) -> None:
        """Prepares the next generation of the mesh, from the last round that all remaining sites have done."""
        before, mesh, rounds = self._membership, self._membership.mesh, self._rounds
        done, names = rounds.done if rounds else 0, ", ".join(gone)
        self.oversight.activity = f"continuing without {names}"
        for written in ("result", PERSONAL):  # this node may be finished, but the others are not
            shutil.rmtree(self._folder / written, ignore_errors=True)
        leaving.freeze(self._bulletin, mesh, gone, done, rounds.problem.classes or 0 if rounds else 0)
        self._remember()
        self._observe("frozen", done)
        self._log("warning", "left for good", sites=names, round=done)
        with self._opened(0) as mailroom, self._linked(mailroom, only_news=True):
            self.oversight.ignore_votes()
            self._wait(
                lambda: leaving.agreed_round(self._bulletin, mesh, gone)[0] is not None,
                lambda: leaving.agreed_round(self._bulletin, mesh, gone)[1],
            )
        self._remember()
        agreed = leaving.agreed_round(self._bulletin, mesh, gone)[0] or 0
        self._observe("agreed", agreed)
        after = replace(before, mesh=mesh.without(*gone))
        if agreed:
            self._save_without(gone, agreed, before, after)
            self._observe("saved without", agreed)
        leaving.note_removed(self._folder, after.mesh)
        self._observe("noted without", agreed)
        self._membership = after
        self._log("info", "continuing", without=names, round=agreed, sites=len(after.present))

    def _save_without(self, gone: Sequence[str], agreed: int, before: Membership, after: Membership) -> None:
        """Writes the first checkpoint of the next generation: the state after the agreed round, without `gone`."""
        with self._opened(0) as mailroom:
            self.oversight.ignore_votes()
            store = Store(self._folder, before.mesh.generation, self._log)
            state = Rounds(before, self._problem(before), mailroom, store, self.oversight).state_at(agreed)
        problem = self._problem(after)
        numbers = [before.present.index(before.mesh.position(name)) for name in gone]
        slots = [before.present.index(p) for p in (before.position, *(one.position for one in before.neighbours))]
        reduced = leaving.without(state, numbers, slots, problem.prior_of_sites)
        store = Store(self._folder, after.mesh.generation, self._log)
        store.save(reduced, agreed, identity_of(after, problem), len(after.present))

    def _problem(self, membership: Membership) -> Problem:
        had = leaving.outputs_before(self._bulletin, membership.mesh)
        return common_problem(membership, self._own, self._bulletin.of_all("facts"), had)


def _largest(dim: int, n: int) -> int:
    """Returns a bound on the bytes of a message: several uncompressed parts, and the sums at the end."""
    return (1 << 16) + 8 * (4 * dim + 8 * n)


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
