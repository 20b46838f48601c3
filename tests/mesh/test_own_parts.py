"""Nodes train parts that stay at their site as a simulation does, and send nothing of them. Such parts are kept when a
site leaves, and begin again at a site that has lost its state."""

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
from tests.mesh.scenarios import Run, played, waits_at

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


def _run(folder: Path, policy: str) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "network.py").write_text(MODEL)
    return Run(folder, NAMES, EXPERIMENT.replace("POLICY", policy))


def undisturbed(folder: Path, policy: str) -> None:
    run = _run(folder, policy)
    run.start(*NAMES)
    ends = {name: fleet.ended(process, 120) for name, process in run.running.items()}
    (folder / "ends.json").write_text(json.dumps(ends))


def _c_dies(run: Run) -> None:
    """The node of c is killed before step 7, for which the others wait."""
    flag = run.folder / "go"
    run.start(*NAMES, observe=waits_at(7, flag))
    run.until(lambda: run.round("c") >= 6)
    run.crash("c")
    flag.touch()


def restored(folder: Path, policy: str) -> None:
    """c loses its state and gets one from its neighbours, who have nothing of its local part."""
    run = _run(folder, policy)
    _c_dies(run)
    shutil.rmtree(folder / "c" / "state")
    run.start("c")
    run.is_told_to_restore("c")
    run.vote(*NAMES, restored=["c"])
    run.start("c")
    run.end(*NAMES)


def left(folder: Path, policy: str) -> None:
    """c never comes back, and the others go on without it."""
    run = _run(folder, policy)
    _c_dies(run)
    run.vote("a", "b", out=["c"])
    run.end("a", "b")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["local", "shared"])
def test_nodes_train_their_own_parts_as_a_simulation_does(policy: str, tmp_path: Path):
    played("tests.mesh.test_own_parts", "undisturbed", str(tmp_path), policy)
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


def _tensors(folder: Path, name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the common model and that of a site."""
    state = folder / name / "state"
    return load_file(state / "result" / "model.safetensors"), load_file(state / "personal" / "site.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["local", "shared"])
def test_site_that_has_lost_its_state_begins_its_local_part_again_and_says_so(policy: str, tmp_path: Path):
    played("tests.mesh.test_own_parts", "restored", str(tmp_path), policy)
    events = [json.loads(line) for line in (tmp_path / "c" / "state" / "log.jsonl").read_text().splitlines()]
    (found,) = [event for event in events if "restored from its neighbours" in event["what"]]
    assert found["round"] == 6
    assert "start again" in found["local_parts"]
    common, own = _tensors(tmp_path, "c")
    assert all(torch.isfinite(tensor).all() for tensor in (*common.values(), *own.values()))
    moved = {name: (_tensors(tmp_path, name)[1]["4.bias"] - common["4.bias"]).abs().max() for name in NAMES}
    assert 0 < moved["c"] < 0.75 * min(moved["a"], moved["b"])  # 6 of 12 steps


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["local", "shared"])
def test_sites_that_remain_keep_their_local_parts(policy: str, tmp_path: Path):
    played("tests.mesh.test_own_parts", "left", str(tmp_path), policy)
    for name in ("a", "b"):
        common, own = _tensors(tmp_path, name)
        assert (own["4.bias"] - common["4.bias"]).abs().max() > 0.1  # 12 steps of about 0.02
    assert not (tmp_path / "c" / "state" / "personal").exists()


if __name__ == "__main__":
    {"undisturbed": undisturbed, "restored": restored, "left": left}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
