"""The one evaluation that a private site tells: bounded in what a unit can change, unbiased, and the same each time."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import fairmesh as fm
from fairmesh.problems.private_evaluation import NoisedEvaluation
from fairmesh.problems.problem import prepare

SECRET, ROWS, CLASSES = b"s" * 32, 60, 3


class Weighed:
    """A loss with a number that its code does not show."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, outputs, targets):
        return self.weight * nn.functional.cross_entropy(outputs, targets)


def _problem(inputs, labels, units=None, **settings):
    train = (torch.randn(30, 4), torch.arange(30) % CLASSES)
    test = fm.data.Samples(inputs, labels, units=units)
    privacy = fm.Privacy(epsilon=4, delta=1e-4)
    return prepare(fm.Problem(nn.Linear(4, CLASSES), [fm.Site(train, test=test)], privacy=privacy, **settings))


@pytest.fixture
def rows():
    torch.manual_seed(0)
    return torch.randn(ROWS, 4), torch.randint(0, CLASSES, (ROWS,)), torch.arange(ROWS) // 3


def _sums(problem, row):
    return NoisedEvaluation(problem, 0, 1.0, SECRET)._sums(row)


@pytest.mark.parametrize("outlier", [0.0, 1e30, math.nan])
def test_unit_whatever_its_rows_changes_each_sum_by_at_most_one(rows, outlier):
    inputs, labels, units = rows
    row = torch.randn(CLASSES * 5)
    there = _sums(_problem(inputs, labels, units), row)
    without = _sums(_problem(inputs[3:], labels[3:], units[3:]), row)
    try:
        changed = _sums(_problem(torch.cat([inputs[:3] + outlier, inputs[3:]]), labels, units), row)
    except fm.BadInput:
        assert math.isnan(outlier), "rows that are not finite are refused when they are read"
        return
    for name in ("loss", "accuracy"):
        assert abs(there[name] - without[name]) <= 1.0
        assert abs(changed[name] - without[name]) <= 1.0


def test_units_count_as_the_means_over_their_rows(rows):
    inputs, labels, units = rows
    problem, row = _problem(inputs, labels, units), torch.zeros(CLASSES * 5)
    right = (labels == 0).double().view(-1, 3).mean(dim=1)  # of equal outputs the first class is predicted
    assert float(_sums(problem, row)["accuracy"]) == pytest.approx(float((2 * right - 1).sum()))


def _cross_entropy_of_shares(outputs, targets):
    return nn.functional.binary_cross_entropy(outputs.squeeze(-1), targets)


def test_rows_on_which_the_users_code_raises_count_as_the_worst():
    """It does not raise at the initial model. Else one of them would end the run, which others see."""
    inputs, clip, model = torch.linspace(-0.4, 0.4, 10).unsqueeze(1).repeat(1, 4), 3.0, nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, 0.5)
    inputs[[2, 7]] = 9.0
    train, test = (torch.zeros(30, 4), torch.zeros(30)), fm.data.Samples(inputs, torch.ones(10))
    settings = {"privacy": fm.Privacy(4, 1e-4, loss_clip=clip), "loss": _cross_entropy_of_shares}
    problem = prepare(fm.Problem(model, [fm.Site(train, test=test)], **settings))
    losses = -(inputs[:, 0].double() + 0.5).log()
    losses[[2, 7]] = clip
    found = _sums(problem, torch.tensor([1.0, 0.0, 0.0, 0.0, 0.5]))
    assert float(found["loss"]) == pytest.approx(float((2 * losses.clamp(0, clip) / clip - 1).sum()), rel=1e-5)


def test_noise_has_the_deviation_that_the_ledger_was_charged_for(rows):
    inputs, labels, units = rows
    problem, row, noise = _problem(inputs, labels, units), torch.zeros(CLASSES * 5), 0.3
    exact = NoisedEvaluation(problem, 0, 1e-9, SECRET).of(row, 1)
    told = [NoisedEvaluation(problem, 0, noise, bytes([k]) * 32).of(row, 1) for k in range(200)]
    for name, scale in (("accuracy", 0.5), ("loss", 0.5 * 2 * math.log(CLASSES))):
        apart = np.array([one[name] - exact[name] for one in told]) / scale
        deviation = noise * math.sqrt(2) / (ROWS / 3)  # two numbers in one release
        assert stats.kstest(apart / deviation, "norm").pvalue > 1e-4


def test_same_model_and_generation_have_the_same_noise_and_others_do_not(rows):
    inputs, labels, units = rows
    problem, row = _problem(inputs, labels, units), torch.randn(CLASSES * 5)
    evaluation = NoisedEvaluation(problem, 0, 0.2, SECRET)
    told = evaluation.of(row, 1)
    assert NoisedEvaluation(problem, 0, 0.2, SECRET).of(row, 1) == told
    other = row.clone()
    other[0] = torch.nextafter(other[0], torch.tensor(9.0))
    assert evaluation.digest(row) != evaluation.digest(other)
    different = [
        evaluation.of(row, 2),
        evaluation.of(other, 1),
        NoisedEvaluation(problem, 0, 0.2, b"t" * 32).of(row, 1),
    ]
    assert len({one["accuracy"] for one in [told, *different]}) == 4


def test_noise_and_the_ledgers_digest_follow_the_loss_and_what_it_holds(rows):
    inputs, labels, units = rows
    row, digests, noise = torch.zeros(CLASSES * 5), set(), []
    for weight in (1.0, 1.5):
        evaluation = NoisedEvaluation(_problem(inputs, labels, units, loss=Weighed(weight)), 0, 1.0, SECRET)
        digests.add(evaluation.digest(row))
        noise.append(evaluation.of(row, 0)["accuracy"])
    assert len(digests) == 2
    assert noise[0] != noise[1]  # of the same accuracy


def test_what_is_told_is_a_possible_metric(rows):
    inputs, labels, units = rows
    told = NoisedEvaluation(_problem(inputs, labels, units), 0, 1e6, SECRET).of(torch.zeros(CLASSES * 5), 1)
    assert told["accuracy"] in (0.0, 1.0)
    assert told["loss"] in (0.0, 2 * math.log(CLASSES))
