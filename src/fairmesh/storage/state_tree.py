"""Converts states to flat tables of tensors, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fairmesh.errors import CheckpointError
from fairmesh.networks.roles import roles_of


def flatten_state(state: Any, name: str = "state") -> dict[str, Tensor]:
    """Returns the tensors of nested NamedTuples by their paths, without fields that are None."""
    if state is None:
        return {}
    if isinstance(state, Tensor):
        return {name: state}
    found: dict[str, Tensor] = {}
    for field, value in zip(state._fields, state):
        found |= flatten_state(value, f"{name}.{field}")
    return found


def unflatten_state(like: Any, tensors: Mapping[str, Tensor], name: str = "state") -> Any:
    """Returns a state of the form of `like` with these tensors."""
    if like is None:
        return None
    if isinstance(like, Tensor):
        return tensors[name]
    return type(like)(*(unflatten_state(value, tensors, f"{name}.{field}") for field, value in zip(like._fields, like)))


def checked_like(like: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the stored tensors of a state. Refuses them if their shapes or dtypes differ from those of `like`."""
    roles = roles_of(like)
    for name, tensor in flatten_state(like).items():
        stored, axes = tensors.get(name), tensor.ndim - roles[name].any_length
        if (
            stored is None
            or (stored.ndim, stored.dtype) != (tensor.ndim, tensor.dtype)
            or stored.shape[:axes] != tensor.shape[:axes]
        ):
            raise CheckpointError(f"the checkpoint has no {name} of shape {tuple(tensor.shape)}; it is of another run")
    return {name: tensors[name].to(tensor.device) for name, tensor in flatten_state(like).items()}


def equally_long(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors with zeros after the last axis of those that are shorter there, since the length of some tensors
    of a state differs between nodes."""
    longest = max(tensor.shape[-1] for tensor in tensors)
    if all(tensor.shape[-1] == longest for tensor in tensors):
        return list(tensors)
    return [torch.nn.functional.pad(tensor, (0, longest - tensor.shape[-1])) for tensor in tensors]
