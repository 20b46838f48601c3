"""The public names: all that `fairmesh` and its namespaces export."""

import inspect
from typing import Any

import fairmesh as fm

NAMESPACES = {name: thing for name in fm.__all__ if inspect.ismodule(thing := getattr(fm, name))}


def public_objects() -> dict[str, Any]:
    """Returns every public class and function once, by the name under which users find it."""
    found: dict[str, Any] = {}
    everything = [("fm", fm), *((f"fm.{name}", module) for name, module in NAMESPACES.items())]
    for prefix, module in everything:
        for name in module.__all__:
            thing = getattr(module, name)
            if (inspect.isclass(thing) or inspect.isroutine(thing)) and thing not in found.values():
                found[f"{prefix}.{name}"] = thing
    return found
