"""What operators met in a trial: a copied folder that runs twice, and a crash before the first checkpoint on a machine
that then computes otherwise."""

import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from fairmesh.mesh.wire.journal import Journal
from tests.mesh.experiments import AD_GDA, BY_CLASS, experiment
from tests.mesh.scenarios import Run, played, waits_at

NAMES = ["a", "b", "c"]
EXPERIMENT = experiment(
    60, algorithm={"name": "ad-gda", "compressor": AD_GDA["compressor"]}, data=BY_CLASS, options={"measure_every": 20}
)


def a_copy_that_runs_too(run: Run) -> None:
    """A second node of a site that only dials is refused, and both sides say why; the first one goes on."""
    flag = run.folder / "go"
    run.start("a", "b", "c", observe=waits_at(30, flag))
    run.until(lambda: run.round("a") >= 28)
    shutil.copytree(run.folder / "c", run.folder / "copy")
    (run.folder / "copy" / "state" / "log.jsonl").unlink()
    run.start("copy")
    why = "two nodes of one site"
    run.until(lambda: any(why in event.get("reason", "") for event in run.events("copy", "refused")))
    run.until(lambda: any(why in event.get("reason", "") for event in run.events("a", "refused")))
    run.crash("copy")
    flag.touch()
    run.end(*NAMES)


def other_threads_after_an_early_crash(run: Run) -> None:
    """What was sent before the first round is sent again as it was, though this machine describes itself otherwise."""
    flag = run.folder / "go"
    run.start("a", "b", "c", observe=waits_at(10, flag))
    run.until(lambda: run.round("b") >= 8)
    run.crash("b")
    flag.touch()
    time.sleep(0.5)
    run.start("b", before=lambda: torch.set_num_threads(2))
    run.end(*NAMES)
    assert {event["threads"] for event in run.events("b", "machine")} == {"1", "2"}


def a_damaged_start(run: Run) -> None:
    """The disk damages the record of the model to start from, before the first checkpoint. The node has the model in a
    file too, and goes on with it."""
    flag = run.folder / "go"
    run.start("a", "b", "c", observe=waits_at(10, flag))
    run.until(lambda: run.round("b") >= 8)
    run.crash("b")
    folder = run.folder / "b" / "state" / "generation-1"
    journal = Journal(folder)
    place = journal._received[0, 0]
    journal.close()
    content = bytearray(place.path.read_bytes())
    content[place.start + place.length // 2] ^= 16
    place.path.write_bytes(content)
    flag.touch()
    run.start("b")
    run.end(*NAMES)
    assert "journal is damaged" in (run.folder / "b" / "state" / "log.jsonl").read_text()


SCENARIOS = {one.__name__: one for one in (a_copy_that_runs_too, other_threads_after_an_early_crash, a_damaged_start)}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_trouble_of_the_trial_is_named_or_does_not_happen_again(scenario, tmp_path):
    played("tests.mesh.test_trial", scenario, str(tmp_path / "run"))


if __name__ == "__main__":
    with Run(Path(sys.argv[2]), NAMES, EXPERIMENT, listening=["a", "b"]) as made:
        SCENARIOS[sys.argv[1]](made)
