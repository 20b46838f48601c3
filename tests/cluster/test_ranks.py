"""Ranks of torch.distributed end where the simulator ends."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fairmesh as fm
from fairmesh.networks.cluster import ClusterTransport, _packed, _unpacked, blocks_of
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests import toys
from tests.cluster.rank import CASES, ROUNDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def simulated():
    ends = {}
    problem = toys.problem()
    for case, (topology, algorithm) in CASES.items():
        replicas = replicas_of([algorithm], [0, 4], None, 8)
        training = Training(problem, topology, replicas, Options(dtype="float64"))
        state = training.initial()
        for t in range(ROUNDS):
            state = training.advance(state, t)
        ends[case] = state
    return ends


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["one rank", "two ranks", "four ranks"])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    commands = [
        [sys.executable, "-m", "tests.cluster.rank", str(folder), str(k), str(request.param)]
        for k in range(request.param)
    ]
    running = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    assert [process.wait(timeout=300) for process in running] == [0] * request.param
    return [torch.load(folder / f"rank-{k}.pt") for k in range(request.param)]


@pytest.mark.parametrize("case", CASES)
def test_a_cluster_is_the_simulator(simulated, ranks, case):
    expected = simulated[case]
    for block, end in zip(blocks_of(8, len(ranks)), ranks):
        for name in ("models", "duals"):
            there, alone = end[case][name], getattr(expected.algorithm, name, None)
            assert (there is None) == (alone is None)
            if alone is not None:
                mine = alone[:, list(block)] if alone.shape[-2] == 8 else alone
                assert float((there - mine).abs().max()) < 1e-10
        assert torch.equal(end[case]["bytes"], expected.sent.node_bytes[:, list(block)])


def test_nodes_are_shared_out_evenly_in_their_order():
    assert [list(block) for block in blocks_of(7, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [len(block) for block in blocks_of(50, 8)] == [7, 7, 6, 6, 6, 6, 6, 6]
    with pytest.raises(fm.BadInput, match="4 ranks for 3 nodes"):
        blocks_of(3, 4)


def test_what_goes_to_several_receivers_of_a_rank_travels_once():
    texts = [b"first", b"first", b"", b"second", b"second", b"second"]
    assert _unpacked(_packed(texts)) == texts
    assert len(_packed(texts)) == 8 * 6 + len(b"first") + len(b"second")


def test_without_a_process_group_it_says_how_to_start():
    with pytest.raises(fm.BadInput, match="start with torchrun"):
        ClusterTransport([[0]])
