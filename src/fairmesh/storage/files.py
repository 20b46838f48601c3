"""Writes files atomically, files that belong to their owner alone, and records that show whether a disk has damaged
them."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput, refusing
from fairmesh.storage.strict_json import as_json

_SEAL = "sha256"  # the entry of a record with the digest of all others


def refuse_no_file(path: Path) -> None:
    """Refuses a path at which there is something else than a file, such as a device, which writing would replace."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a device or a pipe"
        raise BadInput(f"{path} is {what} and no file, so it is not replaced; name another one")


def write_atomically(path: Path, content: bytes, durable: bool = True) -> None:
    """Writes a file. If the machine stops meanwhile, the file has all of the new content or all of the old.

    Args:
        path: The file.
        content: Its new content.
        durable: Whether to wait for the disk. If not, readers see the old content or the new, but a power cut may lose
            both. Default: True.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        refuse_no_file(path)
        with open(partial, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)  # it may be what fills the disk
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error


def read_bytes(path: Path) -> bytes:
    with refusing(f"cannot read {path}", OSError):
        return path.read_bytes()


def private_folder(folder: Path) -> bool:
    """Makes a folder that only its owner can read, or takes others' permissions from an existing one.

    Returns:
        Whether others had permissions."""
    with refusing(f"cannot use the folder {folder}", OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        wide = open_to_others(folder)
        if wide:
            folder.chmod(0o700)
        return wide


def open_to_others(path: Path) -> bool:
    """Returns whether others than the owner have any permission."""
    return bool(path.stat().st_mode & 0o077)


@contextmanager
def private_files() -> Iterator[None]:
    """Files and folders that this process makes meanwhile belong to their owner alone, whatever its umask was."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def read_record(path: Path, advice: str) -> dict[str, Any]:
    """Returns the table that `write_record` has written to a file; an empty one if there is no file.

    Args:
        path: The file.
        advice: What to do if it is damaged: what can replace it, and what that costs.
    """
    try:
        record = json.loads(path.read_bytes())
        if not isinstance(record, dict) or record.pop(_SEAL, "") != _digest(record):
            raise ValueError("it is not what fairmesh has written")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or error
        raise BadInput(f"{path} is damaged ({reason}); {advice}") from error
    return record


def write_record(path: Path, record: Mapping[str, Any], durable: bool = True) -> None:
    """Writes a table for `read_record` to a file that only its owner can read, with a digest of its content. Numbers
    that are not finite become null."""
    table = json.loads(as_json(record))
    table.pop(_SEAL, None)
    with private_files():
        write_atomically(path, json.dumps(table | {_SEAL: _digest(table)}, indent=1).encode(), durable)


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder, so that they survive a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
