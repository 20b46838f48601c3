"""`python -m benchmarks engines`: what a round of one job costs on several engines, and how well it learns.

The job: digits at ten sites, two of which have another instrument; logistic regression with 650 parameters; batches of
50; 200 rounds. Each engine runs it with few and with many rounds, and the difference in processor time of all its
processes, divided by the difference in rounds, is what a warm round takes.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import NODES
from fairmesh.data.datasets.digits import Digits
from fairmesh.errors import BadInput, FairmeshError

RESULTS = Path(__file__).parents[1] / "results" / "engines-cpu.json"
ROUNDS = 200  # after which accuracies are compared
BATCH = 50
STEP = 2.0  # of 0.05 to 4, the one with which DSGD is best at the worst site
_ROOT = Path(__file__).parents[2]
PAGE = _ROOT / "docs" / "results" / "performance.md"
_MARKS = "<!-- engines -->\n", "<!-- /engines -->\n"  # around the table on that page
_SECONDS = 600.0  # for one run
_ATTEMPTS = 3  # on a busy machine, simulators of other engines sometimes wait for a client without an end
_ALGORITHMS = {"dsgd": {"primal_step": {"name": "constant", "value": STEP}}, "tracked-ad-gda": {}}


@dataclass(frozen=True)
class Engine:
    """A way to run the job.

    Args:
        program: In `runners`.
        rounds: Few and many rounds; one of them is `ROUNDS`.
        graph: "ring" or "star".
        algorithm: Of fairmesh, or what the engine calls its own.
        needs: Packages that must be there.
        peer: Whose interpreter runs it: "nvflare", "flower", or "" for this one.
    """

    program: str
    rounds: tuple[int, int]
    graph: str
    algorithm: str
    needs: tuple[str, ...] = ()
    peer: str = ""


ENGINES = {
    "plain loop": Engine("plain_loop", (ROUNDS, 2200), "ring", "DSGD"),
    "fairmesh, simulator, DSGD": Engine("simulator", (ROUNDS, 4200), "ring", "dsgd"),
    "fairmesh, simulator": Engine("simulator", (ROUNDS, 4200), "ring", "tracked-ad-gda"),
    "fairmesh, mesh": Engine("mesh", (ROUNDS, 1200), "ring", "tracked-ad-gda"),
    "fairmesh in NVFlare": Engine("in_nvflare", (50, ROUNDS), "ring", "tracked-ad-gda", ("nvflare",)),
    "NVFlare, peer-to-peer": Engine("nvflare_p2p", (50, ROUNDS), "ring", "DGDExecutor", ("nvflare",), "nvflare"),
    "NVFlare, FedAvg": Engine("nvflare_fedavg", (50, ROUNDS), "star", "FedAvg", ("nvflare",), "nvflare"),
    "Flower, FedAvg": Engine("flower_fedavg", (ROUNDS, 600), "star", "FedAvg", ("flwr", "ray"), "flower"),
}
INSTALL = {"nvflare": "pip install 'nvflare>=2.9,<2.10'", "flwr": "pip install 'flwr[simulation]>=1.21' torch"}
INSTALL["ray"] = INSTALL["flwr"]


@dataclass(frozen=True)
class Cost:
    """What a round of the job costs on an engine.

    Args:
        engine: Its name in `ENGINES`.
        graph: Who sends to whom.
        algorithm: What it runs.
        cpu_ms: Processor milliseconds of all processes per round of all nodes; the median over repetitions.
        cpu_ms_low: The least,
        cpu_ms_high: and the most of them.
        message_bytes: Of the models, as encoded, that a node sends in a round.
        network_bytes: All that goes over the loopback interface in a round, per node, with answers, relays and headers
            of TCP. None if the engine uses no network, or if the machine does not let a benchmark count it.
        worst: The accuracy after `ROUNDS` rounds at the site where it is least; the median over repetitions.
        mean: That over sites.
    """

    engine: str
    graph: str
    algorithm: str
    cpu_ms: float
    cpu_ms_low: float
    cpu_ms_high: float
    message_bytes: float
    network_bytes: float | None
    worst: float
    mean: float


@dataclass(frozen=True)
class Skipped:
    """An engine that was not run.

    Args:
        engine: Its name in `ENGINES`.
        reason: What is missing.
        install: The command that installs it.
    """

    engine: str
    reason: str
    install: str


def costs(names: Sequence[str], interpreters: Mapping[str, str], repeats: int) -> Iterator[Cost | Skipped]:
    """Yields the cost of each engine, or why it was skipped.

    Args:
        names: Of engines; all if there are none.
        interpreters: The Python of each peer, such as {"flower": "/venv/bin/python"}.
        repeats: How often to measure each.
    """
    for name in names or ENGINES:
        if name not in ENGINES:
            raise BadInput(f"there is no engine {name!r}; choose from {', '.join(ENGINES)}")
    for name in names or ENGINES:
        engine = ENGINES[name]
        python = interpreters.get(engine.peer, "") or sys.executable
        missing = next((package for package in engine.needs if not has(python, package)), None)
        if missing:
            where = "" if python == sys.executable else f" of {python}"
            yield Skipped(name, f"{missing} is not installed in the environment{where}", INSTALL[missing])
        else:
            yield cost_of(name, engine, [pair_of(engine, python) for _ in range(repeats)])


def has(python: str, package: str) -> bool:
    """Returns whether an interpreter finds a package."""
    script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", script], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise BadInput(f"{python} is no Python interpreter: {error.strerror or error}") from error


def pair_of(engine: Engine, python: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs the job with few and with many rounds. Returns both outcomes."""
    few, many = (_run(engine, python, rounds) for rounds in engine.rounds)
    return few, many


def cost_of(name: str, engine: Engine, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Cost:
    """Returns the cost of a round from pairs of outcomes of few and of many rounds."""
    more = engine.rounds[1] - engine.rounds[0]
    times = [1e3 * (many["cpu_s"] - few["cpu_s"]) / more for few, many in pairs]
    network: float | None = None
    if all(outcome["network_bytes"] is not None for pair in pairs for outcome in pair):
        network = statistics.median(
            (many["network_bytes"] - few["network_bytes"]) / more / NODES for few, many in pairs
        )
    compared = [pair[engine.rounds.index(ROUNDS)] for pair in pairs]
    worst, mean, message_bytes = (
        statistics.median(outcome[key] for outcome in compared) for key in ("worst", "mean", "message_bytes")
    )
    return Cost(
        name, engine.graph, engine.algorithm, statistics.median(times), min(times), max(times), message_bytes,
        network or None, worst, mean,
    )  # fmt: skip


def _run(engine: Engine, python: str, rounds: int) -> dict[str, Any]:
    """Runs the job until it ends well. Returns what it took and what came out."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(FairmeshError):
            return _once(engine, python, rounds)
    return _once(engine, python, rounds)


def _once(engine: Engine, python: str, rounds: int) -> dict[str, Any]:
    """Runs the job in a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "log.txt"
        write_job(folder, engine, rounds)
        measuring = [sys.executable, "-m", "benchmarks.engines.process_tree", str(log), str(_SECONDS)]
        program = [python, "-m", f"benchmarks.engines.runners.{engine.program}", name, str(rounds)]
        environment = os.environ | {
            "PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}",
            "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "HOME": name,
        }
        done = subprocess.run(
            [*measuring, *program], env=environment, cwd=name, capture_output=True, text=True, check=False
        )
        used = json.loads(done.stdout) if done.returncode == 0 else {"code": done.stderr[-500:]}
        if used["code"] != 0 or not (folder / "outcome.json").exists():
            said = log.read_text(errors="replace")[-3000:] if log.exists() else ""
            raise FairmeshError(f"{engine.program} with {rounds} rounds ended with {used['code']}:\n{said}")
        return used | json.loads((folder / "outcome.json").read_text())


def write_job(folder: Path, engine: Engine, rounds: int) -> None:
    """Writes the job: an experiment file for fairmesh, and arrays for the others."""
    lines = [f"rounds = {rounds}", "[data]", 'name = "digits"', f"nodes = {NODES}", "[model]", 'name = "logistic"']
    lines += ["[topology]", f'name = "{engine.graph}"', "[sampling]", f"batch = {BATCH}"]
    lines += ["[options]", f"measure_every = {rounds}"]
    if engine.algorithm in _ALGORITHMS:
        settings = _ALGORITHMS[engine.algorithm]
        lines += ["[algorithm]", f'name = "{engine.algorithm}"']
        lines += [
            f'{key} = {{ name = "{value["name"]}", value = {value["value"]} }}' for key, value in settings.items()
        ]
    (folder / "experiment.toml").write_text("\n".join(lines) + "\n")
    arrays = {}
    for node, site in enumerate(Digits(nodes=NODES).sites()):
        for of, rows in ("", site.train), ("test-", site.test):
            arrays |= {f"{of}{what}-{node}": values.numpy() for what, values in zip(("inputs", "targets"), rows)}
    np.savez(folder / "sites.npz", **arrays)
    (folder / "task.json").write_text(json.dumps({"nodes": NODES, "batch": BATCH, "step": STEP}))


def record(found: Sequence[Cost | Skipped], repeats: int) -> None:
    """Writes what was found, next to engines that were recorded before and not measured now, and the table in docs."""
    now = as_table(found, repeats)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"engines": []}
    rows = {row["engine"]: row for row in (*known["engines"], *now["engines"])}
    now["engines"] = [rows[name] for name in ENGINES if name in rows]
    now["skipped"] = [row for row in now["skipped"] if row["engine"] not in rows]
    RESULTS.write_text(json.dumps(now, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(_MARKS[0])
    PAGE.write_text(f"{before}{_MARKS[0]}{shown(now)}{_MARKS[1]}{rest.partition(_MARKS[1])[2]}")


def shown(recorded: Mapping[str, Any]) -> str:
    """Returns the table of what is recorded, in Markdown."""
    head = "engine", "graph", "CPU, ms per round", "models, B", "on the network, B", "worst site", "mean"
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in recorded["engines"]:
        low, middle, high = (f"{row[key]:.3g}" for key in ("cpu_ms_low", "cpu_ms", "cpu_ms_high"))
        network = "" if row["network_bytes"] is None else f"{row['network_bytes']:,.0f}"
        time, models = f"{middle} ({low} to {high})", f"{row['message_bytes']:,.0f}"
        accuracies = f"{row['worst']:.1%}", f"{row['mean']:.1%}"
        lines.append(f"| {' | '.join((row['engine'], row['graph'], time, models, network, *accuracies))} |")
    return "\n".join(lines) + "\n"


def as_table(found: Sequence[Cost | Skipped], repeats: int) -> dict[str, Any]:
    """Returns what is recorded."""
    return {
        "cpus": os.cpu_count(),
        "rounds": ROUNDS,
        "repeats": repeats,
        "engines": [_rounded(cost) for cost in found if isinstance(cost, Cost)],
        "skipped": [asdict(one) for one in found if isinstance(one, Skipped)],
    }


def _rounded(cost: Cost) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(cost).items()}
