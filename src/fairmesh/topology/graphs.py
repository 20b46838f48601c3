"""Topologies: who talks to whom, for any number of nodes. Public as `fm.topologies`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse

from fairmesh.config.ranges import Count, UpToOne
from fairmesh.config.tables import register
from fairmesh.errors import BadInput, refusing
from fairmesh.topology.mixing import DENSE_EIGENVALUES_UP_TO, Mixing, Rule, mixing_matrix, union_of

__all__ = [
    "Changing",
    "Circulant",
    "Complete",
    "Edges",
    "ErdosRenyi",
    "Exponential",
    "Hypercube",
    "Matrix",
    "Mixing",
    "RandomRegular",
    "Ring",
    "Star",
    "Topology",
    "Torus",
]

if TYPE_CHECKING:
    import networkx

_AS_ROWS_UP_TO = 200  # nodes; a larger sparse matrix is kept by its entries


class Topology(ABC):
    """Base class of topologies: a rule that gives the mixing matrices for any number of nodes n.

    A topology of your own implements `graphs`. A fixed graph has one mixing matrix. A time-varying one has several,
    which the rounds cycle through.

    Example:
        >>> import fairmesh as fm
        >>> class Path(fm.topologies.Topology):
        ...     def graphs(self, n):
        ...         return fm.topologies.Edges([(i, i + 1) for i in range(n - 1)]).graphs(n)
        >>> [mixing] = Path().build(4)
        >>> mixing.degrees.tolist()
        [1, 2, 2, 1]
    """

    @abstractmethod
    def graphs(self, n: int) -> list[Mixing]:
        """Returns the mixing matrices of rounds 0, 1, ..., repeated in this order.

        They need not connect all nodes: `build` checks that.

        Args:
            n: The number of nodes, >= 1.
        """

    def build(self, n: int) -> list[Mixing]:
        """Returns the mixing matrices of `graphs` after checking that the nodes can agree over them.

        Args:
            n: The number of nodes, >= 1.

        Raises:
            BadInput: The topology is not defined for n nodes, the graphs together do not connect all nodes, or they
                never average the nodes' values.
        """
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
    before. (Not checked beyond the size for dense eigenvalues.)"""
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


class _Linked(Topology):
    """A graph that follows from the ends of its edges."""

    mixing: Rule

    @abstractmethod
    def ends(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the nodes at both ends of every edge, modulo n, as arrays that broadcast. An edge may occur several
        times, also from a node to itself."""

    def graphs(self, n: int) -> list[Mixing]:
        first, second = np.broadcast_arrays(*self.ends(n))
        places = (first.ravel() % n, second.ravel() % n)
        return [mixing_matrix(scipy.sparse.coo_array((np.ones(first.size), places), shape=(n, n)), self.mixing)]


@dataclass(frozen=True)
class Ring(_Linked):
    """Each node talks to the next and the previous one.

    Few messages per round, but slow agreement: the spectral gap falls as 1 / n^2.

    Args:
        mixing: How the weights of W follow from the graph. "metropolis": w_ij = 1 / (1 + max(degree_i, degree_j)).
            "max-degree": w_ij = 1 / (1 + largest degree). "uniform": w_ij = 1 / (1 + degree), for graphs in which all
            nodes have the same degree. Default: "metropolis".

    Example:
        >>> import fairmesh as fm
        >>> [mixing] = fm.Ring().build(4)
        >>> mixing.matrix.toarray().round(2)
        array([[0.33, 0.33, 0.  , 0.33],
               [0.33, 0.33, 0.33, 0.  ],
               [0.  , 0.33, 0.33, 0.33],
               [0.33, 0.  , 0.33, 0.33]])
    """

    mixing: Rule = "metropolis"

    def ends(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        node = np.arange(n)
        return node, node + 1


@dataclass(frozen=True)
class Torus(_Linked):
    """A grid of rows x columns that wraps around in both directions: each node has four neighbours.

    Args:
        rows: Rows of the grid, >= 1.
        columns: Columns of the grid, >= 1. The number of nodes must be rows * columns.
        mixing: How the weights of W follow from the graph, as in `Ring`. Default: "metropolis".

    Example:
        >>> import fairmesh as fm
        >>> [mixing] = fm.topologies.Torus(3, 4).build(12)
        >>> mixing.degrees.tolist()
        [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]
    """

    rows: Count
    columns: Count
    mixing: Rule = "metropolis"

    def ends(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        if self.rows * self.columns != n:
            raise BadInput(f"a {self.rows} x {self.columns} torus has {self.rows * self.columns} nodes, not {n}")
        place = np.arange(n).reshape(self.rows, self.columns)
        return place, np.stack([np.roll(place, -1, axis=1), np.roll(place, -1, axis=0)])


@dataclass(frozen=True)
class Circulant(_Linked):
    """Node i talks to the nodes i + k and i - k (modulo n) for every offset k.

    Offset 1 alone is a ring. Offsets 1 and 2 are what the AD-GDA paper calls a 2D torus.

    Args:
        offsets: Distances to the neighbours, whole numbers >= 1. Default: (1, 2).
        mixing: How the weights of W follow from the graph, as in `Ring`. Default: "metropolis".

    Example:
        >>> import fairmesh as fm
        >>> [mixing] = fm.topologies.Circulant((1, 2)).build(10)
        >>> round(mixing.gap, 3)
        0.353
    """

    offsets: tuple[Count, ...] = (1, 2)
    mixing: Rule = "metropolis"

    def __post_init__(self):
        if not self.offsets:
            raise BadInput("offsets are one or more whole numbers >= 1, got none")

    def ends(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        node = np.arange(n)
        return node, node + np.array(self.offsets)[:, None]


@dataclass(frozen=True)
class Complete(_Linked):
    """Every node talks to every other node. The AD-GDA paper calls it a mesh.

    One exchange of uncompressed models averages them exactly, at n (n - 1) messages per round.

    Args:
        mixing: How the weights of W follow from the graph, as in `Ring`. Default: "metropolis".

    Example:
        >>> import fairmesh as fm
        >>> [mixing] = fm.topologies.Complete().build(5)
        >>> round(mixing.gap, 6)
        1.0
    """

    mixing: Rule = "metropolis"

    def ends(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        node = np.arange(n)
        return node, node[:, None]


@dataclass(frozen=True)
class Star(_Linked):
    """Node 0 talks to all other nodes, and they talk only to node 0.

    Args:
        mixing: How the weights of W follow from the graph, as in `Ring`; "uniform" is refused for more than two nodes,
            whose degrees differ. Default: "metropolis".

    Example:
        >>> import fairmesh as fm
        >>> [mixing] = fm.topologies.Star().build(5)
        >>> mixing.degrees.tolist()
        [4, 1, 1, 1, 1]
    """

    mixing: Rule = "metropolis"

    def ends(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array(0), np.arange(n)


@dataclass(frozen=True)
class Hypercube(_Linked):
    """Nodes whose numbers differ in exactly one bit talk: log2(n) neighbours each.

    The number of nodes must be a power of two.

    Args:
        mixing: How the weights of W follow from the graph, as in `Ring`. Default: "metropolis".

    Example:
        >>> import fairmesh as fm
        >>> [mixing] = fm.topologies.Hypercube().build(8)
        >>> round(mixing.gap, 3)
        0.5
    """

    mixing: Rule = "metropolis"

    def ends(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        if n & (n - 1):
            raise BadInput(f"a hypercube needs a power of two as the number of nodes, got {n}")
        node, bits = np.arange(n), np.arange(n.bit_length() - 1)
        return node, node ^ (1 << bits[:, None])


@dataclass(frozen=True)
class Exponential(_Linked):
    """Node i talks to the nodes i + 2^k and i - 2^k (modulo n): few edges and a large spectral gap, for any n.

    Args:
        mixing: How the weights of W follow from the graph, as in `Ring`. Default: "metropolis".

    Example:
        >>> import fairmesh as fm
        >>> [mixing] = fm.topologies.Exponential().build(50)
        >>> int(mixing.degrees.max()), round(mixing.gap, 2)
        (12, 0.31)
    """

    mixing: Rule = "metropolis"

    def ends(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        node, hops = np.arange(n), 1 << np.arange((n - 1).bit_length())
        return node, node + hops[:, None]


@dataclass(frozen=True)
class ErdosRenyi(Topology):
    """A random graph: each pair of nodes is linked with the same probability, independently.

    The graph is drawn again, up to 100 times, until it is connected.

    Args:
        probability: Probability of each edge, in (0, 1]. Above ln(n) / n the graph is likely connected.
        seed: Seed of the graph, not of training. Default: 0.
        mixing: How the weights of W follow from the graph, as in `Ring`. Default: "metropolis".

    Example:
        >>> import fairmesh as fm
        >>> [mixing] = fm.topologies.ErdosRenyi(0.5, seed=1).build(10)
        >>> mixing.n
        10
    """

    probability: UpToOne
    seed: int = 0
    mixing: Rule = "metropolis"

    def graphs(self, n: int) -> list[Mixing]:
        import networkx

        advice = f"use a probability above ln(n) / n = {np.log(max(n, 2)) / n:.3f}"
        return _connected(n, lambda seed: networkx.fast_gnp_random_graph(n, self.probability, seed), self, advice)


@dataclass(frozen=True)
class RandomRegular(Topology):
    """A random graph in which every node has the same number of neighbours.

    The graph is drawn again, up to 100 times, until it is connected.

    Args:
        degree: Neighbours of each node, 1 <= degree < n; degree * n must be even.
        seed: Seed of the graph, not of training. Default: 0.
        mixing: How the weights of W follow from the graph, as in `Ring`. Default: "metropolis".

    Example:
        >>> import fairmesh as fm
        >>> [mixing] = fm.topologies.RandomRegular(3).build(8)
        >>> mixing.degrees.tolist()
        [3, 3, 3, 3, 3, 3, 3, 3]
    """

    degree: int
    seed: int = 0
    mixing: Rule = "metropolis"

    def graphs(self, n: int) -> list[Mixing]:
        if not 1 <= self.degree < n or (self.degree * n) % 2:
            raise BadInput(
                f"no graph of {n} nodes has degree {self.degree} everywhere: need 1 <= degree < n, degree * n even"
            )
        import networkx

        return _connected(n, lambda seed: networkx.random_regular_graph(self.degree, n, seed), self, "use degree >= 3")


def _connected(n: int, draw: Callable[[int], Any], topology: ErdosRenyi | RandomRegular, advice: str) -> list[Mixing]:
    """Returns the first connected one of 100 random graphs."""
    import networkx

    for attempt in range(100):
        graph = draw(topology.seed + 1_000_003 * attempt)
        if networkx.is_connected(graph):
            return [mixing_matrix(networkx.to_scipy_sparse_array(graph, nodelist=range(n)), topology.mixing)]
    raise BadInput(f"{topology}: 100 graphs of {n} nodes were all disconnected; {advice}")


@dataclass(frozen=True)
class Edges(_Linked):
    """A graph given by its edges. Messages travel both ways along each edge.

    `Edges.of(graph)` takes any undirected networkx graph.

    Args:
        edges: Pairs [i, j] of nodes, which are numbered from 0.
        mixing: How the weights of W follow from the graph, as in `Ring`. Default: "metropolis".

    Example:
        >>> import fairmesh as fm
        >>> [mixing] = fm.topologies.Edges([(0, 1), (1, 2), (2, 3)]).build(4)
        >>> mixing.degrees.tolist()
        [1, 2, 2, 1]
    """

    edges: tuple[tuple[int, int], ...]
    mixing: Rule = "metropolis"

    @staticmethod
    def of(graph: "networkx.Graph", mixing: Rule = "metropolis") -> "Edges":
        """Returns the edges of a networkx graph, with its nodes numbered in their order.

        Args:
            graph: An undirected graph.
            mixing: As in `Edges`.
        """
        if graph.is_directed():
            raise BadInput("the graph is directed; messages travel both ways, so give an undirected graph")
        number = {node: i for i, node in enumerate(graph.nodes)}
        return Edges(tuple((number[a], number[b]) for a, b in graph.edges()), mixing)

    def ends(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        for i, j in self.edges:
            if not (0 <= i < n and 0 <= j < n):
                raise BadInput(f"edge [{i}, {j}] names a node outside 0..{n - 1}")
        first, second = np.array(self.edges, dtype=int).reshape(-1, 2).T
        return first, second


@dataclass(frozen=True)
class Matrix(Topology):
    """A given mixing matrix W, checked to be symmetric and doubly stochastic, and to average the nodes' values.

    Args:
        rows: W (n, n): nested lists, an array or a scipy sparse matrix. A sparse matrix of more than 200 nodes is kept
            by its entries. In an experiment file, `rows = []` where the matrix is given by its entries.
        entries: The entries of W that are not zero, as [i, j, weight] with nodes numbered from 0. Default: ().

    Example:
        >>> import fairmesh as fm
        >>> [mixing] = fm.topologies.Matrix([[0.75, 0.25], [0.25, 0.75]]).build(2)
        >>> mixing.gap
        0.5
    """

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
        with refusing("a mixing matrix is a list of rows of numbers", TypeError, ValueError):
            object.__setattr__(self, "rows", tuple(tuple(map(float, row)) for row in self.rows))
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
    """A time-varying graph: topologies taken in turn, each for a number of rounds.

    A single topology may be disconnected; together they must connect all nodes.

    Args:
        topologies: The topologies, in the order in which they are used.
        every: Rounds for which each one is used, >= 1. Default: 1.

    Example:
        >>> import fairmesh as fm
        >>> pairs = [fm.topologies.Edges([(0, 1), (2, 3)]), fm.topologies.Edges([(1, 2), (3, 0)])]
        >>> len(fm.topologies.Changing(pairs).build(4))
        2
    """

    topologies: tuple[Topology, ...]
    every: Count = 1

    def __post_init__(self):
        if not self.topologies:
            raise BadInput("a schedule of graphs needs at least one topology")

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
