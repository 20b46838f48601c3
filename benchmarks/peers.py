"""What the network costs between organisations: the time of a step in which all nodes exchange one message each way."""

import multiprocessing
import socket
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fairmesh.compression import encode
from fairmesh.compression.compressors import Quantize
from fairmesh.errors import FairmeshError
from fairmesh.mesh.announcements import Terms
from fairmesh.mesh.enrol.certificates import make_authority, make_key, sign
from fairmesh.mesh.enrol.roster import Member, Mesh
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.mesh.wire.connections import TlsCarrier
from fairmesh.mesh.wire.journal import Journal
from fairmesh.mesh.wire.links import Credentials, Links, Neighbour
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.numerics.random_streams import Draw, keys
from fairmesh.topology.graphs import Ring


@dataclass(frozen=True)
class Cost:
    """Of a step at one node, over all nodes and steps: logging, sending, waiting and logging again; not encoding and
    decoding."""

    nodes: int
    parameters: int
    message_bytes: int
    steps: int
    ms_median: float
    ms_low: float  # of the middle eight tenths
    ms_high: float
    cpu_ms: float  # of a node's process in a step
    bytes_of_messages: int  # of all nodes and steps, as the nodes counted them
    bytes_overhead: int  # TLS, greetings, heads, acknowledgements, certificates


def network_cost(nodes: int, parameters: int, steps: int) -> Cost:
    """Nodes on a ring over the loopback interface, each a process, with mutual TLS and the journal on disk, which
    compute nothing: what remains of a round is the network."""
    text = _message(parameters)
    with tempfile.TemporaryDirectory() as folder:
        mesh = _provisioned(Path(folder), nodes)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imported once, for all nodes
        pipes = [context.Pipe() for _ in range(nodes)]
        arguments = [(Path(folder), mesh, name, parameters, steps) for name in mesh.names]
        processes = [
            context.Process(target=_exchange, args=(*given, theirs), daemon=True)
            for given, (_, theirs) in zip(arguments, pipes)
        ]
        for process in processes:
            process.start()
        found: list[float] = []
        busy, counted = 0.0, (0, 0)
        for (mine, _), name in zip(pipes, mesh.names):
            if not mine.poll(120 + 0.1 * steps):
                raise FairmeshError(f"node {name} did not end its steps")
            spent, worked, (of_messages, overhead) = mine.recv()
            found += spent
            busy += worked
            counted = counted[0] + of_messages, counted[1] + overhead
        for process in processes:
            process.join(10)
    ordered = sorted(found)
    low, middle, high = (1000 * ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))
    return Cost(nodes, parameters, len(text), steps, middle, low, high, 1000 * busy / nodes, *counted)


def _message(parameters: int) -> bytes:
    """A real message: a row of normal numbers in 4-bit blocks."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, 1, parameters, generator=generator)
    draw = Draw(keys(torch.tensor([0]), "bench", torch.zeros(1, dtype=torch.int64), torch.tensor([0])), row.dtype)
    code: Any = Quantize(bits=4, block=64).compress(row, draw)
    return encode({"model": type(code)(*(t[0] if isinstance(t, torch.Tensor) else t for t in code))}, 0)


def _provisioned(folder: Path, nodes: int) -> Mesh:
    names = [f"node-{i}" for i in range(nodes)]
    held = [socket.socket() for _ in names]
    for one in held:
        one.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
    for one in held:
        one.close()
    links = Ring().build(nodes)[0].matrix.tolil().rows
    members = [
        Member(name, address, tuple(names[j] for j in sorted(links[i]) if j != i))
        for i, (name, address) in enumerate(zip(names, addresses))
    ]
    mesh = Mesh("bench", tuple(members))
    make_authority(folder, mesh.name, 1)
    for name in names:
        _, request = make_key(folder, name)
        (folder / f"{name}.pem").write_bytes(sign(request.read_bytes(), folder, mesh, 1))
    return mesh


def _exchange(folder: Path, mesh: Mesh, name: str, parameters: int, steps: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    given = Credentials(*((folder / file).read_bytes() for file in (f"{name}.key", f"{name}.pem", "authority.pem")))
    neighbours = [
        Neighbour(other, mesh.position(other), mesh.member(other).address if mesh.dials(name, other) else "")
        for other in mesh.neighbours(name)
    ]
    positions = [one.position for one in neighbours]
    mailroom = Mailroom(positions, Journal(folder / f"state-{name}"), 0, lambda point, step: None)
    mailroom.largest, mailroom.rounds = 1 << 26, range(steps)
    bulletin = Bulletin(name, given, Terms(dict.fromkeys(mesh.names, mesh.names)))
    links = Links(
        neighbours, given, TlsCarrier(given, mesh.member(name).address), mailroom, bulletin, lambda: {"site": name},
        lambda *_: True, lambda *_, **__: None, mailroom.largest, lambda point, step: None,
    )  # fmt: skip
    links.start()
    text = _message(parameters)
    spent, worked = [], time.process_time()
    for step in range(steps):
        began = time.perf_counter()
        mailroom.post(step, dict.fromkeys(positions, text))
        mailroom.take(step, positions, lambda _, there: there)
        spent.append(time.perf_counter() - began)
    links.finish()
    links.all_finished.wait(30)
    worked = (time.process_time() - worked) / steps
    edges = mailroom.view().values()
    counted = sum(edge["bytes_out"] for edge in edges), sum(edge["overhead_out"] for edge in edges)
    pipe.send((spent[steps // 10 :], worked, counted))  # without the meeting
    links.stop()
    mailroom.close()
