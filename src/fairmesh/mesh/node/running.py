"""The life of a node: it connects to the others, does its rounds, computes the average of all sites, and ends."""

import hashlib
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fairmesh
from fairmesh.algorithms.schedules import with_run_length
from fairmesh.errors import BadInput, Diverged
from fairmesh.mesh.agreement import COMPATIBILITY, version_in
from fairmesh.mesh.approval import approved_at
from fairmesh.mesh.certificates import fingerprint
from fairmesh.mesh.known_keys import KnownKeys
from fairmesh.mesh.members import Mesh
from fairmesh.mesh.node import divergence, leaving, machine
from fairmesh.mesh.node.data_consent import unaccepted
from fairmesh.mesh.node.decisions import Begun, Certificate, Claim, Commit, Lie
from fairmesh.mesh.node.ending import (
    Announced,
    compare_with_neighbours,
    sums_of,
    undefined_metrics,
    wait_for_all_to_end,
    write_personal,
    write_progress,
    write_result,
)
from fairmesh.mesh.node.ledger import Ledger, Removed, in_words
from fairmesh.mesh.node.machine import pinned
from fairmesh.mesh.node.measurements import Measurements, Schedule
from fairmesh.mesh.node.membership import (
    Membership,
    common_problem,
    facts,
    freeze_facts,
    frozen_facts,
    misfit,
    outputs_allowed,
    own_data,
    refuse_many_outputs,
    too_heavy,
)
from fairmesh.mesh.node.oversight import Decide, Notices, Oversight
from fairmesh.mesh.node.rounds import Rounds, branch_of, identity_of, restoring_step
from fairmesh.mesh.node.site_statistics import WITHHELD, statistics, unusual
from fairmesh.mesh.node.start import Start
from fairmesh.mesh.node.store import (
    FINISHED,
    PROGRESS,
    Store,
    folder_of,
    forget_run,
    landmarks_in,
    locked,
    put_aside,
    put_in_place,
)
from fairmesh.mesh.node.watching import Log, Monitor
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.mesh.wire.journal import Journal
from fairmesh.mesh.wire.links import Links
from fairmesh.mesh.wire.log_limiter import LogLimiter
from fairmesh.mesh.wire.mailroom import Mailroom, Observe
from fairmesh.mesh.wire.transport import FIRST_ROUND
from fairmesh.problems.problem import Problem
from fairmesh.storage.files import private_files, write_atomically
from fairmesh.training.loop import TrainingState, what_to_lower

PERSONAL = "personal"  # the folder of the site's own model
_ACTIVITY = 200  # characters
_NOTICED_S = 2.0  # so that the others have heard what this site announced, before it stops because of it
_TELLING_S = 15.0  # wait until all sites know that the numbers of one have diverged
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
        result, finished = state / "result", state / FINISHED
        if finished.exists():
            forget_run(state)  # a crash may have cut this short
            return result
        log = Log(state, stream)
        _log_start(membership, log)
        if public_draws:
            log("warning", "random draws are public, so neighbours can solve for the training rows; for tests only")
        if membership.not_measured:
            log(
                "warning",
                "options that only simulations measure are ignored",
                options=", ".join(membership.not_measured),
            )
        monitor = None if monitor_port is None else Monitor(monitor_port)
        with closing(log), pinned(membership.experiment.options):
            node = _Node(membership, own_data(membership), log, patience_s, monitor, observe)
            with _stop_requests(node.oversight.request_stop), node.oversight.watching():
                node.run()
        write_atomically(finished, b"")
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


class _Node:
    """The node of one site: its links and its rounds, over all generations of the mesh."""

    def __init__(
        self,
        membership: Membership,
        alone: Problem,  # of this site
        log: Log,
        patience_s: float | None,
        monitor: Monitor | None,
        observe: Observe,
    ):
        (own,) = alone.sites
        self._membership, self._own, self._log, self._observe = membership, own, log, observe
        self._folder, self._limiter = membership.site.state, LogLimiter(log)
        given = membership.credentials
        self._keys = KnownKeys(self._folder, log)
        names, trusted, outputs = membership.mesh.names, self._keys.refusal, outputs_allowed(membership.experiment)
        self._bulletin = Bulletin(
            membership.name, given.key, given.certificate, given.authority, names, trusted, outputs
        )
        self._bulletin.restored(self._folder / "bulletin.json")
        said = facts(own)
        refuse_many_outputs(said, membership.experiment)
        self._digest = alone.digests_here()[0]
        self._facts = self._frozen_facts(said)
        self._machine = machine.machine(membership.experiment.options)
        self._machines = machine.Machines(self._folder, self._machine)
        log("info", "machine", **self._machine)
        self._rounds: Rounds | None = None
        self._process = os.urandom(8).hex()  # tells this start of the node from others
        self._ledger = Ledger(self._folder, Mesh.read(membership.site.mesh), membership.name, self._bulletin)
        self._measurements = Measurements(self._folder, membership.name, self._bulletin, log)
        self.oversight = Oversight(
            membership, self._bulletin, self._ledger, self._keys, self._measurements, log, patience_s, monitor, observe
        )
        self.oversight.expect(alone)

    def run(self) -> None:
        """Continues the run to its end."""
        ledger = self._ledger
        if not ledger.begun and not ledger.awaits_restoring:
            ledger.begin(0)
        deciding = ledger.pending
        if deciding and ledger.begun:
            self._membership = self._in_generation(ledger.begun[-1].generation)
        while True:
            try:
                if not ledger.begun and not deciding:
                    self._await_restoring()
                if deciding:
                    self._decide()
                    deciding = False
                if ledger.begun:
                    self._generation()
                    return
            except Decide:
                deciding = True
            except divergence.SiteDiverged as error:
                self._after_divergence(error)
                deciding = True

    def _in_generation(self, generation: int) -> Membership:
        return replace(self._membership, mesh=self._ledger.mesh_in(generation))

    def _generation(self) -> None:
        """Continues the run to its end, within one generation of the mesh."""
        membership, oversight = self._membership, self.oversight
        diverged = divergence.told(self._bulletin, membership.mesh)
        self._ledger.vote()
        if diverged and self._ledger.without_vote() is None:  # else it must compute again how far it had come
            raise diverged[0]
        store = Store(self._folder, membership.mesh.generation, self._log)
        done, self._rounds = store.newest or 0, None
        first = done + FIRST_ROUND if done else 0
        owed = self._to_restore() if done and done == self._ledger.begun[-1].start else []
        with self._opened(first) as mailroom:
            for position in owed:
                mailroom.owe(position, restoring_step(done))
            self._machines.begin(membership.mesh.generation, first)
            if mailroom.other_machine is not None:
                said = "this machine differs from before; messages that were sent stay as they are"
                self._log("warning", said, difference=mailroom.other_machine)
            if self._facts is None:
                with self._linked(mailroom, only_news=True):
                    oversight.activity = "connecting"
                    self._facts = self._agreed_facts()
            self._announce_ready(self._facts)  # for a site that has not begun yet
            problem = self._problem(membership)
            self._show_prior(problem)
            self._compare_sites()
            start = self._start_of(problem, membership)
            mailroom.largest = start.largest() + _largest(problem.flat_model.dim, problem.n)
            mailroom.rounds = range(FIRST_ROUND, FIRST_ROUND + membership.experiment.rounds)
            with self._linked(mailroom) as links:
                if not done:
                    oversight.activity = "agreeing on the model to start from"
                    neighbours = [one.position for one in membership.neighbours]
                    start.agree(mailroom, branch_of(membership), neighbours, membership.present)
                    problem = self._problem(membership)
                self._enter(problem, store)
                self._rounds = Rounds(
                    membership,
                    problem,
                    mailroom,
                    store,
                    oversight,
                    lambda: self._ledger.pinned,
                    self._measurements,
                    self._ledger.somebody_goes_back,
                )
                oversight.heeds_divergence = True
                if owed:
                    self._rounds.share(done, owed, start)
                self._rounds.train(done)
                oversight.activity = "summing up"
                result = self._folder / "result"
                if not result.exists():
                    oversight.activity = "waiting for the metrics of all"
                    table = self._measurements
                    self._wait(lambda: not table.open_questions(), table.open_questions)
                    oversight.activity = "summing up"
                    unconfirmed = self._folder / f"unconfirmed-{membership.mesh.generation}"
                    write_result(membership, self._rounds, mailroom, table, unconfirmed)
                    self._confirm(unconfirmed, sums_of(membership, self._rounds, mailroom).source)
                    oversight.reached("result confirmed", membership.experiment.rounds)
                    put_in_place(unconfirmed, result)
                    self._log_undefined(result)
                oversight.heeds_divergence = False
                compare_with_neighbours(membership, self._rounds, mailroom, result)
                if membership.experiment.personalization is not None:
                    oversight.activity = "choosing the site's own model"
                write_personal(membership, self._rounds, result, self._folder / PERSONAL, oversight.raise_if_stopped)
                oversight.reached("result written", membership.experiment.rounds)
                oversight.activity = "waiting until all have the result"
                wait_for_all_to_end(membership, self._rounds, mailroom)
                oversight.activity = "finished"
                self._log("info", "finished", rounds=membership.experiment.rounds, folder="result")
                self._part(links, mailroom)
                self._ledger.forget_earlier()

    def _enter(self, problem: Problem, store: Store) -> None:
        """Begins or continues what all sites measure in this generation."""
        membership, experiment = self._membership, self._membership.experiment
        options = experiment.options
        since = self._ledger.measured_since()
        schedule = Schedule(
            experiment.rounds,
            options.measure_every,
            options.best_by,
            options.best_smoothing,
            experiment.seeds[0],
            since,
        )
        names = [member.name for member in membership.mesh.present]
        start = self._ledger.begun[-1].start
        progress = self._folder / PROGRESS
        self._measurements.after_record = lambda records: write_progress(membership, problem, records, progress)
        self._measurements.enter(
            membership.mesh.generation, start, schedule, problem, names, lambda: tuple(store.landmarks)
        )

    @contextmanager
    def _opened(self, first: int) -> Iterator[Mailroom]:
        """Opens the mailroom over the journal of this generation."""
        journal = Journal(folder_of(self._folder, self._membership.mesh.generation), self._log)
        mailroom = Mailroom([one.position for one in self._membership.neighbours], journal, first, self._observe)
        mailroom.other_machine = self._machines.difference(self._membership.mesh.generation, first)
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
            lambda: membership.greeting() | {"only_news": only_news, "process": self._process},
            lambda name, theirs: self._check_greeting(name, theirs) and not only_news,
            self._log,
            mailroom.largest,
            self._observe,
            membership.left,
            self._keys.refusal,
        )
        links.start()
        try:
            yield links
        finally:
            links.stop()

    def _show_prior(self, problem: Problem) -> None:
        """Logs and shows the weight of every site before training, and what it declared about its data. Sites that
        declare many samples have much weight, so people should look at this."""
        said, names = self._facts or {}, [member.name for member in self._membership.mesh.present]
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        self._log("info", "the sites' data is agreed", facts=digest, data_and_model=problem.digest())
        self.oversight.prior = dict(zip(names, problem.prior_of_sites.tolist()))
        shown = (f"{name} {self.oversight.prior[name]:.3g} ({said[name]['samples']} samples)" for name in names)
        self._log("info", "prior", sites=", ".join(shown))

    def _compare_sites(self) -> None:
        """Names the sites whose inputs look different from those of the others, in the log and the status."""
        self.oversight.unusual = self._unusual()
        for site, reasons in self.oversight.unusual.items():
            self._log("warning", "a site's data looks different", site=site, reason="; ".join(reasons))

    def _unusual(self) -> dict[str, list[str]]:
        """Returns the present sites whose inputs look different, and how."""
        contract, announced = self._membership.experiment.contract, self._bulletin.of_all("statistics")
        present = [member.name for member in self._membership.mesh.present if member.name in announced]
        columns = contract.columns if contract else ()
        return unusual({name: announced[name] for name in present}, columns)

    def _check_greeting(self, name: str, theirs: Mapping[str, Any]) -> bool:
        self._membership.refuse_unlike(name, theirs)
        apart = self._membership.clock_apart(theirs, time.time())
        if apart is not None:
            self._limiter("warning", "clocks differ", name, f"by {round(apart / 60)} minutes")
        version = version_in(theirs)
        self.oversight.versions[name] = version
        if version != fairmesh.__version__:
            said = f"fairmesh {version} there, {fairmesh.__version__} here; they are compatible"
            self._limiter("info", "versions differ", name, said)
        same = theirs.get("generation") == self._membership.mesh.generation
        return same and theirs.get("only_news") is not True  # it decides, or does not know the data of all sites yet

    def _frozen_facts(self, mine: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns what all sites said about their data when the run began. Before, returns None and announces this
        site's data, which may still be corrected."""
        frozen = frozen_facts(self._folder, self._membership.name, mine, self._digest)
        if frozen is None:
            said = statistics(self._own.train) if self._membership.site.announce_statistics else WITHHELD
            for kind, body in (("statistics", said), ("facts", mine)):
                if self._bulletin.of(self._membership.name, kind) != body:
                    self._bulletin.announce(kind, body)
        return frozen

    def _agreed_facts(self) -> dict[str, Any]:
        """Waits until all sites have announced data that fits together and have seen the same announcements. Then these
        are recorded, and the run begins with them."""
        bulletin, present = self._bulletin, [member.name for member in self._membership.mesh.present]
        shown: list[str] = []
        noticed = Notices()

        def told(what: str, sites: list[str], reason: str) -> list[str]:
            if reason not in shown:
                shown.append(reason)
                self._log("error", what, site=", ".join(sites), reason=reason)
            self.oversight.activity = f"{what}; waiting for {', '.join(sites)}"[:_ACTIVITY]
            return sites

        def missing() -> list[str]:
            announced = bulletin.of_all("facts")
            known = {name: announced[name] for name in present if name in announced}
            unlike = misfit(known)
            self._stop_if_alone(unlike, len(known), noticed)
            if unlike is not None:
                return told("the data of the sites does not fit together", *unlike)
            compared = known.keys() & bulletin.of_all("statistics")
            if len(compared) == len(present):
                heavy = too_heavy(self._membership, known)
                if heavy is not None:
                    return told("a site would have most of the weight before training", *heavy)
                if self._waits_for_consent(shown):
                    return [self._membership.name]
            self.oversight.activity = "connecting"
            if len(compared) < len(present):
                return [name for name in present if name not in compared]
            mine, ready = self._announce_ready(known), bulletin.of_all("ready")
            late = [name for name in present if ready.get(name) != mine]
            if not late:
                found.update(known)
            return late

        found: dict[str, Any] = {}
        self._wait(lambda: not missing(), missing)
        freeze_facts(self._folder, found, self._digest)
        self._remember()
        return found

    def _waits_for_consent(self, shown: list[str]) -> bool:
        """Returns whether some site's data looks different and this site begins only if a person here accepts that.
        Says so once; `shown` has what was said already."""
        site, oversight = self._membership.site, self.oversight
        if site.on_unusual_data != "wait":
            return False
        oversight.unusual = self._unusual()
        before, oversight.unaccepted = oversight.unaccepted, unaccepted(self._folder, oversight.unusual)
        for name in oversight.unaccepted:
            said = "; ".join(oversight.unusual[name])
            if said not in shown:
                shown.append(said)
                how = f"if the data is right, accept it: fairmesh mesh accept {site.path.name} {name}"
                what = "a site's data looks different, and this site waits until somebody here accepts it"
                self._log("error", what, site=name, reason=f"{said}. Ask {name}; {how}")
        for name in before:
            if name not in oversight.unaccepted:
                accepted = name in oversight.unusual
                self._log("info", "accepted here" if accepted else "looks no longer different", site=name)
        if oversight.unaccepted:
            oversight.activity = f"waiting until somebody here accepts the data of {', '.join(oversight.unaccepted)}"[
                :_ACTIVITY
            ]
        return bool(oversight.unaccepted)

    def _stop_if_alone(self, unlike: tuple[list[str], str] | None, known: int, noticed: Notices) -> None:
        """Ends the node if the data of this site has another form than that of most sites. The others wait for it."""
        sites, reason = unlike or ([], "")
        if self._membership.name not in sites or known < len(self._membership.mesh.present) or 2 * len(sites) >= known:
            noticed.since = time.monotonic()
        elif noticed.seconds > _NOTICED_S:
            raise BadInput(f"{reason}. Give this site's data that form, and start the node again; the others wait")

    def _announce_ready(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Announces with which facts about the present sites this node begins."""
        here = {member.name: known[member.name] for member in self._membership.mesh.present}
        body = {"facts": hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()}
        if self._bulletin.of(self._membership.name, "ready") != body:
            self._bulletin.announce("ready", body)
        return body

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
            notices.pause()

    def _confirm(self, unconfirmed: Path, source: str | None) -> None:
        """Waits until all sites have announced the result that this site has. A difference is named; it ends when the
        other site announces another result, or is voted out."""
        mine, told = Announced.read(unconfirmed, self._membership), set[str]()
        mine.announce(self._bulletin, self._membership)
        self.oversight.activity = "waiting for the results of all"

        def open_questions() -> list[str]:
            silent, apart = mine.compared(self._bulletin, self._membership)
            for site, reason in apart.items():
                if site not in told:
                    told.add(site)
                    self.oversight.activity = "results differ; the log says which"
                    sums = "computed by this site" if source is None else f"from {source}"
                    self._log("error", "results differ", site=site, reason=reason, sums=sums, kept=unconfirmed.name)
            return [*silent, *apart]

        self._wait(lambda: not open_questions(), open_questions)

    def _log_undefined(self, result: Path) -> None:
        names = [member.name for member in self._membership.mesh.present]
        for metric, sites in undefined_metrics(result, names).items():
            self._log("warning", "a metric has no value at some sites", metric=metric, sites=", ".join(sites))

    def _part(self, links: Links, mailroom: Mailroom) -> None:
        """Stays until no neighbour needs anything. Then waits for their last messages, but not forever, since these may
        be lost."""
        notices, free_since = Notices(), None
        while not links.all_finished.wait(0.05):
            self.oversight.raise_if_deciding()
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

    def _decide(self) -> None:
        """Takes part in a decision of the sites until training continues: in the next generation or, if a vote is
        taken back before all have committed to it, in this one."""
        ledger, notices = self._ledger, Notices()
        shown: list[str] = []
        with self._opened(0) as mailroom, self._linked(mailroom, only_news=True):
            self.oversight.deciding()
            while True:
                self.oversight.raise_if_stopped()
                ledger.vote()
                self._stop_if_removed()
                moved = self._promise()
                if ledger.pending:
                    whom, why = self._unready()
                    if not whom:
                        break
                else:
                    whom, why = ledger.waits_for(), ""
                    if whom is None:
                        self._log("info", "the vote is off; continuing")
                        return
                notices = Notices() if moved else notices
                if why and why not in shown:
                    shown.append(why)
                    self._log("error", "the sites cannot continue", reason=why)
                if notices.due():
                    self._log("warning", "waiting", sites=", ".join(whom), seconds=round(notices.seconds), reason=why)
                self.oversight.activity = f"deciding; waiting for {', '.join(whom)}"[:_ACTIVITY]
                self.oversight.stop_if_waited_too_long(notices.seconds, ", ".join(whom))
                notices.pause()
        self._begin()

    def _after_divergence(self, error: divergence.SiteDiverged) -> None:
        """Tells all sites, and ends. Returns instead if a decision is due, because this site has voted: a member can
        send numbers that grow until the models of the others explode, and a node that only ended then, at every start,
        could not be heard by the others."""
        membership, bulletin = self._membership, self._bulletin
        mesh = membership.mesh
        self._log("error", "diverged", reason=str(error))
        if membership.name in divergence.unaware(bulletin, mesh):
            bulletin.announce(divergence.KIND, error.body(mesh.generation))
        if self._decision_is_due():
            return
        self.oversight.activity = "diverged; telling the others"
        with self._opened(0) as mailroom, self._linked(mailroom, only_news=True):
            until = time.monotonic() + _TELLING_S
            while divergence.unaware(bulletin, mesh) and time.monotonic() < until and not self.oversight.stopping:
                time.sleep(0.02)
            time.sleep(0.5)  # for last announcements on their way
        self._remember()  # so that the node says the same when it is started again
        algorithm = with_run_length(membership.experiment.algorithm, membership.experiment.rounds)
        advice = what_to_lower(algorithm, self._problem(membership).flat_model.dim)
        kept = landmarks_in(self._folder, mesh.generation)
        found = divergence.told(bulletin, mesh) or [error]
        raise Diverged(divergence.in_words(found, advice, kept)) from error

    def _await_restoring(self) -> None:
        """Waits, without a state, until all have voted to give this site one. Raises Decide then. Takes over what the
        sites have decided before."""
        ledger = self._ledger
        while True:
            self._membership = replace(self._membership, mesh=ledger.mesh)
            with self._opened(0) as mailroom, self._linked(mailroom, only_news=True):
                self.oversight.activity = "waiting for votes to restore this site"
                ledger.vote()
                self._wait(ledger.adopt, lambda: ledger.without_vote() or ["the others"])

    def _to_restore(self) -> list[int]:
        """Returns the positions of the neighbours that have lost their state and get one from this generation's
        start."""
        lost = self._ledger.restored()
        return [one.position for one in self._membership.neighbours if one.name in lost]

    def _restore(self, done: int, membership: Membership) -> None:
        """Writes the first checkpoint of a generation from what the neighbours know of this site."""
        self._membership = membership
        store = Store(self._folder, membership.mesh.generation, self._log)
        if store.newest == done:
            return
        with self._opened(restoring_step(done)) as mailroom:
            self.oversight.activity = "waiting for what the neighbours know of this site"
            if self._facts is None:
                with self._linked(mailroom, only_news=True):
                    self._facts = self._agreed_facts()
            self._announce_ready(self._facts)
            problem = self._problem(membership)
            start = self._start_of(problem, membership)
            mailroom.largest = start.largest() + _largest(problem.flat_model.dim, problem.n)
            mailroom.rounds = range(FIRST_ROUND, FIRST_ROUND + membership.experiment.rounds)
            with self._linked(mailroom):
                Rounds(membership, problem, mailroom, store, self.oversight).restore(done, store, start)
        self._log("warning", "this site's state was restored from its neighbours", round=done)

    def _decision_is_due(self) -> bool:
        """Waits until all have voted as this site has. Returns False if it has not voted, or takes its vote back."""
        ledger = self._ledger
        ledger.vote()
        if ledger.without_vote() is None:
            return False
        with self._opened(0) as mailroom, self._linked(mailroom, only_news=True):
            self.oversight.activity = "waiting for votes"
            try:
                self._wait(lambda: ledger.without_vote() is None, lambda: ledger.without_vote() or [])
            except Decide:
                return True
        return False

    def _stop_if_removed(self) -> None:
        certificate = self._ledger.removed_by()
        if certificate is not None:
            voters = ", ".join(site for site, _ in certificate.ballot.votes)
            raise Removed(
                f"{voters} have all voted to continue without {self._membership.name}, so this node stops; nothing was "
                "changed here. Ask them why, and for a new mesh to join"
            )

    def _promise(self) -> bool:
        """Commits to a ballot or follows a certificate if it is time to. Returns whether it did."""
        ledger = self._ledger
        due = ledger.due()
        if due is None:
            return False
        if isinstance(due, Certificate):
            otherwise = ", ".join(ledger.voted_otherwise_since(due))
            ledger.follow(due)
            self._remember()
            self._observe("followed", 0)
            late = {"voted_otherwise_too_late": otherwise} if otherwise else {}
            self._log("warning", "decided", decision=in_words(due.proposal), **late)
            return True
        claim = self._claim()
        ledger.commit(Commit(due, claim))
        self._remember()
        done = claim.begun[-1].done if claim.begun else None
        self._observe("committed", done or 0)
        self._log("warning", "all have voted", decision=in_words(due.proposal), round=done)
        return True

    def _claim(self) -> Claim:
        """Returns how far this node has come, in every generation whose state it keeps."""
        begun, rounds = self._ledger.begun, self._rounds
        if self._ledger.pending or not begun:  # it has not trained since it said so, or has lost its state
            return Claim(tuple(begun), self._ledger.outputs())
        last = begun[-1]
        store = Store(self._folder, last.generation, self._log)
        done = rounds.done if rounds else store.newest or last.start
        here = Begun(last.generation, last.start, store.oldest(last.start), done)
        return Claim((*begun[:-1], here), rounds.problem.classes or 0 if rounds else self._ledger.outputs())

    def _unready(self) -> tuple[list[str], str]:
        """Returns the sites without which the next generation cannot begin, and why if it is not their silence."""
        missing, two_faced = self._ledger.unready()
        if two_faced:
            return two_faced, f"{', '.join(two_faced)} told different sites different things; vote them out as well"
        if missing:
            return missing, ""
        try:
            self._ledger.base()
        except Lie as lie:
            return list(lie.sites), f"{lie}; vote the one out that does not tell the truth"
        return [], ""

    def _begin(self) -> None:
        """Begins the generation that was decided, from the round that all sites agree on. Whatever this node had stays
        where it is, or is put aside."""
        ledger = self._ledger
        base, mesh = ledger.base(), ledger.mesh
        before, after = self._in_generation(base.generation), replace(self._membership, mesh=mesh)
        for written in ("result", PERSONAL):  # this node may have its result, but the others do not
            put_aside(self._folder / written, before.mesh.generation)
        self._observe("agreed", base.round)
        if base.round and self._membership.name in ledger.restored():
            self._restore(base.round, after)
        elif base.round:
            self._membership = before
            self._save_without(base.round, before, after)
        self._observe("saved without", base.round)
        ledger.begin(base.round)
        self._observe("begun", base.round)
        self._membership = after
        self._log("info", "continuing", without=", ".join(mesh.removed), round=base.round, sites=len(after.present))

    def _save_without(self, agreed: int, before: Membership, after: Membership) -> None:
        """Writes the first checkpoint of the next generation: the state after the agreed round, without those that have
        left since. The kept checkpoints before that round are taken over in the same way, so that all can still go back
        to them."""
        gone = [name for name in after.mesh.removed if name not in before.mesh.removed]
        changed = bool(gone or self._ledger.restored())
        numbers = [before.present.index(before.mesh.position(name)) for name in gone]
        slots = [before.present.index(p) for p in (before.position, *(one.position for one in before.neighbours))]
        problem = self._problem(after)
        identity = identity_of(after, problem)
        into = Store(self._folder, after.mesh.generation, self._log)
        with self._opened(0) as mailroom:
            self.oversight.deciding()
            mailroom.alone = True
            store = Store(self._folder, before.mesh.generation, self._log)
            rounds = Rounds(before, self._problem(before), mailroom, store, self.oversight)

            def reduced(done: int) -> TrainingState:
                state = rounds.state_at(done)
                return leaving.without(state, numbers, slots, problem.prior_of_sites) if changed else state

            for kept in [one for one in store.landmarks if one <= agreed]:
                into.keep(reduced(kept), kept, identity)
            into.save(reduced(agreed), agreed, identity, len(after.present))

    def _problem(self, membership: Membership) -> Problem:
        """Returns the problem of all sites. Its model is the one that all start from, once that is known."""
        made = common_problem(membership, self._own, self._facts or {}, self._ledger.outputs())
        if not Start.known(self._folder):
            return made
        return replace(made, model=self._start_of(made, membership).model())

    def _start_of(self, made: Problem, membership: Membership) -> Start:
        own = made.initial_model(membership.experiment.seeds[0])

        def other(position: int, there: str) -> None:
            self._limiter("info", "a neighbour has another machine", membership.mesh.names[position], there)

        return Start(self._folder, own, machine.in_words(self._machine), other)


def _largest(dim: int, n: int) -> int:
    """Returns a bound on the bytes of a message: several uncompressed parts, and the sums at the end."""
    return (1 << 16) + 8 * (6 * dim + 16 * n)


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
