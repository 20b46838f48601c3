"""Graphs and their mixing matrices: who talks to whom, with which weights, and how fast that mixes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import networkx
import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from fairmesh.errors import BadInput
from fairmesh.settings import family

Rule = Literal["metropolis", "uniform", "max-degree"]

_DENSE_EIGENVALUES_UP_TO = 1500  # nodes; above, the extreme eigenvalues come from a sparse solver


@dataclass(frozen=True, eq=False)
class Mixing:
    """A symmetric doubly stochastic matrix W over nodes, kept sparse."""

    matrix: scipy.sparse.csr_array  # W (n, n), float64

    def __post_init__(self):
        _check_doubly_stochastic(self.matrix)

    @property
    def n(self) -> int:
        return len(self.matrix.indptr) - 1

    @cached_property
    def degrees(self) -> np.ndarray:
        """How many neighbours each node sends to, itself not counted."""
        off_diagonal = self.matrix - scipy.sparse.diags_array(self.matrix.diagonal())
        return np.diff(_without_zeros(off_diagonal).indptr)

    @cached_property
    def _extreme_eigenvalues(self) -> tuple[float, float]:
        """The second largest and the smallest eigenvalue."""
        if self.n == 1:
            return 0.0, 0.0
        if self.n <= _DENSE_EIGENVALUES_UP_TO:
            values = np.linalg.eigvalsh(self.matrix.toarray())
            return float(values[-2]), float(values[0])
        lowest = float((2 * self.matrix.diagonal() - 1).min())  # Gershgorin's bound
        return _extreme_eigenvalue(self.matrix, 1.0, +1), _extreme_eigenvalue(self.matrix, lowest, -1)

    @property
    def gap(self) -> float:
        """rho, the spectral gap: 1 minus the second largest eigenvalue modulus."""
        second, smallest = self._extreme_eigenvalues
        return 1.0 - max(abs(second), abs(smallest)) if self.n > 1 else 1.0

    @property
    def beta(self) -> float:
        """beta = ||I - W||_2."""
        return 1.0 - self._extreme_eigenvalues[1] if self.n > 1 else 0.0

    def consensus_rate(self, delta: float) -> float:
        """gamma, the consensus step size of Theorems 1 and 2 for a compressor with this delta."""
        if not 0 < delta <= 1:
            raise BadInput(f"a compressor's delta lies in (0, 1], got {delta}")
        rho, beta = self.gap, self.beta
        return rho**2 * delta / (16 * rho + rho**2 + 4 * beta**2 + 2 * rho * beta**2 - 8 * rho * delta)

    def check_mixes(self) -> None:
        """Refuses a matrix under which some nodes never agree."""
        links = _without_zeros(self.matrix > 1e-12)
        if scipy.sparse.csgraph.connected_components(links, directed=False)[0] > 1:
            raise BadInput(f"the graph is disconnected: {_pieces_in_words(links)}; add edges between them")
        # An eigenvalue of -1 means two halves with links only across, that is, no way to return in an odd number of
        # hops; then, and only then, nodes at even and at odd times fall apart. No eigenvalue need be found.
        even_and_odd = scipy.sparse.block_array([[None, links], [links, None]])
        if scipy.sparse.csgraph.connected_components(even_and_odd, directed=False)[0] > 1:
            raise BadInput(
                "the mixing matrix has spectral gap 0: an eigenvalue of -1 keeps two halves of the graph swapping for "
                "ever; give nodes a positive weight on themselves"
            )


def _extreme_eigenvalue(matrix: scipy.sparse.csr_array, bound: float, sign: int) -> float:
    """The largest (sign +1) or smallest (-1) eigenvalue on vectors of mean zero; none lies beyond `bound`."""
    n = len(matrix.indptr) - 1
    start = np.random.default_rng(0).standard_normal(n)

    def largest(product, **limits) -> float:
        operator = scipy.sparse.linalg.LinearOperator((n, n), matvec=product, dtype=np.float64)  # type: ignore[call-arg]
        values = scipy.sparse.linalg.eigsh(operator, 1, which="LA", return_eigenvectors=False, v0=start, **limits)
        return float(values[0])

    def centred(x: np.ndarray) -> np.ndarray:
        return x - x.mean()

    def plain(x: np.ndarray) -> np.ndarray:
        return sign * centred(matrix @ centred(x))

    try:
        return sign * largest(plain, maxiter=100, tol=1e-12)
    except scipy.sparse.linalg.ArpackNoConvergence:
        # Eigenvalues crowd where a graph mixes slowly (a ring of thousands); such graphs are easily cut in two, so W
        # factors cheaply, and the inverse spreads the crowd.
        rough = sign * largest(plain, tol=1e-4)
        shift = sign * min(sign * bound + 1e-6, sign * rough + 1e-3)
        factors = scipy.sparse.linalg.splu(scipy.sparse.csc_array(matrix - shift * scipy.sparse.eye_array(n)))
        return shift - sign / largest(lambda x: -sign * centred(factors.solve(centred(x))))


def _without_zeros(matrix) -> scipy.sparse.csr_array:
    matrix = scipy.sparse.csr_array(matrix)
    matrix.eliminate_zeros()
    return matrix


def _pieces_in_words(matrix) -> str:
    pieces, labels = scipy.sparse.csgraph.connected_components(matrix, directed=False)
    groups = [np.flatnonzero(labels == k) for k in range(pieces)]
    shown = [f"{{{', '.join(map(str, g[:6]))}{', ...' if len(g) > 6 else ''}}}" for g in groups[:4]]
    return f"{pieces} pieces, {' and '.join(shown)}{' and more' if pieces > 4 else ''}"


def _check_doubly_stochastic(matrix: scipy.sparse.csr_array, tolerance: float = 1e-9) -> None:
    rows, columns = matrix.shape  # type: ignore[misc]
    if rows != columns:
        raise BadInput(f"a mixing matrix is square, got {rows} x {columns}")
    if not np.all(np.isfinite(matrix.data)):
        raise BadInput("the mixing matrix has entries that are not finite")
    difference = abs(matrix - matrix.T).tocoo()
    if difference.nnz and difference.data.max() > tolerance:
        k = int(difference.data.argmax())
        i, j = int(difference.row[k]), int(difference.col[k])
        raise BadInput(
            f"mixing matrix is not symmetric: W[{i}, {j}] = {matrix[i, j]:.6g}, W[{j}, {i}] = {matrix[j, i]:.6g}"
        )
    if matrix.nnz and matrix.data.min() < 0:
        k = int(matrix.tocoo().data.argmin())
        i, j = int(matrix.tocoo().row[k]), int(matrix.tocoo().col[k])
        raise BadInput(f"mixing matrix has a negative weight: W[{i}, {j}] = {matrix[i, j]:.6g}")
    sums = matrix.sum(axis=1)
    worst = int(np.argmax(abs(sums - 1)))
    if abs(sums[worst] - 1) > tolerance:
        raise BadInput(f"mixing matrix is not stochastic: row {worst} sums to {sums[worst]:.9g}, not 1")


def mixing_matrix(graph: networkx.Graph, rule: Rule) -> Mixing:
    """W of a graph: `metropolis` 1 / (1 + max of both degrees), `max-degree` 1 / (1 + largest degree), or `uniform`
    1 / (1 + degree), which is symmetric only where all degrees agree."""
    if rule not in get_args(Rule):
        raise BadInput(f"mixing is one of {', '.join(map(repr, get_args(Rule)))}, got {rule!r}")
    n = graph.number_of_nodes()
    adjacency = networkx.to_scipy_sparse_array(graph, nodelist=range(n), dtype=float, format="coo")
    off = adjacency.row != adjacency.col
    rows, columns = adjacency.row[off], adjacency.col[off]
    degrees = np.bincount(rows, minlength=n)
    if rule == "uniform" and n and degrees.min() != degrees.max():
        raise BadInput(
            f"uniform weights need equal degrees, but node {degrees.argmin()} has {degrees.min()} neighbours and node "
            f"{degrees.argmax()} has {degrees.max()}; use mixing = 'metropolis'"
        )
    largest = degrees.max() if n else 0
    weights = 1.0 / (1.0 + (np.maximum(degrees[rows], degrees[columns]) if rule == "metropolis" else largest))
    off_diagonal = scipy.sparse.coo_array((np.broadcast_to(weights, rows.shape), (rows, columns)), shape=(n, n)).tocsr()
    return Mixing(scipy.sparse.csr_array(off_diagonal + scipy.sparse.diags_array(1.0 - off_diagonal.sum(axis=1))))


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
        return cycle


def union_of(cycle: Sequence[Mixing]) -> Mixing:
    """The mean of a cycle of mixing matrices: its edges are the edges of any of them."""
    if len(cycle) == 1:
        return cycle[0]
    total = cycle[0].matrix
    for mixing in cycle[1:]:
        total = total + mixing.matrix
    return Mixing(scipy.sparse.csr_array(total / len(cycle)))


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
        return Edges(tuple((number[a], number[b]) for a, b in graph.edges), mixing)

    def graphs(self, n: int) -> list[Mixing]:
        for i, j in self.edges:
            if not (0 <= i < n and 0 <= j < n):
                raise BadInput(f"edge [{i}, {j}] names a node outside 0..{n - 1}")
        return [mixing_matrix(_graph_of(n, self.edges), self.mixing)]


@dataclass(frozen=True)
class Matrix(Topology):
    """A given mixing matrix, checked to be symmetric, stochastic and mixing."""

    rows: tuple[tuple[float, ...], ...] = field(repr=False)

    def __post_init__(self):
        rows = self.rows.toarray() if scipy.sparse.issparse(self.rows) else self.rows  # type: ignore[attr-defined]
        object.__setattr__(self, "rows", tuple(tuple(map(float, row)) for row in rows))

    def graphs(self, n: int) -> list[Mixing]:
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


family(
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
