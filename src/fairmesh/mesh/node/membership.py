"""A site's membership in a mesh: its files, what it announces about its data, and the problem of all sites."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fairmesh.config.registry import registered
from fairmesh.data.samples import Samples
from fairmesh.data.sealed import unit_of
from fairmesh.data.site import Site
from fairmesh.data.site_tables import is_fitted
from fairmesh.data.units import units_of
from fairmesh.errors import BadInput
from fairmesh.experiment import Experiment, topology_of
from fairmesh.mesh.enrol.agreement import agreed, problem_of, refuse_undeployable
from fairmesh.mesh.enrol.approval import approved_experiment
from fairmesh.mesh.enrol.certificates import check_certificate, make_secret, secret_of
from fairmesh.mesh.enrol.founding import refuse_other_graph
from fairmesh.mesh.enrol.manifest import Manifest
from fairmesh.mesh.enrol.roster import Mesh, SiteFile
from fairmesh.mesh.fields import BUILT_IN_METRICS, EPSILON, OUTPUTS, Terms
from fairmesh.mesh.node.claims import HOW_TO_RESTORE, PUT_BACK
from fairmesh.mesh.node.ledger import still_in
from fairmesh.mesh.wire.greeting import greeting
from fairmesh.mesh.wire.links import Credentials, Neighbour
from fairmesh.metrics.base import NamedMetric, chosen_metrics, limits_of
from fairmesh.numerics import trees
from fairmesh.problems.model_for_sites import shape_of
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.private_run import loss_clip_of, refuse_size
from fairmesh.storage.files import read_bytes, read_record, write_record
from fairmesh.topology.graphs import Topology
from fairmesh.training.options import Options
from fairmesh.training.private import refuse_with_privacy

_FACTS = "facts.json"  # about all sites' data, as the run began with them
_DIGEST = "data.json"  # of this site's training data, likewise; it is not sent
_OUTPUTS = "outputs.json"  # of the model, likewise
_TRAINING = "training data"
_SAME_FORM = "all sites need data of the same form"
_ALIKE = {"inputs": ("are", _SAME_FORM), "targets": ("are", _SAME_FORM)}  # facts that must be the same everywhere
_PRIVATELY = {
    "unit": (
        "that privacy protects is",
        "all sites must protect the same; name it as unit in the [contract], in [data], or as Site(unit=...)",
    )
}


@dataclass(frozen=True)
class Membership:
    """A site's files, read and checked. It contains no training data."""

    site: SiteFile
    mesh: Mesh
    experiment: Experiment
    manifest: Manifest
    credentials: Credentials
    secret: bytes | None = field(default=None, repr=False)  # of this site's random draws; None if all may know them

    @staticmethod
    def read(path: str | Path) -> "Membership":
        site = SiteFile.read(path)
        founded = Mesh.read(site.mesh)
        mesh = still_in(site.state, founded)
        mesh.member(site.name)  # refuses a site that is not in the mesh
        if site.name in mesh.removed:
            raise BadInput(f"site {site.name} has left the mesh {mesh.name}; ask the others for a new mesh to join")
        handout, experiment = approved_experiment(site, founded)
        refuse_undeployable(experiment)
        refuse_other_graph(experiment, mesh, site.mesh)
        texts = [read_bytes(file) for file in (site.key, site.certificate, site.authority)]
        credentials = Credentials(*texts)
        problems = check_certificate(credentials.certificate, credentials.authority, site.name, key=site.key)
        if problems:
            raise BadInput(f"{site.certificate}: {'; '.join(problems)}")
        experiment = replace(experiment, topology=topology_of(experiment, len(mesh.members)))
        return Membership(site, mesh, experiment, handout.manifest, credentials)

    def with_secret(self) -> "Membership":
        """Returns the same with the secret of the site's draws, which is made if the run has not begun."""
        refuse_lost_secret(self.site)
        return replace(self, secret=make_secret(secret_of(self.site.key)))

    @property
    def topology(self) -> Topology:
        """Returns the graph over all sites that the mesh was founded with."""
        return topology_of(self.experiment, len(self.mesh.members))

    @property
    def options(self) -> Options:
        """Returns the options of the experiment without those that need every site's models in one place."""
        return replace(self.experiment.options, keep_best=False, compare_weights=False, choose_weights=False)

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def position(self) -> int:
        """Returns the position among all sites that the mesh ever had."""
        return self.mesh.position(self.name)

    @property
    def present(self) -> list[int]:
        """Returns the positions of the present sites. A node's number in the run is its index in this list."""
        return [self.mesh.position(member.name) for member in self.mesh.present]

    @property
    def number(self) -> int:
        """Returns this node's number in the run."""
        return self.present.index(self.position)

    @property
    def names(self) -> list[str]:
        """Returns the names of the present sites."""
        return [member.name for member in self.mesh.present]

    @cached_property
    def neighbours(self) -> list[Neighbour]:
        return [self._neighbour(other) for other in self.mesh.neighbours(self.name)]

    @property
    def around(self) -> list[int]:
        """Returns the positions of the neighbours."""
        return [neighbour.position for neighbour in self.neighbours]

    @property
    def left(self) -> list[Neighbour]:
        """Returns the former neighbours that are no longer in the mesh."""
        former = self.mesh.member(self.name).neighbours
        return [self._neighbour(other) for other in former if other in self.mesh.removed]

    def _neighbour(self, other: str) -> Neighbour:
        address = self.mesh.member(other).address if self.mesh.dials(self.name, other) else ""
        return Neighbour(other, self.mesh.position(other), address)

    @property
    def terms(self) -> Terms:
        """Returns what announcements are checked against, the same at every site."""
        neighbours, experiment = {member.name: member.neighbours for member in self.mesh.members}, self.experiment
        primary = registered(NamedMetric).keys() & {experiment.primary}
        metrics = chosen_metrics(sorted(primary)) | chosen_metrics(experiment.metrics)
        limits = {name: limits_of(metric) for name, metric in metrics.items()}
        limits |= {} if experiment.privacy is None else {EPSILON: (0.0, math.inf)}
        return Terms(neighbours, experiment.rounds, outputs_allowed(experiment), BUILT_IN_METRICS | limits)

    @property
    def agreed(self) -> dict[str, Any]:
        return self.greeting["agreed"]

    @cached_property
    def greeting(self) -> dict[str, Any]:
        return greeting(self.name, agreed(self.experiment), self.mesh, self.manifest.files)


def refuse_lost_secret(site: SiteFile) -> None:
    """Refuses a site whose run was begun with a secret that is missing now."""
    path = secret_of(site.key)
    if not path.exists() and any(site.state.glob("generation-*/*")):
        raise BadInput(
            f"{path} is missing, and the run in {site.state} was begun with it; put it back from a backup. If it is "
            f"lost, the site gets a new one when its state is restored. {HOW_TO_RESTORE}"
        )


def own_data(membership: Membership) -> Prepared:
    """Reads this site's data, and returns the problem of this site alone. With privacy its training rows are sealed."""
    experiment = membership.experiment
    problem, options = problem_of(membership.site, experiment, membership.mesh), membership.options
    if experiment.privacy is not None:
        refuse_with_privacy(problem, [experiment.algorithm], options, experiment.personalization)
        loss_clip_of(problem, experiment.privacy)
        for site in problem.sites:
            refuse_size(len(site.train), experiment.sampling.batch, experiment.privacy, "this site")
    return problem


class Objection(NamedTuple):
    """Why the run cannot begin yet: the sites whose announcements stand against it, and what to do about them. Without
    sites it can."""

    sites: Sequence[str] = ()
    reason: str = ""


def facts(site: Site) -> dict[str, Any]:
    """Returns what the others must know about a site's data to agree on one problem: its size and its form."""
    columns = ["table", []] if is_fitted(site) else None  # the number of inputs follows from all sites' tables
    counted = units_of if site.train.sealed else len  # of private sites only the numbers of units are public
    return {
        "samples": len(site.train),
        "reserved": 0 if site.reserved is None else len(site.reserved),
        "inputs": trees.form(site.train.inputs) if columns is None else columns,
        "targets": trees.form(site.train.targets),
        "outputs": shape_of([site])[1],
        "test": 0 if site.test is None else counted(site.test),
        "validation": 0 if site.validation is None else counted(site.validation),
        "group": site.group,
        "unit": unit_of(site.train),
    }


def freeze_facts(folder: Path, known: Mapping[str, Any], digest: str, outputs: int) -> None:
    """Records what all sites said about their data, the digest of this site's own, and how many outputs the model has,
    as the run begins with them."""
    write_record(folder / _DIGEST, {_TRAINING: digest})
    write_record(folder / _OUTPUTS, {"outputs": outputs})
    write_record(folder / _FACTS, known)


def frozen_outputs(folder: Path) -> int:
    """Returns how many outputs the model has, as the run began with them."""
    record = read_record(folder / _OUTPUTS, PUT_BACK)
    if not record:
        raise BadInput(f"{folder / _OUTPUTS} is missing; {PUT_BACK}")
    return int(record["outputs"])


def frozen_facts(folder: Path, name: str, mine: Mapping[str, Any], digest: str) -> dict[str, Any]:
    """Returns what all sites said about their data when the run began; nothing before. Refuses data of this site that
    has changed since."""
    frozen = read_record(folder / _FACTS, PUT_BACK)
    before = frozen[name] if frozen else mine
    changed = [f"{what}: {before.get(what)} then, {now} now" for what, now in mine.items() if before.get(what) != now]
    again = "put it back from a backup; if the training data is still that of the run, move the damaged file away"
    begun_with = read_record(folder / _DIGEST, again)  # empty before the run begins; kept when the site is restored
    if not changed and begun_with.get(_TRAINING, digest) != digest:
        changed = ["other values or another order of the training samples"]
    if frozen and not begun_with:
        write_record(folder / _DIGEST, {_TRAINING: digest})
    if changed:
        raise BadInput(
            f"the data of this site has changed since the run began ({'; '.join(changed)}). Data is frozen for a run, "
            "since all sites have agreed on it: put the old data back, and keep the new for the next run. If the old "
            f"data is lost, the other sites must vote this site out (fairmesh mesh remove SITE {name}). Keep the state "
            "folder: an empty one would be refused by the others"
        )
    return frozen


def misfit(known: Mapping[str, Mapping[str, Any]], experiment: Experiment) -> Objection:
    """Returns the sites whose data has another form than that of most sites, or whose size privacy does not take, and
    why."""
    for what, (verb, advice) in (_ALIKE if experiment.privacy is None else _ALIKE | _PRIVATELY).items():
        said = {name: json.dumps(one.get(what)) for name, one in known.items()}
        usual, count = Counter(said.values()).most_common(1)[0]
        if count < len(said):
            unlike = [name for name, form in said.items() if form != usual]
            shown = "; ".join(f"{said[name]} at {name}" for name in unlike)
            others = ", ".join(name for name in said if name not in unlike)
            reason = f"the {what} {verb} {usual} at {others}, but {shown}; {advice}"
            return Objection(unlike, reason)
    if experiment.privacy is not None:
        for name, said in known.items():
            try:
                refuse_size(int(said["samples"]), experiment.sampling.batch, experiment.privacy, name)
            except BadInput as error:
                return Objection([name], str(error))
    return Objection()


def too_heavy(membership: Membership, known: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns the other sites that would have more weight before training, by the number of samples that they declare,
    than this site accepts unasked, and a sentence about each. A prior in the experiment was approved with it."""
    if membership.experiment.prior is not None:
        return {}
    total, limit = sum(said["samples"] for said in known.values()), membership.site.largest_share(len(known))
    return {
        name: [
            f"it declares {said['samples']:,} of {total:,} samples, so that its weight before training would be "
            f"{said['samples'] / total:.3g}, more than {limit:.3g} (largest_prior)"
        ]
        for name, said in known.items()
        if name != membership.name and said["samples"] > limit * total
    }


def outputs_allowed(experiment: Experiment) -> int:
    """Returns how many outputs of the model a site may declare: as many as the contract has classes, or else as many as
    the experiment's data lists, or 10,000."""
    if experiment.contract is not None and experiment.contract.classes:
        return len(experiment.contract.classes)
    return max(len(getattr(experiment.data, "classes", ())), OUTPUTS)


def refuse_many_outputs(said: Mapping[str, Any], experiment: Experiment) -> None:
    """Refuses data of this site that the other sites would refuse."""
    if said["outputs"] > outputs_allowed(experiment):
        raise BadInput(
            f"this site's data needs {said['outputs']} outputs of the model, more than the "
            f"{outputs_allowed(experiment)} that other sites accept; list all classes in the experiment's data "
            '(classes = ["..."])'
        )


def outputs_of_run(
    claimed: int,
    mine: Site,
    frozen: Mapping[str, Mapping[str, Any]],
    announced: Mapping[str, Mapping[str, Any]],
    names: Sequence[str],
) -> int:
    """Returns how many outputs the model of the run has, also those that only a removed site's labels need. A claim
    counts up to what the labels of all sites need, since a model of another size would not fit the run.

    Args:
        claimed: The most that a site has claimed in a decision. It may not be true.
        mine: This site, whose preprocessing knows the classes of all tables.
        frozen: What sites said about their data when the run began here, also those that have left since.
        announced: What sites say about their data now, also those that left before.
        names: All sites that the mesh ever had. If one of them is in neither, every claim counts.
    """
    needed = {name: int(said["outputs"]) for name, said in {**announced, **frozen}.items()}
    own = shape_of([mine])[1]
    if needed.keys() >= set(names):
        claimed = min(claimed, max(own, *needed.values()))
    return max(claimed, own, *(needed[name] for name in frozen))


def common_problem(
    membership: Membership, mine: Site, known: Mapping[str, Mapping[str, Any]], outputs: int = 0
) -> Prepared:
    """Returns the problem of all present sites, from this site's data and what the others announced about theirs. The
    model has as many outputs as any site's labels need, and at least `outputs`."""
    names = membership.names
    unlike = misfit({name: known[name] for name in names}, membership.experiment)
    if unlike.sites:
        raise BadInput(unlike.reason)
    outputs = max(outputs, shape_of([mine])[1], *(int(known[name]["outputs"]) for name in names))

    def elsewhere(name: str) -> Site:
        count = int(known[name]["samples"])
        test, validation = (
            Samples.elsewhere(1, mine.train) if known[name][w] else None for w in ("test", "validation")
        )
        group = str(known[name]["group"])
        return Site(Samples.elsewhere(count, mine.train), test, validation, group, name)

    sites = [mine if name == membership.name else elsewhere(name) for name in names]
    given, experiment = membership.experiment.prior, membership.experiment
    prior = None if given is None else tuple(given[membership.mesh.position(name)] for name in names)
    return replace(experiment, prior=prior).problem(sites, outputs)
