"""Watches a node once per second while it trains: its status, whom it waits for, and whether it must stop."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import fairmesh
from fairmesh.errors import BadInput, FairmeshError, Interrupted
from fairmesh.mesh.certificates import SOON_DAYS, valid_until
from fairmesh.mesh.keys import KnownKeys
from fairmesh.mesh.node import claims, divergence
from fairmesh.mesh.node.aside import Aside
from fairmesh.mesh.node.ledger import Ledger
from fairmesh.mesh.node.measurements import Measurements
from fairmesh.mesh.node.membership import Membership
from fairmesh.mesh.node.rounds import Watcher
from fairmesh.mesh.node.store import landmarks_in
from fairmesh.mesh.node.watching import Log, Monitor, Pace, waiting_chain, write_status
from fairmesh.mesh.node.weight_watch import WeightWatch
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.mesh.wire.kinds import shortened
from fairmesh.mesh.wire.mailroom import Mailroom, Observe
from fairmesh.problems.local_work import LOCAL_TRAINING, Activity
from fairmesh.problems.problem import Problem
from fairmesh.training.loop import TrainingState

ACTIVITY = 200  # characters at most of what a node says that it does
_REFERENCES = "finding reference losses"
COMPARING = "comparing with this site alone"
_TICK_S = 1.0
_ANNOUNCE_S_PER_SITE = 0.05  # each site's status goes to all others: the more sites, the less often
_FIRST_NOTICE_S, _LONGEST_NOTICE_S = 5.0, 600.0
_REFUSING_S = 60.0  # between two announcements of refusals of the same sites
_ANNOUNCED = ("time", "round", "activity", "metric", "metric_round", "weight", "waiting_for", "bytes_out")


def _by_clock(since: float) -> float:
    """Returns a moment of time.monotonic() by the clock."""
    return time.time() - (time.monotonic() - since)


class Decide(FairmeshError):
    """A decision of the sites is due: training stops until it is made."""

    def __init__(self):
        super().__init__("the sites decide")


class Notices:
    """Decides when to log a wait: after a moment, then at growing intervals. `since` is by time.monotonic(), so that a
    clock that is set does not change how long a wait has lasted."""

    def __init__(self, since: float | None = None):
        self.since = time.monotonic() if since is None else since
        self._next = _FIRST_NOTICE_S

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def pause(self) -> None:
        """Sleeps before the next look: a moment at first, so that short waits stay short, and up to half a second in a
        long wait, which should cost little."""
        time.sleep(min(0.5, 0.02 + self.seconds / 50))

    def due(self) -> bool:
        """Returns whether to log the wait now. After True, the next one is due when the wait is twice as long."""
        waited = self.seconds
        if waited < self._next:
            return False
        self._next = waited + min(waited, _LONGEST_NOTICE_S)
        return True


class Oversight(Watcher):
    """Collects the status of this node while it trains, and stops it on request, after a timeout, or after a vote."""

    def __init__(
        self,
        membership: Membership,
        bulletin: Bulletin,
        ledger: Ledger,
        keys: KnownKeys,
        measurements: Measurements,
        aside: Aside,
        log: Log,
        patience_s: float | None,
        monitor: Monitor | None,
        observe: Observe,
    ):
        self._membership, self._bulletin, self._ledger, self._log = membership, bulletin, ledger, log
        self._keys, self._measurements, self._aside = keys, measurements, aside
        self._patience_s, self._monitor, self._observe = patience_s, monitor, observe
        self._folder, self._ends = membership.site.state, valid_until(membership.credentials.certificate)
        self._mailroom: Mailroom | None = None
        self._stop: FairmeshError | None = None
        self._asked_to_stop = False  # by a person or the system
        self._interruption: FairmeshError | None = None  # of the rounds of this generation
        self._deciding, self._votes_lock = False, threading.Lock()
        self._round, self.activity, self._pace = 0, "starting", Pace()
        self.prior: dict[str, float] = {}  # of each site, once all have announced their samples
        self.unusual: dict[str, list[str]] = {}  # sites whose inputs look different, and how
        self.unaccepted: list[str] = []  # those of them for which this node waits until a person accepts them
        self._weights, self._heavy = WeightWatch(membership.experiment.rounds), dict[str, dict[str, Any]]()
        self._metric: dict[str, Any] = {}
        self._voted, self._voted_in = dict[str, str](), 1  # what each site has voted for in a generation
        self._impossible: str | None = None  # why this site's own vote cannot be fulfilled
        self._measured_by, self._higher_is_better, self._weight = "loss", False, None
        self._failed_metrics: set[str] = set()
        self._notices: dict[int, Notices] = {}  # by position
        self.versions: dict[str, str] = {}  # of fairmesh, by neighbour
        self.clocks: dict[str, float] = {}  # seconds ahead of this one, of neighbours whose clocks differ
        self._disk_notices: Notices | None = None  # while the journal is synced
        self._local_since, self._alone = 0.0, Notices()
        self._phase: dict[str, Any] = {"what": ""}  # the last work outside the rounds, with its progress
        self._claimed: set[tuple[str, ...]] = set()  # what other sites have said, as far as it is logged
        self._announced_at = self._next_warning = self._refusing_at = -1e9

    def oversee(self, membership: Membership, mailroom: Mailroom) -> None:
        """Watches the messages of this generation from now on."""
        with self._votes_lock:
            self._membership, self._mailroom, self._deciding = membership, mailroom, False
            self._interruption = None
        if self._stop:
            mailroom.stop(self._stop)

    def deciding(self) -> None:
        """Is called when the node itself takes part in a decision, so that votes need not stop it."""
        with self._votes_lock:
            self._deciding, self._interruption = True, None
            if self._mailroom is not None and not self._stop:
                self._mailroom.resume()

    # Stopping

    @property
    def stopping(self) -> FairmeshError | None:
        return self._stop

    def request_stop(self) -> None:
        self._asked_to_stop = True
        self._end(Interrupted(f"stopped after round {self._round}; start the node again to continue"))

    def stop_if_waited_too_long(self, seconds: float, whom: str) -> None:
        if self._patience_s is not None and seconds > self._patience_s:
            reason = f"waited {seconds:.0f} s for {whom}, longer than --patience; start the node again to continue"
            self._end(Interrupted(reason))

    def _end(self, reason: FairmeshError) -> None:
        self._stop = self._stop or reason
        if self._mailroom is not None:
            self._mailroom.stop(self._stop)

    def raise_if_deciding(self) -> None:
        if self._interruption:
            raise self._interruption

    def raise_if_stopped(self) -> None:
        if self._stop:
            raise self._stop
        self.raise_if_deciding()

    # Watching the rounds

    def expect(self, problem: Problem) -> None:
        """Takes over what sites are measured by, before the first measurement after a start."""
        self._measured_by = problem.primary
        self._higher_is_better = problem.higher_is_better(problem.primary)

    def after_round(self, round: int, state: TrainingState) -> None:
        self._round, self.activity = round, "training"

    def measured(self, values: dict[str, Any], weight: float | None) -> None:
        # A metric that is not defined here, or a site without test data, has no value.
        self._metric = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._weight = weight
        self._log("info", "measured", **self._metric)

    def metric_failed(self, name: str, error: BadInput) -> None:
        if name not in self._failed_metrics:
            self._failed_metrics.add(name)
            self._log("error", "a metric failed; it has no value at this site", metric=name, reason=str(error))

    def ignored_stop(self, reason: str, done: int) -> None:
        what = "an observer asked to end the run; one site cannot, so the run continues"
        self._log("warning", what, round=done, reason=reason)

    @property
    def _at_work(self) -> bool:
        return self.activity.startswith(("training", LOCAL_TRAINING))

    def works_locally(self, activity: Activity | None) -> None:
        if activity is None:
            self.activity = "training"
            self._log("info", "local training finished", seconds=round(time.monotonic() - self._local_since, 3))
            return
        self._local_since, self.activity = time.monotonic(), str(activity)
        self._log("info", LOCAL_TRAINING, round=activity.round)

    def computes_features(self, text: str | None) -> None:
        if text is None:
            self.activity = "training"
            return
        self.activity = "computing the outputs of the frozen prefix"
        self._log("info", "features", said=text)

    def trains_alone(self, done: int, what: str = _REFERENCES) -> None:
        """Shows how far this site's model alone is trained, and raises if the node must stop."""
        rounds = self._membership.experiment.rounds
        if done == 0:
            self._alone = Notices()
            self.log("info", what, rounds=rounds)
        self._phase = {"what": what, "done": done, "of": rounds}
        self.activity = "training" if done == rounds else f"{what}: round {done:,} of {rounds:,} of its model alone"
        if done == rounds or self._alone.due():
            self.log("info", what, done=done, of=rounds, seconds=round(self._alone.seconds, 1))
        try:
            self.raise_if_stopped()
        except FairmeshError:
            self.log("info", "interrupted; it starts over when it is needed again", work=what, done=done, of=rounds)
            raise

    def log(self, level: str, what: str, **fields: Any) -> None:
        self._log(level, what, **fields)

    def reached(self, point: str, done: int) -> None:
        self._observe(point, done)

    # Once per second

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches once per second until the `with` block ends."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_TICK_S):
                for part in (  # votes first, whatever the others come to
                    self._count_votes,
                    self._show,
                    self._notice_waiting,
                    self._notice_certificate,
                    self._announce_refusals,
                    self._notice_weights,
                    self._notice_claims,
                    self._notice_divergence,
                ):
                    self._aside.tried(f"the watch ({part.__name__})", part, None)

        thread = threading.Thread(target=watch, name="watch", daemon=True)
        thread.start()
        try:
            yield
        except FairmeshError as error:
            self.activity = "stopped"
            level = "error" if not isinstance(error, Interrupted) else "info" if self._asked_to_stop else "warning"
            self._log(level, "stopped", reason=str(error))
            raise
        finally:
            over.set()
            thread.join()
            self._aside.tried("the status", lambda: write_status(self._folder, self.status()), None)

    def _show(self) -> None:
        status = self.status()
        self._pace.note(self._round, bool(status["paused_for"]) or not self._at_work)
        if time.monotonic() - self._announced_at >= _ANNOUNCE_S_PER_SITE * len(self._membership.mesh.present):
            self._announced_at = time.monotonic()
            self._bulletin.announce("status", {key: status[key] for key in _ANNOUNCED})
            self._measurements.exchange()
        write_status(self._folder, status)
        if self._monitor:
            self._monitor.show(status)

    def _announce_refusals(self) -> None:
        """Tells all sites whose messages this node refuses, and why."""
        names = self._membership.mesh.names
        refusals = self._mailroom.refusals() if self._mailroom else {}
        now = {names[p]: {"reason": shortened(one.reason), "since": one.since} for p, one in refusals.items()}
        before = (self._bulletin.of(self._membership.name, "refusing") or {"sites": {}})["sites"]
        if now == before or (now.keys() == before.keys() and time.monotonic() - self._refusing_at < _REFUSING_S):
            return
        self._refusing_at = time.monotonic()
        self._bulletin.announce("refusing", {"sites": now})
        for site in now.keys() - before.keys():
            self._log("warning", "refuses a site's messages; told to all sites", site=site, reason=now[site]["reason"])

    def _refusing(self) -> list[dict[str, Any]]:
        """Returns which sites refuse messages of which, as they announced it; with counts where it is this one."""
        mesh, mine = self._membership.mesh, self._mailroom.refusals() if self._mailroom else {}
        present = {member.name for member in mesh.present}
        found = [{"by": self._membership.name, "site": mesh.names[p], **vars(one)} for p, one in sorted(mine.items())]
        for by, body in sorted(self._bulletin.of_all("refusing").items()):
            if by != self._membership.name and by in present:
                found += [{"by": by, "site": site, **why} for site, why in body["sites"].items() if site in present]
        return found

    def _state_lost(self) -> list[dict[str, Any]]:
        """Returns which neighbours say that this site has lost its state, and why."""
        names, said = self._membership.mesh.names, self._mailroom.state_lost() if self._mailroom else {}
        return [
            {"by": names[p], "reason": shortened(one.reason), "since": one.since} for p, one in sorted(said.items())
        ]

    def _diverged(self) -> list[dict[str, Any]]:
        """Returns which other sites say that they have diverged, and the rounds kept here from before. Leaves out those
        without which this node could not be as far as it is: neighbours are at most one round apart."""
        membership, generation = self._membership, self._membership.mesh.generation
        told, far = divergence.told(self._bulletin, membership), self._round - len(membership.mesh.present)
        said = {site: one for site, one in told.items() if site != membership.name and one.round > far}
        kept = landmarks_in(self._folder, generation) if said else []
        return [
            one.body(generation) | {"by": site, "kept": [done for done in kept if done < one.round]}
            for site, one in said.items()
        ]

    def _notice_certificate(self) -> None:
        """Warns once per day, from two weeks before the certificate ends."""
        left = self.certificate_days()
        if left < SOON_DAYS and time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + 86400
            self._log("warning", "this site's certificate ends soon; renew it", days=round(left, 1))

    def _notice_weights(self) -> None:
        """Warns if one site takes most of the weight and keeps it."""
        announced = self._bulletin.of_all("status")
        present = {one.name: announced[one.name] for one in self._membership.mesh.present if one.name in announced}
        before, self._heavy = self._heavy, self._weights.heavy(present, self.prior)
        for site in self._heavy.keys() - before.keys():
            what = "one site has most of the weight; ask it to check its data, or vote it out if the data is broken"
            self._log("warning", what, **{"site": site} | self._heavy[site])

    def certificate_days(self) -> float:
        return (self._ends - datetime.now(UTC)).total_seconds() / 86400

    def _count_votes(self) -> None:
        """Stops the training when a decision is due."""
        ledger = self._ledger
        ledger.vote()
        self._log_votes()
        if self._deciding:
            return
        if ledger.has_forgotten():
            self._end(
                BadInput(f"this site has forgotten what it had agreed to with the others. {claims.HOW_TO_RESTORE}")
            )
        due = ledger.due() or ledger.removed_by()
        committed = ledger.waits_for() is not None  # before a restart
        with self._votes_lock:
            if (due or committed) and self._mailroom and not self._deciding:
                self._interruption = Decide()
                self._mailroom.stop(self._interruption)

    def _notice_claims(self) -> None:
        """Logs what neighbours say about this site, once this node has waited for a moment. It changes nothing else."""
        if not any(notices.seconds > _FIRST_NOTICE_S for notices in self._notices.values()):
            return
        status = self.status()
        new = claims.made(status) - self._claimed  # each once, since a neighbour can say it again and again
        self._claimed |= new
        for sentence in claims.sentences(status) if new else ():
            self._log("warning", "a claim about this site", reason=sentence)

    def _notice_divergence(self) -> None:
        """Logs once that another site says that it has diverged. It changes nothing else."""
        for one in self._diverged():
            claim = ("diverged", one["by"], str(one["generation"]))
            if claim not in self._claimed:
                self._claimed.add(claim)
                self._log("warning", "a site says that it has diverged", site=one["by"], reason=claims.diverged(one))

    def _log_votes(self) -> None:
        """Logs who votes for what, once; and that a vote was taken back."""
        generation = self._ledger.mesh.generation
        now = {site: what for what, sites in self._ledger.votes().items() for site in sites}
        before = self._voted if self._voted_in == generation else {}  # else it was decided
        for site in sorted(now.keys() | before.keys()):
            if now.get(site) != before.get(site):
                self._log("warning", "vote", site=site, decision=now.get(site, "takes its vote back"))
        impossible = self._ledger.impossible()
        if impossible and impossible != self._impossible:
            self._log("error", "this site's vote is void; vote for another round at all sites", reason=impossible)
        self._voted, self._voted_in, self._impossible = now, generation, impossible

    def _notice_waiting(self) -> None:
        waiting = dict(self._mailroom.waiting_for) if self._mailroom else {}
        self._notices = {p: self._notices.get(p) or Notices(since) for p, since in waiting.items()}
        for position, notices in self._notices.items():
            name = self._membership.mesh.names[position]
            if notices.due():
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(_by_clock(notices.since)))
                seconds = round(notices.seconds)
                behind = waiting_chain(name, self._waits())[1:]
                whom = {"which_waits_for": ", then ".join(behind)} if behind else self._at_work_there(name)
                self._log("warning", "waiting", site=name, since=since, seconds=seconds, round=self._round, **whom)
            self.stop_if_waited_too_long(notices.seconds, name)
        since = self._mailroom.syncing_since if self._mailroom else None
        if self._disk_notices is None or self._disk_notices.since != since:
            self._disk_notices = None if since is None else Notices(since)
        if self._disk_notices and self._disk_notices.due():
            seconds = round(self._disk_notices.seconds)
            self._log("warning", "this site's disk does not answer; check it", seconds=seconds)

    def _at_work_there(self, site: str) -> dict[str, str]:
        """Returns what a site says of its work that may take long, for the log, if it is at it."""
        activity = (self._bulletin.of(site, "status") or {}).get("activity", "")
        return {"which_is_at": activity} if activity.startswith((LOCAL_TRAINING, _REFERENCES, COMPARING)) else {}

    def _waits(self) -> dict[str, dict[str, float]]:
        """Returns for each site since when it waits for others, as it has announced it."""
        return {site: body["waiting_for"] for site, body in self._bulletin.of_all("status").items()}

    def status(self) -> dict[str, Any]:
        """Returns this node's view of the mesh, the content of status.json."""
        membership, mailroom, names = self._membership, self._mailroom, self._membership.mesh.names
        edges = {names[position]: edge for position, edge in mailroom.view().items()} if mailroom else {}
        waiting = {names[p]: _by_clock(since) for p, since in dict(mailroom.waiting_for).items()} if mailroom else {}
        announced, disk = self._bulletin.of_all("status"), self._disk_notices
        known = {member.name: announced.get(member.name, {}) for member in membership.mesh.present}
        for site, age in self._bulletin.ages("status").items():
            if known.get(site):
                known[site] = known[site] | {"heard_s_ago": age}
        chain = waiting_chain(membership.name, self._waits() | {membership.name: waiting})
        long = any(time.time() - since > _FIRST_NOTICE_S for since in waiting.values())
        rate, left = self._pace.rounds_per_s(), membership.experiment.rounds - self._round
        values = [one["metric"] for one in known.values() if one.get("metric") is not None]
        worst = (min if self._higher_is_better else max)(values, default=None)
        return {
            "time": time.time(),
            "mesh": membership.mesh.name,
            "generation": membership.mesh.generation,
            "removed": list(membership.mesh.removed),
            "site": membership.name,
            "version": fairmesh.__version__,
            "versions": dict(self.versions),
            "clocks": dict(self.clocks),
            "round": self._round,
            "rounds": membership.experiment.rounds,
            "activity": "waiting for its disk" if disk and disk.seconds > _FIRST_NOTICE_S else self.activity,
            "phase": self._phase if self.activity.startswith(f"{self._phase['what']}: ") else None,
            "metric_name": self._measured_by,
            "metric": self._metric.get(self._measured_by),
            "metric_round": self._metric.get("round"),
            "weight": self._weight,
            "lambda": self._measurements.weights(),
            "prior": self.prior,
            "unusual": self.unusual,
            "unaccepted": self.unaccepted,
            "heavy": self._heavy,
            "waiting_for": waiting,
            "waiting_chain": chain,
            "paused_for": chain[1:] if long else [],
            "rounds_per_s": rate,
            "seconds_left": left / rate if rate and not long else None,
            "bytes_out": sum(edge["bytes_out"] for edge in edges.values()),
            "network_ms": mailroom.median_ms() if mailroom else None,
            "edges": edges,
            "refusing": self._refusing(),
            "ignored": self._aside.view(),
            "state_lost": self._state_lost(),
            "diverged": self._diverged(),
            "votes": self._ledger.votes(),
            "keys": self._keys.view(),
            "certificate_days": self.certificate_days(),
            "worst": worst,  # over the sites that have announced a value, each of a recent round
            "mean": sum(value / len(values) for value in values) if values else None,  # does not overflow
            "sites": known,
        }
