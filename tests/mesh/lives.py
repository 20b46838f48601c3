"""The nodes of a mesh as processes that are killed and started again, and how long each takes to be back."""

import json
import mmap
import os
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.mesh.fleet import SITE, forked

MODELS = ("model.safetensors", "model-time-average.safetensors", "model-best.safetensors")
RESULTS = (*MODELS, "summary.json", "metrics.jsonl")
_STEP = struct.Struct("<q")


class Point(NamedTuple):
    """Where a node kills itself: the first time it comes by at or after a step."""

    name: str
    step: int


class Recovery(NamedTuple):
    site: str
    step: int  # the last one begun before it died
    seconds: float  # from its start to the first step after that


class Board:
    """The last step that each node has begun, seen by all processes."""

    def __init__(self, count: int):
        self._memory = mmap.mmap(-1, count * _STEP.size)
        for k in range(count):
            self.write(k, -1)

    def write(self, k: int, step: int) -> None:
        _STEP.pack_into(self._memory, k * _STEP.size, step)

    def read(self, k: int) -> int:
        return _STEP.unpack_from(self._memory, k * _STEP.size)[0]


class Lives:
    """All nodes of one run. Whoever waits here also starts again those that died."""

    def __init__(self, folder: Path, names: list[str], points: dict[str, list[Point]] | None = None):
        self.folder, self.names = folder, names
        self._points = {name: list(points.get(name, ())) if points else [] for name in names}
        self._board = Board(len(names))
        self._processes: dict[str, int] = {}
        self._due: dict[str, float] = {}  # when to start again
        self._mending: dict[str, tuple[float, int]] = {}  # since when, and beyond which step it is back
        self._pauses: dict[str, float] = {}
        self.before_start: Callable[[str], None] = lambda name: None  # in the node's own process
        self.while_down: Callable[[str], None] = lambda name: None
        self.kills: list[tuple[str, int]] = []
        self.reached: list[tuple[str, str, int]] = []  # site, point and step of those that killed themselves
        self.recoveries: list[Recovery] = []
        self.exits: dict[str, int] = {}  # of those that ended by themselves
        self.awaited: set[str] = set()  # may end with an error

    def step(self, name: str) -> int:
        return self._board.read(self.names.index(name))

    def log_of(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name / "state" / "log.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def start(self, name: str) -> int:
        place, board, points = self.names.index(name), self._board, self._points[name]
        point = points[0] if points else None

        def observe(what: str, step: int) -> None:
            if what == "computed":
                board.write(place, step)
            if what == "after checkpoint":  # the most there is between two
                with open(self.folder / f"{name}.sizes", "a") as file:
                    file.write(f"{self._disk_bytes(name)}\n")
            if point and what == point.name and max(step, board.read(place)) >= point.step:
                os.kill(os.getpid(), signal.SIGKILL)

        def work() -> None:
            import torch

            torch.set_num_threads(1)
            from fairmesh.mesh.node.running import run_node

            self.before_start(name)
            run_node(self.folder / name / SITE, stream=sys.stderr, observe=observe)

        self._processes[name] = forked(work, self.folder / f"{name}.log")
        return self._processes[name]

    def adopt(self, name: str, process: int) -> None:
        """Takes over a process that was started elsewhere as the node's process."""
        self._processes[name] = process

    def start_all(self) -> None:
        """Starts the nodes that have not been started yet."""
        for name in self.names:
            if name not in self._processes and name not in self._due and name not in self.exits:
                self.start(name)

    def kill(self, name: str, pause: float = 0.0) -> None:
        """Kills a node with SIGKILL as soon as it runs; it is started again after a pause."""
        self.wait(lambda: name in self._processes, 60)
        self._pauses[name] = pause
        os.kill(self._processes[name], signal.SIGKILL)
        self.kills.append((name, self.step(name)))

    def ask_to_stop(self, name: str) -> None:
        os.kill(self._processes[name], signal.SIGTERM)

    def wait(self, until: Callable[[], bool], seconds: float) -> None:
        """Waits until something holds; raises with the nodes' output if that takes too long."""
        end = time.monotonic() + seconds
        while not until():
            self._look()
            if time.monotonic() > end:
                steps = {name: self.step(name) for name in self.names}
                raise TimeoutError(f"after {seconds:.0f} s nodes are in steps {steps}\n{self.tails()}")
            time.sleep(0.004)

    def tails(self) -> str:
        logs = [(name, self.folder / f"{name}.log") for name in self.names]
        return "\n".join(f"--- {name}\n{path.read_text()[-1500:]}" for name, path in logs if path.exists())

    def _look(self) -> None:
        now = time.monotonic()
        for name, process in list(self._processes.items()):
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                del self._processes[name]
                self._ended(name, os.waitstatus_to_exitcode(status), now)
        for name, due in list(self._due.items()):
            if now >= due:
                del self._due[name]
                self.while_down(name)
                self._mending[name] = time.monotonic(), self.step(name)
                self.start(name)
        for name, (since, step) in list(self._mending.items()):
            if self.step(name) > step:
                del self._mending[name]
                self.recoveries.append(Recovery(name, step, round(now - since, 3)))

    def _ended(self, name: str, code: int, now: float) -> None:
        self._mending.pop(name, None)
        if code == -signal.SIGKILL:
            if name not in self._pauses:
                point = self._points[name].pop(0)
                self.reached.append((name, point.name, self.step(name)))
            self._due[name] = now + self._pauses.pop(name, 0.0)
            return
        self.exits[name] = code
        if code and name not in self.awaited:
            raise RuntimeError(f"the node of {name} ended with code {code}\n{self.tails()}")

    def start_again(self, name: str) -> None:
        """Starts a node again that ended by itself."""
        del self.exits[name]
        self.awaited.discard(name)
        self._due[name] = 0.0

    def finish(self, seconds: float) -> None:
        self.wait(lambda: not self._due and all(self.exits.get(name) == 0 for name in self.names), seconds)
        unreached = {name: points for name, points in self._points.items() if points}
        if unreached:
            raise RuntimeError(f"never came by {unreached}; reached {self.reached}")

    def end(self) -> None:
        """Ends all processes."""
        for process in self._processes.values():
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        self._processes.clear()

    def __enter__(self) -> "Lives":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def results(self) -> dict[str, bytes]:
        """Returns the result of every site; raises if sites differ."""
        found = {}
        for name in self.names:
            folder = self.folder / name / "state" / "result"
            mine = {file: (folder / file).read_bytes() for file in RESULTS}
            found = found or mine
            unlike = [file for file in RESULTS if mine[file] != found[file]]
            if unlike:
                raise RuntimeError(f"{name} ends with another {' and '.join(unlike)} than {self.names[0]}")
        return found

    def _disk_bytes(self, name: str) -> int:
        return sum(path.stat().st_size for path in (self.folder / name / "state").glob("generation-*/*"))

    def sizes(self, name: str) -> list[int]:
        """Bytes of the checkpoints and the journal after each checkpoint."""
        return [int(line) for line in (self.folder / f"{name}.sizes").read_text().splitlines()]

    def newest_checkpoint(self, name: str) -> Path:
        return max((self.folder / name / "state").glob("generation-*/checkpoint-*.safetensors"))


def fresh(provisioned: Path, folder: Path) -> Path:
    """Copies a provisioned mesh into a new folder."""
    shutil.copytree(provisioned, folder)
    return folder
