"""A member that sends one neighbour other messages than the others is named everywhere, and an honest one never is:
running hashes alone, at one node, and with real nodes that crash, restart, leave, go back and are restored."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairmesh.cli.node import _sentences
from fairmesh.compression.codes import Levels
from fairmesh.mesh.node.rounds import Rounds
from fairmesh.mesh.node.store import Store, landmarks_in
from fairmesh.mesh.wire.chains import OWN, Chains, first_hash
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.mesh.wire.transport import FIRST_ROUND
from fairmesh.networks import remote
from fairmesh.report.runs import Run as Finished
from tests.mesh.experiments import experiment
from tests.mesh.scenarios import Run, play
from tests.refusals import missing_from

NAMES = ["a", "b", "c", "d"]  # a ring: b and d are neighbours of a
EXPERIMENT = experiment(60, 4, options={"measure_every": 5, "checkpoint_every": 7})


def begun(done: int = 0, *positions: int) -> Chains:
    chains = Chains()
    chains.begin(done, dict.fromkeys((OWN, *positions), first_hash(1, 0)))
    return chains


# Running hashes


def test_senders_hash_is_the_one_of_whom_gets_its_messages():
    sender, receiver = begun(0, 1), begun(0, 2, 3)
    for t in range(5):
        sender.add(t, {OWN: b"%d" % t, 1: b""})
        receiver.add(t, {OWN: b"mine", 2: b"%d" % t, 3: b"-%d" % t})
    sent, received = sender.after(5)[OWN], receiver.after(5)
    assert received[2] == sent
    assert len({sent, received[3], received[OWN]}) == 3
    assert sender.after(4)[OWN] not in (sent, first_hash(1, 0))  # of a step that fails after its messages have come
    assert sender.after(3) == {}


def test_one_other_bit_in_one_round_is_seen_in_every_later_hash():
    honest, other = begun(), begun()
    for t in range(30):
        honest.add(t, {OWN: b"message"})
        other.add(t, {OWN: b"message" if t != 3 else b"messagf"})
        assert (honest.after(t + 1) == other.after(t + 1)) == (t < 3)


def test_rounds_that_are_repeated_change_no_hash_and_a_missing_one_leaves_none():
    chains, again = begun(), begun()
    for t in (0, 1, 2):
        chains.add(t, {OWN: b"%d" % t})
    for t in (0, 1, 0, 1, 2):
        again.add(t, {OWN: b"%d" % t})
    assert again.after(3) == chains.after(3) != {}
    chains.add(4, {OWN: b"4"})
    assert chains.after(5) == {}


def test_hashes_continue_from_a_checkpoint_and_begin_anew_in_every_generation():
    whole, continued = begun(), Chains()
    for t in range(4):
        whole.add(t, {OWN: b"%d" % t})
        if t == 1:
            continued.begin(2, whole.after(2))
    for t in (2, 3):
        continued.add(t, {OWN: b"%d" % t})
    assert continued.after(4) == whole.after(4)
    assert len({first_hash(1, 0), first_hash(2, 0), first_hash(2, 10)}) == 3


def _continued(folder: Path, done: int) -> tuple[dict[int, str], list[str]]:
    """Returns the hashes with which a node continues after a round, and what it logs."""
    logged, store = [], Store(folder, 1, lambda *event, **fields: None)
    rounds = SimpleNamespace(
        membership=SimpleNamespace(mesh=SimpleNamespace(generation=1), around=[2]),
        node=SimpleNamespace(
            ledger=SimpleNamespace(begun=[SimpleNamespace(start=0)]),
            folder=folder,
            log=lambda level, what, **fields: logged.append(f"{what} {fields['file']}"),
        ),
        store=store,
        mailroom=SimpleNamespace(chains=Chains()),
    )
    Rounds._begin_hashes(rounds, done)
    return rounds.mailroom.chains.after(done), logged


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize("damage", [lambda text: text[:-9], lambda text: text.replace(b"aa", b"ab"), lambda text: b""])
def test_node_that_has_lost_its_hashes_says_so_and_announces_none(tmp_path, damage):
    store = Store(tmp_path, 1, lambda *event, **fields: None)
    store.keep_hashes(7, {OWN: "aa" * 32, 2: "bb" * 32})
    assert _continued(tmp_path, 7) == ({OWN: "aa" * 32, 2: "bb" * 32}, [])
    assert _continued(tmp_path, 0) == (dict.fromkeys([OWN, 2], first_hash(1, 0)), [])
    store.hashes_path.write_bytes(damage(store.hashes_path.read_bytes()))
    hashes, (said,) = _continued(tmp_path, 7)
    assert hashes == {}
    assert missing_from(said, "lost", "generation-1/hashes.json") == []
    store.keep_hashes(14, {OWN: "cc" * 32, 2: "dd" * 32})  # which mends the file
    assert _continued(tmp_path, 14)[1] == []


# Real nodes


def _negative_to(receiver: int, first: int = 0) -> None:
    """A member sends one neighbour the negative of what it sends the others, from a round on."""
    encode, post, negatives = remote.encode, Mailroom.post, {}

    def noting(codes: dict, now: int) -> bytes:
        levels: Levels = codes["model"]
        negatives[now] = encode(codes | {"model": levels._replace(levels=-levels.levels)}, now)
        return encode(codes, now)

    def lying(self, step, payloads):
        now = step - FIRST_ROUND
        if step in self.rounds and now >= first and receiver in payloads:
            payloads = payloads | {receiver: negatives[now]}
        post(self, step, payloads)

    remote.encode, Mailroom.post = noting, lying
    Mailroom.as_sent = lambda self, step, payloads: dict(payloads)


def _slowly() -> None:
    """So that announcements arrive while the run lasts."""
    encode = remote.encode
    remote.encode = lambda codes, now: time.sleep(0.1) or encode(codes, now)


def _accused(run: Run, name: str) -> set[tuple[str, str]]:
    """Returns who blames whom, as a site's status has it."""
    return {(claim["by"], claim["site"]) for claim in run.status(name).get("contradicted", ())}


def a_member_that_sends_one_neighbour_the_negative(run: Run) -> None:
    run.start("a", "b", "c", before=_slowly)
    run.start("d", before=lambda: _negative_to(0))
    run.until(lambda: all(_accused(run, name) == {("a", "d")} for name in "abc"))
    (found,) = run.events("a", "a site contradicts itself")
    assert missing_from(found["reason"], "d has sent this site other", "rounds 0 and 5", "mesh remove", "rewind") == []
    for name, words in {"b": "ask both", "c": "this site got what d has signed"}.items():
        (said,) = run.events(name, "a site says that another contradicts itself")
        assert missing_from(said["reason"], "a says that d sent it", words) == []
        assert any("a says that d sent it" in str(line) for line in _shown(run, name))
    run.crash("a")
    run.start("a")
    run.end("a", "b", "c", "d")  # which ends nothing by itself
    said = {tuple(Finished.from_folder(run.folder / name / "state" / "result").contradictions()) for name in "abc"}
    assert [missing_from(sentence, "a says that d sent it other messages", "0 and 5") for (sentence,) in said] == [[]]


def _shown(run: Run, name: str) -> list[str | None]:
    seen = run.status(name) | {"running": True}
    return list(_sentences(seen, run.folder / name / "site.toml", 0.0))


def honest_members_that_crash_leave_go_back_and_are_restored(run: Run) -> None:
    run.start(*NAMES, before=_slowly)
    run.until(lambda: run.round("a") >= 12)
    for name in ("a", "c", "d"):
        run.crash(name)
        run.start(name, before=_slowly)
    run.until(lambda: all(run.round(name) >= 25 for name in NAMES))
    run.vote(*NAMES, back_to=min(landmarks_in(run.folder / name / "state", 1)[-1] for name in NAMES))
    run.until(lambda: all(run.status(name).get("generation") == 2 for name in NAMES))
    run.crash("b")
    run.start("b", before=_slowly)
    run.until(lambda: run.round("b") >= 35)
    run.crash("d")
    (run.folder / "d" / "state").rename(run.folder / "d" / "lost")
    run.vote(*NAMES, restored=["d"])
    run.start("d", before=_slowly)
    run.until(lambda: all(run.status(name).get("generation") == 3 and run.round(name) >= 41 for name in NAMES), 120)
    run.vote("a", "b", "d", out=["c"])
    run.until(lambda: all(run.status(name).get("generation") == 4 and run.round(name) >= 46 for name in "abd"), 120)
    run.crash("a")
    run.start("a")
    run.end("a", "b", "d")
    for name in "abd":
        assert not run.events(name, "a site contradicts itself")
        assert not run.events(name, "a site says that another contradicts itself")
        assert not [event for event in run.every_event(name) if "hash" in event["what"]]
        summary = json.loads((run.folder / name / "state" / "result" / "summary.json").read_text())
        assert not {"contradicted", "unsigned"} & summary.keys()


SCENARIOS = (
    a_member_that_sends_one_neighbour_the_negative,
    honest_members_that_crash_leave_go_back_and_are_restored,
)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_hostile_member_is_named_and_an_honest_one_is_not(scenario, tmp_path):
    play(scenario, tmp_path, NAMES, EXPERIMENT)
