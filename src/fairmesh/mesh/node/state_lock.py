"""The lock of a state folder: two nodes with one state would destroy it, and `fairmesh status` sees by it who runs.

The lock is on the folder itself. A lock on a file in it is lost when somebody deletes the file, since the next node
makes, and locks, another one. Network file systems such as NFS lock files only. There the file `lock` must do, and must
not be deleted while a node runs."""

import errno
import fcntl
import os
import time
from contextlib import ExitStack
from pathlib import Path

from fairmesh.errors import BadInput
from fairmesh.storage.files import private_folder

LEFT_S = 5.0  # wait for processes that a killed node has left
_FILE = "lock"
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


def locked(folder: Path, patience_s: float = 0.0) -> ExitStack:
    """Locks a state folder until the returned lock is closed, or the process and those that it has forked have ended.

    Args:
        folder: The state folder.
        patience_s: How long to wait for the lock, in seconds: a node that was killed leaves processes that read its
            data, which share its lock and its port until they notice. Default: 0.0.
    """
    private_folder(folder)
    until = time.monotonic() + patience_s
    with ExitStack() as lock:
        try:
            handles = [_opened(lock, folder), _opened(lock, folder / _FILE, os.O_RDWR | os.O_CREAT)]
            while not all(_taken(handle, fcntl.LOCK_EX) for handle in handles):
                if time.monotonic() >= until:
                    raise BadInput(f"another node is running with the state in {folder}; stop it first")
                time.sleep(0.05)
            os.utime(handles[-1])  # since when it runs
        except OSError as error:
            where = error.filename or folder
            raise BadInput(f"cannot use the state folder {folder}: {where}: {error.strerror or error}") from error
        return lock.pop_all()


def running_since(folder: Path) -> float | None:
    """Returns when the node was started that runs with the state in a folder, in seconds since the epoch, or None if
    none runs. A start whose time is not known, since somebody has deleted the file, counts as 0."""
    try:
        with ExitStack() as lock:
            handles = [_opened(lock, folder)]
            if (folder / _FILE).exists():
                handles.append(_opened(lock, folder / _FILE, os.O_RDWR))
            if all(_taken(handle, fcntl.LOCK_SH) for handle in handles):
                return None
            return os.fstat(handles[-1]).st_mtime if len(handles) > 1 else 0.0
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"cannot look at the state folder {folder}: {error.strerror or error}") from error


def _opened(lock: ExitStack, path: Path, how: int = os.O_RDONLY) -> int:
    handle = os.open(path, how, 0o600)
    lock.callback(os.close, handle)
    return handle


def _taken(handle: int, how: int) -> bool:
    """Locks a file or folder without waiting. Returns whether nobody else has locked it. A folder that cannot be locked
    counts as free."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        if not os.path.isdir(handle):
            raise
    return True
