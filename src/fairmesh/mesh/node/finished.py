"""A finished run in a state folder: it stays what it is, whatever is approved afterwards."""

import json
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.mesh.manifest import Manifest
from fairmesh.mesh.node.store import FINISHED, RESULT
from fairmesh.storage.files import read_bytes, write_atomically


def mark_finished(state: Path, manifest: Manifest) -> None:
    """Records that every site has its result, and of which manifest the run was."""
    write_atomically(state / FINISHED, json.dumps(_run_of(manifest)).encode())


def is_finished(state: Path, manifest: Manifest) -> bool:
    """Returns whether a folder has the result of this manifest. Refuses that of another one."""
    if not (state / FINISHED).exists():
        return False
    now, content = _run_of(manifest), read_bytes(state / FINISHED)
    try:
        before = dict(json.loads(content))
        unlike = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    except (ValueError, TypeError):
        raise _other_run(
            state, f"of a manifest that is not known, since the file {FINISHED} there is damaged"
        ) from None
    if unlike:
        raise _other_run(state, f"of another manifest, which differs in: {', '.join(unlike)}")
    return True


def _other_run(state: Path, why: str) -> BadInput:
    return BadInput(
        f"{state} holds a finished run {why}. A finished run cannot be extended, and its result stays in "
        f"{state / RESULT}. For another run, let the founder found a new mesh (fairmesh mesh init), and make a new "
        "folder and key for this site there (fairmesh mesh key)"
    )


def _run_of(manifest: Manifest) -> dict[str, Any]:
    """Returns what makes two manifests those of one run: all but the day on which they were signed."""
    table = manifest.table()
    files = table.pop("files")
    return {key: value for key, value in table.items() if key != "signed"} | files
