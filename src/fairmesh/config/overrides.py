"""Experiment files as tables: read, overridden by dotted keys, and their paths resolved."""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput


def flat_table(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested tables as one table, with keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flat_table(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def read_toml(source: Path | str, where: str = "") -> dict[str, Any]:
    """Returns the table in a TOML file, or in the text of one that came from `where`."""
    try:
        return tomllib.loads(source if isinstance(source, str) else source.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {source}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{where or source} is not valid TOML: {error}") from error


def overridden(table: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Returns the table with the settings of "dotted.key=value" in place of its own."""
    for key, value in map(_assignment, assignments):
        put(table, key, value, f"--set {key}")
    return table


def _assignment(text: str) -> tuple[str, Any]:
    """Returns the key and the value of 'dotted.key=value'. A value that is not TOML is a string."""
    key, separator, value = (part.strip() for part in text.partition("="))
    if not separator or not key:
        raise BadInput(f"--set {text!r}: write key=value, for example algorithm.consensus_step=0.5")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def put(table: dict[str, Any], path: str, value: Any, what: str) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        below = table.setdefault(parent, {})
        if isinstance(below, str):
            below = table[parent] = {"name": below}
        if not isinstance(below, dict):
            raise BadInput(f"{what}: {parent} is not a table")
        table = below
    table[leaf] = value


def resolved_files(value: Any, folder: Path) -> Any:
    """Returns the settings with every 'file.py:name' resolved to the file in this folder."""
    return _with_files(value, lambda file: folder / file)


def portable(value: Any) -> Any:
    """Returns the settings with every '/somewhere/file.py:name' as 'file.py:name', which is the same on every machine
    and in every folder."""
    return _with_files(value, lambda file: Path(file).name)


def _with_files(value: Any, changed: Callable[[str], object]) -> Any:
    """Returns the settings with the file of every 'file.py:name' changed."""
    if isinstance(value, Mapping):
        return {key: _with_files(item, changed) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_files(item, changed) for item in value]
    path = re.fullmatch(r"([^:]+\.py):([\w.]+)", value) if isinstance(value, str) else None
    return f"{changed(path[1])}:{path[2]}" if path else value
