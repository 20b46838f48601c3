"""Models read from a run's folder: which one, what is refused, and with which words."""

import json
import shutil

import pytest
import torch

import fairmesh as fm
from tests.refusals import refused
from tests.toys import problem

DIGITS = fm.data.Digits(nodes=3, odd=1, validation_share=0.1)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits") / "run"
    experiment = fm.Experiment(
        DIGITS, fm.Ring(), fm.TrackedADGDA(), rounds=6, options=fm.Options(measure_every=2, keep_best=True),
        personalization=fm.personalization.Mixture(steps=5, local_steps=5),
    )  # fmt: skip
    return fm.run(experiment, out=folder), folder


@pytest.mark.parametrize("which", ["final", "best", "time-average"])
def test_loaded_model_is_that_of_the_result(digits, which):
    result, folder = digits
    images = result.problem.sites[0].test.inputs[:5]
    loaded, made = fm.inference.load_model(folder, which), fm.inference.TrainedModel.of(result, which)
    assert torch.equal(loaded.predictor(images), made.predictor(images))
    assert loaded.about == made.about
    assert loaded.about["which"] == which


def test_own_model_of_a_site_is_loaded_by_its_name(digits):
    result, folder = digits
    name = result.problem.sites[2].name
    images = result.problem.sites[2].test.inputs[:5]
    loaded, made = fm.inference.load_model(folder, site=name), fm.inference.TrainedModel.of(result, site=name)
    assert torch.allclose(loaded.predictor(images), made.predictor(images), atol=1e-6)
    with refused("nowhere", name[:4]):
        fm.inference.load_model(folder, site="nowhere")


def test_model_that_was_not_kept_or_does_not_exist_is_refused(digits, tmp_path):
    _, folder = digits
    with refused("middle", "final"):
        fm.inference.load_model(folder, "middle")
    with refused("replica", 3):
        fm.inference.load_model(folder, replica=3)
    with refused("no folder"):
        fm.inference.load_model(tmp_path / "nothing")
    with refused("not the folder of a run"):
        fm.inference.load_model(tmp_path)


def test_run_that_has_not_finished_is_refused_with_its_round(digits, tmp_path):
    shutil.copytree(digits[1], tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with refused("round 6", "--resume"):
        fm.inference.load_model(tmp_path / "run")
    shutil.copytree(digits[1], tmp_path / "node" / "progress")
    with refused("not finished"):
        fm.inference.load_model(tmp_path / "node")


def test_diverged_replica_is_refused(digits, tmp_path):
    shutil.copytree(digits[1], tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary | {"diverged": [0]}))
    with refused("diverged", "replica 0"):
        fm.inference.load_model(tmp_path / "run")


def test_model_from_python_is_refused_with_the_function_to_use(tmp_path):
    fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), 2, out=tmp_path / "run")
    with refused("Python", "fm.export"):
        fm.inference.load_model(tmp_path / "run")


def test_sweep_without_validation_data_asks_for_a_replica(tmp_path):
    experiment = fm.Experiment(
        fm.data.Digits(nodes=3), fm.Ring(), fm.TrackedADGDA(), rounds=2, sweep={"primal_step.start": (0.1, 0.2)}
    )
    fm.run(experiment, out=tmp_path / "run")
    with refused("sweep", "--replica", "primal_step.start = 0.2"):
        fm.inference.load_model(tmp_path / "run")
    assert fm.inference.load_model(tmp_path / "run", replica=1).about["replica"] == 1


def test_weights_of_another_architecture_are_refused(digits):
    _, folder = digits
    layers = [torch.nn.Flatten(), torch.nn.Linear(64, 10)]
    assert fm.inference.load_weights(folder / "model.safetensors", torch.nn.Sequential(*layers))["round"] == 6
    with refused("architecture"):
        fm.inference.load_weights(folder / "model.safetensors", torch.nn.Sequential(*layers, torch.nn.Tanh()))
