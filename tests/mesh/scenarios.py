"""Meshes of real nodes for scenarios, each played in a process of its own, since nodes are forked from it."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fairmesh.mesh.node import ledger, running
from tests.mesh import fleet
from tests.mesh.experiments import BY_CLASS, STEADY_AD_GDA, experiment

ROOT = Path(__file__).parents[2]
NAMES = ["a", "b", "c", "d", "e"]
OPTIONS = {"measure_every": 16, "checkpoint_every": 5, "dtype": "float64"}
CIRCULANT = {"name": "circulant", "offsets": [1, 2]}
EXPERIMENT = experiment(48, 5, STEADY_AD_GDA, CIRCULANT, BY_CLASS, options=OPTIONS)

_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


class Run:
    """A mesh of real nodes, five unless others are named. Those that still run are killed when its `with` ends."""

    def __init__(
        self,
        folder: Path,
        names: list[str] = NAMES,
        experiment: str = EXPERIMENT,
        listening: Sequence[str] | None = None,  # the sites with an address; all if None
    ):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "experiment.toml").write_text(experiment)
        self.mesh = fleet.provisioned(folder, folder / "experiment.toml", names, listening)
        self.running: dict[str, int] = {}

    def start(self, *names: str, before: Callable[[], None] = lambda: None, **options) -> None:
        """Starts nodes; `before` runs in their processes first and may make them lie."""
        for name in names:

            def work(name: str = name) -> None:
                import torch

                torch.set_num_threads(1)
                before()
                running.run_node(self.folder / name / "site.toml", stream=sys.stderr, **options)

            self.running[name] = fleet.forked(work, self.folder / f"{name}.log")

    def every_event(self, name: str) -> list[dict]:
        path = self.folder / name / "state" / "log.jsonl"
        return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []

    def events(self, name: str, what: str) -> list[dict]:
        return [event for event in self.every_event(name) if event["what"] == what]

    def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(f"--- {n}\n{(self.folder / f'{n}.log').read_text()[-3000:]}" for n in self.running)

    def status(self, name: str) -> dict:
        try:
            return json.loads((self.folder / name / "state" / "status.json").read_text())
        except (OSError, ValueError):
            return {"round": 0, "votes": {}}

    def round(self, name: str) -> int:
        return self.status(name)["round"]

    def vote(
        self, *names: str, out: Sequence[str] = (), back_to: int | None = None, restored: Sequence[str] = ()
    ) -> None:
        for name in names:
            state = self.folder / name / "state"
            present = ledger.still_in(state, self.mesh, is_lost=name in restored)
            ledger.wish(state, present, name, out, back_to, restored)

    def live(self, **options) -> None:
        """Starts all nodes, and waits until they have ended with the same model."""
        names = self.mesh.names
        self.start(*names, **options)
        self.end(*names)

    def end(self, *names: str) -> bytes:
        """Waits until nodes have ended, and returns their model, which must be the same."""
        for name in names:
            assert self._ended(name, 90) == 0, self.logs()
        models = {(self.folder / name / "state" / "result" / "model.safetensors").read_bytes() for name in names}
        assert len(models) == 1
        return models.pop()

    def _ended(self, name: str, seconds: float) -> int | None:
        code = fleet.ended(self.running[name], seconds)
        if code is not None:
            del self.running[name]
        return code

    def stops(self, name: str, why: str) -> None:
        """Waits until a node has ended with an error that says why."""
        assert self._ended(name, 60) == 1, self.logs()
        assert why in self.events(name, "stopped")[-1]["reason"]

    def ended(self, name: str) -> None:
        """Waits until a node has ended, whether with an error or not."""
        assert self._ended(name, 90) is not None, self.logs()

    def reaped(self, *names: str, only_see: bool = False) -> list[str]:
        """Returns which nodes have ended of those that were running, and takes note of it unless it should only see."""
        ended = [one for one in names if one in self.running and os.waitid(os.P_PID, self.running[one], _ENDED)]
        for name in () if only_see else ended:
            self._ended(name, 5)
        return ended

    def dies(self, name: str) -> None:
        """Waits until a node has killed itself."""
        assert self._ended(name, 60) == -9, self.logs()

    def is_told_to_restore(self, name: str) -> None:
        """Waits until a node says what its neighbours say, that its state is lost, and what to do; then kills it."""
        self.until(lambda: self.events(name, "a claim about this site"))
        assert "fairmesh mesh restore" in self.events(name, "a claim about this site")[0]["reason"]
        self.crash(name)

    def crash(self, name: str) -> None:
        os.kill(self.running[name], 9)
        os.waitpid(self.running.pop(name), 0)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        for process in self.running.values():
            os.kill(process, 9)
            os.waitpid(process, 0)


def waits_at(step: int, flag: Path) -> Callable[[str, int], None]:
    """A node that pauses in the middle of the run until a file exists."""

    def observe(point: str, at: int) -> None:
        while point == "computed" and at == step and not flag.exists():
            time.sleep(0.02)

    return observe


def played(module: str, *arguments: str, seconds: float = 300) -> None:
    """Runs a test module as a program, which plays a scenario, and shows what it says if it fails."""
    command = [sys.executable, "-m", module, *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        _, said = process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nodes that a failed scenario has left
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said if len(said) < 8000 else f"{said[:3000]}\n...\n{said[-5000:]}"


def play(
    scenario: Callable[[Run], None],
    folder: Path,
    names: Sequence[str] = NAMES,
    experiment: str = EXPERIMENT,
    files: Mapping[str, str] | None = None,
) -> None:
    """Plays a function of a test module with a mesh made for it, next to whose experiment some files are written."""
    folder.mkdir(exist_ok=True)
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    words = (scenario.__module__, scenario.__name__, str(folder), " ".join(names), experiment)
    played("tests.mesh.scenarios", *words)


if __name__ == "__main__":
    module, function, place, sites, text = sys.argv[1:]
    getattr(importlib.import_module(module), function)(Run(Path(place), sites.split(), text))
