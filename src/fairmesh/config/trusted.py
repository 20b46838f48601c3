"""Which names in an experiment's table make Python execute code, and which of them are known to be harmless."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fairmesh.config.registry import role_of

_IMPORT_PATH = re.compile(r"(?P<module>[^:]+):(?P<name>[\w.]+)")


def import_paths(value: Any, key: str = "") -> dict[str, str]:
    """Returns every string of an experiment's table that can name something to import, by its place in the table."""
    found: dict[str, str] = {}
    if isinstance(value, Mapping):
        for inner, item in value.items():
            found |= import_paths(item, f"{key}.{inner}" if key else str(inner))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            found |= import_paths(item, f"{key}[{number}]")
    elif isinstance(value, str) and _IMPORT_PATH.fullmatch(value):
        found[key] = value
    return found


def under(module: str, packages: Sequence[str]) -> bool:
    """Returns whether a module is one of these packages, or inside one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_harmless(module: str, name: str) -> bool:
    """Returns whether something that is already imported is known to do no more than calculate: a model of torch.nn, a
    function of torch.nn.functional, or a class that experiments can name. The rest of torch can run programs
    (torch.hub.load), unpickle files (torch.load) and compile code."""
    from torch import nn

    found = getattr(sys.modules.get(module), name, None)
    if module == "torch.nn":
        return isinstance(found, type) and issubclass(found, nn.Module)
    if module == "torch.nn.functional":
        home = getattr(found, "__module__", None)
        return callable(found) and home in ("torch.nn.functional", "torch._C._nn", "torch")
    return under(module, ("fairmesh",)) and isinstance(found, type) and role_of(found) is not None
