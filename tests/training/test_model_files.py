"""The model files of a run: which replica and which algorithm of a sweep they hold, and what they say themselves."""

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.problems.flat_model import architecture_of
from fairmesh.report.runs import models_in_words
from fairmesh.storage.run_folder import read_model, read_summary
from tests.toys import problem, sites

STEPS = (1e-6, 0.5)  # the first one learns nothing


def swept(folder, validation, **options):
    given = [fm.Site(s.train, test=s.test, validation=s.test if validation else None) for s in sites(3)]
    algorithms = [fm.algorithms.DSGD(primal_step=step) for step in STEPS]
    made = problem(3, sites=given)
    return fm.train(made, fm.Ring(), algorithms, 8, seeds=(0, 1), out=folder, measure_every=4, **options)


@pytest.mark.parametrize("options", [{}, {"keep_best": True}, {"best_by": "mean"}])
def test_sweep_with_validation_data_gives_the_best_algorithms_model(tmp_path, options):
    result = swept(tmp_path, True, **options)
    assert result.chosen == 2
    for name, which in (("model", "final"), ("model-best", "best")):
        path = tmp_path / f"{name}.safetensors"
        assert path.exists() == (which == "final" or "keep_best" in options)
        if path.exists():
            for key, tensor in result.state_dict(2, which).items():
                assert torch.equal(load_file(path)[key], tensor)
    summary = read_summary(tmp_path)
    (entry,) = (one for one in summary["models"] if one["file"] == "model.safetensors")
    assert (entry["replica"], entry["variant"], summary["chosen"]) == (2, {"primal_step.value": 0.5}, 2)
    assert {f"model-{r}.safetensors" for r in range(4)} <= {path.name for path in tmp_path.iterdir()}
    assert "0.5" in models_in_words(summary)


def test_sweep_without_validation_data_gives_no_model_that_looks_chosen(tmp_path):
    result = swept(tmp_path, False)
    assert result.chosen is None
    names = {path.name for path in tmp_path.glob("model*")}
    assert names == {f"model{which}-{r}.safetensors" for which in ("", "-time-average") for r in range(4)}
    summary = read_summary(tmp_path)
    assert {entry["file"] for entry in summary["models"]} == names
    steps = [entry["variant"]["primal_step.value"] for entry in summary["models"] if entry["which"] == "final"]
    assert steps == [1e-6, 1e-6, 0.5, 0.5]
    assert "validation" in models_in_words(summary)


def test_diverged_algorithm_is_not_chosen(tmp_path):
    given = [fm.Site(s.train, test=s.test, validation=s.test) for s in sites(3)]
    algorithms = [fm.algorithms.DSGD(primal_step=step) for step in (1e30, 0.1)]
    made = problem(3, sites=given)
    result = fm.train(made, fm.Ring(), algorithms, 8, measure_every=4, on_divergence="mark", keep_best=True)
    assert (result.diverged, result.chosen) == ([0], 1)


def test_run_with_several_seeds_keeps_its_file_names(tmp_path):
    fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), 2, seeds=(4, 5), out=tmp_path)
    models = read_summary(tmp_path)["models"]
    assert [(e["file"], e["seed"]) for e in models if e["which"] == "final"] == [
        ("model.safetensors", 4),
        ("model-1.safetensors", 5),
    ]
    assert models_in_words(read_summary(tmp_path)) == ""


def test_model_file_has_a_fingerprint_of_the_architecture(tmp_path):
    result = fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), 2, out=tmp_path)
    _, about = read_model(tmp_path / "model.safetensors")
    assert (about["which"], about["round"]) == ("final", 2)
    assert about["architecture"] == architecture_of(result.problem.initial_model(0))
    linear, tanh = torch.nn.Linear(3, 3), torch.nn.Tanh()
    both = [architecture_of(torch.nn.Sequential(linear, layer)) for layer in (tanh, torch.nn.ReLU())]
    assert both[0] != both[1]
    torch.nn.init.zeros_(linear.weight)
    assert both[0] == architecture_of(torch.nn.Sequential(linear, tanh))
