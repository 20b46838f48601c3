"""Options of a run out of range are refused by name, before anything runs."""

import math

import pytest
import torch

import fairmesh as fm
from tests.refusals import refused
from tests.toys import problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_device_cuda_where_there_is_none_is_refused_with_the_other(device):
    with refused("CUDA", "'cpu'"):
        fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), 1, device=device)


@pytest.mark.parametrize("device", ["gpu", "meta", "tpu:0"])
def test_device_that_is_unknown_is_refused_with_the_known_ones(device):
    with refused("device", device, "'cpu'", "'cuda'"):
        fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), 1, device=device)


@pytest.mark.parametrize("rounds", [0, -3])
def test_rounds_below_one_are_refused(rounds):
    with refused("rounds", ">= 1", rounds):
        fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), rounds)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("measure_every", 0, ("measure_every", ">= 1")),
        ("checkpoint_every", 0, ("checkpoint_every", ">= 1")),
        ("cvar_level", 0.0, ("cvar_level", "(0, 1]")),
        ("cvar_level", 1.5, ("cvar_level", "(0, 1]", "1.5")),
        ("dtype", "float16", ("dtype", "'float32'", "'float64'")),
        ("on_divergence", "ignore", ("on_divergence", "'mark'", "'ignore'")),
    ],
)
def test_option_out_of_range_is_refused_by_name(option, value, words):
    with refused(*words):
        fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), 1, **{option: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch", 0), ("batches_per_step", 0), ("order", "sideways")],
)
def test_sampling_out_of_range_is_refused_by_name(field, value):
    with refused(field, str(value)):
        fm.Sampling(**{field: value})


@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf])
def test_weight_decay_out_of_range_is_refused(value):
    with refused("weight_decay", ">= 0"):
        problem(2, weight_decay=value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_clip_norm_out_of_range_is_refused(value):
    with refused("clip_norm", "> 0"):
        problem(2, clip_norm=value)


@pytest.mark.parametrize("placement", [(0, 1, 1), (0, 1), (1, 2, 3), (0, 1, 2, 3)])
def test_placement_that_is_no_permutation_is_refused(placement):
    with refused("placement", "3 sites"):
        fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), 1, placements=[(0, 1, 2), placement])


def test_placements_of_zero_are_refused():
    with refused("placements", ">= 1"):
        fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), 1, placements=0)


def test_seeds_that_repeat_are_refused():
    with refused("seeds", "4, 5, 4"):
        fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), 1, seeds=(4, 5, 4))


@pytest.mark.parametrize("seeds", [(), []])
def test_seeds_of_none_are_refused(seeds):
    with refused("algorithm", "seed"):
        fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), 1, seeds=seeds)


def test_algorithms_of_none_are_refused():
    with refused("algorithm", "seed"):
        fm.train(problem(3), fm.Ring(), [], 1)


def test_replicas_whose_compressors_differ_are_refused_with_the_field():
    pair = [fm.ChocoSGD(compressor=fm.compressors.Quantize(bits=bits)) for bits in (4, 8)]
    with refused("algorithm.compressor", "bits=4", "bits=8"):
        fm.train(problem(3), fm.Ring(), pair, 1)


def test_replicas_that_differ_in_a_number_shapes_depend_on_are_refused_with_the_field():
    with refused("algorithm.local_steps", "2", "3"):
        fm.train(problem(3), fm.Ring(), [fm.algorithms.DRFA(local_steps=k) for k in (2, 3)], 1)
    with refused("algorithm.participation"):
        fm.train(problem(4), fm.Ring(), [fm.algorithms.DRFA(participation=share) for share in (0.5, 1.0)], 1)


def test_replicas_of_different_algorithms_are_refused():
    with refused("algorithm", "DSGD", "ChocoSGD"):
        fm.train(problem(3), fm.Ring(), [fm.algorithms.DSGD(), fm.ChocoSGD()], 1)


def test_replicas_may_differ_in_numbers_written_with_or_without_a_point():
    pair = [fm.ChocoSGD(consensus_step=rate, primal_step=0.1) for rate in (1, 0.5)]
    together = fm.train(problem(3), fm.Ring(), pair, 3, dtype="float64")
    alone = [fm.train(problem(3), fm.Ring(), one, 3, dtype="float64") for one in pair]
    assert torch.allclose(together.row(), torch.cat([one.row() for one in alone]), rtol=0, atol=1e-12)


def test_keep_best_of_only_the_last_round_is_refused():
    with refused("keep_best", "best_by"):
        fm.Options(keep_best=True, best_by="last")


def test_keep_best_without_validation_data_is_refused():
    with refused("keep_best", "validation", "Site"):
        fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), 1, keep_best=True)


def test_result_row_that_was_not_kept_is_refused_with_the_option():
    result = fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), 1)
    with refused("keep_best"):
        result.row("best")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesure_every": 3}, ["mesure_every", "'measure_every'"]),
        ({"rounds": 2.5}, ["2.5"]),
        ({"algorithm": fm.algorithms.AFL(0.1), "own_models": True}, ["own_models", "server"]),
    ],
)
def test_option_that_the_algorithm_does_not_have_is_refused_by_name(changes, words):
    arguments = {"algorithm": fm.ADGDA(0.1), "rounds": 3} | changes
    with refused(*words):
        fm.train(problem(), fm.Ring(), **arguments)
