"""A site whose numbers diverge: it is noticed before anything is sent or stored, its node ends with a sentence, the
others wait and show what it says, and nothing is lost."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fairmesh as fm
from fairmesh.compression.codes import Dense
from fairmesh.errors import Diverged
from fairmesh.mesh.announcements import KINDS
from fairmesh.mesh.enrol import agreement
from fairmesh.mesh.node import divergence
from fairmesh.mesh.node.divergence import SiteDiverged
from fairmesh.networks.base import Part
from fairmesh.networks.bounds import Bounds
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.networks.transport import Transport
from fairmesh.numerics import random_streams
from fairmesh.numerics.random_streams import Draw
from fairmesh.problems.oracle import Oracle
from tests.mesh.experiments import BY_CLASS, STEADY_AD_GDA, experiment
from tests.mesh.scenarios import Run, play, waits_at
from tests.refusals import missing_from
from tests.toys import COMPRESSORS

NAMES, ROUNDS = ["a", "b", "c"], 24
SAID = "a site says that it has diverged"


def four_bits(step: float) -> dict:
    return STEADY_AD_GDA | {"primal_step": step, "dual_step": 0.01}


# What is noticed


class Sent(Exception):
    pass


class Nowhere(Transport):
    """A transport that says when something is sent."""

    process_group = None  # type: ignore[assignment]

    def exchange(self, *given):
        raise Sent


def _network(bounds: Bounds | None = None) -> RemoteNetwork:
    return RemoteNetwork(fm.Ring().build(3), [0], Nowhere(), each_copy=True, bounds=bounds)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -3e38], ids=str)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_numbers_that_are_not_finite_reach_no_encoder(name, value):
    """Some compressors leave them out, or replace them by the largest number they can send."""
    rows, zero = torch.full((1, 1, 70), value), torch.zeros(1, dtype=torch.int64)
    draw = Draw(random_streams.keys(zero, "test", 0, zero), torch.float32)
    part = Part(COMPRESSORS[name].compress(rows, draw), 1.0)
    sound = bool(torch.linalg.vector_norm(part.rows).isfinite())
    for bounds in (None, Bounds(unevenness=1e3)):  # in a cluster, and in a mesh
        with pytest.raises(Sent if sound else Diverged):
            _network(bounds).exchange({"model": part}, torch.tensor(3))


@pytest.mark.parametrize(
    ("size", "copies", "sent"),
    [
        (1e9, [0.0, 0.0, 0.0], True),  # the first message: what the others have is not known
        (2e15, [0.0, 0.0, 0.0], False),
        (900.0, [0.1, 0.0, 0.0], True),
        (1100.0, [0.1, 0.0, 0.0], False),
        (4e4, [0.1, 0.0, 50.0], True),  # a neighbour's numbers are large too
        (6e4, [0.1, 0.0, 50.0], False),
    ],
)
def test_numbers_that_neighbours_would_refuse_are_not_sent(size, copies, sent):
    kept = torch.tensor(copies).reshape(1, 1, 3, 1)
    part = Part(Dense(torch.full((1, 1, 1), size)), 32.0, followed=True, kept=kept)
    with pytest.raises(Sent if sent else Diverged):
        _network(Bounds()).exchange({"tracker": part}, torch.tensor(3))


# What is told


class Board:
    """A bulletin with what some sites said about their divergence, and then about their round."""

    def __init__(self, said: dict[str, dict], rounds: dict[str, int] | None = None):
        self._of = {"diverged": said, "status": {site: {"round": done} for site, done in (rounds or {}).items()}}
        self.first = "diverged"

    def of_all(self, kind):
        return self._of[kind]

    def ages(self, kind):
        return dict.fromkeys(self._of[kind], 2.0 if kind == self.first else 1.0)


MEMBERSHIP = SimpleNamespace(
    mesh=SimpleNamespace(generation=2, present=[SimpleNamespace(name=name) for name in NAMES]),
    experiment=SimpleNamespace(rounds=ROUNDS),
)


def _body(round: int, generation: int = 2) -> dict:
    return SiteDiverged("any", round - 1, round, "an exploded model").body(generation)


def test_sites_that_say_that_they_have_diverged_are_named_in_the_order_of_their_rounds():
    board = Board({"a": _body(7), "b": _body(7), "c": _body(6)}, {"a": 7, "b": 6})
    assert list(divergence.told(board, MEMBERSHIP)) == ["c", "a", "b"]


def test_site_says_it_only_in_this_generation_while_it_is_present():
    said = {"c": _body(7, generation=1), "d": _body(7)}
    assert divergence.told(Board(said), MEMBERSHIP) == {}


def test_site_that_is_in_a_later_round_than_it_said_to_have_diverged_in_is_no_longer_shown():
    board = Board({"b": _body(7)}, {"b": 8})
    assert divergence.told(board, MEMBERSHIP) == {}
    board.first = "status"  # of before it went back to an earlier round, and diverged
    assert list(divergence.told(board, MEMBERSHIP)) == ["b"]


def test_announcement_has_the_form_that_others_accept():
    body = SiteDiverged("b", 6, 7, "numbers " * 100).body(1)
    assert body.keys() == KINDS["diverged"].fields.keys()
    assert all(holds(body[name]) for name, holds in KINDS["diverged"].fields.items())


def test_sentence_says_who_since_when_what_to_lower_and_how_to_go_on():
    mine, other = SiteDiverged("b", 6, 7, "an exploded model (norm 1e+09)"), SiteDiverged("a", 7, 8, "one too")
    sentence = divergence.in_words(mine, [other], "lower primal_step (starts at 1)", [0, 3, 9])
    parts = ("rounds 6 and 7: b has an exploded model", "a in round 8", "units", "standardize", "primal_step",
             "other nodes wait", "mesh remove", "mesh rewind", "kept here: 0, 3)", "start this node again")  # fmt: skip
    assert missing_from(sentence, *parts) == []


# Real nodes


def _inputs_in_other_units() -> None:
    own_site = agreement.own_site

    def scaled(*given):
        site = own_site(*given)
        return replace(site, **{name: (1000 * rows[0], *rows[1:]) for name in ("train", "test")
                                if (rows := getattr(site, name)) is not None})  # fmt: skip

    agreement.own_site = scaled


def _b_ends(run: Run, *parts: str) -> str:
    """Waits until b has ended, and returns its sentence."""
    run.stops("b", "diverged between rounds")
    assert "ValueError" not in (run.folder / "b.log").read_text()  # an error with a sentence, and no other
    sentence = run.events("b", "stopped")[-1]["reason"]
    assert missing_from(sentence, ": b has", "units", "standardize", "primal_step", *parts) == []
    return sentence


def _said_again(run: Run, before: Callable[[], None], sentence: str) -> None:
    """Started again, b says the same at once."""
    began = time.monotonic()
    run.start("b", before=before)
    assert _b_ends(run).split(". ")[0] == sentence.split(". ")[0]
    assert time.monotonic() - began < 15


def _waits_for_b(run: Run, name: str) -> None:
    """A node waits, and shows what b says of itself."""
    run.until(lambda: run.events(name, SAID) and run.events(name, "waiting"))
    assert name not in run.reaped(name), run.logs()
    assert not run.events(name, "diverged")
    said, shown = run.events(name, SAID)[0]["reason"], run.status(name)["diverged"]
    assert missing_from(said, "b says", "units", "mesh remove", "mesh rewind", "kept here: 0") == []
    assert [one["by"] for one in shown] == ["b"]
    assert len(run.events(name, SAID)) == len(run.events(name, "started"))


def _of_the_others(run: Run) -> list[str]:
    """Returns which of the others have ended: none by b's word. Each has ended by its own numbers, or waits for b."""
    run.until(lambda: all(run.events(name, "diverged") or run.events(name, "waiting") for name in "ac"))
    time.sleep(4)  # for the end of those whose own numbers have exploded
    ended = run.reaped("a", "c")
    for name in ended:
        assert missing_from(run.events(name, "stopped")[-1]["reason"], f": {name} has") == []
    if not ended:
        for name in "ac":
            _waits_for_b(run, name)
    return ended


def _both_vote_to_go_back_to(run: Run, round: int) -> None:
    """Waits until both know of both votes, or have decided so already."""
    what = f"go back to round {round}"

    def known(name: str) -> bool:
        return len(run.status(name)["votes"].get(what, ())) == 2 or len(run.events(name, "all have voted")) == 2

    run.until(lambda: known("a") and known("c"))
    time.sleep(1)


def _without_b_from_the_start(run: Run, flag: Path) -> None:
    """The others remove b, go back to the start before the run has ended, and finish. Only a node that has ended by its
    own numbers is started again for that."""
    ended = _of_the_others(run)
    run.vote("a", "c", out=["b"])
    run.start(*ended, observe=waits_at(ROUNDS, flag))
    run.until(lambda: all(run.events(name, "continuing") for name in "ac"))
    # Their models are as b has left them, sound or not.
    run.until(lambda: run.reaped("a", "c", only_see=True) or all(run.round(name) >= ROUNDS - 1 for name in "ac"))
    run.vote("a", "c", back_to=0)
    time.sleep(4)
    run.start(*run.reaped("a", "c"))
    _both_vote_to_go_back_to(run, 0)
    flag.touch()
    run.end("a", "c")
    assert [one["round"] for one in run.events("a", "continuing")][1:] == [0], run.logs()


def units_with_four_bits(run: Run) -> None:
    """b's inputs are off by 1,000. Its model explodes after a while."""
    flag = run.folder / "go"
    run.start("a", "c", observe=waits_at(ROUNDS, flag))
    run.start("b", before=_inputs_in_other_units)
    sentence = _b_ends(run, "exploded model", "consensus_step (0.4)")
    _said_again(run, _inputs_in_other_units, sentence)
    _without_b_from_the_start(run, flag)


def units_with_trackers(run: Run) -> None:
    flag = run.folder / "go"
    run.start("a", "c", observe=waits_at(ROUNDS, flag))
    run.start("b", before=_inputs_in_other_units)
    _b_ends(run)
    _without_b_from_the_start(run, flag)


def first_message_too_large(run: Run) -> None:
    """What b sends first is already so large that its neighbours refuse it. Before the first round b cannot know which
    numbers are usual, and what neighbours say of it is only a claim. So all wait and see who refuses whom, and why."""
    run.start("a", "c")
    run.start("b", before=_inputs_in_other_units)
    run.until(lambda: run.events("b", "a claim about this site"))
    said = run.events("b", "a claim about this site")[-1]["reason"]
    assert missing_from(said, "refuse", "norm", "limit", "units") == []
    run.until(lambda: {one["by"] for one in run.status("a").get("refusing", ()) if one["site"] == "b"} == {"a", "c"})
    assert not any(run.events(name, "stopped") for name in NAMES)
    run.vote("a", "c", out=["b"])
    run.ended("b")
    run.end("a", "c")


def _broken(mended: Path) -> Callable[[], None]:
    """b's gradients are no numbers in round 8, until a file is there."""

    def broken() -> None:
        honest = Oracle.losses_and_gradients

        def given(self, models, index, call=0):
            losses, gradients = honest(self, models, index, call)
            return losses, gradients * (torch.nan if int(index) == 7 and not mended.exists() else 1.0)

        Oracle.losses_and_gradients = given

    return broken


def mended_code(run: Run) -> None:
    """b's gradients are no numbers in round 8. Then its code is mended; all go back to a round before, and finish. The
    others are never started again."""
    mended, flag = run.folder / "mended", run.folder / "go"
    broken = _broken(mended)
    run.start("a", "c", observe=waits_at(12, flag))
    run.start("b", before=broken)
    sentence = _b_ends(run, "rounds 7 and 8", "model that is not finite")
    for name in "ac":
        _waits_for_b(run, name)
    _said_again(run, broken, sentence)
    mended.touch()
    run.vote(*NAMES, back_to=6)
    run.start("b", before=broken, observe=waits_at(12, flag))
    run.until(lambda: len(run.status("a")["votes"].get("go back to round 6", [])) == len(NAMES)
              or run.events("a", "all have voted"))  # fmt: skip
    flag.touch()
    run.end(*NAMES)
    assert [one["round"] for one in run.events("b", "continuing")] == [6], run.logs()


def removed_and_gone_back(run: Run) -> None:
    """The others wait for b, one of them with little patience and then again, and go on without it. b hears of it."""
    broken, flag = _broken(run.folder / "never"), run.folder / "go"
    run.start("a", observe=waits_at(12, flag))
    run.start("c", patience_s=6.0)
    run.start("b", before=broken)
    _b_ends(run)
    run.stops("c", "for b, longer than --patience")
    run.start("c", observe=waits_at(12, flag))
    for name in "ac":
        _waits_for_b(run, name)
    run.vote("a", "c", out=["b"])
    run.until(lambda: all(run.round(name) >= 10 for name in "ac"))  # and they have kept rounds 0, 6 and 9
    assert [run.status(name)["diverged"] for name in "ac"] == [[], []]
    run.start("b", before=broken)
    run.stops("b", "a, c have all voted to continue without b")
    run.vote("a", "c", back_to=6)
    _both_vote_to_go_back_to(run, 6)
    flag.touch()
    run.end("a", "c")
    assert [one["round"] for one in run.events("a", "continuing")][1:] == [6], run.logs()


SCENARIOS = {
    units_with_four_bits: four_bits(2.0),
    units_with_trackers: {"name": "tracked-ad-gda", "beta2": 0.0, "primal_step": 1.0},
    first_message_too_large: four_bits(30.0),
    mended_code: four_bits(0.5),
    removed_and_gone_back: four_bits(0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_site_that_diverges_ends_no_other_node_and_the_run_can_go_on(scenario, tmp_path):
    of = {"model": {"name": "fc", "hidden": 25}, "options": {"measure_every": 100}}
    play(scenario, tmp_path, NAMES, experiment(ROUNDS, algorithm=SCENARIOS[scenario], data=BY_CLASS, **of))
