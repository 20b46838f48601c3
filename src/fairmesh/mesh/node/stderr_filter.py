"""Parts what a process says on standard error: lines of gRPC to one pipe, all others where they would have gone.

Run as a program of its own, `python sieve.py PIPE`, so that the last words of a node that crashes are passed on too. It
ends when the node has, however that came; a request to stop is for the node.
"""

import contextlib
import os
import re
import signal
import sys

OF_GRPC = re.compile(
    rb"[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]+\.cc:\d+\] |WARNING: All log messages before absl::"
)
_AT_ONCE = 1 << 16


def sift(source: int, pipe: int, others: int) -> None:
    """Until the source ends. A line that the pipe has no room for is dropped, one that has no reader passed on."""
    os.set_blocking(pipe, False)
    rest = b""
    while data := os.read(source, _AT_ONCE):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _AT_ONCE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            _pass_on(line + b"\n", pipe, others)
    if rest:
        _pass_on(rest, pipe, others)


def _pass_on(line: bytes, pipe: int, others: int) -> None:
    if OF_GRPC.match(line):
        with contextlib.suppress(BrokenPipeError):
            with contextlib.suppress(BlockingIOError):
                os.write(pipe, line)
            return
    with contextlib.suppress(OSError):  # closed, or on a full disk: there is nobody to tell
        while line:
            line = line[os.write(others, line) :]


if __name__ == "__main__":
    for asked in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(asked, signal.SIG_IGN)
    sift(0, int(sys.argv[1]), 2)
