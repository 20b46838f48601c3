"""What a node has, over all generations of the mesh, and what all its activities need: to open its journal, to connect
to its neighbours, to wait for announcements, and the problem that it trains."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import fairmesh
from fairmesh.mesh.enrol.keys import KnownKeys
from fairmesh.mesh.enrol.roster import Mesh
from fairmesh.mesh.node import machine
from fairmesh.mesh.node.ledger import Ledger
from fairmesh.mesh.node.life import Life
from fairmesh.mesh.node.measurements import Measurements
from fairmesh.mesh.node.membership import (
    Membership,
    common_problem,
    frozen_outputs,
    outputs_of_run,
)
from fairmesh.mesh.node.oversight import Notices, Oversight
from fairmesh.mesh.node.private_site import PrivateSite
from fairmesh.mesh.node.start import Start
from fairmesh.mesh.node.store import folder_of
from fairmesh.mesh.node.table_agreement import TableAgreement
from fairmesh.mesh.node.traffic import TrafficCount
from fairmesh.mesh.node.watching import Aside, Log, Monitor
from fairmesh.mesh.wire import greeting
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.mesh.wire.carrier import Carrier
from fairmesh.mesh.wire.connections import TlsCarrier
from fairmesh.mesh.wire.journal import Journal
from fairmesh.mesh.wire.limits import LogLimiter
from fairmesh.mesh.wire.links import Links
from fairmesh.mesh.wire.mailroom import Mailroom, Observe
from fairmesh.mesh.wire.transport import FIRST_ROUND
from fairmesh.problems.prepared import Prepared
from fairmesh.storage.files import write_atomically
from fairmesh.storage.run_folder import TRAFFIC
from fairmesh.trackers import Tracker

if TYPE_CHECKING:
    from fairmesh.mesh.node.generation import Generation

CarrierOf = Callable[[Membership], Carrier]  # what carries the messages of a site


def over_tls(membership: Membership) -> Carrier:
    """Returns what carries messages over connections of fairmesh's own."""
    return TlsCarrier(membership.credentials, membership.site.listen)


class Node:
    """The node of one site. `membership` is that of the current generation."""

    def __init__(
        self,
        membership: Membership,
        alone: Prepared,  # of this site
        log: Log,
        patience_s: float,
        monitor: Monitor | None,
        observe: Observe,
        trackers: Sequence[Tracker] = (),
        private: PrivateSite | None = None,
        carrier_of: CarrierOf = over_tls,
    ):
        (self.own,) = alone.sites
        self.membership, self.log, self.observe, self.trackers = membership, log, observe, trackers
        self.private = private  # if the experiment has privacy
        self.carrier_of = carrier_of
        self.life, self.open = Life(), ExitStack()  # what is open in this generation
        self.generation: Generation  # once the node takes part in one
        self.reached: Callable[[], int] = lambda: 0  # returns how many rounds of this generation it has done
        self.folder, self.limiter, self.aside = membership.site.state, LogLimiter(log), Aside(log)
        self.digest = alone.digests_here()[0]  # of this site's data
        self.facts: dict[str, Any] = {}  # about the data of all sites, once they have agreed on it
        self.keys = KnownKeys(self.folder, log)
        self.bulletin = Bulletin(membership.name, membership.credentials, membership.terms, self.keys.refusal)
        for reason in self.bulletin.restored(self.folder / "bulletin.json"):
            log("warning", "an announcement in bulletin.json is passed over", reason=reason)
        self.machine = machine.machine(membership.experiment.options)
        self.machines = machine.Machines(self.folder, self.machine)
        log("info", "machine", **self.machine)
        self._process = os.urandom(8).hex()  # tells this start of the node from others
        self.ledger = Ledger(self.folder, Mesh.read(membership.site.mesh), membership.name, self.bulletin)
        self.measurements = Measurements(self.folder, membership.name, self.bulletin, self.aside)
        contract = membership.experiment.contract
        self.tables = TableAgreement(membership.name, self.own, self.bulletin, self.folder, contract)
        self.traffic = TrafficCount(self.folder, membership.name)
        if self.traffic.damaged:
            log("warning", "what this site has sent before is not known: its count begins again", damaged=TRAFFIC)
        self.oversight = Oversight(self, alone, patience_s, monitor)

    def in_generation(self, generation: int) -> Membership:
        """Returns the membership in an earlier or the current generation."""
        return replace(self.membership, mesh=self.ledger.mesh_in(generation))

    @contextmanager
    def opened(self, first: int) -> Iterator[Mailroom]:
        """Opens the mailroom over the journal of this generation, at step `first`. If that is 0, and the disk has lost
        a message of it that this node has used, the mailroom begins at the first round."""
        journal = Journal(folder_of(self.folder, self.membership.mesh.generation), self.log)
        around = self.membership.around
        if not first and Start.lost_messages(self.folder, journal, around):
            first = FIRST_ROUND
        counters = {position: self.traffic.over(self.membership.mesh.names[position]) for position in around}
        mailroom = Mailroom(around, journal, first, self.observe, counters)
        mailroom.other_machine = self.machines.difference(self.membership.mesh.generation, first) or ""
        self.oversight.oversee(mailroom)
        try:
            yield mailroom
        finally:
            mailroom.close()
            journal.close()

    @contextmanager
    def linked(self, mailroom: Mailroom, only_news: bool = False) -> Iterator[Links]:
        """Connects to the neighbours; with `only_news` for announcements alone."""
        membership = self.membership
        links = Links(
            membership.neighbours,
            membership.credentials,
            self.carrier_of(membership),
            mailroom,
            self.bulletin,
            lambda: membership.greeting | {"only_news": only_news, "process": self._process},
            lambda name, theirs: self._check_greeting(name, theirs) and not only_news,
            self.log,
            mailroom.largest,
            self.observe,
            membership.left,
            self.keys.refusal,
        )
        links.start()
        try:
            yield links
        finally:
            links.stop()

    def _check_greeting(self, name: str, theirs: Mapping[str, Any]) -> bool:
        greeting.refuse_unlike(self.membership.greeting, name, theirs)
        ahead = greeting.seconds_ahead(theirs, time.time())
        self.oversight.clocks.pop(name, None)
        if abs(ahead) > greeting.APART_S:
            self.oversight.clocks[name] = ahead
            self.limiter("warning", "clocks differ", name, f"its clock is {greeting.apart_in_words(ahead)}")
        version = greeting.version_in(theirs)
        self.oversight.versions[name] = version
        if version != fairmesh.__version__:
            said = f"fairmesh {version} there, {fairmesh.__version__} here; they are compatible"
            self.limiter("info", "versions differ", name, said)
        same = theirs.get("generation") == self.membership.mesh.generation
        return same and theirs.get("only_news") is not True  # it decides, or does not know the data of all sites yet

    def problem(self, membership: Membership) -> Prepared:
        """Returns the problem of all sites. Its model is the one that all start from, once that is known."""
        made = common_problem(membership, self.own, self.facts, self.outputs())
        if not Start.known(self.folder):
            return made
        return made.changed(model=self.start_of(made, membership).model())

    def outputs(self) -> int:
        """Returns how many outputs the model has that this node may have kept, whether it has trained it or not. Once
        the run has begun here, nothing that others claim changes that."""
        return frozen_outputs(self.folder) if self.facts else self.outputs_for({})

    def outputs_for(self, known: Mapping[str, Any]) -> int:
        """Returns how many outputs the model needs, given what sites say about their data."""
        announced, names = self.bulletin.of_all("facts"), self.membership.mesh.names
        return outputs_of_run(self.ledger.outputs(), self.own, known, announced, names)

    def start_of(self, made: Prepared, membership: Membership) -> Start:
        """Returns the start of the run, given the problem with the model as this site makes it."""
        own = made.initial_model(membership.experiment.seeds[0])

        def other(position: int, there: str) -> None:
            self.limiter("info", "a neighbour has another machine", membership.mesh.names[position], there)

        return Start(self.folder, own, machine.in_words(self.machine), other)

    def silent(self, kind: str) -> list[str]:
        """Returns the present sites that have announced nothing of a kind in this generation."""
        bodies, generation = self.bulletin.of_all(kind), self.membership.mesh.generation
        return [name for name in self.membership.names if bodies.get(name, {}).get("generation") != generation]

    def say(self, kind: str, body: Mapping[str, Any]) -> None:
        """Announces something, unless it is what this site has announced before."""
        if self.bulletin.of(self.membership.name, kind) != body:
            self.bulletin.announce(kind, body)

    def remember(self) -> None:
        """Writes all announcements to disk, so that a restart knows them."""
        write_atomically(self.folder / "bulletin.json", self.bulletin.saved())

    def wait(self, missing: Callable[[], Sequence[str]]) -> None:
        """Waits for announcements of other sites until none is missing, and shows and logs which are."""
        notices = Notices()
        try:
            while names := list(missing()):
                self.oversight.missing, sites = (names, notices), ", ".join(names)
                self.oversight.raise_if_stopped()
                if notices.due():
                    self.log("warning", "waiting", sites=sites, seconds=round(notices.seconds))
                self.oversight.stop_if_waited_too_long(notices.seconds, sites)
                notices.pause()
        finally:
            self.oversight.missing = None
