"""Which names in an experiment's table make Python execute code, and which of them are known to be harmless."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fairmesh.config.registry import role_of

_IMPORT_PATH = re.compile(r"(?P<module>[^:]+):(?P<name>[\w.]+)")


def import_paths(value: Any, key: str = "") -> dict[str, str]:
    """Returns every string of an experiment's table that can name something to import, by its place in the table."""
    if isinstance(value, str):
        return {key: value} if _IMPORT_PATH.fullmatch(value) else {}
    inside: dict[str, Any] = {}
    if isinstance(value, Mapping):
        inside = {f"{key}.{name}" if key else str(name): item for name, item in value.items()}
    elif isinstance(value, list):
        inside = {f"{key}[{number}]": item for number, item in enumerate(value)}
    return {place: path for key, item in inside.items() for place, path in import_paths(item, key).items()}


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
    return under(module, ("fairmesh",)) and isinstance(found, type) and bool(role_of(found))
