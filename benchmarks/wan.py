"""What a WAN costs a mesh: nodes in network namespaces of their own, and a router between them that holds every IP
packet back for half a round trip. A proxy would hide what TCP does with small writes, so the packets are delayed."""

import ctypes
import fcntl
import heapq
import json
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fairmesh.errors import FairmeshError
from fairmesh.mesh.enrol.roster import MESH
from tests.mesh import experiments, fleet
from tests.mesh.lives import Board

RESULTS = Path(__file__).parent / "results" / "wan-cpu.json"
RTTS_MS = (400, 100, 20, 0)  # falling, so that no timer of TCP is too short for the next one
SIZES = {
    "0.2 kB": ("logistic", 2),
    "10 kB": ({"name": "fc", "hidden": 250}, 4),
    "80 kB": ({"name": "fc", "hidden": 2000}, 4),
}
_TUN = struct.Struct("16sH22x")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_COUNT = struct.Struct("<Q")
_DELAY = struct.Struct("<d")
_PORT = 7000


class Router:
    """Passes IP packets between nodes, in a process of its own. Use it in `with`; `plug` is for the nodes' processes.

    Args:
        count: How many nodes.
        mbit_per_s: What a node can send. Default: no limit.
    """

    def __init__(self, count: int, mbit_per_s: float = float("inf")):
        self.count, self._bytes_per_s = count, mbit_per_s * 125_000
        self._control, self._nodes_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._memory = mmap.mmap(-1, _DELAY.size + count * count * _COUNT.size)
        self._process = 0

    def __enter__(self) -> "Router":
        self._process = fleet.forked(self._route, Path(os.devnull))
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        self._control.close()
        self._nodes_end.close()

    def set_rtt(self, seconds: float) -> None:
        """Lets every packet from now on take half of this."""
        _DELAY.pack_into(self._memory, 0, seconds / 2)

    def passed(self) -> list[list[int]]:
        """Returns the bytes of all IP packets so far, by sender and receiver."""
        return [[self._count(sender, receiver) for receiver in range(self.count)] for sender in range(self.count)]

    def _count(self, sender: int, receiver: int, more: int = 0) -> int:
        at = _DELAY.size + (sender * self.count + receiver) * _COUNT.size
        total = _COUNT.unpack_from(self._memory, at)[0] + more
        if more:
            _COUNT.pack_into(self._memory, at, total)
        return total

    def plug(self, number: int) -> None:
        """Moves this process to a network namespace of its own, with one interface, which leads to the router. The
        namespace ends with the process."""
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            raise FairmeshError(f"no network namespace can be made here: {os.strerror(ctypes.get_errno())}")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, _TUN.pack(b"wan", _IFF_TUN | _IFF_NO_PI))
        commands = f"link set lo up\naddr add {address(number)}/24 dev wan\nlink set wan up\n"
        subprocess.run(["ip", "-batch", "-"], input=commands.encode(), check=True)
        socket.send_fds(self._nodes_end, [bytes([number])], [tun])
        os.close(tun)

    def _route(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        tuns: dict[int, int] = {}  # file by node
        held: list[tuple[float, int, int, bytes]] = []  # when it is due, a number, to whom, what
        free, number = [0.0] * self.count, 0
        while True:
            wait = max(0.0, held[0][0] - time.monotonic()) if held else None
            ready = select.select([self._control, *tuns.values()], [], [], wait)[0]
            if self._control in ready:
                sender, files, _, _ = socket.recv_fds(self._control, 1, 1)
                tuns[sender[0]] = files[0]
            for sender, file in list(tuns.items()):
                while file in ready and (packet := _read(file)):
                    if packet[0] >> 4 != 4 or not 0 < packet[19] <= self.count:  # not IPv4, or to nobody
                        continue
                    receiver, now = packet[19] - 1, time.monotonic()
                    free[sender] = max(now, free[sender]) + len(packet) / self._bytes_per_s
                    due = free[sender] + _DELAY.unpack_from(self._memory)[0]
                    self._count(sender, receiver, len(packet))
                    heapq.heappush(held, (due, number := number + 1, receiver, packet))
            while held and held[0][0] <= time.monotonic():
                _, _, receiver, packet = heapq.heappop(held)
                with suppress(OSError):  # its node has ended, or its queue is full
                    os.write(tuns.get(receiver, -1), packet)


def _read(file: int) -> bytes:
    """Returns the next packet of a TUN device, nothing if there is none, also if its namespace is gone."""
    try:
        return os.read(file, 1 << 16)
    except OSError:
        return b""


def address(number: int) -> str:
    """Returns the IP address of a node."""
    return f"10.99.0.{number + 1}"


def why_not() -> str:
    """Returns why namespaces with a TUN device cannot be made here, "" if they can."""
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    with Router(1) as router, tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        code = fleet.ended(fleet.forked(lambda: router.plug(0), log), 10)
        return "" if code == 0 else log.read_text().strip().splitlines()[-1]


@dataclass(frozen=True)
class Cost:
    """Of a round at one node, in the mean over nodes."""

    nodes: int
    message: str
    rtt_ms: int
    rounds_per_s: float
    ms_per_round: float
    payload_bytes: float  # per round and node, to all neighbours
    wire_bytes: float  # the same, all IP packets that a node sends
    claimed_bytes: float  # what the node itself counts, payload and overhead


@dataclass(frozen=True)
class Idle:
    """Between two nodes that run while a third does not, in both directions."""

    nodes: int
    seconds: float
    bytes_per_s: float  # all IP packets over the busiest edge


class Fleet:
    """The nodes of a mesh behind a router, in a temporary folder. Use `running`."""

    def __init__(self, folder: Path, router: Router, nodes: int, message: str):
        self.folder, self.router, self.message = folder, router, message
        self.names, self.board = [f"site-{k}" for k in range(nodes)], Board(nodes)
        model, bits = SIZES[message]
        compressor = {"name": "quantize", "bits": bits, "block": 64}
        algorithm = experiments.STEADY_AD_GDA | {"compressor": compressor}
        text = experiments.experiment(500_000, nodes, algorithm, model=model)
        (folder / "experiment.toml").write_text(text)
        mesh = fleet.provisioned(folder, folder / "experiment.toml", self.names)
        members = [replace(member, address=f"{address(k)}:{_PORT}") for k, member in enumerate(mesh.members)]
        self.mesh = replace(mesh, members=tuple(members))
        for k, name in enumerate(self.names):
            self.mesh.write(folder / name / MESH)
            fleet.settle(folder / name, listen=f"{address(k)}:{_PORT}")
        self.processes: list[int] = []

    def start(self) -> None:
        self.processes = [
            fleet.forked(lambda k=k: self._run(k), self.folder / f"{name}.log") for k, name in enumerate(self.names)
        ]

    def _run(self, number: int) -> None:
        from fairmesh.mesh.node.running import run_node

        torch.set_num_threads(1)
        self.router.plug(number)

        def observe(point: str, step: int) -> None:
            if point == "logged":
                self.board.write(number, step)

        run_node(self.folder / self.names[number] / fleet.SITE, stream=sys.stderr, observe=observe)

    def end(self, number: int) -> None:
        """Kills a node."""
        if self.processes[number]:
            os.kill(self.processes[number], signal.SIGKILL)
            os.waitpid(self.processes[number], 0)
            self.processes[number] = 0

    def wait_for_step(self, step: int, seconds: float = 90) -> None:
        until = time.monotonic() + seconds
        while min(map(self.board.read, range(len(self.names)))) < step:
            if time.monotonic() > until:
                logs = [(self.folder / f"{name}.log").read_text()[-1000:] for name in self.names]
                raise FairmeshError(f"the nodes have not come to step {step} in {seconds:.0f} s:\n" + "\n".join(logs))
            time.sleep(0.05)

    def measured(self, rtt_ms: int, seconds: float) -> Cost:
        """Returns the cost of rounds at a round trip time."""
        self.router.set_rtt(rtt_ms / 1000)
        time.sleep(1 + 0.02 * rtt_ms)
        before, began = self._sample(), time.monotonic()
        time.sleep(seconds + 0.01 * rtt_ms)
        after, took, count = self._sample(), time.monotonic() - began, len(self.names)
        steps, wire, messages, payload, claimed = ((late - early) / count for early, late in zip(before, after))
        rate, around = max(steps, 1) / took, 2 * len(self.mesh.edges) / count
        # Nodes write their counters once per second, so these are taken per message.
        payload, claimed = (around * total / max(messages, 1) for total in (payload, claimed))
        return Cost(count, self.message, rtt_ms, rate, 1000 / rate, payload, wire / max(steps, 1), claimed)

    def _sample(self) -> tuple[float, ...]:
        """Returns, over all nodes: steps, bytes on the wire, messages, their bytes, and all bytes that nodes count."""
        steps = sum(map(self.board.read, range(len(self.names))))
        edges = [edge for name in self.names for edge in self._status(name)["edges"].values()]
        counts = {key: sum(edge[key] for edge in edges) for key in ("messages_out", "bytes_out", "overhead_out")}
        claimed = counts["bytes_out"] + counts["overhead_out"]
        return steps, sum(map(sum, self.router.passed())), counts["messages_out"], counts["bytes_out"], claimed

    def _status(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name / "state" / "status.json").read_text())

    def idle(self, before: float, seconds: float) -> Idle:
        """Kills the last node and returns what the others send each other while they wait for it."""
        self.end(len(self.names) - 1)
        self.router.set_rtt(0)
        time.sleep(before)
        early, began = self.router.passed(), time.monotonic()
        time.sleep(seconds)
        late, took = self.router.passed(), time.monotonic() - began
        edges = [(a, b) for a in range(len(self.names)) for b in range(a)]
        busiest = max(late[a][b] - early[a][b] + late[b][a] - early[b][a] for a, b in edges)
        return Idle(len(self.names), took, busiest / took)


@contextmanager
def running(nodes: int, message: str, mbit_per_s: float = float("inf")) -> Iterator[Fleet]:
    """Yields a mesh that trains, with messages of about this size."""
    with tempfile.TemporaryDirectory() as folder, Router(nodes, mbit_per_s) as router:
        mesh = Fleet(Path(folder), router, nodes, message)
        mesh.start()
        try:
            mesh.wait_for_step(20)
            yield mesh
        finally:
            for number in range(nodes):
                mesh.end(number)


def slope(costs: Sequence[Cost]) -> float:
    """Returns how many round trips a round takes more for each that the network has, from 20 ms to the longest. With
    shorter ones, the processor's time decides."""
    ms = {cost.rtt_ms: cost.ms_per_round for cost in costs}
    longest = max(ms)
    return (ms[longest] - ms[20]) / (longest - 20)


def costs(nodes: int, message: str, seconds: float, idle_s: float = 0) -> tuple[list[Cost], Idle | None]:
    """Returns the cost of rounds at every round trip time, and of waiting for `idle_s` seconds."""
    with running(nodes, message) as mesh:
        found = [mesh.measured(rtt_ms, seconds) for rtt_ms in RTTS_MS]
        return found, mesh.idle(20.0, idle_s) if idle_s else None


def record(name: str, table: dict[str, Any]) -> None:
    """Writes a table under a name, next to those that are there."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(known | {name: table}, indent=1) + "\n")


def as_table(found: Sequence[Cost], idle: Sequence[Idle]) -> dict[str, Any]:
    """Returns what is recorded."""
    groups = {(cost.nodes, cost.message) for cost in found}
    slopes = {
        f"{nodes} nodes, {message}": round(slope([c for c in found if (c.nodes, c.message) == (nodes, message)]), 3)
        for nodes, message in sorted(groups)
    }
    return {
        "cpus": os.cpu_count(),
        "rounds": [_rounded(c) for c in found],
        "slope": slopes,
        "idle": [_rounded(i) for i in idle],
    }


def _rounded(given: Any) -> dict[str, Any]:
    return {k: round(v, 2) if isinstance(v, float) else v for k, v in asdict(given).items()}
