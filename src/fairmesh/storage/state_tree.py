"""States as flat tables of tensors, and back."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fairmesh.errors import CheckpointError


def flatten_state(state: Any, name: str = "state") -> dict[str, Tensor]:
    """The tensors of nested NamedTuples by their paths; fields that are None are left out."""
    if state is None:
        return {}
    if isinstance(state, Tensor):
        return {name: state}
    found: dict[str, Tensor] = {}
    for field, value in zip(state._fields, state):
        found |= flatten_state(value, f"{name}.{field}")
    return found


def unflatten_state(like: Any, tensors: Mapping[str, Tensor], name: str = "state") -> Any:
    """A state of the form of `like` with other tensors in it."""
    if like is None:
        return None
    if isinstance(like, Tensor):
        return tensors[name]
    return type(like)(*(unflatten_state(value, tensors, f"{name}.{field}") for field, value in zip(like._fields, like)))


def checked_like(like: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors of a state, where they have the shapes of this one's."""
    for name, tensor in flatten_state(like).items():
        stored = tensors.get(name)
        if stored is None or stored.shape != tensor.shape or stored.dtype != tensor.dtype:
            raise CheckpointError(
                f"the checkpoint does not hold {name} of shape {tuple(tensor.shape)}; it is of another run"
            )
    return {name: tensors[name].to(tensor.device) for name, tensor in flatten_state(like).items()}
