"""The stack against the per-node loops of reference.py: float64, to 1e-10 in every round."""

import contextlib
from dataclasses import replace
from functools import partial

import pytest
import torch

import fairmesh as fm
from tests import toys
from tests.equivalence import reference
from tests.equivalence.reference import REFERENCES, OnTheEdge, Trace
from tests.equivalence.stack import apart, on_the_stack
from tests.examples import THOROUGH
from tests.pairwise import case, covering, some_quick

ROUNDS = 30 if THOROUGH else 12
AGREED = 1e-10


@pytest.fixture(scope="module")
def problem() -> fm.Problem:
    return toys.problem()


def _looped(
    problem: fm.Problem, topology: fm.topologies.Topology, algorithm: fm.algorithms.Algorithm, seed: int, *options: dict
) -> tuple[list[Trace], int]:
    """The loop's run, with each of the options, and the first seed from the given one on in which no number lies on a
    rounding boundary."""
    loop = REFERENCES[type(algorithm)]
    for candidate in range(seed, seed + 5):
        with contextlib.suppress(OnTheEdge):
            return [loop(problem, topology, algorithm, ROUNDS, candidate, **o) for o in options or [{}]], candidate
    raise AssertionError("five seeds in a row on the edge of a rounding: something else is wrong")


def _compared(problem: fm.Problem, topology: fm.topologies.Topology, algorithm: fm.algorithms.Algorithm, seed: int = 0):
    (loop,), seed = _looped(problem, topology, algorithm, seed)
    stack = on_the_stack(problem, topology, algorithm, ROUNDS, seed)
    assert len(loop.models) == ROUNDS
    assert apart(loop, stack) < AGREED
    moved = abs(stack.models[-1] - stack.models[0]).max()
    assert moved > 1e-2, f"the models hardly moved ({moved}): the comparison says nothing"
    assert (loop.bits_of_nodes == stack.bits_of_nodes).all()
    assert loop.bits_of_server == stack.bits_of_server
    return stack


# What has a second implementation: the members of the paper, and Tracked AD-GDA, ShadowPrice and Sign in blocks, which
# are the default. Others keep the contracts of `fm.testing` (tests/contracts/test_every_member.py).
ALGORITHMS = {
    name: algorithm
    for name, algorithm in toys.ALGORITHMS.items()
    if type(algorithm) in REFERENCES
    and name not in ("ad-gda compressed duals", "ad-gda capped", "tracked ascent", "tracked maximum")
}
COMPRESSORS = (
    "none",
    "quantize",
    "quantize half norms",
    "quantize blocks",
    "quantize ceil",
    "top-k",
    "top-k half",
    "sign",
    "sign blocks",
)
REGULARIZERS = ("chi-square", "kl", "none", "own-coordinate")
WEIGHINGS = ("ascent", "price", "price, losses as they are", "fixed")


def test_references_exist_for_what_the_paper_has_and_for_the_default():
    paper = {fm.ADGDA, fm.ChocoSGD, fm.algorithms.DSGD, fm.algorithms.DRDSGD, fm.algorithms.DRFA, fm.algorithms.AFL}
    assert set(REFERENCES) == {*paper, fm.TrackedADGDA}
    assert {type(algorithm) for algorithm in ALGORITHMS.values()} == set(REFERENCES)


@covering(strength=1, compressor=COMPRESSORS, topology=toys.TOPOLOGIES.keys())
def test_ad_gda_is_algorithm_1_for_every_compressor_and_topology(problem, compressor, topology):
    algorithm = fm.ADGDA(
        fm.schedules.Geometric(2.0, 0.99), dual_step=0.1, consensus_step=0.2, compressor=toys.COMPRESSORS[compressor]
    )
    stack = _compared(problem, toys.TOPOLOGIES[topology], algorithm)
    assert abs(stack.duals[-1] - stack.duals[0]).max() > 1e-3


@pytest.mark.parametrize(
    ("compressor", "topology"),
    [
        *(case(compressor, "changing") for compressor in COMPRESSORS),
        *(
            case("quantize", topology, quick=topology == "star")
            for topology in toys.TOPOLOGIES
            if topology != "changing"
        ),
    ],
)
def test_choco_sgd_is_its_loop_for_every_compressor_and_topology(problem, compressor, topology):
    algorithm = fm.ChocoSGD(primal_step=0.2, consensus_step=0.2, compressor=toys.COMPRESSORS[compressor])
    _compared(problem, toys.TOPOLOGIES[topology], algorithm, seed=1)


@covering(
    strength=1,
    regularizer={name: toys.REGULARIZERS[name] for name in REGULARIZERS},
    order=("simultaneous", "dual-first"),
    topology=("changing", "circulant"),
)
def test_ad_gda_is_its_loop_for_every_regularizer_and_dual_order(problem, regularizer, order, topology):
    algorithm = fm.ADGDA(
        2.0,
        dual_step=0.2,
        consensus_step=0.2,
        compressor=fm.compressors.Quantize(bits=4),
        regularizer=regularizer,
        dual_order=order,
    )
    _compared(problem, toys.TOPOLOGIES[topology], algorithm, seed=2)


@pytest.mark.parametrize("name", REGULARIZERS)
def test_ad_gda_is_its_loop_where_the_projection_puts_weights_to_zero(problem, name):
    weak = toys.of_strength(toys.REGULARIZERS[name], 1e-3)
    algorithm = fm.ADGDA(0.5, dual_step=1.0, consensus_step=0.5, regularizer=weak)
    stack = _compared(problem, fm.Ring(), algorithm)
    assert (stack.duals[-1] == 0).any()


@pytest.mark.parametrize("cap", [0.3, 1.0, 100.0])
def test_ad_gda_is_its_loop_where_the_ascent_sees_clipped_losses(problem, cap):
    _compared(problem, fm.Ring(), fm.ADGDA(1.0, dual_step=0.2, consensus_step=0.5, loss_cap=cap), seed=4)


@pytest.mark.parametrize(
    ("compressor", "topology"),
    [("none", "ring"), ("top-k", "changing"), ("quantize", "ring")],
)
def test_ad_gda_is_its_loop_where_duals_travel_compressed(problem, compressor, topology):
    algorithm = fm.ADGDA(1.0, dual_step=0.1, consensus_step=0.3, dual_compressor=toys.COMPRESSORS[compressor])
    stack = _compared(problem, toys.TOPOLOGIES[topology], algorithm)
    assert len(stack.dual_copies) == ROUNDS


TRACKED = replace(toys.ALGORITHMS["tracked ascent"], weighting=fm.weighting.ProjectedAscent(0.1))
PLAIN = {
    "beta1": 0.0,
    "tracking": False,
    "beta2": 0.0,
    "gradient_at_average": 0.0,
    "local_steps": 1,
    "warm_start": False,
}
FULL = {
    "beta1": 0.6, "tracking": True, "beta2": 0.9, "gradient_at_average": 0.7, "local_steps": 3, "warm_start": True,
    "primal_step": 0.03,
}  # fmt: skip


@covering(
    strength=1,
    weighting={name: toys.WEIGHINGS[name] for name in WEIGHINGS},
    topology=("ring", "changing"),
    regularizer={"chi-square": fm.ChiSquare(0.3), "kl": fm.regularizers.KullbackLeibler(0.5)},
)
def test_tracked_ad_gda_is_its_loop_for_every_way_to_weigh(problem, weighting, topology, regularizer):
    algorithm = replace(TRACKED, weighting=weighting, regularizer=regularizer)
    _compared(problem, toys.TOPOLOGIES[topology], algorithm)


@covering(strength=1, name=FULL.keys(), how=("left out", "alone"))
def test_tracked_ad_gda_is_its_loop_with_each_ingredient_left_out_and_alone(problem, name, how):
    fields = PLAIN | {name: FULL[name]} if how == "alone" else FULL | {name: PLAIN.get(name, FULL[name])}
    _compared(problem, fm.Ring(), replace(TRACKED, **fields), seed=1)


@pytest.mark.parametrize(
    ("compressor", "topology"),
    [
        *(case(compressor, "ring", quick=compressor in ("none", "sign blocks")) for compressor in COMPRESSORS),
        case("quantize", "changing"),
        case("top-k", "star"),
    ],
)
def test_tracked_ad_gda_is_its_loop_for_every_compressor_at_the_rate_it_finds(problem, compressor, topology):
    algorithm = replace(TRACKED, consensus_step=None, primal_step=0.1, compressor=toys.COMPRESSORS[compressor])
    _compared(problem, toys.TOPOLOGIES[topology], algorithm, seed=2)


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        *(case("dsgd", topology, quick=topology in ("ring", "changing")) for topology in toys.TOPOLOGIES),
        case("dr-dsgd", "ring", quick=False),
        case("dr-dsgd", "changing"),
    ],
)
def test_dsgd_and_dr_dsgd_are_their_loops_over_every_topology(problem, name, topology):
    _compared(problem, toys.TOPOLOGIES[topology], toys.ALGORITHMS[name])


@pytest.mark.parametrize("name", ["ad-gda", "choco-sgd"])
def test_ad_gda_and_choco_sgd_with_local_steps_are_their_loops(problem, name):
    _compared(problem, fm.Ring(), replace(toys.ALGORITHMS[name], local_steps=3))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.quick_cases(5)
def test_algorithm_is_its_loop(problem, name):
    _compared(problem, fm.topologies.Star(), toys.ALGORITHMS[name], seed=5)


@pytest.mark.parametrize(
    ("participation", "local_steps"), [case(0.1, 3, quick=False), case(0.4, 1), case(1.0, 2, quick=False)]
)
def test_drfa_is_its_loop_for_any_share_of_clients_and_number_of_local_steps(problem, participation, local_steps):
    algorithm = fm.algorithms.DRFA(0.1, dual_step=0.02, participation=participation, local_steps=local_steps)
    _compared(problem, fm.topologies.Star(), algorithm)


@pytest.mark.parametrize("options", [{"ascends": "error"}, {"probed": "everyone"}, {"floor": 0.05}, {"repeats": False}])
def test_drfa_with_what_the_published_runs_did_is_its_loop(problem, options):
    stack = _compared(problem, fm.topologies.Star(), fm.algorithms.DRFA(0.1, dual_step=0.2, local_steps=2, **options))
    if "floor" in options:
        assert stack.duals[-1].min() > 0.03  # 0.05 before beta2; without the floor some are zero


def test_afl_is_its_loop_when_some_weights_reach_zero(problem):
    stack = _compared(problem, fm.topologies.Star(), fm.algorithms.AFL(0.2, dual_step=0.5))
    assert (stack.duals[-1] == 0).any()


BATCHES = {
    "cyclic": {"sampling": fm.Sampling(batch=6, order="cyclic")},
    "three cyclic batches": {"sampling": fm.Sampling(batch=6, order="cyclic", batches_per_step=3)},
    "three batches": {"sampling": fm.Sampling(batch=4, batches_per_step=3)},
    "full": {"sampling": fm.Sampling(order="full")},
    "full, equal sizes": {"sampling": fm.Sampling(order="full"), "sites": toys.sites(sizes=(20,) * 8)},
    "decay": {"weight_decay": 0.1},
    "clipping": {"clip_norm": 0.2},
    "decay, clipping, two batches": {
        "weight_decay": 0.1,
        "clip_norm": 0.3,
        "sampling": fm.Sampling(batch=4, batches_per_step=2),
    },
    "prior": {"prior": [1, 2, 3, 4, 5, 6, 7, 8]},
}


@some_quick(
    "fields", BATCHES, "three cyclic batches", "full", "full, equal sizes", "decay, clipping, two batches", "prior"
)
@pytest.mark.quick_cases(2)
def test_oracle_draws_batches_decays_and_clips_as_the_loop_does(fields):
    _compared(toys.problem(**fields), fm.Ring(), toys.ALGORITHMS["ad-gda"], seed=3)


@pytest.mark.parametrize("order", ["random", "cyclic"])
def test_oracle_gives_each_call_of_a_round_its_own_batches(order):
    """DRFA asks local_steps + 1 times a round."""
    problem = toys.problem(sampling=fm.Sampling(batch=3, order=order, batches_per_step=2))
    _compared(problem, fm.Ring(), fm.algorithms.DRFA(0.1, dual_step=0.01, local_steps=2))


def test_loop_with_another_seed_is_another_run(problem):
    """So that agreement at equal seeds means that both drew the same."""
    algorithm = toys.ALGORITHMS["ad-gda"]
    loop = REFERENCES[fm.ADGDA](problem, fm.Ring(), algorithm, 5, 0)
    assert apart(loop, on_the_stack(problem, fm.Ring(), algorithm, 5, 1)) > 1e-2


# Flipping a bit ------------------------------------------------------------------------------------------------------

VISIBLE = 10 * AGREED  # a flipped bit shows at least this much, while faithful runs agree to:
FAITHFUL = 1e-12


@pytest.mark.parametrize(
    ("method", "compressor", "topology"),
    [
        *(
            case(fm.ADGDA, compressor, "ring", quick=compressor in ("none", "top-k", "sign"))
            for compressor in COMPRESSORS
        ),
        case(fm.ADGDA, "quantize", "changing"),
        case(fm.ChocoSGD, "quantize", "ring", quick=False),
        case(partial(fm.TrackedADGDA, beta2=0.0, warm_start=False), "quantize", "ring"),
    ],
)
def test_loop_with_one_bit_flipped_in_one_message_differs(problem, method, compressor, topology):
    algorithm = method(0.5, consensus_step=0.2, compressor=toys.COMPRESSORS[compressor])

    def tamper(t, sender, receiver, message):
        return message.with_a_bit_flipped() if (t, sender, receiver) == (0, 3, 4) else message

    graph = toys.TOPOLOGIES[topology]
    (loop, tampered), seed = _looped(problem, graph, algorithm, 0, {}, {"tamper": tamper})
    stack = on_the_stack(problem, graph, algorithm, ROUNDS, seed)
    assert apart(loop, stack) < FAITHFUL
    assert apart(tampered, stack) > VISIBLE
    before = [(a - b) for a, b in zip(tampered.models[:1], stack.models[:1])]
    assert max(abs(difference).max() for difference in before) < FAITHFUL  # and not before it arrived


def test_flipped_bit_changes_a_number_by_no_more_than_one_rounding():
    row = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    for compressor in (toys.COMPRESSORS[name] for name in COMPRESSORS):
        message = reference.compressed(compressor, row, reference.uniforms(0, "compression", 0, 0, 20))
        change = abs(message.with_a_bit_flipped().decode() - message.decode()).max()
        rounded = (getattr(compressor, "norms", ""), getattr(compressor, "values", ""))
        assert 0 < change <= 2 ** (-9 if "float16" in rounded else -22) * abs(message.decode()).max()
