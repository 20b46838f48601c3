"""Sites that are gone for good: the others vote, stop at one round, drop what is theirs, and go on.

Every remaining site says under its name that it goes on without those that left; when all have said the same, each says
how many rounds it has done, and they go back to the least of these, which none is further from than the graph is wide.
There the leavers' copies and their coordinates of lambda are dropped, weights and lambda are renormalised over those
who remain, and the next generation of the mesh begins.
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
    """All remaining sites of a generation go on without some."""

    def __init__(self, sites: Sequence[str], generation: int):
        super().__init__(f"going on without {', '.join(sites)}")
        self.sites, self.generation = tuple(sites), generation


def wish(state: Path, mesh: Mesh, own: str, gone: Sequence[str]) -> Mesh:
    """Notes that this site wants to go on without others, or with none named, that it does not; its node tells the
    others. Gives the mesh that would remain."""
    if own in gone:
        raise BadInput(f"{own} is this site itself; stop its node, and let the others remove it")
    remaining = mesh.without(*gone)
    private_folder(state)
    left = list(remaining.removed[len(mesh.removed) :])
    write_atomically(state / _WISH, json.dumps({"sites": left, "after": list(mesh.removed)}).encode())
    return remaining


def wished(state: Path, mesh: Mesh) -> list[str] | None:
    """Whom this site wants to go on without, in this generation; none where it has said nothing."""
    try:
        table = json.loads((state / _WISH).read_text())
    except (OSError, ValueError):
        return None
    return table["sites"] if table.get("after") == list(mesh.removed) else None


def vote(bulletin: Bulletin, own: str, mesh: Mesh, gone: Sequence[str]) -> None:
    """Tells the others, where they have not been told so already."""
    body = {"sites": list(gone), "generation": mesh.generation, "mesh": mesh.without(*gone).structure()}
    if bulletin.of(own, "leaving") != body:
        bulletin.announce("leaving", body)


def votes(bulletin: Bulletin, mesh: Mesh) -> dict[tuple[str, ...], list[str]]:
    """Who has voted to go on without whom, in this generation. A vote for what cannot be does not count."""
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
    """The sites that all others go on without."""
    present = {member.name for member in mesh.present}
    return next((gone for gone, voters in votes(bulletin, mesh).items() if set(voters) == present - set(gone)), None)


def freeze(bulletin: Bulletin, mesh: Mesh, gone: Sequence[str], done: int, outputs: int) -> None:
    """Tells how many rounds this site has done and how many outputs its model has; what was told first holds, also
    after a restart."""
    body = {"sites": list(gone), "generation": mesh.generation, "round": done, "outputs": outputs}
    bulletin.announce("frozen", body, mesh.generation)


def agreed_round(bulletin: Bulletin, mesh: Mesh, gone: Sequence[str]) -> tuple[int | None, list[str]]:
    """The round from which all go on, and who has not said yet how far it is."""
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
    """How many outputs the model had before a site left; it keeps those that only the leaver's labels need."""
    bodies = bulletin.of_all("frozen")
    return max((int(bodies[m.name]["outputs"]) for m in mesh.present if m.name in bodies and mesh.removed), default=0)


def still_in(state: Path, mesh: Mesh) -> Mesh:
    """The mesh of a file, whose addresses may be new, without those who have left since it was written."""
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
            f"the mesh file says that {list(mesh.removed)} have left, but this node went on without {list(left)}; take "
            "the mesh file that the others have, or one from before"
        )
    return mesh.without(*left[common:]) if len(left) > common else mesh


def note_removed(state: Path, mesh: Mesh) -> None:
    """From here on, a restart goes on with this generation."""
    write_atomically(state / _REMOVED, json.dumps(list(mesh.removed)).encode())


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


def without(state: TrainingState, gone: Sequence[int], slots: Sequence[int], prior: Tensor) -> TrainingState:
    """A node's state after the nodes numbered `gone` have left. `slots` are the nodes whose copies it keeps, itself
    first; `prior` is that of those who remain."""
    places = [k for k, node in enumerate(slots) if node in gone]
    roles = roles_of(state)
    tensors = {path: _without(roles[path], t, gone, places, prior) for path, t in flatten_state(state).items()}
    return unflatten_state(state, tensors)


def _without(role: Role, tensor: Tensor, gone: Sequence[int], places: Sequence[int], prior: Tensor) -> Tensor:
    if role.per_neighbour:
        tensor = _dropped(tensor, -2, places)
    if role.over_nodes:
        tensor = _dropped(tensor, -1, gone)
    if role.sums_to_zero:  # over all nodes, so without some of them it restarts
        return torch.zeros_like(tensor)
    if not role.on_simplex:
        return tensor
    total = tensor.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, tensor / total.clamp(min=torch.finfo(tensor.dtype).tiny), prior.to(tensor))


def _dropped(tensor: Tensor, axis: int, indices: Sequence[int]) -> Tensor:
    kept = [i for i in range(tensor.shape[axis]) if i not in indices]
    return tensor.index_select(axis, torch.tensor(kept, device=tensor.device))
