"""What an algorithm may ask of its network: mixes of named parts, a server's average, and nothing else."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fairmesh.compression.codes import Code
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.networks.roles import HeldByAll, PerNode
from fairmesh.topology.mixing import Mixing


@dataclass(frozen=True, eq=False)
class Part:
    """One named piece of the message that every node sends in a round."""

    code: Code
    nominal_bits: float  # what the paper bills for it, to one neighbour
    followed: bool = False  # receivers keep a copy and add this difference, so it must reach them even in rounds
    # in which the edge carries no weight

    @cached_property
    def rows(self) -> Tensor:
        """What receivers decode: (..., nodes, dim)."""
        return self.code.decode()


class Traffic(NamedTuple):
    """What was sent: by the paper's nominal billing, and as bytes of the codec's messages, headers included."""

    node_bits: PerNode  # nominal (..., nodes)
    server_bits: HeldByAll  # nominal (...)
    node_bytes: PerNode  # (..., nodes)
    server_bytes: HeldByAll  # (...)

    def plus(self, more: "Sequence[Traffic]") -> "Traffic":
        """With what was sent since."""
        return Traffic(*(functools.reduce(torch.add, parts) for parts in zip(self, *more)))


class Delivery(ABC):
    """What arrived in one round."""

    sent: Traffic

    @abstractmethod
    def mix(self, name: str) -> Tensor:
        """sum_j W[i, j] decode(code_j) for each hosted node i: (..., nodes, dim)."""

    @abstractmethod
    def follow(self, name: str, kept: Tensor) -> Tensor:
        """What each node keeps of its neighbours' public copies, with the differences that arrived added."""


class Network(ABC):
    """Connects the nodes hosted here with each other and with those hosted elsewhere."""

    n: int  # all nodes
    hosted: Tensor  # (nodes,) positions among all nodes of those hosted here
    identities: Tensor  # (nodes,) whole numbers that name the hosted nodes' random streams
    own: Tensor  # (nodes, n) 1 where a column is the hosted node's own position
    by_identity: Tensor  # (n,) positions of all nodes in the order of their identities
    kept_of: Tensor | None  # (nodes, slots) identities of those whose copies a node keeps, where it keeps one of each
    process_group: ProcessGroup  # that together host all nodes
    cycle: Sequence[Mixing]  # the graphs that rounds take in turn

    @abstractmethod
    def exchange(self, parts: Mapping[str, Part], round_index: Tensor) -> Delivery:
        """One message from each node to each of its neighbours."""

    @abstractmethod
    def copies(self, models: Tensor) -> Tensor:
        """What a node keeps of its neighbours' public copies while those are all zero."""

    @abstractmethod
    def mixed_copies(self, kept: Tensor, round_index: Tensor) -> Tensor:
        """s_i = sum_j W[i, j] x_hat_j of this round, from what each node keeps: (..., nodes, dim)."""

    @abstractmethod
    def broadcast(self, row: Tensor, receivers: Tensor) -> tuple[Tensor, Traffic]:
        """A server's row (..., 1, dim) at every node; sent to those where `receivers` (..., nodes) is true."""

    @abstractmethod
    def average(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Traffic]:
        """sum_i weights[i] rows[i] at the server, (..., 1, dim); a node of weight zero (..., nodes) sends nothing."""

    @abstractmethod
    def report(self, values: Tensor, senders: Tensor) -> tuple[Tensor, Traffic]:
        """One number of each node (..., nodes, 1) at the server, (..., 1, n); sent where `senders` is true."""

    @abstractmethod
    def gather(self, rows: Tensor) -> Tensor:
        """All nodes' rows (..., n, dim) in the order of their positions, for observers; not traffic."""

    def beta(self) -> float:
        """||I - W||_2, the largest of any round."""
        return max(mixing.beta for mixing in self.cycle)

    def mean(self, rows: Tensor) -> Tensor:
        """The mean over all nodes, wherever hosted, of rows (..., nodes, dim): (..., dim)."""
        return (
            rows.mean(dim=-2)
            if self.process_group.world_size == 1
            else self.process_group.all_reduce(rows.sum(dim=-2)) / self.n
        )

    def mean_of_processes(self, rows: Tensor) -> Tensor:
        """The mean over all nodes of what is a mean over those of each host."""
        return (
            rows
            if self.process_group.world_size == 1
            else self.process_group.all_reduce(rows * (len(self.hosted) / self.n))
        )
