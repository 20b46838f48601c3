"""Converts states to flat tables of tensors, and back."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fairmesh.errors import CheckpointError


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
    for name, tensor in flatten_state(like).items():
        stored = tensors.get(name)
        if stored is None or stored.shape != tensor.shape or stored.dtype != tensor.dtype:
            raise CheckpointError(f"the checkpoint has no {name} of shape {tuple(tensor.shape)}; it is of another run")
    return {name: tensors[name].to(tensor.device) for name, tensor in flatten_state(like).items()}
