"""Members that vote, lie and change their minds, with real nodes: the others lose nothing and the run ends."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from fairmesh.mesh.node import data_agreement, deciding, ledger
from fairmesh.mesh.node.decisions import Claim
from fairmesh.mesh.node.measurements import Measurements
from fairmesh.mesh.node.start import Start
from fairmesh.mesh.node.store import START
from fairmesh.networks import remote
from fairmesh.storage.files import write_record
from tests.mesh.experiments import BY_CLASS, STEADY_AD_GDA, experiment
from tests.mesh.scenarios import NAMES, OPTIONS, Run, play, waits_at


def two_of_five(run: Run) -> None:
    """Two adjacent members vote the three others out, with every check at their own site removed."""
    flag = run.folder / "go"

    def lawless() -> None:
        from fairmesh.mesh.node.decisions import Voter

        Voter.is_majority = lambda self, proposal: True  # type: ignore[method-assign]

    run.start("a", "b", before=lawless, observe=waits_at(20, flag))
    run.start("c", "d", "e")
    run.until(lambda: run.round("c") >= 18)
    for name in "ab":
        table = {"generation": 1, "sites": ["c", "d", "e"], "round": None, "restored": []}
        write_record(run.folder / name / "state" / "vote.json", table)
    time.sleep(3)
    flag.touch()
    run.until(lambda: run.events("a", "decided") and run.events("b", "decided"))
    before = {name: sorted(p.name for p in (run.folder / name / "state").rglob("*")) for name in "cde"}
    time.sleep(3)
    for name in "cde":  # they go on waiting, and nothing of theirs is gone
        assert not run.events(name, "stopped")
        assert set(before[name]) <= {p.name for p in (run.folder / name / "state").rglob("*")}
    run.vote("c", "d", "e", out=["a", "b"])
    run.end("c", "d", "e")


def a_changed_mind(run: Run) -> None:
    """One takes its vote back when another has committed already; later all vote again."""
    flag, state = run.folder / "go", run.folder / "b" / "state"

    def changes_its_mind(point: str, at: int) -> None:
        waits_at(20, flag)(point, at)

    def undecided() -> None:
        commit = ledger.Ledger.commit

        def late(self, one):
            if not (run.folder / "again").exists():  # its operator was faster than its node
                run.until(lambda: run.events("a", "all have voted"), 20)
                ledger.wish(state, self.mesh, "b", [])
                self.vote()
                return
            commit(self, one)

        ledger.Ledger.commit = late  # type: ignore[method-assign]

    run.start("b", before=undecided, observe=changes_its_mind)
    run.start("a", "c", "d", observe=changes_its_mind)
    run.start("e", observe=waits_at(10, run.folder / "never"))
    run.until(lambda: run.round("a") >= 8)
    run.vote("a", "b", "c", "d", out=["e"])
    run.until(lambda: run.events("a", "the vote is off; continuing"))
    (run.folder / "again").touch()
    flag.touch()
    run.vote("b", out=["e"])
    run.end("a", "b", "c", "d")


def a_lied_round(run: Run) -> None:
    """One says that it has done no round at all. The others name it and continue without it."""
    flag = run.folder / "go"

    def liar() -> None:
        claim = deciding._claim

        def lied(node, mailroom) -> Claim:
            true = claim(node, mailroom)
            return true._replace(begun=(true.begun[-1]._replace(done=0, oldest=0),))

        deciding._claim = lied

    run.start("a", "b", "c")
    run.start("d", before=liar)
    run.start("e", observe=waits_at(40, flag))
    run.until(lambda: run.round("a") >= 38)
    run.vote("a", "b", "c", "d", out=["e"])
    run.until(lambda: run.events("a", "the sites cannot continue"))
    assert "d" in run.events("a", "the sites cannot continue")[0]["reason"]
    assert not run.events("a", "continuing")
    run.vote("a", "b", "c", out=["d"])
    run.end("a", "b", "c")
    (went_on,) = run.events("a", "continuing")
    assert went_on["round"] >= 38


def lied_outputs(run: Run) -> None:
    """One says that the model has 10,000 outputs. The others know what all labels need, and lose nothing by it."""
    flag = run.folder / "go"

    def liar() -> None:
        claim = deciding._claim
        deciding._claim = lambda *given: claim(*given)._replace(outputs=10_000)

    run.start("a", "b", "c")
    run.start("d", before=liar)
    run.start("e", observe=waits_at(20, flag))
    run.until(lambda: run.round("a") >= 18)
    run.vote("a", "b", "c", "d", out=["e"])
    assert {len(tensor) for tensor in load(run.end("a", "b", "c", "d")).values()} == {5}


def lied_outputs_after_one_has_left(run: Run) -> None:
    """The one with the highest label leaves before the others have agreed on their data, so the model has no output for
    it. Later one says that it has."""

    def liar() -> None:
        claim = deciding._claim
        deciding._claim = lambda *given: claim(*given)._replace(outputs=5)

    def silent() -> None:
        data_agreement._announce_ready = lambda *_: time.sleep(600)

    run.start("a", "b", "d")
    run.start("c", observe=waits_at(20, run.folder / "never"))
    run.start("e", before=silent)
    time.sleep(5)  # all know what e says about its data
    run.vote("a", "b", "c", "d", out=["e"])
    run.until(lambda: run.round("a") >= 18)
    run.crash("d")
    run.start("d", before=liar)
    run.vote("a", "b", "d", out=["c"])
    assert {len(tensor) for tensor in load(run.end("a", "b", "d")).values()} == {4}


def away_meanwhile(run: Run) -> None:
    """Two are stopped when the others vote them out: one that dials the others, and one that they dial. Started again,
    they are told, stop, and have lost nothing."""
    run.start(*NAMES, observe=waits_at(30, run.folder / "go"))
    run.until(lambda: all(run.round(name) >= 28 for name in NAMES))
    for name in "ae":
        run.crash(name)
    (run.folder / "go").touch()
    kept = {path: path.read_bytes() for name in "ae" for path in (run.folder / name / "state").glob("generation-*/*")
            if path.is_file()}  # fmt: skip
    for name in "bcd":
        run.crash(name)
    run.start("b", "c", "d", observe=waits_at(40, run.folder / "end"))
    run.vote("b", "c", "d", out=["a", "e"])
    run.until(lambda: all(run.events(name, "continuing") for name in "bcd"))
    run.start("e")  # while no other site dials it
    run.stops("e", "continue without e")
    run.start("a")
    run.stops("a", "continue without a")
    for path, content in kept.items():
        assert path.read_bytes()[: len(content)] == content, path
    (run.folder / "end").touch()
    run.end("b", "c", "d")


def _held_with_its_result(file: Path):
    """A node that has confirmed its result, and comes no further until a file is there."""

    def observe(point: str, step: int) -> None:
        while point == "result confirmed" and not file.exists():
            time.sleep(0.05)

    return observe


def back_to_a_round(run: Run) -> None:
    """All go back to a kept checkpoint, when all but one have their result already, and end with the same model."""
    run.start(*NAMES[:-1])
    run.start(NAMES[-1], observe=_held_with_its_result(run.folder / "go"))
    results = [run.folder / name / "state" / "result" / "model.safetensors" for name in NAMES[:-1]]
    run.until(lambda: all(path.exists() for path in results))
    straight = results[0].read_bytes()
    run.vote(*NAMES, out=[], back_to=42)
    run.until(lambda: all(run.events(name, "all have voted") for name in NAMES[:-1]))
    (run.folder / "go").touch()
    assert run.end(*NAMES) == straight
    for name in NAMES[:-1]:
        state = run.folder / name / "state"
        assert (state / "result-generation-1" / "model.safetensors").read_bytes() == straight
    for name in NAMES:
        (event,) = run.events(name, "continuing")
        assert event["round"] == 42


def other_facts(run: Run) -> None:
    """On the first day one names a wrong file; it mends it, and the run begins. Then it is removed, and announces other
    facts meanwhile."""

    def wrong_file() -> None:
        facts = data_agreement.facts

        def wrong(site):
            return facts(site) | ({} if (run.folder / "mended").exists() else {"inputs": ["torch.float32", [3]]})

        data_agreement.facts = wrong

    run.start("a", "b", "c", "d")
    run.start("e", before=wrong_file, observe=waits_at(10, run.folder / "never"))
    run.until(lambda: run.events("a", "the data of the sites does not fit together"))
    assert "[3]] at e" in run.events("a", "the data of the sites does not fit together")[0]["reason"]
    run.crash("e")
    (run.folder / "mended").touch()

    def tells_otherwise_later() -> None:
        frozen = data_agreement._agreed_facts

        def told(node):
            found = frozen(node)
            node.bulletin.announce("facts", found["e"] | {"samples": 1, "inputs": ["torch.float32", [1]]})
            return found

        data_agreement._agreed_facts = told

    run.start("e", before=tells_otherwise_later, observe=waits_at(10, run.folder / "never"))
    time.sleep(3)  # some may have begun, and others may wait for facts that fit
    run.vote("a", "b", "c", "d", out=["e"])
    run.end("a", "b", "c", "d")
    (run.folder / "never").touch()
    run.stops("e", "continue without e")


def silent_before_the_first_round(run: Run) -> None:
    """One agrees on the data and then says nothing more. The others have the model to start from, with an output for
    the labels that only that one has, and keep it when they go on without it."""

    def silent() -> None:
        Start.agree = lambda *_: time.sleep(600)  # type: ignore[method-assign]

    run.start("a", "b", "c", "d")
    run.start("e", before=silent)
    run.until(lambda: all((run.folder / name / "state" / START).exists() for name in "abcd"))
    run.vote("a", "b", "c", "d", out=["e"])
    assert {len(tensor) for tensor in load(run.end("a", "b", "c", "d")).values()} == {5}


def started_again_meanwhile(run: Run) -> None:
    """In a ring of four, the last is gone. One votes and crashes; the two others vote and commit. Started again, it
    learns of the vote of the one that is no neighbour of it, from one that has stopped training."""
    ring = experiment(48, 4, STEADY_AD_GDA, data=BY_CLASS, options=OPTIONS)
    ring = Run(run.folder / "ring", ["a", "b", "c", "d"], ring)
    ring.start("a", "b", "c")
    ring.start("d", observe=waits_at(40, ring.folder / "never"))
    ring.until(lambda: all(ring.round(name) >= 38 for name in "abc"))
    ring.crash("d")
    ring.vote("c", out=["d"])
    ring.until(lambda: all("c" in str(ring.status(name)["votes"]) for name in "ab"))
    ring.crash("c")
    ring.vote("a", "b", out=["d"])
    ring.until(lambda: all(ring.events(name, "all have voted") for name in "ab"))
    ring.start("c")
    ring.end("a", "b", "c")


def numbers_that_grow(run: Run) -> None:
    """One sends numbers that are 300 times larger in every round, each within the bounds, until models of others have
    exploded. These nodes end by what they see in their own numbers, and the others wait for them. All vote it out, and
    go back to a round before. Only nodes that have ended are started again."""
    honest = ["a", "b", "c", "d"]

    def grows() -> None:
        honest = remote.encode

        def larger(codes: dict, now: int) -> bytes:
            if now < 20:
                return honest(codes, now)
            model = codes["model"]
            norms = torch.full_like(model.norms, min(30.0 * 300.0 ** (now - 20), 3e14))
            return honest({**codes, "model": model._replace(norms=norms, levels=model.levels.clamp(min=1))}, now)

        remote.encode = larger

    def some_end() -> list[str]:
        run.until(lambda: run.reaped(*honest, only_see=True))
        time.sleep(6)
        ended = run.reaped(*honest)
        for name in honest:
            if name in ended:
                assert f": {name} has" in run.events(name, "stopped")[-1]["reason"]
            else:
                assert {one["by"] for one in run.status(name)["diverged"]} & set(ended), run.logs()
        return ended

    run.start(*honest)
    run.start("e", before=grows)
    ended = some_end()
    run.vote(*honest, out=["e"])
    run.start(*ended)
    run.until(lambda: all(run.events(name, "continuing") for name in honest))
    again = some_end()  # after the removal, the models are as they were
    run.vote(*honest, out=[], back_to=0)
    run.start(*again)
    run.end(*honest)
    assert [one["round"] for one in run.events("a", "continuing")][1:] == [0]


def _failing_with_e(how: Callable[[], None]) -> Callable[[], None]:
    """Nodes that fail at every start as long as e is in the mesh, as if by what it has announced."""

    def before() -> None:
        enter = Measurements.enter

        def fails(self, generation, start, schedule, problem, names, landmarks=tuple) -> None:
            if "e" in names:
                how()
            enter(self, generation, start, schedule, problem, names, landmarks)

        Measurements.enter = fails  # type: ignore[method-assign]

    return before


def failures_at_every_start(run: Run) -> None:
    """What one has announced makes the others fail. They vote it out and start again, one of them later: the others
    fail again, and hear its vote all the same."""
    failing = _failing_with_e(lambda: 1 / 0)
    run.start("a", "b", "c", "d", before=failing)
    run.start("e")
    for name in "abcd":
        assert run._ended(name, 60) == 1, run.logs()
    run.vote("a", "b", "c", out=["e"])
    run.start("a", "b", "c", before=failing)
    waits = "failed; this site has voted, so its node waits for the others"
    run.until(lambda: all(run.events(name, waits) for name in "abc"))
    assert "ZeroDivisionError" in run.events("a", waits)[0]["reason"]
    run.vote("d", out=["e"])
    run.start("d", before=failing)
    run.end("a", "b", "c", "d")
    assert [event["without"] for event in run.events("a", "continuing")] == ["e"]


def deaths_at_every_start(run: Run) -> None:
    """The same in the middle of a run, and nothing can be caught: the others hear and count the votes before anything
    else, and know from their journals how far they had come since the checkpoint of round 20."""
    dying, pause = _failing_with_e(lambda: os.kill(os.getpid(), 9)), waits_at(24, run.folder / "never")
    run.start(*NAMES, observe=pause)
    run.until(lambda: all(run.round(name) >= 22 for name in NAMES))
    for name in "abcd":
        run.crash(name)
    run.start("a", "b", "c", "d", before=dying)
    for name in "abcd":
        run.dies(name)
    run.vote("a", "b", "c", "d", out=["e"])
    run.start("a", "b", "c", "d", before=dying)
    run.end("a", "b", "c", "d")
    (went_on,) = run.events("a", "continuing")
    assert went_on["without"] == "e"
    assert went_on["round"] >= 22


SCENARIOS = (
    two_of_five, a_changed_mind, a_lied_round, lied_outputs, lied_outputs_after_one_has_left, away_meanwhile,
    back_to_a_round, other_facts, silent_before_the_first_round, started_again_meanwhile, numbers_that_grow,
    failures_at_every_start, deaths_at_every_start,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_run_of_the_honest_ends_as_it_should(scenario, tmp_path):
    play(scenario, tmp_path)
