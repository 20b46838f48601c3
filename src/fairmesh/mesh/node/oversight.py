"""Watches a node once per second while it trains: its status, whom it waits for, and whether it must stop."""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import fairmesh
from fairmesh.errors import BadInput, Diverged, FairmeshError, Interrupted
from fairmesh.evidence import Share
from fairmesh.mesh.announcements import KINDS, TOLD
from fairmesh.mesh.enrol.certificates import SOON_DAYS, valid_until
from fairmesh.mesh.fields import EPSILON, shortened
from fairmesh.mesh.node import claims, divergence, life
from fairmesh.mesh.node.measurements import Contradiction
from fairmesh.mesh.node.membership import Membership
from fairmesh.mesh.node.now import is_away
from fairmesh.mesh.node.store import landmarks_in
from fairmesh.mesh.node.watching import Cadence, Monitor, Waiting, waiting_chain, write_status
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.problems.local_work import Activity
from fairmesh.problems.prepared import Prepared
from fairmesh.training.loop import TrainingState
from fairmesh.training.observers import Observer
from fairmesh.training.rounds_per_second import Pace

if TYPE_CHECKING:
    from fairmesh.mesh.node.node import Node

_TICK_S = 1.0
_NEWS_BYTES, _NEWS_SHARE = 60, 0.12  # per round and edge, or of the payload: of the 100 and 0.2 that all news may take
_NEWS_BYTES_PER_S = 10.0  # and so much outside the rounds
_SHORT_WAIT_S = 2.0  # such waits are part of every round
_FIRST_NOTICE_S, _LONGEST_NOTICE_S = 5.0, 600.0
_REFUSING_S = 60.0  # between two announcements of refusals of the same sites
_MOST = 0.5  # of lambda: a site is heavy with more than this, and more than
_TIMES_PRIOR = 2.0  # times its share before training, for
_SHARE_OF_ROUNDS = 0.05  # of the run without a measurement in between that says otherwise
_Seen = TypeVar("_Seen")


class Decide(FairmeshError):
    """A decision of the sites is due: training stops until it is made."""


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


class Repetition:
    """Whether the rounds that a site announces have fallen back, as after a restart, and grow again."""

    def __init__(self):
        self._last, self._highest, self._grew_at = -1, -1, -math.inf

    def grew_s_ago(self, done: int) -> float | None:
        """Takes the newest round, and returns how many seconds ago it has grown last, if the site is below the highest
        round that it has announced."""
        self._grew_at = time.monotonic() if done > self._last else -math.inf if done < self._last else self._grew_at
        self._last, self._highest = done, max(self._highest, done)
        since = time.monotonic() - self._grew_at
        return since if done < self._highest and math.isfinite(since) else None


class WeightWatch:
    """Says which sites have had more than half of lambda, and more than twice their share before training, for at
    least 5 % of the rounds."""

    def __init__(self, rounds: int):
        self._rounds = rounds
        self._since: dict[str, int] = {}  # the round in which it was first measured so

    def heavy(self, sites: Mapping[str, Mapping[str, Any]], prior: Mapping[str, float]) -> dict[str, dict[str, Any]]:
        """Takes what sites have announced, and returns for each heavy site its weight, its share before training, and
        the rounds since when and up to which this was measured."""
        found = {}
        # Weights by a shadow price sum to one only once the price has settled; until then all of them may be large.
        total = max(1.0, sum(told.get("weight") or 0.0 for told in sites.values()))
        for site, told in sites.items():
            weight, measured, share = told.get("weight"), told.get("metric_round"), prior.get(site)
            weight = None if weight is None else weight / total
            if weight is None or measured is None or share is None or weight <= max(_MOST, _TIMES_PRIOR * share):
                self._since.pop(site, None)
                continue
            since = min(self._since.setdefault(site, int(measured)), int(measured))  # after going back to a round
            self._since[site] = since
            if measured - since >= _SHARE_OF_ROUNDS * self._rounds:
                found[site] = {"weight": weight, "prior": share, "since": since, "round": int(measured)}
        return found


class Oversight(Observer):
    """Collects the status of this node while it trains, and stops it on request, after a timeout, or after a vote."""

    def __init__(self, node: "Node", alone: Prepared, patience_s: float, monitor: Monitor | None):
        self._node, self._patience_s, self._monitor = node, patience_s, monitor
        self._bulletin, self._ledger, self._log, self._folder = node.bulletin, node.ledger, node.log, node.folder
        self._life = node.life
        self._ends = valid_until(node.membership.credentials.certificate)
        self._mailroom: Mailroom | None = None
        self.stopping: FairmeshError | None = None
        self._asked_to_stop = False  # by a person or the system
        self._interruption: FairmeshError | None = None  # of the rounds of this generation
        self._deciding, self._votes_lock = False, threading.Lock()
        self._round, self._pace = 0, Pace()
        self.prior: dict[str, float] = {}  # of each site, once all have announced their samples
        self.unusual: dict[str, list[str]] = {}  # sites whose inputs look different, and how
        self.unaccepted: list[str] = []  # those of them for which this node waits until a person accepts them
        self._weights, self._heavy = WeightWatch(node.membership.experiment.rounds), dict[str, dict[str, Any]]()
        self._metric: dict[str, Any] = {}
        self._voted, self._voted_in = dict[str, str](), 1  # what each site has voted for in a generation
        self._measured_by, self._unit, self._weight = alone.primary, alone.unit(), None
        self._higher_is_better = alone.higher_is_better(alone.primary)
        self._notices: dict[str, Notices] = {}  # by site
        self.versions: dict[str, str] = {}  # of fairmesh, by neighbour
        self.clocks: dict[str, float] = {}  # seconds ahead of this one, of neighbours whose clocks differ
        self._disk_notices: Notices | None = None  # while the journal is synced
        self._local_since, self._alone = 0.0, Notices()
        self._phase: dict[str, Any] = {"what": ""}  # the last work outside the rounds, with its progress
        self.missing: tuple[list[str], Notices] | None = None  # whose announcements this node waits for, outside them
        self._ended: dict[str, Any] | None = None  # why the node has ended early
        self._cadence = Cadence()
        self.told: Mapping[str, Any] = {}  # of the status, what other sites are told
        self._repetitions = defaultdict[str, Repetition](Repetition)  # of each site, in this generation
        self._taken: dict[tuple[str, str], tuple[Any, bool]] = {}  # whether refused messages were accepted here
        self._next_warning = self._refusing_at = -1e9

    @property
    def _membership(self) -> Membership:
        return self._node.membership

    def _by_site(self, look: Callable[[Mailroom], Mapping[int, _Seen]]) -> dict[str, _Seen]:
        """Returns what the mailroom knows of neighbours, by name instead of position; nothing before it is open."""
        known = dict(look(self._mailroom)) if self._mailroom else {}
        return {self._membership.mesh.names[position]: known[position] for position in sorted(known)}

    def oversee(self, mailroom: Mailroom) -> None:
        """Watches the messages of this generation from now on."""
        with self._votes_lock:
            self._mailroom, self._deciding, self._interruption = mailroom, False, None
            self._repetitions = defaultdict[str, Repetition](Repetition)
        if self.stopping:
            mailroom.stop(self.stopping)

    def deciding(self) -> None:
        """Is called when the node itself takes part in a decision, so that votes need not stop it."""
        with self._votes_lock:
            self._deciding, self._interruption = True, None
            if self._mailroom is not None and not self.stopping:
                self._mailroom.resume()

    # Stopping

    def request_stop(self, reason: str = "") -> None:
        self._asked_to_stop = True
        because = f": {reason}" if reason else ""
        self._end(Interrupted(f"stopped after round {self._round}{because}; start the node again to continue"))

    def stop_if_waited_too_long(self, seconds: float, whom: str) -> None:
        if seconds > self._patience_s:
            waited = f"waited {seconds:.0f} s for {whom}, longer than --patience"
            self._end(Interrupted(f"{waited}; start the node again to continue"))

    def _end(self, reason: FairmeshError) -> None:
        self.stopping = self.stopping or reason
        if self._mailroom is not None:
            self._mailroom.stop(self.stopping)

    def raise_if_deciding(self) -> None:
        if self._interruption:
            raise self._interruption

    def raise_if_stopped(self) -> None:
        if self.stopping:
            raise self.stopping
        self.raise_if_deciding()

    # Watching the rounds

    def after_round(self, round: int, state: TrainingState) -> None:
        self._round = round

    def measured(self, values: dict[str, Any], weight: float | None) -> None:
        # A metric that is not defined here, or a site without test data, has no value.
        self._metric = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._weight = weight
        self._log("info", "measured", **self._metric)

    def metric_failed(self, name: str, error: BadInput) -> None:
        what = "a metric failed; it has no value at this site"
        self._node.aside.once((what, name), "error", what, metric=name, reason=str(error))

    def works_locally(self, activity: Activity | None) -> None:
        if activity is None:
            self._life.resume()
            self._log("info", "local training finished", seconds=round(time.monotonic() - self._local_since, 3))
            return
        self._local_since = time.monotonic()
        self._life.interrupt(life.LOCAL_TRAINING, str(activity))
        self._log("info", life.LOCAL_TRAINING, round=activity.round)

    def works_alone(self, what: str, done: int, of: int) -> None:
        """Shows how far work of this site alone is, and raises if the node must stop."""
        if self._phase["what"] != what or done < self._phase["done"]:
            self._alone = Notices()
            self._log("info", what, rounds=of, **({"continued_at": done} if done else {}))
        self._phase = {"what": what, "done": done, "of": of}
        self._life.interrupt(what, f"{done:,} of {of:,} rounds")
        if done == of or self._alone.due():
            self._log("info", what, done=done, of=of, seconds=round(self._alone.seconds, 1))
        try:
            self.raise_if_stopped()
        except FairmeshError:
            self._log("info", "interrupted; it continues there when it is needed again", work=what, done=done, of=of)
            raise
        if done == of:
            self._life.resume()

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
                    self._node.traffic.keep,
                    self._announce_refusals,
                    self._answer_refusals,
                    self._notice_contradictions,
                    self._notice_weights,
                    self._notice_claims,
                    self._notice_divergence,
                ):
                    self._node.aside.tried(f"the watch ({part.__name__})", part, None)

        thread = threading.Thread(target=watch, name="watch", daemon=True)
        thread.start()
        try:
            yield
        except FairmeshError as error:
            self._life.enter(life.STOPPED)
            self._ended = {"reason": str(error), "diverged": isinstance(error, Diverged)}
            level = "error" if not isinstance(error, Interrupted) else "info" if self._asked_to_stop else "warning"
            self._log(level, "stopped", reason=str(error))
            raise
        finally:
            over.set()
            thread.join()
            self._node.aside.tried("the status", lambda: write_status(self._folder, self.status()), None)
            self._node.aside.tried("the count of bytes", self._node.traffic.keep, None)

    def _show(self) -> None:
        status = self.status()
        self._pace.note(self._round, bool(status["paused_for"]) or self._life.state not in life.AT_WORK)
        self._node.measurements.exchange()
        self._announce(status)
        write_status(self._folder, status)
        if self._monitor:
            self._monitor.show(status)

    def _announce(self, status: Mapping[str, Any]) -> None:
        """Tells the other sites about this one, in proportion to what is new."""
        waits = {site for site, since in status["waiting_for"].items() if status["time"] - since > _SHORT_WAIT_S}
        doing = life.SLOW_DISK if status["activity"] == life.SLOW_DISK else self._life.state
        matters = doing, waits, status["metric_round"], status["metric"], status["generation"]
        sent, messages = (sum(edge[of] for edge in status["edges"].values()) for of in ("bytes_out", "messages_out"))
        per_round = max(_NEWS_BYTES, _NEWS_SHARE * sent / max(messages, 1))
        rate, rest = status["rounds_per_s"], (status["round"], status["activity"])
        budget = per_round * rate if rate else _NEWS_BYTES_PER_S
        again_s = self._cadence.due(matters, rest, len(self._membership.mesh.present), budget)
        if again_s is None:
            return
        waiting = {site: round(since, 1) for site, since in status["waiting_for"].items()}
        times = {"waiting_for": waiting, "time": round(status["time"], 1), "again_s": round(again_s)}
        self.told = {**status, **times}
        for kind, told in TOLD.items():
            of_node = told(self._node)
            self._bulletin.announce(kind, {field: of_node[field] for field in KINDS[kind].fields})

    def _announce_refusals(self) -> None:
        """Tells all sites whose messages this node refuses, and why."""
        refusals = self._by_site(Mailroom.refusals)
        now = {
            site: {"reason": shortened(one.reason), "since": one.since, "step": one.step, "digest": one.digest}
            for site, one in refusals.items()
        }
        before = self._bulletin.of(self._membership.name, "refusing").get("sites", {})
        if now == before or (now.keys() == before.keys() and time.monotonic() - self._refusing_at < _REFUSING_S):
            return
        self._refusing_at = time.monotonic()
        self._bulletin.announce("refusing", {"sites": now})
        for site in now.keys() - before.keys():
            self._log("warning", "refuses a site's messages; told to all sites", site=site, reason=now[site]["reason"])

    def _answer_refusals(self) -> None:
        """Tells all sites whether this node has sent the messages of its own that others say that they refuse."""
        own, mesh, answers = self._membership.name, self._membership.mesh, dict[str, Any]()
        for by, body in self._bulletin.of_all("refusing").items():
            refused, named = body["sites"].get(own, {}), by in self._membership.names and by != own
            if named and self._mailroom and refused.get("digest") and refused["step"] is not None:
                sent = self._mailroom.has_sent(mesh.position(by), refused["step"], refused["digest"])
                answers |= {} if sent is None else {by: {"digest": refused["digest"], "sent": sent}}
        if answers or self._bulletin.of(own, "answers"):
            self._node.say("answers", {"refused": answers})

    def _refusing(self) -> list[dict[str, Any]]:
        """Returns which sites refuse messages of which, as they announced it, with counts where it is this one, and
        whether the other end says that it has sent the refused message (`sent`); None if it has not said."""
        own, present = self._membership.name, self._membership.names
        found = [{"by": own, "site": site, **vars(one)} for site, one in self._by_site(Mailroom.refusals).items()]
        for by, body in sorted(self._bulletin.of_all("refusing").items()):
            if by != own and by in present:
                found += [{"by": by, "site": site, **why} for site, why in body["sites"].items() if site in present]
        for refusal in found:
            answer = self._bulletin.of(refusal["site"], "answers").get("refused", {}).get(refusal["by"], {})
            said = bool(refusal["digest"]) and answer.get("digest") == refusal["digest"]
            refusal["sent"] = answer["sent"] if said else None
            refusal["taken_here"] = self._has_taken(refusal)
        return found

    def _has_taken(self, refusal: Mapping[str, Any]) -> bool:
        """Returns whether this node has accepted the message that another site refuses: all neighbours get the same."""
        about = refusal["site"], refusal["step"], refusal["digest"]
        if self._mailroom is None or None in about:
            return False
        edge = refusal["by"], refusal["site"]
        if self._taken.get(edge, (None,))[0] != about:  # messages may be large, and this is asked every second
            taken = self._mailroom.has_taken(self._membership.mesh.position(about[0]), *about[1:])
            self._taken[edge] = (None if taken is None else about), bool(taken)
        return self._taken[edge][1]

    def _contradicted(self) -> list[dict[str, Any]]:
        """Returns which sites have sent or signed two different things, as this node has found, or as others say. Of
        the latter it says what this node knows: the hash that the blamed site has signed here (`signed_here`), and
        whether what came from it fits that (`agrees_here`)."""
        own, mesh, measurements = self._membership.name, self._membership.mesh, self._node.measurements
        mine = {site: one._asdict() for site, one in sorted(dict(measurements.contradicted).items())}
        found = [{"by": own, "site": site, "kept": self._kept_before(one), **one} for site, one in mine.items()]
        for by, body in sorted(self._bulletin.of_all("contradicted").items()):
            if by == own or by not in self._membership.names or body["generation"] != mesh.generation:
                continue
            for site, one in sorted(body["sites"].items()):
                done = one["round"]
                here = {
                    "signed_here": measurements.signed_by(site, done),
                    "agrees_here": measurements.agrees_with(site, done),
                }
                found.append({"by": by, "site": site, **one, "kept": self._kept_before(one), **here})
        return found

    def _kept_before(self, contradiction: Mapping[str, Any]) -> list[int]:
        """Returns the rounds from before a contradiction to which this node can go back."""
        kept = landmarks_in(self._folder, self._membership.mesh.generation)
        return [done for done in kept if done <= contradiction["since"]]

    def _notice_contradictions(self) -> None:
        """Tells all sites who has sent this one other messages than it has signed, and logs that once, and what others
        say about this. It changes nothing else."""
        own, generation = self._membership.name, self._membership.mesh.generation
        found = self._contradicted()
        mine = {one["site"]: {key: one[key] for key in Contradiction._fields} for one in found if one["by"] == own}
        if mine or self._bulletin.of(own, "contradicted"):
            self._node.say("contradicted", {"generation": generation, "sites": mine})
        for site in self._node.measurements.unsigned():
            what = "a site signs no hash of its messages"
            self._node.aside.once((what, site, generation), "warning", what, site=site, reason=claims.unsigned(site))
        for one in found:
            seen = one["by"] == own
            what = "a site contradicts itself" if seen else "a site says that another contradicts itself"
            about = what, one["by"], one["site"], one["both"], generation
            who = {"site": one["site"], "by": one["by"]}
            self._node.aside.once(about, "warning", what, **who, reason=claims.contradicted(one, own))

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
        present = {name: announced[name] for name in self._membership.names if name in announced}
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
            forgotten = "this site has forgotten what it had agreed to with the others"
            self._end(BadInput(f"{forgotten}. {claims.HOW_TO_RESTORE}"))
        due = ledger.due() or ledger.removed_by()
        with self._votes_lock:
            if (due or ledger.is_committed) and self._mailroom and not self._deciding:
                self._interruption = Decide("the sites decide")
                self._mailroom.stop(self._interruption)

    def _notice_claims(self) -> None:
        """Logs what neighbours say about this site, once this node has waited for a moment. It changes nothing else."""
        if any(notices.seconds > _FIRST_NOTICE_S for notices in self._notices.values()):
            for claim, sentence in claims.sentences(self.status()).items():
                self._node.aside.once(claim, "warning", "a claim about this site", reason=sentence)

    def _notice_divergence(self) -> None:
        """Logs once that another site says that it has diverged. It changes nothing else."""
        for claim in self._diverged():
            what, site = "a site says that it has diverged", claim["by"]
            about = what, site, claim["generation"]
            self._node.aside.once(about, "warning", what, site=site, reason=claims.diverged(claim))

    def _log_votes(self) -> None:
        """Logs who votes for what, once; and that a vote was taken back."""
        generation = self._ledger.mesh.generation
        now = {site: what for what, sites in self._ledger.votes().items() for site in sites}
        before = self._voted if self._voted_in == generation else {}  # else it was decided
        for site in sorted(now.keys() | before.keys()):
            if now.get(site) != before.get(site):
                self._log("warning", "vote", site=site, decision=now.get(site, "takes its vote back"))
        self._voted, self._voted_in = now, generation
        impossible, what = self._ledger.impossible(), "this site's vote is void; vote for another round at all sites"
        if impossible:
            self._node.aside.once((what, generation, impossible), "error", what, reason=impossible)

    def _notice_waiting(self) -> None:
        waiting = self._by_site(lambda mailroom: mailroom.waiting_for)
        self._notices = {site: self._notices.get(site) or Notices(since) for site, since in waiting.items()}
        for name, notices in self._notices.items():
            if notices.due():
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - notices.seconds))
                seconds = round(notices.seconds)
                behind = self._waiting(name)
                whom = {"which_waits_for": ", then ".join(behind.chain[1:])} if behind.chain[1:] else {}
                whom |= {"unconfirmed": behind.says} if behind.says else {}
                whom = whom or self._at_work_there(name)
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
        activity = self._bulletin.of(site, "status").get("activity", "")
        state = life.state_in(activity)
        return {"which_is_at": activity} if state and life.STATES[state].may_take_long else {}

    def _waiting(self, site: str, **own: Any) -> Waiting:
        """Returns the chain of waits from a site on, by what sites have announced, and by this one's own waits."""
        name = self._membership.name
        told = self._bulletin.of_all("status") | ({name: own} if own else {})
        return waiting_chain(site, told, name, self._away())

    def _away(self) -> set[str]:
        """Returns the sites whose last announcement may not be so any more: neighbours that are not connected, and
        sites that are silent."""
        own, seen = self._membership.name, {"sites": self._told_by_sites(), "edges": self._by_site(Mailroom.view)}
        return {name for name, told in seen["sites"].items() if told and name != own and is_away(name, seen)}

    def _interval(self, site: str, value: float | None) -> tuple[float, float] | None:
        """Returns the interval of a site's accuracy, a share of the test rows of which it has told how many there are.
        Of other metrics, of rows that belong to units, and of values with noise it is not known."""
        if value is None or self._measured_by != "accuracy" or self._membership.experiment.privacy is not None:
            return None
        facts = self._node.facts.get(site, {})
        known = facts.get("unit") == "row" and facts["test"] and 0 <= value <= 1
        return Share(value, facts["test"]).interval() if known else None

    def _told_by_sites(self) -> dict[str, dict[str, Any]]:
        """Returns what each present site has told last, and how many seconds ago; nothing of one that is not known."""
        ages, told = self._bulletin.ages("status"), {}
        for site in self._membership.names:
            status = self._bulletin.of(site, "status")
            told[site] = {"heard_s_ago": ages[site]} | status if status and site in ages else {}
            if told[site]:
                told[site]["repeats_s_ago"] = self._repetitions[site].grew_s_ago(status["round"])
            for kind in TOLD if told[site] else ():
                told[site] |= self._bulletin.of(site, kind)
        return told

    def _privacy(self) -> dict[str, Any] | None:
        """Returns what this site has spent by its last measurement, of what budget, and what others say; None without
        privacy."""
        privacy = self._membership.experiment.privacy
        if privacy is None:
            return None
        others = self._node.measurements.epsilons()
        return {
            "epsilon": self._metric.get(EPSILON),
            "budget": privacy.epsilon,
            "delta": privacy.delta,
            "sites": others,
        }

    def _missing(self) -> dict[str, Any] | None:
        """Returns whose announcements the node waits for outside the rounds, and for how many seconds."""
        missing = self.missing
        return None if missing is None else {"sites": missing[0], "seconds": missing[1].seconds}

    def _state_lost(self) -> list[dict[str, Any]]:
        claims = self._by_site(Mailroom.state_lost)
        return [{"by": by, "reason": shortened(claim.reason), "since": claim.since} for by, claim in claims.items()]

    def status(self) -> dict[str, Any]:
        """Returns this node's view of the mesh, the content of status.json."""
        membership, edges = self._membership, self._by_site(Mailroom.view)
        waits, clock = self._by_site(lambda mailroom: mailroom.waiting_for), time.time() - time.monotonic()
        waiting = {site: clock + since for site, since in waits.items()}
        slow_disk = self._disk_notices is not None and self._disk_notices.seconds > _FIRST_NOTICE_S
        chain, says = self._waiting(membership.name, round=self._round, waiting_for=waiting)
        long = any(time.time() - since > _FIRST_NOTICE_S for since in waiting.values())
        rate, left = self._pace.rounds_per_s(), membership.experiment.rounds - self._round
        status = {
            "time": time.time(),
            "mesh": membership.mesh.name,
            "generation": membership.mesh.generation,
            "removed": list(membership.mesh.removed),
            "graph": [list(edge) for edge in membership.mesh.edges],
            "site": membership.name,
            "engine": membership.site.engine,
            "version": fairmesh.__version__,
            "versions": dict(self.versions),
            "clocks": dict(self.clocks),
            "round": self._round,
            "rounds": membership.experiment.rounds,
            "rounds_sent": self._mailroom.rounds_sent() if self._mailroom else 0,
            "activity": life.SLOW_DISK if slow_disk else self._life.activity,
            "phase": self._phase if self._life.state == self._phase["what"] and self._life.detail else None,
            "missing": self._missing(),
            "ended": self._ended,
            "metric_name": self._measured_by,
            "unit": {"share": self._unit.share, "unit": self._unit.unit},
            "higher_is_better": self._higher_is_better,
            "metric": self._metric.get(self._measured_by),
            "metric_round": self._metric.get("round"),
            "weight": self._weight,
            "privacy": self._privacy(),
            "lambda": self._node.measurements.weights(),
            "prior": self.prior,
            "unusual": self.unusual,
            "unaccepted": self.unaccepted,
            "heavy": self._heavy,
            "waiting_for": waiting,
            "waiting_chain": chain,
            "unconfirmed_wait": says if long else "",  # reports of different moments differ for a moment
            "paused_for": chain[1:] if long else [],
            "rounds_per_s": rate,
            "seconds_left": left / rate if rate and not long else None,
            "bytes_out": self._node.traffic.total("bytes_out"),
            "wire_out": self._node.traffic.total("wire_out"),
            "network_ms": self._mailroom.median_ms() if self._mailroom else None,
            "edges": edges,
            "refusing": self._refusing(),
            "ignored": self._node.aside.view(),
            "state_lost": self._state_lost(),
            "diverged": self._diverged(),
            "contradicted": self._contradicted(),
            "unsigned": self._node.measurements.unsigned(),
            "votes": self._ledger.votes(),
            "keys": self._node.keys.view(),
            "certificate_days": self.certificate_days(),
        }
        return status | self._over_sites(with_newest(self._told_by_sites(), status))

    def _over_sites(self, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Returns what each site has told last, with the interval of its metric, and the worst and the mean of all."""
        for site, told in known.items():
            told |= {"interval": self._interval(site, told["metric"])} if told else {}
        values = [one["metric"] for one in known.values() if one.get("metric") is not None]
        return {
            "worst": (min if self._higher_is_better else max)(values, default=None),  # each of a recent round
            "mean": sum(value / len(values) for value in values) if values else None,  # does not overflow
            "sites": known,
        }


def with_newest(known: dict[str, dict[str, Any]], status: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns what each site has told last, where this site has told what its status says now: what it has announced is
    older, since it announces its rounds rarely."""
    if known.get(status["site"]):
        newest = {field: status[field] for field in KINDS["status"].fields if field in status}
        known[status["site"]] |= newest | {"heard_s_ago": 0.0}
    return known
