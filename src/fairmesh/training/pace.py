"""How fast rounds follow each other over a network: what a round costs a node, and how long it waits for others."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fairmesh.networks.process_group import ProcessGroup
from fairmesh.networks.transport import Arrivals, Edge, Read, Transport
from fairmesh.training.loop import Training

NODE_S = 0.004  # per round: the journal, TLS, and the change between threads (benchmarks/results/peers-cpu.json)
_ROUNDS = 30
_ENOUGH_S = 2.0
_MOSTLY = 2.0  # waiting, in units of the time that a node computes


class Echo(Transport):
    """Gives a node its own messages back, as if its neighbours had sent them, and notes the longest: what a round costs
    without anybody to wait for."""

    process_group = ProcessGroup()

    def __init__(self):
        self.longest = 0

    def exchange(
        self, round_index: int, outgoing: Mapping[Edge, bytes], expected: Sequence[Edge], read: Read
    ) -> Arrivals:
        self.longest = max([self.longest, *map(len, outgoing.values())])
        return lambda: {(other, own): read((other, own), outgoing[own, other]) for other, own in expected}


class RoundCost(NamedTuple):
    """What a round costs one node."""

    seconds: float  # of its processor, without the network
    message_bytes: int  # to each neighbour


def round_cost(training: Training, echo: Echo) -> RoundCost:
    """Measures some rounds of one node whose network is an echo.

    Args:
        training: The rounds, at this node.
        echo: The transport of their network.

    Returns:
        The cost of a round after the first ones, which prepare what all use.
    """
    state: Any = training.initial()
    took: list[float] = []
    for t in range(_ROUNDS):
        began = time.perf_counter()
        state = training.advance(state, t)
        took.append(time.perf_counter() - began)
        if t and sum(took) > _ENOUGH_S:
            break
    return RoundCost(statistics.median(took[len(took) // 2 :]), echo.longest)


class Pace(NamedTuple):
    """What a round takes over a network, as far as one node can know it."""

    computing_s: float  # by the node itself
    waiting_s: float  # until the message of the slowest neighbour has arrived

    @property
    def seconds(self) -> float:
        """Returns what a round takes."""
        return self.computing_s + self.waiting_s

    @property
    def mostly_waits(self) -> bool:
        """Returns whether the node waits much longer than it computes."""
        return self.waiting_s > _MOSTLY * self.computing_s

    def in_words(self, rounds: int) -> str:
        """Returns the rounds per second and the time of all rounds, for people."""
        per_second = 1 / self.seconds
        rate = f"{per_second:.0f}" if per_second >= 9.5 else f"{per_second:.2g}"
        return f"about {rate} rounds per second, so {rounds:,} rounds take about {duration(rounds * self.seconds)}"


def pace_of(cost: RoundCost, rtt_s: float, bytes_per_s: float = math.inf) -> Pace:
    """Returns the pace of synchronous rounds: both ends of an edge send at once, so a message needs half a round trip.

    Args:
        cost: What a round costs a node.
        rtt_s: The round trip on the slowest edge.
        bytes_per_s: The bandwidth of that edge. Default: unlimited.
    """
    return Pace(cost.seconds + NODE_S, rtt_s / 2 + cost.message_bytes / bytes_per_s)


def duration(seconds: float) -> str:
    """Returns a length of time with its unit."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}" if seconds < 10 * unit else f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
