"""Writes files atomically, and files that belong to their owner alone."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput, refusing


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


def read_record(path: Path) -> dict[str, Any]:
    """Returns the table that a person or a node has recorded in a file; an empty one if there is no file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError("it is not a table")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path}: {error}; restore it from a backup") from error
    return record


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a table for `read_record` to a file that only its owner can read."""
    with private_files():
        write_atomically(path, json.dumps(record, indent=1).encode())


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder, so that they survive a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
