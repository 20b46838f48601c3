"""The network with all nodes in this process: mixing is a product with W."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fairmesh.compression import HEADER_BYTES, part_sizes
from fairmesh.errors import BadInput
from fairmesh.networks.base import Delivery, Network, Part
from fairmesh.networks.clipping import clipped_weights
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.networks.product import Product, current
from fairmesh.topology.mixing import Mixing, union_of


class SingleProcess(ProcessGroup):
    """One process that hosts every node."""

    def network(
        self, cycle: Sequence[Mixing], *, device: torch.device, dtype: torch.dtype, count_bytes: bool
    ) -> "MemoryNetwork":
        return MemoryNetwork(cycle, device=device, dtype=dtype, count_bytes=count_bytes)


class MemoryNetwork(Network):
    """Hosts every node in this process, in any order. The graph is fixed, or cycles through a schedule.

    With a fixed W, a node keeps the mixed public copy s_i of its neighbours as one row. With a changing W, a node must
    keep every neighbour's copy and mix them again in each round. All receivers of a copy have the same numbers, so one
    stack of copies serves all nodes."""

    def __init__(
        self,
        cycle: Sequence[Mixing],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        identities: Sequence[int] = (),
        secrets: Sequence[bytes] = (),  # of the hosted nodes, instead of their identities in random streams
        order: Sequence[int] = (),  # in which the nodes are hosted; (): that of their positions
        count_bytes: bool = True,
    ):
        place = np.asarray(order) if len(order) else np.arange(cycle[0].n)
        if sorted(place.tolist()) != list(range(cycle[0].n)):
            raise BadInput(f"order must name each of the {cycle[0].n} nodes once")
        super().__init__(cycle, place.tolist(), SingleProcess(), device, dtype, identities, secrets)
        device = self.device
        self._fixed = len(cycle) == 1 and not self.liars
        if self.liars:
            weights = np.stack([mixing.matrix[place][:, place].toarray() for mixing in cycle])
            self._weights = torch.as_tensor(weights, dtype=dtype, device=device)  # (cycle, nodes, nodes)
        self._product = Product(cycle, place, device, dtype)
        degrees = np.stack([mixing.degrees[place] for mixing in cycle])
        self._degrees = torch.as_tensor(degrees, dtype=torch.float64, device=device)  # (cycle, nodes)
        reach = union_of(cycle).degrees[place]
        self._reach = torch.as_tensor(reach, dtype=torch.float64, device=device)  # neighbours in any round
        self._count_bytes = count_bytes

    def exchange(self, parts: Mapping[str, Part], round_index: Tensor) -> Delivery:
        degrees = current(self._degrees, round_index)
        everywhere = sum(part.nominal_bits for part in parts.values() if part.followed)
        here = sum(part.nominal_bits for part in parts.values()) - everywhere
        bits = (everywhere + here) * degrees if self._fixed else everywhere * self._reach + here * degrees
        sent = self._sent_by_nodes(bits, self._bytes_sent(parts, degrees))
        held = dict(parts)
        return Delivery(self, lambda name: held[name].rows, held.pop, round_index, sent)

    def mixed(self, rows: Tensor, round_index: Tensor, onto: Tensor | None = None) -> Tensor:
        return self._product(rows, round_index, onto)

    def added_to(self, kept: Tensor, rows: Tensor, round_index: Tensor) -> Tensor:
        return self._product(rows, round_index, kept) if self._fixed else kept + rows

    def copies(self, models: Tensor) -> Tensor:
        return torch.zeros_like(models)

    def mixed_copies(self, kept: Tensor, round_index: Tensor) -> Tensor:
        return kept if self._fixed else self._product(kept, round_index)

    def _clipped_disagreement(self, own: Tensor, kept: Tensor, round_index: Tensor) -> Tensor:
        distances = torch.cdist(own, kept, compute_mode="donot_use_mm_for_euclid_dist")
        weights = clipped_weights(current(self._weights, round_index), distances, self.liars)
        return weights @ kept - weights.sum(dim=-1, keepdim=True) * own

    def _bytes_sent(self, parts: Mapping[str, Part], degrees: Tensor) -> Tensor:
        """Returns the bytes that each node sends: its message to each neighbour of this round, and to neighbours of
        other rounds only the differences that they follow."""
        if not self._count_bytes:
            return self._nobody
        sizes = {name: part_sizes(part.code) for name, part in parts.items()}
        sent = degrees * _together(sizes.values())
        followed = [sizes[name] for name, part in parts.items() if part.followed]
        if self._fixed or not followed:
            return sent
        return sent + (self._reach - degrees) * _together(followed)


def _together(sizes: Iterable[Tensor | int]) -> Tensor | int:
    """Returns the bytes of a message with parts of these sizes. Adds plain numbers first, since operations on tensors
    are slower."""
    return sum(sorted(sizes, key=lambda size: not isinstance(size, int)), HEADER_BYTES)
