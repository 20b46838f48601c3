"""What the examples show works as shown."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fairmesh as fm
from tests.pairwise import case

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted((ROOT / "examples").rglob("*.toml"))
SLOW = {"lora", "notes", "resnet", "streamed", "text", "unet"}  # to trace; tests/mesh/test_real_models.py runs them too


def test_examples_are_at_least_three_files_and_two_scripts():
    assert len(EXPERIMENTS) >= 3
    assert len(list((ROOT / "examples").glob("*.py"))) >= 2


@pytest.mark.parametrize("path", [case(path, id=path.stem, quick=path.stem not in SLOW) for path in EXPERIMENTS])
@pytest.mark.quick_cases(2)
def test_example_file_runs(path, tmp_path):
    result = fm.run(
        fm.load_experiment(path, ["rounds=6", "options.measure_every=3", "seeds=[0]"]), out=tmp_path / "run"
    )
    assert result.final[0]["round"] == 6


def test_experiment_file_means_what_the_same_python_means():
    from_file = fm.load_experiment(ROOT / "examples" / "scanners.toml")
    in_python = fm.Experiment(
        data=fm.data.Digits(split="instrument", nodes=10, odd=2),
        model=fm.models.Logistic(),
        topology=fm.Ring(),
        sampling=fm.Sampling(batch=32),
        algorithm=fm.ADGDA(
            primal_step=fm.schedules.Geometric(5.0, 0.998),
            dual_step=0.05,
            consensus_step=0.5,
            compressor=fm.compressors.Quantize(bits=4),
            regularizer=fm.ChiSquare(0.001),
        ),
        rounds=300,
        seeds=(0, 1, 2),
        options=fm.Options(measure_every=20),
    )
    assert from_file == in_python


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hospitals.py", "rivals.py"])
def test_example_script_runs_in_seconds(name):
    done = subprocess.run([sys.executable, ROOT / "examples" / name], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "worst" in done.stdout


@pytest.mark.slow
def test_baselines_are_all_trained(capsys):
    runpy.run_path(str(ROOT / "examples" / "baselines.py"))["main"](rounds=2, splits=1)
    assert len(capsys.readouterr().out.splitlines()) == 12


@pytest.mark.slow
def test_example_of_streamed_images_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "streamed_images.py"))["main"](rounds=2)
    assert "streamed" in capsys.readouterr().out
