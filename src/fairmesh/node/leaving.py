"""A site that is gone for good: the others vote, stop at one round, drop what is its, and go on.

Every remaining site says under its name that it goes on without the one that left; when all have, each says how many
rounds it has done, and they go back to the least of these, which none is further from than the graph is wide. There the
leaver's copies and its coordinate of lambda are dropped, weights and lambda are renormalised over those who remain, and
the next generation of the mesh begins.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import networkx
import torch
from torch import Tensor

from fairmesh.checkpoint import flattened, refilled
from fairmesh.errors import BadInput, FairmeshError
from fairmesh.files import write_atomically
from fairmesh.mixing import Mixing, mixing_matrix, union_of
from fairmesh.networks.peers.bulletin import Bulletin
from fairmesh.networks.peers.mesh import Mesh
from fairmesh.topology import Topology
from fairmesh.training import TrainingState

_WISH = "leaving.json"


class Leave(FairmeshError):
    """All remaining sites go on without one."""

    def __init__(self, site: str):
        super().__init__(f"going on without {site}")
        self.site = site


def wish(state: Path, mesh: Mesh, own: str, gone: str) -> Mesh:
    """Notes that this site wants to go on without another; its node tells the others. Gives the mesh that remains."""
    if gone == own:
        raise BadInput(f"{own} is this site itself; stop its node, and let the others remove it")
    remaining = mesh.without(gone)
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot use the state folder {state}: {error.strerror or error}") from error
    write_atomically(state / _WISH, json.dumps({"site": gone, "generation": remaining.generation}).encode())
    return remaining


def wished(state: Path, mesh: Mesh) -> str | None:
    """Whom this site wants to go on without, in this generation."""
    try:
        table = json.loads((state / _WISH).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return table["site"] if table.get("generation") == mesh.generation + 1 else None


def vote(bulletin: Bulletin, mesh: Mesh, gone: str) -> None:
    remaining = mesh.without(gone)
    bulletin.announce(
        "leaving",
        {"site": gone, "generation": remaining.generation, "mesh": remaining.digest()},
        remaining.generation,
    )


def votes(bulletin: Bulletin, mesh: Mesh) -> dict[str, list[str]]:
    """Who has voted to go on without whom, in this generation."""
    found: dict[str, list[str]] = {}
    for voter, body in bulletin.of_all("leaving").items():
        gone = body.get("site")
        if body.get("generation") != mesh.generation + 1 or gone not in {m.name for m in mesh.present} or gone == voter:
            continue
        if voter in {m.name for m in mesh.present} and body.get("mesh") == mesh.without(gone).digest():
            found.setdefault(gone, []).append(voter)
    return found


def decided(bulletin: Bulletin, mesh: Mesh) -> str | None:
    """The site that all others go on without."""
    for gone, voters in votes(bulletin, mesh).items():
        if set(voters) == {member.name for member in mesh.present} - {gone}:
            return gone
    return None


def agreed_round(bulletin: Bulletin, mesh: Mesh, gone: str) -> tuple[int | None, list[str]]:
    """The round from which all go on, and who has not said yet how far it is."""
    bodies = bulletin.of_all("frozen")
    rounds, silent = [], []
    for member in mesh.present:
        if member.name == gone:
            continue
        body = bodies.get(member.name)
        if body is None or body.get("generation") != mesh.generation + 1:
            silent.append(member.name)
        else:
            rounds.append(int(body["round"]))
    return (None if silent else min(rounds)), silent


def cycle_of(topology: Topology, mesh: Mesh) -> list[Mixing]:
    """The mixing matrices of the present sites: the experiment's own while nobody has left, else Metropolis weights
    over the edges that remain."""
    whole = topology.build(len(mesh.members))
    if not mesh.removed:
        return list(whole)
    kept = [mesh.position(member.name) for member in mesh.present]
    cycle = []
    for mixing in whole:
        graph = networkx.from_scipy_sparse_array(mixing.matrix).subgraph(kept)
        numbered = networkx.relabel_nodes(graph, {position: i for i, position in enumerate(kept)})
        plain = networkx.Graph()
        plain.add_nodes_from(range(len(kept)))
        plain.add_edges_from((i, j) for i, j in numbered.edges if i != j)
        cycle.append(mixing_matrix(plain, "metropolis"))
    union_of(cycle).check_mixes()
    return cycle


def without(state: TrainingState, gone: int, slots: Sequence[int], prior: Tensor) -> TrainingState:
    """A node's state after node number `gone` has left. `slots` are the nodes whose copies it keeps, itself first;
    `prior` is that of those who remain."""
    slot = slots.index(gone) if gone in slots else None
    return refilled(state, {name: _without(name, t, gone, slot, prior) for name, t in flattened(state).items()})


def _without(name: str, tensor: Tensor, gone: int, slot: int | None, prior: Tensor) -> Tensor:
    if name.endswith(".kept") and slot is not None:
        tensor = _dropped(tensor, -2, slot)
    if "dual" not in name:
        return tensor
    tensor = _dropped(tensor, -1, gone)  # whatever tells of weights has a coordinate for every node
    if "copies" in name:
        return tensor
    total = tensor.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, tensor / total.clamp(min=torch.finfo(tensor.dtype).tiny), prior.to(tensor))


def _dropped(tensor: Tensor, axis: int, index: int) -> Tensor:
    kept = [i for i in range(tensor.shape[axis]) if i != index]
    return tensor.index_select(axis, torch.tensor(kept, device=tensor.device))


def frozen(bulletin: Bulletin, mesh: Mesh, done: int) -> None:
    """Tells how many rounds this site has done; what was told first holds, also after a restart."""
    body: Mapping[str, Any] = {"generation": mesh.generation + 1, "round": done}
    bulletin.announce("frozen", body, mesh.generation + 1)
