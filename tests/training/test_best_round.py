"""The rule that chooses the best round: smoothing, ties, direction, and numbers that are missing."""

import math

import pytest
import torch

import fairmesh as fm
from fairmesh.training.best_round import RoundScores, replaces
from tests.toys import problem, sites

NAN = math.nan


def scores_of(measurements, best_by="worst", smoothing=0.5, made=None, level=0.2):
    rule = RoundScores(made or problem(3), best_by, level)
    rule.smoothing = smoothing
    return [float(rule.add(torch.tensor([one], dtype=torch.float64))) for one in measurements]


def chosen(measurements, **settings):
    best, found = torch.tensor(-math.inf), None
    for t, score in enumerate(map(torch.tensor, scores_of(measurements, **settings))):
        if bool(replaces(score, best)):
            best, found = torch.maximum(score, best), t
    return found


def test_score_is_the_worst_of_the_sites_smoothed_values():
    values = [[0.1, 0.4], [0.9, 0.6], [0.5, 0.8]]
    first = [(0.5 * 0.1 + 0.9) / 1.5, (0.5 * 0.4 + 0.6) / 1.5]
    last = [(0.25 * 0.1 + 0.5 * 0.9 + 0.5) / 1.75, (0.25 * 0.4 + 0.5 * 0.6 + 0.8) / 1.75]
    assert scores_of(values) == pytest.approx([0.1, min(first), min(last)])
    assert scores_of(values, best_by="mean") == pytest.approx([0.25, sum(first) / 2, sum(last) / 2])
    assert scores_of(values, smoothing=0.0) == pytest.approx([0.1, 0.6, 0.5])


def test_score_can_be_the_mean_of_the_worst_sites():
    values = [[0.1, 0.3, *[1.0] * 5]]  # a fifth of seven sites: the worst one, and 0.4 of the next
    assert scores_of(values, best_by="cvar") == pytest.approx([(0.1 + 0.4 * 0.3) / 1.4])
    assert scores_of(values, best_by="worst_share") == pytest.approx([0.2])
    assert scores_of(values, best_by="cvar", level=0.5) == pytest.approx([(0.1 + 0.3 + 1.5) / 3.5])


def test_lucky_round_is_not_the_best_and_equal_rounds_go_to_the_last():
    lucky = [[0.1], [0.9], [0.2], [0.8], [0.8], [0.3]]
    assert (chosen(lucky, smoothing=0.0), chosen(lucky)) == (1, 4)
    assert chosen([[0.7]] * 5 + [[0.6]], smoothing=0.8) == 4  # though sums are rounded


def test_lower_is_better_for_a_loss():
    inputs = torch.linspace(-1, 1, 40).reshape(20, 2)
    targets = inputs.sum(dim=1, keepdim=True)
    made = fm.Problem(
        torch.nn.Linear(2, 1), [fm.Site((inputs, targets))] * 2, loss=torch.nn.functional.mse_loss
    ).prepared
    assert chosen([[3.0, 2.0], [1.0, 1.5], [2.0, 0.1]], made=made, smoothing=0.0) == 1


def test_sites_without_a_number_are_left_out():
    assert scores_of([[NAN, 0.4], [NAN, 0.6]], smoothing=0.0) == pytest.approx([0.4, 0.6])
    assert chosen([[NAN, NAN], [NAN, 0.6]]) == 1


@pytest.mark.parametrize("broken", [NAN, math.inf])
def test_round_that_loses_a_number_is_never_the_best(broken):
    assert scores_of([[0.5, 0.5], [0.9, broken]])[1] == -math.inf
    assert chosen([[0.5, 0.5], [0.9, broken]]) == 0


def validated():
    return problem(3, sites=[fm.Site(s.train, test=s.test, validation=s.test) for s in sites(3)])


def test_kept_model_is_that_of_the_best_smoothed_round_also_after_a_resumption(tmp_path):
    step = fm.algorithms.DSGD(primal_step=fm.schedules.Geometric(8.0, 0.9))
    options = {"measure_every": 2, "checkpoint_every": 4, "keep_best": True, "seeds": (0, 1)}
    whole = fm.train(validated(), fm.Ring(), step, 12, **options)
    for r in (0, 1):
        mine = [record for record in whole.records if record["replica"] == r]
        wanted = chosen([record["validation"]["accuracy"]["sites"] for record in mine])
        assert int(whole.state.best.round[r]) == mine[wanted]["round"]

    def stop(round, state):
        if round == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fm.train(validated(), fm.Ring(), step, 12, out=tmp_path, observers=[stop], **options)
    again = fm.train(validated(), fm.Ring(), step, 12, out=tmp_path, resume=True, **options)
    for part in ("score", "round", "model"):
        assert torch.equal(getattr(again.state.best, part), getattr(whole.state.best, part))
