"""The paper's billing, by hand: b bits per parameter, 32 per dual entry or uncompressed number, times the degree."""

import numpy as np
import pytest
import torch

import fairmesh as fm
from fairmesh.testing.stacks import stack
from tests import toys
from tests.contracts.battery import after

DIM, N, ROUNDS = 53, 8, 6

BITS_OF_A_MODEL = {  # one message of 53 parameters
    "none": 32 * 53,
    "half": 16 * 53,
    "threshold": 32 * 53,  # billed as if all were sent
    "quantize half norms": 4 * 53,
    "quantize": 4 * 53,
    "quantize blocks": 3 * 53,
    "quantize ceil": 4 * 53,
    "top-k": 32 * 16,  # K = round(0.3 * 53)
    "top-k half": 16 * 16,
    "random-k": 32 * 16,
    "sign": 53,
    "sign blocks": 53,
    "top-k-quantize": 4 * 21,  # K = round(0.4 * 53)
}

DEGREES = {  # how many neighbours nodes 0..7 have, drawn on paper
    "ring": [2] * 8,
    "torus": [3] * 8,  # of two rows: up and down are the same node
    "circulant": [4] * 8,
    "complete": [7] * 8,
    "star": [7] + [1] * 7,
    "hypercube": [3] * 8,
    "exponential": [5] * 8,  # +-1, +-2, 4 = -4
    "random-regular": [3] * 8,
    "edges": [2, 2, 2, 2, 3, 2, 2, 1],
    "matrix": [7] * 8,
}


@pytest.fixture(scope="module")
def problem() -> fm.Problem:
    made = toys.problem()
    assert (made.flat_model.dim, made.n) == (DIM, N)
    return made


def _sent(
    problem: fm.Problem,
    topology: fm.topologies.Topology,
    algorithm: fm.algorithms.Algorithm,
    rounds: int = ROUNDS,
    seeds=(0,),
):
    _, nodes, server = after(algorithm, *stack(problem, topology.build(N), algorithm, seeds=seeds), rounds)
    return nodes.numpy(), server.numpy()


def _degrees(name: str) -> np.ndarray:
    if name == "erdos-renyi":  # drawn at random: read off the picture
        import networkx

        graph = networkx.fast_gnp_random_graph(N, 0.5, seed=3)
        assert networkx.is_connected(graph)
        return np.array([graph.degree[i] for i in range(N)])
    return np.array(DEGREES[name])


FIXED = [name for name in toys.TOPOLOGIES if name != "changing"]


def test_tables_of_bits_hold_every_compressor_topology_and_weighting():
    assert BITS_OF_A_MODEL.keys() == toys.COMPRESSORS.keys()
    assert BITS_OF_A_WEIGHING.keys() == toys.WEIGHINGS.keys()
    assert {*DEGREES, "erdos-renyi", "changing"} == toys.TOPOLOGIES.keys()


@pytest.mark.parametrize("topology", FIXED)
def test_ad_gda_sends_its_degree_times_b_d_and_32_n_each_round(problem, topology):
    nodes, server = _sent(problem, toys.TOPOLOGIES[topology], toys.ALGORITHMS["ad-gda"])
    assert (nodes[0] == ROUNDS * _degrees(topology) * (4 * DIM + 32 * N)).all()
    assert server.sum() == 0


@pytest.mark.parametrize("compressor", toys.COMPRESSORS)
def test_compressor_bills_its_own_bits(problem, compressor):
    used = toys.COMPRESSORS[compressor]
    nodes, _ = _sent(problem, fm.topologies.Star(), fm.ADGDA(1.0, consensus_step=0.2, compressor=used), 2)
    assert (nodes[0] == 2 * _degrees("star") * (BITS_OF_A_MODEL[compressor] + 32 * N)).all()
    nodes, _ = _sent(problem, fm.topologies.Star(), fm.ChocoSGD(0.1, consensus_step=0.2, compressor=used), 2)
    assert (nodes[0] == 2 * _degrees("star") * BITS_OF_A_MODEL[compressor]).all()


BITS_OF_A_WEIGHING = {  # one message
    "ascent": 32 * 8,
    "ascent, duals compressed": 32 * 8,  # billed as if all were sent
    "maximum": 32 * 8,
    "maximum, losses compressed": 8 * 8,
    "price": 2 * 32,  # and the mean of the losses
    "price, losses as they are": 32,
    "fixed": 0,
}


@pytest.mark.parametrize("weighting", toys.WEIGHINGS)
@pytest.mark.parametrize("tracking", [True, False])
def test_tracked_ad_gda_sends_model_tracker_and_what_its_weighting_needs(problem, weighting, tracking):
    algorithm = fm.TrackedADGDA(
        0.01, tracking=tracking, weighting=toys.WEIGHINGS[weighting], compressor=fm.compressors.Quantize(4)
    )
    nodes, server = _sent(problem, fm.topologies.Star(), algorithm)
    message = (2 if tracking else 1) * 4 * DIM + BITS_OF_A_WEIGHING[weighting]
    assert (nodes[0] == ROUNDS * _degrees("star") * message).all()
    assert server.sum() == 0


def test_warm_start_costs_nothing(problem):
    sent = [_sent(problem, fm.Ring(), fm.TrackedADGDA(0.01, warm_start=warm))[0] for warm in (True, False)]
    assert (sent[0] == sent[1]).all()


@pytest.mark.parametrize("name", ["dsgd", "dr-dsgd"])
@pytest.mark.parametrize("topology", ["ring", "star"])
def test_dsgd_and_dr_dsgd_send_32_bits_per_parameter_to_each_neighbour(problem, name, topology):
    nodes, server = _sent(problem, toys.TOPOLOGIES[topology], toys.ALGORITHMS[name])
    assert (nodes[0] == ROUNDS * _degrees(topology) * 32 * DIM).all()
    assert server.sum() == 0


def test_changing_graph_takes_differences_to_all_neighbours_and_duals_to_those_of_the_round(problem):
    """Ring, then the pairs 0-4 1-5 2-6 3-7, then the star of node 0: together 0 meets all, the others their two on the
    ring, their partner, and 0, who is one of those already for 1, 4 and 7."""
    ever = np.array([7, 3, 4, 4, 3, 4, 4, 3])
    ring, pairs, star = np.array([2] * 8), np.array([1] * 8), np.array([7] + [1] * 7)
    nodes, _ = _sent(problem, toys.TOPOLOGIES["changing"], toys.ALGORITHMS["ad-gda"], 6)
    assert (nodes[0] == 6 * ever * 4 * DIM + 2 * (ring + pairs + star) * 32 * N).all()
    nodes, _ = _sent(problem, toys.TOPOLOGIES["changing"], toys.ALGORITHMS["dsgd"], 6)
    assert (nodes[0] == 2 * (ring + pairs + star) * 32 * DIM).all()


def test_drfa_sends_model_and_snapshot_both_ways_and_one_number_per_probed_client(problem):
    """All clients drawn for the probe; how many different ones are drawn by lambda is read from what they sent."""
    nodes, server = _sent(
        problem, fm.topologies.Star(), fm.algorithms.DRFA(0.1, participation=0.5, local_steps=2), 1, seeds=range(20)
    )
    back = 2 * 32 * DIM
    returned, probed = nodes // back, nodes % back
    assert set(np.unique(returned)) == {0, 1}
    assert set(np.unique(probed)) == {0, 32}
    assert (probed.sum(axis=1) == 4 * 32).all()  # half of 8, without replacement
    drawn = returned.sum(axis=1)  # half of 8, with replacement
    assert drawn.min() >= 1
    assert drawn.max() == 4
    assert (server == 32 * DIM * (drawn + 4)).all()


def test_afl_sends_the_model_to_all_and_gets_gradient_and_loss_from_all(problem):
    nodes, server = _sent(problem, fm.topologies.Star(), toys.ALGORITHMS["afl"])
    assert (nodes == ROUNDS * (32 * DIM + 32)).all()
    assert (server == ROUNDS * N * 32 * DIM).all()


@pytest.mark.parametrize("name", ["ad-gda", "afl"])
def test_record_names_the_busiest_and_the_total(problem, name):
    record = fm.train(problem, fm.topologies.Star(), toys.ALGORITHMS[name], 5, measure_every=5).final[0]
    message = 4 * DIM + 32 * N
    busiest, total = {
        "ad-gda": (5 * 7 * message, 5 * 14 * message),
        "afl": (5 * 8 * 32 * DIM, 5 * 8 * (2 * 32 * DIM + 32)),
    }[name]
    assert record["nominal_bits_busiest"] == busiest
    assert record["nominal_bits_total"] == total


def test_quantize_bills_fashion_mnist_as_the_paper_does(problem):
    """4 bits a parameter over 5000 rounds: 20,000 billed bits per parameter and edge, and 32 per dual entry."""
    assert fm.compressors.Quantize(bits=4).nominal_bits(19_885) * 5000 == 20_000 * 19_885
    nodes, _ = _sent(
        problem,
        fm.topologies.Circulant((1, 2)),
        fm.ADGDA(1.0, consensus_step=0.2, compressor=fm.compressors.Quantize(bits=4)),
        1,
    )
    assert torch.equal(torch.as_tensor(nodes), torch.full((1, 8), 4.0 * (4 * DIM + 32 * N), dtype=torch.float64))
