"""Writes files atomically."""

import os
from pathlib import Path

from fairmesh.errors import BadInput


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file. If the machine stops meanwhile, the file has all of the new content or all of the old."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)  # it may be what fills the disk
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error


def private_folder(folder: Path) -> None:
    """Makes a folder that only its owner can read. Leaves the permissions of an existing folder alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BadInput(f"cannot use the folder {folder}: {error.strerror or error}") from error


def replace_quickly(path: Path, content: bytes) -> None:
    """Replaces a file without waiting for the disk. Readers see the old content or the new; a power cut may lose
    both."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder, so that they survive a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
