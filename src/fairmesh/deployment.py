"""An experiment between organisations: what all sites must have alike, what is refused, and a site's own data."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fairmesh
from fairmesh.codec import VERSION as CODEC
from fairmesh.errors import BadInput
from fairmesh.experiment import Experiment, files_beside, load_experiment
from fairmesh.files import read_bytes, write_atomically
from fairmesh.mixing import union_of
from fairmesh.networks.peers.frames import Refused
from fairmesh.networks.peers.mesh import Member, Mesh, SiteFile
from fairmesh.problems.base import Problem, Site
from fairmesh.problems.datasets import Data
from fairmesh.settings import flat_table, from_table, imported, name_of, to_table

_OF_ONE_SITE = {"device", "data_on", "memory_gib", "fuse", "checkpoint_every", "count_bytes"}  # options
_IN_A_FILE = re.compile(r"(?P<file>[^:]+\.py):(?P<name>[\w.]+)")
_QUOTED = re.compile(r"""(?P<quote>["'])(?P<file>[^"'\n:]+\.py):(?P<name>[\w.]+)(?P=quote)""")


def agreed(experiment: Experiment) -> dict[str, Any]:
    """The fields that every site must have alike, keys joined by dots: all that determine the rounds and what is shown
    of them, and not a site's data, device or memory. A function in a file is known by the file's name and content."""
    table = {key: value for key, value in to_table(experiment).items() if key not in ("data", "sweep", "placements")}
    table["options"] = {key: value for key, value in table["options"].items() if key not in _OF_ONE_SITE}
    return flat_table(portable(table, contents=True))


def portable(value: Any, contents: bool = False) -> Any:
    """'/somewhere/file.py:name' as 'file.py:name', which reads the same on every machine; with `contents`, and the
    SHA-256 of the file."""
    if isinstance(value, Mapping):
        return {key: portable(item, contents) for key, item in value.items()}
    if isinstance(value, list):
        return [portable(item, contents) for item in value]
    found = _IN_A_FILE.fullmatch(value) if isinstance(value, str) else None
    if not found:
        return value
    path = Path(found["file"])
    digest = f" sha256 {hashlib.sha256(read_bytes(path)).hexdigest()[:16]}" if contents else ""
    return f"{path.name}:{found['name']}{digest}"


def digest_of(table: Mapping[str, Any]) -> str:
    """SHA-256 of a table of agreed fields, in hexadecimal."""
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """The agreed fields in which two sites differ, in words."""

    def shown(table: Mapping[str, Any], key: str) -> str:
        return json.dumps(table[key]) if key in table else "nothing"

    keys = [*here, *(key for key in there if key not in here)]
    unlike = [key for key in keys if (key in here) != (key in there) or here[key] != there[key]]
    return [f"{key}: {shown(here, key)} here, {shown(there, key)} there" for key in unlike]


def greeting(name: str, experiment: Experiment, mesh: Mesh) -> dict[str, Any]:
    """What a site tells a neighbour first: who it is, and all that both must have alike."""
    versions = {"fairmesh version": fairmesh.__version__, "codec version": CODEC, "mesh name": mesh.name}
    return {
        "site": name,
        "generation": mesh.generation,
        "agreed": versions | agreed(experiment),
        "members": {member.name: list(member.neighbours) for member in mesh.members},
    }


def refuse_unlike(mine: Mapping[str, Any], name: str, theirs: Mapping[str, Any]) -> None:
    """Refuses the greeting of neighbour `name` where it is another's, or of another experiment; says in which field."""
    if theirs.get("site") != name:
        raise Refused(f"it greets as {theirs.get('site')!r} with the certificate of {name}")
    fields = theirs.get("agreed")
    if not isinstance(fields, dict):
        raise Refused("the greeting does not say which experiment it is")
    unlike = differences(mine["agreed"], fields)
    members, there = mine["members"], theirs.get("members")
    if not isinstance(there, dict) or list(there) != list(members):
        unlike.append(f"sites: {list(members)} here, {list(there) if isinstance(there, dict) else there} there")
    else:
        unlike += [f"neighbours of {m}: {members[m]} here, {there[m]} there" for m in members if members[m] != there[m]]
    if unlike:
        raise Refused(f"another experiment: {'; '.join(unlike[:4])}")


def refuse_undeployable(experiment: Experiment) -> None:
    """Refuses, with the reason, what sites without a server cannot run: a deployment is one run of one algorithm."""
    if experiment.algorithm.needs_server:
        raise BadInput(
            f"{name_of(experiment.algorithm)} needs a server that all sites trust with their models, and between "
            "organisations there is none; use ad-gda, which is as robust and needs no server"
        )
    if len(experiment.seeds) > 1:
        raise BadInput(
            f"a deployment is one run, but seeds = {list(experiment.seeds)} are {len(experiment.seeds)}; keep one, and "
            "compare seeds in a simulation"
        )
    if experiment.sweep:
        raise BadInput(
            f"a deployment is one run, but the experiment sweeps over {', '.join(experiment.sweep)}; search in a "
            "simulation, then write the value found"
        )
    if experiment.placements is not None:
        raise BadInput(
            "placements move data between nodes, but between organisations data stay where they are; leave them out"
        )


def founded(experiment: Experiment, name: str, addresses: Mapping[str, str | None]) -> Mesh:
    """The first generation of a mesh: the experiment's graph over these sites, in their order."""
    refuse_undeployable(experiment)
    sites = list(addresses)
    if len(sites) < 2:
        raise BadInput(f"a mesh needs at least two sites, got {len(sites)}; name them with --site")
    if experiment.prior is not None and len(experiment.prior) != len(sites):
        raise BadInput(f"prior has {len(experiment.prior)} entries for {len(sites)} sites; give one number for each")
    neighbours = neighbours_of(experiment, sites)
    members = [Member(site, addresses[site], tuple(neighbours[site])) for site in sites]
    return Mesh(name, digest_of(agreed(experiment)), tuple(members))


def neighbours_of(experiment: Experiment, sites: Sequence[str]) -> dict[str, list[str]]:
    """Who is whose neighbour in any round, by the experiment's graph over these sites."""
    links = union_of(experiment.topology.build(len(sites))).matrix.tocoo()
    names = list(sites)
    found: dict[str, list[str]] = {site: [] for site in names}
    for i, j, weight in zip(links.row.tolist(), links.col.tolist(), links.data.tolist()):
        if i != j and weight > 0:
            found[names[i]].append(names[j])
    return found


def copied(experiment: Path, folder: Path) -> list[Path]:
    """Copies an experiment file, as experiment.toml, and the Python files it names into a folder; the copy then names
    the copies."""
    try:
        text = experiment.read_text(encoding="utf-8")
        named = {found["file"]: experiment.parent / found["file"] for found in _QUOTED.finditer(text)}
        contents = {path.name: path.read_bytes() for path in named.values()}
    except OSError as error:
        raise BadInput(f"cannot read {error.filename}: {error.strerror or error}") from error
    homes = {path.resolve() for path in named.values()}
    if len({home.name for home in homes}) < len(homes):
        raise BadInput(f"{experiment} names two Python files of one name in different folders; rename one of them")
    text = _QUOTED.sub(lambda f: f"{f['quote']}{Path(f['file']).name}:{f['name']}{f['quote']}", text)
    contents["experiment.toml"] = text.encode()
    for name, content in contents.items():
        write_atomically(folder / name, content)
    if agreed(load_experiment(folder / "experiment.toml")) != agreed(load_experiment(experiment)):
        raise BadInput(f"the copy of {experiment} in {folder} is not the same experiment; write its files beside it")
    return [folder / name for name in contents]


def own_site(site_file: SiteFile, experiment: Experiment, mesh: Mesh) -> Site:
    """The data of this site alone, under its name in the mesh."""
    position = mesh.position(site_file.name)
    if site_file.data is None:
        sites = experiment.data.sites()
        if len(sites) != len(mesh.members):
            raise BadInput(
                f"the experiment's data are of {len(sites)} sites, but the mesh has {len(mesh.members)}; give this "
                f"site's own data in {site_file.path.name}"
            )
        return replace(sites[position], name=site_file.name)
    given = files_beside(site_file.data, site_file.folder)
    site = _called(given) if isinstance(given, str) else _only(_data_of(given, site_file.folder))
    return replace(site, name=site_file.name)


def _called(path: str) -> Site:
    function = imported(path, "data")
    made = function() if callable(function) else function
    if not isinstance(made, Site):
        raise BadInput(f"data: {path} must return one fairmesh.Site, got {type(made).__name__}")
    return made


def _data_of(table: Mapping[str, Any], folder: Path) -> Data:
    def beside(value: Any, key: str = "") -> Any:
        if isinstance(value, Mapping):
            return {inner: beside(item, inner) for inner, item in value.items()}
        return str(folder / value) if key in ("file", "folder") and isinstance(value, str) else value

    return from_table(Data, beside(table), "data")


def _only(data: Data) -> Site:
    sites = data.sites()
    if len(sites) != 1:
        raise BadInput(
            f"data: gives {len(sites)} sites, but a site has only its own data; for one pool of samples use "
            "partition = { name = 'even', nodes = 1 }"
        )
    return sites[0]


@dataclass(frozen=True)
class _Given(Data):
    only: Site

    def sites(self) -> list[Site]:
        return [self.only]


def own_problem(site: Site, experiment: Experiment) -> Problem:
    """The problem of one site by itself: refuses data that do not fit the model, the loss or the settings."""
    return replace(experiment, data=_Given(site), prior=None).problem()
