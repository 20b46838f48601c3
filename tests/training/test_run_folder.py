"""What a run leaves in its folder is what it returned, in plain files."""

import json
import tomllib

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.storage.run_folder import read_records, read_summary
from tests.toys import problem, small_model

ALGORITHM = fm.ADGDA(primal_step=2.0, dual_step=0.1, consensus_step=0.4, compressor=fm.compressors.Quantize(bits=4))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "new" / "run"
    return folder, fm.train(problem(4), fm.Ring(), ALGORITHM, 6, measure_every=2, seeds=(0, 3), out=folder)


def test_metrics_holds_one_line_of_json_per_record(run):
    folder, result = run
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == result.records == read_records(folder)
    assert [(record["round"], record["seed"]) for record in result.records] == [
        (t, seed) for t in (0, 2, 4, 6) for seed in (0, 3)
    ]


def test_summary_holds_the_means_over_replicas_and_the_final_records(run):
    folder, result = run
    summary = read_summary(folder)
    for name in ("worst", "mean", "best", "gap", "worst_group"):
        a, b = result.values(name)
        assert summary[name] == pytest.approx((a + b) / 2)
        assert summary[f"{name}_std"] == pytest.approx(abs(a - b) / 2**0.5)
    assert summary["final"] == result.final
    assert summary["algorithm"] == "ad-gda"
    assert (summary["metric"], summary["judged_on"]) == ("accuracy", "test")
    assert (summary["rounds"], summary["replicas"], summary["nodes"], summary["diverged"]) == (6, 2, 4, [])
    assert summary["parameters"] == result.problem.flat_model.dim == 53
    assert summary["nominal_bits_busiest"] == result.final[0]["nominal_bits_busiest"]
    assert summary["sites"] == [f"node {i}" for i in range(4)]
    assert summary["groups"] == ["even", "odd", "even", "odd"]


def test_models_load_into_the_users_module(run):
    folder, result = run
    for replica, name in enumerate(("model", "model-1")):
        stored = load_file(folder / f"{name}.safetensors")
        small_model().load_state_dict(stored, strict=True)
        assert all(torch.equal(stored[key], tensor) for key, tensor in result.state_dict(replica).items())
    average = load_file(folder / "model-time-average.safetensors")
    assert all(torch.equal(average[key], t) for key, t in result.state_dict(0, "time-average").items())
    assert not torch.equal(average["0.weight"], load_file(folder / "model.safetensors")["0.weight"])


def test_settings_are_toml_that_says_what_was_run(run):
    table = tomllib.loads((run[0] / "experiment.toml").read_text())
    assert table["rounds"] == 6
    assert table["topology"]["name"] == "ring"
    assert table["algorithm"]["name"] == "ad-gda"
    assert table["algorithm"]["compressor"] == {
        "name": "quantize",
        "bits": 4,
        "rounding": "floor",
        "norms": "float32",
    }


def test_partial_files_are_never_left_behind(run):
    assert not list(run[0].glob("*.partial"))
