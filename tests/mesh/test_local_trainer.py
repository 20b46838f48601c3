"""Nodes whose local work is training code of the site's own: finished work is durable before it is sent, so that code
that draws its own random numbers is allowed, and no finished round is trained twice."""

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from fairmesh.problems.local_work import Node, Work, no_memory
from fairmesh.storage.finished_work import FinishedWork
from tests.mesh.experiments import experiment
from tests.mesh.scenarios import Run, play

NAMES = ["a", "b", "c"]
ROUNDS = 10
EXPERIMENT = experiment(
    ROUNDS,
    algorithm={"name": "tracked-ad-gda", "primal_step": 1.0, "beta1": 0.0, "beta2": 0.0},
    trainer="mine.py:train",
    options={"checkpoint_every": 4},
)
MINE = """
import os, pathlib, signal, time
import torch

FOLDER = pathlib.Path({folder!r})

def once(what):
    flag = FOLDER / what
    known = flag.exists()
    flag.touch()
    return not known

def note(what, ctx):
    with open(FOLDER / "counted", "a") as file:
        file.write(f"{{what}} {{ctx.site}} {{ctx.round}}\\n")

def spoil(module, ctx):  # what goes wrong at site a: it forgets to train in round 0, and so on
    if ctx.site != "a" or ctx.round not in (0, 1, 3) or not once(f"spoiled-{{ctx.round}}"):
        return False
    if ctx.round == 1:
        torch.nn.init.constant_(module[-1].weight, float("nan"))
    if ctx.round == 3:
        module[-1] = torch.nn.Linear(64, 11)
    return True

def train(module, data, ctx):
    note("begun", ctx)
    if spoil(module, ctx):
        return
    while (ctx.site, ctx.round) == ("c", 2) and not (FOLDER / "seen").exists():  # an hour, for a short moment
        time.sleep(0.1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5)
    if ctx.state:
        optimizer.load_state_dict(ctx.state["optimizer"])
    for step in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(data.inputs), data.targets).backward()
        optimizer.step()
        if (ctx.site, ctx.round, step) == ("b", 5, 1) and once("killed-at-work"):
            os.kill(os.getpid(), signal.SIGKILL)
    if (ctx.site, ctx.round) == ("a", 8) and once("raised"):
        raise RuntimeError("no memory")
    with torch.no_grad():  # another number each time: training it again would give another model
        module[-1].bias += 1e-3 * int.from_bytes(os.urandom(2), "little") / 65536
    ctx.state["optimizer"] = optimizer.state_dict()
    note("done", ctx)
"""


def own_training_that_fails_and_is_killed(run: Run) -> None:
    def dies_when_stored() -> None:
        """c is killed as soon as its work of round 6 is stored, before anything of it is sent."""
        write = FinishedWork.write

        def then_die(self: FinishedWork, round_number: int, *work) -> None:
            write(self, round_number, *work)
            if round_number == 6:
                os.kill(os.getpid(), 9)

        FinishedWork.write = then_die  # type: ignore[method-assign]

    run.start("a", "b")
    run.start("c", before=dies_when_stored)
    for number, why in ((0, "changed no trained parameter"), (1, "not finite")):
        run.stops("a", f"site a, round {number}: ")
        assert why in run.events("a", "stopped")[-1]["reason"]
        run.start("a")
    at_work = "local training of round 2 at site c since"
    run.until(lambda: at_work in run.status("a").get("sites", {}).get("c", {}).get("activity", ""))
    run.until(lambda: any(at_work in event.get("which_is_at", "") for event in run.events("a", "waiting")))
    (run.folder / "seen").touch()
    run.stops("a", "site a, round 3: ")
    assert "(11, 64)" in run.events("a", "stopped")[-1]["reason"]
    run.start("a")
    run.dies("b")
    run.start("b")
    run.dies("c")
    run.start("c")
    run.stops("a", "site a, round 8: the training function raised RuntimeError: no memory")
    assert "mine.py" in run.events("a", "stopped")[-1]["reason"]
    run.start("a")
    run.end(*NAMES)
    assert run.events("b", "local training finished")


def imported(path: str) -> dict:
    return {"name": "import", "path": path}


LORA = {"name": "lora", "rank": 4, "targets": ["query", "key", "value", "dense"], "head": ["classifier"]}
EXAMPLES = {  # file -> the package that it needs, its data besides the digits, and its model
    "plain_loop": ("torch", {}, imported("plain_loop.py:model")),
    "lightning_module": ("lightning", {}, imported("lightning_module.py:Classifier")),
    "hugging_face": ("accelerate", imported("hugging_face.py:sites"), imported("hugging_face.py:model")),
    "hugging_face_lora": (
        "peft",
        imported("hugging_face_lora.py:sites"),
        LORA | {"base": imported("hugging_face_lora.py:base")},
    ),
}


def an_example_of_own_training(run: Run) -> None:
    """b is killed in the middle of its local work."""
    run.start(*NAMES)
    run.until(lambda: any(event["round"] == 3 for event in run.events("b", "local training")), 120)
    run.crash("b")
    run.start("b")
    run.end(*NAMES)
    finished, begun = (len(run.events("b", what)) for what in ("local training finished", "local training"))
    assert finished <= 5  # it may have been killed between storing its work and saying so
    assert begun <= 6  # round 3 twice, if it was not finished


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_as_meshes_whose_nodes_are_killed(tmp_path: Path, name: str):
    needs, data, model = EXAMPLES[name]
    pytest.importorskip(needs)
    file = Path(__file__).parents[2] / "examples" / "own_training" / f"{name}.py"
    parts = {"data": data, "model": model, "trainer": f"{name}.py:train", "options": {"checkpoint_every": 2}}
    play(
        an_example_of_own_training,
        tmp_path,
        NAMES,
        experiment(5, algorithm=None, topology=None, **parts),
        {file.name: file.read_text()},
    )


@pytest.mark.slow
def test_finished_rounds_are_never_trained_again(tmp_path: Path):
    files = {"mine.py": MINE.format(folder=str(tmp_path))}
    play(own_training_that_fails_and_is_killed, tmp_path, NAMES, EXPERIMENT, files)
    counted = Counter((tmp_path / "counted").read_text().splitlines())
    every = {f"done {site} {t}" for site in NAMES for t in range(ROUNDS)}
    assert {line: times for line, times in counted.items() if line.startswith("done")} == dict.fromkeys(every, 1)
    twice = {line for line, times in counted.items() if times > 1}
    spoiled = {f"begun a {t}" for t in (0, 1, 3)}
    assert twice == {"begun b 5", "begun a 8"} | spoiled  # killed in the middle, and raised


def test_finished_work_is_read_back_dropped_and_done_again_if_damaged(tmp_path: Path):
    told, node, start = [], Node(0, 0, 2, "c", 7), torch.randn(5)
    kept = FinishedWork(tmp_path, before_sending=True, damaged=lambda file, reason: told.append(file))
    work = Work(torch.full((1, 1, 1), torch.nan), torch.randn(1, 1, 5), torch.zeros(1, 1, 0), no_memory(1, 1))
    for number in (3, 4, 5):
        kept.write(number, node, start, work, seconds=0.0)
    assert kept.read(7, node, start) is None
    found = kept.read(4, node, start + 1)  # what was sent counts, whatever a node starts from after a restart
    assert found is not None
    assert torch.equal(found.updates, work.updates)
    assert found.losses.isnan().all()
    assert kept.nbytes(since=4) == kept.nbytes() * 2 // 3
    kept.drop_before(4)
    assert kept.read(3, node, start) is None
    (file,) = tmp_path.glob("work-000000000005-*")
    file.write_bytes(file.read_bytes()[:-3])
    assert kept.read(5, node, start) is None
    assert told == [file.name]
