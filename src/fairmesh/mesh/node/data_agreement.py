"""How sites agree on their data before the first round: that it fits together, who declares how much, and whether the
data of some site looks different."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fairmesh.data.site_tables import without_values
from fairmesh.errors import BadInput, listed
from fairmesh.mesh.enrol.agreement import personalization_of
from fairmesh.mesh.node import life
from fairmesh.mesh.node.data_consent import unaccepted
from fairmesh.mesh.node.membership import (
    Objection,
    facts,
    freeze_facts,
    frozen_facts,
    misfit,
    refuse_many_outputs,
    too_heavy,
)
from fairmesh.mesh.node.node import Node
from fairmesh.mesh.node.oversight import Notices
from fairmesh.mesh.node.site_statistics import WITHHELD, columns_of, in_common, statistics_of, unusual
from fairmesh.mesh.node.start import Start
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.mesh.wire.transport import FIRST_ROUND
from fairmesh.problems.prepared import Prepared

_NOTICED_S = 2.0  # so that the others have heard what this site announced, before it stops because of it


def announce(node: Node) -> None:
    """Announces this site's data, which may still be corrected, unless the run has begun with it. Refuses data that has
    changed since then."""
    said, membership = facts(node.own), node.membership
    refuse_many_outputs(said, membership.experiment)
    node.facts = frozen_facts(node.folder, membership.name, said, node.digest)
    if node.facts:
        node.own = node.tables.prepared(membership.names, membership.experiment)
        return
    if empty := without_values([node.own]):
        node.log("warning", "columns without values here count as missing", columns=listed(empty))
    tells = membership.site.announce_statistics
    node.tables.announce(tells)
    node.say("statistics", statistics_of(node.own) if tells and not node.private else WITHHELD)
    node.say("facts", said)


def settle(node: Node, mailroom: Mailroom) -> tuple[Prepared, Start]:
    """Waits until all sites have agreed on their data, unless they have done so before a restart. Bounds the
    messages by the size of the model. Returns the problem of all sites and the start of the run."""
    if not node.facts:
        node.life.enter(life.ON_DATA)
        with node.linked(mailroom, only_news=True):
            node.facts = _agreed_facts(node)
    _announce_ready(node, node.facts)  # for a site that has not begun yet
    problem = node.problem(node.membership)
    start = node.start_of(problem, node.membership)
    several_parts = 8 * 6 * problem.flat_model.dim  # bytes, uncompressed
    sums_at_the_end = 8 * 16 * problem.n
    mailroom.largest = start.largest() + (1 << 16) + several_parts + sums_at_the_end
    mailroom.rounds = range(FIRST_ROUND, FIRST_ROUND + node.membership.experiment.rounds)
    method = personalization_of(node.membership.experiment, problem)
    mailroom.choice = method.sums if method else 0
    return problem, start


def show(node: Node, problem: Prepared) -> None:
    """Logs and shows the weight of every site before training and what it declared about its data: sites that declare
    many samples have much weight, so people should look at this. Names the sites whose data looks different."""
    said, oversight = node.facts, node.oversight
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    rows = {} if problem.privacy is not None else {"data_and_model": problem.digest()}  # by which rows can be guessed
    node.log("info", "the sites' data is agreed", facts=digest, **rows)
    oversight.prior = dict(zip(node.membership.names, problem.prior_of_sites.tolist()))
    shown = (f"{name} {share:.3g} ({said[name]['samples']} samples)" for name, share in oversight.prior.items())
    node.log("info", "prior", sites=", ".join(shown))
    oversight.unusual = _unusual(node, said)
    for site, reasons in oversight.unusual.items():
        node.log("warning", "a site's data looks different", site=site, reason="; ".join(reasons))


def _agreed_facts(node: Node) -> dict[str, Any]:
    """Waits until all sites have announced data that fits together and have seen the same announcements. Then these
    are recorded, and the run begins with them."""
    present, agreed = node.membership.names, dict[str, Any]()
    noticed = Notices()

    def wait_for(sites: Sequence[str], reason: str, what: str) -> Sequence[str]:
        node.aside.once((what, reason, *sites), "error", what, site=", ".join(sites), reason=reason)
        node.life.enter(life.ON_DATA, f"{what}; waiting for {', '.join(sites)}")
        return sites

    def missing() -> Sequence[str]:
        announced, statistics = node.bulletin.of_all("facts"), node.bulletin.of_all("statistics")
        known = {name: announced[name] for name in present if name in announced}
        unlike = misfit(known, node.membership.experiment)
        unlike = unlike if unlike.sites else node.tables.misfit(present, known)
        _stop_if_alone(node, unlike, len(known), noticed)
        if unlike.sites:
            return wait_for(*unlike, "the data of the sites does not fit together")
        silent = {name for name in present if name not in known or name not in statistics}
        silent.update(node.tables.silent(present))
        if not silent and _waits_for_consent(node, known):
            return [node.membership.name]
        node.life.enter(life.ON_DATA)
        if silent:
            return [name for name in present if name in silent]
        for name in present:  # others may have begun with what it had said first
            if agreed.get(name, known[name]) != known[name]:
                what = "a site has announced other data than before; if the wait for others lasts, ask it"
                node.aside.once((what, name), "warning", what, site=name)
        mine, ready = _announce_ready(node, known), node.bulletin.of_all("ready")
        agreed.update(known)
        return [name for name in present if ready.get(name) != mine]

    node.wait(missing)
    alone = node.tables.alone(present)
    if alone:
        what = "categories that one site alone has count as other; to use them, name them in a contract"
        node.log("warning", what, categories=alone)
    for what, columns in node.tables.lacking(present).items():
        node.log("warning", what, columns=columns)
    node.tables.freeze(present)
    node.own = node.tables.prepared(present, node.membership.experiment)
    freeze_facts(node.folder, agreed, node.digest, node.outputs_for(agreed))
    node.remember()
    return agreed


def _waits_for_consent(node: Node, known: Mapping[str, Any]) -> bool:
    """Returns whether this site begins only if a person here accepts the data of some site: because that site would
    have much of the weight, or because its data looks different and this site waits then. Says so once."""
    site, oversight = node.membership.site, node.oversight
    oversight.unusual = _unusual(node, known)
    heavy, waits = too_heavy(node.membership, known), site.on_unusual_data == "wait"
    asked = {name: reasons for name, reasons in oversight.unusual.items() if waits or name in heavy}
    before, oversight.unaccepted = oversight.unaccepted, unaccepted(node.folder, asked)
    for name in oversight.unaccepted:
        said = "; ".join(oversight.unusual[name])
        how = f"if the data is right, accept it: fairmesh mesh accept {site.path.name} {name}"
        what = "a site's data looks different, and this site waits until somebody here accepts it"
        node.aside.once((what, said), "error", what, site=name, reason=f"{said}. Ask {name}; {how}")
    for name in before:
        if name not in oversight.unaccepted:
            accepted = name in oversight.unusual
            node.log("info", "accepted here" if accepted else "looks no longer different", site=name)
    if oversight.unaccepted:
        names = ", ".join(oversight.unaccepted)
        node.life.enter(life.ON_DATA, f"waiting until somebody here accepts the data of {names}")
    return bool(oversight.unaccepted)


def _stop_if_alone(node: Node, unlike: Objection, known: int, noticed: Notices) -> None:
    """Ends the node if the data of this site alone has another form than that of all others, which wait for it. If two
    sites differ from most, they may be those that are right."""
    sites, reason = unlike
    if sites != [node.membership.name] or known < max(3, len(node.membership.mesh.present)):
        noticed.since = time.monotonic()
    elif noticed.seconds > _NOTICED_S:
        raise BadInput(f"{reason}. Give this site's data that form, and start the node again; the others wait")


def _announce_ready(node: Node, known: Mapping[str, Any]) -> dict[str, Any]:
    """Announces with which facts about the present sites this node begins."""
    here = {name: known[name] for name in node.membership.names}
    made = node.tables.agreed(list(here))
    agreed = json.dumps(here, sort_keys=True) + ("" if made is None else made.to_json())
    body = {"facts": hashlib.sha256(agreed.encode()).hexdigest()}
    node.say("ready", body)
    return body


def _unusual(node: Node, known: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the present sites whose inputs look different, or which declare many samples, and how."""
    contract, announced = node.membership.experiment.contract, node.bulletin.of_all("statistics")
    said = {name: announced[name] for name in node.membership.names if name in announced}
    columns = columns_of(node.own, contract.columns if contract else ())
    said, columns = in_common(said, node.tables.number_names(list(said)), columns)
    looks = node.aside.tried("the comparison of the sites' statistics", lambda: unusual(said, columns), {})
    heavy = too_heavy(node.membership, known)
    return {name: heavy.get(name, []) + looks.get(name, []) for name in said if name in heavy or name in looks}
