"""Topologies: who talks to whom, for any number of nodes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx
import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from fairmesh.config.tables import register
from fairmesh.errors import BadInput
from fairmesh.topology.mixing import (
    DENSE_EIGENVALUES_UP_TO,
    Mixing,
    Rule,
    mixing_matrix,
    union_of,
)

_AS_ROWS_UP_TO = 200  # nodes; a larger sparse matrix is kept by its entries


class Topology(ABC):
    """A rule that gives, for n nodes, the mixing matrices to cycle through: one for a graph that stays."""

    @abstractmethod
    def graphs(self, n: int) -> list[Mixing]:
        """The mixing matrices of rounds 0, 1, ..., repeated in this order; not yet checked to connect all nodes."""

    def build(self, n: int) -> list[Mixing]:
        """As `graphs`, refused with the reason where the nodes cannot agree over them."""
        if n < 1:
            raise BadInput(f"a network needs at least one node, got {n}")
        cycle = self.graphs(n)
        for mixing in cycle:
            if mixing.n != n:
                raise BadInput(f"the topology has {mixing.n} nodes but there are {n} sites with data")
        union_of(cycle).check_mixes()
        _check_cycle_mixes(cycle)
        return cycle


def _check_cycle_mixes(cycle: Sequence[Mixing]) -> None:
    """Refuses a schedule whose rounds undo each other: after a whole cycle some difference between nodes is as large as
    before. (Not looked at beyond the size for dense eigenvalues.)"""
    n = cycle[0].n
    if len(cycle) == 1 or not 1 < n <= DENSE_EIGENVALUES_UP_TO:
        return
    product = np.eye(n) - 1.0 / n
    for mixing in cycle:
        product = mixing.matrix @ product
    if np.linalg.norm(product, 2) > 1.0 - 1e-12:
        raise BadInput(
            "the schedule of graphs never mixes: a whole cycle leaves some difference between nodes as it was; give "
            "nodes a positive weight on themselves, or other graphs"
        )


def _graph_of(n: int, edges) -> networkx.Graph:
    graph = networkx.empty_graph(n)
    graph.add_edges_from((int(i), int(j)) for i, j in edges if i != j)
    return graph


@dataclass(frozen=True)
class Ring(Topology):
    """Each node talks to the next and the previous one."""

    mixing: Rule = "metropolis"

    def graphs(self, n: int) -> list[Mixing]:
        return [mixing_matrix(_graph_of(n, ((i, (i + 1) % n) for i in range(n))), self.mixing)]


@dataclass(frozen=True)
class Torus(Topology):
    """A grid of rows x columns wrapped around both ways."""

    rows: int
    columns: int
    mixing: Rule = "metropolis"

    def __post_init__(self):
        if self.rows < 1 or self.columns < 1:
            raise BadInput(f"a torus needs rows and columns >= 1, got {self.rows} x {self.columns}")

    def graphs(self, n: int) -> list[Mixing]:
        if self.rows * self.columns != n:
            raise BadInput(f"a {self.rows} x {self.columns} torus has {self.rows * self.columns} nodes, not {n}")
        place = np.arange(n).reshape(self.rows, self.columns)
        right = zip(place.ravel(), np.roll(place, -1, axis=1).ravel())
        down = zip(place.ravel(), np.roll(place, -1, axis=0).ravel())
        return [mixing_matrix(_graph_of(n, [*right, *down]), self.mixing)]


@dataclass(frozen=True)
class Circulant(Topology):
    """Node i talks to i + k and i - k for every offset k. Offsets 1, 2 are the paper's "2D torus"."""

    offsets: tuple[int, ...] = (1, 2)
    mixing: Rule = "metropolis"

    def __post_init__(self):
        object.__setattr__(self, "offsets", tuple(self.offsets))
        if not self.offsets or min(self.offsets) < 1:
            raise BadInput(f"offsets are whole numbers >= 1, got {list(self.offsets)}")

    def graphs(self, n: int) -> list[Mixing]:
        edges = ((i, (i + k) % n) for i in range(n) for k in self.offsets)
        return [mixing_matrix(_graph_of(n, edges), self.mixing)]


@dataclass(frozen=True)
class Complete(Topology):
    """Everyone talks to everyone (the paper's "mesh")."""

    mixing: Rule = "metropolis"

    def graphs(self, n: int) -> list[Mixing]:
        return [mixing_matrix(networkx.complete_graph(n), self.mixing)]


@dataclass(frozen=True)
class Star(Topology):
    """Node 0 talks to all others."""

    mixing: Rule = "metropolis"

    def graphs(self, n: int) -> list[Mixing]:
        return [mixing_matrix(_graph_of(n, ((0, i) for i in range(1, n))), self.mixing)]


@dataclass(frozen=True)
class Hypercube(Topology):
    """Nodes whose numbers differ in one bit talk; needs a power of two."""

    mixing: Rule = "metropolis"

    def graphs(self, n: int) -> list[Mixing]:
        if n & (n - 1):
            raise BadInput(f"a hypercube needs a power of two as the number of nodes, got {n}")
        bits = range(n.bit_length() - 1)
        return [mixing_matrix(_graph_of(n, ((i, i ^ (1 << b)) for i in range(n) for b in bits)), self.mixing)]


@dataclass(frozen=True)
class Exponential(Topology):
    """Node i talks to i + 2^k and i - 2^k: few edges, a large gap."""

    mixing: Rule = "metropolis"

    def graphs(self, n: int) -> list[Mixing]:
        hops = [1 << k for k in range(max(n - 1, 1).bit_length())]
        return [mixing_matrix(_graph_of(n, ((i, (i + h) % n) for i in range(n) for h in hops if h < n)), self.mixing)]


@dataclass(frozen=True)
class ErdosRenyi(Topology):
    """Each pair of nodes is linked with this probability; drawn again, up to 100 times, until connected."""

    probability: float
    seed: int = 0
    mixing: Rule = "metropolis"

    def __post_init__(self):
        if not 0 < self.probability <= 1:
            raise BadInput(f"probability lies in (0, 1], got {self.probability}")

    def graphs(self, n: int) -> list[Mixing]:
        for attempt in range(100):
            graph = networkx.fast_gnp_random_graph(n, self.probability, seed=self.seed + 1_000_003 * attempt)
            if networkx.is_connected(graph):
                return [mixing_matrix(graph, self.mixing)]
        raise BadInput(
            f"100 Erdos-Renyi graphs of {n} nodes with probability {self.probability} were all disconnected; "
            f"use a probability above ln(n) / n = {np.log(max(n, 2)) / n:.3f}"
        )


@dataclass(frozen=True)
class RandomRegular(Topology):
    """A random graph in which every node has `degree` neighbours; drawn again, up to 100 times, until connected."""

    degree: int
    seed: int = 0
    mixing: Rule = "metropolis"

    def graphs(self, n: int) -> list[Mixing]:
        if not 1 <= self.degree < n or (self.degree * n) % 2:
            raise BadInput(
                f"no graph of {n} nodes has degree {self.degree} everywhere: need 1 <= degree < n, degree * n even"
            )
        for attempt in range(100):
            graph = networkx.random_regular_graph(self.degree, n, seed=self.seed + 1_000_003 * attempt)
            if networkx.is_connected(graph):
                return [mixing_matrix(graph, self.mixing)]
        raise BadInput(
            f"100 random graphs of {n} nodes with degree {self.degree} were all disconnected; use degree >= 3"
        )


@dataclass(frozen=True)
class Edges(Topology):
    """A list of edges between nodes numbered from 0; `Edges.of(graph)` takes any networkx graph."""

    edges: tuple[tuple[int, ...], ...]
    mixing: Rule = "metropolis"

    def __post_init__(self):
        object.__setattr__(self, "edges", tuple(tuple(map(int, edge)) for edge in self.edges))
        for edge in self.edges:
            if len(edge) != 2:
                raise BadInput(f"an edge joins two nodes, got {list(edge)}")

    @staticmethod
    def of(graph: networkx.Graph, mixing: Rule = "metropolis") -> "Edges":
        """The edges of a networkx graph, its nodes numbered in their order."""
        if graph.is_directed():
            raise BadInput("the graph is directed; messages travel both ways, so give an undirected graph")
        number = {node: i for i, node in enumerate(graph.nodes)}
        return Edges(tuple((number[a], number[b]) for a, b in graph.edges()), mixing)

    def graphs(self, n: int) -> list[Mixing]:
        for i, j in self.edges:
            if not (0 <= i < n and 0 <= j < n):
                raise BadInput(f"edge [{i}, {j}] names a node outside 0..{n - 1}")
        return [mixing_matrix(_graph_of(n, self.edges), self.mixing)]


@dataclass(frozen=True)
class Matrix(Topology):
    """A given mixing matrix, checked to be symmetric, stochastic and mixing: as rows, or as entries [i, j, weight].
    `Matrix(w)` takes nested lists, an array or a scipy sparse matrix; a large sparse one becomes entries."""

    rows: Any = field(repr=False)
    entries: tuple[tuple[float, ...], ...] = field(default=(), repr=False)

    def __post_init__(self):
        if scipy.sparse.issparse(self.rows) and self.rows.shape[0] <= _AS_ROWS_UP_TO:
            object.__setattr__(self, "rows", self.rows.toarray())
        if scipy.sparse.issparse(self.rows):
            sparse = scipy.sparse.coo_array(self.rows)
            if sparse.shape is not None and sparse.shape[0] != sparse.shape[1]:
                raise BadInput(f"a mixing matrix is square, got {sparse.shape[0]} x {sparse.shape[1]}")
            entries = zip(sparse.row.tolist(), sparse.col.tolist(), sparse.data.tolist())
            object.__setattr__(self, "entries", tuple((float(i), float(j), w) for i, j, w in entries))
            object.__setattr__(self, "rows", ())
            return
        try:
            object.__setattr__(self, "rows", tuple(tuple(map(float, row)) for row in self.rows))
        except (TypeError, ValueError) as error:
            raise BadInput(f"a mixing matrix is a list of rows of numbers: {error}") from error
        if not self.rows and not self.entries:
            raise BadInput("a mixing matrix needs rows or entries")
        for entry in self.entries:
            if len(entry) != 3 or min(entry[:2]) < 0 or any(index != int(index) for index in entry[:2]):
                raise BadInput(f"an entry is [i, j, weight] with nodes numbered from 0, got {list(entry)}")

    def graphs(self, n: int) -> list[Mixing]:
        if self.entries:
            row, column, weight = (np.array(part) for part in zip(*self.entries))
            size = int(max(row.max(), column.max())) + 1
            parts = (weight, (row.astype(int), column.astype(int)))
            return [Mixing(scipy.sparse.csr_array(scipy.sparse.coo_array(parts, shape=(size, size))))]
        lengths = {len(row) for row in self.rows}
        if lengths != {len(self.rows)}:
            raise BadInput(f"a mixing matrix is square, got {len(self.rows)} rows of lengths {sorted(lengths)}")
        return [Mixing(scipy.sparse.csr_array(np.array(self.rows)))]


@dataclass(frozen=True)
class Changing(Topology):
    """Graphs taken in turn, each for `every` rounds; each may be disconnected, together they must connect everyone."""

    topologies: tuple[Topology, ...]
    every: int = 1

    def __post_init__(self):
        object.__setattr__(self, "topologies", tuple(self.topologies))
        if not self.topologies:
            raise BadInput("a schedule of graphs needs at least one topology")
        if self.every < 1:
            raise BadInput(f"every is a number of rounds >= 1, got {self.every}")

    def graphs(self, n: int) -> list[Mixing]:
        return [m for topology in self.topologies for mixing in topology.graphs(n) for m in [mixing] * self.every]


register(
    Topology,
    {
        "ring": Ring,
        "torus": Torus,
        "circulant": Circulant,
        "complete": Complete,
        "star": Star,
        "hypercube": Hypercube,
        "exponential": Exponential,
        "erdos-renyi": ErdosRenyi,
        "random-regular": RandomRegular,
        "edges": Edges,
        "matrix": Matrix,
        "changing": Changing,
    },
)
