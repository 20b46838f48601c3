"""Steps that a run measures before round 0: they fit the scale of the data, are recorded, and can be named."""

import json

import pytest
import torch

import fairmesh as fm
from fairmesh.algorithms.base import AtStart
from fairmesh.algorithms.schedules import Geometric, Linear, Polynomial, two_digits
from fairmesh.config.tables import from_table
from fairmesh.mesh.enrol.agreement import refuse_undeployable
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.training import measured_steps
from fairmesh.training.measured_steps import at_start
from fairmesh.training.plan import Plan
from tests.refusals import refused

A = fm.algorithms
ROWS, COLUMNS = (300, 60, 30), 20
RIVALS = {
    "AD-GDA": fm.ADGDA,
    "CHOCO-SGD": fm.ChocoSGD,
    "DSGD": A.DSGD,
    "DR-DSGD": A.DRDSGD,
    "AFL": A.AFL,
    "DRFA": A.DRFA,
    "FedAvg": A.FedAvg,
    "FedProx": A.FedProx,
    "q-FFL": A.QFFL,
    "TERM": A.TERM,
}
FORMER = {  # the steps of version 0.2, of which these diverge on the numbers below
    "AD-GDA": Linear(6.0),
    "CHOCO-SGD": Linear(0.6),
    "DSGD": Linear(0.6),
    "AFL": Geometric(0.1, 0.998),
    "FedAvg": Polynomial(0.7, power=3.0),
    "TERM": Polynomial(0.7, power=3.0),
}


def _problem(numbers: bool, scale: float = 1.0) -> fm.Problem:
    """Returns sites of unequal size whose columns are correlated, with standardised inputs and targets."""
    draw = torch.Generator().manual_seed(0)
    sites = []
    for count in ROWS:
        shared = torch.randn(2 * count, 1, generator=draw)
        x = 0.85**0.5 * shared + 0.15**0.5 * torch.randn(2 * count, COLUMNS, generator=draw)
        margin = 0.8 * shared + x[:, :1] - x[:, 1:2] + 0.3 * torch.randn(2 * count, 1, generator=draw)
        y = scale * margin if numbers else (margin[:, 0] > 0).long()
        sites.append(fm.Site((x[:count], y[:count]), test=(x[count:], y[count:])))
    outputs = 1 if numbers else 2
    return fm.Problem(lambda: fm.models.Logistic().build(torch.Size([COLUMNS]), outputs), sites)


def _trained(problem: fm.Problem, algorithm: fm.algorithms.Algorithm, rounds: int = 60, **options) -> fm.Result:
    usual = {"measure_every": rounds, "on_divergence": "mark"}
    return fm.train(problem, fm.Ring(), algorithm, rounds, **(usual | options))


@pytest.mark.parametrize("numbers", [True, False], ids=["numbers", "labels"])
@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.quick_cases("all")
def test_rival_with_its_defaults_is_better_than_a_constant_on_correlated_columns(name, numbers):
    algorithm = RIVALS[name]()
    result = _trained(_problem(numbers), algorithm, max(5, 40 // algorithm.oracle_calls()))
    first, last = (record["loss"]["mean"] for record in (result.records[0], result.final[0]))
    assert not result.diverged
    assert last < 0.9 * first  # the first model answers 0, the best constant


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:diverged|clearly worse")
@pytest.mark.parametrize("name", FORMER)
def test_rival_with_its_former_step_has_diverged(name):
    result = _trained(_problem(numbers=True), RIVALS[name](FORMER[name]), 150)
    assert result.diverged or result.above_constant


def test_curvature_is_the_largest_eigenvalue_of_the_loss():
    problem = _problem(numbers=True)
    plan = Plan.of(problem, fm.Ring(), A.DSGD(), 10, options={"dtype": "float64"})
    full = Plan.of(
        fm.Problem(problem.model, problem.sites, sampling=fm.Sampling(order="full")), fm.Ring(), A.DSGD(), 10
    )
    network = MemoryNetwork(full.cycle, dtype=torch.float32)
    _, _, found = at_start(full.training(network).oracle, network)[0].unbind(dim=-1)
    for site, curvature in zip(problem.sites, found):
        x = torch.cat([site.train[0], torch.ones(len(site.train[0]), 1)], dim=1).double()
        assert float(curvature) == pytest.approx(float(torch.linalg.matrix_norm(2 * x.T @ x / len(x), 2)), rel=0.02)
    assert plan.unmeasured == ("primal_step",)


def test_measured_step_falls_with_the_scale_of_the_loss_and_not_with_that_of_the_targets():
    usual, far = (_trained(_problem(True, scale), A.DSGD(), 2).measured["primal_step"]["start"] for scale in (1, 100))
    assert usual == far
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    start = AtStart(2, half, half, half, torch.tensor([4.0, 8.0]))
    assert A.DSGD().measured(start).primal_step.start == two_digits(A.DSGD().primal_step.factor / 8)


def test_temperature_is_measured_in_units_of_the_loss():
    losses = [_trained(_problem(True, scale), A.DRDSGD(), 2).measured["temperature"] for scale in (1.0, 10.0)]
    assert losses[1] == pytest.approx(100 * losses[0], rel=0.1)


@pytest.mark.parametrize("name", ["AD-GDA", "DR-DSGD", "FedAvg"])
def test_run_that_names_the_measured_numbers_is_the_same(name):
    problem = _problem(numbers=False)
    measured = _trained(problem, RIVALS[name](), 8)
    named = {
        key: from_table(fm.schedules.Schedule, value) if key == "primal_step" else value
        for key, value in measured.measured.items()
    }
    again = _trained(problem, RIVALS[name](**named), 8)
    assert torch.equal(again.row(), measured.row())
    assert not again.measured


def test_named_step_stays_what_it_is():
    for algorithm in (A.DSGD(0.1), fm.ADGDA(Linear(1.0)), A.FedAvg(0.7), A.FedAvg(fm.schedules.Limited(0.7, limit=1))):
        result = _trained(_problem(numbers=False), algorithm, 2)
        assert not result.measured
        named = algorithm.primal_step
        assert type(result.replicas[0].algorithm.primal_step) is (Linear if named == Linear(1.0) else type(named))


def test_summary_has_the_measured_numbers_and_a_resumed_run_measures_nothing(tmp_path, monkeypatch):
    problem = _problem(numbers=False)
    whole = _trained(problem, fm.ADGDA(), 6, out=tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "summary.json").read_text())["measured"] == whole.measured
    stop = pytest.raises(RuntimeError, match="enough")

    def enough(done, state):
        if done == 3:
            raise RuntimeError("enough")

    with stop:
        _trained(problem, fm.ADGDA(), 6, out=tmp_path / "part", observers=[enough], checkpoint_every=1)
    monkeypatch.setattr(measured_steps, "at_start", lambda *given: pytest.fail("measured again"))
    resumed = _trained(problem, fm.ADGDA(), 6, out=tmp_path / "part", resume=True)
    assert resumed.measured == whole.measured
    assert torch.equal(resumed.row(), whole.row())


def test_replicas_share_one_measured_step():
    result = _trained(_problem(numbers=False), A.DSGD(), 2, seeds=range(3))
    assert len({str(replica.algorithm) for replica in result.replicas}) == 1


def test_unscaled_local_steps_are_measured_too():
    result = _trained(_problem(numbers=True), A.FedAvg(beta1=0.0, beta2=0.0), 40)
    step = result.replicas[0].algorithm.primal_step
    assert step.start == step.limit < 0.1
    assert result.final[0]["loss"]["mean"] < result.records[0]["loss"]["mean"]


def test_mesh_refuses_an_algorithm_that_leaves_its_step_to_the_run():
    with refused("ad-gda", "primal_step", "start = 0.1", "fairmesh run"):
        refuse_undeployable(fm.Experiment(fm.data.Digits(), fm.Ring(), fm.ADGDA(), rounds=5))
    refuse_undeployable(fm.Experiment(fm.data.Digits(), fm.Ring(), fm.ADGDA(Linear(0.1)), rounds=5))


# Runs that end far above a constant answer.


def test_run_that_ends_far_above_a_constant_answer_has_diverged_and_keeps_its_numbers(tmp_path):
    with pytest.warns(UserWarning, match="diverged"):
        result = _trained(_problem(True), A.FedAvg(FORMER["FedAvg"]), 60, on_divergence="stop", out=tmp_path / "run")
    assert result.above_constant == [0]
    assert not result.diverged
    (note,) = result.notes
    assert all(words in note for words in ("diverged", "constant", "primal_step", "leave"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["above_constant"] == [0]
    assert "evidence" in summary


def test_model_that_is_too_sure_of_its_classes_has_not_diverged():
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(30, 40, generator=draw)
    labels = (inputs[:, :5].sum(dim=1) > 0).long()
    sites = [fm.Site((inputs[:15], labels[:15]), test=(inputs[15:], labels[15:])) for _ in range(3)]
    problem = fm.Problem(lambda: fm.models.Logistic().build(torch.Size([40]), 2), sites)
    result = _trained(problem, A.DSGD(20.0), 100)
    assert result.final[0]["loss"]["mean"] > 2 * result.records[0]["loss"]["mean"]
    assert result.final[0]["accuracy"]["mean"] > 0.55
    assert not result.above_constant
