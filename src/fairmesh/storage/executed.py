"""What runs on this machine have executed of a user's own code, so that their folders can be used again without asking.

A run's folder may come from somebody else, and its experiment.toml can name any function of any module. What it names
is imported only if it is known to be harmless, if the caller allows it, or if a run of this user has executed it here
with the same settings."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairmesh.config.overrides import resolved_files
from fairmesh.config.trusted import import_paths, is_harmless, under
from fairmesh.errors import BadInput


def remember_executed(settings: Mapping[str, Any], folder: Path) -> None:
    """Notes what a run with these settings has executed. Does nothing where notes cannot be written."""
    if "model" not in settings or not _foreign(settings["model"], ()):
        return
    try:
        _notes().mkdir(parents=True, exist_ok=True)
        (_notes() / _digest(located(settings["model"], folder))).touch()
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
    if not foreign or (_notes() / _digest(located(table, folder))).exists():
        return
    modules = sorted({path.partition(":")[0] for path in foreign.values()})
    named = "; ".join(f"{key} = {path!r}" for key, path in foreign.items())
    raise BadInput(
        f"the run in {folder} names code that no run of yours has executed on this machine ({named}), and nothing was "
        f"imported; read it, and if you trust it, say so: {' '.join(f'--allow {module}' for module in modules)}, or in "
        f"Python fm.inference.load_model(folder, allow={modules})"
    )


def located(table: Any, folder: Path) -> Any:
    """Returns the settings of a model with its Python file resolved. Between organisations it lies with the site's
    files, next to or above the result."""
    bases, inner = [folder.resolve(), *folder.resolve().parents[:3]], table
    while isinstance(inner, Mapping) and "path" not in inner and "base" in inner:  # of a model that adapts another
        inner = inner["base"]
    name = str(inner.get("path", "")).partition(":")[0] if isinstance(inner, Mapping) else ""
    return resolved_files(table, next((base for base in bases if name and (base / name).is_file()), folder.resolve()))


def _foreign(table: Any, allow: Sequence[str]) -> dict[str, str]:
    """Returns the import paths in a table that are neither harmless nor allowed, by their places."""
    return {
        key: path
        for key, path in import_paths(table).items()
        if not (under(path.partition(":")[0], allow) or is_harmless(*path.split(":")))
    }


def _digest(table: Any) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True, default=str).encode()).hexdigest()


def _notes() -> Path:
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "fairmesh" / "executed"
