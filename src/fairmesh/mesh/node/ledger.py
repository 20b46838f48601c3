"""What a node has voted, promised and followed: kept in decisions.json, and announced to all sites with signatures."""

import itertools
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput, FairmeshError
from fairmesh.mesh.announcements import FOLLOW_AT_MOST
from fairmesh.mesh.enrol.roster import Mesh
from fairmesh.mesh.node.claims import PUT_BACK
from fairmesh.mesh.node.decisions import (
    NO_VOTE,
    Ballot,
    Base,
    Begun,
    Certificate,
    Claim,
    Commit,
    Proposal,
    Seen,
    Vote,
    Voter,
    base_of,
    not_following,
    without_state,
)
from fairmesh.mesh.node.state_lock import locked
from fairmesh.mesh.node.store import FINISHED, landmarks_in, put_run_aside
from fairmesh.mesh.wire.bulletin import Announcement, Bulletin
from fairmesh.storage.files import private_files, private_folder, read_record, write_record

_WISH, _DECISIONS = "vote.json", "decisions.json"
_COMMITS_AT_ONCE, _LONGEST_PAUSE_S = 3, 600.0


class Removed(FairmeshError):
    """The other sites continue without this one."""


def wish(
    state: Path,
    mesh: Mesh,
    own: str,
    gone: Sequence[str],
    back_to: int | None = None,
    restored: Sequence[str] = (),
) -> Mesh:
    """Records that this site votes to continue without the sites in `gone`, to go back to a round, or to restore sites
    that have lost their state. With none of these, it takes its vote back. Its node announces the vote to the others.
    If this site is itself to be restored, what it has of the run is put aside.

    Returns:
        The mesh that would remain.
    """
    if (state / FINISHED).exists():
        raise BadInput(
            "the run has ended: every site has its result, and the checkpoints were removed. To continue from the "
            "model, found a new mesh"
        )
    if own in gone:
        raise BadInput(f"{own} is this site itself; stop its node, and let the others remove it")
    ordered = tuple(name for name in mesh.names if name in restored)
    proposal = Proposal(mesh.generation, mesh.without(*gone).removed[len(mesh.removed) :], back_to, ordered)
    remaining = mesh.after(proposal.sites, back_to, restored)
    if not Voter(own, _present(mesh)).is_majority(proposal):
        raise BadInput(
            f"{len(mesh.present) - len(gone)} of {len(mesh.present)} sites would remain; a removal needs more than half"
        )
    if back_to is not None and back_to not in (kept := landmarks_in(state, _last_generation(_read(state)))):
        shown = ", ".join(map(str, kept)) or "none yet"
        raise BadInput(f"there is no kept checkpoint of round {back_to} to go back to; those of this site: {shown}")
    private_folder(state)
    with private_files():
        if own in restored:
            with locked(state):
                put_run_aside(state)
        write_record(state / _WISH, proposal.table())
    return remaining


def wished(state: Path, mesh: Mesh) -> Proposal | None:
    """Returns what this site votes for in this generation, or None if it has not said."""
    found = _recorded(state)
    return found if found is not None and found.generation == mesh.generation else None


def _recorded(state: Path) -> Proposal | None:
    table = read_record(state / _WISH, "it is this site's vote; vote again (fairmesh mesh remove, rewind or restore)")
    return Proposal.of(table) if table else None


def still_in(state: Path, mesh: Mesh, is_lost: bool = False) -> Mesh:
    """Returns the mesh of a file, whose addresses may be new, after all that this node has decided since. If its state
    `is_lost`, decisions that cannot be read are left out: the node takes them over from the others."""
    try:
        return _after(mesh, _read(state)["decisions"], state)
    except BadInput:
        if is_lost:
            return mesh
        raise


def _after(mesh: Mesh, decisions: Sequence[Mapping[str, Any]], state: Path) -> Mesh:
    for proposal in map(Proposal.of, decisions):
        if mesh.generation > proposal.generation:
            raise BadInput(
                f"the mesh file says that {list(mesh.removed)} have left, but this node decides that by itself, in "
                f"{state / _DECISIONS}; use the mesh file as the founder made it"
            )
        mesh = mesh.after(proposal.sites, proposal.round, proposal.restored)
    return mesh


def _read(state: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"decisions": [], "adopted": 0, "begun": [], "votes": {}, "vote": None, "commits": []}
    return empty | read_record(state / _DECISIONS, PUT_BACK)


def _present(mesh: Mesh) -> list[str]:
    return [member.name for member in mesh.present]


def _last_generation(table: Mapping[str, Any]) -> int:
    """Returns the generation that a node has begun last."""
    return table["begun"][-1][0] if table["begun"] else 1


class Ledger:
    """The decisions of a mesh as one node takes part in them. Every promise is on disk before it is announced.

    Args:
        state: The node's state folder.
        mesh: The mesh of the site's file.
        own: The site.
        bulletin: Where announcements are made and heard.
    """

    def __init__(self, state: Path, mesh: Mesh, own: str, bulletin: Bulletin):
        self._state, self._own, self._bulletin, self._founded = state, own, bulletin, mesh
        self._lock = threading.RLock()
        if not (state / _DECISIONS).exists() and any(state.glob("generation-*")):
            raise BadInput(f"{state / _DECISIONS} is missing, though a run was begun in {state}; {PUT_BACK}")
        self._table = _read(state)
        _recorded(state)  # refuses a damaged vote
        self._committed_at = time.monotonic()
        self._verified: dict[tuple[str, int], tuple[object, Certificate | None]] = {}  # by site and generation
        vote, commits = self._table["vote"], self._table["commits"]
        if vote is not None:
            bulletin.announce("vote", vote["body"], vote["number"])
        if commits:
            bulletin.announce("commit", commits[-1]["body"], commits[-1]["number"])
        if self._table["decisions"]:
            self._announce_follow()

    def _announce_follow(self) -> None:
        """Announces the certificates that this node follows: all, or as many of the newest as others accept. No present
        site is so far behind that it needs the others."""
        decisions = self._table["decisions"]
        sizes = itertools.accumulate(len(json.dumps(table)) + 2 for table in reversed(decisions))
        fitting = sum(size <= FOLLOW_AT_MOST - 1024 for size in sizes)
        self._bulletin.announce("follow", {"certificates": decisions[-max(1, fitting) :]}, len(decisions))

    def _save(self, **fields: Any) -> None:
        self._table = self._table | fields
        write_record(self._state / _DECISIONS, self._table)

    # The mesh

    @property
    def mesh(self) -> Mesh:
        """Returns the mesh after all decisions, also one that has not begun yet."""
        return self.mesh_in(math.inf)

    def mesh_in(self, generation: float) -> Mesh:
        """Returns the mesh of an earlier generation."""
        earlier = [table for table in self._table["decisions"] if table["generation"] < generation]
        return _after(self._founded, earlier, self._state)

    @property
    def begun(self) -> list[Begun]:
        """Returns the generations that this node has begun, with how far it came in them."""
        return [Begun(*one) for one in self._table["begun"]]

    @property
    def pending(self) -> bool:
        """Returns whether the newest generation is decided and not begun."""
        begun = self._table["begun"]
        return begun[-1][0] < self.mesh.generation if begun else len(self._table["decisions"]) > self._table["adopted"]

    @property
    def awaits_restoring(self) -> bool:
        """Returns whether this site has no state and votes for getting one from its neighbours, or has agreed on it
        with them."""
        own_wish = _recorded(self._state)
        wishes = own_wish is not None and self._own in own_wish.restored
        return not self._table["begun"] and (wishes or bool(self._table["decisions"]))

    def adopt(self) -> bool:
        """Takes over the decisions of earlier generations from the others, at a site that has lost its own. Returns
        whether it did."""
        with self._lock:
            if self._table["begun"] or self.pending:
                return False
            certificate = self.voter().to_adopt(self.seen())
            if certificate is None:
                return False
            self._decided(certificate, adopted=len(self._table["decisions"]) + 1)
            return True

    def begin(self, start: int) -> None:
        """Records that this node continues in the newest generation from a round."""
        with self._lock:
            generation = self.mesh.generation
            kept = [list(one) for one in self.begun if one.generation < generation]
            self._save(begun=[*kept, [generation, start, start, start]])

    def forget_earlier(self) -> None:
        """Records that the state of earlier generations is no longer kept."""
        with self._lock:
            self._save(begun=self._table["begun"][-1:])

    @property
    def pinned(self) -> int | None:
        """Returns the round from which on everything must be kept, because a certificate may still ask for it."""
        claims = [Claim.of(one["body"]) for one in self._table["commits"]]
        return min((claim.begun[-1].oldest for claim in claims if claim.begun), default=None)

    def outputs(self) -> int:
        """Returns the most outputs of the model that a site has claimed in a decision. It may not be true."""
        claims = [claim for one in self._table["decisions"] for claim in one["commits"].values()]
        return max((int(claim["outputs"]) for claim in claims), default=0)

    # Votes

    def vote(self) -> None:
        """Announces the vote that `fairmesh mesh remove` or `rewind` has recorded, unless it is announced already."""
        with self._lock:
            mesh, table = self.mesh, self._table
            try:
                found = wished(self._state, mesh)
                if not table["begun"] and not self.pending:  # it has lost its state, and may not know the generation
                    found = _recorded(self._state)
                    found = found and found._replace(generation=mesh.generation)
            except BadInput:  # damaged since the start; what was announced counts
                return
            before = table["vote"]
            if found is None or (before is None and found.empty):
                return
            body = found.table()
            if before is not None and before["body"] == body:
                return
            number = self._bulletin.next_number("vote", table["votes"].get(self._own, -1))
            self._save(votes=table["votes"] | {self._own: number}, vote={"number": number, "body": body})
            self._bulletin.announce("vote", body, number)

    def votes(self) -> dict[str, list[str]]:
        """Returns who has voted for what in this generation, in words."""
        found: dict[str, list[str]] = {}
        for site, vote in self.seen().votes.items():
            if not vote.proposal.empty:
                found.setdefault(vote.proposal.in_words(), []).append(site)
        return found

    def somebody_goes_back(self) -> bool:
        """Returns whether a site votes to go back to a round, which must be kept while it does."""
        return any(vote.proposal.round is not None for vote in self.seen().votes.values())

    def _own_proposal(self) -> Proposal:
        return self.seen().votes.get(self._own, NO_VOTE).proposal

    def impossible(self) -> str:
        """Returns why this site's own vote can no longer be fulfilled here, or ""."""
        back_to, kept = self._own_proposal().round, landmarks_in(self._state, _last_generation(self._table))
        if back_to is None or back_to in kept:
            return ""
        return f"this site no longer has round {back_to} to go back to, but {', '.join(map(str, kept))}"

    @property
    def has_voted(self) -> bool:
        """Returns whether this site has voted for something."""
        return not self._own_proposal().empty

    def without_vote(self) -> list[str]:
        """Returns the sites that have not voted for what this site has voted for and must do so."""
        votes, proposal = self.seen().votes, self._own_proposal()
        return [site for site in self.voter().remaining(proposal) if votes.get(site, NO_VOTE).proposal != proposal]

    def voter(self) -> Voter:
        with self._lock:
            mesh, table = self.mesh, self._table
            commits = [Commit.of(commit["body"]) for commit in table["commits"]]

            def possible(proposal: Proposal) -> bool:
                try:
                    mesh.after(proposal.sites, proposal.round, proposal.restored)
                except BadInput:
                    return False
                kept = proposal.round is None or proposal.round in landmarks_in(self._state, _last_generation(table))
                return kept and proposal.generation == mesh.generation

            return Voter(self._own, _present(mesh), possible, table["votes"], commits)

    def seen(self) -> Seen:
        """Returns what the sites of this generation have announced in it."""
        mesh = self.mesh

        def announced(kind: str) -> dict[str, Announcement]:
            entries = {site: self._bulletin.entry(site, kind) for site in _present(mesh)}
            return {site: one for site, one in entries.items() if one and one.body["generation"] == mesh.generation}

        votes = {site: Vote(vote.number, Proposal.of(vote.body)) for site, vote in announced("vote").items()}
        commits = {site: Commit.of(commit.body) for site, commit in announced("commit").items()}
        return Seen(votes, commits, self._follows(mesh))

    def _follows(self, mesh: Mesh) -> dict[str, Certificate]:
        """Returns the certificates that sites follow at the end of this generation of the mesh."""
        certificates = {}
        for site, follow in self._announced_follows(mesh).items():
            tables = [table for table in follow.body["certificates"] if table["generation"] == mesh.generation]
            certificate = self._checked(site, follow.number, tables[0], mesh) if tables else None
            if certificate is not None:
                certificates[site] = certificate
        return certificates

    def _announced_follows(self, mesh: Mesh) -> dict[str, Announcement]:
        entries = {site: self._bulletin.entry(site, "follow") for site in _present(mesh)}
        return {site: follow for site, follow in entries.items() if follow}

    def _checked(self, site: str, number: int, table: dict[str, Any], mesh: Mesh) -> Certificate | None:
        """Returns a certificate if all sites that remain have signed its commits, else None."""
        known, found = self._verified.get((site, mesh.generation), (None, None))
        if known == number and found is not None:
            return found
        keys = [self._bulletin.of(name, "certificate") for name in _present(mesh)]
        if known != [number, keys]:  # with other certificates of the sites, it may be valid
            found = self._check(table, mesh)
            self._verified[site, mesh.generation] = [number, keys] if found is None else number, found
        return found

    def _check(self, table: dict[str, Any], mesh: Mesh) -> Certificate | None:
        proposal, commits = Proposal.of(table), table["commits"]
        voter = Voter(self._own, _present(mesh))
        remain = voter.remaining(proposal)
        if sorted(commits) != remain or sorted(table["votes"]) != remain or not voter.is_majority(proposal):
            return None
        ballot = Ballot.of(table).table()

        def signed(site: str, commit: Mapping[str, Any]) -> bool:
            body = ballot | Claim.of(commit).table()
            return self._bulletin.signed_by(site, "commit", commit["number"], body, commit["signature"])

        return Certificate.of(table) if all(map(signed, commits, commits.values())) else None

    def has_forgotten(self) -> bool:
        """Returns whether the others follow a commit of this site that this site does not know of."""
        return bool(self._table["begun"]) and self.voter().to_adopt(self.seen()) is not None

    def removed_by(self) -> Certificate | None:
        """Returns a certificate by which the others continue without this site, in this generation or earlier."""
        for generation in [*(one["generation"] for one in self._table["decisions"]), self.mesh.generation]:
            mesh = self.mesh_in(generation)
            found = Voter(self._own, _present(mesh)).removed_by(Seen({}, {}, self._follows(mesh)))
            if found is not None:
                return found
        return None

    # Promises

    def due(self) -> Certificate | Ballot | None:
        """Returns the certificate that this node must follow or else the ballot that it must commit to, if there is
        one. Records the newest votes that it has seen."""
        with self._lock:
            voter, seen = self.voter(), self.seen()
            ballot = voter.to_commit(seen.votes)
            if voter.numbers != self._table["votes"]:
                self._save(votes=voter.numbers)
            return voter.to_follow(seen) or (None if self._too_soon() else ballot)

    def _too_soon(self) -> bool:
        """Returns whether to train on for a while before the next commit. Every commit stops the training until
        somebody votes otherwise, so a site that votes again and again must not stop the others all the time."""
        commits = len(self._table["commits"])
        if commits < _COMMITS_AT_ONCE:
            return False
        pause = min(2.0 ** (commits - _COMMITS_AT_ONCE + 1), _LONGEST_PAUSE_S)
        return time.monotonic() - self._committed_at < pause

    @property
    def is_committed(self) -> bool:
        """Returns whether this node has committed to a ballot, and nobody has voted otherwise since."""
        return self.voter().is_committed

    def waits_for(self) -> list[str]:
        """Returns the sites whose commit is missing for the ballot that this node has committed to."""
        return self.voter().waits_for(self.seen())

    def voted_otherwise_since(self, certificate: Certificate) -> list[str]:
        """Returns the sites that are bound by a certificate and have voted otherwise since. If they commit only after
        that, the others go back to the rounds of their own commits, so people should know who did."""
        newest = self._table["votes"]
        return [site for site, number in certificate.ballot.votes if newest.get(site, -1) > number]

    def commit(self, commit: Commit) -> None:
        with self._lock:
            commits, body = self._table["commits"], commit.table()
            number = self._bulletin.next_number("commit", commits[-1]["number"] if commits else -1)
            self._save(commits=[*commits, {"number": number, "body": body}])
            self._committed_at = time.monotonic()
            self._bulletin.announce("commit", body, number)

    def follow(self, certificate: Certificate) -> None:
        """Ends this generation. After this, a restart continues with the next one."""
        with self._lock:
            self._decided(certificate, begun=dict(certificate.claims)[self._own].table()["begun"])

    def _decided(self, certificate: Certificate, **fields: Any) -> None:
        decisions = [*self._table["decisions"], self._table_of(certificate)]
        self._save(decisions=decisions, votes={}, vote=None, commits=[], **fields)
        self._announce_follow()

    def _table_of(self, certificate: Certificate) -> dict[str, Any]:
        for follow in self._announced_follows(self.mesh).values():  # another site may have passed it on
            for table in follow.body["certificates"]:
                if Ballot.of(table) == certificate.ballot and self._check(table, self.mesh) == certificate:
                    return table
        entries = {site: self._bulletin.entry(site, "commit") for site, _ in certificate.claims}
        signatures = {site: (one.number, one.signature.hex()) for site, one in entries.items() if one is not None}
        return certificate.table(signatures)

    # Beginning the next generation

    def unready(self) -> tuple[list[str], list[str]]:
        """Returns the sites that do not follow the newest decision yet, and those that have told different sites
        different things."""
        certificate = self._newest()
        before = self.mesh_in(certificate.proposal.generation)
        remain = dict(certificate.ballot.votes)
        follows = {site: one for site, one in self._follows(before).items() if site in remain}
        return not_following(certificate, follows)

    def base(self) -> Base:
        """Returns from where the newest generation begins. Raises Lie if the sites' claims cannot be true."""
        mesh = self.mesh
        neighbours = {name: mesh.neighbours(name) for name in _present(mesh)}
        decided = [Proposal.of(one) for one in self._table["decisions"]]
        return base_of(dict(self._newest().claims), neighbours, decided)

    def measured_since(self) -> int:
        """Returns the first round after the last time that a site was restored, which has lost what it had measured."""
        starts, since = {one.generation: one.start for one in self.begun}, 0
        for certificate in map(Certificate.of, self._table["decisions"]):
            then = certificate.proposal.generation + max(1, len(certificate.proposal.sites))
            if without_state(dict(certificate.claims)) and then in starts:
                since = starts[then] + 1
        return since

    def restored(self) -> list[str]:
        """Returns the sites that get their state from their neighbours when the newest generation begins."""
        return without_state(dict(self._newest().claims)) if self._table["decisions"] else []

    def _newest(self) -> Certificate:
        return Certificate.of(self._table["decisions"][-1])
