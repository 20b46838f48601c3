"""The interface of a network: exchange of named parts, mixing, and a server's averages."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairmesh.compression import plain_size
from fairmesh.compression.codes import Code, Dense
from fairmesh.compression.compressors import FLOAT_BITS
from fairmesh.errors import BadInput
from fairmesh.networks.bounds import Content
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.networks.roles import HeldByAll, PerNode
from fairmesh.numerics.random_streams import SecretIdentities
from fairmesh.topology.mixing import Mixing, union_of


@dataclass(frozen=True, eq=False)
class Part:
    """One named piece of the message that every node sends in a round."""

    code: Code
    nominal_bits: float  # what the paper counts for it, per neighbour
    followed: bool = False  # receivers keep a copy and add this difference, so it must reach them even in rounds
    # in which the edge carries no weight
    kept: Tensor | None = None  # what receivers keep of their neighbours' public copies, before this is added
    content: Content = "vectors"

    @cached_property
    def rows(self) -> Tensor:
        """Returns what receivers decode: (..., nodes, dim)."""
        return self.code.decode()

    def was_sent_as(self, rows: Tensor) -> None:
        """Takes what receivers decode from the message that was sent before a restart. After that, another
        machine may have computed other last bits."""
        self.__dict__["rows"] = rows


def plain(rows: Tensor, content: Content = "vectors") -> Part:
    """Returns rows to be sent as they are, with 32 nominal bits per entry."""
    return Part(Dense(rows), FLOAT_BITS * rows.shape[-1], content=content)


class Traffic(NamedTuple):
    """What was sent: nominal bits as the paper counts them, and bytes of the encoded messages with their headers."""

    node_bits: PerNode  # nominal (..., nodes)
    server_bits: HeldByAll  # nominal (...)
    node_bytes: PerNode  # (..., nodes)
    server_bytes: HeldByAll  # (...)

    def plus(self, more: "Sequence[Traffic]") -> "Traffic":
        """Returns the sum with later traffic."""
        return Traffic(*(functools.reduce(torch.add, parts) for parts in zip(self, *more)))


@dataclass(frozen=True, eq=False)
class Delivery:
    """What arrived in one round."""

    network: "Network"
    rows: Callable[[str], Tensor]  # of all nodes that are known here, of a part; waits for them
    release: Callable[[str], object]  # frees the memory of a part that is not asked for again
    round_index: Tensor
    sent: Traffic

    def mix(self, name: str) -> Tensor:
        """Returns sum_j W[i, j] decode(code_j) for each hosted node i: (..., nodes, dim)."""
        return self.network.mixed(self.rows(name), self.round_index)

    def follow(self, name: str, kept: Tensor) -> Tensor:
        """Returns what each node keeps of its neighbours' public copies, with the received differences added."""
        return self.network.added_to(kept, self.rows(name), self.round_index)


class Network(ABC):
    """Connects the nodes hosted here with each other and with those hosted elsewhere."""

    kept_of: Tensor | None = None  # (nodes, slots) identities of the nodes whose copies a node keeps, one per node

    def __init__(
        self,
        cycle: Sequence[Mixing],  # the graphs that rounds use in turn
        hosted: Sequence[int],  # positions, among all nodes, of those hosted here
        process_group: ProcessGroup,  # the processes that together host all nodes
        device: torch.device | str,
        dtype: torch.dtype,
        identities: Sequence[int],  # integers that name all nodes; (): their positions
        secrets: Sequence[bytes],  # of the hosted nodes, instead of their identities in random streams; (): none
    ):
        self.n, self.cycle, self.process_group = cycle[0].n, cycle, process_group
        self.device = torch.device(device)
        names = np.asarray(identities) if len(identities) else np.arange(self.n)
        if len(set(names.tolist())) != self.n:
            raise BadInput(f"identities must be {self.n} different integers, got {names.tolist()}")
        self._names = torch.as_tensor(names, dtype=torch.int64, device=self.device)
        self.hosted = torch.as_tensor(hosted, device=self.device)  # (nodes,)
        self.identities = self._names[self.hosted]  # (nodes,)
        self.streams = SecretIdentities(secrets, self.device) if secrets else self.identities
        self.own = torch.eye(self.n, dtype=dtype, device=self.device)[self.hosted]  # (nodes, n) 1 at its own position
        self.by_identity = torch.as_tensor(names.argsort(), device=self.device)  # (n,) positions, ordered by identity
        self._nobody = torch.zeros((), dtype=torch.float64, device=self.device)

    @abstractmethod
    def exchange(self, parts: Mapping[str, Part], round_index: Tensor) -> Delivery:
        """Sends one message from each node to each of its neighbours."""

    @abstractmethod
    def mixed(self, rows: Tensor, round_index: Tensor, onto: Tensor | None = None) -> Tensor:
        """Returns sum_j W[i, j] rows_j over the rows of all known nodes, for each hosted node i, added to `onto`."""

    @abstractmethod
    def added_to(self, kept: Tensor, rows: Tensor, round_index: Tensor) -> Tensor:
        """Returns what nodes keep of their neighbours' public copies, with the rows of all known nodes added."""

    @abstractmethod
    def copies(self, models: Tensor) -> Tensor:
        """Returns what a node keeps of its neighbours' public copies while those are all zero."""

    @abstractmethod
    def mixed_copies(self, kept: Tensor, round_index: Tensor) -> Tensor:
        """Returns s_i = sum_j W[i, j] x_hat_j of this round, from what each node keeps: (..., nodes, dim)."""

    @property
    def liars(self) -> int:
        """How many neighbours of each node may send anything, so that gossip towards copies is clipped."""
        return self.cycle[0].liars

    def disagreement(self, own: Tensor, kept: Tensor, round_index: Tensor) -> Tensor:
        """Returns sum_j W[i, j] (x_hat_j - x_hat_i) of this round, from each node's own copy (..., nodes, dim) and from
        what it keeps of its neighbours'. Each term is clipped if neighbours may lie."""
        if not self.liars:
            return self.mixed_copies(kept, round_index) - own
        return self._clipped_disagreement(own, kept, round_index)

    @abstractmethod
    def _clipped_disagreement(self, own: Tensor, kept: Tensor, round_index: Tensor) -> Tensor:
        """Returns the same with each term clipped."""

    def broadcast(self, row: Tensor, receivers: Tensor) -> tuple[Tensor, Traffic]:
        """Returns a server's row (..., 1, dim) at every node; it is sent where `receivers` (..., nodes) is true."""
        total = self.process_group.all_reduce(receivers.double().sum(dim=-1, keepdim=True)).squeeze(-1)
        bits, size = total * (FLOAT_BITS * row.shape[-1]), total * plain_size(row)
        received = row.expand(*row.shape[:-2], len(self.hosted), row.shape[-1])
        return received, Traffic(self._nobody, bits, self._nobody, size)

    def average(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Traffic]:
        """Returns sum_i weights[i] rows[i] at the server, (..., 1, dim). A node of weight zero sends nothing."""
        return self.process_group.all_reduce(weights.unsqueeze(-2) @ rows), self._sent_to_server(weights != 0, rows)

    def report(self, values: Tensor, senders: Tensor) -> tuple[Tensor, Traffic]:
        """Returns one number per node (..., nodes, 1) at the server, (..., 1, n); it is sent where `senders` is
        true."""
        return self.gather(values).mT, self._sent_to_server(senders, values)

    def _sent_to_server(self, senders: Tensor, rows: Tensor) -> Traffic:
        sent = senders.double()
        return self._sent_by_nodes(sent * (FLOAT_BITS * rows.shape[-1]), sent * plain_size(rows))

    def _sent_by_nodes(self, bits: Tensor, size: Tensor) -> Traffic:
        return Traffic(bits, self._nobody, size, self._nobody)

    def gather(self, rows: Tensor) -> Tensor:
        """Returns all nodes' rows (..., n, dim), ordered by position, for observers. It is not counted as traffic."""
        placed = rows.new_zeros(*rows.shape[:-2], self.n, rows.shape[-1]).index_copy_(-2, self.hosted, rows)
        return self.process_group.all_reduce(placed)

    def beta(self) -> float:
        """Returns ||I - W||_2, the largest of any round."""
        return max(mixing.beta for mixing in self.cycle)

    def gap(self) -> float:
        """Returns the spectral gap of W, averaged over the rounds if it changes: in [0, 1], larger mixes faster."""
        return union_of(self.cycle).gap

    def mean(self, rows: Tensor) -> Tensor:
        """Returns the mean of rows (..., nodes, dim) over all nodes of all processes: (..., dim)."""
        if self.process_group.world_size == 1:
            return rows.mean(dim=-2)
        return self.process_group.all_reduce(rows.sum(dim=-2)) / self.n

    def mean_of_processes(self, rows: Tensor) -> Tensor:
        """Returns the mean over all nodes, from each process's mean over its own nodes."""
        if self.process_group.world_size == 1:
            return rows
        return self.process_group.all_reduce(rows * (len(self.hosted) / self.n))
