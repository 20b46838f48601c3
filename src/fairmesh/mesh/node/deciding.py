"""A node's part in the decisions of the sites: to continue without some, to go back to a round, to restore a site, and
to end because this site's own numbers have diverged."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from fairmesh.algorithms.schedules import with_run_length
from fairmesh.errors import Diverged, Interrupted, in_a_line
from fairmesh.mesh.node import divergence, life, states
from fairmesh.mesh.node.data_agreement import settle
from fairmesh.mesh.node.decisions import Begun, Certificate, Claim, Commit, Lie
from fairmesh.mesh.node.ledger import Removed
from fairmesh.mesh.node.membership import Membership
from fairmesh.mesh.node.node import Node
from fairmesh.mesh.node.oversight import Decide
from fairmesh.mesh.node.rounds import Rounds, identity_of, restore, restoring_step
from fairmesh.mesh.node.store import RESULT, Store, landmarks_in, put_aside
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.mesh.wire.transport import FIRST_ROUND
from fairmesh.storage.occupied import PERSONAL
from fairmesh.training.loop import TrainingState, what_to_lower

_TELLING_S = 15.0  # wait at most until all neighbours are there to hear that this site has diverged
_LISTENING_S = 5.0  # wait for the votes of the others at a start, if this site has voted


def decide(node: Node) -> str:
    """Takes part in a decision of the sites until training continues: in the next generation or, if a vote is
    taken back before all have committed to it, in this one."""
    ledger = node.ledger
    with node.opened(0) as mailroom, node.linked(mailroom, only_news=True):
        node.oversight.deciding()
        while True:
            node.wait(lambda: _undecided(node, mailroom))
            if ledger.pending and not _unready(node):
                break
            if not ledger.pending and not ledger.is_committed:
                node.log("info", "the vote is off; continuing")
                return life.ON_DATA if ledger.begun else life.LOST
    _begin(node)
    return life.ON_DATA


def _undecided(node: Node, mailroom: Mailroom) -> Sequence[str]:
    """Takes the next step of a decision, and returns whom it waits for; nobody after a step, or if it is over."""
    ledger = node.ledger
    ledger.vote()
    _stop_if_removed(node)
    if _promise(node, mailroom):
        return []
    whom: Sequence[str] = ()
    if ledger.pending:
        whom = _unready(node)
    elif ledger.is_committed:
        whom = ledger.waits_for() or ["the others"]
    node.life.enter(life.DECIDING, f"waiting for {', '.join(whom)}" if whom else "")
    return whom


def _after_divergence(node: Node, error: divergence.SiteDiverged) -> None:
    """Tells the neighbours, who tell all others, and ends. Returns instead if a decision is due, because this site
    has voted: a member can send numbers that grow until the models of the others explode, and a node that only
    ended then, at every start, could not be heard by the others."""
    membership, bulletin = node.membership, node.bulletin
    mesh = membership.mesh
    node.log("error", "diverged", reason=str(error))
    bulletin.announce(divergence.KIND, error.body(mesh.generation))
    if _decision_is_due(node):
        return
    node.life.enter(life.DIVERGED)
    with node.opened(0) as mailroom, node.linked(mailroom, only_news=True):
        until = time.monotonic() + _TELLING_S
        while time.monotonic() < until and not mailroom.met_all() and not node.oversight.stopping:
            time.sleep(0.02)
        time.sleep(1.5)  # for announcements on their way, in both directions
    _stop_if_removed(node)
    node.remember()  # so that the node says the same when it is started again
    algorithm = with_run_length(membership.experiment.algorithm, membership.experiment.rounds)
    advice = what_to_lower(algorithm, node.problem(membership).flat_model.dim)
    kept = landmarks_in(node.folder, mesh.generation)
    others = divergence.told(bulletin, membership)
    others.pop(membership.name, None)
    raise Diverged(divergence.in_words(error, list(others.values()), advice, kept)) from error


def votes_are_in(node: Node) -> bool:
    """Is called at every start, before anything that may fail: if this site has voted, it listens for a moment
    whether the others have voted the same. Returns whether a decision is due. What it has heard is kept, so that
    votes are counted even if a node never lives long."""
    if not node.ledger.begun or node.membership.name in divergence.told(node.bulletin, node.membership):
        return False  # it has no state, or had diverged, and then votes are heard after that
    due = _decision_is_due(node, _LISTENING_S)
    if node.ledger.has_voted:
        node.remember()
    return due


def after_failure(node: Node, error: Exception) -> None:
    """Raises an error that ends this node. Returns instead if a decision is due, because this site has voted: if
    what a member sends makes the others fail at every start, they can still continue without it."""
    if isinstance(error, Decide):
        return
    if isinstance(error, divergence.SiteDiverged):
        _after_divergence(node, error)
        return
    if node.oversight.stopping or isinstance(error, Removed | Diverged | Interrupted):
        raise error
    if node.ledger.has_voted:
        node.log("error", "failed; this site has voted, so its node waits for the others", reason=in_a_line(error))
    if not _decision_is_due(node):
        raise error


def await_restoring(node: Node) -> str:
    """Waits, without a state, until all have voted to give this site one. Raises Decide then. Takes over what the
    sites have decided before."""
    ledger = node.ledger
    while True:
        node.membership = replace(node.membership, mesh=ledger.mesh)
        with node.opened(0) as mailroom, node.linked(mailroom, only_news=True):
            ledger.vote()
            node.wait(lambda: [] if ledger.adopt() else ledger.without_vote() or ["the others"])


def _restore(node: Node, done: int, membership: Membership) -> None:
    """Writes the first checkpoint of a generation from what the neighbours know of this site."""
    node.membership = membership
    store = Store(node.folder, membership.mesh.generation, node.log)
    if store.newest == done:
        return
    with node.opened(restoring_step(done)) as mailroom:
        problem, start = settle(node, mailroom)
        node.life.enter(life.RESTORING)
        with node.linked(mailroom):
            restore(membership, problem, mailroom, done, store, start)
    own = problem.flat_model.own_dim
    told = {"local_parts": "start again from the initial values, since nothing of them ever left this site"}
    node.log("warning", "this site's state was restored from its neighbours", round=done, **(told if own else {}))


def _decision_is_due(node: Node, seconds: float = math.inf) -> bool:
    """Waits until all have voted as this site has, for some time at most. Returns False if it has not voted, or
    takes its vote back."""
    ledger, until = node.ledger, time.monotonic() + seconds
    ledger.vote()
    if not ledger.has_voted:
        return False
    with node.opened(0) as mailroom, node.linked(mailroom, only_news=True):

        def missing() -> list[str]:
            waits = ledger.has_voted and time.monotonic() <= until
            return (ledger.without_vote() or ["the others"]) if waits else []

        try:
            node.life.enter(life.VOTING)
            node.wait(missing)
        except Decide:
            return True
    return False


def _stop_if_removed(node: Node) -> None:
    certificate = node.ledger.removed_by()
    if certificate is not None:
        voters = ", ".join(site for site, _ in certificate.ballot.votes)
        raise Removed(
            f"{voters} have all voted to continue without {node.membership.name}, so this node stops; nothing was "
            "changed here. Ask them why, and for a new mesh to join"
        )


def _promise(node: Node, mailroom: Mailroom) -> bool:
    """Commits to a ballot or follows a certificate if it is time to. Returns whether it did."""
    ledger = node.ledger
    due = ledger.due()
    if isinstance(due, Certificate):
        otherwise = ", ".join(ledger.voted_otherwise_since(due))
        ledger.follow(due)
        node.remember()
        node.observe("followed", 0)
        late = {"voted_otherwise_too_late": otherwise} if otherwise else {}
        node.log("warning", "decided", decision=due.proposal.in_words(), **late)
    elif due is not None:
        claim = _claim(node, mailroom)
        ledger.commit(Commit(due, claim))
        node.remember()
        done = claim.begun[-1].done if claim.begun else None
        node.observe("committed", done or 0)
        node.log("warning", "all have voted", decision=due.proposal.in_words(), round=done)
    return due is not None


def _claim(node: Node, mailroom: Mailroom) -> Claim:
    """Returns how far this node has come, in every generation whose state it keeps. A node that has not computed
    again what it had done before a restart takes it from its journal."""
    begun = node.ledger.begun
    if node.ledger.pending or not begun:  # it has not trained since it said so, or has lost its state
        return Claim(tuple(begun), node.outputs())
    last = begun[-1]
    store = Store(node.folder, last.generation, node.log)
    kept = store.newest or last.start
    done = max(node.reached(), kept, mailroom.first_unfinished(kept + FIRST_ROUND) - FIRST_ROUND)
    done = min(done, node.membership.experiment.rounds)
    here = Begun(last.generation, last.start, store.oldest(last.start), done)
    return Claim((*begun[:-1], here), node.outputs())


def _unready(node: Node) -> list[str]:
    """Returns the sites without which the next generation cannot begin. Logs why, if it is not their silence."""
    missing, sites = node.ledger.unready()
    why = f"{', '.join(sites)} told different sites different things; vote them out as well"
    if missing and not sites:
        return missing
    if not sites:
        try:
            node.ledger.base()
            return []
        except Lie as lie:
            sites, why = list(lie.sites), f"{lie}; vote the one out that does not tell the truth"
    node.aside.once(("cannot continue", why), "error", "the sites cannot continue", reason=why)
    return sites


def _begin(node: Node) -> None:
    """Begins the generation that was decided, from the round that all sites agree on. Whatever this node had stays
    where it is, or is put aside."""
    ledger = node.ledger
    base, mesh = ledger.base(), ledger.mesh
    before, after = node.in_generation(base.generation), replace(node.membership, mesh=mesh)
    for written in (RESULT, PERSONAL):  # this node may have its result, but the others do not
        put_aside(node.folder / written, before.mesh.generation)
    node.observe("agreed", base.round)
    if base.round and node.membership.name in ledger.restored():
        _restore(node, base.round, after)
    elif base.round:
        node.membership = before
        _save_without(node, base.round, before, after)
    node.observe("saved without", base.round)
    ledger.begin(base.round)
    node.observe("begun", base.round)
    node.membership = after
    node.log("info", "continuing", without=", ".join(mesh.removed), round=base.round, sites=len(after.present))


def _save_without(node: Node, agreed: int, before: Membership, after: Membership) -> None:
    """Writes the first checkpoint of the next generation: the state after the agreed round, without those that have
    left since. The kept checkpoints before that round are taken over in the same way, so that all can still go back
    to them."""
    gone = [name for name in after.mesh.removed if name not in before.mesh.removed]
    changed = bool(gone or node.ledger.restored())
    numbers = [before.present.index(before.mesh.position(name)) for name in gone]
    slots = [before.present.index(position) for position in (before.position, *before.around)]
    problem = node.problem(after)
    identity = identity_of(after, problem)
    into = Store(node.folder, after.mesh.generation, node.log)
    with node.opened(0) as mailroom:
        node.oversight.deciding()
        mailroom.alone = True
        store = Store(node.folder, before.mesh.generation, node.log)
        rounds = Rounds(node, node.problem(before), mailroom, store)

        def reduced(done: int) -> TrainingState:
            state = rounds.state_at(done)
            return states.without(state, numbers, slots, problem.prior_of_sites) if changed else state

        for kept in [one for one in store.landmarks if one <= agreed]:
            into.keep(reduced(kept), kept, identity)
        into.save(reduced(agreed), agreed, identity, len(after.present))
