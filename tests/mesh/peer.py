"""Nodes of a mesh as processes that run one case after the other over real streams:
`python -m tests.mesh.peer FOLDER CASE ...`."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import fairmesh as fm
from fairmesh.algorithms.base import Round
from fairmesh.mesh.enrol.roster import Mesh
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.mesh.wire.connections import TlsCarrier
from fairmesh.mesh.wire.journal import Journal
from fairmesh.mesh.wire.links import Credentials, Links, Neighbour
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.mesh.wire.transport import FIRST_ROUND, PeerTransport
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.networks.roles import StateView
from fairmesh.problems.oracle import Oracle
from tests import toys
from tests.mesh import fleet
from tests.mesh.credentials import terms_of

ROUNDS = 30
NAMES = [f"site-{i}" for i in range(8)]
CASES = {
    **{
        f"algorithm {name}": (fm.topologies.Circulant((1, 2)), algorithm)
        for name, algorithm in toys.ALGORITHMS.items()
        if not algorithm.needs_server and algorithm.sends
    },
    **{
        f"compressor {name}": (fm.topologies.Circulant((1, 2)), fm.ADGDA(0.3, 0.02, 0.2, compressor))
        for name, compressor in toys.COMPRESSORS.items()
    },
    "changing graph": (
        fm.topologies.Changing((fm.Ring(), fm.topologies.Circulant((2,)), fm.topologies.Circulant((1, 2)))),
        toys.ALGORITHMS["ad-gda"],
    ),
    "changing graph, nothing followed": (
        fm.topologies.Changing((fm.Ring(), fm.topologies.Circulant((2,)))),
        toys.ALGORITHMS["dsgd"],
    ),
}
ONE_OF_EACH_KIND = (  # equivalence/test_remote_network.py has all cases, in one process
    "algorithm ad-gda compressed duals", "algorithm tracked", "compressor top-k", "changing graph",
)  # fmt: skip
EXPERIMENT = """
rounds = 30
data = "digits"
topology = { name = "circulant", offsets = [1, 2] }
algorithm = { name = "ad-gda", primal_step = { name = "linear", start = 6.0 } }
"""


def said(level: str, what: str, **fields) -> None:
    if level != "info":
        print(level, what, fields, file=sys.stderr, flush=True)


def run(folder: Path, own: int, cases: Sequence[str]) -> None:
    torch.set_num_threads(1)
    name = NAMES[own]
    site, mesh = folder / name, Mesh.read(folder / name / "mesh.toml")
    texts = Credentials(*((site / file).read_bytes() for file in (f"{name}.key", f"{name}.pem", "authority.pem")))
    neighbours = [
        Neighbour(other, mesh.position(other), mesh.member(other).address if mesh.dials(name, other) else "")
        for other in mesh.neighbours(name)
    ]
    positions = [one.position for one in neighbours]
    bulletin = Bulletin(name, texts, terms_of(mesh.names))
    # One mailroom for all cases: a case's rounds are steps that follow those of the case before.
    mailroom = Mailroom(positions, Journal(site / "journal"), 0, lambda point, step: None)
    mailroom.largest, mailroom.rounds = 1 << 20, range(1 << 40)
    greet = {"site": name}
    address = mesh.member(name).address
    links = Links(
        neighbours, texts, TlsCarrier(texts, address), mailroom, bulletin, lambda: greet,
        lambda who, table: table["site"] == who, said, mailroom.largest, lambda point, step: None,
    )  # fmt: skip
    links.start()
    problem, ends, lengths, oracles = toys.problem().keeping({own}), {}, 0, {}
    for number, case in enumerate(cases):
        topology, algorithm = CASES[case]
        transport = _Later(own, positions, positions, mailroom, number * ROUNDS - FIRST_ROUND)
        network = RemoteNetwork(topology.build(8), [own], transport, dtype=torch.float64, each_copy=True)
        calls = algorithm.oracle_calls()
        if calls not in oracles:  # recording the gradients takes longer than the rounds
            oracles[calls] = Oracle(
                problem,
                network.hosted,
                network.identities,
                seeds=[0, 4],
                calls_per_round=calls,
                dtype=torch.float64,
                trace=False,
            )
        oracle = oracles[calls]
        state, sent = algorithm.init(oracle, network), torch.zeros(2, 1, dtype=torch.float64)
        for t in range(ROUNDS):
            round = Round(torch.tensor(t), oracle, network)
            state = algorithm.step(state, round)
            sent = sent + sum(traffic.node_bytes for traffic in round.sent)
        ends[case] = {"models": state.models, "duals": StateView(state).duals(state), "bytes": sent}
        lengths += transport.lengths
    links.finish()
    if not links.all_finished.wait(60):
        raise TimeoutError("no farewell")
    carried = sum(edge["bytes_out"] for edge in mailroom.view().values())
    if carried != lengths + sum(int(end["bytes"].sum()) for end in ends.values()):
        raise AssertionError(f"{carried} bytes were carried, which is not what the codec made")
    torch.save(ends, folder / f"{name}.pt")
    links.stop()
    mailroom.close()


class _Later:
    """A transport whose rounds are later steps of the mailroom."""

    def __init__(self, own, neighbours, positions, mailroom, first):
        self._transport, self._first = PeerTransport(own, neighbours, positions, mailroom), first
        self.process_group = self._transport.process_group
        self.lengths = 0  # bytes: two replicas' messages travel together, each after its length

    def as_sent(self, round_index, outgoing):
        return self._transport.as_sent(self._first + round_index, outgoing)

    def exchange(self, round_index, outgoing, expected, read):
        self.lengths += 2 * 8 * len(outgoing)
        return self._transport.exchange(self._first + round_index, outgoing, expected, read)


def main(folder: Path, cases: Sequence[str]) -> None:
    (folder / "experiment.toml").write_text(EXPERIMENT)
    fleet.provisioned(folder, folder / "experiment.toml", NAMES)
    processes = [
        fleet.forked(lambda own=own: run(folder, own, cases), folder / f"{NAMES[own]}.log") for own in range(8)
    ]
    codes = [fleet.ended(process, 300) for process in processes]
    if codes != [0] * 8:
        for name in NAMES:
            print((folder / f"{name}.log").read_text(), file=sys.stderr)
        sys.exit(f"exit codes {codes}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
