"""What a run without an algorithm uses, and what it says about its weights."""

import json
from types import SimpleNamespace

import pytest
import torch

import fairmesh as fm
from fairmesh.comparisons.weights import verdict_of
from fairmesh.evidence.outcomes import Answers, Outcomes
from fairmesh.training.defaults import DEFAULT_ALGORITHM, default_objective
from tests import toys
from tests.refusals import missing_from, refused


def result_of(*rows: list[float], weights=(0.2, 0.8), metric="accuracy", samples=1000):
    """Returns a result of sites a and b with these shares of right answers, or with these losses, one row per seed. The
    first rows are right, so that two models differ at as few rows as they can."""
    tensor, numbers = torch.tensor(rows, dtype=torch.float64), torch.arange(samples)
    right = (numbers < (samples * tensor[..., None]).round()).to(torch.uint8)
    losses = tensor[..., None] * (1 + 0.1 * torch.sin(numbers))
    answers = tuple(Answers(f"rows of {i}", losses[:, i].float(), right[:, i]) for i in range(2))
    outcomes = Outcomes(("a", "b"), metric, metric == "accuracy", answers, ((0, 1),))
    problem = SimpleNamespace(primary=metric, prior_of_sites=torch.tensor([0.5, 0.5]))
    return SimpleNamespace(problem=problem, final=[{"lambda": list(weights)}], outcomes=lambda: outcomes)


def test_verdict_tells_help_from_harm_by_the_intervals():
    fixed, robust = result_of([0.90, 0.50], [0.90, 0.52]), result_of([0.80, 0.60], [0.80, 0.62])
    verdict = verdict_of(robust, fixed)
    assert [site.outcome for site in verdict.sites] == ["hurt", "helped"]
    assert all(low < site.robust - site.fixed < high for site in verdict.sites for low, high in [site.interval])
    assert [site.weight for site in verdict.sites] == [0.2, 0.8]
    assert verdict.heaviest == verdict.worst == "b"
    near = verdict_of(result_of([0.90, 0.502]), result_of([0.90, 0.50]))
    assert [site.outcome for site in near.sites] == ["no difference", "no difference"]


def test_verdict_knows_that_a_smaller_loss_is_better():
    verdict = verdict_of(result_of([1.5, 1.0], metric="loss"), result_of([1.0, 2.0], metric="loss"))
    assert verdict.worst == "a"
    assert [site.outcome for site in verdict.sites] == ["hurt", "helped"]


def test_verdict_warns_when_the_heaviest_site_is_not_the_worst():
    verdict = verdict_of(result_of([0.9, 0.5], weights=(0.9, 0.1)), result_of([0.9, 0.5]))
    assert (verdict.heaviest, verdict.worst) == ("a", "b")
    assert missing_from(verdict.warning, "a", "b", 1.8, 0.5, 0.9) == []
    assert str(verdict).endswith(verdict.warning)


@pytest.mark.parametrize(
    ("accuracies", "weights", "samples"),
    [([0.5, 0.9], (0.9, 0.1), 1000), ([0.9, 0.5], (0.6, 0.4), 1000), ([0.62, 0.58], (0.9, 0.1), 100)],
    ids=["it is the worst", "its weight is little raised", "chance explains it"],
)
def test_verdict_does_not_warn_without_reason(accuracies, weights, samples):
    fixed = result_of([0.9, 0.5], samples=samples)
    assert verdict_of(result_of(accuracies, weights=weights, samples=samples), fixed).warning is None


@pytest.mark.slow
def test_train_warns_of_weights_that_went_to_another_site_than_the_worst(monkeypatch):
    monkeypatch.setattr("fairmesh.comparisons.weights._RAISED", 0.0)
    monkeypatch.setattr("fairmesh.comparisons.weights.difference_of", lambda *parts: SimpleNamespace(verdict="better"))
    with pytest.warns(UserWarning, match="node"):
        fm.train(toys.problem(), rounds=3, choose_weights=False)
    fm.train(toys.problem(), rounds=3, choose_weights=False, announce=lambda text: None)


def test_train_without_an_algorithm_uses_the_default_and_compares_it_with_fixed_weights(tmp_path):
    result = fm.train(toys.problem(), rounds=12, out=tmp_path, choose_weights=False)
    assert result.replicas[0].algorithm.regularizer == DEFAULT_ALGORITHM.regularizer
    assert result.problem.objective.judged_on == default_objective().judged_on == "held-out"
    assert result.fixed is not None
    assert result.fixed.weights() is None
    assert len(result.weights_verdict().sites) == 8
    written = json.loads((tmp_path / "summary.json").read_text())["weights"]
    assert written["worst"] == result.weights_verdict().worst


def test_experiment_without_an_algorithm_is_the_one_that_train_uses(tmp_path):
    experiment = fm.Experiment(fm.data.Digits(nodes=4), rounds=5)
    assert experiment.algorithm == DEFAULT_ALGORITHM
    assert experiment.objective == default_objective()
    assert experiment.options.compare_weights
    named = fm.Experiment(fm.data.Digits(nodes=4), algorithm=fm.TrackedADGDA(), rounds=5)
    assert named.objective == fm.Objective()
    assert not named.options.compare_weights


def test_compare_weights_needs_an_algorithm_that_has_weights():
    with refused("compare_weights"):
        fm.train(toys.problem(), fm.Ring(), fm.algorithms.DSGD(), 5, compare_weights=True)
    with refused("compare_weights"):
        fm.train(toys.problem(), fm.Ring(), fm.ADGDA(), 5).weights_verdict()


@pytest.mark.parametrize("name", ["ad-gda", "tracked", "drfa", "afl", "q-ffl", "term"])
@pytest.mark.quick_cases(2)
def test_fixed_weights_of_an_algorithm_stay_at_the_prior(name):
    problem = toys.problem()
    fixed = toys.ALGORITHMS[name].with_fixed_weights()
    weights = fm.train(problem, fm.Ring(), fixed, 8).weights()
    if weights is not None:
        torch.testing.assert_close(weights[0].double(), problem.prior_of_sites, rtol=0, atol=1e-6)


def test_default_algorithm_is_compared_with_fixed_weights_unless_the_file_says_no():
    data = fm.data.Digits(nodes=3)
    assert fm.Experiment(data).options.compare_weights is True
    assert fm.Experiment(data, options=fm.Options(compare_weights=False)).options.compare_weights is False
    assert not fm.Experiment(data, algorithm=fm.TrackedADGDA()).options.compare_weights
