"""Several hosts within this process: a thread each, with messages encoded, handed over as bytes, and decoded."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.base import Algorithm
from fairmesh.networks.base import Traffic
from fairmesh.networks.bounds import Bounds
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.networks.transport import Arrivals, Edge, Read, Transport
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.problem import Problem, prepare
from fairmesh.testing.stacks import End, after, oracle_of
from fairmesh.testing.violations import ContractViolation
from fairmesh.topology.graphs import Topology

_WAIT_S = 60.0  # before a message that never comes is given up


class Post:
    """Where hosts leave and fetch bytes."""

    def __init__(self, hosts: int):
        self.hosts = hosts
        self.letters: dict[tuple[int, Edge], bytes] = {}  # (round, edge) -> message
        self.board: dict[tuple[int, int], Any] = {}  # (call, host) -> what it gave to a collective call
        self.arrived = threading.Condition()
        self.failed = False
        self.bytes_carried = 0

    def fetch(self, box: Mapping, key: Any) -> Any:
        """Waits until the box holds the key."""
        with self.arrived:
            self.arrived.wait_for(lambda: key in box or self.failed, timeout=_WAIT_S)
            if key not in box:
                why = "another host failed" if self.failed else f"it did not come in {_WAIT_S:.0f} s"
                raise ConnectionError(f"waited for {key} in vain: {why}")
            return box[key]


class Threads(ProcessGroup):
    """The threads of one process as a group of processes."""

    def __init__(self, post: Post, rank: int):
        self.post, self.rank, self.world_size, self.local_world_size = post, rank, post.hosts, post.hosts
        self.job, self.calls = None, 0

    def all_gather(self, payload: Any) -> list[Any]:
        call, self.calls = self.calls, self.calls + 1
        with self.post.arrived:
            self.post.board[call, self.rank] = payload
            self.post.arrived.notify_all()
        return [self.post.fetch(self.post.board, (call, host)) for host in range(self.world_size)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return functools.reduce(torch.add, self.all_gather(tensor))


class InProcess(Transport):
    """Carries messages between threads, and refuses a second one on an edge in a round."""

    def __init__(self, post: Post, host: int):
        self.post, self.process_group = post, Threads(post, host)

    def exchange(
        self, round_index: int, outgoing: Mapping[Edge, bytes], expected: Sequence[Edge], read: Read
    ) -> Arrivals:
        with self.post.arrived:
            for edge, message in outgoing.items():
                if (round_index, edge) in self.post.letters:
                    raise ContractViolation(
                        f"node {edge[0]} sends node {edge[1]} two messages in round {round_index}; give all parts to "
                        "one ctx.exchange(...)"
                    )
                self.post.letters[round_index, edge] = message
                self.post.bytes_carried += len(message)
            self.post.arrived.notify_all()
        return lambda: {edge: read(edge, self.post.fetch(self.post.letters, (round_index, edge))) for edge in expected}


class HostsRun(NamedTuple):
    """The end of a run on several hosts."""

    states: list[Any]  # of each host, its nodes in the order of its block
    sent: Traffic  # by all nodes, in the order of their positions
    post: Post
    carried: list[Any]  # own parts of the model and the memory of an optimizer, at each host


def on_hosts(
    problem: Problem | Prepared,
    topology: Topology,
    algorithm: Algorithm,
    rounds: int,
    blocks: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int] = (0,),
    each_copy: bool = False,
) -> HostsRun:
    """Runs an algorithm in float64 with the nodes spread over several hosts, as a cluster and a mesh do.

    The hosts are threads of this process. Messages between them are encoded, handed over as bytes, and decoded.

    Args:
        problem: The problem; every host may read all of its data.
        topology: The graph over all nodes.
        algorithm: The algorithm.
        rounds: How many rounds, >= 1.
        blocks: The positions of the nodes at each host; together all nodes, each once.
        seeds: One replica per seed. Default: (0,).
        each_copy: Whether a node keeps a copy of each neighbour's public copy even where one mixed row would do, and
            refuses messages out of bounds, as between organisations. Default: False.

    Returns:
        The hosts' states, the traffic of all nodes as counted from encoded messages, the post that carried them, and
        what hosts keep next to the algorithm's state.

    Example:
        >>> import fairmesh as fm
        >>> problem = fm.testing.small_problem(nodes=4)
        >>> run = fm.testing.on_hosts(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 2, blocks=[[0, 1], [2, 3]])
        >>> run.states[1].models.shape, run.post.bytes_carried > 0
        (torch.Size([1, 2, 53]), True)
    """
    ready, post = prepare(problem), Post(len(blocks))

    def one(host: int) -> End:
        with post.arrived:  # one computes at a time, and lets others while it waits: tracing is not for threads
            try:
                return trained(host)
            except BaseException:
                post.failed = True
                post.arrived.notify_all()
                raise

    def trained(host: int) -> End:
        transport = InProcess(post, host)
        cycle = topology.build(ready.n)
        prior = ready.prior_of_sites
        bounds = Bounds(float((prior.max() / prior[list(blocks[host])]).max())) if each_copy else None
        network = RemoteNetwork(cycle, blocks[host], transport, dtype=torch.float64, each_copy=each_copy, bounds=bounds)
        return after(algorithm, network, oracle_of(ready, network, algorithm, seeds, torch.float64), rounds)

    ends = _results(one, len(blocks))
    order = torch.tensor([node for block in blocks for node in block]).argsort()
    bits, size = (
        torch.cat(parts, dim=-1)[:, order] for parts in zip(*((s.node_bits, s.node_bytes) for _, s, _ in ends))
    )
    total = ends[0].sent._replace(node_bits=bits, node_bytes=size)  # every host counts the server's
    return HostsRun([end.state for end in ends], total, post, [end.carried for end in ends])


def _results(function: Callable[[int], Any], count: int) -> list[Any]:
    """The results of all threads; where some fail, the error that made the others fail."""
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(function, host) for host in range(count)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, ConnectionError)):
        raise error
    return [future.result() for future in futures]
