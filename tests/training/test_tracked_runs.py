"""Runs of Tracked AD-GDA as a user sees them: their ends, weights, worst cases, files and folders."""

import json

import pytest
from typer.testing import CliRunner

import fairmesh as fm
from fairmesh.cli.main import app
from fairmesh.experiment import load_experiment
from tests import toys
from tests.contracts.battery import same_bits, state_bits
from tests.refusals import refused

PRICED = fm.TrackedADGDA(0.2, compressor=fm.compressors.Quantize(6))


@pytest.fixture(scope="module")
def problem() -> fm.Problem:
    return toys.problem()


def test_steps_without_an_end_of_their_own_end_with_the_run(problem):
    open_ended, ending = (
        fm.TrackedADGDA(
            fm.schedules.Linear(0.3, rounds),
            compressor=fm.compressors.Quantize(6),
            weighting=fm.weighting.ShadowPrice(strength_annealing=fm.schedules.Polynomial(3.0, rounds)),
        )
        for rounds in (None, 30)
    )
    one, other = (fm.train(problem, fm.Ring(), algorithm, 30, dtype="float64") for algorithm in (open_ended, ending))
    assert same_bits(state_bits(one.state), state_bits(other.state))
    longer = fm.train(problem, fm.Ring(), open_ended, 31, dtype="float64")
    assert float((longer.row() - one.row()).abs().max()) > 1e-4
    assert one.replicas[0].algorithm == ending


def test_run_whose_steps_end_with_it_is_not_extended_and_says_which_steps(problem, tmp_path):
    algorithm = fm.TrackedADGDA(fm.schedules.Linear(0.3))
    fm.train(problem, fm.Ring(), algorithm, 6, out=tmp_path)
    with refused("primal_step.rounds", "12 here", "6 there", error=fm.errors.CheckpointError):
        fm.train(problem, fm.Ring(), algorithm, 12, out=tmp_path, resume=True)
    again = fm.train(problem, fm.Ring(), algorithm, 6, out=tmp_path, resume=True)
    assert again.final[0]["round"] == 6


@pytest.mark.parametrize("placement", [tuple(range(8)), (3, 0, 7, 5, 1, 6, 2, 4)])
def test_lambda_is_recorded_as_each_nodes_own_weight(problem, placement):
    result = fm.train(problem, fm.Ring(), PRICED, 20, placements=[placement], dtype="float64", measure_every=10)
    assert [sum(record["lambda"]) for record in result.records] == pytest.approx([1.0] * 3)
    assert result.records[0]["lambda"] == pytest.approx(problem.prior_of_sites[list(range(8))].tolist(), rel=0.2)
    weights = result.weights()
    own = result.state.algorithm.weighting.weights[0, :, 0]
    assert weights[0].tolist() == pytest.approx((own / own.sum()).tolist())
    assert [result.final[0]["lambda"][site] for site in placement] == pytest.approx(weights[0].tolist())
    assert "consensus_duals" not in result.final[0]
    assert result.weights("time-average") is None


def test_weights_are_not_recorded_by_algorithms_without_them(problem):
    result = fm.train(problem, fm.Ring(), fm.TrackedADGDA(0.2, weighting=fm.weighting.PriorWeights()), 3)
    assert "lambda" not in result.final[0]
    assert result.weights() is None


@pytest.mark.slow
def test_tracked_runs_and_reports_from_a_file(tmp_path):
    text = """
rounds = 12
data = { name = "digits", nodes = 4 }
topology = "ring"
algorithm = "tracked-ad-gda"
[options]
measure_every = 6
"""
    (tmp_path / "experiment.toml").write_text(text)
    assert load_experiment(tmp_path / "experiment.toml").algorithm == fm.TrackedADGDA()
    run = CliRunner().invoke(app, ["run", str(tmp_path / "experiment.toml"), "--out", str(tmp_path / "run")])
    assert run.exit_code == 0, run.output
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(records[-1]["lambda"]) == pytest.approx(1)
    assert {"accuracy", "bytes_total"} <= records[-1].keys()
    report = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert report.exit_code == 0, report.output
    written = load_experiment(tmp_path / "run" / "experiment.toml")
    assert written.algorithm == fm.TrackedADGDA()  # its steps end with whatever run it is read for


def worst_on_digits(rounds: int, **settings) -> float:
    data = fm.data.Digits(nodes=10, split="class")
    return fm.run(fm.Experiment(data, fm.Ring(), fm.TrackedADGDA(**settings), rounds=rounds)).worst


@pytest.mark.slow
def test_local_steps_with_defaults_reach_more_in_as_many_rounds():
    assert worst_on_digits(40, local_steps=5) > worst_on_digits(40) + 0.05


@pytest.mark.slow
def test_local_steps_that_watch_their_drift_do_more_than_whole_ones_on_sites_that_differ():
    watched, whole = (worst_on_digits(75, local_steps=20, max_drift=drift) for drift in (None, 0.0))
    assert watched > whole + 0.03
