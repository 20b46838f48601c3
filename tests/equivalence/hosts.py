"""A network of several hosts within this process: a thread each, bytes handed over in memory."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

import fairmesh as fm
from fairmesh.algorithms.base import Round
from fairmesh.networks.base import Traffic
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.networks.remote import RemoteNetwork, Transport
from fairmesh.problems.oracle import Oracle


class Post:
    """Where hosts leave and fetch bytes."""

    def __init__(self, process_group: int):
        self.process_group, self.letters, self.board = process_group, {}, {}
        self.arrived = threading.Condition()
        self.bytes_carried = 0

    def fetch(self, box: dict, key):
        with self.arrived:
            assert self.arrived.wait_for(lambda: key in box, timeout=60), f"{key} never came"
            return box[key]


class Threads(ProcessGroup):
    def __init__(self, post: Post, here: int):
        self.post, self.world_size, self.rank, self.local_world_size, self.job, self.calls = (
            post,
            post.process_group,
            here,
            post.process_group,
            None,
            0,
        )

    def all_gather(self, payload):
        call, self.calls = self.calls, self.calls + 1
        with self.post.arrived:
            self.post.board[call, self.rank] = payload
            self.post.arrived.notify_all()
        return [self.post.fetch(self.post.board, (call, host)) for host in range(self.world_size)]

    def all_reduce(self, tensor):
        return sum(self.all_gather(tensor))  # type: ignore[arg-type]

    def nodes(self, n):
        raise NotImplementedError

    def network(self, cycle, **kwargs):
        raise NotImplementedError


class InProcess(Transport):
    def __init__(self, post: Post, host: int):
        self.post, self.process_group = post, Threads(post, host)

    def exchange(self, round_index, outgoing, expected, read):
        with self.post.arrived:
            for edge, message in outgoing.items():
                assert (round_index, edge) not in self.post.letters, "a message is sent once"
                self.post.letters[round_index, edge] = message
                self.post.bytes_carried += len(message)
            self.post.arrived.notify_all()
        return lambda: {edge: read(edge, self.post.fetch(self.post.letters, (round_index, edge))) for edge in expected}


def on_hosts(
    problem: fm.Problem,
    topology: fm.topologies.Topology,
    algorithm: fm.algorithms.Algorithm,
    rounds: int,
    blocks: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int] = (0,),
    each_copy: bool = False,
) -> tuple[list, Traffic, Post]:
    """The end of a float64 run with a block of nodes at each host: the states' models and duals by node, what was sent,
    and the post."""
    post = Post(len(blocks))

    def one(host: int):
        with (
            post.arrived
        ):  # one computes at a time, and hands on while it waits: recording gradients is not for threads
            return trained(host)

    def trained(host: int):
        transport = InProcess(post, host)
        network = RemoteNetwork(
            topology.build(problem.n), blocks[host], transport, dtype=torch.float64, each_copy=each_copy
        )
        oracle = Oracle(
            problem, network.hosted, network.identities, seeds=seeds,
            calls_per_round=algorithm.oracle_calls(), dtype=torch.float64,
        )  # fmt: skip
        state, sent = algorithm.init(oracle, network), []
        for t in range(rounds):
            round = Round(torch.tensor(t), oracle, network)
            state = algorithm.step(state, round)
            sent += round.sent
        return state, sent

    with ThreadPoolExecutor(len(blocks)) as pool:
        ends = list(pool.map(one, range(len(blocks))))
    shape = (len(seeds), problem.n)
    total = Traffic(torch.zeros(shape), torch.zeros(len(seeds)), torch.zeros(shape), torch.zeros(len(seeds)))
    total = Traffic(*(t.double() for t in total))
    for (_, sent), block in zip(ends, blocks):
        for traffic in sent:
            for whole, part in ((total.node_bits, traffic.node_bits), (total.node_bytes, traffic.node_bytes)):
                whole[:, list(block)] += part
    for traffic in ends[0][1]:  # every host counts the server's
        total.server_bits.add_(traffic.server_bits)
        total.server_bytes.add_(traffic.server_bytes)
    return [state for state, _ in ends], total, post
