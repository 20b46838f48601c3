"""Runs over processes, made once for all tests: a process costs seconds before it does anything."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from safetensors import safe_open

from fairmesh.storage.run_folder import CHECKPOINT, METRICS
from tests.cluster.runs import CASES, DAMAGED, PART, ROOT, ROUNDS, TOY, on_ranks, trained


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that one of pytest's processes fills while the others wait."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / name
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def ranks_of(launcher: int) -> list[int]:
    """The processes that the launcher's torchrun started."""
    return [rank for agent in children(launcher) for rank in children(agent)]


def until(true: Callable[[], object], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def launched(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "fairmesh", "launch", str(folder / "toy.toml"), "--processes", "2"]
    command += ["--out", str(folder / "run"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=environment)


def told(process: subprocess.Popen) -> dict[str, int | str]:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.terminate()
    return {"code": process.returncode, "out": out, "err": err}


def _rounds_of_checkpoints(folder: Path) -> dict[str, int]:
    rounds = {}
    for path in folder.glob("checkpoint*"):
        with safe_open(path, framework="pt") as file:
            rounds[path.name] = int(file.metadata()["round"])
    return rounds


def _stop(folder: Path, kill: bool) -> None:
    """A launched run of which one rank may be killed, and then all are asked to stop."""
    (folder / "toy.toml").write_text(TOY)
    metrics = folder / "run" / METRICS

    def round_reached() -> int:
        lines = metrics.read_text().splitlines()[:-1] if metrics.exists() else []
        return json.loads(lines[-1])["round"] if lines else 0

    process = launched(folder)
    try:
        until(lambda: round_reached() >= 60, process)
        if kill:
            ranks, killed_at = ranks_of(process.pid), round_reached()
            assert len(ranks) == 2
            os.kill(random.choice(ranks), signal.SIGKILL)
            until(lambda: len(after := ranks_of(process.pid)) == 2 and not set(after) & set(ranks), process)
            until(lambda: round_reached() > killed_at + 30, process)
    finally:
        process.send_signal(signal.SIGINT)
    stopped = told(process)
    rounds = _rounds_of_checkpoints(folder / "run")
    (folder / "stopped.json").write_text(json.dumps(stopped | {"rounds": rounds}))


def _survive(folder: Path) -> None:
    """A launched run of which one rank is killed, then all are asked to stop, and which is then resumed."""
    _stop(folder, kill=True)
    more = _rounds_of_checkpoints(folder / "run")[CHECKPOINT] + 7
    (folder / "rounds").write_text(str(more))
    resumed = told(launched(folder, "--resume", "--json", "--set", f"rounds={more}"))
    (folder / "resumed.json").write_text(json.dumps(resumed))


def _begin(folder: Path, ranks: int, cases: Iterable[str]) -> None:
    """Runs on ranks; what they began, for others to go on with; and damaged copies of it."""
    for case in cases:
        trained(case, folder / f"{case} simulated", rounds=PART)
    on_ranks("first", folder, ranks, cases)
    for case in cases:
        shutil.copytree(folder / f"{case} begun", folder / f"{case} alone")
    for what in DAMAGED:
        shutil.copytree(folder / "ad-gda begun", folder / what)
    shard = f"checkpoint-{PART}-{ranks - 1}.safetensors"
    (folder / "cut short" / shard).write_bytes((folder / "cut short" / shard).read_bytes()[:-9])
    (folder / "missing" / shard).unlink()
    shutil.copy(
        folder / "ad-gda on ranks" / f"checkpoint-{ROUNDS}-{ranks - 1}.safetensors", folder / "of another round" / shard
    )


def _go_on(folder: Path, disturbed: Path) -> None:
    """Two ranks go on with what three had begun."""
    _begin(folder, 3, CASES)
    for name in ("toy.toml", "rounds"):
        shutil.copy(disturbed / name, folder)
    on_ranks("second", folder, 2, CASES)


@pytest.fixture(scope="session")
def survived(tmp_path_factory):
    return once(tmp_path_factory, "survived", _survive)


@pytest.fixture(scope="session")
def stopped(request, tmp_path_factory):
    """What a launched run said when it was stopped: "undisturbed" until then, or after one rank was "killed"."""
    if request.param == "killed":
        folder = request.getfixturevalue("survived")
    else:
        folder = once(tmp_path_factory, "stopped", lambda folder: _stop(folder, kill=False))
    return json.loads((folder / "stopped.json").read_text())


@pytest.fixture(scope="session")
def clustered(request, tmp_path_factory):
    """The folder of runs over three ranks, of every case; or of those over two, of one case."""
    if getattr(request, "param", 3) == 2:
        return once(tmp_path_factory, "two ranks", lambda folder: _begin(folder, 2, ["ad-gda"]))
    survived = request.getfixturevalue("survived")
    return once(tmp_path_factory, "three ranks", lambda folder: _go_on(folder, survived))
