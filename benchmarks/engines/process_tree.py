"""Runs a command and measures what it and everything that it starts take: processor time, and bytes over the loopback
interface of a network of its own.

    python -m benchmarks.engines.process_tree LOG SECONDS COMMAND ...

prints one line of JSON. Processes that lose their parent become children of this one (Linux), so that daemons of an
engine are counted, waited for, and ended with it. Each process is looked at while it lives: what the system adds up for
parents lacks the children of those that ignore their signals, which was half of the time of Flower's engine.
"""

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_SUBREAPER = 36  # of prctl
_NEW_NETWORK = 0x40000000  # of unshare
_SET_FLAGS, _UP = 0x8914, 0x1
_LOOK_S = 0.1
_GRACE_S = 15.0  # for what the command leaves behind


def main() -> None:
    log, seconds, command = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this needs Linux: prctl")
    own_network = _own_network(libc)
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    used: dict[tuple[int, int], float] = {}
    code = _awaited(process.pid, time.monotonic() + seconds, used)
    network = _loopback_bytes() if own_network else None
    print(json.dumps({"code": code, "cpu_s": sum(used.values()), "network_bytes": network}))


def _own_network(libc: ctypes.CDLL) -> bool:
    """Moves this process to a network that has a loopback interface only. Returns whether that is allowed."""
    if libc.unshare(_NEW_NETWORK):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))
    return True


def _loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def _awaited(process: int, until: float, used: dict[tuple[int, int], float]) -> int | None:
    """Waits for a child and for all that it leaves behind. Returns its exit code; None if it took too long.

    Args:
        process: The child.
        until: When to end all, by time.monotonic().
        used: Gets the processor seconds of each process, by its number and the time of its start.
    """
    code: int | None = None
    while True:
        tree = descendants(os.getpid())
        used |= {(one.number, one.started): one.cpu_s for one in tree}
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if ended == process:
            code, until = os.waitstatus_to_exitcode(status), time.monotonic() + _GRACE_S
        elif not ended:
            if time.monotonic() > until:
                for one in tree:
                    with suppress(ProcessLookupError):
                        os.kill(one.number, signal.SIGKILL)
            time.sleep(_LOOK_S)


class Process(NamedTuple):
    """A process, its processor seconds so far, and the time of its start, in ticks."""

    number: int
    cpu_s: float
    started: int


def descendants(root: int) -> list[Process]:
    """Returns all processes below one."""
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                children.setdefault(int(fields[1]), []).append(Process(int(entry.name), cpu_s, int(fields[19])))
    found, waiting = list[Process](), [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [one.number for one in below]
    return found


if __name__ == "__main__":
    main()
