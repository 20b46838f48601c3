"""Computes W x for a stack of rows, in the way that is fastest for the graph: as a dense product, as a sum of rolled
stacks, or neighbour by neighbour. The choice was measured (docs/results/performance.md). It depends only on the graph
and the device, so that a second run adds in the same order."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from fairmesh.topology.mixing import Mixing

_DENSE_UP_TO = 16  # nodes on a CPU; for so few, one small product is fastest
_ROLLED_BELOW, _SPARSE_BELOW = 0.2, 0.15  # share of nonzero entries of W below which these are faster on a CPU
_SPARSE_BELOW_ON_GPU = 0.34
_ALWAYS_SPARSE_ABOVE = 2048  # nodes; a larger W is never stored densely
_CROWDED = 32  # neighbours; a node with more, and with over four times the usual number, gets a dense row of its own


class _Rolled(NamedTuple):
    """A graph that looks the same from every node: nodes on a ring (n,) or a torus (rows, columns), and the weight of
    a node by its distance in steps along each axis."""

    shape: tuple[int, ...]
    weights: dict[tuple[int, ...], float]

    @staticmethod
    def of(matrix: scipy.sparse.csr_array) -> "_Rolled | None":
        n = len(matrix.indptr) - 1
        entries = matrix.tocoo()
        shapes = [(n,), *((n // k, k) for k in range(2, n // 2 + 1) if n % k == 0)]
        first = matrix[[0]].tocoo()
        for shape in shapes:
            at = [np.stack(np.unravel_index(index, shape)) for index in (entries.row, entries.col)]
            steps = np.ravel_multi_index((at[1] - at[0]) % np.array(shape)[:, None], shape)
            weights = np.zeros(n)
            weights[first.col] = first.data  # of node 0, whose neighbours' numbers are the steps themselves
            if matrix.nnz == n * first.nnz and np.allclose(weights[steps], entries.data, rtol=1e-12, atol=0):
                away = zip(*np.unravel_index(first.col, shape))
                return _Rolled(shape, {tuple(map(int, step)): float(w) for step, w in zip(away, first.data)})
        return None

    def __call__(self, rows: Tensor, onto: Tensor | None) -> Tensor:
        grid, own = rows.unflatten(-2, self.shape), self.weights.get((0,) * len(self.shape), 0.0)
        total = grid * own if onto is None else torch.add(onto.unflatten(-2, self.shape), grid, alpha=own)
        ahead = (slice(None),) * (grid.ndim - 1 - len(self.shape))
        for step, weight in self.weights.items():
            if any(step):  # the part that does not cross an end of the grid, and the parts that wrap around
                for pieces in itertools.product(*(_pieces(s, length) for s, length in zip(step, self.shape))):
                    to, source = (ahead + side for side in zip(*pieces))
                    total[to].add_(grid[source], alpha=weight)
        return total.flatten(-1 - len(self.shape), -2)


def _pieces(step: int, length: int) -> list[tuple[slice, slice]]:
    """Returns the slices of i and of i + step along one axis, wrapped around."""
    if step == 0:
        return [(slice(None), slice(None))]
    return [(slice(0, length - step), slice(step, length)), (slice(length - step, length), slice(0, step))]


class _Slots:
    """Mixes neighbour by neighbour, with dense rows for the few nodes of high degree; one table per graph."""

    def __init__(self, matrices: Sequence[scipy.sparse.csr_array], device: torch.device, dtype: torch.dtype):
        n = len(matrices[0].indptr) - 1
        counts = np.stack([np.diff(matrix.indptr) for matrix in matrices])
        crowded = counts > np.maximum(_CROWDED, 4 * np.median(counts, axis=-1, keepdims=True))
        hubs = np.flatnonzero(crowded.any(axis=0))
        self.hubs = torch.as_tensor(hubs, device=device) if len(hubs) else None
        if len(hubs):
            rows = np.stack([matrix[hubs].toarray() for matrix in matrices])
            self.hub_rows = torch.as_tensor(rows, dtype=dtype, device=device)
            keep = np.ones(n)
            keep[hubs] = 0.0
            matrices = [scipy.sparse.csr_array(scipy.sparse.diags_array(keep) @ matrix) for matrix in matrices]
            for matrix in matrices:
                matrix.eliminate_zeros()
        slots = max(int(np.diff(matrix.indptr).max()) for matrix in matrices)
        tables = [_slots(matrix, slots) for matrix in matrices]
        self.neighbours = torch.as_tensor(np.stack([t[0] for t in tables]), device=device)  # (cycle, slots, n)
        self.weights = torch.as_tensor(np.stack([t[1] for t in tables]), dtype=dtype, device=device).unsqueeze(-1)

    def __call__(self, rows: Tensor, round_index: Tensor) -> Tensor:
        neighbours, weights = current(self.neighbours, round_index), current(self.weights, round_index)
        total = rows.index_select(-2, neighbours[0]) * weights[0]
        for neighbour, weight in zip(neighbours[1:], weights[1:]):
            total.addcmul_(rows.index_select(-2, neighbour), weight)
        if self.hubs is not None:
            total.index_copy_(-2, self.hubs, current(self.hub_rows, round_index) @ rows)
        return total


def _slots(matrix: scipy.sparse.csr_array, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns each node's neighbours and their weights (slots, n). A node with fewer neighbours adds 0 times itself."""
    n, counts = len(matrix.indptr) - 1, np.diff(matrix.indptr)
    neighbours, weights = np.tile(np.arange(n), (slots, 1)), np.zeros((slots, n))
    slot = np.arange(matrix.nnz) - np.repeat(matrix.indptr[:-1], counts)
    node = np.repeat(np.arange(n), counts)
    neighbours[slot, node], weights[slot, node] = matrix.indices, matrix.data
    return neighbours, weights


def current(tables: Tensor, round_index: Tensor) -> Tensor:
    """Returns this round's table, of tables (cycle, ...) that are used in turn."""
    if len(tables) == 1:
        return tables[0]
    now = (round_index % len(tables)).to(tables.device)
    return tables.index_select(0, now.reshape(1)).squeeze(0)


class Product:
    """The map x -> W_t x for rows (..., n, dim) in the given order of nodes. W is fixed or cycles."""

    def __init__(self, cycle: Sequence[Mixing], order: np.ndarray, device: torch.device, dtype: torch.dtype):
        matrices = [mixing.matrix[order][:, order].tocsr() for mixing in cycle]
        n = cycle[0].n
        filled = max(matrix.nnz for matrix in matrices) / n**2
        self.way, self._rolled = "dense", None
        if device.type == "cpu" and n > _DENSE_UP_TO:
            self._rolled = _Rolled.of(matrices[0]) if len(cycle) == 1 and filled <= _ROLLED_BELOW else None
            self.way = "rolled" if self._rolled else "neighbours" if filled <= _SPARSE_BELOW else "dense"
        elif device.type != "cpu" and filled <= _SPARSE_BELOW_ON_GPU:
            self.way = "neighbours"
        if n > _ALWAYS_SPARSE_ABOVE and self.way == "dense":
            self.way = "neighbours"
        if self.way == "dense":
            self._dense = torch.as_tensor(np.stack([m.toarray() for m in matrices]), dtype=dtype, device=device)
        elif self.way == "neighbours":
            self._slots = _Slots(matrices, device, dtype)

    def __call__(self, rows: Tensor, round_index: Tensor, onto: Tensor | None = None) -> Tensor:
        """Returns W_t rows, added to `onto` if given."""
        if self._rolled:
            return self._rolled(rows, onto)
        if self.way == "dense":
            stack = rows.flatten(0, -3) if rows.ndim != 3 else rows
            matrix = current(self._dense, round_index).expand(len(stack), -1, -1)
            mixed = torch.bmm(matrix, stack) if onto is None else torch.baddbmm(onto.view_as(stack), matrix, stack)
            return mixed.view_as(rows)
        mixed = self._slots(rows, round_index)
        return mixed if onto is None else mixed.add_(onto)
