"""What a change of the sites leaves of the graph and of a node's state: without sites that have left, and from what the
neighbours know of a site that has lost its own.

Each neighbour of such a site sends once: its copy of the lost site's public model, its own public copy, and what is
nearly the same at all sites, such as the weights. Then the lost site and its neighbours have the same public copies
again. The lost site takes the mean loss of all sites for its own: once the weights only remember losses, it would keep
the weight 0 of a site without a loss. Everything else starts at zero: its momentum, and at all sites what sums to zero
over the sites.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fairmesh.algorithms.gossip import PublicCopies
from fairmesh.compression import DecodeError
from fairmesh.errors import BadInput
from fairmesh.mesh.enrol.roster import Mesh
from fairmesh.networks.bounds import norm_of
from fairmesh.networks.roles import Role, StateView, roles_of
from fairmesh.storage.state_tree import flatten_state, unflatten_state
from fairmesh.topology.graphs import Topology
from fairmesh.topology.mixing import Mixing, mixing_matrix, union_of, with_liars
from fairmesh.training.loop import TrainingState

_ROUNDING = 1e-3  # times the norm: neighbours on other kinds of devices may have rounded otherwise
_OF_NEIGHBOURS = "of_neighbours"  # the field of PublicCopies
_MINE, _YOURS, _COMMON = "copy of the sender", "copy of the receiver", "common"


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


def shared(state: TrainingState, slot: int) -> bytes:
    """Returns what a node sends to the neighbour in a slot of its copies, if that has lost its state."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in _parts(state, slot).items()})


def _parts(state: TrainingState, slot: int) -> dict[str, Tensor]:
    copies, tensors = _copies_in(state), flatten_state(state)
    return (
        {f"{_MINE}:{path}": rows[..., 0, :] for path, rows in copies.items()}
        | {f"{_YOURS}:{path}": rows[..., slot, :] for path, rows in copies.items()}
        | {f"{_COMMON}:{path}": tensors[path] for path in _common_in(state)}
    )


def read_shared(data: bytes, like: TrainingState) -> dict[str, Tensor]:
    """Returns what a neighbour has sent. Raises DecodeError if it does not fit this run."""
    try:
        found = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DecodeError("what it knows of this site cannot be read") from error
    expected = _parts(like, 0)
    if found.keys() != expected.keys():
        raise DecodeError("what it knows of this site is not of this algorithm")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
            raise DecodeError(f"its {name} has another shape or type than that of this run")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DecodeError(f"its {name} is not finite")
    return {name: tensor.to(expected[name].device) for name, tensor in found.items()}


def restored(initial: TrainingState, told: Mapping[str, dict[str, Tensor]]) -> TrainingState:
    """Returns the state of a site that has lost its own.

    Args:
        initial: A state of the run before its first round.
        told: What each neighbour has sent, by name, in the order of the slots of this site's copies.

    Raises:
        BadInput: If neighbours have different copies of this site's model.
    """
    tensors, names, parts = flatten_state(initial), list(told), list(told.values())
    for path in _copies_in(initial):
        own = parts[0][f"{_YOURS}:{path}"]
        for name, part in told.items():
            theirs = part[f"{_YOURS}:{path}"]
            if norm_of(theirs - own) > _ROUNDING * max(norm_of(own), norm_of(theirs)):
                raise BadInput(
                    f"{names[0]} and {name} have different copies of this site's model, so one of them does not tell "
                    "the truth; let the others vote it out, or vote for an earlier round"
                )
        tensors[path] = torch.stack([own, *(part[f"{_MINE}:{path}"] for part in parts)], dim=-2)
        tensors[path.removesuffix(_OF_NEIGHBOURS) + "own"] = own.clone()
    for path in _common_in(initial):
        by_neighbour = torch.stack([part[f"{_COMMON}:{path}"] for part in parts])
        tensors[path] = by_neighbour.mean(dim=0) if by_neighbour.is_floating_point() else by_neighbour[0]
    for path, role in roles_of(initial.algorithm, "state.algorithm").items():
        instead = f"{path.rpartition('.')[0]}.{role.if_lost}" if role.if_lost else ""
        if instead in tensors:
            tensors[path] = tensors[instead].clone()
    state: TrainingState = unflatten_state(initial, tensors)
    copies = _of_models(state.algorithm)
    if copies is not None:
        models = StateView(state.algorithm).models(state.algorithm)
        path = next(path for path, tensor in flatten_state(state).items() if tensor is models)
        state = unflatten_state(state, flatten_state(state) | {path: copies.own.clone()})
    return _averages_from_now(state)


def _copies_in(state: Any) -> dict[str, Tensor]:
    """Returns the copies that a node keeps of its neighbours' models and of its own, (..., slots, dim), by path."""
    roles, tensors = roles_of(state), flatten_state(state)
    return {path: t for path, t in tensors.items() if roles[path].per_neighbour and path.endswith(_OF_NEIGHBOURS)}


def _common_in(state: TrainingState) -> list[str]:
    """Returns the paths of what is nearly the same at all sites. That includes the models themselves only where they
    travel as they are."""
    roles = roles_of(state.algorithm, "state.algorithm")
    whole = _of_models(state.algorithm) is None

    def is_common(role: Role) -> bool:
        public = role.common or role.held_by == "all" or role.shows == "duals"
        return (public and not role.per_neighbour and not role.sums_to_zero) or (whole and role.shows == "models")

    return [path for path, role in roles.items() if is_common(role)]


def _of_models(algorithm_state: Any) -> PublicCopies | None:
    """Returns the public copies of the models, if the algorithm keeps any."""
    models = StateView(algorithm_state).models(algorithm_state)
    found = (one for one in algorithm_state if isinstance(one, PublicCopies) and one.own.shape == models.shape)
    return next(found, None)


def _averages_from_now(state: TrainingState) -> TrainingState:
    """Returns the state with the averages over time set to what the site has now, since it does not know the past."""
    view = StateView(state.algorithm)
    models, duals = view.models(state.algorithm).mean(dim=-2), view.duals(state.algorithm)
    return state._replace(
        average_model=models.to(state.average_model),
        average_dual=state.average_dual if duals is None else duals.mean(dim=-2).to(state.average_dual),
    )
