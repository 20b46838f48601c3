"""What a site's operator agrees to before any file of the experiment is imported: the manifest, by its digest, and the
modules that the experiment takes from outside the manifest.

The rules are about what a file *names*. Python code that was approved can do anything; the manifest says which code it
is.
"""

import ast
import importlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairmesh.config.sealed import parsed
from fairmesh.config.trusted import import_paths, is_harmless, under
from fairmesh.errors import BadInput, in_a_line
from fairmesh.mesh.enrol.manifest import EXPERIMENT, Handout, handed_out, loaded, python_files, table_of
from fairmesh.mesh.enrol.private_terms import refuse_larger_budget
from fairmesh.mesh.enrol.revealing import refuse_revealing
from fairmesh.mesh.enrol.roster import Mesh, SiteFile
from fairmesh.storage.files import read_record, write_record

if TYPE_CHECKING:
    from fairmesh.experiment import Experiment

APPROVED = "approved.json"
# Modules of the standard library that only calculate: no files, no network, no other programs.
_CALCULATE = {
    "__future__", "abc", "array", "bisect", "cmath", "collections", "contextlib", "copy", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "itertools", "json", "math",
    "numbers", "operator", "random", "re", "statistics", "string", "struct", "textwrap", "time", "types",
    "typing", "warnings",
}  # fmt: skip


def approved_experiment(site: SiteFile, mesh: Mesh) -> "tuple[Handout, Experiment]":
    """Returns the experiment of a site, whose files are those that the founder signed and the site approved. Refuses
    anything else, and messages that reveal more than the site allows, before the first import."""
    handout = handed_out(site, mesh)
    refuse_unapproved(site, handout)
    refuse_revealing(site, handout)
    return handout, import_allowed(site, handout)


def import_allowed(site: SiteFile, handout: Handout) -> "Experiment":
    """Imports an experiment if all that it takes from outside the manifest is allowed."""
    refuse_not_allowed(site, handout)
    refuse_larger_budget(site, handout.table)
    for path in import_paths(handout.table).values():
        module = path.partition(":")[0]
        if not module.endswith(".py"):  # from what is installed, and from no folder
            try:
                importlib.import_module(module)
            except Exception as error:  # a module may raise anything
                raise BadInput(f"{EXPERIMENT} names {path}, which cannot be imported: {in_a_line(error)}") from error
    return loaded(handout.folder, handout.contents, site.options)


# The manifest


def approve(site: SiteFile, handout: Handout) -> None:
    """Records that this site agrees to a manifest. Refuses one that is older than what the site agreed to before."""
    before, manifest = _approved(site), handout.manifest
    if before and before["authority"] == manifest.authority and before["signed"] > manifest.signed:
        raise BadInput(
            f"the manifest was signed on {manifest.date()}, before the one that this site approved; get the newest one "
            f"from the mesh's founder, or delete {_file(site)} if an older one is meant"
        )
    record = {"manifest": manifest.digest(), "authority": manifest.authority, "signed": manifest.signed}
    write_record(_file(site), record | {"approved": int(time.time())})


def refuse_unapproved(site: SiteFile, handout: Handout) -> dict[str, Any]:
    """Refuses a manifest that this site has not approved. Returns the record of the approval."""
    record, digest = _approved(site), handout.manifest.digest()
    command = f"read what would run here, then approve it: fairmesh mesh show {site.path} --approve"
    if record.get("manifest") != digest:
        before = record.get("manifest", "none so far")
        raise BadInput(f"this site has not approved the manifest {digest} (approved: {before}); {command}")
    return record


def is_approved(site: SiteFile, handout: Handout) -> bool:
    return _approved(site).get("manifest") == handout.manifest.digest()


def approved_at(site: SiteFile) -> int | None:
    """Returns when this site approved its manifest, in seconds since 1970, or None if it has not."""
    return _approved(site).get("approved")


def _file(site: SiteFile) -> Path:
    return site.path.with_name(APPROVED)


def _approved(site: SiteFile) -> dict[str, Any]:
    """Returns the record of what this site has approved; empty if it has approved nothing."""
    return read_record(_file(site), f"move it away, and approve again: fairmesh mesh show {site.path} --approve")


# Modules from outside the manifest


def refuse_not_allowed(site: SiteFile, handout: Handout) -> None:
    """Refuses an experiment that takes something from outside the manifest which this site does not allow."""
    found = list(not_allowed(handout.contents, site.allow))
    if found:
        modules = json.dumps(sorted({module for module, _ in found if module}))
        how = f"; if this site agrees, add allow = {modules} to {site.path}" if modules != "[]" else ""
        raise BadInput(f"{'; '.join(reason for _, reason in found)}{how}. Nothing was imported")


def not_allowed(contents: Mapping[str, bytes], allow: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields where the files of an experiment use something else that is neither known to be harmless nor allowed: the
    module to allow, or nothing if allowing does not help, and the reason."""
    for key, path in import_paths(table_of(contents)).items():
        module, _, name = path.partition(":")
        if module.endswith(".py"):
            if "." in name and name.partition(".")[0] not in _classes(contents[module], module):
                yield "", f"{EXPERIMENT}: {key} = {path!r} reaches through a name that is no class of {module}"
        elif "." in name:
            yield "", f"{EXPERIMENT}: {key} = {path!r} reaches through a name of {module}; write module:name"
        elif not under(module, allow) and not _is_known(module, name):
            known = "a model of torch.nn, a function of torch.nn.functional or a class of fairmesh"
            yield module.partition(".")[0], f"{EXPERIMENT}: {key} = {path!r} is neither in the manifest nor {known}"
    for file in python_files(contents):
        for module in outside(contents, file):
            top = module.partition(".")[0]
            if top not in _CALCULATE and not under(module, ("torch", "fairmesh", *allow)):
                yield top, f"{file} imports {module}"


def _is_known(module: str, name: str) -> bool:
    importlib.import_module("fairmesh.experiment")  # imports all that experiments can name
    return is_harmless(module, name)


def outside(contents: Mapping[str, bytes], file: str) -> list[str]:
    """Returns the modules that a Python file imports from outside these files."""
    inside = {name.removesuffix(".py").partition("/")[0] for name in python_files(contents)}
    found = dict.fromkeys(_imported_modules(contents[file], file))
    return [name for name in found if name.partition(".")[0] not in inside]


def _imported_modules(content: bytes, file: str) -> Iterator[str]:
    for node in ast.walk(parsed(content, file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


def _classes(content: bytes, file: str) -> set[str]:
    return {node.name for node in parsed(content, file).body if isinstance(node, ast.ClassDef)}
