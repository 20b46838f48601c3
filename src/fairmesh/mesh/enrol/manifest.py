"""What the founder handed out, signed: the SHA-256 of every file, and the members of the mesh with their neighbours.

A site compares its files with the manifest before it imports any of them, and executes exactly the contents that it
compared. Addresses may change, and site.toml is the site's own, so neither is in the manifest.
"""

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairmesh.config.overrides import put, read_toml
from fairmesh.config.sealed import SealedFiles, helpers, imported_files, wanted
from fairmesh.config.tables import checked, from_table
from fairmesh.config.trusted import import_paths
from fairmesh.errors import BadInput
from fairmesh.mesh.enrol.certificates import AUTHORITY, is_founders, public_digest, signed_by_founder
from fairmesh.mesh.enrol.roster import Member, Mesh, SiteFile
from fairmesh.storage.files import read_bytes, write_atomically

if TYPE_CHECKING:
    from fairmesh.experiment import Experiment

MANIFEST, EXPERIMENT = "manifest.json", "experiment.toml"
_PURPOSE = b"fairmesh manifest 1\n"  # what the authority signs as a manifest can be nothing else, such as a certificate
_LARGEST_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_QUOTED = re.compile(r"""(?P<quote>["'])(?P<file>[^"'\n:]+\.py):(?P<name>[\w.]+)(?P=quote)""")


@checked
@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json without its signature."""

    mesh: str
    authority: str  # SHA-256 of the authority's public key
    signed: int  # seconds since 1970
    members: tuple[Member, ...]  # without addresses
    files: Mapping[str, str]  # SHA-256 by path next to experiment.toml

    def __post_init__(self):
        if EXPERIMENT not in self.files:
            raise BadInput(f"files: {EXPERIMENT} is missing")
        for name, digest in self.files.items():
            refuse_other_file(name, digest)

    def table(self) -> dict[str, Any]:
        members = [{"name": member.name, "neighbours": list(member.neighbours)} for member in self.members]
        head = {"mesh": self.mesh, "authority": self.authority, "signed": self.signed}
        return head | {"members": members, "files": dict(self.files)}

    def content(self) -> bytes:
        """Returns what is signed. Equal manifests have equal content, however their files are formatted."""
        return _PURPOSE + json.dumps(self.table(), sort_keys=True, separators=(",", ":")).encode()

    def digest(self) -> str:
        """Returns the SHA-256 of the content. A site approves this number."""
        return hashlib.sha256(self.content()).hexdigest()

    def date(self) -> str:
        return f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(self.signed))} UTC"

    @staticmethod
    def read(path: Path, authority: bytes) -> "Manifest":
        """Reads a manifest. Refuses one that the founder with this authority's certificate did not sign."""
        text = read_handed_out(path)
        try:
            if len(text) > _LARGEST_BYTES:
                raise BadInput(f"it has {len(text)} bytes, more than {_LARGEST_BYTES}")
            table = json.loads(text)
            if not isinstance(table, dict):
                raise BadInput("it is not a table")
            signature = bytes.fromhex(table.pop("signature", ""))
            manifest = from_table(Manifest, table)
        except (BadInput, ValueError, RecursionError, TypeError) as error:
            raise BadInput(f"{path} is not a manifest: {error}; get it from the mesh's founder") from error
        if not is_founders(authority, manifest.content(), signature):
            raise BadInput(
                f"{path} was not signed by the authority whose certificate is {AUTHORITY}, or was changed afterwards; "
                "get both from the mesh's founder, and compare the authority's fingerprint by telephone"
            )
        if manifest.authority != public_digest(authority):
            raise BadInput(f"{path} names another authority than {AUTHORITY}; get both from the mesh's founder")
        return manifest

    def refuse_other_mesh(self, mesh: Mesh, where: Path | str) -> None:
        """Refuses a mesh file with another name, other members or other neighbours than those that were signed."""

        def compared(name: str, members: Sequence[Member], left: Sequence[str]) -> dict[str, Any]:
            neighbours = {f"neighbours of {member.name}": sorted(member.neighbours) for member in members}
            sites = [member.name for member in members]
            return {"name": name, "sites": sites, "sites that left": list(left)} | neighbours

        signed = compared(self.mesh, self.members, ())
        for what, here in compared(mesh.name, mesh.members, mesh.removed).items():
            if here != signed[what]:
                raise BadInput(
                    f"{where} is not as it was signed: {what}: {here}, but in the manifest {signed[what]}; get "
                    "mesh.toml from the mesh's founder"
                )


def read_handed_out(path: Path) -> bytes:
    """Returns the content of a file that the founder hands out."""
    try:
        return read_bytes(path)
    except BadInput as error:
        raise BadInput(f"{error}; get it from the mesh's founder") from error


def refuse_other_file(name: str, digest: str) -> None:
    """Refuses what no experiment has: any other file, such as a key, would be written next to a site's own."""
    if not _is_inside(name) or not (name == EXPERIMENT or name.endswith(".py")):
        raise BadInput(f"files: {name!r} is not {EXPERIMENT} or the path of a Python file next to it")
    if not _DIGEST.fullmatch(digest):
        raise BadInput(f"files: {digest!r} is not a SHA-256")


def _is_inside(name: str) -> bool:
    """Returns whether a path is one below its folder, and reads the same everywhere."""
    parts = name.split("/")
    return all(part and part.isprintable() and not part.startswith(".") and "\\" not in part for part in parts)


@dataclass(frozen=True)
class Handout:
    """An experiment as it was handed out: its files, whose contents are those of the manifest. Nothing is imported
    before `loaded`."""

    manifest: Manifest
    folder: Path
    contents: Mapping[str, bytes]  # by path in the folder

    @staticmethod
    def read(experiment: Path, authority: bytes, mesh: Mesh, mesh_file: Path) -> "Handout":
        """Reads the files next to an experiment file, and compares them with the manifest there. Refuses the file that
        differs, is missing, or is there in addition and would be imported, by its name."""
        folder = experiment.parent
        manifest = Manifest.read(folder / MANIFEST, authority)
        manifest.refuse_other_mesh(mesh, mesh_file)
        contents = {}
        for name, digest in manifest.files.items():
            path = experiment if name == EXPERIMENT else folder / name
            contents[name] = read_handed_out(path)
            here = hashlib.sha256(contents[name]).hexdigest()
            if here != digest:
                raise BadInput(
                    f"{path} is not the file that the founder signed: its SHA-256 is {here}, in the manifest it is "
                    f"{digest}; get it from the mesh's founder. Nothing was imported"
                )
        refuse_others(folder, contents)
        return Handout(manifest, folder.resolve(), contents)

    @cached_property
    def table(self) -> dict[str, Any]:
        """Returns the experiment's settings as they are in the file."""
        return table_of(self.contents)

    def imports_modules(self) -> bool:
        """Returns whether the experiment names something of a module that is installed, not of its own files."""
        return not all(path.partition(":")[0].endswith(".py") for path in import_paths(self.table).values())


def handed_out(site: SiteFile, mesh: Mesh) -> Handout:
    """Returns what the founder handed out to a site, compared with the manifest. `mesh` is the mesh file's."""
    return Handout.read(site.experiment, read_bytes(site.authority), mesh, site.mesh)


def table_of(contents: Mapping[str, bytes]) -> dict[str, Any]:
    """Returns the settings of the experiment among these files."""
    try:
        return read_toml(contents[EXPERIMENT].decode(), EXPERIMENT)
    except UnicodeDecodeError as error:
        raise BadInput(f"{EXPERIMENT} is not UTF-8 text: {error}") from error


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes the files that are handed out, without the manifest."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, content)


def python_files(contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the Python files among these files."""
    return {name: content for name, content in contents.items() if name != EXPERIMENT}


def refuse_others(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Refuses an experiment that could import another file of its folder than these."""
    imports: list[tuple[str, str]] = []  # the file that imports, and the module
    for key, path in import_paths(table_of(contents)).items():
        module = path.partition(":")[0]
        if not module.endswith(".py"):
            imports.append((EXPERIMENT, module))
        elif module not in contents:
            raise BadInput(
                f"{folder / EXPERIMENT}: {key} names {module}, which is not in the manifest; the founder must sign it "
                "too"
            )
    for name, content in python_files(contents).items():
        imports += [(name, module) for module in wanted(name, content)]
    for name, module in imports:
        for extra in imported_files(folder, module):
            if extra not in contents:
                raise BadInput(
                    f"{folder / extra} is not in the manifest, but {name} imports {module}, which could mean that "
                    "file; rename it or move it away"
                )


def loaded(folder: Path, contents: Mapping[str, bytes], options: Mapping[str, Any]) -> "Experiment":
    """Returns the experiment of these files, with these options instead of its own. This executes its Python files:
    the contents, not what the folder contains by now."""
    from fairmesh.experiment import experiment_from

    SealedFiles(folder, python_files(contents))
    table = table_of(contents)
    for key, value in options.items():
        put(table, f"options.{key}", value, "options")
    return experiment_from(table, folder)


def collected(experiment: Path) -> dict[str, bytes]:
    """Returns what a founder hands out: the experiment file, as experiment.toml, the Python files that it names, and
    what those import from their own folders. All files are then next to each other. Nothing is imported."""
    text = read_bytes(experiment).decode()
    contents: dict[str, bytes] = {}
    homes: dict[str, Path] = {}
    for file in dict.fromkeys(found["file"] for found in _QUOTED.finditer(text)):
        path = experiment.parent / file
        for name, content in helpers(path).items():
            home = (path.parent / name).resolve()
            if homes.setdefault(name, home) != home:
                raise BadInput(
                    f"{experiment} names two Python files with the same name in different folders, or they import such "
                    f"files: {name}; rename one"
                )
            contents[name] = content
    text = _QUOTED.sub(lambda f: f"{f['quote']}{Path(f['file']).name}:{f['name']}{f['quote']}", text)
    return {EXPERIMENT: text.encode()} | contents


def seal(folder: Path, mesh: Mesh, files: Sequence[str], now: float | None = None) -> Manifest:
    """Signs, in the founder's folder, what is handed out to the sites of this mesh, and writes manifest.json."""
    digests = {name: hashlib.sha256(read_bytes(folder / name)).hexdigest() for name in files}
    members = tuple(replace(member, address="") for member in mesh.members)
    signed = int(time.time() if now is None else now)
    manifest = Manifest(mesh.name, public_digest(read_bytes(folder / AUTHORITY)), signed, members, digests)
    signature = signed_by_founder(folder, manifest.content())
    table = manifest.table() | {"signature": signature.hex()}
    write_atomically(folder / MANIFEST, (json.dumps(table, indent=1) + "\n").encode())
    return manifest
