"""Where a page about a run reads: finds out what a path is."""

from pathlib import Path
from typing import Protocol

from fairmesh.config.overrides import read_toml
from fairmesh.errors import BadInput, listed
from fairmesh.mesh.enrol.roster import SiteFile
from fairmesh.mesh.node.watching import LOG
from fairmesh.storage.occupied import STATUS, is_run
from fairmesh.watch.node import NodeSource
from fairmesh.watch.run import RunSource
from fairmesh.watch.view import View

_SITE = "site.toml"


class Source(Protocol):
    """Something that is watched."""

    def view(self, wait: bool = False) -> View:
        """Returns what is known of it now.

        Args:
            wait: Whether to wait for what the report says of a finished run, which takes seconds. Otherwise a later
                view has it. Default: False.
        """
        ...


def source_of(path: Path) -> Source:
    """Returns what is to be watched at a path.

    Args:
        path: The folder of a run, finished or not; or of a mesh, a site's site.toml, its folder or its state folder.

    Raises:
        BadInput: There is nothing to be watched, or another version has written it.
    """
    if not path.exists():
        raise BadInput(f"there is no {path}; give the folder of a run, or the site.toml of a mesh")
    state = state_of(path)
    if state:
        return NodeSource(*state)
    if path.is_dir() and (is_run(path) or (path / STATUS).exists()):
        return RunSource(path)
    raise BadInput(f"{path} {_what_instead(path)}; give the folder of a run, or the site.toml of a mesh")


def _what_instead(path: Path) -> str:
    """Returns what a path is that is neither a run nor a node."""
    inside = sorted(path.iterdir()) if path.is_dir() else []
    if not inside:
        return "is empty, so no run has begun there" if path.is_dir() else "is no folder"
    folders = [one.name for one in inside if one.is_dir() and (is_run(one) or (one / _SITE).is_file())]
    return f"has several of them: {listed(folders)}" if folders else "is no run's folder"


def state_of(path: Path) -> tuple[Path, Path | None] | None:
    """Returns the state folder of a node and its site's file, if it is known; None if a path is not about a node.

    Args:
        path: A site.toml, its folder, or a state folder.
    """
    if path.is_dir():
        if (path / _SITE).is_file():
            return state_of(path / _SITE)
        if not (path / LOG).exists():
            return None
        file = path.parent / _SITE
        return path, file if file.is_file() else None
    table = read_toml(path)
    if "mesh" not in table and "authority" not in table and {"data", "rounds", "algorithm"} & table.keys():
        raise BadInput(f"{path} is an experiment, not a run; give the folder of its run, such as runs/{path.stem}")
    return SiteFile.of(path, table).state, path
