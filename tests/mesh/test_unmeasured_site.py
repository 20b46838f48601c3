"""A site without test data takes part in a run between organisations, and is not measured."""

import json

import pytest

from tests.mesh.experiments import experiment
from tests.mesh.scenarios import Run

NAMES = ["a", "b", "c"]
EXPERIMENT = experiment(
    8,
    algorithm={"name": "ad-gda", "primal_step": 0.1, "consensus_step": 0.5},
    data={"name": "import", "path": "few.py:sites"},
    model="logistic",
    metrics=["auroc"],
    options={"measure_every": 4},
)
FEW = """
import torch
import fairmesh as fm

def drawn(seed):
    labels = torch.arange(30) % 2
    return torch.randn(30, 3, generator=torch.Generator().manual_seed(seed)) + labels[:, None], labels

def sites():
    return [fm.Site(drawn(k), test=drawn(k + 100) if k != 1 else None, name=f"s{k}") for k in range(3)]
"""


@pytest.mark.slow
def test_site_without_test_data_is_trained_and_not_measured(tmp_path):
    (tmp_path / "few.py").write_text(FEW)
    with Run(tmp_path, NAMES, EXPERIMENT) as run:
        run.live()
    results = [tmp_path / name / "state" / "result" for name in NAMES]
    summaries = [json.loads((result / "summary.json").read_text()) for result in results]
    assert all(one == summaries[0] for one in summaries)
    (final,) = summaries[0]["final"]
    assert summaries[0]["judged_on"] == "test"
    for metric in ("accuracy", "auroc", "loss"):
        assert final[metric]["sites"][1] is None
        assert final[metric]["worst"] is not None
    assert final["lambda"][1] > 0
    assert summaries[0]["support"] == [{}, None, {}]
