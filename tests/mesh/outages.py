"""Power cuts and full disks, as far as a test can have them."""

import ctypes
import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.mesh.fleet import ended, forked
from tests.mesh.lives import Lives

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000  # flags of unshare(2)
_DISK = 4 << 20  # bytes
_DISK_S = 0.15  # that a slow disk takes, so that rounds go on meanwhile
_LARGEST_FILE = 12_000  # bytes, where no disk can be mounted


def note_what_is_durable(path: Path) -> None:
    """In this process, from now on: which bytes of which files, and which names in which folders, are made durable."""
    file = open(path, "a", buffering=1)  # noqa: SIM115

    def noting(make_durable: Callable[[int], None]) -> Callable[[int], None]:
        def noted(number: int) -> None:
            where = os.readlink(f"/proc/self/fd/{number}")
            what = sorted(os.listdir(where)) if os.path.isdir(where) else os.fstat(number).st_size
            time.sleep(_DISK_S)
            make_durable(number)
            file.write(json.dumps([where, what]) + "\n")

        return noted

    os.fsync, os.fdatasync = noting(os.fsync), noting(os.fdatasync)


def keep_what_is_durable(path: Path) -> int:
    """Cuts the journal of such a process, after its death, to what a power cut may leave; returns the bytes lost."""
    known: dict[str, Any] = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            where, what = json.loads(line)
            known[where] = what
    lost = 0
    for folder, names in known.items():
        for journal in Path(folder).glob("journal-*.log") if isinstance(names, list) else ():
            size = journal.stat().st_size
            kept = min(size, known.get(str(journal), 0)) if journal.name in names else 0
            lost += size - kept
            if journal.name in names:
                os.truncate(journal, kept)
            else:
                journal.unlink()
    return lost


def start_on_a_small_disk(nodes: Lives, name: str, full_from: int) -> str:
    """A node whose disk is full from a step on and has room again when the node has ended; gives the kind of disk."""
    probe = forked(_mount_a_small_disk, nodes.folder / "probe.log")
    if ended(probe, 10) == 0:
        nodes.adopt(name, forked(lambda: _on_a_small_disk(nodes, name, full_from), nodes.folder / f"{name}.log"))
        return "tmpfs"
    limit = (_LARGEST_FILE, resource.RLIM_INFINITY)
    nodes.before_start = lambda who: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    nodes.start(name)
    nodes.before_start = lambda who: None
    return "file-size limit"


def own_mounts() -> None:
    """Gives this process name spaces of its own for mounts, which need no privilege."""
    library = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if library.unshare(_NEW_USER | _NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _mount_a_small_disk(at: Path = Path("/mnt")) -> None:
    own_mounts()
    library = ctypes.CDLL(None, use_errno=True)
    if library.mount(b"tmpfs", os.fsencode(at), b"tmpfs", 0, f"size={_DISK}".encode()):
        raise OSError(ctypes.get_errno(), "mount")


def _on_a_small_disk(nodes: Lives, name: str, full_from: int) -> None:
    """Runs the node on the small disk, then copies its state to where there is room, and exits as the node did."""
    state, saved = nodes.folder / name / "state", nodes.folder / name / "saved"
    state.mkdir()
    _mount_a_small_disk(state)
    node = nodes.start(name)
    while nodes.step(name) < full_from:
        time.sleep(0.005)
    ballast = state / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            print("no room any more:", error.strerror, flush=True)
    code = ended(node, 60)
    ballast.unlink()
    shutil.copytree(state, saved)
    if ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(state), 2):
        raise OSError(ctypes.get_errno(), "umount")
    state.rmdir()
    saved.rename(state)
    os._exit(200 if code is None else code % 256)


def last_words(nodes: Lives, name: str) -> str:
    """Returns the reason that a node gave when it stopped; its disk may have had no room for the log."""
    lines = (nodes.folder / f"{name}.log").read_text().splitlines()
    told = [json.loads(line) for line in lines if line.startswith("{")]
    return next((line["reason"] for line in reversed(told) if line["what"] == "stopped"), "")
