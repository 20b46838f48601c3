"""Companions: states and steps that go along with any algorithm, unseen by it. Each file of this folder has one.

The states of a run's companions are one NamedTuple with a field for each, called *carried*.
"""

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from fairmesh.algorithms.companions.base import Companion, CompanionInputs, Question
from fairmesh.networks.roles import Role

__all__ = ["KINDS", "NOTHING", "Companion", "CompanionInputs", "Question", "carried", "carried_at_start", "outliving"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

KINDS: dict[str, type[Companion]] = {
    kind.name: kind for kind in sorted(Companion.__subclasses__(), key=lambda kind: kind.order)
}


@functools.cache
def _form(names: tuple[str, ...]) -> type[tuple]:
    """Returns the class of the companions' states: a NamedTuple with a field for each."""
    held = Annotated[Any, Role(held_by="node")]
    form: Any = NamedTuple("Carried", [(name, held) for name in names])  # type: ignore[misc]
    form.__reduce__ = lambda self: (carried, (self._asdict(),))  # copies and pickles cannot find the class by name
    return form


def carried(states: Mapping[str, Any]) -> Any:
    """Returns the states of companions, by their names, as a NamedTuple."""
    return _form(tuple(states))(*states.values())


NOTHING = carried({})


def outliving(states: Any) -> Any:
    """Returns those of the companions' states that are read after the last round."""
    return carried({name: state for name, state in states._asdict().items() if KINDS[name].outlives_run})


def carried_at_start(run: CompanionInputs) -> Any:
    """Returns the states of a run's companions before round 0."""
    return carried({name: kind.init(run) for name, kind in KINDS.items() if kind.needed(run)})
