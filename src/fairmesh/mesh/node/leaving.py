"""Removes sites that are gone for good: the others vote, agree on a round, drop the state of those sites, and continue.

Every remaining site announces in its name that it wants to continue without the sites that left. When all have
announced the same, each announces how many rounds it has done. They go back to the smallest of these numbers; no site
is ahead of it by more rounds than the diameter of the graph. There they drop the copies of the sites that left and
their coordinates of lambda, and renormalise weights and lambda over the remaining sites. Then the next generation of
the mesh begins.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import networkx
import torch
from torch import Tensor

from fairmesh.errors import BadInput, FairmeshError
from fairmesh.mesh.members import Mesh
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.networks.roles import Role, roles_of
from fairmesh.storage.files import private_folder, write_atomically
from fairmesh.storage.state_tree import flatten_state, unflatten_state
from fairmesh.topology.graphs import Topology
from fairmesh.topology.mixing import Mixing, mixing_matrix, union_of
from fairmesh.training.loop import TrainingState

_WISH, _REMOVED = "leaving.json", "removed.json"


class Leave(FairmeshError):
    """All remaining sites of a generation continue without some sites."""

    def __init__(self, sites: Sequence[str], generation: int):
        super().__init__(f"continuing without {', '.join(sites)}")
        self.sites, self.generation = tuple(sites), generation


def wish(state: Path, mesh: Mesh, own: str, gone: Sequence[str]) -> Mesh:
    """Records that this site wants to continue without the sites in `gone`; an empty list takes that back. Its node
    announces it to the others.

    Returns:
        The mesh that would remain.
    """
    if own in gone:
        raise BadInput(f"{own} is this site itself; stop its node, and let the others remove it")
    remaining = mesh.without(*gone)
    private_folder(state)
    left = list(remaining.removed[len(mesh.removed) :])
    write_atomically(state / _WISH, json.dumps({"sites": left, "after": list(mesh.removed)}).encode())
    return remaining


def wished(state: Path, mesh: Mesh) -> list[str] | None:
    """Returns the sites that this site wants to continue without in this generation, or None if it has not said."""
    try:
        table = json.loads((state / _WISH).read_text())
    except (OSError, ValueError):
        return None
    return table["sites"] if table.get("after") == list(mesh.removed) else None


def vote(bulletin: Bulletin, own: str, mesh: Mesh, gone: Sequence[str]) -> None:
    """Announces the wish to the others, unless this site has announced it already."""
    body = {"sites": list(gone), "generation": mesh.generation, "mesh": mesh.without(*gone).structure()}
    if bulletin.of(own, "leaving") != body:
        bulletin.announce("leaving", body)


def votes(bulletin: Bulletin, mesh: Mesh) -> dict[tuple[str, ...], list[str]]:
    """Returns who has voted for the removal of which sites in this generation. Impossible votes do not count."""
    present = {member.name for member in mesh.present}
    found: dict[tuple[str, ...], list[str]] = {}
    for voter, body in bulletin.of_all("leaving").items():
        gone = tuple(body["sites"])
        if not gone or body["generation"] != mesh.generation or voter not in present - set(gone):
            continue
        try:
            possible = set(gone) <= present and body["mesh"] == mesh.without(*gone).structure()
        except BadInput:
            continue
        if possible:
            found.setdefault(gone, []).append(voter)
    return found


def decided(bulletin: Bulletin, mesh: Mesh) -> tuple[str, ...] | None:
    """Returns the sites that all others have voted to remove, or None."""
    present = {member.name for member in mesh.present}
    return next((gone for gone, voters in votes(bulletin, mesh).items() if set(voters) == present - set(gone)), None)


def freeze(bulletin: Bulletin, mesh: Mesh, gone: Sequence[str], done: int, outputs: int) -> None:
    """Announces how many rounds this site has done and how many outputs its model has. The first announcement counts,
    also after a restart."""
    body = {"sites": list(gone), "generation": mesh.generation, "round": done, "outputs": outputs}
    bulletin.announce("frozen", body, mesh.generation)


def agreed_round(bulletin: Bulletin, mesh: Mesh, gone: Sequence[str]) -> tuple[int | None, list[str]]:
    """Returns the round from which all continue, or None, and the sites that have not announced theirs yet."""
    bodies = bulletin.of_all("frozen")
    rounds, silent = [], []
    for member in mesh.present:
        if member.name in gone:
            continue
        body = bodies.get(member.name)
        if body is None or body["generation"] != mesh.generation or body["sites"] != list(gone):
            silent.append(member.name)
        else:
            rounds.append(int(body["round"]))
    return (None if silent else min(rounds)), silent


def outputs_before(bulletin: Bulletin, mesh: Mesh) -> int:
    """Returns how many outputs the model had before a site left. It keeps those that only that site's labels need."""
    bodies = bulletin.of_all("frozen")
    return max((int(bodies[m.name]["outputs"]) for m in mesh.present if m.name in bodies and mesh.removed), default=0)


def still_in(state: Path, mesh: Mesh) -> Mesh:
    """Returns the mesh of a file, whose addresses may be new, without the sites that left since it was written."""
    try:
        left = tuple(json.loads((state / _REMOVED).read_text()))
    except FileNotFoundError:
        left = ()
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"cannot read {state / _REMOVED}: {error}") from error
    common = min(len(left), len(mesh.removed))
    began = any(state.glob("generation-*"))
    if left[:common] != mesh.removed[:common] or (began and len(mesh.removed) > len(left)):
        raise BadInput(
            f"the mesh file says that {list(mesh.removed)} have left, but this node continued without {list(left)}; "
            "use the mesh file of the other sites, or an earlier one"
        )
    return mesh.without(*left[common:]) if len(left) > common else mesh


def note_removed(state: Path, mesh: Mesh) -> None:
    """Records on disk who has left; after this, a restart continues with this generation."""
    write_atomically(state / _REMOVED, json.dumps(list(mesh.removed)).encode())


def cycle_of(topology: Topology, mesh: Mesh) -> list[Mixing]:
    """Returns the mixing matrices of the present sites: those of the experiment while nobody has left, then Metropolis
    weights over the remaining edges."""
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


def without(state: TrainingState, gone: Sequence[int], slots: Sequence[int], prior: Tensor) -> TrainingState:
    """Returns a node's state without the nodes numbered `gone`.

    Args:
        state: The node's state before.
        gone: The numbers of the nodes that left.
        slots: The nodes of whose models the state has copies, this node first.
        prior: The prior over the remaining nodes.
    """
    places = [k for k, node in enumerate(slots) if node in gone]
    roles = roles_of(state)
    tensors = {path: _without(roles[path], t, gone, places, prior) for path, t in flatten_state(state).items()}
    return unflatten_state(state, tensors)


def _without(role: Role, tensor: Tensor, gone: Sequence[int], places: Sequence[int], prior: Tensor) -> Tensor:
    if role.per_neighbour:
        tensor = _dropped(tensor, -2, places)
    if role.over_nodes:
        tensor = _dropped(tensor, -1, gone)
    if role.sums_to_zero:  # over all nodes; without some of them it must restart at zero
        return torch.zeros_like(tensor)
    if not role.on_simplex:
        return tensor
    total = tensor.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, tensor / total.clamp(min=torch.finfo(tensor.dtype).tiny), prior.to(tensor))


def _dropped(tensor: Tensor, axis: int, indices: Sequence[int]) -> Tensor:
    kept = [i for i in range(tensor.shape[axis]) if i not in indices]
    return tensor.index_select(axis, torch.tensor(kept, device=tensor.device))
