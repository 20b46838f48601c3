"""One rank of a cluster, started by tests: `python -m tests.cluster.rank FOLDER RANK RANKS CASE`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import fairmesh as fm
from fairmesh.algorithms.base import Round
from fairmesh.networks.cluster import ClusterTransport, blocks_of
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.problems.oracle import Oracle
from tests import toys

ROUNDS = 30
CASES = {
    **{f"algorithm {name}": (fm.Ring(), algorithm) for name, algorithm in toys.ALGORITHMS.items()},
    **{
        f"compressor {name}": (fm.topologies.Circulant((1, 2)), fm.ADGDA(0.3, 0.02, 0.2, compressor))
        for name, compressor in toys.COMPRESSORS.items()
    },
    "changing graph": (toys.TOPOLOGIES["changing"], toys.ALGORITHMS["ad-gda"]),
    "star": (fm.topologies.Star(), toys.ALGORITHMS["dsgd"]),
}


def main(folder: Path, rank: int, ranks: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks)
    blocks = blocks_of(8, ranks)
    problem, ends, oracles = toys.problem(), {}, {}
    for case, (topology, algorithm) in CASES.items():
        network = RemoteNetwork(topology.build(8), blocks[rank], ClusterTransport(blocks), dtype=torch.float64)
        calls = algorithm.oracle_calls()
        if calls not in oracles:  # recording the gradients takes longer than the rounds
            oracles[calls] = Oracle(
                problem, network.hosted, network.identities, seeds=[0, 4], calls_per_round=calls, dtype=torch.float64
            )
        oracle = oracles[calls]
        state, sent = algorithm.init(oracle, network), torch.zeros(2, len(blocks[rank]), dtype=torch.float64)
        for t in range(ROUNDS):
            round = Round(torch.tensor(t), oracle, network)
            state = algorithm.step(state, round)
            sent = sent + sum(traffic.node_bytes for traffic in round.sent)
        ends[case] = {"models": state.models, "duals": getattr(state, "duals", None), "bytes": sent}
    torch.save(ends, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
