"""One rank of a cluster, started by tests: `python -m tests.cluster.rank FOLDER RANK RANKS`."""

import functools
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

import fairmesh as fm
from fairmesh.algorithms.base import Round
from fairmesh.networks.cluster import ClusterTransport, blocks_of
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.networks.roles import StateView
from fairmesh.problems.oracle import Oracle
from fairmesh.training.loop import Training, TrainingState
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests import toys

CASES = {
    **{f"algorithm {name}": (fm.Ring(), algorithm) for name, algorithm in toys.ALGORITHMS.items()},
    **{
        f"compressor {name}": (fm.topologies.Circulant((1, 2)), fm.ADGDA(0.3, 0.02, 0.2, compressor))
        for name, compressor in toys.COMPRESSORS.items()
    },
    "changing graph": (toys.TOPOLOGIES["changing"], toys.ALGORITHMS["ad-gda"]),
    "star": (fm.topologies.Star(), toys.ALGORITHMS["dsgd"]),
}


ONE_OF_EACH_KIND = (  # equivalence/test_remote_network.py has all cases, in one process
    "algorithm ad-gda compressed duals", "algorithm tracked", "algorithm drfa", "compressor quantize half norms",
    "compressor top-k", "changing graph", "star",
)  # fmt: skip
problem = functools.cache(toys.problem)


def run_cases(folder: Path, rank: int, ranks: int, rounds: int, cases: Iterable[str]) -> None:
    """Runs the cases at one of several ranks and saves how they ended there."""
    blocks = blocks_of(8, ranks)
    ends, oracles = {}, {}
    for case in cases:
        topology, algorithm = CASES[case]
        network = RemoteNetwork(topology.build(8), blocks[rank], ClusterTransport(blocks), dtype=torch.float64)
        calls = algorithm.oracle_calls()
        if calls not in oracles:  # recording the gradients takes longer than the rounds
            oracles[calls] = Oracle(
                problem(), network.hosted, network.identities, seeds=[0, 4], calls_per_round=calls, dtype=torch.float64
            )
        oracle = oracles[calls]
        state, sent = algorithm.init(oracle, network), torch.zeros(2, len(blocks[rank]), dtype=torch.float64)
        for t in range(rounds):
            round = Round(torch.tensor(t), oracle, network)
            state = algorithm.step(state, round)
            sent = sent + sum(traffic.node_bytes for traffic in round.sent)
        ends[case] = {"models": state.models, "duals": StateView(state).duals(state), "bytes": sent}
    torch.save(ends, folder / f"rank-{rank}.pt")


@functools.cache
def simulated(case: str, rounds: int) -> TrainingState:
    topology, algorithm = CASES[case]
    training = Training(problem(), topology, replicas_of([algorithm], [0, 4], None, 8), Options(dtype="float64"))
    state = training.initial()
    for t in range(rounds):
        state = training.advance(state, t)
    return state


def check_case(folder: Path, ranks: int, rounds: int, case: str) -> None:
    """Asserts that a case ended at every rank where the simulator ends, with as many bytes sent."""
    expected = simulated(case, rounds)
    for rank, block in enumerate(blocks_of(8, ranks)):
        end = torch.load(folder / f"rank-{rank}.pt")[case]
        for name in ("models", "duals"):
            there, alone = end[name], getattr(StateView(expected.algorithm), name)(expected.algorithm)
            assert (there is None) == (alone is None)
            if alone is not None:
                mine = alone[:, list(block)] if alone.shape[-2] == 8 else alone
                assert float((there - mine).abs().max()) < 1e-10
        assert torch.equal(end["bytes"], expected.sent.node_bytes[:, list(block)])


if __name__ == "__main__":
    home, own, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{home / 'meeting'}", rank=own, world_size=count)
    run_cases(home, own, count, 30, CASES)
    dist.destroy_process_group()
