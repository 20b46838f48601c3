"""All nodes in this process: mixing is a product with W."""

from collections.abc import Mapping, Sequence

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from fairmesh.codec import HEADER_BYTES, part_sizes, plain_size
from fairmesh.compression import FLOAT_BITS
from fairmesh.errors import BadInput
from fairmesh.mixing import Mixing, union_of
from fairmesh.networks.base import Delivery, Network, Part, Traffic

_DENSE_UP_TO = 128  # nodes; a larger W stays sparse
_CROWDED = 32  # neighbours; a node with more, and with over four times the usual number, gets a dense row of its own


class _Mix:
    """x -> W x for rows (..., n, dim): dense, or neighbour by neighbour with dense rows for the few crowded nodes."""

    def __init__(self, mixing: Mixing, order: np.ndarray, device: torch.device, dtype: torch.dtype):
        matrix = mixing.matrix[order][:, order].tocsr()
        self.dense: Tensor | None = None
        self.hubs: Tensor | None = None
        if mixing.n <= _DENSE_UP_TO:
            self.dense = torch.as_tensor(matrix.toarray(), dtype=dtype, device=device)
            return
        counts = np.diff(matrix.indptr)
        hubs = np.flatnonzero(counts > max(_CROWDED, 4 * np.median(counts)))
        if len(hubs):
            self.hubs = torch.as_tensor(hubs, device=device)
            self.hub_rows = torch.as_tensor(matrix[hubs].toarray(), dtype=dtype, device=device)
            keep = np.ones(mixing.n)
            keep[hubs] = 0.0
            matrix = scipy.sparse.csr_array(scipy.sparse.diags_array(keep) @ matrix)
            matrix.eliminate_zeros()
            counts = np.diff(matrix.indptr)
        slots = int(counts.max())
        neighbours = np.tile(np.arange(mixing.n)[:, None], (1, slots))  # rows with fewer neighbours add 0 * themselves
        weights = np.zeros((mixing.n, slots))
        slot = np.arange(matrix.nnz) - np.repeat(matrix.indptr[:-1], counts)
        row = np.repeat(np.arange(mixing.n), counts)
        neighbours[row, slot], weights[row, slot] = matrix.indices, matrix.data
        self.neighbours = [torch.as_tensor(column, device=device) for column in neighbours.T]
        self.weights = [torch.as_tensor(column[:, None], dtype=dtype, device=device) for column in weights.T]

    def __call__(self, rows: Tensor) -> Tensor:
        if self.dense is not None:
            return self.dense @ rows
        total = torch.zeros_like(rows)
        for neighbour, weight in zip(self.neighbours, self.weights):
            total.addcmul_(rows.index_select(-2, neighbour), weight)
        if self.hubs is not None:
            total.index_copy_(-2, self.hubs, self.hub_rows @ rows)
        return total


class _MemoryDelivery(Delivery):
    def __init__(self, parts: Mapping[str, Part], mix: _Mix, fixed: bool, sent: Traffic):
        self._parts, self._mix, self._fixed, self.sent = parts, mix, fixed, sent

    def mix(self, name: str) -> Tensor:
        return self._mix(self._parts[name].code.decode())

    def follow(self, name: str, kept: Tensor) -> Tensor:
        arrived = self._parts[name].code.decode()
        return kept + (self._mix(arrived) if self._fixed else arrived)


class MemoryNetwork(Network):
    """Every node is hosted here, in any order; the graph stays, or cycles through a schedule.

    While W is fixed a node keeps the mixed public copy s_i of its neighbours as one row. When it changes, a node must
    keep every neighbour's copy and mix those anew; since all receivers of a copy hold the same numbers, here one stack
    of copies stands for all of theirs."""

    def __init__(
        self,
        cycle: Sequence[Mixing],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        identities: Sequence[int] | None = None,
        order: Sequence[int] | None = None,
        count_bytes: bool = True,
    ):
        self.n = cycle[0].n
        place = np.arange(self.n) if order is None else np.asarray(order)
        if sorted(place.tolist()) != list(range(self.n)):
            raise BadInput(f"order must name each of the {self.n} nodes once")
        names = np.arange(self.n) if identities is None else np.asarray(identities)
        if len(set(names.tolist())) != self.n:
            raise BadInput(f"identities must be {self.n} different whole numbers, got {names.tolist()}")
        device = torch.device(device)
        self.hosted = torch.as_tensor(place, device=device)
        self.identities = torch.as_tensor(names[place], dtype=torch.int64, device=device)
        self.own = torch.eye(self.n, dtype=dtype, device=device)[self.hosted]
        self.by_identity = torch.as_tensor(names.argsort(), device=device)
        self._fixed = len(cycle) == 1
        self._mixes = [_Mix(mixing, place, device, dtype) for mixing in cycle]
        degrees = np.stack([mixing.degrees[place] for mixing in cycle])
        self._degrees = torch.as_tensor(degrees, dtype=torch.float64, device=device)  # (cycle, nodes)
        reach = union_of(cycle).degrees[place]
        self._reach = torch.as_tensor(reach, dtype=torch.float64, device=device)  # neighbours in any round
        self._nobody = torch.zeros((), dtype=torch.float64, device=device)
        self._count_bytes = count_bytes

    def _mix_of(self, round_index: Tensor) -> _Mix:
        return self._mixes[0] if self._fixed else self._mixes[int(round_index) % len(self._mixes)]

    def exchange(self, parts: Mapping[str, Part], round_index: Tensor) -> Delivery:
        degrees = self._degrees[round_index % len(self._mixes)]
        bits = sum(part.nominal_bits * (self._reach if part.followed else degrees) for part in parts.values())
        sent = self._by_nodes(bits + self._nobody, self._bytes_sent(parts, degrees))
        return _MemoryDelivery(parts, self._mix_of(round_index), self._fixed, sent)

    def copies(self, models: Tensor) -> Tensor:
        return torch.zeros_like(models)

    def mixed_copies(self, kept: Tensor, round_index: Tensor) -> Tensor:
        return kept if self._fixed else self._mix_of(round_index)(kept)

    def broadcast(self, row: Tensor, receivers: Tensor) -> tuple[Tensor, Traffic]:
        sent = receivers.double().sum(dim=-1) * (FLOAT_BITS * row.shape[-1])
        received = receivers.double().sum(dim=-1) * plain_size(row)
        return row.expand(*row.shape[:-2], self.n, row.shape[-1]), self._by_server(sent, received)

    def average(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Traffic]:
        sent = (weights != 0).double() * (FLOAT_BITS * rows.shape[-1])
        return weights.unsqueeze(-2) @ rows, self._by_nodes(sent, (weights != 0).double() * plain_size(rows))

    def report(self, values: Tensor, senders: Tensor) -> tuple[Tensor, Traffic]:
        asked = senders.double()
        return self.gather(values).mT, self._by_nodes(asked * FLOAT_BITS, asked * plain_size(values))

    def _by_nodes(self, bits: Tensor, size: Tensor) -> Traffic:
        return Traffic(bits, self._nobody, size, self._nobody)

    def _by_server(self, bits: Tensor, size: Tensor) -> Traffic:
        return Traffic(self._nobody, bits, self._nobody, size)

    def _bytes_sent(self, parts: Mapping[str, Part], degrees: Tensor) -> Tensor:
        """Each node's message times its neighbours of this round; to those of other rounds go only the differences
        that they follow."""
        if not self._count_bytes:
            return self._nobody
        sizes = {name: part_sizes(part.code).double() for name, part in parts.items()}
        whole = sum(sizes.values()) + HEADER_BYTES
        followed = [sizes[name] for name, part in parts.items() if part.followed]
        elsewhere = self._reach - degrees
        return degrees * whole + (elsewhere * (sum(followed) + HEADER_BYTES) if followed else 0.0)

    def gather(self, rows: Tensor) -> Tensor:
        return torch.empty_like(rows).index_copy_(-2, self.hosted, rows)
