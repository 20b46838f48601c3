"""Votes, commits and certificates of sites as they are announced, signed and kept."""

import json
import shutil
from dataclasses import replace

import pytest

from fairmesh.errors import BadInput
from fairmesh.mesh.enrol.roster import Member, Mesh
from fairmesh.mesh.node.decisions import Begun, Certificate, Claim, Commit, Lie
from fairmesh.mesh.node.ledger import Ledger, still_in, wish, wished
from fairmesh.mesh.node.state_lock import locked
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.storage.files import write_record
from tests.mesh.credentials import mesh_of, signed, terms_of
from tests.refusals import refused

NAMES = ("a", "b", "c", "d")


MESH = mesh_of(NAMES)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return signed(tmp_path_factory.mktemp("keys"), NAMES)


class Sites:
    """The ledgers of four sites, and the news between them."""

    def __init__(self, folder, keys):
        self.folder, self._keys = folder, keys
        self.boards: dict[str, Bulletin] = {}
        self.ledgers: dict[str, Ledger] = {}
        for name in NAMES:
            (folder / name).mkdir()
            self.start(name)
            self.ledgers[name].begin(0)

    def start(self, name):
        """Starts a site with what is on its disk; it has heard nothing."""
        self.boards[name] = Bulletin(name, self._keys[name], terms_of(NAMES))
        self.ledgers[name] = Ledger(self.folder / name, MESH, name, self.boards[name])

    def tell(self, *names):
        for sender in names:
            for receiver in names:
                self.boards[receiver].heard(self.boards[sender].news(0)[1])

    def vote(self, name, *gone, restored=()):
        wish(self.folder / name, self.ledgers[name].mesh, name, gone, None, restored)
        self.ledgers[name].vote()

    def lose(self, name):
        """A site's disk is gone; people vote to restore the site."""
        shutil.rmtree(self.folder / name)
        wish(self.folder / name, MESH, name, (), None, [name])
        self.start(name)

    def act(self, name, done=10):
        """Commits or follows, as a node does."""
        ledger = self.ledgers[name]
        due = ledger.due()
        if isinstance(due, Certificate):
            ledger.follow(due)
        elif due is not None:
            begun = (*ledger.begun[:-1], ledger.begun[-1]._replace(done=done)) if ledger.begun else ()
            ledger.commit(Commit(due, Claim(begun, 10)))

    def all_act(self, names="abc", **done):
        for name in names:
            self.act(name, done.get(name, 10))

    def all_vote(self):
        """All but d vote to go on without d, and know it."""
        for name in "abc":
            self.vote(name, "d")
        self.tell(*"abc")

    def remove_d(self, followed_by="", **done):
        """All but d commit to go on without d; some follow."""
        self.all_vote()
        self.all_act(**done)
        if followed_by:
            self.tell(*"abc")
            self.all_act(followed_by)

    def continue_without_d(self):
        self.remove_d("abc")
        self.tell(*"abc")
        self.all_act()


@pytest.fixture
def sites(tmp_path, keys):
    return Sites(tmp_path, keys)


def test_all_who_remain_decide_and_begin_together(sites):
    sites.remove_d(b=9)
    assert not any(sites.ledgers[name].pending for name in "abc")
    sites.tell(*"abc")
    sites.all_act()
    assert [sites.ledgers[name].mesh.removed for name in "abc"] == [("d",)] * 3
    assert sites.ledgers["a"].unready() == (["b", "c"], [])
    sites.tell(*"abc")
    assert sites.ledgers["a"].unready() == ([], [])
    assert sites.ledgers["a"].base() == (1, 9)
    assert sites.ledgers["a"].outputs() == 10


def test_one_vote_missing_decides_nothing(sites):
    for name in "ab":
        sites.vote(name, "d")
    sites.vote("c", "b")
    sites.tell(*"abc")
    for name in "abc":
        assert sites.ledgers[name].voter().to_commit(sites.ledgers[name].seen().votes) is None
    assert sites.ledgers["a"].votes().keys() == {"continue without d", "continue without b"}


def test_vote_can_be_taken_back_and_a_site_that_committed_goes_on(sites):
    sites.all_vote()
    sites.act("a")
    assert sites.ledgers["a"].waits_for() == ["b", "c"]
    sites.vote("b")  # before it has committed
    sites.tell(*"abc")
    sites.all_act()
    assert not sites.ledgers["a"].is_committed
    assert not any(sites.ledgers[name].pending for name in "abc")


def test_site_that_votes_again_and_again_does_not_stop_the_others_every_time(sites, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fairmesh.mesh.node.ledger.time.monotonic", lambda: now[0])
    sites.start("a")

    def voted_again() -> int:
        before = len(sites.ledgers["a"].voter().commits)
        sites.vote("c")
        sites.vote("c", "d")
        sites.tell(*"abc")
        sites.act("a")
        return len(sites.ledgers["a"].voter().commits) - before

    for name in "abc":
        sites.vote(name, "d")
    assert [voted_again() for _ in range(5)] == [1, 1, 1, 0, 0]
    now[0] += 2.5
    assert [voted_again() for _ in range(2)] == [1, 0]
    now[0] += 2.5
    assert voted_again() == 0, "the pause grows"
    now[0] += 1e9
    assert voted_again() == 1


def test_commit_after_the_vote_was_taken_back_is_followed_and_its_site_named(sites):
    sites.remove_d()  # all have committed; b has not told the others yet
    sites.tell("a", "c")
    sites.vote("b")
    ledger = sites.ledgers["a"]
    sites.boards["a"].heard(sites.boards["b"].quoted("certificate")[1])
    sites.tell(*"abc")
    due = ledger.due()
    assert isinstance(due, Certificate)
    assert ledger.voted_otherwise_since(due) == ["b"]


def test_site_that_has_lost_its_state_is_restored_by_all(sites):
    sites.lose("d")
    ledger = sites.ledgers["d"]
    assert ledger.awaits_restoring
    for name in NAMES:
        sites.vote(name, restored=["d"])
    for _ in range(3):
        sites.tell(*NAMES)
        for name in NAMES:
            sites.act(name, done=7)
    assert all(one.pending and one.restored() == ["d"] and one.base() == (1, 7) for one in sites.ledgers.values())
    assert ledger.mesh.generation == 2
    ledger.begin(7)
    assert not ledger.pending
    assert not ledger.awaits_restoring


def test_site_that_has_lost_its_state_takes_over_what_was_decided_before(sites):
    sites.continue_without_d()
    sites.lose("c")
    ledger = sites.ledgers["c"]
    sites.tell(*"abc")
    assert ledger.adopt()
    assert ledger.mesh.removed == ("d",)
    assert not ledger.pending
    ledger.vote()
    assert sites.boards["c"].of("c", "vote")["generation"] == 2


def test_site_with_an_empty_state_that_had_agreed_to_something_knows_that_it_has_forgotten_it(sites):
    sites.continue_without_d()
    shutil.rmtree(sites.folder / "c")
    (sites.folder / "c").mkdir()
    sites.start("c")
    sites.ledgers["c"].begin(0)
    assert not sites.ledgers["c"].has_forgotten()
    sites.tell(*"abc")
    assert sites.ledgers["c"].has_forgotten()
    assert not any(sites.ledgers[name].has_forgotten() for name in "ab")


def test_what_is_left_of_a_run_is_put_aside_and_not_while_the_node_runs(tmp_path):
    state = tmp_path / "state"
    (state / "generation-1").mkdir(parents=True)
    (state / "log.jsonl").write_text("{}")
    with locked(state), refused("another node is running", error=BadInput):
        wish(state, MESH, "a", (), None, ["a"])
    wish(state, MESH, "a", (), None, ["a"])
    assert (state / "before-restoring-1" / "generation-1").exists()
    assert (state / "log.jsonl").exists()


def test_round_that_somebody_votes_for_is_kept_and_a_vote_for_one_that_is_gone_is_named(sites):
    landmarks = sites.folder / "a" / "generation-1" / "landmarks"
    landmarks.mkdir(parents=True)
    for kept in (0, 40, 80):
        (landmarks / f"checkpoint-{kept:012d}.safetensors").touch()
    assert not sites.ledgers["a"].somebody_goes_back()
    wish(sites.folder / "a", MESH, "a", (), 40)
    sites.ledgers["a"].vote()
    assert sites.ledgers["a"].somebody_goes_back()
    sites.tell("a", "b")
    assert sites.ledgers["b"].somebody_goes_back(), "also where another site has voted"
    assert sites.ledgers["a"].impossible() == ""
    (landmarks / f"checkpoint-{40:012d}.safetensors").unlink()
    assert sites.ledgers["a"].impossible() == "this site no longer has round 40 to go back to, but 0, 80"


def test_promises_survive_a_restart_and_news_that_are_lost(sites):
    sites.remove_d()
    for name in "abc":
        sites.start(name)
    assert sites.ledgers["a"].waits_for() == ["b", "c"]
    sites.tell(*"abc")
    sites.act("a")
    sites.start("a")
    assert sites.ledgers["a"].pending
    assert still_in(sites.folder / "a", MESH).removed == ("d",)
    sites.tell(*"abc")
    assert sites.ledgers["a"].unready() == (["b", "c"], [])


def test_site_follows_a_certificate_that_another_passes_on(sites):
    sites.remove_d("a")
    sites.start("b")  # it has heard nothing
    sites.tell("a", "b")
    sites.act("b")
    assert sites.ledgers["b"].pending


def test_removed_site_learns_it_from_a_certificate_and_from_nothing_less(sites):
    sites.remove_d()
    sites.tell(*"abcd")
    assert sites.ledgers["d"].removed_by() is None
    sites.act("a")
    sites.tell("a", "d")
    assert dict(sites.ledgers["d"].removed_by().ballot.votes).keys() == {"a", "b", "c"}


def test_certificate_without_the_signature_of_one_who_remains_is_none(sites):
    sites.remove_d("a")
    table = json.loads(json.dumps(sites.boards["a"].of("a", "follow")))["certificates"][0]
    for forge in (
        lambda t: t["commits"]["b"].update(signature=t["commits"]["c"]["signature"]),
        lambda t: t["commits"]["b"].update(signature="no number"),
        lambda t: t["commits"]["b"]["begun"][0].__setitem__(3, 0),  # another claim than was signed
        lambda t: t["commits"].pop("b"),
        lambda t: (t["commits"].pop("b"), t["votes"].pop("b"), t.update(sites=["b", "d"])),
        lambda t: t["votes"].update(b=1),
    ):
        forged = json.loads(json.dumps(table))
        forge(forged)
        sites.start("c"), sites.start("d")
        sites.tell("a", "b", "c", "d")
        number = sites.boards["c"].next_number("follow")
        sites.boards["a"].announce("follow", {"certificates": [forged]}, number)
        sites.tell("a", "c", "d")
        assert sites.ledgers["c"].seen().follows == {}
        assert sites.ledgers["d"].removed_by() is None


def test_two_cannot_remove_two_and_the_command_says_so(sites):
    with refused("2 of 4", "more than half"):
        wish(sites.folder / "a", MESH, "a", ["c", "d"])
    table = {"generation": 1, "sites": ["c", "d"], "round": None, "restored": []}
    for name in "ab":
        write_record(sites.folder / name / "vote.json", table)
        sites.ledgers[name].vote()
    sites.tell(*"ab")
    sites.all_act("ab")
    assert sites.boards["a"].of("a", "commit") == {}


def test_lied_round_is_refused_and_its_teller_named(sites):
    for ledger in sites.ledgers.values():
        ledger.begin(0)
    sites.all_vote()
    for name in "abc":
        ledger = sites.ledgers[name]
        ballot = ledger.voter().to_commit(ledger.seen().votes)
        done = 0 if name == "b" else 5000
        ledger.commit(Commit(ballot, Claim((Begun(1, 0, max(0, done - 100), done),), 10)))
    sites.tell(*"abc")
    sites.all_act()
    with pytest.raises(Lie, match="5000 rounds and its neighbour b 0") as found:
        sites.ledgers["a"].base()
    assert "b" in found.value.sites


def test_one_who_claims_different_rounds_to_different_sites_is_named(sites):
    sites.remove_d()
    honest = sites.boards["c"].of("c", "commit")
    sites.tell("a", "b")
    sites.tell("b", "c")
    sites.boards["c"].announce("commit", honest | {"begun": [[1, 0, 0, 3]]}, sites.boards["c"].next_number("commit"))
    sites.boards["a"].heard(sites.boards["c"].news(0)[1])
    sites.all_act("ab")
    sites.tell("a", "b")
    assert sites.ledgers["a"].unready()[1] == ["c"]


def test_one_who_follows_another_ballot_than_the_others_is_named_and_not_those_who_voted_twice(sites):
    sites.all_vote()
    sites.all_act("ab")
    liar, board = sites.ledgers["c"], sites.boards["c"]
    earlier = liar.voter().to_commit(liar.seen().votes)
    sites.tell(*"abc")
    quoted = {name: board.entry(name, "commit") for name in "ab"}
    for name in "ab":  # their operators take the vote back, and vote again
        sites.vote(name)
        sites.vote(name, "d")
    sites.tell(*"abc")
    sites.all_act()
    sites.tell(*"abc")
    sites.all_act("ab")
    claim = Claim((Begun(1, 0, 0, 10),), 10)
    board.announce("commit", Commit(earlier, claim).table(), board.next_number("commit"))
    quoted["c"] = board.entry("c", "commit")
    certificate = Certificate(earlier, tuple((name, claim) for name in "abc"))
    signatures = {name: (one.number, one.signature.hex()) for name, one in quoted.items()}
    board.announce("follow", {"certificates": [certificate.table(signatures)]}, 1)
    sites.tell(*"abc")
    assert sites.ledgers["a"].seen().follows == {}
    assert sites.ledgers["a"].unready() == ([], ["c"])


def test_certificate_is_valid_once_the_certificates_of_all_who_signed_it_are_known(sites):
    sites.remove_d("a")
    told = json.loads(sites.boards["a"].news(0)[1])
    for of_b in (False, True):
        sites.boards["d"].heard(json.dumps([one for one in told if (one["site"] == "b") == of_b]).encode())
        assert (sites.ledgers["d"].removed_by() is not None) == of_b


def test_site_that_has_decided_often_announces_as_many_certificates_as_others_accept(sites):
    sites.remove_d("a")
    path = sites.folder / "a" / "decisions.json"
    table = json.loads(path.read_text())
    (first,) = table["decisions"]
    many = [first | {"generation": generation} for generation in range(1, 1001)]
    write_record(path, table | {"decisions": many, "vote": None})
    sites.start("a")
    sites.boards["b"].heard(sites.boards["a"].news(0)[1])
    told = sites.boards["b"].of("a", "follow")["certificates"]
    assert 10 < len(told) < 1000
    assert told == many[-len(told) :]


def test_mesh_file_that_names_removed_sites_is_refused_where_the_node_has_decided(sites):
    sites.remove_d("a")
    moved = replace(MESH, members=tuple(replace(m, address=f"10.0.0.1:{7000 + i}") for i, m in enumerate(MESH.members)))
    found = still_in(sites.folder / "a", moved)
    assert (found.removed, found.members[0].address) == (("d",), "10.0.0.1:7000")
    with refused("['c']", "decisions.json"):
        still_in(sites.folder / "a", moved.without("c"))


def test_site_cannot_remove_itself_nor_one_without_which_the_graph_falls_apart(tmp_path):
    with refused("a", "itself"):
        wish(tmp_path, MESH, "a", ["a"])
    neighbours = {"a": ("b",), "b": ("a", "c"), "c": ("b",)}
    line = Mesh("line", tuple(Member(name, f"{name}:1", others) for name, others in neighbours.items()))
    with refused("{a}", "{c}"):
        wish(tmp_path, line, "a", ["b"])
    assert wished(tmp_path, line) is None


def test_wish_holds_for_its_own_generation_only(tmp_path):
    wish(tmp_path, MESH, "a", ["d"])
    assert wished(tmp_path, MESH).sites == ("d",)
    assert wished(tmp_path, MESH.without("d")) is None


def test_round_without_a_kept_checkpoint_cannot_be_gone_back_to(tmp_path):
    with refused("round 12", "none yet"):
        wish(tmp_path, MESH, "a", [], 12)
    folder = tmp_path / "generation-1" / "landmarks"
    folder.mkdir(parents=True)
    (folder / "checkpoint-000000000010.safetensors").touch()
    with refused("round 12", "10"):
        wish(tmp_path, MESH, "a", [], 12)
    assert wish(tmp_path, MESH, "a", [], 10).generation == 2
    assert wished(tmp_path, MESH).round == 10
