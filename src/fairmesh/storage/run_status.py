"""status.json of a run in progress: how far it is, and whether its process lives. It needs no torch.

A finished run has none, since its summary.json says all. The process of a run holds a lock on the run's folder, which
the system takes from it when it ends, however it ends: a number of a process would be another one's after a while. Some
network file systems cannot lock a folder, and a lock of another machine may not be seen. Then only the age of the news
shows whether the run goes on."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairmesh.storage.occupied import STATUS

FORMAT = 1
RUNNING, STOPPED, DIVERGED, FAILED = "running", "stopped", "diverged", "failed"
_RECENT_S = 30.0  # news of a process that cannot be seen
_PATIENCE_S = 1.0  # watchers lock the folder for a moment, to see whether it is free


def machine() -> str:
    """Returns a text by which a process sees whether another one is on the same machine. It does not name it."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Locks a run's folder, if the file system can. Yields whether it is locked."""
    handle = _opened(folder)
    try:
        until = time.monotonic() + _PATIENCE_S
        while not (taken := _lock(handle, exclusive=True)) and time.monotonic() < until:
            time.sleep(0.01)
        yield taken is True
    finally:
        if handle is not None:
            os.close(handle)


def _opened(folder: Path) -> int | None:
    try:
        return os.open(folder, os.O_RDONLY)
    except OSError:
        return None


def _lock(handle: int | None, exclusive: bool) -> bool | None:
    """Returns whether an open folder could be locked without waiting; None if locks do not work here."""
    try:
        import fcntl
    except ImportError:  # another system
        return None
    try:
        fcntl.flock(-1 if handle is None else handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (OSError, ValueError):
        return None
    return True


def read_run_status(folder: Path, at: float) -> dict[str, Any]:
    """Returns what a run has written last about itself. Its `alive` says whether its process lives: None if that cannot
    be seen from here and there is no recent news. {} if there is no status, or none that this version can read.

    Args:
        folder: The run's folder.
        at: What time it is, in seconds since the epoch.
    """
    try:
        status = json.loads((folder / STATUS).read_bytes())
        if status["run"] != FORMAT or not isinstance(status["time"], float) or not isinstance(status["sites"], list):
            return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return status | {"alive": status["state"] == RUNNING and _lives(folder, status, at)}


def version_of_status(folder: Path) -> str | None:
    """Returns the version of fairmesh that has written a folder's status in another format than that of this version;
    None if there is none, or a damaged one."""
    try:
        status = json.loads((folder / STATUS).read_bytes())
        return None if status["run"] == FORMAT else str(status.get("version", "unknown"))[:40]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _lives(folder: Path, status: dict[str, Any], at: float) -> bool | None:
    handle = _opened(folder)
    try:
        if _lock(handle, exclusive=False) is False:
            return True
    finally:
        if handle is not None:
            os.close(handle)
    if status["locked"] and status["machine"] == machine():
        return False
    return True if abs(at - status["time"]) < _RECENT_S else None
