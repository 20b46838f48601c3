"""The ranks of a cluster as the hosts of a network, by torch.distributed: neighbouring ranks talk to each other only.

Its connections are neither encrypted nor authenticated: for networks whose members trust each other."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fairmesh.errors import BadInput
from fairmesh.networks.remote import Arrivals, Edge, Read, Transport


def blocks_of(nodes: int, ranks: int) -> list[range]:
    """Nodes in equal shares, the first ranks with one more where they do not go round evenly."""
    if ranks > nodes:
        raise BadInput(f"{ranks} ranks for {nodes} nodes: use at most one a node")
    each, more = divmod(nodes, ranks)
    starts = [k * each + min(k, more) for k in range(ranks + 1)]
    return [range(first, last) for first, last in itertools.pairwise(starts)]


class ClusterTransport(Transport):
    """This rank among all that joined the default process group; `blocks` says which nodes each hosts."""

    def __init__(self, blocks: Sequence[Sequence[int]]):
        if not dist.is_initialized():
            raise BadInput("a cluster needs torch.distributed: start with torchrun, or call init_process_group before")
        if len(blocks) != dist.get_world_size():
            raise BadInput(f"{len(blocks)} blocks of nodes for {dist.get_world_size()} ranks; give one a rank")
        self._rank_of = {node: rank for rank, block in enumerate(blocks) for node in block}
        on_gpu = dist.get_backend() == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def exchange(
        self, round_index: int, outgoing: Mapping[Edge, bytes], expected: Sequence[Edge], read: Read
    ) -> Arrivals:
        out, due = self._by_rank(outgoing), self._by_rank([(receiver, sender) for sender, receiver in expected])
        parcels = {rank: _packed([outgoing[edge] for edge in edges]) for rank, edges in out.items()}
        ranks = sorted(out.keys() | due.keys())
        lengths = self._swap(
            {rank: torch.tensor([len(parcels.get(rank, b""))]) for rank in ranks},
            dict.fromkeys(ranks, 1),
            torch.int64,
        )()
        arrive = self._swap(
            {rank: _bytes(parcel) for rank, parcel in parcels.items()},
            {rank: int(length) for rank, length in lengths.items() if int(length)},
            torch.uint8,
        )

        def arrivals() -> dict[Edge, Any]:
            arrived, incoming = arrive(), {}
            for rank, edges in due.items():
                texts = _unpacked(arrived[rank].cpu().numpy().tobytes())
                for (receiver, sender), text in zip(edges, texts, strict=True):
                    incoming[sender, receiver] = read((sender, receiver), text)
            return incoming

        return arrivals

    def _by_rank(self, edges: Mapping[Edge, bytes] | Sequence[Edge]) -> dict[int, list[Edge]]:
        """Edges to or from other ranks, by rank, in an order that both ends know: by sender, then by receiver."""
        of: dict[int, list[Edge]] = {}
        outward = isinstance(edges, Mapping)
        for edge in sorted(edges) if outward else sorted(edges, key=lambda edge: (edge[1], edge[0])):
            of.setdefault(self._rank_of[edge[1]], []).append(edge)
        return of

    def _swap(
        self, tensors: Mapping[int, Tensor], sizes: Mapping[int, int], dtype: torch.dtype
    ) -> Callable[[], dict[int, Tensor]]:
        """Sends a tensor to some ranks and receives one of a known size from some, all at once; what is returned waits
        for them."""
        mine = {rank: tensor.to(self._device) for rank, tensor in tensors.items()}
        theirs = {rank: torch.empty(size, dtype=dtype, device=self._device) for rank, size in sizes.items()}
        operations = [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in mine.items()]
        operations += [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in theirs.items()]
        pending = dist.batch_isend_irecv(operations) if operations else []

        def arrived(sending: Mapping[int, Tensor] = mine) -> dict[int, Tensor]:  # which must live until it was sent
            for one in pending:
                one.wait()
            return theirs

        return arrived

    def everywhere(self, payload: bytes) -> list[bytes]:
        length = torch.tensor([len(payload)], device=self._device)
        lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
        dist.all_gather(lengths, length)
        longest = int(max(int(one) for one in lengths))
        mine = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        mine[: len(payload)] = _bytes(payload).to(self._device)
        every = [torch.empty_like(mine) for _ in lengths]
        dist.all_gather(every, mine)
        return [one[: int(count)].cpu().numpy().tobytes() for one, count in zip(every, lengths)]


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _packed(texts: Sequence[bytes]) -> bytes:
    """Messages one after the other; one that follows its equal, as to two receivers of a rank, is not repeated."""
    parts, before = [], None
    for text in texts:
        repeated = text == before
        parts.append((0 if repeated else len(text) + 1).to_bytes(8, "little") + (b"" if repeated else text))
        before = text
    return b"".join(parts)


def _unpacked(data: bytes) -> list[bytes]:
    texts, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        at += 8
        texts.append(data[at : at + length - 1] if length else texts[-1])
        at += max(0, length - 1)
    return texts
