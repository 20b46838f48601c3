"""The checkpoint of a run over several processes: each writes a file with its nodes' rows.

The leader's file also lists the others that belong to it. It replaces the previous one when all others are on disk, so
that at any time one complete round is there. A run can continue from it on any number of processes.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairmesh.errors import CheckpointError
from fairmesh.networks.base import Network
from fairmesh.networks.roles import Role
from fairmesh.storage.checkpoint import Stored, read_stored, write_stored
from fairmesh.storage.occupied import is_shard, shard
from fairmesh.storage.state_tree import checked_like, equally_long, flatten_state, unflatten_state


class Checkpoints:
    """The checkpoints of a run over this network; the newest is kept at `path`."""

    def __init__(self, path: Path, network: Network, roles: Mapping[str, Role], identity: Mapping[str, Any]):
        self._path, self._network, self._identity, self._roles = path, network, identity, roles
        self._nodes: list[int] = network.identities.tolist()

    def save(self, state: Any, now: int) -> None:
        process_group, others = self._network.process_group, []
        mine = {
            name: t
            for name, t in self._records(state).items()
            if process_group.is_leader or self._roles[name].held_by != "all"
        }
        if process_group.world_size > 1:
            part, fingerprint = shard(self._path, now, process_group.rank), ""
            with process_group.fail_together():
                if not process_group.is_leader:
                    fingerprint = write_stored(part, mine, now, self._identity, nodes=self._nodes)
            others = process_group.all_gather_json([part.name, fingerprint, self._nodes])[1:]
        with process_group.fail_together():
            if process_group.is_leader:
                write_stored(self._path, mine, now, self._identity, nodes=self._nodes, others=others)
                for old in self._path.parent.iterdir():
                    if is_shard(self._path, old.name) and old.name not in {name for name, _, _ in others}:
                        old.unlink(missing_ok=True)

    def _records(self, state: Any) -> dict[str, Tensor]:
        """Returns the tensors to write. Where a node keeps a copy per neighbour, only its own public copy is written,
        since the neighbours write theirs."""
        tensors = flatten_state(state)
        if self._network.kept_of is None:
            return tensors
        return {name: t[:, :, 0] if self._roles[name].per_neighbour else t for name, t in tensors.items()}

    def load(self, like: Any) -> tuple[Any, int]:
        """Returns the state of this process's nodes, of the form of `like`, and its round. Needs no communication."""
        first = read_stored(self._path, self._identity)
        pieces = _Pieces(self._path, self._identity, first)
        tensors: dict[str, Tensor] = {}
        for name in flatten_state(like):
            role, kept_of = self._roles[name], self._network.kept_of
            if role.per_neighbour and kept_of is not None:
                tensors[name] = pieces.rows(name, kept_of.flatten().tolist()).unflatten(1, kept_of.shape)
            elif role.held_by == "node":
                tensors[name] = pieces.rows(name, self._nodes)
            elif role.held_by == "process":
                tensors[name] = pieces.mean(name, self._nodes)
            elif name in first.tensors:
                tensors[name] = first.tensors[name]
        return unflatten_state(like, checked_like(like, tensors)), first.round


class _Pieces:
    """The files of one checkpoint; each is read once, when it is needed."""

    def __init__(self, path: Path, identity: Mapping[str, Any], first: Stored):
        self._path = path
        self._read = partial(read_stored, identity=identity)
        self._stored: dict[str, Stored] = {path.name: first}
        others = first.more.get("others", [])
        self._fingerprints = {name: fingerprint for name, fingerprint, _ in others}
        self._nodes = {path.name: first.more.get("nodes", [])} | {name: nodes for name, _, nodes in others}
        self._place = {node: (name, k) for name, nodes in self._nodes.items() for k, node in enumerate(nodes)}

    def _tensor(self, file: str, name: str) -> Tensor:
        if file not in self._stored:
            path = self._path.with_name(file)
            if not path.exists():
                raise CheckpointError(f"{path} is missing, and {self._path} needs it; delete the folder to start again")
            stored = self._read(path)
            if stored.fingerprint != self._fingerprints[file]:
                raise CheckpointError(
                    f"{path} is not the file that {self._path} was written with; delete the folder to start again"
                )
            self._stored[file] = stored
        if name not in self._stored[file].tensors:
            raise CheckpointError(f"{self._path.with_name(file)} does not contain {name}; it is of another run")
        return self._stored[file].tensors[name]

    def _file_of(self, nodes: Sequence[int]) -> str | None:
        return next((file for file, there in self._nodes.items() if there == nodes), None)

    def rows(self, name: str, nodes: Sequence[int]) -> Tensor:
        """Returns the rows of these nodes: (replicas, nodes, ...)."""
        if file := self._file_of(nodes):
            return self._tensor(file, name)
        absent = [node for node in nodes if node not in self._place]
        if absent:
            raise CheckpointError(f"{self._path} has no rows of nodes {absent}; it is of another run")
        places = [self._place[node] for node in nodes]
        return torch.stack(equally_long([self._tensor(file, name)[:, k] for file, k in places]), dim=1)

    def mean(self, name: str, nodes: Sequence[int]) -> Tensor:
        """Returns what a process with the same nodes had, to the bit, or else the mean over all nodes."""
        if file := self._file_of(nodes):
            return self._tensor(file, name)
        parts = [self._tensor(file, name) * (len(there) / len(self._place)) for file, there in self._nodes.items()]
        return torch.stack(parts).sum(dim=0)
