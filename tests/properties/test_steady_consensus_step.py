"""The consensus step size that Tracked AD-GDA finds for a compressor and a graph: gossip at it is stable."""

import functools
import itertools

import numpy as np
import pytest
import torch

import fairmesh as fm
from fairmesh.algorithms.base import Round
from fairmesh.algorithms.gossip import steady_consensus_step, steady_contraction
from fairmesh.networks.memory import MemoryNetwork
from tests import toys
from tests.equivalence import reference
from tests.equivalence.stack import NoData
from tests.pairwise import case, covering

DIM = 53


def _network(topology: fm.topologies.Topology, n: int) -> MemoryNetwork:
    return MemoryNetwork(topology.build(n), count_bytes=False)


@pytest.mark.parametrize("dim", [1, 7, 5000])
def test_steady_consensus_step_of_the_identity_is_one(dim):
    assert steady_contraction(fm.compressors.Identity(), dim) == 1
    assert steady_consensus_step(fm.compressors.Identity(), dim, _network(fm.Ring(), 8).beta()) == 1


@pytest.mark.parametrize("name", toys.COMPRESSORS)
@pytest.mark.quick_cases(3)
def test_steady_contraction_lies_in_zero_to_one_and_is_the_same_each_time(name):
    compressor = toys.COMPRESSORS[name]
    found = steady_contraction(compressor, DIM)
    steady_contraction.cache_clear()
    assert steady_contraction(compressor, DIM) == found
    assert 0 < found <= 1
    rate = steady_consensus_step(compressor, DIM, _network(fm.Ring(), 8).beta())
    assert 0 < rate <= 1


def test_steady_contraction_is_what_a_loop_over_rounds_finds():
    """The rehearsal spelled out: news of unequal sizes, the message taken away, what is left by its own size."""
    compressor, dim, total = fm.compressors.TopK(0.3), DIM, []

    def normal(purpose: str, t: int) -> np.ndarray:
        uniforms = reference.uniforms(0, purpose, t, 0, 2 * dim)
        return np.sqrt(-2 * np.log(1 - uniforms[:dim])) * np.cos(2 * np.pi * uniforms[dim:])

    sizes, behind = np.exp(0.5 * normal("sizes", 0)), np.zeros(dim)
    for t in range(100):
        behind = behind + sizes * normal("news", t)
        behind = behind - reference.compressed(compressor, behind, np.zeros(dim)).decode()
        total.append(((behind / sizes) ** 2).mean())
    assert steady_contraction(compressor, dim) == pytest.approx(1 / (1 + np.mean(total[50:])), rel=1e-4)


@pytest.mark.parametrize(
    "finer",
    [
        [fm.compressors.TopK(share) for share in (0.9, 0.5, 0.25, 0.1, 0.02)],
        [fm.compressors.RandomK(share) for share in (0.9, 0.5, 0.25, 0.1)],
        [fm.compressors.Quantize(bits) for bits in (16, 8, 4, 2, 1)],
        [fm.compressors.Quantize(4, block=block) for block in (16, 128, 1024)],
        [fm.compressors.Sign(block=block) for block in (1, 8, 64)],
    ],
    ids=lambda finer: f"{type(finer[0]).__name__}",
)
@pytest.mark.quick_cases(2)
def test_steady_contraction_is_smaller_the_more_is_lost(finer):
    found = [steady_contraction(compressor, 1024) for compressor in finer]
    assert found == sorted(found, reverse=True)
    assert found[0] > 1.05 * found[-1]


@pytest.mark.parametrize(
    ("compressor", "lowest", "highest"),
    [
        (fm.compressors.Sign(block=64), 0.68, 0.78),
        (fm.compressors.Quantize(4, block=512), 0.6, 0.85),
        (fm.compressors.Quantize(8, block=512), 0.95, 1.0),
    ],
)
def test_steady_consensus_step_on_the_papers_graph_lies_in_known_ranges(compressor, lowest, highest):
    assert (
        lowest
        < steady_consensus_step(compressor, 7850, _network(fm.topologies.Circulant((1, 2)), 10).beta())
        <= highest
    )


def test_steady_consensus_step_scales_with_how_far_a_graph_moves_its_nodes():
    """||I - W|| of two nodes that swap half is 1, of a lazier pair half that."""
    swap, lazy = (fm.topologies.Matrix(((1 - w, w), (w, 1 - w))) for w in (0.5, 0.25))
    compressor = fm.compressors.Quantize(4)
    rates = [steady_consensus_step(compressor, 10_000, _network(topology, 2).beta()) for topology in (swap, lazy)]
    assert rates[1] == pytest.approx(2 * rates[0], abs=1.5e-3)  # they are rounded
    assert rates[0] == pytest.approx(2 * steady_contraction(compressor, 10_000), abs=1e-3)


def test_steady_consensus_step_of_one_node_is_one():
    assert steady_consensus_step(fm.compressors.TopK(0.01), 100, _network(fm.Ring(), 1).beta()) == 1


@pytest.mark.parametrize("share", [case(share, quick=share == 0.1) for share in (0.05, 0.1, 0.3, 0.5, 0.8)])
def test_steady_consensus_step_of_random_k_keeps_second_moments_from_growing(share):
    """On a complete graph these are a linear map of (x^2, x e, e^2), e = x_hat - x, steady below 2 delta / (2 - delta),
    with delta the share of coordinates that a message holds."""

    def radius(pull: float) -> float:
        x, e = np.array([1 - pull, -pull]), np.array([pull, 1 + pull])  # what each is made of, before it is sent

        def product(a: np.ndarray, b: np.ndarray, kept: float) -> list[float]:
            return [kept * a[0] * b[0], kept * (a[0] * b[1] + a[1] * b[0]), kept * a[1] * b[1]]

        kept = 1 - share
        return float(
            np.abs(np.linalg.eigvals(np.array([product(x, x, 1), product(x, e, kept), product(e, e, kept)]))).max()
        )

    bound = 2 * share / (2 - share)
    assert radius(0.99 * bound) < 1 < radius(1.01 * bound)
    pull = steady_consensus_step(fm.compressors.RandomK(share), 2000, _network(fm.topologies.Complete(), 50).beta())
    assert 0.4 * bound < pull < 0.9 * bound


# Gossip at this rate -------------------------------------------------------------------------------------------------


def _gossiped(
    compressor: fm.compressors.Compressor, topology: fm.topologies.Topology, n: int, dim: int, rounds: int
) -> list[float]:
    """How far nodes are apart after each round of nothing but gossip, in units of how far they were."""
    network = _network(topology, n)
    rows = torch.randn(1, n, dim, generator=torch.Generator().manual_seed(1))
    oracle = NoData(rows)
    rate = steady_consensus_step(compressor, dim, network.beta())
    algorithm = fm.ChocoSGD(0.0, consensus_step=rate, compressor=compressor)
    state, found = algorithm.init(oracle, network), []
    for t in range(rounds):
        state = algorithm.step(state, Round(torch.tensor(t), oracle, network))
        found.append(float((state.models - state.models.mean(dim=-2, keepdim=True)).norm() / rows.norm()))
    return found


@covering(strength=1, compressor=toys.COMPRESSORS.keys(), topology=toys.TOPOLOGIES.keys())
@pytest.mark.quick_cases(3)
def test_steady_consensus_step_lets_gossip_end_in_consensus(compressor, topology):
    found = _gossiped(toys.COMPRESSORS[compressor], toys.TOPOLOGIES[topology], 8, DIM, 300)
    assert max(found) < 2
    floor = 0.05 if compressor == "threshold" else 1e-2  # what is below the threshold stays apart
    assert found[-1] < floor


PAPER = {
    **{f"quantize {bits}": fm.compressors.Quantize(bits) for bits in (16, 8, 4)},
    **{f"top-k {share}": fm.compressors.TopK(share) for share in (0.5, 0.25, 0.1)},
    "sign": fm.compressors.Sign(),
    "sign 64": fm.compressors.Sign(block=64),
    "quantize 4, 512": fm.compressors.Quantize(4, block=512),
}
GRAPHS = {
    "ring of 10": (fm.Ring(), 10),
    "circulant of 10": (fm.topologies.Circulant((1, 2)), 10),
    "circulant of 50": (fm.topologies.Circulant((1, 2)), 50),
    "complete of 10": (fm.topologies.Complete(), 10),
    "torus of 50": (fm.topologies.Torus(5, 10), 50),
}


@functools.cache
def _dim(compressor: str) -> int:
    """A norm over the whole row is the worse the longer the row."""
    return 19_885 if compressor in ("quantize 4", "quantize 8") else 2000


OF_EACH_KIND = {  # those that take a second at most
    ("quantize 4, 512", "complete of 10"),
    ("top-k 0.1", "ring of 10"),
    ("sign", "torus of 50"),
    ("sign 64", "circulant of 10"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compressor", "graph"),
    [case(*pair, quick=pair in OF_EACH_KIND) for pair in itertools.product(PAPER, GRAPHS)],
)
@pytest.mark.quick_cases(1)
def test_steady_consensus_step_does_not_diverge_on_the_papers_settings(compressor, graph):
    topology, n = GRAPHS[graph]
    dim = _dim(compressor)
    found = _gossiped(PAPER[compressor], topology, n, dim, 300 if n * dim < 500_000 else 60)
    assert max(found) < 2
    assert found[-1] < 0.9
