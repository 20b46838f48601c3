"""A network whose nodes live in several processes is the simulator, message by message."""

import dataclasses
import math

import pytest
import torch

import fairmesh as fm
from fairmesh.algorithms.base import plain
from fairmesh.compression import DecodeError, encode
from fairmesh.compression.codes import Dense
from fairmesh.networks.base import Part
from fairmesh.networks.bounds import Bounds
from fairmesh.networks.memory import SingleProcess
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.networks.roles import StateView
from fairmesh.networks.transport import Transport
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests import toys
from tests.equivalence.hosts import on_hosts
from tests.pairwise import case, covering
from tests.refusals import refused

ROUNDS = 12
BLOCKS = {
    "one": [range(8)],
    "two": [range(4), range(4, 8)],
    "four, uneven": [[0], [1, 2, 3], [4, 5, 6], [7]],
    "each its own": [[i] for i in range(8)],
    "mixed up": [[5, 0, 3], [7, 2], [1, 6, 4]],
}


@pytest.fixture(scope="module")
def problem():
    return toys.problem()


def simulated(problem, topology, algorithm, seeds=(0,), rounds=ROUNDS):
    training = Training(problem, topology, replicas_of([algorithm], seeds, None, problem.n), Options(dtype="float64"))
    state = training.initial()
    for t in range(rounds):
        state = training.advance(state, t)
    return state


def compared(problem, topology, algorithm, blocks, seeds=(0,), each_copy=False, rounds=ROUNDS):
    alone = simulated(problem, topology, algorithm, seeds, rounds)
    states, sent, post, _ = on_hosts(problem, topology, algorithm, rounds, blocks, seeds=seeds, each_copy=each_copy)
    view = StateView(alone.algorithm)
    for name in ("models", "duals"):
        expected = getattr(view, name)(alone.algorithm)
        if expected is None:
            continue
        for state, block in zip(states, blocks):
            there = getattr(view, name)(state)
            mine = expected[:, list(block)] if expected.shape[-2] == problem.n else expected
            assert there.shape == mine.shape
            assert float((there - mine).abs().max()) < 1e-10
    for ours, theirs in zip(sent, alone.sent):
        assert torch.equal(ours, theirs)
    return post


@covering(strength=1, blocks=BLOCKS.keys(), each_copy={"a copy of each neighbour": True, "one mixed row": False})
@pytest.mark.quick_cases(2)
def test_remote_network_gives_the_same_whoever_hosts_whom(problem, blocks, each_copy):
    algorithm = toys.ALGORITHMS["ad-gda"]
    compared(problem, fm.topologies.Circulant((1, 2)), algorithm, BLOCKS[blocks], each_copy=each_copy)


@pytest.mark.parametrize("name", toys.COMPRESSORS)
@pytest.mark.quick_cases(5)
def test_remote_network_carries_every_compressor(problem, name):
    algorithm = fm.ADGDA(0.3, 0.02, 0.2, toys.COMPRESSORS[name])
    compared(problem, toys.TOPOLOGIES["ring"], algorithm, BLOCKS["two"])


@covering(strength=1, topology=toys.TOPOLOGIES, algorithm=("ad-gda", "dsgd"))
@pytest.mark.quick_cases(5)
def test_remote_network_follows_every_topology(problem, topology, algorithm):
    compared(problem, topology, toys.ALGORITHMS[algorithm], BLOCKS["mixed up"])


def test_remote_network_keeps_messages_within_a_host(problem):
    assert compared(problem, fm.Ring(), toys.ALGORITHMS["ad-gda"], BLOCKS["one"]).bytes_carried == 0
    edges_across = 2 * 2  # of a ring cut in two, in both directions
    post = compared(problem, fm.Ring(), toys.ALGORITHMS["ad-gda"], BLOCKS["two"])
    assert len(post.letters) == ROUNDS * edges_across


@pytest.mark.parametrize("hosted", [[], [0, 0], [9]])
def test_remote_network_refuses_blocks_that_name_no_node(hosted):
    with refused("hosted"):
        RemoteNetwork(fm.Ring().build(8), hosted, None)  # type: ignore[arg-type]


class Attacked(Transport):
    """A transport over which every neighbour sends the same parts."""

    process_group = SingleProcess()

    def __init__(self, **parts):
        self.parts = {name: Dense(torch.tensor([row])) for name, row in parts.items()}

    def exchange(self, round_index, outgoing, expected, read):
        message = encode(self.parts, round_index)
        return lambda: {edge: read(edge, message) for edge in expected}


def bounded(transport):
    return RemoteNetwork(fm.Ring().build(3), [0], transport, each_copy=True, bounds=Bounds())


@pytest.mark.parametrize("value", [3.4e38, math.inf, math.nan, -1e16, 2000.0])
def test_bounded_network_refuses_numbers_that_no_training_sends(value):
    delivery = bounded(Attacked(model=[1.0, value])).exchange({"model": plain(torch.zeros(1, 1, 2))}, torch.tensor(0))
    with refused("model", error=DecodeError):
        delivery.mix("model")


@pytest.mark.parametrize(
    ("own", "own_copy", "their_copy", "accepted"),
    [
        (0.0, 0.0, 0.0, 1e3),  # whatever this node has, numbers of a common size are accepted
        (50.0, 0.0, 0.0, 5e4),  # its own difference
        (0.0, 50.0, 0.0, 5e4),  # its own model
        (0.0, 0.0, 50.0, 5e4),  # what the neighbour sent before
        (0.0, 0.0, 9e14, 1e14),  # copies stay finite
    ],
)
def test_bound_follows_this_nodes_own_numbers_and_what_the_neighbour_sent_before(own, own_copy, their_copy, accepted):
    kept = torch.tensor([own_copy, their_copy, their_copy]).reshape(1, 1, 3, 1)
    part = Part(Dense(torch.full((1, 1, 1), own)), 32.0, followed=True, kept=kept)
    for size in (0.99 * accepted, -0.99 * accepted):
        delivery = bounded(Attacked(model=[size])).exchange({"model": part}, torch.tensor(0))
        assert torch.allclose(delivery.follow("model", kept)[0, 0, 1], kept[0, 0, 1] + size)
    delivery = bounded(Attacked(model=[1.01 * accepted])).exchange({"model": part}, torch.tensor(0))
    with refused("model", "limit", error=DecodeError):
        delivery.follow("model", kept)


@pytest.mark.parametrize(
    ("row", "sound"),
    [
        ([0.2, 0.3, 0.5], True),
        ([0.0, 1.0, 0.0], True),
        ([0.2, 0.3, 0.6], False),
        ([-0.1, 0.5, 0.6], False),
        ([math.nan, 0.5, 0.5], False),
        ([0.0, 0.0, 0.0], False),
    ],
)
def test_weights_off_the_simplex_are_refused(row, sound):
    part = plain(torch.full((1, 1, 3), 1 / 3), "weights")
    delivery = bounded(Attacked(dual=row)).exchange({"dual": part}, torch.tensor(0))
    if sound:
        assert torch.allclose(delivery.mix("dual").sum(), torch.tensor(1.0))
    else:
        with refused("dual", error=DecodeError):
            delivery.mix("dual")


@pytest.mark.parametrize(("difference", "sound"), [([0.1, -0.2, 0.1], True), ([0.0, 1.3, 0.0], False)])
def test_copy_of_compressed_weights_stays_near_weights(difference, sound):
    kept = torch.full((1, 1, 3, 3), 1 / 3)
    part = Part(Dense(torch.zeros(1, 1, 3)), 96.0, followed=True, kept=kept, content="weights")
    delivery = bounded(Attacked(dual=difference)).exchange({"dual": part}, torch.tensor(0))
    if sound:
        delivery.follow("dual", kept)
    else:
        with refused("dual", "weights", error=DecodeError):
            delivery.follow("dual", kept)


@pytest.mark.parametrize("by", [case(0.0, quick=False), 100.0])
@pytest.mark.parametrize(
    "name",
    [*(case(one, quick=False) for one in ("tracked maximum", "choco-sgd", "ad-gda compressed duals")), "tracked"],
)
def test_unusual_but_honest_sites_are_not_refused(problem, name, by):
    """One site's inputs have another unit, or are all zero; sites have very unequal sizes."""
    sites = list(problem.sites)
    scaled = fm.data.Samples(sites[2].train.inputs * by, sites[2].train.targets)
    sites[2] = dataclasses.replace(sites[2], train=scaled)
    uneven = toys.problem(sites=sites, prior=(1e-4, *[1.0] * 6, 100.0))
    algorithm = toys.ALGORITHMS[name]
    states, *_ = on_hosts(uneven, fm.Ring(), algorithm, ROUNDS, BLOCKS["each its own"], each_copy=True)
    assert all(torch.isfinite(state.models).all() for state in states)
