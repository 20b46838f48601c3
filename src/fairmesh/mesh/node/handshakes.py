"""Whom gRPC turned away before this program ever saw them: its lines on standard error, as events of the node's log."""

import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fairmesh.mesh.wire.log_limiter import Sparing
from fairmesh.mesh.wire.tls_errors import in_words

_HEAD = re.compile(r"(?P<level>[IWE])\d{4} \S+ +\d+ [^\]]*\] (?P<text>.*)")
_FAILED = re.compile(r"Handshake failed with error (?P<cause>.*)")
_TELL_AFTER_S = 5.0


def told(line: str, sparing: Sparing) -> None:
    """One line of gRPC as an event."""
    found = _HEAD.match(line)
    if not found:
        return
    failed = _FAILED.match(found["text"])
    if failed:
        sparing("warning", "refused", reason=in_words(failed["cause"]))
    elif found["level"] != "I":
        sparing("warning", "gRPC says", reason=found["text"])


class Sifted:
    """The lines of gRPC, kept in a pipe until somebody listens."""

    def __init__(self, pipe: int):
        self._pipe, self._listener = pipe, None

    def listen(self, report: Callable[..., None]) -> None:
        """Reports every line from now on, and those that wait."""
        self._listener = threading.Thread(target=self._tell, args=(Sparing(report),), name="handshakes", daemon=True)
        self._listener.start()

    def _tell(self, sparing: Sparing) -> None:
        rest, waiting = b"", select.poll()
        waiting.register(self._pipe)
        while True:
            if not waiting.poll(1000 * _TELL_AFTER_S):
                sparing.flush()
                continue
            data = os.read(self._pipe, 1 << 16)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                told(line.decode(errors="replace"), sparing)
            if not data:
                sparing.close()
                return

    def close(self) -> None:
        """After the writer has gone."""
        if self._listener:
            self._listener.join(_TELL_AFTER_S)
        if not (self._listener and self._listener.is_alive()):
            os.close(self._pipe)


@contextmanager
def sifted() -> Iterator[Sifted]:
    """Standard error without gRPC's lines, which are the node's to tell. Python's own words go where they went, not
    through the sieve."""
    real, python = _real_stderr(), sys.stderr
    lines, of_grpc = os.pipe()
    sieve = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("stderr_filter.py")), str(of_grpc)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=real,
        pass_fds=[of_grpc],
        bufsize=0,
    )
    os.close(of_grpc)
    entrance, found = sieve.stdin, Sifted(lines)
    if entrance is None:
        raise RuntimeError("the sieve has no entrance")
    if _writes_to(python, 2):
        sys.stderr = open(real, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.dup2(entrance.fileno(), 2)
    entrance.close()
    try:
        yield found
    finally:
        sys.stderr.flush()
        os.dup2(real, 2)  # the sieve's source ends here
        sys.stderr = python
        with suppress(subprocess.TimeoutExpired):  # a process that the user's code started may still write to it
            sieve.wait(_TELL_AFTER_S)
        found.close()
        os.close(real)


def _writes_to(stream: Any, number: int) -> bool:
    try:
        return stream is None or stream.fileno() == number
    except (OSError, ValueError):
        return False


def _real_stderr() -> int:
    """A copy of standard error, or of nowhere where it is closed."""
    try:
        return os.dup(2)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != 2:
            os.dup2(nowhere, 2)
            os.close(nowhere)
        return os.dup(2)
