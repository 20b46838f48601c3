"""A network whose nodes live at several process_group is the simulator, message by message."""

import pytest
import torch

import fairmesh as fm
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests import toys
from tests.equivalence.hosts import on_hosts

ROUNDS = 30
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
    states, sent, post = on_hosts(problem, topology, algorithm, rounds, blocks, seeds=seeds, each_copy=each_copy)
    for name in ("models", "duals"):
        expected = getattr(alone.algorithm, name, None)
        if expected is None:
            continue
        for state, block in zip(states, blocks):
            there = getattr(state, name)
            mine = expected[:, list(block)] if expected.shape[-2] == problem.n else expected
            assert there.shape == mine.shape
            assert float((there - mine).abs().max()) < 1e-10
    for ours, theirs in zip(sent, alone.sent):
        assert torch.equal(ours, theirs)
    return post


@pytest.mark.parametrize("name", toys.ALGORITHMS)
def test_every_algorithm_ends_as_in_the_simulator_with_the_same_bytes_sent(problem, name):
    compared(problem, toys.TOPOLOGIES["ring"], toys.ALGORITHMS[name], BLOCKS["four, uneven"])


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("each_copy", [True, False], ids=["a copy of each neighbour", "one mixed row"])
def test_it_does_not_matter_who_hosts_whom_or_how_copies_are_kept(problem, blocks, each_copy):
    algorithm = toys.ALGORITHMS["ad-gda"]
    compared(problem, fm.topologies.Circulant((1, 2)), algorithm, BLOCKS[blocks], each_copy=each_copy)


@pytest.mark.parametrize("name", toys.COMPRESSORS)
def test_every_compressor_travels_and_arrives_as_it_was(problem, name):
    algorithm = fm.ADGDA(0.3, 0.02, 0.2, toys.COMPRESSORS[name])
    compared(problem, toys.TOPOLOGIES["ring"], algorithm, BLOCKS["two"])


@pytest.mark.parametrize("name", toys.TOPOLOGIES)
def test_every_topology_also_one_that_changes(problem, name):
    for algorithm in ("ad-gda", "dsgd"):
        compared(problem, toys.TOPOLOGIES[name], toys.ALGORITHMS[algorithm], BLOCKS["mixed up"], rounds=12)


def test_replicas_travel_together(problem):
    compared(problem, fm.Ring(), toys.ALGORITHMS["ad-gda"], BLOCKS["two"], seeds=(0, 3, 5))


def test_messages_between_nodes_of_one_host_never_leave_it(problem):
    assert compared(problem, fm.Ring(), toys.ALGORITHMS["ad-gda"], BLOCKS["one"]).bytes_carried == 0
    edges_across = 2 * 2  # of a ring cut in two, in both directions
    post = compared(problem, fm.Ring(), toys.ALGORITHMS["ad-gda"], BLOCKS["two"])
    assert len(post.letters) == ROUNDS * edges_across


@pytest.mark.parametrize(
    ("hosted", "reason"), [([], "hosted must name"), ([0, 0], "hosted must name"), ([9], "hosted must name")]
)
def test_blocks_that_make_no_sense_are_refused(hosted, reason):
    from fairmesh.networks.remote import RemoteNetwork

    with pytest.raises(fm.BadInput, match=reason):
        RemoteNetwork(fm.Ring().build(8), hosted, None)  # type: ignore[arg-type]
