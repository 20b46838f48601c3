"""Clipped gossip: a neighbour that sends anything moves a node no further than its honest neighbours do."""

import pytest
import torch

import fairmesh as fm
from fairmesh.algorithms.base import Round
from fairmesh.algorithms.gossip import PublicCopies, disagreement
from fairmesh.mesh.enrol.roster import Member, Mesh
from fairmesh.mesh.node.states import cycle_of
from fairmesh.mesh.wire.transport import MeshProcess
from fairmesh.networks.clipping import clipped_weights
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.topology.mixing import with_liars
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests import toys
from tests.refusals import refused


class _Nobody:
    """A transport over which nothing is sent."""

    process_group = MeshProcess()


GRAPH = fm.topologies.Circulant((1, 2))


def test_radius_is_that_of_the_paper_with_the_farthest_neighbour_as_the_liar():
    weights = torch.tensor([0.2, 0.2, 0.3, 0.3, 0.0])  # itself, three neighbours, and a stranger
    distances = torch.tensor([0.0, 1.0, 2.0, 100.0, 1e6])
    radius = ((0.2 * 1 + 0.3 * 4) / 0.3) ** 0.5
    found = clipped_weights(weights, distances, liars=1)
    assert torch.allclose(found, torch.tensor([0.2, 0.2, 0.3, 0.3 * radius / 100, 0.0]))


def test_copies_that_agree_are_not_clipped():
    weights, nothing = torch.tensor([[0.4, 0.3, 0.3]]), torch.zeros(2, 1, 3)
    assert torch.equal(clipped_weights(weights, nothing, 1), weights.expand(2, 1, 3))


def _moved(network, copies, kept):
    return disagreement(PublicCopies(copies, kept), _Context(network))


class _Context(Round):
    def __init__(self, network):
        self._network, self.index = network, torch.tensor(0)


def _copies():
    return torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e9])
def test_liar_moves_its_neighbours_by_a_bounded_distance_however_far_away_it_is(size):
    network = MemoryNetwork(with_liars(GRAPH.build(8), 1), dtype=torch.float64)
    copies = _copies()
    copies[:, 3] = size
    found = _moved(network, copies, copies)
    honest = [0, 1, 2, 4, 5, 6, 7]
    assert float(found[:, honest].norm(dim=-1).max()) < 10
    assert float((network.mixed_copies(copies, torch.tensor(0)) - copies)[:, 2].norm(dim=-1).max()) >= 0.1 * size


def test_each_node_of_a_mesh_clips_as_the_simulation_does():
    cycle, copies = with_liars(GRAPH.build(8), 1), _copies()
    expected = _moved(MemoryNetwork(cycle, dtype=torch.float64), copies, copies)
    for node in range(8):
        network = RemoteNetwork(cycle, [node], _Nobody(), dtype=torch.float64)  # type: ignore[arg-type]
        others = network.kept_of[0]
        found = _moved(network, copies[:, [node]], copies[:, others].unsqueeze(1))
        assert float((found - expected[:, [node]]).abs().max()) < 1e-12


def test_gossip_is_as_before_if_nobody_may_lie():
    plain, told = (
        Training(toys.problem(), GRAPH, replicas_of([toys.ALGORITHMS["tracked"]], [0], None, 8), options)
        for options in (Options(dtype="float64"), Options(dtype="float64", lying_neighbours=0))
    )
    states = [training.advance(training.initial(), 0) for training in (plain, told)]
    assert torch.equal(states[0].algorithm.models, states[1].algorithm.models)
    assert plain.network.liars == 0
    assert "lying_neighbours" not in plain.identity()["options"]


@pytest.mark.parametrize("name", ["ad-gda", "choco-sgd", "tracked"])
def test_runs_with_clipped_gossip_learn_and_say_so_in_their_identity(name):
    found = fm.train(
        toys.problem(), GRAPH, toys.ALGORITHMS[name], 40, dtype="float64", lying_neighbours=1, measure_every=40
    )
    first, last = (record["loss"]["mean"] for record in found.records)
    assert last < first


def test_graph_and_algorithm_that_cannot_be_clipped_are_refused():
    with refused("lying_neighbours", "2 neighbours"):
        fm.train(toys.problem(), fm.Ring(), toys.ALGORITHMS["ad-gda"], 1, lying_neighbours=2)
    with refused("lying_neighbours", "DSGD", "ad-gda"):
        fm.train(toys.problem(), GRAPH, toys.ALGORITHMS["dsgd"], 1, lying_neighbours=1)
    with refused("lying_neighbours", "-1"):
        Options(lying_neighbours=-1)


def test_after_a_removal_each_site_has_one_neighbour_that_does_not_lie():
    names = [f"site-{i}" for i in range(6)]
    mesh = Mesh("six", tuple(Member(one, f"{one}:1", tuple(set(names) - {one})) for one in names))
    assert [m.liars for m in cycle_of(fm.Ring(), mesh, 1)] == [1]
    assert [m.liars for m in cycle_of(fm.Ring(), mesh.without("site-5"), 1)] == [0]  # a line: its ends have one
    assert [m.liars for m in cycle_of(GRAPH, mesh.without("site-5"), 1)] == [1]
