"""A site whose numbers diverge: it is noticed before anything is sent or stored, all nodes end with one sentence that
names it, and nothing is lost."""

import json
import sys
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
from fairmesh.mesh.node import divergence, membership
from fairmesh.mesh.node.divergence import SiteDiverged
from fairmesh.mesh.wire.kinds import KINDS
from fairmesh.networks.base import Part
from fairmesh.networks.bounds import Bounds
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.networks.transport import Transport
from fairmesh.numerics import random_streams
from fairmesh.numerics.random_streams import Draw
from fairmesh.problems.oracle import Oracle
from tests.mesh.scenarios import Run, played, waits_at
from tests.refusals import missing_from
from tests.toys import COMPRESSORS

NAMES, ROUNDS = ["a", "b", "c"], 24
EXPERIMENT = """
rounds = 24
data = { name = "digits", nodes = 3, split = "class" }
topology = "ring"
model = { name = "fc", hidden = 25 }
[algorithm]
ALGORITHM
[options]
measure_every = 100
"""
FOUR_BITS = """name = "ad-gda"
primal_step = STEP
dual_step = 0.01
consensus_step = 0.4
compressor = { name = "quantize", bits = 4 }"""
TRACKED = """name = "tracked-ad-gda"
beta2 = 0.0
primal_step = 1.0"""


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
    """A bulletin with the announcements of some sites."""

    def __init__(self, **said: dict):
        self.said = said

    def of_all(self, kind):
        return self.said


MESH = SimpleNamespace(generation=2, present=[SimpleNamespace(name=name) for name in NAMES])


def test_first_site_and_of_those_in_one_round_the_one_with_the_largest_numbers_is_named_first():
    said = {
        "a": SiteDiverged("a", 6, 7, "an exploded model", 1e7).body(2),
        "b": SiteDiverged("b", 6, 7, "an exploded model", 1e9).body(2),
        "c": SiteDiverged("c", 5, 6, "an exploded model", 1e7).body(2),
    }
    assert [one.site for one in divergence.told(Board(**said), MESH)] == ["c", "b", "a"]
    said["a"] = SiteDiverged("a", 6, 7, "a non-finite model", torch.inf).body(2)
    assert [one.site for one in divergence.told(Board(**said), MESH)] == ["c", "a", "b"]
    json.dumps(said, allow_nan=False)


def test_site_can_say_it_only_of_itself_in_this_generation_and_while_it_is_present():
    of_another = SiteDiverged("a", 6, 7, "an exploded model", 1e9).body(2)
    earlier = SiteDiverged("c", 6, 7, "an exploded model", 1e9).body(1)
    gone = SiteDiverged("d", 6, 7, "an exploded model", 1e9).body(2)
    board = Board(b=of_another, c=earlier, d=gone)
    assert divergence.told(board, MESH) == []
    assert divergence.unaware(board, MESH) == ["a", "c"]


def test_announcement_has_the_form_that_others_accept():
    body = SiteDiverged("b", 6, 7, "numbers " * 100, 1e30).body(1)
    assert body.keys() == KINDS["diverged"].keys()
    assert all(holds(body[name]) for name, holds in KINDS["diverged"].items())


def test_sentence_says_who_since_when_what_to_lower_and_how_to_go_on():
    found = [SiteDiverged("b", 6, 7, "an exploded model (norm 1e+09)", 1e9), SiteDiverged("a", 7, 8, "one too", 1e7)]
    sentence = divergence.in_words(found, "lower primal_step (starts at 1)", [0, 3, 9])
    parts = ("rounds 6 and 7: b has an exploded model", "then a in round 8", "units", "standardize", "primal_step",
             "mesh remove", "mesh rewind", "kept here: 0, 3)")  # fmt: skip
    assert missing_from(sentence, *parts) == []


# Real nodes


_STARTED: list[Run] = []


def _run(folder: Path, algorithm: str) -> Run:
    run = Run(folder, NAMES, EXPERIMENT.replace("ALGORITHM", algorithm))
    _STARTED.append(run)
    return run


def _inputs_in_other_units() -> None:
    own_site = membership.own_site

    def scaled(*given):
        site = own_site(*given)
        return replace(site, **{name: (1000 * rows[0], *rows[1:]) for name in ("train", "test")
                                if (rows := getattr(site, name)) is not None})  # fmt: skip

    membership.own_site = scaled


def _all_end(run: Run, before: Callable[[], None], *parts: str) -> str:
    """Starts all nodes, of which b does something first, and returns the sentence with which all of them end."""
    run.start("a", "c")
    run.start("b", before=before)
    for name in NAMES:
        run.stops(name, "diverged between rounds")
        assert "Diverged" in (run.folder / f"{name}.log").read_text()  # an error with a sentence, and no other
        assert "ValueError" not in (run.folder / f"{name}.log").read_text()
    said = {run.events(name, "stopped")[-1]["reason"].split("; kept here: 0")[0] for name in NAMES}
    assert len(said) == 1, said
    (sentence,) = said
    assert missing_from(sentence, ": b has", "units", "standardize", "primal_step", *parts) == []
    return sentence


def _said_again(run: Run, before: Callable[[], None], sentence: str) -> None:
    """Started again, all nodes say the same at once."""
    began = time.monotonic()
    assert _all_end(run, before) == sentence
    assert time.monotonic() - began < 12


def _without_b_from_the_start(run: Run) -> None:
    """The others remove b, go back to the start before the run has ended, and finish."""
    flag, stopped = run.folder / "go", len(run.events("a", "stopped"))
    run.vote("a", "c", out=["b"])
    run.start("a", "c", observe=waits_at(ROUNDS, flag))
    run.until(lambda: all(run.events(name, "continuing") for name in "ac"))
    if run.events("a", "continuing")[-1]["round"]:  # their models are as b has left them, sound or not
        run.until(lambda: run.round("a") >= ROUNDS - 1 or len(run.events("a", "stopped")) > stopped)
        run.vote("a", "c", back_to=0)
        time.sleep(3)  # until both votes are known
        flag.touch()
        if len(run.events("a", "stopped")) > stopped:
            for name in "ac":
                run.ended(name)
            run.start("a", "c")
    flag.touch()
    run.end("a", "c")


def units_with_four_bits(run_in: Path) -> None:
    """b's inputs are off by 1,000. Its model explodes after a while."""
    run = _run(run_in, FOUR_BITS.replace("STEP", "2.0"))
    sentence = _all_end(run, _inputs_in_other_units, "exploded model", "consensus_step (0.4)")
    _said_again(run, _inputs_in_other_units, sentence)
    _without_b_from_the_start(run)


def units_with_trackers(run_in: Path) -> None:
    run = _run(run_in, TRACKED)
    sentence = _all_end(run, _inputs_in_other_units)
    _said_again(run, _inputs_in_other_units, sentence)
    _without_b_from_the_start(run)


def first_message_too_large(run_in: Path) -> None:
    """What b sends first is already so large that its neighbours refuse it. Before the first round b cannot know which
    numbers are usual, and what neighbours say of it is only a claim. So all wait and see who refuses whom, and why."""
    run = _run(run_in, FOUR_BITS.replace("STEP", "30.0"))
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


def not_a_number(run_in: Path) -> None:
    """b's gradients are no numbers in round 8. Then its code is mended; all go back to a round before, and finish."""
    run = _run(run_in, FOUR_BITS.replace("STEP", "0.5"))
    mended = run_in / "mended"

    def broken() -> None:
        honest = Oracle.losses_and_gradients

        def given(self, models, index, call=0):
            losses, gradients = honest(self, models, index, call)
            return losses, gradients * (torch.nan if int(index) == 7 and not mended.exists() else 1.0)

        Oracle.losses_and_gradients = given

    sentence = _all_end(run, broken, "rounds 7 and 8", "model that is not finite")
    _said_again(run, broken, sentence)
    mended.touch()
    run.vote(*NAMES, back_to=6)
    flag = run_in / "go"
    run.start("a", "c", observe=waits_at(12, flag))
    run.start("b", before=broken, observe=waits_at(12, flag))
    run.until(lambda: len(run.status("a")["votes"].get("go back to round 6", [])) == len(NAMES))
    flag.touch()
    run.end(*NAMES)
    assert [one["round"] for one in run.events("b", "continuing")] == [6], run.logs()


SCENARIOS = {
    one.__name__: one for one in (units_with_four_bits, units_with_trackers, first_message_too_large, not_a_number)
}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_nodes_end_with_one_sentence_and_lose_nothing(scenario, tmp_path):
    played("tests.mesh.test_divergence", scenario, str(tmp_path / "run"))


if __name__ == "__main__":
    try:
        SCENARIOS[sys.argv[1]](Path(sys.argv[2]))
    finally:
        for started in _STARTED:
            started.kill()
