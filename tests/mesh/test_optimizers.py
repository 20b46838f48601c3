"""Nodes keep the memory of their optimizer: a node that was killed continues as if nothing had happened, and one that
has lost its state begins it again."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.experiment import load_experiment
from tests.mesh import fleet
from tests.mesh.experiments import experiment
from tests.mesh.scenarios import Run, played, waits_at

NAMES = ["a", "b", "c"]
EXPERIMENT = experiment(
    12,
    algorithm={
        "name": "dsgd",
        "primal_step": 0.01,
        "optimizer": {"name": "adamw", "beta2": 0.9, "decay": 0.1, "no_decay": ["*bias"]},
    },
    options={"checkpoint_every": 5, "dtype": "float64"},
)


def scenario(folder: Path, lost: bool) -> None:
    """c is killed before step 7. It starts again, with its state or without."""
    run, flag = Run(folder, NAMES, EXPERIMENT), folder / "go"
    run.start(*NAMES, observe=waits_at(7, flag))
    run.until(lambda: run.round("c") >= 6)
    run.crash("c")
    flag.touch()
    if lost:
        shutil.rmtree(folder / "c" / "state")
        run.start("c")
        run.is_told_to_restore("c")
        run.vote(*NAMES, restored=["c"])
    run.start("c")
    run.end(*NAMES)


@pytest.mark.slow
def test_killed_node_continues_with_its_optimizers_memory(tmp_path: Path):
    played("tests.mesh.test_optimizers", "killed", str(tmp_path))
    simulated = fm.run(load_experiment(tmp_path / "experiment.toml"), process_group=fleet.KnowingSecrets(NAMES))
    found = load_file(tmp_path / "a" / "state" / "result" / "model.safetensors")
    for name, tensor in simulated.state_dict().items():
        assert torch.allclose(found[name].double(), tensor.double(), rtol=0, atol=1e-6), name  # stored as float32
    record = json.loads((tmp_path / "a" / "state" / "result" / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["bytes_total"] == simulated.final[0]["bytes_total"]


@pytest.mark.slow
def test_node_that_has_lost_its_state_begins_its_optimizers_memory_again(tmp_path: Path):
    played("tests.mesh.test_optimizers", "lost", str(tmp_path))
    found = load_file(tmp_path / "c" / "state" / "result" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in found.values())


if __name__ == "__main__":
    scenario(Path(sys.argv[2]), lost=sys.argv[1] == "lost")
