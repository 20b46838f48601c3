"""The protocol by which sites remove or restore others or go back, checked as a model: with crashes, delays, changed
minds and one site that lies or loses its state, sites that count each other never continue from different states, and
can always continue."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairmesh.mesh.node.decisions import (
    BEHIND,
    Base,
    Begun,
    Certificate,
    Claim,
    Commit,
    Lie,
    Proposal,
    Seen,
    Vote,
    Voter,
    base_of,
    not_following,
    without_state,
)

KEPT = 3  # rounds that a site of the model can go back


@dataclass
class Known:
    """What a site has heard: the newest announcement of each kind of each site, with its number."""

    votes: dict[str, Vote] = field(default_factory=dict)
    commits: dict[str, tuple[int, Commit]] = field(default_factory=dict)
    chains: dict[str, list[Certificate]] = field(default_factory=dict)  # the certificates that a site has followed

    def hear(self, site, kind, said):
        if kind == "vote" and said.number > self.votes.get(site, Vote(-1, None)).number:
            self.votes[site] = said
        if kind == "commit" and said[0] > self.commits.get(site, (-1, None))[0]:
            self.commits[site] = said
        if kind == "chain" and len(said) > len(self.chains.get(site, [])):
            self.chains[site] = list(said)

    def all(self):
        yield from ((site, "vote", said) for site, said in self.votes.items())
        yield from ((site, "commit", said) for site, said in self.commits.items())
        yield from ((site, "chain", said) for site, said in self.chains.items())


class Site:
    """An honest site: what is on its disk, and what it has heard since it started."""

    def __init__(self, name, names):
        self.name, self.founders = name, tuple(names)
        self.chain, self.begun = [], [Begun(1, 0, 0, 0)]
        self.numbers, self.commits = {}, []
        self.said = self.committed = 0  # the numbers of its last vote and commit; the clock gives them
        self.adopted = 0  # decisions that it took over from others
        self.wish = Proposal(1)
        self.stopped, self.refused = False, None
        self.known = Known()

    # The mesh as the site sees it

    def present(self, generation=None):
        gone = {s for one in self.chain if generation is None or one.proposal.generation < generation
                for s in one.proposal.sites}  # fmt: skip
        return [name for name in self.founders if name not in gone]

    @property
    def generation(self):
        return 1 + sum(max(1, len(one.proposal.sites)) for one in self.chain)

    @property
    def pending(self):
        if self.lost:
            return len(self.chain) > self.adopted
        return self.begun[-1].generation != self.generation

    @property
    def lost(self):
        return not self.begun

    def voter(self):
        present = self.present()
        return Voter(
            self.name, present, lambda p: p.generation == self.generation and set(p.sites) <= set(present)
            and len(present) - len(p.sites) >= 2, self.numbers, self.commits,
        )  # fmt: skip

    def seen(self):
        generation = self.generation
        follows = {}
        for site, chain in self.known.chains.items():
            follows.update((site, one) for one in chain if one.proposal.generation == generation)
        return Seen(
            {site: vote for site, vote in self.known.votes.items() if vote.proposal.generation == generation},
            {s: one for s, (_, one) in self.known.commits.items() if one.ballot.proposal.generation == generation},
            follows,
        )

    # What it does

    def vote(self, sites, back_to=None, restored=()):
        self.said += 1
        self.wish = Proposal(self.generation, tuple(sorted(sites)), back_to, tuple(restored))
        self.known.hear(self.name, "vote", Vote(self.said, self.wish))

    def crash(self):
        """Everything heard is lost; what is on disk is announced again."""
        self.known = Known()
        self.known.hear(self.name, "vote", Vote(self.said, self.wish))
        if self.commits:
            self.known.hear(self.name, "commit", (self.committed, self.commits[-1]))
        self.known.hear(self.name, "chain", self.chain)

    def lose(self):
        """Its disk is gone."""
        self.chain, self.begun, self.numbers, self.commits, self.adopted = [], [], {}, [], 0
        self.known = Known()
        self.vote([], None, [self.name])

    @property
    def paused(self):
        return self.pending or self.lost or self.voter().is_committed

    def claim(self):
        return Claim(tuple(self.begun), 10)

    def removed(self):
        for chain in self.known.chains.values():
            for one in chain:
                known = one.proposal.generation <= self.generation
                if known and self.name in one.proposal.sites:
                    remain = set(self.present(one.proposal.generation)) - set(one.proposal.sites)
                    return 2 * len(remain) > len(self.present(one.proposal.generation))
        return False

    def act(self):
        """One step of its loop. Returns whether anything changed."""
        if self.stopped:
            return False
        if self.removed():
            self.stopped = True
            return True
        voter, seen = self.voter(), self.seen()
        if self.lost and not self.pending and (certificate := voter.to_adopt(seen)) is not None:
            self.chain = [*self.chain, certificate]
            self.adopted, self.numbers, self.commits = len(self.chain), {}, []
            self.known.hear(self.name, "chain", self.chain)
            self.vote([], None, [self.name])
            return True
        ballot = voter.to_commit(seen.votes)
        self.numbers = voter.numbers
        certificate = voter.to_follow(seen)
        if certificate is not None:
            assert voter.is_majority(certificate.proposal)
            self.chain = [*self.chain, certificate]
            self.numbers, self.commits, self.wish = {}, [], Proposal(self.generation)
            self.known.hear(self.name, "chain", self.chain)
            return True
        if ballot is not None:
            self.commits = [*self.commits, Commit(ballot, self.claim())]
            self.committed += 1
            self.known.hear(self.name, "commit", (self.committed, self.commits[-1]))
            return True
        return self.pending and self.begin()

    def begin(self):
        last = self.chain[-1]
        follows = {}
        for site, chain in self.known.chains.items():
            if len(chain) >= len(self.chain):
                follows[site] = chain[len(self.chain) - 1]
        missing, two_faced = not_following(last, {s: c for s, c in follows.items() if s in dict(last.ballot.votes)})
        if missing or two_faced:
            return False
        present = self.present()
        decided = [one.proposal for one in self.chain]
        try:
            base = base_of(dict(last.claims), {s: [o for o in present if o != s] for s in present}, decided)
        except Lie as lie:
            self.refused = lie
            return False
        mine = next((one for one in self.begun if one.generation == base.generation), None)
        assert mine is not None or self.name in without_state(dict(last.claims))
        assert mine is None or base.round <= mine.done
        assert mine is None or base.round >= mine.oldest or base.round in [one.round for one in decided], (
            "it would need a checkpoint that it has not kept"
        )
        self.begun = [*self.begun, Begun(self.generation, base.round, base.round, base.round)]
        return True

    def train(self, sites):
        """Does a round, if the others in its generation are as far."""
        if self.stopped or self.paused:
            return
        mine = self.begun[-1]
        for other in sites.values():
            if other.name in self.present() and other is not self and not other.stopped:
                theirs = [one for one in other.begun if one.generation == mine.generation]
                if not theirs or theirs[0].done < mine.done:
                    return
        done = mine.done + 1
        oldest = mine.oldest if self.commits else max(mine.start, done - KEPT)  # a certificate may still come
        self.begun = [*self.begun[:-1], mine._replace(done=done, oldest=oldest)]


class Model:
    """All sites; the last may lie."""

    def __init__(self, count, lies, loses, draw):
        self.names = [chr(ord("a") + i) for i in range(count)]
        self.may_lose = self.names[:1] if loses else []
        self.liar = self.names[-1] if lies else None
        self.sites = {name: Site(name, self.names) for name in self.names if name != self.liar}
        self.draw = draw
        self.secrets = []  # all that anybody ever said; the liar may keep it and tell it later
        self.numbered = 0

    def pass_on(self, one, other):
        """One site tells another all that it knows."""
        for site, kind, said in list(self.sites[one].known.all()):
            self.sites[other].known.hear(site, kind, said)
            self.secrets.append((site, kind, said))

    def lie(self, to):
        """The liar tells a site something in its own name, or what it has heard before, in any order."""
        draw, name = self.draw, self.liar
        victim = self.sites[to]
        what = draw.choice(["vote", "commit", "chain", "old"])
        self.numbered += draw.choice([0, 1])
        if what == "old" and self.secrets:
            victim.known.hear(*draw.choice(self.secrets))
        if what == "vote":
            others = [vote.proposal for _, kind, vote in self.secrets if kind == "vote"]
            generation = victim.generation
            made = Proposal(generation, tuple(sorted(draw.sample(self.names[:-1], draw.choice([0, 1, 2])))))
            victim.known.hear(name, "vote", Vote(self.numbered, draw.choice([*others, made])))
        commits = [said for _, kind, said in self.secrets if kind == "commit"]
        if what == "commit" and commits:
            victim.known.hear(name, "commit", (self.numbered, Commit(draw.choice(commits)[1].ballot, self._claim())))
        if what == "chain" and commits:
            ballot = draw.choice(commits)[1].ballot
            claims = {}
            for site, _ in ballot.votes:  # only true commits of others have their signatures
                made = [one.claim for who, kind, said in self.secrets if kind == "commit" and who == site
                        for one in [said[1]] if one.ballot == ballot]  # fmt: skip
                made = [self._claim()] if site == name else made
                if made:
                    claims[site] = draw.choice(made)
            if len(claims) == len(ballot.votes):
                before = [one for one in victim.chain if one.proposal.generation < ballot.proposal.generation]
                victim.known.hear(name, "chain", [*before, Certificate(ballot, tuple(sorted(claims.items())))])

    def _claim(self):
        done = self.draw.choice([0, 0, 1, 2, 5, 100])
        made = [Begun(1, 0, self.draw.choice([0, done]), done)]
        if self.draw.random() < 0.3:
            made.append(Begun(2, done, done, done + self.draw.choice([0, 1, 100])))
        return Claim(tuple(made), 10)

    def check(self):
        """Sites that count each other as members follow the same, and begin from the same."""
        for one in self.sites.values():
            for other in self.sites.values():
                if one.stopped or other.stopped:
                    continue
                for mine, theirs in zip(one.chain, other.chain):
                    if mine == theirs:
                        continue
                    if mine.proposal.generation != theirs.proposal.generation:
                        break
                    each = other.name in dict(mine.ballot.votes) and one.name in dict(theirs.ballot.votes)
                    assert not each or mine.proposal == theirs.proposal, (mine, theirs)
                    after = max(1, len(mine.proposal.sites)) + mine.proposal.generation
                    began = [any(b.generation == after for b in s.begun) for s in (one, other)]
                    assert not each or not all(began), "two sites began a generation from different certificates"
                    break
                same = min(len(one.chain), len(other.chain))
                if one.chain[:same] == other.chain[:same]:
                    starts = {b.generation: b.start for b in one.begun}
                    for b in other.begun:
                        if b.generation <= 1 + sum(max(1, len(c.proposal.sites)) for c in one.chain[:same]):
                            assert starts.get(b.generation, b.start) == b.start

    def run(self, steps):
        draw, honest = self.draw, list(self.sites)
        for _ in range(steps):
            what = draw.random()
            name = draw.choice(honest)
            site = self.sites[name]
            if what < 0.22:
                site.act()
            elif what < 0.62:
                self.pass_on(name, draw.choice(honest))
            elif what < 0.74 and not site.stopped:
                same = [one.wish for one in self.sites.values() if one.wish.generation == site.generation]
                popular = [wish for wish in same if not wish.empty]
                wish = draw.choice(popular) if popular and draw.random() < 0.8 else None
                if wish is not None and name not in wish.sites:
                    site.vote(wish.sites, wish.round, wish.restored)
                elif any(one.lost for one in self.sites.values()) and draw.random() < 0.7:
                    site.vote([], None, [one.name for one in self.sites.values() if one.lost])
                elif draw.random() < 0.15 and not site.pending and not site.lost:
                    site.vote([], draw.randint(site.begun[-1].start, site.begun[-1].done))
                else:
                    others = [one for one in site.present() if one != name]
                    site.vote(draw.sample(others, min(len(others), draw.choice([0, 1, 1, 1, 2]))))
            elif what < 0.78:
                site.crash()
            elif what < 0.8 and name in self.may_lose:
                site.lose()
                self.may_lose = []
            elif what < 0.9:
                site.train(self.sites)
            elif self.liar is not None:
                self.lie(name)
            self.check()

    def mend(self):
        """Messages arrive, and the operators of the honest sites vote for all those out that do not take part."""
        honest = list(self.sites)
        for _ in range(60):
            changed = False
            for one in honest:
                for other in honest:
                    self.pass_on(one, other)
            for name in honest:
                while self.sites[name].act():
                    changed = True
                self.check()
            for name in honest:
                site = self.sites[name]
                out = [o for o in site.present() if o == self.liar or (o in self.sites and self.sites[o].stopped)]
                lost = [] if out else [o for o in site.present() if o in self.sites and self.sites[o].lost]
                wish = (tuple(sorted(out)), None, tuple(lost))
                if not site.stopped and not changed and site.wish[1:] != wish:
                    site.vote(*wish)
                    changed = True
            if not changed:
                break

    def stuck(self):
        """Returns the sites that cannot continue although more than half of their generation are honest and here."""
        found = []
        for site in self.sites.values():
            here = [o for o in site.present() if o in self.sites and not self.sites[o].stopped
                    and site.name in self.sites[o].present()]  # fmt: skip
            if not site.stopped and 2 * len(here) > len(site.present()) and len(here) >= 2 and site.paused:
                found.append(site.name)
        return found


def _ends_well(seed, count, lies, loses):
    model = Model(count, lies, loses, random.Random(seed))
    model.run(120)
    model.mend()
    stuck = model.stuck()
    assert not stuck, {s.name: (s.generation, s.pending, s.stopped, s.wish) for s in model.sites.values()}


def _all_end_well(runs):
    for seed in range(runs):
        _ends_well(seed, 3 + seed % 3, seed % 2 == 1, seed % 5 == 0)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 5), st.sampled_from(["nobody", "lies", "loses"]))
def test_no_split_no_lost_checkpoint_and_no_deadlock(seed, count, one):
    _ends_well(seed, count, one == "lies", one == "loses")


@pytest.mark.slow
def test_no_split_no_lost_checkpoint_and_no_deadlock_in_thousands_of_runs():
    _all_end_well(6000)


def _forgets_votes(monkeypatch):
    monkeypatch.setattr(Voter, "note", lambda self, votes: None)


def _follows_only_its_last_ballot(monkeypatch):
    def last_only(self, certificate, seen):
        newest = dict(certificate.ballot.votes)[self.own] >= self.numbers.get(self.own, -1)
        return bool(self.commits) and self.commits[-1].ballot == certificate.ballot and newest

    monkeypatch.setattr(Voter, "_must_follow", last_only)


def _follows_without_commits(monkeypatch):
    def at_once(self, seen):
        ballot = self.ballot(seen.votes)
        claims = tuple((site, Claim((Begun(1, 0, 0, 0),), 10)) for site, _ in ballot.votes) if ballot else ()
        return Certificate(ballot, claims) if ballot else None

    monkeypatch.setattr(Voter, "to_follow", at_once)


def _believes_every_round(monkeypatch):
    from tests.mesh import test_decisions

    def lowest(claims, neighbours, decided=()):
        return Base(1, min(claim.begun[-1].done for claim in claims.values() if claim.begun))

    monkeypatch.setattr(test_decisions, "base_of", lowest)


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", [_forgets_votes, _follows_only_its_last_ballot, _follows_without_commits, _believes_every_round]
)
def test_model_finds_what_each_rule_prevents(broken, monkeypatch):
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        _all_end_well(4000)


def _claims(**done):
    return {site: Claim((Begun(1, 0, 0, rounds),), 10) for site, rounds in done.items()}


RING = {"a": ["b", "d"], "b": ["a", "c"], "c": ["b", "d"], "d": ["c", "a"]}


def test_sites_continue_from_the_last_round_that_all_have_done():
    assert base_of(_claims(a=7, b=6, c=7, d=7), RING) == Base(1, 6)


def test_generation_that_not_all_have_begun_is_left():
    claims = _claims(a=7, b=6, c=7, d=7)
    claims["a"] = Claim((*claims["a"].begun, Begun(2, 6, 6, 7)), 10)
    assert base_of(claims, RING) == Base(1, 6)
    everywhere = {s: Claim((Begun(1, 0, 0, 7), Begun(2, 6, 6, 8 + (s == "a"))), 10) for s in RING}
    assert base_of(everywhere, RING) == Base(2, 8)


def test_decision_to_go_back_holds_until_all_have_begun_after_it():
    back = [Proposal(1, (), 4), Proposal(2, ("e",))]
    assert base_of(_claims(a=7, b=6, c=7, d=7), RING, back) == Base(1, 4)
    everywhere = {s: Claim((Begun(1, 0, 0, 7), Begun(2, 4, 4, 5)), 10) for s in RING}
    assert base_of(everywhere, RING, back) == Base(2, 5)


def test_round_far_behind_the_neighbours_is_a_lie_of_one_of_the_two():
    with pytest.raises(Lie, match="neighbour b 9") as found:
        base_of(_claims(a=9 + BEHIND + 1, b=9, c=80, d=80), RING)
    assert set(found.value.sites) == {"a", "b"}
    assert base_of(_claims(a=9 + BEHIND, b=9, c=9 + BEHIND, d=80), RING).round == 9


def test_site_that_denies_a_generation_in_which_its_neighbours_trained_lies():
    claims = {s: Claim((Begun(1, 0, 0, 7), Begun(2, 6, 100, 900)), 10) for s in RING}
    claims["b"] = Claim((Begun(1, 0, 0, 7),), 10)
    with pytest.raises(Lie, match="neighbour b 6"):
        base_of(claims, RING)


def test_round_that_others_cannot_go_back_to_names_the_one_who_is_behind():
    claims = {s: Claim((Begun(1, 0, 60, 90),), 10) for s in RING}
    claims["c"] = Claim((Begun(1, 0, 0, 50),), 10)
    with pytest.raises(Lie, match="c says that it has done 50") as found:
        base_of(claims, RING)
    assert found.value.sites == ("c",)
