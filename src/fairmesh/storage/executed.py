"""What runs on this machine have executed of a user's own code, so that their folders can be used again without asking.

A run's folder may come from somebody else, and its experiment.toml can name any function of any module. What it names
is imported only if it is known to be harmless, if the caller allows it, or if a run of this user has executed it here
with the same settings: the file at the same place, or with the same contents next to the same Python files, since a
folder may move."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairmesh.config.overrides import portable, resolved_files
from fairmesh.config.trusted import import_paths, is_harmless, under
from fairmesh.errors import BadInput


def remember_executed(settings: Mapping[str, Any], folder: Path) -> None:
    """Notes what a run with these settings has executed. Does nothing where notes cannot be written."""
    if "model" not in settings or not _foreign(settings["model"], ()):
        return
    try:
        _notes().mkdir(parents=True, exist_ok=True)
        for note in _digests(settings["model"], folder):
            (_notes() / note).touch()
    except OSError:  # then it must be allowed by name
        return


def refuse_foreign(table: Any, folder: Path, allow: Sequence[str]) -> None:
    """Raises BadInput if a part of a run's settings names code that is neither harmless, nor allowed, nor executed here
    by a run of this user.

    Args:
        table: The settings, as the run's folder has them.
        folder: The run's folder.
        allow: Modules and Python files that may be imported.
    """
    foreign = _foreign(table, allow)
    if not foreign or any((_notes() / note).exists() for note in _digests(table, folder)):
        return
    modules = sorted({path.partition(":")[0] for path in foreign.values()})
    named = "; ".join(f"{key} = {path!r}" for key, path in foreign.items())
    raise BadInput(
        f"the run in {folder} names code that no run of yours has executed on this machine ({named}), and nothing was "
        f"imported; read it, and if you trust it, say so: {' '.join(f'--allow {module}' for module in modules)}, or in "
        f"Python fm.inference.load_model(folder, allow={modules})"
    )


def located(table: Any, folder: Path) -> Any:
    """Returns the settings of a model with its Python file resolved: where they say or, between organisations and where
    a simulation's folder has moved, next to or above the result."""
    bases, inner = [folder.resolve(), *folder.resolve().parents[:3]], table
    while isinstance(inner, Mapping) and "path" not in inner and "base" in inner:  # of a model that adapts another
        inner = inner["base"]
    file = Path(str(inner.get("path", "")).partition(":")[0] if isinstance(inner, Mapping) else "")
    if file.is_absolute() and not file.is_file():
        table, file = portable(table), Path(file.name)
    return resolved_files(table, next((base for base in bases if file.name and (base / file).is_file()), bases[0]))


def _foreign(table: Any, allow: Sequence[str]) -> dict[str, str]:
    """Returns the import paths in a table that are neither harmless nor allowed, by their places."""
    return {
        key: path
        for key, path in import_paths(table).items()
        if not (under(path.partition(":")[0], allow) or is_harmless(*path.split(":")))
    }


def _digests(table: Any, folder: Path) -> list[str]:
    """Returns what is noted of executed settings: their digest with the files' places, and with the files' contents."""
    found = located(table, folder)
    files = {Path(path.partition(":")[0]) for path in import_paths(found).values()}
    beside = {neighbour for file in files if file.is_file() for neighbour in file.parent.glob("*.py")}
    contents = sorted((file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in beside if file.is_file())
    return [_digest(found), _digest([portable(found), contents])]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _notes() -> Path:
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "fairmesh" / "executed"
