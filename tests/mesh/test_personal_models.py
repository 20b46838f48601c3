"""Nodes choose models of their own as a simulation does, each from its own data."""

import json
import sys
from pathlib import Path

import pytest
import torch

import fairmesh as fm
from fairmesh.experiment import load_experiment
from fairmesh.personalization import PersonalModel
from tests.mesh import fleet
from tests.mesh.experiments import AD_GDA, experiment
from tests.mesh.scenarios import Run, played

NAMES = ["a", "b", "c"]
EXPERIMENT = experiment(
    15,
    algorithm=AD_GDA | {"consensus_step": 0.4},
    personalization={"name": "mixture", "steps": 15, "local_steps": 15},
    options={"dtype": "float64"},
)


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    folder = tmp_path_factory.mktemp("personal")
    played("tests.mesh.test_personal_models", str(folder), seconds=200)
    experiment = load_experiment(folder / "experiment.toml")
    return folder, fm.run(experiment, process_group=fleet.KnowingSecrets(NAMES))


@pytest.mark.slow
def test_nodes_choose_what_a_simulation_chooses(lived):
    folder, simulated = lived
    module = load_experiment(folder / "experiment.toml").model.build(torch.Size([8, 8]), 10)
    for name, expected in zip(NAMES, simulated.personal[0].sites):
        found = json.loads((folder / name / "state" / "personal" / "summary.json").read_text())
        assert (found["method"], found["name"], found["unseen"]) == ("mixture", name, True)
        assert found["rows"] == expected.rows
        assert found["weights"] == pytest.approx(expected.weights, abs=1e-4)
        for model in ("common", "local", "personal"):
            assert found["test"][model]["loss"] == pytest.approx(expected.test[model]["loss"], abs=1e-4)
        own = PersonalModel.load(folder / name / "state" / "personal" / "personal.safetensors", module)
        for one, state in expected.state_dicts.items():
            for key, tensor in own.models[one].state_dict().items():
                assert torch.allclose(tensor, state[key], atol=1e-4), (name, one, key)


@pytest.mark.slow
def test_result_stays_the_same_at_every_site(lived):
    folder, simulated = lived
    results = [folder / name / "state" / "result" for name in NAMES]
    for file in ("model.safetensors", "summary.json", "metrics.jsonl", "experiment.toml"):
        assert len({(result / file).read_bytes() for result in results}) == 1, file
    assert "personal" not in json.loads((results[0] / "summary.json").read_text())
    record = json.loads((results[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["bytes_total"] == simulated.final[0]["bytes_total"]  # the own models cost no message


if __name__ == "__main__":
    Run(Path(sys.argv[1]), NAMES, EXPERIMENT).live()
