"""What remains of a node's state and of the graph after sites have left."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairmesh.mesh.roster import Mesh
from fairmesh.networks.roles import Role, roles_of
from fairmesh.storage.state_tree import flatten_state, unflatten_state
from fairmesh.topology.graphs import Topology
from fairmesh.topology.mixing import Mixing, mixing_matrix, union_of, with_liars
from fairmesh.training.loop import TrainingState


def cycle_of(topology: Topology, mesh: Mesh, liars: int = 0) -> list[Mixing]:
    """Returns the mixing matrices of the present sites: those of the experiment while nobody has left, then Metropolis
    weights over the remaining edges. Then the number of liars is capped so that every site keeps one honest
    neighbour."""
    whole = topology.build(len(mesh.members))
    if not mesh.removed:
        return with_liars(whole, liars)
    kept = [mesh.position(member.name) for member in mesh.present]
    cycle = [mixing_matrix(mixing.matrix[kept][:, kept], "metropolis") for mixing in whole]
    union_of(cycle).check_mixes()
    fewest = min(int(mixing.degrees.min()) for mixing in cycle)
    return with_liars(cycle, min(liars, max(0, fewest - 1)))


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
