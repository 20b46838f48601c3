"""Mixing matrices: symmetric, doubly stochastic, sparse; how fast they mix, and why one is refused."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import scipy.sparse

from fairmesh.errors import BadInput

Rule = Literal["metropolis", "uniform", "max-degree"]

DENSE_EIGENVALUES_UP_TO = 1500  # nodes; above, the extreme eigenvalues come from a sparse solver


@dataclass(frozen=True, eq=False)
class Mixing:
    """A mixing matrix: symmetric, doubly stochastic weights W over the nodes, kept sparse.

    w_ij is the weight that node i gives to what node j sends; w_ij = 0 where they do not talk.

    Args:
        matrix: W (n, n), float64. Checked to be symmetric with non-negative entries and rows that sum to one.
        liars: How many neighbours of each node may send anything; gossip towards copies is clipped if > 0. Default: 0.

    Example:
        >>> import fairmesh as fm
        >>> [mixing] = fm.topologies.Ring().build(10)
        >>> round(mixing.gap, 3), round(mixing.beta, 3)
        (0.127, 1.333)
        >>> round(mixing.consensus_step_of_theorem(delta=0.5), 6)
        0.00089
    """

    matrix: scipy.sparse.csr_array
    liars: int = 0

    def __post_init__(self):
        _check_doubly_stochastic(self.matrix)

    @property
    def n(self) -> int:
        """The number of nodes."""
        return len(self.matrix.indptr) - 1

    @cached_property
    def degrees(self) -> np.ndarray:
        """The number of neighbours of each node, itself not counted: (n,)."""
        rows, columns = self.matrix.nonzero()
        return np.bincount(rows[rows != columns], minlength=self.n)

    @cached_property
    def _extreme_eigenvalues(self) -> tuple[float, float]:
        """The second largest and the smallest eigenvalue."""
        if self.n == 1:
            return 0.0, 0.0
        every = _eigenvalues_if_circulant(self.matrix)
        if every is not None:
            return float(every[-2]), float(every[0])
        if self.n <= DENSE_EIGENVALUES_UP_TO:
            values = np.linalg.eigvalsh(self.matrix.toarray())
            return float(values[-2]), float(values[0])
        lowest = float((2 * self.matrix.diagonal() - 1).min())  # Gershgorin's bound
        return _extreme_eigenvalue(self.matrix, 1.0, +1), _extreme_eigenvalue(self.matrix, lowest, -1)

    @property
    def gap(self) -> float:
        """rho, the spectral gap: 1 minus the second largest eigenvalue modulus. In [0, 1]; larger mixes faster."""
        second, smallest = self._extreme_eigenvalues
        return 1.0 - max(abs(second), abs(smallest)) if self.n > 1 else 1.0

    @property
    def beta(self) -> float:
        """beta = ||I - W||_2, 1 minus the smallest eigenvalue of W. In [0, 2]."""
        return 1.0 - self._extreme_eigenvalues[1] if self.n > 1 else 0.0

    def consensus_step_of_theorem(self, delta: float) -> float:
        """Returns gamma, the consensus step size of Theorems 1 and 2 of the AD-GDA paper.

            gamma = rho^2 delta / (16 rho + rho^2 + 4 beta^2 + 2 rho beta^2 - 8 rho delta)

        It is a worst-case bound; much larger steps are stable in practice.

        Args:
            delta: The compressor's guaranteed delta, in (0, 1].
        """
        if not 0 < delta <= 1:
            raise BadInput(f"a compressor's delta must lie in (0, 1], got {delta}")
        rho, beta = self.gap, self.beta
        return rho**2 * delta / (16 * rho + rho**2 + 4 * beta**2 + 2 * rho * beta**2 - 8 * rho * delta)

    def check_mixes(self) -> None:
        """Raises BadInput if the graph is disconnected or if some nodes never agree under W."""
        links = self.matrix > 1e-12
        lowest = _lowest_connected(links)
        if lowest.any():
            raise BadInput(
                f"the graph is disconnected: {_pieces_in_words(lowest)}; add edges between them; to train every "
                'site alone, keep any connected graph and use the algorithm "local"'
            )
        # An eigenvalue of -1 means two halves with links only across, that is, no way to return in an odd number of
        # hops; then, and only then, nodes at even and at odd times fall apart. No eigenvalue need be found.
        even_and_odd = scipy.sparse.block_array([[None, links], [links, None]])
        if _lowest_connected(even_and_odd).any():
            raise BadInput(
                "the mixing matrix has spectral gap 0: an eigenvalue of -1 makes two halves of the graph swap values "
                "forever; give nodes a positive weight on themselves"
            )


def with_liars(cycle: Sequence[Mixing], liars: int) -> list[Mixing]:
    """Returns the same graphs, over which `liars` neighbours of each node may send anything.

    Raises:
        BadInput: If a node has no other neighbours.
    """
    fewest = min(int(mixing.degrees.min()) for mixing in cycle)
    if liars and fewest <= liars:
        raise BadInput(
            f"lying_neighbours = {liars}, but a node has only {fewest} neighbours, so it could follow nobody; use a "
            "graph with more edges"
        )
    return [replace(mixing, liars=liars) if liars else mixing for mixing in cycle]


def _eigenvalues_if_circulant(matrix: scipy.sparse.csr_array) -> np.ndarray | None:
    """Returns the eigenvalues in rising order, if every row is the one before moved on by one place; else None."""
    entries, n = matrix.tocoo(), len(matrix.indptr) - 1
    distances = (entries.col - entries.row) % n
    row = np.bincount(distances, entries.data, n) / n
    if not np.allclose(entries.data, row[distances], rtol=0, atol=1e-12):  # an entry that is missing lowers the mean
        return None
    return np.sort(np.fft.fft(row).real)


def _extreme_eigenvalue(matrix: scipy.sparse.csr_array, bound: float, sign: int) -> float:
    """Returns the largest (sign +1) or smallest (-1) eigenvalue on vectors of mean zero; none lies beyond `bound`."""
    import scipy.sparse.linalg

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
        # If a graph mixes slowly (a ring of thousands of nodes), its eigenvalues are close together. Such graphs are
        # easily cut in two, so W factors cheaply, and the eigenvalues of the inverse are far apart.
        rough = sign * largest(plain, tol=1e-4)
        shift = sign * min(sign * bound + 1e-6, sign * rough + 1e-3)
        factors = scipy.sparse.linalg.splu(scipy.sparse.csc_array(matrix - shift * scipy.sparse.eye_array(n)))
        return shift - sign / largest(lambda x: -sign * centred(factors.solve(centred(x))))


def _lowest_connected(links: Any) -> np.ndarray:
    """Returns for each node the lowest number of the nodes that it is connected with. (`scipy.sparse.csgraph` knows
    too, but takes longer to import than this does.)"""
    rows, columns = links.nonzero()
    lowest = np.arange(links.shape[0])
    while True:
        lower = lowest.copy()
        np.minimum.at(lower, rows, lowest[columns])
        lower = lower[lower]
        if np.array_equal(lower, lowest):
            return lowest
        lowest = lower


def _pieces_in_words(lowest: np.ndarray) -> str:
    groups = [np.flatnonzero(lowest == node) for node in np.unique(lowest)]
    shown = [f"{{{', '.join(map(str, g[:6]))}{', ...' if len(g) > 6 else ''}}}" for g in groups[:4]]
    return f"{len(groups)} pieces, {' and '.join(shown)}{' and more' if len(groups) > 4 else ''}"


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


def mixing_matrix(links: Any, rule: Rule) -> Mixing:
    """Returns the mixing matrix of a graph.

    The weight of an edge is 1 / (1 + the larger degree of its ends) by the rule "metropolis", 1 / (1 + the largest
    degree of the graph) by "max-degree", and 1 / (1 + degree) by "uniform", which is symmetric only if all degrees are
    equal.

    Args:
        links: A sparse matrix (n, n) with a positive number where two nodes are linked, in either place; its diagonal
            does not matter.
        rule: How the weights follow from the degrees.
    """
    if rule not in get_args(Rule):
        raise BadInput(f"mixing is one of {', '.join(map(repr, get_args(Rule)))}, got {rule!r}")
    n = links.shape[0]
    rows, columns = (links + links.T).nonzero()
    rows, columns = rows[rows != columns], columns[rows != columns]
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


def union_of(cycle: Sequence[Mixing]) -> Mixing:
    """Returns the mean of a cycle of mixing matrices, whose edges are the edges of all of them."""
    if len(cycle) == 1:
        return cycle[0]
    total = sum((mixing.matrix for mixing in cycle[1:]), cycle[0].matrix)
    return Mixing(scipy.sparse.csr_array(total / len(cycle)))
