"""Nodes train parts that stay at their site as a simulation does, and send nothing of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.experiment import load_experiment
from tests.mesh import fleet

ROOT = Path(__file__).parents[2]
NAMES = ["a", "b", "c"]
MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
"""
EXPERIMENT = """
rounds = 12
batch_norm = "POLICY"
data = { name = "digits", nodes = 3, odd = 1 }
topology = "ring"
model = { name = "import", path = "network.py:build" }
algorithm = { name = "dsgd", primal_step = 0.1 }
parts = { local = ["4.bias"], step = 0.02 }
[options]
dtype = "float64"
"""


def _scenario(folder: Path, policy: str) -> None:
    (folder / "network.py").write_text(MODEL)
    (folder / "experiment.toml").write_text(EXPERIMENT.replace("POLICY", policy))
    fleet.provisioned(folder, folder / "experiment.toml", NAMES)
    running = {name: fleet.start(folder, name) for name in NAMES}
    ends = {name: fleet.ended(process, 120) for name, process in running.items()}
    (folder / "ends.json").write_text(json.dumps(ends))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["local", "shared"])
def test_nodes_train_their_own_parts_as_a_simulation_does(policy: str, tmp_path: Path):
    command = [sys.executable, "-m", "tests.mesh.test_own_parts", str(tmp_path), policy]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200)
    assert json.loads((tmp_path / "ends.json").read_text()) == dict.fromkeys(NAMES, 0)
    simulated = fm.run(load_experiment(tmp_path / "experiment.toml"), process_group=fleet.KnowingSecrets(NAMES))
    results = [tmp_path / name / "state" / "result" for name in NAMES]
    assert len({(result / "model.safetensors").read_bytes() for result in results}) == 1
    record = json.loads((results[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["bytes_total"] == simulated.final[0]["bytes_total"]
    assert record["accuracy"]["sites"] == pytest.approx(simulated.final[0]["accuracy"]["sites"], abs=1e-6)
    common, expected = load_file(results[0] / "model.safetensors"), simulated.state_dict()
    start = simulated.problem.initial_model(0).state_dict()
    assert torch.equal(common["4.bias"], start["4.bias"])  # it never left its site
    statistics = expected if policy == "shared" else start
    assert torch.allclose(common["2.running_var"], statistics["2.running_var"], atol=1e-4)
    for i, name in enumerate(NAMES):
        own = fm.inference.load_model(tmp_path / name, site=name).module.state_dict()
        wanted = simulated.state_dict(site=str(simulated.problem.sites[i].name))
        for key, tensor in own.items():
            assert torch.allclose(tensor.double(), wanted[key].double(), atol=1e-4), (name, key)


if __name__ == "__main__":
    _scenario(Path(sys.argv[1]), sys.argv[2])
