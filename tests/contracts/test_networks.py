"""The network in memory: mixes are products with W in any order of the stack, dense or sparse; a server's sums."""

import numpy as np
import pytest
import scipy.sparse
import torch

import fairmesh as fm
from fairmesh.compression.codes import Dense
from fairmesh.networks import product
from fairmesh.networks.base import Part
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.testing.stacks import stack
from fairmesh.topology.graphs import Mixing
from tests import toys
from tests.contracts.battery import after
from tests.refusals import refused

ORDER = [3, 0, 7, 5, 1, 6, 2, 4]

every_topology = pytest.mark.parametrize("topology", toys.TOPOLOGIES.values(), ids=toys.TOPOLOGIES)


def _rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _weights(mixing: Mixing) -> torch.Tensor:
    return torch.as_tensor(mixing.matrix.toarray())


@every_topology
@pytest.mark.parametrize("order", [(), ORDER], ids=["in order", "mixed up"])
def test_exchange_gives_the_weighted_sum_of_the_neighbours_rows(topology, order):
    cycle = topology.build(8)
    network, rows = MemoryNetwork(cycle, dtype=torch.float64, order=order), _rows(2, 8, 5)
    place = order or list(range(8))
    before = rows.clone()
    for t in range(2 * len(cycle)):
        W = _weights(cycle[t % len(cycle)])[place][:, place]
        part = Part(Dense(rows), 1.0)
        delivery = network.exchange({"model": part}, torch.tensor(t))
        assert float((delivery.mix("model") - W @ rows).abs().max()) < 1e-14
        copies, kept = _rows(2, 8, 5, seed=1), network.copies(rows)
        assert not kept.any()
        kept = network.exchange({"model": Part(Dense(copies), 1.0)}, torch.tensor(t)).follow("model", kept)
        kept = delivery.follow("model", kept)
        known = copies + rows
        now = network.mixed_copies(kept, torch.tensor(t))
        assert float((now - W @ known).abs().max()) < 1e-14
    assert torch.equal(rows, before)


@every_topology
def test_mixing_is_the_same_dense_sparse_and_rolled(topology, monkeypatch):
    rows = _rows(2, 8, 5)
    cycle = topology.build(8)
    dense = MemoryNetwork(cycle, dtype=torch.float64)
    assert dense._product.way == "dense"
    others = _other_ways(monkeypatch, cycle)
    assert {network._product.way for network in others} >= {"neighbours"}
    for t in range(len(cycle)):
        wanted = dense.exchange({"x": Part(Dense(rows), 1.0)}, torch.tensor(t)).mix("x")
        for network in others:
            delivery = network.exchange({"x": Part(Dense(rows), 1.0)}, torch.tensor(t))
            assert float((delivery.mix("x") - wanted).abs().max()) < 1e-14
            onto = network._product(rows, torch.tensor(t), onto=rows.sin())
            assert float((onto - wanted - rows.sin()).abs().max()) < 1e-14


def _other_ways(monkeypatch, cycle) -> list[MemoryNetwork]:
    """The graph mixed by rolling where it can be, neighbour by neighbour, and so that every node with more neighbours
    than usual counts as crowded."""
    monkeypatch.setattr(product, "_DENSE_UP_TO", 0)
    monkeypatch.setattr(product, "_ROLLED_BELOW", 1.0)
    monkeypatch.setattr(product, "_SPARSE_BELOW", 1.0)
    networks = [MemoryNetwork(cycle, dtype=torch.float64)]
    monkeypatch.setattr(product, "_ROLLED_BELOW", 0.0)
    networks.append(MemoryNetwork(cycle, dtype=torch.float64))
    monkeypatch.setattr(product, "_CROWDED", 0)
    return [*networks, MemoryNetwork(cycle, dtype=torch.float64)]


def test_mixing_rolls_where_the_graph_looks_the_same_from_every_node():
    for topology, n in (
        (fm.Ring(), 50),
        (fm.topologies.Torus(5, 10), 50),
        (fm.topologies.Circulant((1, 2)), 50),
        (fm.topologies.Exponential(), 128),
    ):
        assert MemoryNetwork(topology.build(n))._product.way == "rolled"
    for topology, n in (
        (fm.topologies.RandomRegular(4), 50),
        (fm.topologies.Edges(((0, 1), (1, 2))), 3),
        (fm.topologies.Star(), 50),
    ):
        assert MemoryNetwork(topology.build(n))._product.way != "rolled"


@pytest.mark.parametrize("order", [(), list(reversed(range(300)))], ids=["in order", "reversed"])
@pytest.mark.parametrize(
    "topology",
    [
        fm.Ring(),
        fm.topologies.Star(),
        fm.topologies.ErdosRenyi(0.03, seed=1),
        fm.topologies.Torus(15, 20),
        fm.topologies.Edges(tuple((i, i + 1) for i in range(299))),
    ],
    ids=["ring", "star", "erdos-renyi", "torus", "path"],
)
def test_mixing_of_three_hundred_nodes_is_sparse_and_as_w_says(topology, order):
    (mixing,) = topology.build(300)
    network = MemoryNetwork([mixing], dtype=torch.float64, order=order)
    assert network._product.way == ("rolled" if isinstance(topology, fm.Ring | fm.topologies.Torus) else "neighbours")
    rows = _rows(300, 7)
    place = np.array(order or range(300))
    W = scipy.sparse.csr_array(mixing.matrix)[place][:, place]
    got = network.exchange({"x": Part(Dense(rows), 1.0)}, torch.tensor(0)).mix("x")
    assert np.abs(got.numpy() - W @ rows.numpy()).max() < 1e-14


@pytest.mark.parametrize("name", ["ad-gda", "dsgd"])
def test_algorithm_ends_alike_on_the_sparse_and_the_dense_path(name, monkeypatch):
    problem, algorithm = toys.problem(), toys.ALGORITHMS[name]
    dense, _, _ = after(algorithm, *stack(problem, fm.topologies.Star().build(8), algorithm), 5)
    monkeypatch.setattr(product, "_DENSE_UP_TO", 0)
    monkeypatch.setattr(product, "_SPARSE_BELOW", 1.0)
    sparse, _, _ = after(algorithm, *stack(problem, fm.topologies.Star().build(8), algorithm), 5)
    assert float((dense.models - sparse.models).abs().max()) < 1e-12


@pytest.mark.parametrize("order", [(), ORDER], ids=["in order", "mixed up"])
def test_server_operations_find_each_nodes_position(order):
    network = MemoryNetwork(fm.Ring().build(8), dtype=torch.float64, order=order)
    place = torch.tensor(order or list(range(8)))
    values, row = _rows(2, 8, 1), _rows(2, 1, 5, seed=2)
    chosen = torch.tensor([[True, False] * 4, [True, True] + [False] * 6])

    assert torch.equal(network.gather(values)[:, place], values)  # all, in the order of positions

    at_server, sent = network.report(values, chosen)
    assert at_server.shape == (2, 1, 8)
    assert torch.equal(at_server[:, 0][:, place], values.squeeze(-1))
    assert torch.equal(sent.node_bits, 32.0 * chosen.double())

    rows, weights = _rows(2, 8, 5, seed=3), _rows(2, 8, seed=4) * chosen
    total, sent = network.average(rows, weights)
    assert float((total - (weights.unsqueeze(-1) * rows).sum(dim=-2, keepdim=True)).abs().max()) < 1e-14
    assert torch.equal(sent.node_bits, 32.0 * 5 * chosen.double())
    assert not sent.server_bits.any()

    everywhere, sent = network.broadcast(row, chosen)
    assert torch.equal(everywhere, row.expand(2, 8, 5))
    assert torch.equal(sent.server_bits, torch.tensor([4.0, 2.0], dtype=torch.float64) * 32 * 5)
    assert not sent.node_bits.any()


@pytest.mark.parametrize("order", [(), ORDER], ids=["in order", "mixed up"])
def test_network_gives_a_node_its_position_as_its_own_coordinate(order):
    network = MemoryNetwork(fm.Ring().build(8), order=order, identities=[10 + i for i in range(8)])
    place = order or list(range(8))
    assert network.hosted.tolist() == place
    assert network.own.argmax(dim=-1).tolist() == place
    assert network.identities.tolist() == [10 + i for i in place]
    assert (network.own.sum(dim=-1) == 1).all()


def test_network_refuses_an_order_or_identities_that_do_not_name_the_nodes():
    with refused("order", 8):
        MemoryNetwork(fm.Ring().build(8), order=[0] * 8)
    with refused("identities", 8):
        MemoryNetwork(fm.Ring().build(8), identities=[1] * 8)
    with refused("identities", 8):
        MemoryNetwork(fm.Ring().build(8), identities=range(7))
