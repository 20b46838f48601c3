"""Roles of the tensors in a state: who holds each, what its last axis counts, and what it shows to observers.

A state is a NamedTuple of tensors and of other such NamedTuples. Its fields declare their roles as annotations:

    class ADGDAState(NamedTuple):
        models: Models
        duals: Duals
        copies: PublicCopies
        dual_copies: Annotated[PublicCopies | None, OVER_NODES]

A field that is a plain `Tensor` has a row per hosted node and means nothing to observers. The roles of a nested state
add to those of the field that holds it. Checkpoints, clusters, records and sites that leave a mesh rely on the roles,
so an algorithm needs no code for any of them.
"""

import functools
import operator
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from torch import Tensor

from fairmesh.errors import BadInput, refusing

__all__ = [
    "HELD_BY_ALL",
    "OVER_NODES",
    "Common",
    "ConsensusSteps",
    "Duals",
    "HeldByAll",
    "Models",
    "OwnWeights",
    "PerNeighbour",
    "PerNode",
    "PerProcess",
    "Role",
    "StateView",
    "SumsToZero",
    "roles_of",
]

Holder = Literal["node", "process", "all"]
Shown = Literal["models", "duals", "own_weights", "consensus_steps"]


@dataclass(frozen=True)
class Role:
    """What one tensor of a state is.

    Args:
        held_by: "node": a row per hosted node. "process": one mean over the nodes of this process. "all": the same at
            every process. None: that of the enclosing field, else "node". Default: None.
        over_nodes: The last axis has one coordinate per node of the network. Default: False.
        per_neighbour: Where a node keeps a copy per neighbour, the axis before the last has one slot per copy. Default:
            False.
        sums_to_zero: The rows of all nodes sum to zero, so it restarts from zero when a node leaves. Default: False.
        on_simplex: Each row sums to one over the nodes, and is scaled to do so again when a node leaves. Default:
            False.
        common: Nearly the same at all nodes, and known to neighbours from messages, so that a node that has lost its
            state takes the mean of its neighbours' values. Default: False.
        any_length: The last axis may have another length after every round. Default: False.
        shows: What observers read here: "models" (..., nodes, dim); "duals", each node's estimate of lambda
            (..., nodes, n); "own_weights", n lambda_i of each node (..., nodes, 1); "consensus_steps", gamma. Default:
            None.
        if_lost: The field of the same state whose value stands in for this one at a node that has lost its state; None
            to start again from the beginning. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> fm.roles.Role(sums_to_zero=True).within(fm.roles.OVER_NODES).over_nodes
        True
    """

    held_by: Holder | None = None
    over_nodes: bool = False
    per_neighbour: bool = False
    sums_to_zero: bool = False
    on_simplex: bool = False
    common: bool = False
    any_length: bool = False
    shows: Shown | None = None
    if_lost: str | None = None

    def within(self, outer: "Role") -> "Role":
        """Returns this role for a tensor inside a field of the role `outer`."""
        names = [field.name for field in fields(self)]
        return Role(*(getattr(self, name) or getattr(outer, name) for name in names))


OVER_NODES = Role(over_nodes=True)
HELD_BY_ALL = Role(held_by="all")

PerNode = Annotated[Tensor, Role(held_by="node")]
Models = Annotated[Tensor, Role(shows="models")]
Duals = Annotated[Tensor, Role(over_nodes=True, on_simplex=True, shows="duals")]
OwnWeights = Annotated[Tensor, Role(shows="own_weights")]
ConsensusSteps = Annotated[Tensor, Role(shows="consensus_steps")]
Common = Annotated[Tensor, Role(common=True)]
SumsToZero = Annotated[Tensor, Role(sums_to_zero=True)]
PerNeighbour = Annotated[Tensor, Role(per_neighbour=True)]
PerProcess = Annotated[Tensor, Role(held_by="process")]
HeldByAll = Annotated[Tensor, HELD_BY_ALL]


@functools.cache
def _declared(kind: type) -> dict[str, Role]:
    """Returns the role that each field of a NamedTuple class declares."""
    advice = "define the class and the types that it names at the top of a module"
    with refusing(f"the types of {kind.__name__}'s fields cannot be read", NameError, advice=advice):
        hints = typing.get_type_hints(kind, include_extras=True)
    return {name: _role_in(hints.get(name)) for name in kind._fields}  # type: ignore[attr-defined]


def _role_in(hint: Any) -> Role:
    """Returns the role in an annotation, also in a union such as `Duals | None`."""
    if typing.get_origin(hint) is Annotated:
        inner, *extras = typing.get_args(hint)
        roles = (item for item in extras if isinstance(item, Role))
        return functools.reduce(Role.within, roles, _role_in(inner))
    return next((role for role in map(_role_in, typing.get_args(hint)) if role != Role()), Role())


def roles_of(state: Any, path: str = "state", outer: Role | None = None) -> dict[str, Role]:
    """Returns the role of every tensor of a state, by its path, without fields that are None.

    Args:
        state: A NamedTuple of tensors and of such NamedTuples.
        path: The path of the state itself. Default: "state".
        outer: The role of the field that holds it; None for none. Default: None.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> from fairmesh.algorithms.dsgd import DSGDState
        >>> fm.roles.roles_of(DSGDState(torch.zeros(1, 4, 2)))["state.models"].shows
        'models'
    """
    outer = outer or Role()
    if state is None:
        return {}
    if isinstance(state, Tensor):
        return {path: outer}
    found: dict[str, Role] = {}
    for field, role in _declared(type(state)).items():
        found |= roles_of(getattr(state, field), f"{path}.{field}", role.within(outer))
    return found


class StateView:
    """What observers read of an algorithm's state, found once by its roles and then read from any state of its form.

    Args:
        state: Any state of the algorithm.

    Raises:
        BadInput: If the state shows no models, or one thing twice.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> from fairmesh.algorithms.dsgd import DSGDState
        >>> state = DSGDState(torch.zeros(1, 4, 2))
        >>> fm.roles.StateView(state).models(state).shape
        torch.Size([1, 4, 2])
    """

    def __init__(self, state: Any):
        shown: dict[str, list[str]] = {}
        for path, role in roles_of(state, "").items():
            if role.shows:
                shown.setdefault(role.shows, []).append(path.removeprefix("."))
        if "models" not in shown and hasattr(state, "models"):
            shown["models"] = ["models"]  # the only field that needs no annotation
        if "models" not in shown:
            raise BadInput(
                f"{type(state).__name__} has no models: call a field `models`, (..., nodes, dim), or annotate one with "
                "fairmesh.networks.roles.Models"
            )
        twice = {what: paths for what, paths in shown.items() if len(paths) > 1}
        if twice:
            raise BadInput(f"{type(state).__name__} shows one thing in several fields: {twice}; annotate one of them")
        self._get: dict[str, Callable[[Any], Any]] = {
            what: operator.attrgetter(paths[0]) for what, paths in shown.items()
        }

    def _of(self, state: Any, what: Shown) -> Tensor | None:
        get = self._get.get(what)
        return None if get is None else get(state)

    def models(self, state: Any) -> Tensor:
        """Returns the models: (..., nodes, dim), or (..., 1, dim) if a server has the only model."""
        return self._get["models"](state)

    def duals(self, state: Any) -> Tensor | None:
        """Returns each node's estimate of lambda (..., nodes, n), if nodes keep one."""
        return self._of(state, "duals")

    def own_weights(self, state: Any) -> Tensor | None:
        """Returns n lambda_i of each hosted node (..., nodes, 1), if nodes know their own weight only."""
        return self._of(state, "own_weights")

    def consensus_steps(self, state: Any) -> Tensor | None:
        """Returns gamma of each hosted node (..., nodes, 1), if the state holds it."""
        return self._of(state, "consensus_steps")

    def only_shown(self, state: Any) -> Any:
        """Returns a state with what observers read of it, and None for all other tensors."""
        kept = [get(state) for get in self._get.values()]

        def kept_of(value: Any) -> Any:
            if value is None or isinstance(value, Tensor):
                return value if any(value is one for one in kept) else None
            return type(value)(*map(kept_of, value))

        return kept_of(state)
