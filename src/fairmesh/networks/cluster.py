"""The ranks of a cluster as the processes of a run, through torch.distributed. Only ranks with neighbouring nodes
exchange messages.

Connections are neither encrypted nor authenticated, so use it only where all machines trust each other."""

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fairmesh.errors import BadInput, LostProcess, in_a_line
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.networks.remote import RemoteNetwork, joined_texts, parted_texts
from fairmesh.networks.transport import Arrivals, Edge, Read, Transport
from fairmesh.topology.mixing import Mixing


def blocks_of(nodes: int, ranks: int) -> list[range]:
    """Returns the nodes of each rank, in equal shares; the first ranks have one more if the shares are not even."""
    if ranks > nodes:
        raise BadInput(f"{ranks} ranks for {nodes} nodes: use at most one rank per node")
    each, more = divmod(nodes, ranks)
    starts = [k * each + min(k, more) for k in range(ranks + 1)]
    return [range(first, last) for first, last in itertools.pairwise(starts)]


def backend_of(device: str, local_rank: int, local_ranks: int, gpus: int) -> tuple[str, torch.device]:
    """Returns the backend and the device of a rank: gloo on CPUs, NCCL between GPUs, with one GPU per rank."""
    if not device.startswith("cuda"):
        return "gloo", torch.device("cpu")
    if device != "cuda":
        raise BadInput(f"device {device!r}: on a cluster each rank uses its own GPU; write 'cuda'")
    if gpus < local_ranks:
        raise BadInput(
            f"{local_ranks} ranks on a machine with {gpus} GPUs: start at most one rank per GPU, or use device 'cpu'"
        )
    return "cpu:gloo,cuda:nccl", torch.device("cuda", local_rank)


@contextmanager
def joined(device: str, timeout_s: float) -> Iterator["Ranks"]:
    """Joins the ranks that torchrun started. A rank that is silent for `timeout_s` seconds counts as lost."""
    try:
        local, local_ranks = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    except (KeyError, ValueError):
        raise BadInput(
            "--network cluster needs torchrun: use `fairmesh launch EXPERIMENT --processes P` on one machine, or "
            "`torchrun ... -m fairmesh run EXPERIMENT --network cluster` on each of several (in the "
            'documentation: "On a cluster")'
        ) from None
    if (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    ):
        raise BadInput(
            "ranks that torchrun restarts would not find each other: start torchrun with --max-restarts=0, or with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
        )
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # only neighbours connect
    backend, own = backend_of(device, local, local_ranks, torch.cuda.device_count())
    if own.type == "cuda":
        torch.cuda.set_device(own)
    with _reaching("has not found the others"):
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield Ranks(own, timeout_s)
    finally:
        dist.destroy_process_group()


@contextmanager
def _reaching(failure: str = "has lost contact with another") -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed raises errors of several types
        rank = os.environ.get("RANK", "?")
        reason = in_a_line(error).partition(". This is typically")[0]  # from here on gloo guesses at causes
        reason = re.sub(r"\[[^\]]*\.cc:\d+\] ", "", reason)  # a line number of gloo's source
        raise LostProcess(f"rank {rank} {failure}: {reason}") from error


class Ranks(ProcessGroup):
    """The ranks of torch.distributed's default process group, or of another one with the same ranks."""

    def __init__(self, device: torch.device | None = None, timeout_s: float = 300.0, group: Any = None):
        if not dist.is_initialized():
            raise BadInput("a cluster needs torch.distributed: start with torchrun, or call init_process_group before")
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.device = device or torch.device("cpu")  # of messages when they are sent
        self._timeout_s, self._group = timeout_s, group  # None: torch's default group
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        # torchrun calls a job without a name "none". Then only a restart is known to be the same job.
        named = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        restarted = any(self.all_gather_json(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))))
        self.job = named if named != "none" or restarted else None

    def all_gather(self, payload: bytes) -> list[bytes]:
        if self.world_size == 1:
            return [payload]
        with _reaching():
            length = torch.tensor([len(payload)])
            lengths = [torch.empty_like(length) for _ in range(self.world_size)]
            dist.all_gather(lengths, length, group=self._group)
            mine = torch.zeros(max(int(one) for one in lengths), dtype=torch.uint8)
            mine[: len(payload)] = _bytes(payload)
            every = [torch.empty_like(mine) for _ in lengths]
            dist.all_gather(every, mine, group=self._group)
        return [one[: int(count)].numpy().tobytes() for one, count in zip(every, lengths)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.world_size == 1:
            return tensor
        with _reaching():
            term = tensor.detach().contiguous()
            terms = [torch.empty_like(term) for _ in range(self.world_size)] if self.is_leader else None
            dist.gather(term, terms, dst=0, group=self._group)
            total = functools.reduce(torch.add, terms) if terms else torch.empty_like(term)
            dist.broadcast(total, src=0, group=self._group)
        return total

    def duplicate(self) -> "Ranks":
        with _reaching():
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        return Ranks(timeout_s=self._timeout_s, group=group)

    def nodes(self, n: int) -> Sequence[int]:
        return blocks_of(n, self.world_size)[self.rank]

    def network(
        self, cycle: Sequence[Mixing], *, device: torch.device, dtype: torch.dtype, count_bytes: bool
    ) -> RemoteNetwork:
        """Returns the network of this rank's nodes. Messages are encoded, so their bytes are always counted."""
        blocks = blocks_of(cycle[0].n, self.world_size)
        return RemoteNetwork(cycle, blocks[self.rank], ClusterTransport(blocks, self), device=device, dtype=dtype)


class ClusterTransport(Transport):
    """Carries messages between neighbouring ranks. `blocks` lists the nodes of each rank."""

    def __init__(self, blocks: Sequence[Sequence[int]], ranks: Ranks | None = None):
        self.process_group = ranks = ranks or Ranks()
        if len(blocks) != ranks.world_size:
            raise BadInput(f"{len(blocks)} blocks of nodes for {ranks.world_size} ranks; give one block per rank")
        self._rank_of = {node: rank for rank, block in enumerate(blocks) for node in block}
        self._device = ranks.device

    def exchange(
        self, round_index: int, outgoing: Mapping[Edge, bytes], expected: Sequence[Edge], read: Read
    ) -> Arrivals:
        out, due = self._by_rank(outgoing, 1), self._by_rank(expected, 0)
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
                incoming |= {edge: read(edge, text) for edge, text in zip(edges, texts, strict=True)}
            return incoming

        return arrivals

    def _by_rank(self, edges: Iterable[Edge], end: int) -> dict[int, list[Edge]]:
        """Returns the edges by the rank of their sender (end 0) or receiver (end 1), in an order that both ranks know:
        by sender, then by receiver."""
        by_rank: dict[int, list[Edge]] = {}
        for edge in sorted(edges):
            by_rank.setdefault(self._rank_of[edge[end]], []).append(edge)
        return by_rank

    def _swap(
        self, tensors: Mapping[int, Tensor], sizes: Mapping[int, int], dtype: torch.dtype
    ) -> Callable[[], dict[int, Tensor]]:
        """Starts to send tensors to some ranks and to receive tensors of known sizes from some, all at once. Returns a
        function that waits for them and returns those received."""
        mine = {rank: tensor.to(self._device) for rank, tensor in tensors.items()}
        theirs = {rank: torch.empty(size, dtype=dtype, device=self._device) for rank, size in sizes.items()}
        operations = [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in mine.items()]
        operations += [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in theirs.items()]
        with _reaching():
            pending = dist.batch_isend_irecv(operations) if operations else []

        def arrived(sending: Mapping[int, Tensor] = mine) -> dict[int, Tensor]:  # keeps them alive until sent
            with _reaching():
                for one in pending:
                    one.wait()
            return theirs

        return arrived


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _packed(texts: Sequence[bytes]) -> bytes:
    """Joins messages, none of which is empty. One that equals its predecessor, as for two receivers at one rank, is not
    repeated."""
    return joined_texts([b"" if text == before else text for before, text in itertools.pairwise([b"", *texts])])


def _unpacked(data: bytes) -> list[bytes]:
    texts: list[bytes] = []
    for text in parted_texts(data):
        texts.append(text or texts[-1])
    return texts
