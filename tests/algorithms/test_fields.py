"""Fields of algorithms and weightings out of range are refused with the range, before anything runs."""

import math

import pytest

import fairmesh as fm
from tests.refusals import refused
from tests.toys import REGULARIZERS, problem, sites


@pytest.mark.parametrize("step", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize(
    "kind",
    [
        fm.ADGDA,
        fm.TrackedADGDA,
        fm.ChocoSGD,
        fm.algorithms.DSGD,
        fm.algorithms.DRDSGD,
        fm.algorithms.DRFA,
        fm.algorithms.AFL,
    ],
)
def test_primal_step_that_is_negative_or_not_finite_is_refused(kind, step):
    with refused("step size", ">= 0", step):
        kind(primal_step=step)


@pytest.mark.parametrize("step", [-0.1, math.nan])
@pytest.mark.parametrize("kind", [fm.ADGDA, fm.algorithms.DRFA, fm.algorithms.AFL])
def test_dual_step_that_is_negative_or_not_a_number_is_refused(kind, step):
    with refused("step size", ">= 0", step):
        kind(dual_step=step)


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.01, math.nan])
@pytest.mark.parametrize("kind", [fm.ADGDA, fm.ChocoSGD, fm.TrackedADGDA])
def test_consensus_step_outside_zero_to_one_is_refused(kind, rate):
    with refused("consensus_step", "(0, 1]", rate):
        kind(consensus_step=rate)


@pytest.mark.parametrize("kind", [fm.ADGDA, fm.ChocoSGD, fm.algorithms.DRFA, fm.algorithms.FedAvg])
def test_local_steps_below_one_are_refused(kind):
    with refused("local_steps", ">= 1", 0):
        kind(local_steps=0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"beta1": 1.0}, ["beta1", "[0, 1)"]),
        ({"beta1": -0.5}, ["beta1", "[0, 1)", "-0.5"]),
        ({"beta2": 1.0}, ["beta2", "[0, 1)"]),
        ({"beta2": -0.1}, ["beta2", "[0, 1)"]),
        ({"gradient_at_average": 1.5}, ["gradient_at_average", "[0, 1]", "1.5"]),
        ({"gradient_at_average": -0.1}, ["gradient_at_average", "[0, 1]"]),
        ({"local_steps": 0}, ["local_steps", ">= 1", "0"]),
        ({"local_steps": 1.5}, ["local_steps", "1.5"]),
        ({"loss_cap": 0.0}, ["loss_cap"]),
        ({"weighting": "shadow-prize"}, ["weighting", "'shadow-price'"]),
    ],
    ids=str,
)
def test_tracked_ad_gda_refuses_a_field_out_of_range_with_the_range(fields, words):
    with refused(*words):
        fm.TrackedADGDA(**fields)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fm.weighting.ShadowPrice(loss_ema=1.0), ["loss_ema", "[0, 1)"]),
        (lambda: fm.weighting.ShadowPrice(step=2.0), ["step", "(0, 1]", "2.0"]),
        (lambda: fm.weighting.ExactMaximum(loss_ema=-0.1), ["loss_ema", "[0, 1)"]),
        (lambda: fm.weighting.ProjectedAscent(step=-1.0), ["step", ">= 0"]),
        (lambda: fm.weighting.ProjectedAscent(compressor="zip"), ["compressor", "zip"]),
    ],
)
def test_weighting_refuses_a_field_out_of_range_with_the_range(make, words):
    with refused(*words):
        make()


@pytest.mark.parametrize(
    ("weighting", "regularizer", "words"),
    [
        (
            fm.weighting.ShadowPrice(),
            fm.regularizers.NoRegularizer(),
            ["NoRegularizer", "ChiSquare", "KullbackLeibler", "ProjectedAscent"],
        ),
        (fm.weighting.ShadowPrice(), fm.regularizers.OwnCoordinate(1.0), ["OwnCoordinate", "ProjectedAscent"]),
        (
            fm.weighting.ShadowPrice(),
            fm.regularizers.Capped(0.5, fm.regularizers.NoRegularizer()),
            ["NoRegularizer", "ProjectedAscent"],
        ),
        (fm.weighting.ShadowPrice(), REGULARIZERS["custom"], ["Custom", "ProjectedAscent"]),
        (fm.weighting.ExactMaximum(), REGULARIZERS["custom"], ["ExactMaximum", "Custom", "ProjectedAscent"]),
        (fm.weighting.ProjectedAscent(9.0), fm.ChiSquare(0.5), ["weighting.step", "9", "2"]),
    ],
)
def test_weighting_that_cannot_serve_its_regularizer_names_one_that_can(weighting, regularizer, words):
    algorithm = fm.TrackedADGDA(weighting=weighting, regularizer=regularizer)
    made = problem(4, sites=sites(4, sizes=(10, 10, 10, 10)))  # n p / alpha = 4 * 0.25 / 0.5
    with refused(*words):
        fm.train(made, fm.Ring(), algorithm, 1)


def test_consensus_step_of_one_is_allowed():
    assert fm.ADGDA(consensus_step=1.0).consensus_step == 1.0


@pytest.mark.parametrize(
    ("regularizer", "bound"), [(fm.ChiSquare(0.5), 0.5), (fm.regularizers.KullbackLeibler(0.5), 1.0)]
)
def test_dual_step_beyond_its_stable_range_is_refused_with_the_bound(regularizer, bound):
    made = problem(4, sites=sites(4, sizes=(10, 10, 10, 10)))  # p / alpha = 0.25 / 0.5
    with refused("dual_step", f"{bound:g}"):
        fm.train(made, fm.Ring(), fm.ADGDA(dual_step=bound * 1.01, regularizer=regularizer), 1)
    fm.train(made, fm.Ring(), fm.ADGDA(dual_step=bound * 0.99, regularizer=regularizer), 1)


def test_dual_step_has_the_stable_range_of_the_smallest_prior():
    made = problem(4, sites=sites(4, sizes=(10, 10, 10, 10)), prior=[0.1, 0.3, 0.3, 0.3])
    with refused("dual_step", "prior", "0.1", "0.2"):
        fm.train(made, fm.Ring(), fm.ADGDA(dual_step=0.4, regularizer=fm.ChiSquare(0.5)), 1)


def test_dual_step_of_every_replica_is_checked():
    good, bad = (fm.ADGDA(dual_step=step, regularizer=fm.ChiSquare(0.5)) for step in (0.01, 9.0))
    with refused("dual_step", "9"):
        fm.train(problem(4), fm.Ring(), [good, bad], 1)


@pytest.mark.parametrize("name", ["FedAvg", "FedProx", "QFFL", "TERM", "Pooled", "Local"])
def test_settings_of_baselines_but_the_step_are_given_by_keyword(name):
    kind = getattr(fm.algorithms, name)
    assert kind(0.1) == kind(primal_step=0.1)
    with pytest.raises(TypeError, match="positional"):
        kind(0.1, 0.5)
