"""What a site decides for itself about jobs of fairmesh: `local/fairmesh.toml` in its NVFlare workspace.

It names the site's data and, if it shall not be in the workspace, the folder in which runs keep their state from job to
job. Further settings are those of a mesh's site.toml, such as `allow`."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairmesh.config.overrides import read_toml, resolved_files
from fairmesh.config.registry import IMPORT
from fairmesh.config.tables import from_table
from fairmesh.data.site_files import in_folder
from fairmesh.errors import BadInput, listed, nearest, optional
from fairmesh.mesh.enrol.roster import MESH, OF_THE_EXPERIMENT, SiteFile
from fairmesh.nvflare.job import CLASSES
from fairmesh.storage.files import write_atomically

FILE = "fairmesh.toml"
STATE = "fairmesh"  # in the site's workspace, next to `local` and `startup`
_OF_CODE = re.compile(r"([^:]+\.py):[\w.]+")
# What the job has:
_OF_A_MESH = {"path", "name", "mesh", "experiment", "key", "certificate", "authority", "listen", "engine"}
_KEYS = sorted(SiteFile.__dataclass_fields__.keys() - _OF_A_MESH)
_ALLOWED_BY_PREFIX = ("fairmesh.nvflare.", "nvflare.collab.")
_RESOURCES = ("resources.json", "resources.json.default")  # the first that exists counts
_ALLOW = "class_allow_list"


@dataclass(frozen=True)
class SiteSettings:
    """The settings of a site for all runs.

    Args:
        state: The folder of all runs' states.
        table: What the site.toml of a run has besides its files, with absolute paths.
    """

    state: Path
    table: Mapping[str, Any]


def settings_of(workspace: Path, simulated: bool = False) -> SiteSettings:
    """Returns the settings of the site with this NVFlare workspace.

    Args:
        workspace: The folder that has `local` and `startup`.
        simulated: Whether all sites are on one machine, in NVFlare's simulator. Then a site without a file takes the
            experiment's data. Elsewhere a job must not choose what a site reads. Default: False.
    """
    workspace = workspace.absolute()
    path = workspace / "local" / FILE
    if not path.exists():
        if simulated:
            return SiteSettings(workspace / STATE, {"data": OF_THE_EXPERIMENT, "allow_revealing": True})
        raise BadInput(
            f"{path} is missing, so this site has named no data; make it at the site: fairmesh nvflare site "
            f"{workspace} --data FILE"
        )
    table = dict(read_toml(path))
    for key in table:
        if key not in _KEYS:
            raise BadInput(f"{path}: {key}: unknown key{nearest(key, _KEYS)}; it may have {', '.join(_KEYS)}")
    if not table.get("data"):
        raise BadInput(f'{path} names no data; add a table such as [data] with name = "table", file = "patients.csv"')
    state = Path(str(table.pop("state", workspace / STATE)))
    table["data"] = _absolute(table["data"], path.parent)
    if table.get("ledger"):
        table["ledger"] = str(path.parent / str(table["ledger"]))
    SiteFile.of(path, {"name": "site", "mesh": MESH, **table})  # refuses values that mean nothing
    return SiteSettings(path.parent / state, table)


def refuse_other_data(settings: SiteSettings, path: Path) -> None:
    """Refuses data that nothing could be read from: an unknown kind or setting, or a file that is not there."""
    from fairmesh.data.datasets.base import Data
    from fairmesh.mesh.enrol.agreement import of_one_site

    given = settings.table["data"]
    if isinstance(given, Mapping) and given.get("name") != IMPORT:  # a class is imported in a job only
        target = {"target": "as the experiment says"} if given.get("name") == "table" else {}
        from_table(Data, {**target, **of_one_site(given)}, f"{path}: data")
    missing = [file for file in _files_in(given) if not re.search(r"[*?]", file) and not Path(file).exists()]
    if missing:
        raise BadInput(f"{path}: data: {listed(missing)} is not there; name this site's data, or put it there")


def _files_in(data: Any) -> Iterator[str]:
    """Yields the files and folders that a site's data names, as `_absolute` has made them."""
    if isinstance(data, str) and (named := _OF_CODE.fullmatch(data)):
        yield named[1]
    for key, value in data.items() if isinstance(data, Mapping) else ():
        if key in ("file", "folder"):
            files = value.values() if isinstance(value, Mapping) else value
            yield from [files] if isinstance(files, str) else files
        else:
            yield from _files_in(value)


def _absolute(data: Any, folder: Path) -> Any:
    """Returns what names a site's data, with paths that do not depend on where it is read."""
    found = resolved_files(data, folder)
    if not isinstance(found, Mapping):
        return found
    made = {key: _absolute(value, folder) if isinstance(value, Mapping) else value for key, value in found.items()}
    for key in {key for key in ("file", "folder") if isinstance(data.get(key), str | list | Mapping)}:
        made[key] = in_folder(data[key], folder)
    return made


def written(workspace: Path, data: str, state: str) -> Path:
    """Writes a site's file. Refuses to overwrite one.

    Args:
        workspace: The site's NVFlare workspace.
        data: A table (.csv, .parquet, ...), "file.py:function", or "experiment" for the experiment's own data.
        state: The folder for the states of runs; "": in the workspace.

    Returns:
        The path of the file.
    """
    local = workspace / "local"
    if not local.is_dir():
        raise BadInput(
            f"{workspace} has no folder `local`, so it is no NVFlare workspace of a site; name the folder that has "
            "`local` and `startup`"
        )
    if (workspace / "startup" / "fed_server.json").exists():
        raise BadInput(f"{workspace} is the server's, which has no data; leave --data out, and name data at each site")
    path = local / FILE
    if path.exists():
        raise BadInput(
            f"{path} exists already and is not overwritten; edit it, or check it: fairmesh nvflare site {workspace}"
        )
    file = data.rpartition(":")[0] if _OF_CODE.fullmatch(data) else data
    if data != OF_THE_EXPERIMENT and not Path(file).exists():
        raise BadInput(
            f"--data: there is no file {Path(file).absolute()}; name a table (.csv, .parquet), file.py:function, or "
            f"'{OF_THE_EXPERIMENT}' for the experiment's own data, in a trial"
        )
    lines = ["# What this site decides about jobs of fairmesh. Relative paths start at this file's folder."]
    if state:
        lines.append(f"state = {json.dumps(str(Path(state).absolute()))}")
    if data == OF_THE_EXPERIMENT:
        lines.append(f"data = {json.dumps(data)}")
    elif _OF_CODE.fullmatch(data):
        file, _, function = data.rpartition(":")
        lines.append(f"data = {json.dumps(f'{Path(file).absolute()}:{function}')}")
    else:
        lines += ["[data]", 'name = "table"', f"file = {json.dumps(str(Path(data).absolute()))}"]
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error
    return path


def refuse_no_workspace(workspace: Path) -> None:
    """Refuses a path that is no folder, which `allow_here` would make."""
    if not workspace.is_dir():
        raise BadInput(
            f"there is no folder {workspace}; name an NVFlare workspace, which has `local` and `startup`. For the "
            "simulator of NVFlare make the folder first"
        )


def forbidden(workspace: Path) -> Iterator[str]:
    """Yields the classes of a job that this site, or server, does not allow, by its resources.json."""
    allowed = _resources(workspace)[_ALLOW]
    for name in CLASSES:
        if "*" not in allowed and not any(
            name == entry or name.startswith(f"{entry.rstrip('.')}.") for entry in allowed
        ):
            yield name


def allow_here(workspace: Path) -> Path:
    """Adds the classes of jobs of fairmesh to what a site, a server, or a workspace of NVFlare's simulator allows.

    Returns:
        The changed file.
    """
    path = workspace / "local" / _RESOURCES[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    resources = _resources(workspace)
    resources[_ALLOW] = list(dict.fromkeys([*resources[_ALLOW], *_ALLOWED_BY_PREFIX]))
    write_atomically(path, (json.dumps(resources, indent=2) + "\n").encode())
    return path


def _resources(workspace: Path) -> dict[str, Any]:
    """Returns the site's settings of NVFlare, with the classes that it allows where they say nothing."""
    with optional("nvflare"):
        from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
    path = next((workspace / "local" / name for name in _RESOURCES if (workspace / "local" / name).exists()), None)
    try:
        resources = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(resources, dict) or not isinstance(resources.get(_ALLOW, []), list):
            raise ValueError(f"{_ALLOW} must be a list")
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    return {_ALLOW: list(DEFAULT_CLASS_ALLOW_LIST)} | resources


def refuse_forbidden(workspace: Path) -> None:
    """Refuses a job at a site that does not allow its classes. NVFlare itself does not look at those of a job that
    brings code."""
    if missing := list(forbidden(workspace)):
        raise BadInput(f"this site does not allow {listed(missing)}: {how_to_allow(workspace)}")


def how_to_allow(workspace: Path) -> str:
    """Returns what to do so that a site allows the classes of jobs of fairmesh."""
    return (
        f"if this place agrees, run fairmesh nvflare site {workspace} --allow, which adds "
        f"{' and '.join(_ALLOWED_BY_PREFIX)} to the {_ALLOW} of local/{_RESOURCES[0]}; the next job reads it"
    )
