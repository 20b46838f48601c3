"""Nodes end where a simulation that knows the sites' secrets ends, with a model of each site's own and with parts and
memory that stay at their site. These are kept when a node is killed or another site leaves, and begin again at a site
that has lost its state."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.experiment import load_experiment
from fairmesh.mesh.node.watching import read_status
from fairmesh.personalization import PersonalModel
from tests.mesh import fleet
from tests.mesh.experiments import AD_GDA, experiment
from tests.mesh.scenarios import Run, play, waits_at

pytestmark = pytest.mark.slow

NAMES = ["a", "b", "c"]
FLOAT64 = {"dtype": "float64"}
MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
"""


def _own_parts(policy: str) -> str:
    return experiment(
        12,
        algorithm={"name": "dsgd", "primal_step": 0.1},
        batch_norm=policy,
        model={"name": "import", "path": "network.py:build"},
        parts={"local": ["4.bias"], "step": 0.02},
        options=FLOAT64,
    )


ADAMW = {"name": "adamw", "beta2": 0.9, "decay": 0.1, "no_decay": ["*bias"]}
EXPERIMENTS = {
    "defaults": experiment(
        40, algorithm="tracked-ad-gda", options={"measure_every": 20, "checkpoint_every": 15} | FLOAT64
    ),
    "personal": experiment(
        15,
        algorithm=AD_GDA | {"consensus_step": 0.4},
        personalization={"name": "mixture", "steps": 15, "local_steps": 15},
        options=FLOAT64,
    ),
    "optimizer": experiment(
        12,
        algorithm={"name": "dsgd", "primal_step": 0.01, "optimizer": ADAMW},
        options={"checkpoint_every": 5} | FLOAT64,
    ),
    "local": _own_parts("local"),
    "shared": _own_parts("shared"),
}


def undisturbed(run: Run) -> None:
    run.live()


def _c_dies(run: Run) -> None:
    """The node of c is killed before step 7, for which the others wait."""
    flag = run.folder / "go"
    run.start(*NAMES, observe=waits_at(7, flag))
    run.until(lambda: run.round("c") >= 6)
    run.crash("c")
    flag.touch()


def killed(run: Run) -> None:
    _c_dies(run)
    run.start("c")
    run.end(*NAMES)


def restored(run: Run) -> None:
    """c loses its state and gets one from its neighbours, who have nothing of its local part."""
    _c_dies(run)
    shutil.rmtree(run.folder / "c" / "state")
    run.start("c")
    run.is_told_to_restore("c")
    run.vote(*NAMES, restored=["c"])
    run.start("c")
    run.end(*NAMES)


def left(run: Run) -> None:
    """c never comes back, and the others go on without it."""
    _c_dies(run)
    run.vote("a", "b", out=["c"])
    run.end("a", "b")


def lived(folder: Path, case: str, fate: Callable[[Run], None] = undisturbed) -> Path:
    play(fate, folder, NAMES, EXPERIMENTS[case], {"network.py": MODEL})
    return folder


def simulated(folder: Path) -> tuple[fm.Result, dict, Path]:
    """Returns the simulation, the last record of the nodes, and the result of one; all sites have the same."""
    results = [folder / name / "state" / "result" for name in NAMES]
    for file in ("model.safetensors", "summary.json", "metrics.jsonl", "experiment.toml"):
        assert len({(result / file).read_bytes() for result in results}) == 1, file
    expected = fm.run(load_experiment(folder / "experiment.toml"), process_group=fleet.KnowingSecrets(NAMES))
    record = json.loads((results[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["bytes_total"] == expected.final[0]["bytes_total"]  # what stays at a site costs no message
    return expected, record, results[0]


def test_nodes_with_the_defaults_end_where_the_simulator_ends_and_tell_their_weights(tmp_path):
    """Its steps reach zero at the run's end, and each site's weight is that of the simulation."""
    expected, record, result = simulated(lived(tmp_path, "defaults"))
    alone = expected.final[0]
    assert record["lambda"] == pytest.approx(alone["lambda"], abs=1e-10)
    assert record["lambda"] != pytest.approx([1 / 3] * 3, abs=1e-3)
    assert record["accuracy"]["sites"] == pytest.approx(alone["accuracy"]["sites"], abs=1e-10)
    for name, tensor in expected.state_dict(0, "last").items():
        assert torch.allclose(load_file(result / "model.safetensors")[name], tensor, rtol=0, atol=1e-6)
    assert all(read_status(tmp_path / name / "state")["weight"] > 0 for name in NAMES)


def test_nodes_choose_the_models_of_their_own_that_a_simulation_chooses(tmp_path):
    expected, _, result = simulated(lived(tmp_path, "personal"))
    assert "personal" not in json.loads((result / "summary.json").read_text())
    module = load_experiment(tmp_path / "experiment.toml").model.build(torch.Size([8, 8]), 10)
    for name, site in zip(NAMES, expected.personal[0].sites):
        found = json.loads((tmp_path / name / "state" / "personal" / "summary.json").read_text())
        assert (found["method"], found["name"], found["unseen"]) == ("mixture", name, True)
        assert found["rows"] == site.rows
        assert found["weights"] == pytest.approx(site.weights, abs=1e-4)
        for model in ("common", "local", "personal"):
            assert found["test"][model]["loss"] == pytest.approx(site.test[model]["loss"], abs=1e-4)
        own = PersonalModel.load(tmp_path / name / "state" / "personal" / "personal.safetensors", module)
        for one, state in site.state_dicts.items():
            for key, tensor in own.models[one].state_dict().items():
                assert torch.allclose(tensor, state[key], atol=1e-4), (name, one, key)


def test_killed_node_continues_with_its_optimizers_memory(tmp_path):
    expected, _, result = simulated(lived(tmp_path, "optimizer", killed))
    found = load_file(result / "model.safetensors")
    for name, tensor in expected.state_dict().items():
        assert torch.allclose(found[name].double(), tensor.double(), rtol=0, atol=1e-6), name  # stored as float32


def test_node_that_has_lost_its_state_begins_its_optimizers_memory_again(tmp_path):
    lived(tmp_path, "optimizer", restored)
    found = load_file(tmp_path / "c" / "state" / "result" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in found.values())


@pytest.mark.parametrize("policy", ["local", "shared"])
def test_nodes_train_their_own_parts_as_a_simulation_does(policy, tmp_path):
    expected, record, result = simulated(lived(tmp_path, policy))
    assert record["accuracy"]["sites"] == pytest.approx(expected.final[0]["accuracy"]["sites"], abs=1e-6)
    common, start = load_file(result / "model.safetensors"), expected.problem.initial_model(0).state_dict()
    assert torch.equal(common["4.bias"], start["4.bias"])  # it never left its site
    statistics = expected.state_dict() if policy == "shared" else start
    assert torch.allclose(common["2.running_var"], statistics["2.running_var"], atol=1e-4)
    for i, name in enumerate(NAMES):
        own = fm.inference.load_model(tmp_path / name, site=name).module.state_dict()
        wanted = expected.state_dict(site=str(expected.problem.sites[i].name))
        for key, tensor in own.items():
            assert torch.allclose(tensor.double(), wanted[key].double(), atol=1e-4), (name, key)


def _tensors(folder: Path, name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the common model and that of a site."""
    state = folder / name / "state"
    return load_file(state / "result" / "model.safetensors"), load_file(state / "personal" / "site.safetensors")


@pytest.mark.parametrize("policy", ["local", "shared"])
def test_site_that_has_lost_its_state_begins_its_local_part_again_and_says_so(policy, tmp_path):
    lived(tmp_path, policy, restored)
    events = [json.loads(line) for line in (tmp_path / "c" / "state" / "log.jsonl").read_text().splitlines()]
    (found,) = [event for event in events if "restored from its neighbours" in event["what"]]
    assert found["round"] == 6
    assert "start again" in found["local_parts"]
    common, own = _tensors(tmp_path, "c")
    assert all(torch.isfinite(tensor).all() for tensor in (*common.values(), *own.values()))
    moved = {name: (_tensors(tmp_path, name)[1]["4.bias"] - common["4.bias"]).abs().max() for name in NAMES}
    assert 0 < moved["c"] < 0.75 * min(moved["a"], moved["b"])  # 6 of 12 steps


@pytest.mark.parametrize("policy", ["local", "shared"])
def test_sites_that_remain_keep_their_local_parts(policy, tmp_path):
    lived(tmp_path, policy, left)
    for name in ("a", "b"):
        common, own = _tensors(tmp_path, name)
        assert (own["4.bias"] - common["4.bias"]).abs().max() > 0.1  # 12 steps of about 0.02
    assert not (tmp_path / "c" / "state" / "personal").exists()
