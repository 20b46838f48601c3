"""What a site has spent of its privacy, in a file next to its secret: every run and every release, written before
anything of it is sent.

The file only grows. A release is known by its run, generation, round, call and a digest of the model at which it was
made. One that a restart repeats is written once, as it has the same noise. One at another model is another release.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.privacy.accounting import Releases
from fairmesh.storage.files import open_to_others

TRAIN, TEST = "train", "test"  # whose units a plan is about
_CHAIN = 16  # hexadecimal digits of the running digest in each line
_LOCKED_S = 5.0  # wait for a node that was killed to let go of the file
_BACKUP = "put it back from a backup: without it, nobody knows what this site has spent"


class PrivacyLedger:
    """The plans of a site, and how many releases each has made. It is locked while a node has it.

    Args:
        path: The file.
        to_write: Whether releases are added, so that nobody else may. If not, a file that is missing is empty. Default:
            True.
    """

    def __init__(self, path: Path, to_write: bool = True):
        self.path, self._open = path, ExitStack()
        self.plans: list[tuple[dict[str, Any], Releases]] = []  # what each is of, and what it may release
        self._made: list[set[tuple[int, int, str]]] = []  # by plan: round, call, and digest of the model
        self._assumed: list[int] = []  # by plan: releases that were made, though the file does not have them
        self._chains: list[str] = []
        try:
            if to_write:
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
                self._open.callback(os.close, self._file)
                self._lock()
                if open_to_others(path):
                    path.chmod(0o600)
            content = path.read_bytes() if to_write or path.exists() else b""
        except OSError as error:
            raise BadInput(f"cannot use the privacy ledger {path}: {error.strerror or error}") from error
        lines = content.rstrip().splitlines()
        cut = -1 if content.endswith(b"\n") else len(lines) - 1  # perhaps, by a crash before anything of it was sent
        whole = [line for number, line in enumerate(lines) if self._read(number, line, number == cut)]
        self._size = sum(len(line) + 1 for line in whole)
        if to_write:
            self._settle(content, b"".join(line + b"\n" for line in whole))

    def _lock(self) -> None:
        until = time.monotonic() + _LOCKED_S
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    raise BadInput(
                        f"another run uses the privacy ledger {self.path}; wait until it has ended, since what both "
                        "spend adds up"
                    ) from error
                time.sleep(0.05)

    def _settle(self, content: bytes, whole: bytes) -> None:
        """Lets the file end with the line break of its last whole line."""
        if content != whole:
            os.ftruncate(self._file, max(0, len(whole) - 1))
            os.write(self._file, whole[-1:])
            os.fdatasync(self._file)

    def _read(self, number: int, line: bytes, may_be_cut: bool) -> bool:
        """Takes a line. Returns whether it is whole."""
        try:
            entry = json.loads(line)
            chain = entry.pop("chain")
            if chain != self._next_chain(entry):
                raise ValueError("its digest differs")
            self._take(entry)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            if may_be_cut:
                return False
            what = f"line {number + 1} of the privacy ledger {self.path} is damaged ({error})"
            raise BadInput(f"{what}; {_BACKUP}") from error
        self._chains.append(chain)
        return True

    def _take(self, entry: Mapping[str, Any]) -> None:
        if "releases" in entry:
            self.plans.append((dict(entry["of"]), Releases(**entry["releases"])))
            self._made.append(set())
            self._assumed.append(0)
        elif "assumed" in entry:
            self._assumed[entry["plan"]] += int(entry["assumed"])
        else:
            done, call, model = entry["release"]
            self._made[entry["plan"]].add((int(done), int(call), str(model)))

    def _next_chain(self, entry: Mapping[str, Any]) -> str:
        before = self._chains[-1] if self._chains else ""
        return hashlib.sha256((before + json.dumps(entry)).encode()).hexdigest()[:_CHAIN]

    def _write(self, entry: Mapping[str, Any]) -> None:
        """Adds a line, and waits until it is on the disk."""
        self._refuse_replaced()
        chain = self._next_chain(entry)
        line = json.dumps({**entry, "chain": chain}).encode() + b"\n"
        try:
            if os.write(self._file, line) < len(line):  # as much as a full disk takes
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fdatasync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise BadInput(f"cannot write the privacy ledger {self.path}: {error.strerror or error}") from error
        self._size += len(line)
        self._chains.append(chain)
        self._take(entry)

    def _refuse_replaced(self) -> None:
        """Refuses to go on with a file that was replaced, or that somebody else has changed: what is written into it
        would be lost."""
        ours = os.fstat(self._file)
        with suppress(OSError):
            now = os.stat(self.path)
            if (now.st_dev, now.st_ino, now.st_size) == (ours.st_dev, ours.st_ino, self._size):
                return
        raise BadInput(
            f"the privacy ledger {self.path} was moved, replaced or changed while this run uses it; put its newest "
            "copy back, the one with the most lines, and start the node again"
        )

    def close(self) -> None:
        """Lets go of the file."""
        self._open.close()

    @property
    def head(self) -> dict[str, Any]:
        """Returns how many lines there are, and the digest of the last, by which an older file is found out."""
        return {"lines": len(self._chains), "chain": self._chains[-1] if self._chains else ""}

    def has(self, head: Mapping[str, Any]) -> bool:
        """Returns whether the file has all lines that it had when this was its head."""
        lines = int(head.get("lines", 0))
        return lines == 0 or (lines <= len(self._chains) and self._chains[lines - 1] == head.get("chain"))

    def of_run(self, run: str) -> list[int]:
        """Returns the plans for training units of a run, in the order of its generations."""
        return [k for k, (of, _) in enumerate(self.plans) if of["run"] == run and of["units"] == TRAIN]

    def plan(self, of: Mapping[str, Any]) -> int | None:
        """Returns the plan of a run and a generation for some units, if there is one."""
        return next((k for k, (known, _) in enumerate(self.plans) if of.items() <= known.items()), None)

    def last_round(self, plan: int) -> int:
        """Returns the last round with a release of a plan, -1 if there is none."""
        return max((done for done, _, _ in self._made[plan]), default=-1)

    def add_plan(self, of: Mapping[str, Any], releases: Releases) -> int:
        """Writes what a generation of a run may release, and returns its number."""
        self._write({"of": dict(of), "releases": releases.table()})
        return len(self.plans) - 1

    def assume(self, plan: int, count: int) -> None:
        """Writes releases that were made, though the file does not have them."""
        self._write({"plan": plan, "assumed": count})

    def charge(self, plan: int, done: int, call: int, model: str, most: float = math.inf) -> bool:
        """Writes a release, unless it is there already. Returns whether it may be made: not if the plan's are used up,
        or `most` of them."""
        release = (done, call, model)
        if release in self._made[plan]:
            return True
        if self.made(plan) >= min(most, self.plans[plan][1].times):
            return False
        self._write({"plan": plan, "release": list(release)})
        return True

    def made(self, plan: int) -> int:
        """Returns how many releases of a plan were made."""
        return len(self._made[plan]) + self._assumed[plan]

    def spent(self, units: str = TRAIN, but: int | None = None) -> list[Releases]:
        """Returns all releases about the training units, or about the test units: of all runs, since these add up; of
        all plans `but` one."""
        return [
            releases._replace(times=self.made(k))
            for k, (of, releases) in enumerate(self.plans)
            if of["units"] == units and self.made(k) and k != but
        ]
