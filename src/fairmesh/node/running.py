"""The life of a node: it meets the others, does its rounds, ends with the network's average, and says farewell."""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairmesh.errors import FairmeshError, Interrupted
from fairmesh.files import write_atomically
from fairmesh.networks.peers.bulletin import Bulletin
from fairmesh.networks.peers.links import Links
from fairmesh.networks.peers.mailroom import Mailroom, Observe
from fairmesh.networks.peers.transport import FIRST_ROUND
from fairmesh.node import leaving
from fairmesh.node.ending import write_result
from fairmesh.node.leaving import Leave
from fairmesh.node.membership import Membership, common_problem, facts, locked, own_data
from fairmesh.node.rounds import Rounds, Watcher, identity_of
from fairmesh.node.store import Store
from fairmesh.node.watching import Log, Monitor, write_status

_TICK_S = 1.0
_FAREWELL_S = 60.0  # once nobody needs anything from this node but its farewell
_FIRST_NOTICE_S, _LONGEST_NOTICE_S = 5.0, 600.0


def run_node(
    path: str | Path,
    *,
    patience_s: float | None = None,
    monitor_port: int | None = None,
    observe: Observe = lambda point, step: None,
    stream: Any = None,
) -> Path:
    """Runs the node of a site file to the end of its run, and gives the folder of the result.

    It waits for neighbours as long as it takes, or `patience_s` seconds at most; then, and on Ctrl-C or SIGTERM, it
    stops with all that a restart needs on disk."""
    membership = Membership.read(path)
    state = membership.site.state
    with locked(state):
        result = state / "result"
        if (state / "finished").exists():
            return result
        node = _Node(membership, own_data(membership), Log(state, stream), patience_s, observe)
        node.monitor = None if monitor_port is None else Monitor(monitor_port)
        if membership.not_measured:
            node.log("warning", "measured in simulations only", options=", ".join(membership.not_measured))
        with _stop_requests(node.request_stop), node.watched():
            node.run()
        write_atomically(state / "finished", b"")
        return result


class _Node(Watcher):
    """One site's node: its links and its rounds, over the generations of the mesh."""

    def __init__(self, membership: Membership, own: Any, log: Log, patience_s: float | None, observe: Observe):
        self._membership, self._own, self.log = membership, own, log
        self._patience_s, self._observe = patience_s, observe
        self._state_folder = membership.site.state
        given = membership.credentials
        self._bulletin = Bulletin(membership.name, given.key, given.certificate, given.authority, membership.mesh.names)
        self._bulletin.restored(self._state_folder / "bulletin.json")
        self._bulletin.announce("facts", facts(own), 1)
        self.monitor: Monitor | None = None
        self._mailroom: Mailroom | None = None
        self._stop: FairmeshError | None = None
        self._round, self._activity = 0, "starting"
        self._metric: dict[str, Any] = {}
        self._weight: float | None = None
        self._rounds: Rounds
        self._parting = False  # from a site that left, or at the end from all
        self._notices: dict[int, float] = {}  # position -> when the next notice is due
        self._measured_by = "loss"

    # The course of a run

    def run(self) -> None:
        while True:
            try:
                self._generation()
                return
            except Leave as leave:
                self._go_on_without(leave.site)

    def _generation(self) -> None:
        """The run from where it is to its end, in one generation of the mesh."""
        membership = self._membership
        mesh, store = membership.mesh, Store(self._state_folder, membership.mesh.generation, self.log)
        done = self._round = store.newest or 0
        met = done > 0 or mesh.generation > 1
        with self._opened(membership, done + FIRST_ROUND if met else 0) as mailroom:
            if not self._knows_all():
                with self._linked(mailroom):
                    self._meet()
            problem = common_problem(membership, self._own, self._bulletin.of_all("facts"))
            mailroom.largest = _largest(problem.flat_model.dim, problem.n)
            mailroom.rounds = range(FIRST_ROUND, FIRST_ROUND + membership.experiment.rounds)
            with self._linked(mailroom) as links:
                self._rounds = Rounds(membership, problem, mailroom, store, self)
                if not met:
                    self._rounds.compare_starts()
                self._rounds.train(done)
                self._activity = "summing up"
                write_result(membership, self._rounds, mailroom, self._state_folder / "result")
                self._activity, self._parting = "finished", True
                self.log("info", "finished", rounds=membership.experiment.rounds, folder="result")
                self._part(links, mailroom)

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
            self.log,
            mailroom.largest,
            self._observe,
        )
        links.start()
        try:
            yield links
        finally:
            links.stop()

    def _check_greeting(self, name: str, theirs: Any) -> bool:
        self._membership.refuse_unlike(name, theirs)
        apart = self._membership.clock_apart(theirs, time.time())
        if apart is not None:
            self.log("warning", "clocks differ", site=name, seconds=round(apart))
        return theirs.get("generation") == self._membership.mesh.generation

    def _knows_all(self) -> bool:
        return self._bulletin.of_all("facts").keys() >= {m.name for m in self._membership.mesh.present}

    def _meet(self) -> None:
        """Waits until every site has told what its data is like; then that holds for the whole run."""
        self._activity = "meeting the others"
        self._wait(self._knows_all, lambda: self._unknown())
        write_atomically(self._state_folder / "bulletin.json", self._bulletin.saved())

    def _unknown(self) -> list[str]:
        known = self._bulletin.of_all("facts")
        return [member.name for member in self._membership.mesh.present if member.name not in known]

    def _wait(self, until: Callable[[], bool], whom: Callable[[], list[str]]) -> None:
        """For news of sites, with notices of whom it waits for."""
        since = notice = time.time()
        pause = _FIRST_NOTICE_S
        while not until():
            if self._stop:
                raise self._stop
            now = time.time()
            if now - notice > pause:
                self.log("warning", "waiting", sites=", ".join(whom()), seconds=round(now - since))
                notice, pause = now, min(2 * pause, _LONGEST_NOTICE_S)
            self._out_of_patience(now - since, ", ".join(whom()))
            time.sleep(0.02)

    def _part(self, links: Links, mailroom: Mailroom) -> None:
        """Stays as long as somebody needs something; then for farewells, but these may be lost, so not for ever."""
        links.finish()
        free_since: float | None = None
        since = notice = time.time()
        pause = _FIRST_NOTICE_S
        while not links.all_finished.wait(0.05):
            if self._stop:
                return
            now, owed = time.time(), mailroom.owed_to()
            free_since = None if owed else (free_since or now)
            if free_since is not None and now - free_since > _FAREWELL_S:
                return
            if owed and now - notice > pause:
                names = ", ".join(self._name_at(position) for position in owed)
                self.log(
                    "warning",
                    "finished, but kept up for others who need messages",
                    sites=names,
                    seconds=round(now - since),
                )
                notice, pause = now, min(2 * pause, _LONGEST_NOTICE_S)
        time.sleep(0.3)  # for farewells on their way

    # A site that left

    def _go_on_without(self, gone: str) -> None:
        """From the round that all remaining sites have done, in the next generation of the mesh."""
        before, rounds, self._parting = self._membership, self._rounds, True
        mesh, self._activity = before.mesh, f"going on without {gone}"
        leaving.frozen(self._bulletin, mesh, rounds.done)
        write_atomically(self._state_folder / "bulletin.json", self._bulletin.saved())
        self.log("warning", "a site has left for good", site=gone, round=rounds.done)
        with self._opened(before, 0) as mailroom, self._linked(mailroom, only_news=True):
            self._wait(
                lambda: leaving.agreed_round(self._bulletin, mesh, gone)[0] is not None,
                lambda: leaving.agreed_round(self._bulletin, mesh, gone)[1],
            )
        agreed, _ = leaving.agreed_round(self._bulletin, mesh, gone)
        if agreed is None:
            raise FairmeshError("the agreed round was lost")
        write_atomically(self._state_folder / "bulletin.json", self._bulletin.saved())
        with self._opened(before, 0) as mailroom:
            store = Store(self._state_folder, mesh.generation, self.log)
            state = Rounds(before, rounds.problem, mailroom, store, self).state_at(agreed)
        after = Membership(before.site, mesh.without(gone), before.experiment, before.credentials)
        problem = common_problem(after, self._own, self._bulletin.of_all("facts"))
        number = before.present.index(mesh.position(gone))
        slots = [before.present.index(p) for p in (before.position, *sorted(n.position for n in before.neighbours))]
        reduced = leaving.without(state, number, slots, problem.prior_of_sites)
        store = Store(self._state_folder, after.mesh.generation, self.log)
        store.save(reduced, agreed, identity_of(after, problem), len(after.present))
        after.mesh.write(after.site.mesh)  # from here on, a restart goes on with the next generation
        shutil.rmtree(self._state_folder / f"generation-{mesh.generation}", ignore_errors=True)
        self._membership, self._parting = after, False
        self.log("info", "going on", without=gone, round=agreed, sites=len(after.present))

    @contextmanager
    def _opened(self, membership: Membership, first: int) -> Iterator[Mailroom]:
        """The mailroom over the journal of a generation."""
        journal = Store(self._state_folder, membership.mesh.generation, self.log).journal()
        mailroom = Mailroom([one.position for one in membership.neighbours], journal, first, self._observe)
        self._mailroom = mailroom
        if self._stop:
            mailroom.stop(self._stop)
        try:
            yield mailroom
        finally:
            mailroom.close()
            journal.close()

    # Watching

    def request_stop(self) -> None:
        self._end(Interrupted(f"stopped after round {self._round}; start the node again and it continues"))

    def _end(self, reason: FairmeshError) -> None:
        self._stop = self._stop or reason
        if self._mailroom is not None:
            self._mailroom.stop(self._stop)

    def _out_of_patience(self, seconds: float, whom: str) -> None:
        if self._patience_s is not None and seconds > self._patience_s:
            self._end(
                Interrupted(
                    f"waited {seconds:.0f} s for {whom}, longer than --patience; all is kept, start the node again"
                )
            )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Status, notices and votes, once a second, beside the training."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_TICK_S):
                self._look()

        thread = threading.Thread(target=watch, name="watch", daemon=True)
        thread.start()
        try:
            yield
        except FairmeshError as error:
            self._activity = "stopped"
            self.log("error", "stopped", reason=str(error))
            raise
        finally:
            over.set()
            thread.join()
            self._look()

    def _look(self) -> None:
        self._notice_waiting()
        status = self.status()
        mine = {
            k: status[k] for k in ("round", "activity", "metric", "metric_round", "weight", "waiting_for", "bytes_out")
        }
        self._bulletin.announce("status", mine | {"time": status["time"]}, int(1000 * time.time()))
        write_status(self._state_folder, status)
        if self.monitor:
            self.monitor.show(status)
        mesh = self._membership.mesh
        gone = leaving.wished(self._state_folder, mesh)
        if gone is not None:
            leaving.vote(self._bulletin, mesh, gone)
        decided = leaving.decided(self._bulletin, mesh)
        if decided is not None and self._mailroom is not None and not self._parting:
            self._mailroom.stop(Leave(decided))

    def _notice_waiting(self) -> None:
        mailroom, now = self._mailroom, time.time()
        waiting = dict(mailroom.waiting_for) if mailroom else {}
        self._notices = {position: due for position, due in self._notices.items() if position in waiting}
        for position, since in waiting.items():
            if now - since > _FIRST_NOTICE_S and now >= self._notices.get(position, 0.0):
                began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
                self.log(
                    "warning",
                    "waiting",
                    site=self._name_at(position),
                    since=began,
                    seconds=round(now - since),
                    round=self._round,
                )
                self._notices[position] = now + min(now - since, _LONGEST_NOTICE_S)
            self._out_of_patience(now - since, self._name_at(position))

    def _name_at(self, position: int) -> str:
        return self._membership.mesh.names[position]

    def status(self) -> dict[str, Any]:
        """This node's view of the mesh."""
        membership, mailroom = self._membership, self._mailroom
        edges = {self._name_at(p): edge for p, edge in mailroom.view().items()} if mailroom else {}
        told = self._bulletin.of_all("status")
        waiting = {self._name_at(p): since for p, since in dict(mailroom.waiting_for).items()} if mailroom else {}
        sites = {m.name: told.get(m.name, {}) for m in membership.mesh.present}
        return {
            "time": time.time(),
            "mesh": membership.mesh.name,
            "generation": membership.mesh.generation,
            "removed": list(membership.mesh.removed),
            "site": membership.name,
            "round": self._round,
            "rounds": membership.experiment.rounds,
            "activity": self._activity,
            "metric_name": self._measured_by,
            "metric": self._metric.get(self._measured_by),
            "metric_round": self._metric.get("round"),
            "weight": self._weight,
            "waiting_for": waiting,
            "bytes_out": sum(edge["bytes_out"] for edge in edges.values()),
            "network_ms": mailroom.median_ms() if mailroom else None,
            "edges": edges,
            "votes": leaving.votes(self._bulletin, membership.mesh),
            "sites": sites,
        }

    # Watches the rounds

    def progressed(self, done: int) -> None:
        self._round, self._activity = done, "training"

    def measured(self, values: dict[str, Any], primary: str, weight: float | None) -> None:
        self._metric, self._measured_by, self._weight = values, primary, weight
        self.log("info", "measured", **values)

    def reached(self, point: str, done: int) -> None:
        self._observe(point, done)

    @property
    def stopping(self) -> FairmeshError | None:
        return self._stop


def _largest(dim: int, n: int) -> int:
    """Bytes that no message of such a model exceeds: each number as it is, several parts, and the sums at the end."""
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
