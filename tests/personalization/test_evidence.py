"""Weights of models from held-out rows: by their definition, and the bound that makes a mixture safe."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

import fairmesh as fm
from fairmesh.personalization.evidence import log_evidence, mixed


def drawn(rows=40, classes=3, models=2, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    outputs = {f"model {k}": scale * torch.randn(rows, classes, generator=generator) for k in range(models)}
    return outputs, torch.randint(classes, (rows,), generator=generator)


def all_of(targets):
    return torch.ones(len(targets), dtype=torch.bool)


def predictions(outputs, targets) -> fm.personalization.Predictions:
    return fm.personalization.Predictions(outputs, targets, cross_entropy, labels=True)


def test_mixed_labels_have_the_weighted_probabilities_and_mixed_numbers_are_averaged():
    one, other = drawn()[0].values()
    found = mixed([one, other], [0.3, 0.7], probabilities=True)
    assert torch.allclose(found.exp(), 0.3 * one.softmax(-1) + 0.7 * other.softmax(-1), atol=1e-6)
    assert torch.allclose(found.logsumexp(-1), torch.zeros(40), atol=1e-5)
    assert torch.allclose(mixed([one, other], [0.25, 0.75], probabilities=False), 0.25 * one + 0.75 * other)


@pytest.mark.parametrize("labels", [True, False])
def test_mixed_ignores_a_model_without_weight(labels):
    good, broken = torch.randn(5, 2), torch.full((5, 2), math.nan)
    assert torch.equal(mixed([broken, good], [0.0, 1.0], labels), good)


def test_log_evidence_of_labels_is_the_log_likelihood_and_of_numbers_is_free_of_scale():
    assert log_evidence(torch.tensor(3.0), 10, labels=True) == -3.0
    gaps = [
        log_evidence(torch.tensor(2.0) * scale, 10, False) - log_evidence(torch.tensor(5.0) * scale, 10, False)
        for scale in (1.0, 1e6)
    ]
    assert gaps[0] == pytest.approx(5 * math.log(2.5))
    assert gaps[1] == pytest.approx(float(gaps[0]), rel=1e-5)


@pytest.mark.parametrize("labels", [True, False])
def test_log_evidence_of_a_broken_model_is_nothing(labels):
    found = log_evidence(torch.tensor([math.nan, math.inf, 1.0]), 10, labels)
    assert found[:2].tolist() == [-math.inf, -math.inf]
    assert math.isfinite(found[2])


def test_held_out_losses_are_those_of_the_mixture():
    outputs, targets = drawn()
    probabilities = 0.5 * sum(out.softmax(-1) for out in outputs.values())
    expected = -probabilities[torch.arange(40), targets].log().double()
    found = predictions(outputs, targets).losses({"model 0": 0.5, "model 1": 0.5})
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("models", [1, 2, 3, 4])
def test_mean_weights_sum_to_one_and_are_equal_without_rows(models):
    outputs, targets = drawn(models=models)
    held = predictions(outputs, targets)
    found = held.mean_weights(list(outputs), all_of(targets))
    assert sum(found.values()) == pytest.approx(1.0)
    assert min(found.values()) > 0
    without = held.mean_weights(list(outputs), torch.zeros(40, dtype=torch.bool))
    assert list(without.values()) == pytest.approx([1 / models] * models)


def test_mean_weights_of_two_models_are_the_mean_of_the_posterior_by_quadrature():
    outputs, targets = drawn(rows=15)
    found = predictions(outputs, targets).mean_weights(list(outputs), all_of(targets))
    one, other = (out.double().softmax(-1)[torch.arange(15), targets] for out in outputs.values())
    points = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    inside = (points[:, None] * one + (1 - points[:, None]) * other).prod(dim=1)
    total = 0.8 * inside.mean() + 0.1 * (other.prod() + one.prod())
    mean = (0.8 * (points * inside).mean() + 0.1 * one.prod()) / total
    assert found["model 0"] == pytest.approx(float(mean), abs=0.01)  # the grid has steps of 1/40


@pytest.mark.parametrize("labels", [True, False])
def test_mean_weights_approach_the_better_model_with_more_rows(labels):
    generator = torch.Generator().manual_seed(1)
    weights = []
    for rows in (5, 50, 500):
        if labels:
            targets = torch.randint(2, (rows,), generator=generator)
            good = torch.nn.functional.one_hot(targets, 2) * 1.5
            outputs, loss = {"good": good, "bad": torch.zeros(rows, 2)}, cross_entropy
        else:
            targets = torch.randn(rows, 1, generator=generator)
            noise = torch.randn(rows, 1, generator=generator)
            outputs, loss = {"good": targets + 0.1 * noise, "bad": torch.full((rows, 1), 3.0)}, mse_loss
        held = fm.personalization.Predictions(outputs, targets, loss, labels)
        weights.append(held.mean_weights(["good", "bad"], all_of(targets))["good"])
    assert weights == sorted(weights)
    assert weights[-1] > 0.97


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("models", [2, 3])
def test_mean_weights_cost_little_more_than_the_best_single_model(seed, models):
    """The bound of the docstring: predictions from the rows before lose at most log(5 k) in total."""
    outputs, targets = drawn(rows=30, models=models, seed=seed, scale=4.0)
    held = predictions(outputs, targets)
    total = 0.0
    for row in range(30):
        weights = held.mean_weights(list(outputs), torch.arange(30) < row)
        total += float(held.losses(weights)[row])
    best = min(float(held.losses({name: 1.0}).sum()) for name in outputs)
    assert total <= best + math.log(5 * models) + 1e-6


def test_mean_weights_leave_out_a_broken_model():
    outputs, targets = drawn()
    outputs["broken"] = torch.full_like(outputs["model 0"], math.nan)
    held = predictions(outputs, targets)
    found = held.mean_weights(["broken", "model 0"], all_of(targets))
    assert found == {"broken": 0.0, "model 0": pytest.approx(1.0)}
    assert held.mean_weights(["broken"], all_of(targets)) == {"broken": 1.0}


def test_cross_validated_weights_never_see_the_row_s_own_fold():
    outputs, targets = drawn(rows=20)
    held = predictions(outputs, targets)
    folds, rows = torch.arange(20) % 4, torch.arange(20) >= 5
    asked = []

    def weigh(used):
        asked.append(used)
        return {"model 0": 1.0, "model 1": 0.0}

    found = held.cross_validated(folds, rows, weigh)
    assert torch.equal(found, outputs["model 0"][rows])
    for fold, used in zip(range(4), asked):
        assert torch.equal(used, rows & (folds != fold))


def test_rows_of_few_units_leave_the_weights_near_the_prior():
    right, wrong = torch.tensor([[1.0, 0.0]] * 200), torch.tensor([[0.0, 1.0]] * 200)
    labels = torch.zeros(200, dtype=torch.int64)
    loss = torch.nn.functional.cross_entropy

    def weight(rows: int, independent: float) -> float:
        given = {name: outputs[:rows] for name, outputs in (("a", right), ("b", wrong))}
        held_out = fm.personalization.Predictions(given, labels[:rows], loss, True, independent)
        return held_out.mean_weights(["a", "b"], rows=torch.ones(rows, dtype=torch.bool))["a"]

    assert weight(200, 2 / 200) == pytest.approx(weight(2, 1.0))
    assert weight(200, 2 / 200) < 0.75 < 0.95 < weight(200, 1.0)
