"""A mesh whose experiment sets no field of Tracked AD-GDA runs to its end with the defaults."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.experiment import load_experiment
from fairmesh.mesh.node.watching import read_status
from tests.mesh import fleet
from tests.mesh.experiments import experiment
from tests.mesh.scenarios import Run, played

NAMES = ["a", "b", "c"]
EXPERIMENT = experiment(
    40, algorithm="tracked-ad-gda", options={"measure_every": 20, "checkpoint_every": 15, "dtype": "float64"}
)


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked")
    played("tests.mesh.test_tracked_nodes", str(folder))
    return folder


@pytest.mark.slow
def test_sites_end_where_the_simulator_ends(lived):
    """Its steps reach zero at the run's end, and each site's weight is that of the simulation."""
    expected = fm.run(load_experiment(lived / "experiment.toml"), process_group=fleet.KnowingSecrets(NAMES))
    results = [lived / name / "state" / "result" for name in NAMES]
    record, alone = json.loads((results[0] / "metrics.jsonl").read_text().splitlines()[-1]), expected.final[0]
    assert record["bytes_total"] == alone["bytes_total"]
    assert record["lambda"] == pytest.approx(alone["lambda"], abs=1e-10)
    assert record["lambda"] != pytest.approx([1 / 3] * 3, abs=1e-3)
    assert record["accuracy"]["sites"] == pytest.approx(alone["accuracy"]["sites"], abs=1e-10)
    for name, tensor in expected.state_dict(0, "last").items():
        assert torch.allclose(load_file(results[0] / "model.safetensors")[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_site_s_status_tells_its_weight(lived):
    weights = [read_status(lived / name / "state")["weight"] for name in NAMES]
    assert all(weight > 0 for weight in weights)


if __name__ == "__main__":
    Run(Path(sys.argv[1]), NAMES, EXPERIMENT).live()
