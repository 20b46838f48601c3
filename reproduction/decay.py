"""Whether a decay that sites find on held-out rows keeps the default from learning rows by heart: `python -m
reproduction.decay`. The planted problems have few rows for their columns, much or little noise, sites that differ, and
small networks; the bench's problems show what it costs where nothing is learned by heart."""

import argparse
import dataclasses
import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fairmesh.data.site import Site
from fairmesh.problems.problem import Problem
from fairmesh.training.defaults import default_for, default_objective
from fairmesh.training.train import train
from reproduction.sites.problems import DEVELOPMENT, PROBLEMS
from reproduction.workers import workers

FILE = Path(__file__).parent / "results" / "decay.json"
TEST_ROWS = 1000


@dataclasses.dataclass(frozen=True)
class Planted:
    """Sites of one rule: y = x w + noise, where w has the length 1, and sites differ by `apart`.

    Args:
        rows: Training rows of each site.
        columns: Columns of x.
        noise: Standard deviation of the noise.
        apart: The length of what each site adds to w.
        correlated: The share of the columns' variance that they have in common.
        hidden: Width of the network's hidden layer; 0 for a linear model.
        labels: Whether y is told as its sign.
        sites: How many sites.
    """

    rows: int
    columns: int
    noise: float = 1.0
    apart: float = 0.0
    correlated: float = 0.0
    hidden: int = 0
    labels: bool = False
    sites: int = 10

    def site_list(self, split: int) -> list[Site]:
        """Returns the sites of a split."""
        rng = np.random.default_rng(split)
        common, signs = _direction(rng, self.columns), np.sign(rng.standard_normal(self.columns))
        made = []
        for _ in range(self.sites):
            rule = common + self.apart * _direction(rng, self.columns)
            made.append(Site(self._drawn(rng, rule, signs, self.rows), test=self._drawn(rng, rule, signs, TEST_ROWS)))
        return made

    def _drawn(self, rng: np.random.Generator, rule: np.ndarray, signs: np.ndarray, n: int) -> tuple[Tensor, Tensor]:
        x = (1 - self.correlated) ** 0.5 * rng.standard_normal((n, self.columns))
        x += self.correlated**0.5 * rng.standard_normal((n, 1)) * signs
        y = x @ rule + self.noise * rng.standard_normal(n)
        targets = torch.tensor(y > 0).long() if self.labels else torch.tensor(y[:, None], dtype=torch.float32)
        return torch.tensor(x, dtype=torch.float32), targets

    def model(self) -> nn.Module:
        outputs = 2 if self.labels else 1
        if not self.hidden:
            return nn.Linear(self.columns, outputs)
        return nn.Sequential(nn.Linear(self.columns, self.hidden), nn.ReLU(), nn.Linear(self.hidden, outputs))

    def problem(self, split: int, **settings: Any) -> Problem:
        return Problem(self.model, self.site_list(split), **settings)


def _direction(rng: np.random.Generator, columns: int) -> np.ndarray:
    drawn = rng.standard_normal(columns)
    return drawn / np.linalg.norm(drawn)


PLANTED = {
    "few rows, many columns": Planted(20, 60),
    "very few rows": Planted(8, 60),
    "few rows, little noise": Planted(20, 60, noise=0.3),
    "few rows, hardly any noise": Planted(20, 60, noise=0.05),
    "few rows, sites differ": Planted(20, 60, apart=0.5),
    "correlated columns": Planted(20, 60, correlated=0.8),
    "many rows": Planted(100, 20),
    "many rows, much noise": Planted(100, 20, noise=3.0),
    "5 small sites": Planted(15, 10, sites=5),
    "network, few rows": Planted(20, 20, hidden=32),
    "network, little noise": Planted(30, 8, noise=0.1, hidden=32),
    "network, many rows": Planted(200, 8, hidden=32),
    "labels, few rows": Planted(20, 60, labels=True),
    "labels, network": Planted(20, 20, hidden=32, labels=True),
}
NAMES = (*PLANTED, *(problem.name for problem in DEVELOPMENT))


class Task(NamedTuple):
    """A problem with or without the decay, by names, so that another process can run it."""

    name: str
    decay: bool
    splits: int
    rounds: int


def outcome_of(task: Task) -> dict[str, Any]:
    """Trains the default on all splits. Returns the metric by split and site, and the penalties."""
    warnings.simplefilter("ignore")
    objective = dataclasses.replace(default_objective(), validated_decay=task.decay)
    made, rounds = _problems(task, objective)
    started = time.perf_counter()
    algorithm = default_for(objective).algorithm
    result = train(made, None, algorithm, rounds, measure_every=rounds, on_divergence="mark")
    primary = "loss" if result.problem.classes is None else "accuracy"
    found = {
        "metric": primary,
        "sites": [[round(value, 5) for value in record[primary]["sites"]] for record in result.final],
        "seconds": round(time.perf_counter() - started, 1),
    }
    if task.decay:
        tables = [split.objective.penalties or {} for split in result.problem.every_split]
        found["penalties"] = [list(table.values()) for table in tables]
    return found


def _problems(task: Task, objective: Any) -> tuple[list[Problem], int]:
    if task.name in PLANTED:
        return [PLANTED[task.name].problem(k, objective=objective) for k in range(task.splits)], min(600, task.rounds)
    bench = PROBLEMS[task.name]
    made = []
    for k in range(task.splits):
        sites = bench.sites(k)
        shape = sites[0].train[0].shape[1:]
        classes = 1 + max(int(site.train[1].max()) for site in sites)
        made.append(Problem(lambda: bench.model.build(shape, classes), sites, objective=objective))  # noqa: B023
    return made, min(bench.rounds, task.rounds)


def run(names: Sequence[str], splits: int, rounds: int, jobs: int, file: Path) -> dict[str, Any]:
    """Runs all problems without and with the decay, and writes the file after each."""
    tasks = [Task(name, decay, splits, rounds) for name in names for decay in (False, True)]
    table: dict[str, Any] = {}
    with workers(outcome_of, jobs, torch.set_num_threads, 1) as carried_out:
        for task, outcome in carried_out(tasks):
            if isinstance(outcome, Exception):
                print(task.name, outcome, flush=True)
                continue
            table.setdefault(task.name, {})["with" if task.decay else "without"] = outcome
            kept = {name: table[name] for name in names if name in table}
            file.write_text(in_lines(kept))
            print(task.name, task.decay, outcome["seconds"], flush=True)
    return table


def in_lines(table: dict[str, Any]) -> str:
    """Returns a table as JSON, with a line for each of its rows."""
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in table.items())
    return f"{{\n{rows}\n}}\n"


def differences(row: dict[str, Any]) -> tuple[float, float, float, float]:
    """Returns the mean over sites and splits without and with the decay, the gain, and its 95 % half width over
    splits. A gain is positive where the decay helps."""
    without, with_it = (np.array(row[key]["sites"]).mean(axis=1) for key in ("without", "with"))
    gain = (with_it - without) * (1 if row["with"]["metric"] == "accuracy" else -1)
    spread = 2.776 if len(gain) == 5 else 1.96 + 2.4 / max(1, len(gain) - 1)
    half = spread * gain.std(ddof=1) / len(gain) ** 0.5 if len(gain) > 1 else float("nan")
    return float(without.mean()), float(with_it.mean()), float(gain.mean()), float(half)


def shown(table: dict[str, Any]) -> str:
    """Returns the table in words."""
    lines = [f"{'problem':28} {'metric':9} {'without':>8} {'with':>8} {'gain':>8} {'+-':>7} {'Lambda':>7} {'time':>5}"]
    for name, row in table.items():
        if len(row) < 2:
            continue
        before, after, gain, half = differences(row)
        mean, times = float(np.mean(row["with"]["penalties"])), row["with"]["seconds"] / row["without"]["seconds"]
        metric = row["with"]["metric"]
        lines.append(
            f"{name:28} {metric:9} {before:8.4f} {after:8.4f} {gain:8.4f} {half:7.4f} {mean:7.2f} {times:5.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="print the recorded table")
    parser.add_argument("--only", nargs="*", default=NAMES, help="names of problems")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=600, help="at most")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--file", type=Path, default=FILE)
    given = parser.parse_args()
    table = (
        json.loads(given.file.read_text())
        if given.show
        else run(given.only, given.splits, given.rounds, given.jobs, given.file)
    )
    print(shown(table))


if __name__ == "__main__":
    main()
