"""Options of a run out of range are refused by name, before anything runs."""

import math

import pytest
import torch

import fairmesh as fm
from tests.refusals import refused
from tests.toys import problem

CHOCO = [fm.ChocoSGD(compressor=fm.compressors.Quantize(bits=bits)) for bits in (4, 8)]
RUNS = [  # arguments of fm.train, and what the refusal names
    *(({"device": device}, ("device", device, "'cpu'", "'cuda'")) for device in ("gpu", "meta", "tpu:0")),
    *(({"rounds": rounds}, ("rounds", ">= 1", rounds)) for rounds in (0, -3, 2.5)),
    ({"measure_every": 0}, ("measure_every", ">= 1")),
    ({"checkpoint_every": 0}, ("checkpoint_every", ">= 1")),
    ({"cvar_level": 0.0}, ("cvar_level", "(0, 1]")),
    ({"cvar_level": 1.5}, ("cvar_level", "(0, 1]", "1.5")),
    ({"dtype": "float16"}, ("dtype", "'float32'", "'float64'")),
    ({"on_divergence": "ignore"}, ("on_divergence", "'mark'", "'ignore'")),
    ({"mesure_every": 3}, ("mesure_every", "'measure_every'")),
    *(
        ({"placements": [(0, 1, 2), placement]}, ("placement", "3 sites"))
        for placement in ((0, 1, 1), (0, 1), (1, 2, 3), (0, 1, 2, 3))
    ),
    ({"placements": 0}, ("placements", ">= 1")),
    ({"placements": []}, ("placements",)),
    ({"personalization": ""}, ("personalization", "mixture")),
    ({"seeds": (4, 5, 4)}, ("seeds", "4, 5, 4")),
    ({"seeds": ()}, ("algorithm", "seed")),
    ({"algorithm": []}, ("algorithm", "seed")),
    ({"algorithm": CHOCO}, ("algorithm.compressor", "bits=4", "bits=8")),
    ({"algorithm": [fm.algorithms.DRFA(local_steps=k) for k in (2, 3)]}, ("algorithm.local_steps", "2", "3")),
    ({"algorithm": [fm.algorithms.DRFA(participation=p) for p in (0.4, 1.0)]}, ("algorithm.participation",)),
    ({"algorithm": [fm.algorithms.DSGD(), fm.ChocoSGD()]}, ("algorithm", "DSGD", "ChocoSGD")),
    ({"algorithm": fm.algorithms.AFL(0.1), "own_models": True}, ("own_models", "server")),
    ({"keep_best": True}, ("keep_best", "validation", "Site")),
    ({"keep_best": True, "best_by": "last"}, ("keep_best", "best_by")),
]


@pytest.mark.parametrize(("changes", "words"), RUNS, ids=str)
def test_run_that_cannot_be_is_refused_by_name(changes, words):
    with refused(*words):
        fm.train(problem(3), fm.Ring(), **{"algorithm": fm.algorithms.DSGD(), "rounds": 1} | changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_device_cuda_where_there_is_none_is_refused_with_the_other(device):
    with refused("CUDA", "'cpu'"):
        fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), 1, device=device)


@pytest.mark.parametrize(("field", "value"), [("batch", 0), ("batches_per_step", 0), ("order", "sideways")])
def test_sampling_out_of_range_is_refused_by_name(field, value):
    with refused(field, str(value)):
        fm.Sampling(**{field: value})


@pytest.mark.parametrize(
    ("field", "values", "least"),
    [("weight_decay", (-1e-3, math.nan, math.inf), ">= 0"), ("clip_norm", (0.0, -1.0, math.nan), "> 0")],
)
def test_setting_of_a_problem_out_of_range_is_refused_by_name(field, values, least):
    for value in values:
        with refused(field, least):
            problem(2, **{field: value})


def test_replicas_may_differ_in_numbers_written_with_or_without_a_point():
    pair = [fm.ChocoSGD(consensus_step=rate, primal_step=0.1) for rate in (1, 0.5)]
    together = fm.train(problem(3), fm.Ring(), pair, 3, dtype="float64")
    alone = [fm.train(problem(3), fm.Ring(), one, 3, dtype="float64") for one in pair]
    assert torch.allclose(together.row(), torch.cat([one.row() for one in alone]), rtol=0, atol=1e-12)
    with refused("keep_best"):
        together.row("best")
