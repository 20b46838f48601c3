"""The end of a run between organisations: every site gets the same average model, lambda and report.

The sums come over other sites, which could give every site another model or change a third site's accuracy. So each
site announces, with its signature, the digest of its result and its own metrics. The result is unconfirmed until the
announcements of all sites agree with it. Then neighbours in the tree of the sums compare their digests once more by
messages, which are delivered even if a site is down: no node ends before these have heard everybody's announcement.
Then sites choose their own models, if the run has any. Last, a sum over all sites says that each has its result, and
checkpoints and journals are removed.
"""

import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from fairmesh.compression import DecodeError
from fairmesh.mesh.node import choosing, life, versus_local
from fairmesh.mesh.node.node import Node
from fairmesh.mesh.node.oversight import Notices
from fairmesh.mesh.node.result import (
    add_contradictions,
    expected_results,
    result_digest,
    results_apart,
    sums_of,
    undefined_metrics,
    write_result,
)
from fairmesh.mesh.node.rounds import Rounds
from fairmesh.mesh.node.store import LOCAL, RESULT, new_folder, put_in_place
from fairmesh.mesh.wire.transport import FIRST_ROUND
from fairmesh.storage.occupied import PERSONAL
from fairmesh.storage.run_folder import read_summary
from fairmesh.training.best_round import decided_in_words

_FAREWELL_S = 60.0  # wait for the neighbours' last messages, once nobody needs anything from this node


def collect(node: Node) -> str:
    """Waits until this node knows what all sites have measured, and all have heard the same. The sums that follow are
    final, and would differ where sites have heard different things."""
    node.wait(node.measurements.open_questions)
    generation, mine = node.membership.mesh.generation, node.measurements.digests()
    node.bulletin.announce("heard", {"generation": generation, "sites": mine}, generation)
    node.remember()

    def open_questions() -> list[str]:
        silent, present = node.silent("heard"), node.membership.names
        told = {by: body["sites"] for by, body in node.bulletin.of_all("heard").items() if by in present}
        apart = [
            (by, site)
            for by, digests in told.items()
            for site, digest in mine.items()
            if by not in silent and digests.get(site) != digest
        ]
        for by, site in apart:
            differs = (
                f"{by} has heard other metrics of {site} than this site" if by != site else "it told this site others"
            )
            reason = f"{differs}: {site} has told sites different things, or {by} says what is not so; ask both"
            what = "sites have heard different metrics"
            node.aside.once((what, by, site, generation), "error", what, site=site, reason=reason)
        return [*silent, *sorted({f"{by} or {site}" if by != site else site for by, site in apart})]

    node.wait(open_questions)
    return life.SUMMING


def sum_up(node: Node) -> str:
    """Computes the result, which is not confirmed yet."""
    write_result(node.generation.rounds, _unconfirmed(node))
    node.aside.tried("the look at the best round", lambda: _log_best(node), None)
    return life.CONFIRMING


def _log_best(node: Node) -> None:
    decided = read_summary(_unconfirmed(node)).get("best_decided")
    if decided:
        node.log("info", "the best round is chosen", reason=decided_in_words(decided))


def _unconfirmed(node: Node) -> Path:
    return node.folder / f"unconfirmed-{node.membership.mesh.generation}"


def confirm(node: Node) -> str:
    """Waits until all sites have announced the result that this site has. A difference is named; it ends when the other
    site announces another result, or is voted out."""
    unconfirmed, source = _unconfirmed(node), sums_of(node.generation.rounds).source
    expected = expected_results(unconfirmed, node.membership)
    own = {site: one._asdict() for site, one in node.measurements.contradicted.items()}
    mine = expected[node.membership.name] | {"contradicted": own}
    node.bulletin.announce("result", mine, node.membership.mesh.generation)
    node.remember()  # so that a restart knows whether the result on disk is the one that was announced
    sums = {"sums": "computed by this site" if source is None else f"from {source}", "kept": unconfirmed.name}

    def open_questions() -> list[str]:
        apart = results_apart(expected, node.bulletin)
        for site, reason in apart.items():
            node.life.enter(life.CONFIRMING, "results differ; the log says which")
            about = "results differ", site, unconfirmed
            node.aside.once(about, "error", "results differ", site=site, reason=reason, **sums)
        return [*node.silent("result"), *apart]

    node.wait(open_questions)
    return life.COMPARING


def compare(node: Node) -> str:
    """Tells all sites how the common model compares with the one that this site trains alone."""
    body = versus_local.compared(node.generation.rounds, _unconfirmed(node) / "model.safetensors", node.folder / LOCAL)
    if body["why_not"]:
        node.log("warning", "not compared with this site's model alone", reason=body["why_not"])
    node.bulletin.announce(versus_local.KIND, body, node.membership.mesh.generation)
    node.remember()  # a node that has its result does not compare again, and others may still need to hear this
    return life.COMPARED


def add_comparisons(node: Node) -> str:
    """Waits until all have told their comparison, and adds the verdicts to the result, which is complete then."""
    rounds, unconfirmed, result = node.generation.rounds, _unconfirmed(node), node.folder / RESULT
    node.wait(lambda: node.silent(versus_local.KIND))
    versus_local.add_evidence(rounds, unconfirmed)
    add_contradictions(unconfirmed, node.bulletin, node.membership)
    node.observe("result confirmed", node.membership.experiment.rounds)
    _write_site_model(rounds, unconfirmed)
    put_in_place(unconfirmed, result)
    names, what = node.membership.names, "the look at undefined metrics"
    for metric, sites in node.aside.tried(what, lambda: undefined_metrics(result, names), {}).items():
        node.log("warning", "a metric has no value at some sites", metric=metric, sites=", ".join(sites))
    return life.ENDING


def wait_for_all(node: Node) -> str:
    """Waits until every site has its confirmed result. From then on nobody can need an earlier state again. Before, the
    sites choose their own models."""
    rounds, result, last = node.generation.rounds, node.folder / RESULT, node.membership.experiment.rounds
    _compare_with_neighbours(rounds, result)
    choosing.choose(node, result)
    node.observe("result written", last)
    n, step = rounds.problem.n, choosing.step_after(rounds)
    sums_of(rounds).over_sites(torch.eye(n)[rounds.membership.number], step, torch.arange(n))
    return life.FINISHED


def _compare_with_neighbours(rounds: Rounds, folder: Path) -> None:
    """Tells the neighbours in the tree of the sums the digest of this site's confirmed result, and waits for theirs.
    So every site has a neighbour that stays until it has heard all announcements."""
    step = rounds.membership.experiment.rounds + FIRST_ROUND + 2
    mine, positions = result_digest(folder), sums_of(rounds).neighbours

    def same(position: int, theirs: bytes) -> None:
        if theirs != mine.encode():
            raise DecodeError(f"its result has the digest {theirs[:16]!r}, that of this site {mine[:16]}")

    rounds.mailroom.post(step, dict.fromkeys(positions, mine.encode()))
    rounds.mailroom.take(step, positions, same)


def _write_site_model(rounds: Rounds, result: Path) -> None:
    """Writes the common model with what stays at this site, if the model has such parts. Nothing of it is sent."""
    flat, own = rounds.problem.flat_model, rounds.state.own
    if own is None or not flat.differs_by_site:
        return
    common = flat.row_of_state_dict(load_file(result / "model.safetensors"))
    about = {"architecture": flat.architecture, "which": "final", "site": rounds.membership.name}
    with new_folder(rounds.node.folder / PERSONAL) as into:
        into.write_model("site", flat.state_dict(flat.at_site(common, own.rows[0, 0].cpu())), about)


def part(node: Node) -> str:
    """Stays until no neighbour needs anything. Then waits for their last messages, but not forever, since these may
    be lost."""
    node.log("info", "finished", rounds=node.membership.experiment.rounds, folder=RESULT)
    links, mailroom = node.generation.links, node.generation.mailroom
    notices, free_since = Notices(), None
    while not links.all_finished.wait(0.05):
        node.oversight.raise_if_deciding()
        waiting = mailroom.unacknowledged_by()
        if node.oversight.stopping and waiting:
            raise node.oversight.stopping
        free_since = None if waiting else (free_since or time.monotonic())
        if node.oversight.stopping or (free_since is not None and time.monotonic() - free_since > _FAREWELL_S):
            break
        links.finish(waiting)
        if waiting:
            names = ", ".join(node.membership.mesh.names[position] for position in waiting)
            node.oversight.stop_if_waited_too_long(notices.seconds, names)
            if notices.due():
                node.log("warning", "finished; others still need messages of this node", sites=names)
    else:
        time.sleep(0.3)  # for last messages on their way
    node.ledger.forget_earlier()
    return ""
