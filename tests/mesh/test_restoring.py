"""A site that has lost its state gets one from its neighbours, by a vote of all, and the run ends as it should."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from fairmesh.compression import DecodeError
from fairmesh.errors import FairmeshError
from fairmesh.mesh.node.restoring import read_shared, restored, shared
from fairmesh.storage.state_tree import flatten_state, unflatten_state
from tests.mesh.test_hostile_votes import EXPERIMENT, NAMES, ROOT, Run, _waits_at

OPTIONS = '\n[options]\nmeasure_every = 16\ncheckpoint_every = 5\ndtype = "float64"\n'
BEGINNING = EXPERIMENT.split("[algorithm]")[0]
ALGORITHMS = {
    "ad-gda": EXPERIMENT,
    "tracked-ad-gda": BEGINNING + '[algorithm]\nname = "tracked-ad-gda"' + OPTIONS,
    "dsgd": BEGINNING + '[algorithm]\nname = "dsgd"\nprimal_step = 0.5' + OPTIONS,
}


def _state(run: Run, name: str) -> Path:
    return run.folder / name / "state"


def _stopped_in_the_middle(run: Run, name: str, at: int, *others: str) -> None:
    """A mesh of which one site's node was killed before a step, for which the others wait."""
    flag = run.folder / f"go-{at}"
    run.start(*others, name, observe=_waits_at(at, flag))
    run.until(lambda: run.round(name) >= at - 2)
    run.crash(name)
    flag.touch()


def an_empty_folder(run: Run) -> None:
    """It stops with a sentence, since only people can help. After the votes of all it takes part again."""
    _stopped_in_the_middle(run, "e", 30, "a", "b", "c", "d")
    shutil.rmtree(_state(run, "e"))
    run.start("e")
    run.stops("e", "fairmesh mesh restore")
    run.vote(*NAMES, restored=["e"])
    run.start("e")
    run.end(*NAMES)
    (found,) = run.events("e", "this site's state was restored from its neighbours")
    assert found["round"] >= 25
    assert (_state(run, "e") / "before-restoring-1" / "decisions.json").exists()
    assert not run.events("a", "stopped")
    _as_good_as_undisturbed(run)


def _as_good_as_undisturbed(run: Run) -> None:
    """The result's worst site is within a few points of that of a run that nobody disturbed."""
    calm = Run(run.folder / "calm", experiment=(run.folder / "experiment.toml").read_text())
    calm.start(*NAMES)
    calm.end(*NAMES)
    here, there = (json.loads((_state(one, "a") / "result" / "summary.json").read_text()) for one in (run, calm))
    assert abs(here["worst"] - there["worst"]) <= 0.06, (here["worst"], there["worst"])


def a_backup_that_is_too_old(run: Run) -> None:
    """Its neighbours no longer have the messages since then."""
    _stopped_in_the_middle(run, "e", 8, "a", "b", "c", "d")
    old = run.folder / "backup"
    shutil.copytree(_state(run, "e"), old)
    run.start("e", observe=_waits_at(40, run.folder / "go-40"))
    run.until(lambda: run.round("e") >= 38)
    run.crash("e")
    shutil.rmtree(_state(run, "e"))
    shutil.copytree(old, _state(run, "e"))
    run.start("e")
    run.stops("e", "which it had acknowledged and which is no longer kept here")
    run.vote(*NAMES, restored=["e"])
    run.start("e")
    run.end(*NAMES)


def after_another_has_left(run: Run) -> None:
    """It takes over from the others that a site has left before."""
    _stopped_in_the_middle(run, "d", 12, "a", "b", "c", "e")
    run.vote("a", "b", "c", "e", out=["d"])
    run.until(lambda: run.round("e") >= 16)
    run.crash("e")
    shutil.rmtree(_state(run, "e"))
    run.start("e")
    run.stops("e", "has forgotten what it had agreed to")
    run.vote("a", "b", "c", "e", restored=["e"])
    run.start("e")
    run.end("a", "b", "c", "e")
    decided = json.loads((_state(run, "e") / "decisions.json").read_text())["decisions"]
    assert [(one["sites"], one["restored"]) for one in decided] == [(["d"], []), ([], ["e"])]


def crashes_meanwhile(run: Run) -> None:
    """It dies at each point of the way, and so does a neighbour that sends it its state."""
    _stopped_in_the_middle(run, "e", 30, "a", "b", "c", "d")
    shutil.rmtree(_state(run, "e"))
    run.crash("a")
    run.vote(*NAMES, restored=["e"])
    run.start("a", observe=_dies_at("followed"))
    of_the_neighbour = {"agreed": "begun", "noted": "logged", "saved without": ""}
    for point in ("committed", "followed", "agreed", "noted", "saved without", "begun"):
        run.start("e", observe=_dies_at(point))
        if point in of_the_neighbour:
            run.dies("a")
            run.start("a", observe=_dies_at(of_the_neighbour[point]))
        run.dies("e")
    run.start("e")
    run.end(*NAMES)


def _dies_at(point: str) -> Callable[[str, int], None]:
    def observe(reached: str, step: int) -> None:
        if reached == point:
            os.kill(os.getpid(), 9)

    return observe


SCENARIOS = {
    one.__name__: one for one in (an_empty_folder, a_backup_that_is_too_old, after_another_has_left, crashes_meanwhile)
}
RUNS = [(name, "ad-gda") for name in SCENARIOS] + [("an_empty_folder", name) for name in list(ALGORITHMS)[1:]]


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "algorithm"), RUNS)
def test_site_that_has_lost_its_state_takes_part_again(scenario, algorithm, tmp_path):
    """In a process of its own, since nodes are forked from it."""
    command = [sys.executable, "-m", "tests.mesh.test_restoring", scenario, algorithm, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


if __name__ == "__main__":
    made = Run(Path(sys.argv[3]), experiment=ALGORITHMS[sys.argv[2]])
    try:
        SCENARIOS[sys.argv[1]](made)
    finally:
        made.kill()
