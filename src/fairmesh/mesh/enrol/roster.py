"""The members of a mesh and who dials whom (mesh.toml, the same at every site), and one site's settings (site.toml)."""

import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w

from fairmesh.config.overrides import read_toml
from fairmesh.config.tables import checked, from_table, to_table
from fairmesh.errors import BadInput, nearest
from fairmesh.storage.files import write_atomically

MESH = "mesh.toml"
_FILES = {"mesh": MESH, "experiment": "experiment.toml", "authority": "authority.pem", "state": "state"}
_FILES |= {"key": "{name}.key", "certificate": "{name}.pem"}
OF_THE_EXPERIMENT = "experiment"  # as `data` of a site: the experiment's data at the site's position
_LARGEST_PRIOR = 0.8
OF_ONE_SITE = frozenset(
    {"device", "threads", "memory_gib", "fuse", "trace", "checkpoint_every", "count_bytes"}
)  # options of an experiment that may differ between sites

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


def check_label(name: str, what: str) -> str:
    """Returns the name. Refuses one that a certificate cannot contain as a host name."""
    if not _LABEL.fullmatch(name):
        raise BadInput(f"{what} {name!r}: use 1 to 63 of a-z, 0-9 and '-', without a '-' at either end")
    return name


def host_and_port(address: str, where: str) -> tuple[str, int]:
    """Returns the two parts of 'host:port' or '[2001:db8::1]:port'."""
    host, separator, port = address.rpartition(":")
    if not separator or not re.fullmatch(r"\d{1,5}", port) or not 1 <= int(port) <= 65535:
        raise BadInput(f"{where}: {address!r} is not host:port with a port from 1 to 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise BadInput(f"{where}: {host!r} is not an IPv6 address") from error
    elif not _HOST.fullmatch(host):
        raise BadInput(f"{where}: {host!r} is not a host; write a name, an IPv4 address, or an IPv6 address in [ ]")
    return host, int(port)


@checked
@dataclass(frozen=True)
class Member:
    """One site of a mesh as the others know it."""

    name: str
    address: str = ""  # host:port where it can be dialled; "": outgoing connections only
    neighbours: tuple[str, ...] = ()

    def __post_init__(self):
        check_label(self.name, "site")
        host = host_and_port(self.address, f"site {self.name}")[0] if self.address else ""
        if host in ("0.0.0.0", "::"):
            raise BadInput(
                f"site {self.name}: {host} is an address to listen on, but others cannot dial it; give the host name"
            )


@checked
@dataclass(frozen=True)
class _Head:
    name: str
    generation: int
    removed: tuple[str, ...] = ()


@checked
@dataclass(frozen=True)
class _MeshFile:
    mesh: _Head
    site: tuple[Member, ...]


@checked
@dataclass(frozen=True)
class Mesh:
    """The sites of a mesh, in the order of the experiment's nodes, and their edges. Sites that left stay listed, so
    that the others keep their positions."""

    name: str
    members: tuple[Member, ...]
    removed: tuple[str, ...] = ()  # in the order in which they left
    restarts: int = 0  # how often all sites have gone back or restored one of them; not in the file

    def __post_init__(self):
        check_label(self.name, "mesh")
        names = self.names
        _refuse_twice(names, "two sites are called {}; names must differ")
        _refuse_twice([m.address for m in self.members if m.address], "two sites have the address {}")
        ordered = tuple(replace(m, neighbours=self._in_order(m)) for m in self.members)
        object.__setattr__(self, "members", ordered)
        for a, b in ((member, self.member(other)) for member in ordered for other in member.neighbours):
            if a.name not in b.neighbours:
                raise BadInput(f"site {a.name} names {b.name} as a neighbour, but {b.name} does not name {a.name}")
            if not a.address and not b.address:
                raise BadInput(
                    f"sites {a.name} and {b.name} are neighbours, but neither has an address, so neither can dial the "
                    "other; give one of them an address host:port"
                )
        _refuse_twice(self.removed, "site {} is removed twice")
        for name in self.removed:
            if name not in names:
                raise BadInput(f"removed names {name!r}, which is not a site{nearest(name, names)}")
        if len(self.present) < 2:
            raise BadInput(f"a mesh needs at least two sites, this one has {len(self.present)}")
        self._refuse_apart()

    def _refuse_apart(self) -> None:
        """Refuses a graph in which some present site cannot reach some other."""
        reached = [self.present[0].name]
        for name in reached:
            reached += [other for other in self.neighbours(name) if other not in reached]
        apart = [member.name for member in self.present if member.name not in reached]
        if apart:
            here, there = ("{" + ", ".join(part) + "}" for part in (sorted(reached, key=self.names.index), apart))
            gone = f" without {', '.join(self.removed)}" if self.removed else ""
            raise BadInput(f"the graph{gone} falls apart into {here} and {there}; every site must reach every other")

    def _in_order(self, member: Member) -> tuple[str, ...]:
        """Returns a site's neighbours in the order of the sites, so that equal meshes have equal structures."""
        _refuse_twice(member.neighbours, f"site {member.name} names {{}} twice as a neighbour")
        for other in member.neighbours:
            if other == member.name:
                raise BadInput(f"site {member.name} names itself as a neighbour")
            if other not in self.names:
                raise BadInput(
                    f"site {member.name} has the neighbour {other!r}, which is not a site{nearest(other, self.names)}"
                )
        return tuple(name for name in self.names if name in member.neighbours)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all sites, also those that left, in the order of the experiment's nodes."""
        return tuple(member.name for member in self.members)

    @property
    def generation(self) -> int:
        """Returns 1 for the mesh as it was founded, and one more for every site that left and every other decision."""
        return 1 + len(self.removed) + self.restarts

    @property
    def present(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.name not in self.removed)

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Returns every edge between present sites once, with the end that dials first."""
        return tuple((a.name, b) for a in self.present for b in self.neighbours(a.name) if self.dials(a.name, b))

    def position(self, name: str) -> int:
        """Returns a site's index among all sites, also those that left."""
        return self.names.index(self.member(name).name)

    def member(self, name: str) -> Member:
        for member in self.members:
            if member.name == name:
                return member
        raise BadInput(f"the mesh {self.name} has no site {name!r}{nearest(name, self.names)}")

    def neighbours(self, name: str) -> tuple[str, ...]:
        """Returns the present neighbours of a site, in the order of the sites; a site that left has none."""
        if name in self.removed:
            return ()
        return tuple(other for other in self.member(name).neighbours if other not in self.removed)

    def dials(self, name: str, other: str) -> bool:
        """Returns whether `name` is the end that dials, of the edge between two neighbours. A site without an address
        dials; if both have an address, the first in the order of the sites dials."""
        here, there = self.member(name), self.member(other)
        if other not in here.neighbours:
            raise BadInput(f"sites {name} and {other} are not neighbours")
        if here.address and there.address:
            return self.position(name) < self.position(other)
        return not here.address

    def without(self, *names: str) -> "Mesh":
        """Returns the mesh after these sites have left for good; each one adds a generation."""
        self.refuse_gone(names)
        gone = tuple(name for name in self.names if name in names)
        return replace(self, removed=(*self.removed, *gone))

    def after(self, gone: Sequence[str], back_to: int | None, restored: Sequence[str] = ()) -> "Mesh":
        """Returns the mesh after a decision of its sites: to continue without some, to go back to a round, or to
        restore some that have lost their state."""
        if bool(gone) + (back_to is not None) + bool(restored) > 1:
            raise BadInput("a decision removes sites, goes back to a round or restores sites: one of these at a time")
        if back_to is None and not restored:
            return self.without(*gone)
        self.refuse_gone(restored)
        if any(other in restored for name in restored for other in self.neighbours(name)):
            raise BadInput(f"{', '.join(restored)} cannot be restored at once: all neighbours of each need a state")
        return replace(self, restarts=self.restarts + 1)

    def refuse_gone(self, names: Sequence[str]) -> None:
        """Refuses names that are not of sites of the mesh, or of sites that left."""
        for name in names:
            if self.member(name).name in self.removed:
                raise BadInput(f"site {name} has already left the mesh {self.name}")

    @staticmethod
    def read(path: str | os.PathLike) -> "Mesh":
        return Mesh.of(read_toml(Path(path)), path)

    @staticmethod
    def of(table: Mapping[str, Any], path: str | os.PathLike) -> "Mesh":
        """Returns the mesh of a table read from this path."""
        try:
            file = from_table(_MeshFile, table)
            mesh = Mesh(file.mesh.name, file.site, file.mesh.removed)
            if mesh.generation != file.mesh.generation:
                raise BadInput(
                    f"mesh.generation is {file.mesh.generation}, but with {len(mesh.removed)} removed sites it must be "
                    f"{mesh.generation}"
                )
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from error
        return mesh

    def text(self) -> str:
        """Returns the text of mesh.toml, with one line per setting."""
        head = to_table(_Head(self.name, 1 + len(self.removed), self.removed))
        sections = [("[mesh]", head), *(("[[site]]", to_table(member, defaults=False)) for member in self.members)]
        # Like tomli_w, but with lists on one line. JSON and TOML write all strings that occur here in the same way.
        lines = [
            "\n".join([title, *(f"{key} = {json.dumps(value)}" for key, value in content.items()), ""])
            for title, content in sections
        ]
        return "\n".join(lines)

    def write(self, path: str | os.PathLike) -> None:
        """Writes mesh.toml atomically."""
        write_atomically(Path(path), self.text().encode())


def _refuse_twice(values: Any, sentence: str) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise BadInput(sentence.format(value))
        seen.add(value)


@checked
@dataclass(frozen=True)
class SiteFile:
    """The settings of one site. Paths in the file are relative to it. The file contains no secret."""

    path: Path  # of the file itself
    name: str
    mesh: Path
    experiment: Path
    key: Path  # the private key; never leaves the site
    certificate: Path
    authority: Path  # the certificate of the consortium's authority
    state: Path  # folder of checkpoints and journal
    listen: str = ""  # host:port; "": outgoing connections only
    data: str | Mapping[str, Any] = ""  # "": not named yet, so that the site cannot run
    allow: tuple[str, ...] = ()  # modules that the experiment may use besides torch's, fairmesh's and its own files
    allow_revealing: bool = False  # messages from which neighbours can read training rows
    announce_statistics: bool = True  # coarse statistics of its inputs, before the first round
    on_unusual_data: Literal["warn", "wait"] = "warn"  # whether to begin if some site's data looks different
    largest_prior: float | None = None  # by its samples, of another site; None: 2 / n of n sites, at most 0.8
    compare_with_local: bool = True  # train a model of its own at the end, and tell how the common one compares
    largest_epsilon: float | None = None  # the most that an experiment may ask for; None: any, or no privacy
    largest_delta: float | None = None  # likewise
    engine: Literal["", "nvflare"] = ""  # what starts this site's node; "": `fairmesh node`
    ledger: str = ""  # the file of what this site has spent of its privacy, in all its meshes; "": next to the key
    options: Mapping[str, Any] = field(default_factory=dict)  # those of the experiment that each site sets for itself

    def __post_init__(self):
        check_label(self.name, "name")
        for key in self.options:
            if key not in OF_ONE_SITE:
                raise BadInput(
                    f"options.{key}: a site sets only {', '.join(sorted(OF_ONE_SITE))}; the others are the "
                    f"experiment's{nearest(key, OF_ONE_SITE)}"
                )
        if self.largest_prior is not None and not 0 < self.largest_prior <= 1:
            raise BadInput(f"largest_prior must lie in (0, 1], got {self.largest_prior:g}")
        for key in ("largest_epsilon", "largest_delta"):
            most = getattr(self, key)
            if most is not None and not most > 0:
                raise BadInput(f"{key} must be > 0, got {most:g}")
        if self.listen:
            host_and_port(self.listen, "listen")
        named = self.data if isinstance(self.data, str) else ""
        if named not in ("", OF_THE_EXPERIMENT) and not re.fullmatch(r"[^:]+:[\w.]+", named):
            raise BadInput(
                f"data: {self.data!r} is not an entry point; write 'file.py:function' or 'package.module:function', or "
                "a table such as an experiment's [data]"
            )

    def largest_share(self, sites: int) -> float:
        """Returns how much of all samples another of the present sites may declare without consent here: twice the mean
        share, unless this site has set another limit."""
        return min(_LARGEST_PRIOR, 2 / sites) if self.largest_prior is None else self.largest_prior

    @property
    def folder(self) -> Path:
        """Returns the folder that paths in the file are relative to."""
        return self.path.parent

    @property
    def ledger_path(self) -> Path:
        """Returns where the ledger of private runs is: as the file says, or next to the key."""
        named = Path(os.path.normpath(self.folder / self.ledger))
        return named if self.ledger else self.key.with_suffix(".privacy.jsonl")

    @staticmethod
    def of(path: str | os.PathLike, table: Mapping[str, Any]) -> "SiteFile":
        """Returns the settings in a table read from this path. Files that it does not name are next to it, under their
        usual names."""
        path = Path(path).absolute()
        named = {key: file.format(name=table.get("name")) for key, file in _FILES.items()} | dict(table)
        files = {key: path.parent / named[key] for key in _FILES if isinstance(named[key], str)}
        try:
            if "path" in table:
                raise BadInput("path: unknown key")
            if isinstance(table.get("mesh"), Mapping):
                raise BadInput("this file is about all sites of a mesh; give that of one site, such as north/site.toml")
            return from_table(SiteFile, named | files | {"path": path})
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from error

    @staticmethod
    def read(path: str | os.PathLike) -> "SiteFile":
        return SiteFile.of(path, read_toml(Path(path)))

    def table(self) -> dict[str, Any]:
        """Returns the content of site.toml: its files, relative to the folder if they are in it, and all settings that
        do not have their defaults."""
        table: dict[str, Any] = {}
        for setting in fields(self)[1:]:  # without the path of the file itself
            value = getattr(self, setting.name)
            if isinstance(value, Path):
                value = str(value.relative_to(self.folder) if value.is_relative_to(self.folder) else value)
            if value not in (setting.default, {}):
                table[setting.name] = value
        return table

    def write(self, comment: str = "") -> None:
        """Writes the file, with a comment before it. Refuses to overwrite one that exists."""
        try:
            with open(self.path, "x", encoding="utf-8") as file:
                file.write(comment + tomli_w.dumps(self.table()))
        except FileExistsError as error:
            raise BadInput(f"{self.path} exists already and is not overwritten; move it away first") from error
