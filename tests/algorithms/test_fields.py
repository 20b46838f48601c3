"""Fields of algorithms and weightings out of range are refused with the range, before anything runs."""

import itertools
import math
from dataclasses import dataclass

import pytest

import fairmesh as fm
from fairmesh.config.tables import from_table
from tests.refusals import refused
from tests.toys import REGULARIZERS, problem, sites

A = fm.algorithms
STEPPED = (fm.ADGDA, fm.TrackedADGDA, fm.ChocoSGD, A.DSGD, A.DRDSGD, A.DRFA, A.AFL)
GOSSIPING = (fm.ADGDA, fm.ChocoSGD, fm.TrackedADGDA)
OUT_OF_RANGE = [  # classes, a field, values, and what the refusal names
    (STEPPED, "primal_step", (-0.1, math.nan, math.inf), ["primal_step", ">= 0"]),
    ((fm.ADGDA, A.DRFA, A.AFL), "dual_step", (-0.1, math.nan), ["dual_step", ">= 0"]),
    (GOSSIPING, "consensus_step", (0.0, -0.5, 1.01, math.nan), ["consensus_step", "(0, 1]"]),
    ((fm.ADGDA, fm.ChocoSGD, A.DRFA, A.FedAvg, fm.TrackedADGDA), "local_steps", (0,), ["local_steps", ">= 1"]),
    ((fm.ADGDA, fm.TrackedADGDA), "loss_cap", (0.0, -1.0, math.nan, math.inf), ["loss_cap", "> 0"]),
    ((fm.TrackedADGDA, A.Local), "beta1", (1.0, -0.5), ["beta1", "[0, 1)"]),
    ((fm.TrackedADGDA, A.Local), "beta2", (1.0, -0.1), ["beta2", "[0, 1)"]),
    ((fm.TrackedADGDA,), "gradient_at_average", (1.5, -0.1), ["gradient_at_average", "[0, 1]"]),
    ((fm.TrackedADGDA,), "max_drift", (-1.0, math.inf), ["max_drift", ">= 0"]),
    ((fm.TrackedADGDA,), "local_steps", (1.5,), ["local_steps"]),
    ((fm.TrackedADGDA,), "weighting", ("shadow-prize",), ["weighting", "'shadow-price'"]),
    ((A.DRDSGD,), "temperature", (0.0, math.inf), ["temperature", "> 0"]),
    ((A.DRFA,), "floor", (-0.1, 1.0), ["floor", "[0, 1)"]),
    ((A.DRFA, A.FedAvg), "participation", (0.0, 1.5), ["participation", "(0, 1]"]),
    ((A.FedProx,), "proximal", (-1.0, math.nan), ["proximal", ">= 0"]),
    ((A.QFFL,), "q", (-1.0, math.inf), ["q", ">= 0"]),
    ((A.TERM,), "tilt", (-1.0, math.inf), ["tilt", ">= 0"]),
    ((fm.weighting.ShadowPrice, fm.weighting.ExactMaximum), "loss_ema", (1.0, -0.1), ["loss_ema", "[0, 1)"]),
    ((fm.weighting.ShadowPrice,), "step", (2.0, 0.0), ["step", "(0, 1]"]),
    ((fm.weighting.ProjectedAscent,), "step", (-1.0,), ["step", ">= 0"]),
    ((fm.weighting.ProjectedAscent,), "compressor", ("zip",), ["compressor"]),
]


@pytest.mark.parametrize(("kinds", "name", "values", "words"), OUT_OF_RANGE, ids=str)
def test_field_out_of_range_is_refused_with_the_range(kinds, name, values, words):
    for kind, value in itertools.product(kinds, values):
        with refused(*words, value):
            kind(**{name: value})


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


@dataclass(frozen=True)
class Restarted(A.DSGD):
    restart: fm.schedules.Schedule | None = None
    further: tuple[fm.schedules.Schedule, ...] = ()


def test_an_algorithm_of_an_author_may_have_no_schedule_or_several():
    made = from_table(A.Algorithm, Restarted(0.1, further=(fm.schedules.Constant(0.2),)), "algorithm")
    assert (made.primal_step, made.restart, made.further) == (
        fm.schedules.Constant(0.1),
        None,
        (fm.schedules.Constant(0.2),),
    )


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
