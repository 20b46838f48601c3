"""Settings out of range are refused before anything runs, with the range."""

import math

import pytest
import torch

import fairmesh as fm
from tests.toys import REGULARIZERS, problem, sites


def refused(*words: str):
    return pytest.raises(fm.BadInput, match="".join(f"(?=.*{word})" for word in words))


@pytest.mark.parametrize("step", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("kind", [fm.ADGDA, fm.TrackedADGDA, fm.ChocoSGD, fm.DSGD, fm.DRDSGD, fm.DRFA, fm.AFL])
def test_a_primal_step_that_is_negative_or_not_finite_is_refused(kind, step):
    with refused("step size", "finite number >= 0", str(step)):
        kind(primal_step=step)


@pytest.mark.parametrize("step", [-0.1, math.nan])
@pytest.mark.parametrize("kind", [fm.ADGDA, fm.DRFA, fm.AFL])
def test_a_dual_step_that_is_negative_or_not_a_number_is_refused(kind, step):
    with refused("step size", "finite number >= 0", str(step)):
        kind(dual_step=step)


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.01, math.nan])
@pytest.mark.parametrize("kind", [fm.ADGDA, fm.ChocoSGD, fm.TrackedADGDA])
def test_a_rate_outside_zero_to_one_is_refused(kind, rate):
    with refused("consensus_step", r"\(0, 1\]", str(rate)):
        kind(consensus_step=rate)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"beta1": 1.0}, ["beta1", r"\[0, 1\)"]),
        ({"beta1": -0.5}, ["beta1", r"\[0, 1\)", "-0.5"]),
        ({"beta2": 1.0}, ["beta2", r"\[0, 1\)"]),
        ({"beta2": -0.1}, ["beta2", r"\[0, 1\)"]),
        ({"gradient_at_average": 1.5}, ["gradient_at_average", r"\[0, 1\]", "1.5", "own model"]),
        ({"gradient_at_average": -0.1}, ["gradient_at_average", r"\[0, 1\]"]),
        ({"local_steps": 0}, ["local_steps", ">= 1", "0"]),
        ({"local_steps": 1.5}, ["local_steps", "whole number"]),
        ({"loss_cap": 0.0}, ["loss_cap", "leave it out"]),
        ({"weighting": "shadow-prize"}, ["weighting", "did you mean 'shadow-price'"]),
    ],
    ids=str,
)
def test_a_field_of_tracked_ad_gda_out_of_range_is_refused_with_the_range(fields, words):
    with refused(*words):
        fm.TrackedADGDA(**fields)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fm.weighting.ShadowPrice(loss_ema=1.0), ["loss_ema", r"\[0, 1\)"]),
        (lambda: fm.weighting.ShadowPrice(step=2.0), ["step of the price", r"\(0, 1\]", "2.0"]),
        (lambda: fm.weighting.ExactMaximum(loss_ema=-0.1), ["loss_ema", r"\[0, 1\)"]),
        (lambda: fm.weighting.ProjectedAscent(step=-1.0), ["step size", ">= 0"]),
        (lambda: fm.weighting.ProjectedAscent(compressor="zip"), ["compressor", "zip"]),
    ],
)
def test_a_way_to_weigh_out_of_range_is_refused_with_the_range(make, words):
    with refused(*words):
        make()


@pytest.mark.parametrize(
    ("weighting", "regularizer", "words"),
    [
        (
            fm.weighting.ShadowPrice(),
            fm.regularizers.NoRegularizer(),
            ["NoRegularizer", "ChiSquare or KullbackLeibler", "ProjectedAscent"],
        ),
        (fm.weighting.ShadowPrice(), fm.regularizers.OwnCoordinate(1.0), ["OwnCoordinate", "ProjectedAscent"]),
        (
            fm.weighting.ShadowPrice(),
            fm.regularizers.Capped(0.5, fm.regularizers.NoRegularizer()),
            ["NoRegularizer", "ProjectedAscent"],
        ),
        (fm.weighting.ShadowPrice(), REGULARIZERS["custom"], ["Custom", "ProjectedAscent"]),
        (fm.weighting.ExactMaximum(), REGULARIZERS["custom"], ["custom", "use a ProjectedAscent"]),
        (fm.weighting.ProjectedAscent(9.0), fm.ChiSquare(0.5), ["weighting.step 9", "at most 2", "smaller strength"]),
    ],
)
def test_a_way_to_weigh_that_cannot_serve_its_regularizer_says_which_can(weighting, regularizer, words):
    algorithm = fm.TrackedADGDA(weighting=weighting, regularizer=regularizer)
    made = problem(4, sites=sites(4, sizes=(10, 10, 10, 10)))  # m p / alpha = 4 * 0.25 / 0.5
    with refused(*words):
        fm.train(made, fm.Ring(), algorithm, 1)


def test_a_rate_of_one_is_allowed():
    assert fm.ADGDA(consensus_step=1.0).consensus_step == 1.0


@pytest.mark.parametrize(
    ("regularizer", "bound"), [(fm.ChiSquare(0.5), 0.5), (fm.regularizers.KullbackLeibler(0.5), 1.0)]
)
def test_a_dual_step_beyond_its_stable_range_is_refused_with_the_bound(regularizer, bound):
    made = problem(4, sites=sites(4, sizes=(10, 10, 10, 10)))  # p / alpha = 0.25 / 0.5
    with refused("dual_step", "stable range", f"at most {bound:g}", "smaller strength"):
        fm.train(made, fm.Ring(), fm.ADGDA(dual_step=bound * 1.01, regularizer=regularizer), 1)
    fm.train(made, fm.Ring(), fm.ADGDA(dual_step=bound * 0.99, regularizer=regularizer), 1)


def test_the_stable_range_is_that_of_the_smallest_prior():
    made = problem(4, sites=sites(4, sizes=(10, 10, 10, 10)), prior=[0.1, 0.3, 0.3, 0.3])
    with refused("smallest prior 0.1", "at most 0.2"):
        fm.train(made, fm.Ring(), fm.ADGDA(dual_step=0.4, regularizer=fm.ChiSquare(0.5)), 1)


def test_every_replica_is_checked_for_the_stable_range():
    good, bad = (fm.ADGDA(dual_step=step, regularizer=fm.ChiSquare(0.5)) for step in (0.01, 9.0))
    with refused("dual_step 9", "stable range"):
        fm.train(problem(4), fm.Ring(), [good, bad], 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_where_there_is_none_is_refused_with_what_to_use(device):
    with refused("no CUDA device", "'cpu'"):
        fm.train(problem(3), fm.Ring(), fm.DSGD(), 1, device=device)


@pytest.mark.parametrize("device", ["gpu", "meta", "tpu:0"])
def test_an_unknown_device_is_refused_with_the_known_ones(device):
    with refused("unknown device", device, "'cpu' or 'cuda'"):
        fm.train(problem(3), fm.Ring(), fm.DSGD(), 1, device=device)


@pytest.mark.parametrize("rounds", [0, -3])
def test_less_than_one_round_is_refused(rounds):
    with refused("rounds", ">= 1", str(rounds)):
        fm.train(problem(3), fm.Ring(), fm.DSGD(), rounds)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("measure_every", 0, ("measure_every", ">= 1")),
        ("checkpoint_every", 0, ("checkpoint_every", ">= 1")),
        ("dtype", "float16", ("dtype", "'float32', 'float64'")),
        ("data_on", "disk", ("data_on", "'host'", "'disk'")),
        ("on_divergence", "ignore", ("on_divergence", "'mark'", "'ignore'")),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(option, value, words):
    with refused(*words):
        fm.train(problem(3), fm.Ring(), fm.DSGD(), 1, **{option: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch", 0), ("batches_per_step", 0), ("order", "shuffled")],
)
def test_a_sampling_out_of_range_is_refused_by_name(field, value):
    with refused(field, str(value)):
        fm.Sampling(**{field: value})


@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf])
def test_a_weight_decay_out_of_range_is_refused(value):
    with refused("weight_decay", ">= 0"):
        problem(2, weight_decay=value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_clipping_norm_out_of_range_is_refused(value):
    with refused("clip_norm", "> 0"):
        problem(2, clip_norm=value)


@pytest.mark.parametrize("placement", [(0, 1, 1), (0, 1), (1, 2, 3), (0, 1, 2, 3)])
def test_a_placement_that_is_no_permutation_is_refused(placement):
    with refused("each of the 3 sites once", "got"):
        fm.train(problem(3), fm.Ring(), fm.DSGD(), 1, placements=[(0, 1, 2), placement])


def test_no_placement_is_refused():
    with refused("placements must be >= 1"):
        fm.train(problem(3), fm.Ring(), fm.DSGD(), 1, placements=0)


def test_repeated_seeds_are_refused():
    with refused("seeds repeat", "4, 5, 4"):
        fm.train(problem(3), fm.Ring(), fm.DSGD(), 1, seeds=(4, 5, 4))


@pytest.mark.parametrize("seeds", [(), []])
def test_no_seed_is_refused(seeds):
    with refused("at least one algorithm and one seed"):
        fm.train(problem(3), fm.Ring(), fm.DSGD(), 1, seeds=seeds)


def test_no_algorithm_is_refused():
    with refused("at least one algorithm and one seed"):
        fm.train(problem(3), fm.Ring(), [], 1)


def test_replicas_whose_compressors_differ_are_refused_with_the_field():
    pair = [fm.ChocoSGD(compressor=fm.Quantize(bits=bits)) for bits in (4, 8)]
    with refused("algorithm.compressor differs", "bits=4", "bits=8", "train these separately"):
        fm.train(problem(3), fm.Ring(), pair, 1)


def test_replicas_that_differ_in_a_number_shapes_depend_on_are_refused_with_the_field():
    with refused("algorithm.local_steps differs", "2 and 3"):
        fm.train(problem(3), fm.Ring(), [fm.DRFA(local_steps=k) for k in (2, 3)], 1)
    with refused("algorithm.participation differs"):
        fm.train(problem(4), fm.Ring(), [fm.DRFA(participation=share) for share in (0.5, 1.0)], 1)


def test_replicas_of_different_algorithms_are_refused():
    with refused("algorithm differs", "DSGD", "ChocoSGD"):
        fm.train(problem(3), fm.Ring(), [fm.DSGD(), fm.ChocoSGD()], 1)


def test_replicas_may_differ_in_numbers_written_with_or_without_a_point():
    pair = [fm.ChocoSGD(consensus_step=rate, primal_step=0.1) for rate in (1, 0.5)]
    together = fm.train(problem(3), fm.Ring(), pair, 3, dtype="float64")
    alone = [fm.train(problem(3), fm.Ring(), one, 3, dtype="float64") for one in pair]
    assert torch.allclose(together.row(), torch.cat([one.row() for one in alone]), rtol=0, atol=1e-12)


def test_keeping_the_best_without_validation_data_is_refused_with_what_to_give():
    with refused("keep_best", "validation", "Site"):
        fm.train(problem(3), fm.Ring(), fm.DSGD(), 1, keep_best=True)


@pytest.mark.parametrize("which", ["best", "iterate"])
def test_asking_for_a_model_that_was_not_kept_is_refused_with_the_option(which):
    result = fm.train(problem(3), fm.Ring(), fm.DSGD(), 1)
    with refused(f"keep_{which} = True"):
        result.row(which)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesure_every": 3}, ["mesure_every", "did you mean 'measure_every'"]),
        ({"rounds": 2.5}, ["whole number", "2.5"]),
        ({"algorithm": fm.DSGD(0.1), "measure_phi": True}, ["measure_phi", "regularizer"]),
        ({"algorithm": fm.AFL(0.1), "own_models": True}, ["own_models", "server"]),
    ],
)
def test_an_option_that_cannot_be_had_is_refused_by_name(changes, words):
    arguments = {"algorithm": fm.ADGDA(0.1), "rounds": 3} | changes
    with pytest.raises(fm.BadInput) as caught:
        fm.train(problem(), fm.Ring(), **arguments)
    assert all(word in str(caught.value) for word in words), caught.value
