"""Ranks of torch.distributed end where the simulator ends."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fairmesh.networks.cluster import ClusterTransport, _packed, _unpacked, blocks_of
from fairmesh.networks.roles import StateView
from fairmesh.training.loop import Training, TrainingState
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests import toys
from tests.cluster.rank import CASES
from tests.pairwise import case as case_of
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
ONE_OF_EACH_KIND = (
    "algorithm ad-gda compressed duals", "algorithm tracked", "algorithm drfa", "compressor quantize half norms",
    "compressor top-k", "changing graph", "star",
)  # fmt: skip
SETS = {  # ranks, rounds, cases
    "a few cases on two ranks": (
        2,
        8,
        ONE_OF_EACH_KIND,
    ),  # equivalence/test_remote_network.py has all cases, in one process
    "one rank": (1, 30, tuple(CASES)),
    "two ranks": (2, 30, tuple(CASES)),
    "four ranks": (4, 30, tuple(CASES)),
}


problem = functools.cache(toys.problem)


@functools.cache
def simulated(case: str, rounds: int) -> TrainingState:
    topology, algorithm = CASES[case]
    training = Training(problem(), topology, replicas_of([algorithm], [0, 4], None, 8), Options(dtype="float64"))
    state = training.initial()
    for t in range(rounds):
        state = training.advance(state, t)
    return state


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """What each rank of a set ended with."""

    @functools.cache
    def ranks(name: str) -> list[dict]:
        number, rounds, cases = SETS[name]
        folder = tmp_path_factory.mktemp("cluster")
        commands = [
            [sys.executable, "-m", "tests.cluster.rank", str(folder), str(k), str(number), str(rounds), *cases]
            for k in range(number)
        ]
        running = [subprocess.Popen(command, cwd=ROOT) for command in commands]
        assert [process.wait(timeout=300) for process in running] == [0] * number
        return [torch.load(folder / f"rank-{k}.pt") for k in range(number)]

    return ranks


@pytest.mark.parametrize(
    ("name", "case"),
    [
        case_of(name, case, id=f"{name}-{case}", quick=cases is ONE_OF_EACH_KIND)
        for name, (_, _, cases) in SETS.items()
        for case in cases
    ],
)
def test_cluster_ends_where_the_simulator_ends(ended, name, case):
    ranks, expected = ended(name), simulated(case, SETS[name][1])
    for block, end in zip(blocks_of(8, len(ranks)), ranks):
        for name in ("models", "duals"):
            there, alone = end[case][name], getattr(StateView(expected.algorithm), name)(expected.algorithm)
            assert (there is None) == (alone is None)
            if alone is not None:
                mine = alone[:, list(block)] if alone.shape[-2] == 8 else alone
                assert float((there - mine).abs().max()) < 1e-10
        assert torch.equal(end[case]["bytes"], expected.sent.node_bytes[:, list(block)])


def test_blocks_of_nodes_are_even_and_in_order():
    assert [list(block) for block in blocks_of(7, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [len(block) for block in blocks_of(50, 8)] == [7, 7, 6, 6, 6, 6, 6, 6]
    with refused("4 ranks", "3 nodes"):
        blocks_of(3, 4)


def test_packed_text_for_several_receivers_of_a_rank_travels_once():
    texts = [b"first", b"first", b"", b"second", b"second", b"second"]
    assert _unpacked(_packed(texts)) == texts
    assert len(_packed(texts)) == 8 * 6 + len(b"first") + len(b"second")


def test_cluster_transport_without_a_process_group_is_refused():
    with refused("torchrun"):
        ClusterTransport([[0]])
