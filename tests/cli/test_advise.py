"""`fairmesh advise`: recommended settings, and predictions that hold."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fairmesh as fm
from fairmesh.advice import Advice
from fairmesh.cli.main import app
from tests.refusals import refused

FILE = """
rounds = 30
data = { name = "digits", nodes = 4, odd = 1 }
algorithm = { name = "ad-gda", primal_step = 50.0 }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("advice")
    (path / "mine.toml").write_text(FILE)
    return path


def advised(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["advise", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def advice(folder) -> dict:
    return json.loads(advised(str(folder / "mine.toml"), "--json", "--write", str(folder / "better.toml")))


def test_every_setting_has_a_value_and_a_reason(advice):
    found = {one["setting"]: one for one in advice["recommended"]}
    assert set(found) == {"algorithm", "compressor", "consensus_step", "rounds"}
    assert all(one["value"] and one["reason"] for one in found.values())
    assert "ad-gda" in found["algorithm"]["reason"]
    assert advice["facts"]["sites"] == 4


def test_written_file_runs_with_the_recommended_settings(advice, folder):
    written = fm.load_experiment(folder / "better.toml")
    assert written.algorithm == fm.TrackedADGDA()
    assert written.rounds == advice["settings"]["rounds"] == 600
    assert written.data == fm.data.Digits(nodes=4, odd=1)
    comments = [line for line in (folder / "better.toml").read_text().splitlines() if line.startswith("#")]
    assert "mine.toml" in comments[0]
    assert "default" in " ".join(comments)


def test_predicted_bytes_are_those_of_a_run(advice):
    experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), rounds=20, options=fm.Options(compare_weights=False))
    sent = fm.run(experiment).final[0]["bytes_busiest_node"] / 20
    assert advice["predicted"]["bytes_per_round"] == pytest.approx(sent, rel=0.05)
    assert advice["predicted"]["bytes_in_all"] == pytest.approx(600 * sent, rel=0.05)


def test_nothing_is_overwritten_or_written_elsewhere(folder, tmp_path):
    for place in (folder / "mine.toml", tmp_path / "other.toml"):
        done = CliRunner().invoke(app, ["advise", str(folder / "mine.toml"), "--write", str(place)])
        assert done.exception is not None
        with refused(str(place)):
            raise done.exception
    assert (folder / "mine.toml").read_text() == FILE


@pytest.fixture(scope="module")
def sparse() -> Advice:
    return fm.advise(fm.Experiment(fm.data.Digits(nodes=40, odd=4)))


def test_slow_graphs_get_more_bits_and_more_rounds(sparse):
    assert sparse.experiment.algorithm.compressor == fm.compressors.Quantize(bits=4, block=256)
    assert sparse.experiment.rounds > 600
    assert sparse.experiment.objective == fm.Experiment(fm.data.Digits(nodes=40, odd=4)).objective
    assert any("mixes slowly" in hint for hint in sparse.hints)


def test_file_without_an_algorithm_names_none(sparse, advice):
    (said,) = (one.reason for one in sparse.recommended if one.setting == "algorithm")
    assert "the experiment names" not in said
    (said,) = (one["reason"] for one in advice["recommended"] if one["setting"] == "algorithm")
    assert "the experiment names ad-gda" in said


def test_few_rows_that_judge_a_site_are_named(sparse, advice):
    assert any("12 held-out rows" in hint for hint in sparse.hints)
    assert not any("held-out rows" in hint for hint in advice["hints"])


def test_one_site_has_nobody_to_train_with():
    with refused("one site"):
        fm.advise(fm.Experiment(fm.data.Digits(nodes=1, odd=0)))


@pytest.mark.slow
def test_predicted_time_and_memory_are_near_those_of_a_run():
    import time

    experiment = fm.Experiment(fm.data.Digits(nodes=10, odd=2), rounds=600)
    predicted = fm.advise(experiment).predicted
    begun = time.perf_counter()
    fm.run(experiment)
    assert predicted.seconds / 3 < time.perf_counter() - begun < 3 * predicted.seconds
