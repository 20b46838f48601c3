"""How sites agree to remove or restore one, or to go back: votes, then commits to these votes, then a certificate.

This is the protocol alone, without files or messages; docs/concepts/protocol.md explains it. A decision ends a
generation of the mesh and begins the next one:

1. Every site that remains votes for the same proposal. A newer vote of a site replaces its older one.
2. A site that sees all these votes stops training and commits to exactly them. It says how far it has come.
3. The commits of all sites that remain are the certificate. A site that has it follows it: it never votes or commits in
   this generation again, and passes the certificate on.
4. Once all sites that remain follow the same certificate, they begin the next generation.

Sites that wait in step 4 are already members of the next generation. So they can vote there, and remove a site that
does not take part in step 4 as well.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

# Rounds: a neighbour may be one behind, and a power cut may have lost 64 messages that it had not confirmed.
BEHIND = 65


class Proposal(NamedTuple):
    """What is voted on in a generation. A proposal of nothing takes a vote back."""

    generation: int
    sites: tuple[str, ...] = ()  # to continue without
    round: int | None = None  # to go back to; None: to the last that all have done
    restored: tuple[str, ...] = ()  # sites that lost their state, and get it from their neighbours

    @property
    def empty(self) -> bool:
        return not self.sites and self.round is None and not self.restored

    def table(self) -> dict[str, Any]:
        """Returns it in the form in which it is announced, as all `table` here do."""
        return self._asdict() | {"sites": list(self.sites), "restored": list(self.restored)}

    @staticmethod
    def of(table: Mapping[str, Any]) -> "Proposal":
        return Proposal(table["generation"], tuple(table["sites"]), table["round"], tuple(table["restored"]))

    def in_words(self) -> str:
        if self.round is not None:
            return f"go back to round {self.round}"
        if self.restored:
            return f"restore {', '.join(self.restored)}"
        return f"continue without {', '.join(self.sites)}"


class Vote(NamedTuple):
    """A site's vote. Of two votes of a site, the one with the higher number counts."""

    number: int
    proposal: Proposal


NO_VOTE = Vote(-1, Proposal(-1))  # of a site that has not voted


class Begun(NamedTuple):
    """How far a site came in a generation that it began."""

    generation: int
    start: int  # the round with which the generation began
    oldest: int  # the earliest round that the site can still go back to
    done: int  # rounds


class Claim(NamedTuple):
    """What a site says about itself when it commits."""

    begun: tuple[Begun, ...]  # the generations whose state it keeps, the newest last; none if it has lost its state
    outputs: int  # of its model

    def table(self) -> dict[str, Any]:
        return {"begun": [list(generation) for generation in self.begun], "outputs": self.outputs}

    @staticmethod
    def of(table: Mapping[str, Any]) -> "Claim":
        return Claim(tuple(Begun(*generation) for generation in table["begun"]), table["outputs"])


class Ballot(NamedTuple):
    """A proposal and the votes for it, one of each site that remains."""

    proposal: Proposal
    votes: tuple[tuple[str, int], ...]  # site and number, by site

    def table(self) -> dict[str, Any]:
        return self.proposal.table() | {"votes": dict(self.votes)}

    @staticmethod
    def of(table: Mapping[str, Any]) -> "Ballot":
        return Ballot(Proposal.of(table), tuple(sorted(table["votes"].items())))


class Commit(NamedTuple):
    """A site's promise to follow the certificate of a ballot, unless it commits to a later ballot first."""

    ballot: Ballot
    claim: Claim

    def table(self) -> dict[str, Any]:
        return self.ballot.table() | self.claim.table()

    @staticmethod
    def of(table: Mapping[str, Any]) -> "Commit":
        return Commit(Ballot.of(table), Claim.of(table))


class Certificate(NamedTuple):
    """The commits of all sites that remain."""

    ballot: Ballot
    claims: tuple[tuple[str, Claim], ...]  # by site

    @property
    def proposal(self) -> Proposal:
        return self.ballot.proposal

    def table(self, signatures: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
        """`signatures` has the number and the signature of each site's commit."""
        commits = {
            site: claim.table() | dict(zip(("number", "signature"), signatures[site])) for site, claim in self.claims
        }
        return self.ballot.table() | {"commits": commits}

    @staticmethod
    def of(table: Mapping[str, Any]) -> "Certificate":
        claims = sorted((site, Claim.of(commit)) for site, commit in table["commits"].items())
        return Certificate(Ballot.of(table), tuple(claims))


class Lie(Exception):
    """What sites claim cannot all be true, so nobody begins the next generation."""

    def __init__(self, sites: Sequence[str], reason: str):
        super().__init__(reason)
        self.sites = tuple(sites)


class Seen(NamedTuple):
    """The newest announcements that a site knows, checked, by site."""

    votes: Mapping[str, Vote]
    commits: Mapping[str, Commit]
    follows: Mapping[str, Certificate]  # of those that follow a certificate in this generation


class Voter:
    """One site's part in the decision that ends a generation.

    Args:
        own: The site.
        present: The sites of this generation.
        possible: Returns whether the mesh could continue after a proposal. Default: always.
        numbers: The newest vote of each site that this site has known. It must be kept over restarts.
        commits: This site's own commits in this generation, oldest first. They must be kept over restarts.
    """

    def __init__(
        self,
        own: str,
        present: Sequence[str],
        possible: Callable[[Proposal], bool] = lambda proposal: True,
        numbers: Mapping[str, int] | None = None,
        commits: Sequence[Commit] = (),
    ):
        self.own, self.present, self._possible = own, tuple(present), possible
        self.numbers, self.commits = dict(numbers or {}), list(commits)

    def remaining(self, proposal: Proposal) -> list[str]:
        return sorted(site for site in self.present if site not in proposal.sites)

    def is_majority(self, proposal: Proposal) -> bool:
        """Returns whether more than half of the generation remain, so that a few cannot remove the others."""
        return 2 * len(self.remaining(proposal)) > len(self.present)

    def note(self, votes: Mapping[str, Vote]) -> None:
        for site, vote in votes.items():
            self.numbers[site] = max(vote.number, self.numbers.get(site, -1))

    def ballot(self, votes: Mapping[str, Vote]) -> Ballot | None:
        """Returns the ballot of this site's own vote if all sites that remain have voted for the same. Only the newest
        vote of each site counts, also if this site knows of it and no longer has it."""
        mine = votes.get(self.own, NO_VOTE)
        if mine.proposal.empty or not self._possible(mine.proposal):
            return None
        sites = self.remaining(mine.proposal)
        if self.own not in sites or not self.is_majority(mine.proposal):
            return None
        for site in sites:
            vote = votes.get(site, NO_VOTE)
            if vote.proposal != mine.proposal or vote.number < self.numbers.get(site, -1):
                return None
        return Ballot(mine.proposal, tuple((site, votes[site].number) for site in sites))

    def to_commit(self, votes: Mapping[str, Vote]) -> Ballot | None:
        """Returns a ballot that this site must commit to now, or None."""
        self.note(votes)
        found = self.ballot(votes)
        return None if found is None or (self.commits and self.commits[-1].ballot == found) else found

    @property
    def is_committed(self) -> bool:
        """Returns whether this site has committed to a ballot, and nobody has voted otherwise since."""
        votes = self.commits[-1].ballot.votes if self.commits else ()
        return bool(votes) and all(self.numbers.get(site, -1) <= number for site, number in votes)

    def waits_for(self, seen: Seen) -> list[str]:
        """Returns the sites whose commit is missing for the ballot that this site has committed to."""
        ballot = self.commits[-1].ballot
        committed = self._committed_to(ballot, seen)
        return [site for site, _ in ballot.votes if site not in committed]

    def _committed_to(self, ballot: Ballot, seen: Seen) -> dict[str, Claim]:
        """Returns the claims with which sites have committed to a ballot."""
        commits = dict(seen.commits) | {self.own: self.commits[-1]}
        voters = [site for site, _ in ballot.votes]
        return {site: commits[site].claim for site in voters if site in commits and commits[site].ballot == ballot}

    def to_follow(self, seen: Seen) -> Certificate | None:
        """Returns the certificate that this site must follow, or None.

        A site follows the ballot that it committed to last. It goes back to an earlier one only if no site that remains
        by both can follow the later one, because one of them follows the earlier one. One site may lie about that, so
        two must say it, where the ballots differ in what they decide."""
        complete = [*self._completed(seen), *seen.follows.values()]
        return next((certificate for certificate in complete if self._must_follow(certificate, seen)), None)

    def _completed(self, seen: Seen) -> list[Certificate]:
        """Returns the certificate of the ballot that this site has committed to last, once all others have."""
        if not self.commits or self.waits_for(seen):
            return []
        ballot = self.commits[-1].ballot
        return [Certificate(ballot, tuple(self._committed_to(ballot, seen).items()))]

    def _must_follow(self, certificate: Certificate, seen: Seen) -> bool:
        ballot = certificate.ballot
        mine = [commit for commit in self.commits if commit.ballot == ballot]
        if not mine or dict(certificate.claims).get(self.own) != mine[-1].claim:
            return False
        last = self.commits[-1].ballot
        newest = self.numbers.get(self.own, -1)
        if last == ballot and dict(ballot.votes)[self.own] >= newest:
            return True
        if last != ballot:
            rival, enough = last.proposal, 1 if last.proposal == ballot.proposal else 2
        else:
            vote = seen.votes.get(self.own)
            rival, enough = vote.proposal if vote else Proposal(ballot.proposal.generation), 1
        kept = set(self.remaining(ballot.proposal)) & set(self.remaining(rival)) - {self.own}
        following = [site for site in kept if site in seen.follows and seen.follows[site].ballot == ballot]
        return len(following) >= min(enough, len(kept))

    def to_adopt(self, seen: Seen) -> Certificate | None:
        """Returns the certificate by which this generation has ended, if it carries a commit of this site that this
        site has forgotten, because it has lost its state. The most followed one counts."""
        mine = [commit.ballot for commit in self.commits]
        found = [one for one in seen.follows.values() if self.own in dict(one.claims) and one.ballot not in mine]
        return max(found, key=lambda one: sum(other.ballot == one.ballot for other in found), default=None)

    def removed_by(self, seen: Seen) -> Certificate | None:
        """Returns a certificate by which the others continue without this site."""
        for certificate in seen.follows.values():
            if self.own in certificate.proposal.sites and self.is_majority(certificate.proposal):
                return certificate
        return None


def not_following(certificate: Certificate, follows: Mapping[str, Certificate]) -> tuple[list[str], list[str]]:
    """Returns the sites that do not follow a certificate yet, and those that have told different sites different
    things: they committed to it with different claims, or follow another one, which no honest site does."""
    missing = [site for site, _ in certificate.ballot.votes if site not in follows]
    two_faced = set()
    for follower, other in follows.items():
        if other.ballot == certificate.ballot:
            two_faced |= {site for site, claim in certificate.claims if dict(other.claims).get(site) != claim}
        else:
            two_faced.add(follower)
    return missing, sorted(two_faced)


class Base(NamedTuple):
    """Where the next generation begins: after a round of an earlier generation."""

    generation: int
    round: int


def base_of(
    claims: Mapping[str, Claim], neighbours: Mapping[str, Sequence[str]], decided: Sequence[Proposal] = ()
) -> Base:
    """Returns from where sites continue: the newest generation that all of them began, and the last round that all have
    done in it. Sites without a state do not count; they get one from their neighbours.

    Args:
        claims: What each of the sites claims.
        neighbours: Their graph.
        decided: All decisions so far. Those to go back still hold if not all sites began the generation that followed.
            Those to restore a site hold in that generation too, in which it may not have its state yet.

    Raises:
        Lie: If the claims cannot all be true, or a site is further behind than the others can go back.
    """
    begun = {site: {part.generation: part for part in claim.begun} for site, claim in claims.items() if claim.begun}
    common = set.intersection(*map(set, begun.values())) if begun else set()
    if not common:
        raise Lie(sorted(claims), "the sites have no generation in common: " + _shown(claims))
    generation = max(common)
    restored = {site for proposal in decided if proposal.generation + 1 >= generation for site in proposal.restored}
    for site in without_state(claims):
        if site not in restored:
            raise Lie([site], f"{site} says that it has lost its state, but the sites have not voted to restore it")
    _refuse_neighbours_apart(begun, neighbours, generation)
    here = {site: parts[generation] for site, parts in begun.items()}
    last = min(part.done for part in here.values())
    back_to = [p.round for p in decided if p.round is not None and p.generation >= generation and p.round <= last]
    if back_to:
        return Base(generation, min(back_to))
    _refuse_one_behind(here, last)
    return Base(generation, last)


def _refuse_neighbours_apart(
    begun: Mapping[str, Mapping[int, Begun]], neighbours: Mapping[str, Sequence[str]], generation: int
) -> None:
    """Refuses claims of neighbours, from a generation on, that are further apart than neighbours can be."""
    for site, parts in sorted(begun.items()):
        for other in neighbours.get(site, ()):
            for part in parts.values():
                at = begun.get(other, {}).get(part.generation, part._replace(done=part.start)).done
                if other in begun and part.generation >= generation and part.done - at > BEHIND:
                    raise Lie(
                        [other, site],
                        f"{site} has done {part.done} rounds and its neighbour {other} {at}, but neighbours are never "
                        f"more than {BEHIND} rounds apart: one of them does not tell the truth",
                    )


def _refuse_one_behind(here: Mapping[str, Begun], last: int) -> None:
    """Refuses the claim of a site that is further behind than the others can go back."""
    behind = min(site for site, part in here.items() if part.done == last)
    cannot = [site for site, part in sorted(here.items()) if part.oldest > last]
    if cannot:
        raise Lie(
            [behind],
            f"{behind} says that it has done {last} rounds only, but {', '.join(cannot)} can go back to round "
            f"{max(here[site].oldest for site in cannot)} at most",
        )


def without_state(claims: Mapping[str, Claim]) -> list[str]:
    """Returns the sites that have lost their state."""
    return sorted(site for site, claim in claims.items() if not claim.begun)


def _shown(claims: Mapping[str, Claim]) -> str:
    return "; ".join(f"{site} {[one.generation for one in claim.begun]}" for site, claim in sorted(claims.items()))
