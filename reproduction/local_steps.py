"""How much traffic local steps save: the worst site and the mean against rounds and gradient evaluations.

`python -m reproduction.local_steps --write FILE` runs the problems named by `--problem` (all by default) and writes
their rows; those on digits take about half an hour on one core, the others need a GPU (`--device cuda --data FOLDER`).
`--show` prints the table of the recorded runs. Tracked AD-GDA runs with its defaults, on batches of its own in every
local step. A round costs the same bytes whatever the number of local steps.
"""

import json
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t

import fairmesh as fm
from fairmesh.data.datasets import Data
from fairmesh.problems.batches import Sampling
from fairmesh.problems.models import Logistic, Model
from fairmesh.topology.graphs import Complete, Ring, Topology
from fairmesh.training.options import Options
from reproduction.frontier.recipes import CIFAR, FASHION, LATTICE, SETUPS
from reproduction.recorded import write_or_show

RESULTS = Path(__file__).parent / "results" / "local_steps.json"
SEEDS = (0, 1, 2, 3, 4)  # each with its own placement


@dataclass(frozen=True)
class _Setup:
    data: Data
    cases: dict[int, tuple[int, ...]]  # local steps -> rounds
    full: dict[int, tuple[int, ...]]  # the same with local steps of full length
    topology: Topology = field(default_factory=Ring)
    model: Model = field(default_factory=Logistic)
    sampling: Sampling = field(default_factory=Sampling)


_FASHION = SETUPS[FASHION]
_DIGITS = {1: (40, 75, 150, 300), 5: (40, 75, 150), 20: (40, 75, 150), 100: (20, 40, 75)}
PROBLEMS = {
    "two sites with another instrument": _Setup(fm.data.Digits(nodes=10, odd=2), _DIGITS, {20: (75,)}),
    "one class per site": _Setup(fm.data.Digits(nodes=10, split="class"), _DIGITS, {20: (75,)}),
    FASHION: _Setup(
        _FASHION.data,
        {1: (100, 200, 400, 800), 5: (100, 200, 400), 20: (50, 100, 200, 400), 100: (50, 100)},
        {20: (100,)},
        LATTICE,
        _FASHION.model,
        Sampling(50),
    ),
    f"{FASHION}, every pair linked": _Setup(
        _FASHION.data,
        {1: (50, 100, 200, 400), 5: (50, 100, 200), 20: (25, 50, 100), 100: (25, 50)},
        {20: (100,)},
        Complete(),
        _FASHION.model,
        Sampling(50),
    ),
    CIFAR: _Setup(
        SETUPS[CIFAR].data,
        {1: (50, 100, 200, 400), 5: (25, 50, 100), 20: (25, 50, 100), 100: (25, 50)},
        {5: (25, 50, 100), 20: (25, 50, 100), 100: (25,)},
        LATTICE,
        SETUPS[CIFAR].model,
        Sampling(50),
    ),
}


def _each(cases: dict[int, tuple[int, ...]], max_drift: float | None) -> list[tuple[int, int, float | None]]:
    return [(steps, rounds, max_drift) for steps, every in cases.items() for rounds in every]


def measured(
    problem: str, local_steps: int, rounds: int, max_drift: float | None, folder: str | None, device: str
) -> dict[str, Any]:
    """Runs one case and returns its row."""
    setup = PROBLEMS[problem]
    data = setup.data if folder is None else replace(setup.data, folder=folder)
    experiment = fm.Experiment(
        data,
        setup.topology,
        fm.TrackedADGDA(local_steps=local_steps, max_drift=max_drift),
        rounds=rounds,
        model=setup.model,
        sampling=setup.sampling,
        seeds=SEEDS,
        placements="by-seed",
        # Compiling a round takes longer the more local steps it has.
        options=Options(measure_every=rounds, device=device, fuse="auto" if local_steps == 1 else "no"),
    )
    result = fm.run(experiment)
    probes = 1 if local_steps > 1 and max_drift != 0 else 0  # the first batch again
    return {
        "problem": problem,
        "local_steps": local_steps,
        "rounds": rounds,
        "max_drift": max_drift,
        "gradients": rounds * (local_steps + probes),
        "worst": result.values("worst"),
        "mean": result.values("mean"),
        "kilobytes": [record["bytes_busiest_node"] / 1000 for record in result.final],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a table in Markdown."""
    lines = [
        "| problem | local steps | rounds | gradients | busiest node sent, kB | worst site, % | mean, % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        steps = f"{row['local_steps']}" + (", full length" if row["max_drift"] == 0 else "")
        worst, average = ([100 * value for value in row[name]] for name in ("worst", "mean"))
        lines.append(
            f"| {row['problem']} | {steps} | {row['rounds']} | {row['gradients']:,} | {mean(row['kilobytes']):.0f} "
            f"| {_with_interval(worst)} | {_with_interval(average)} |"
        )
    return "\n".join(lines)


def _with_interval(values: list[float]) -> str:
    """Returns the mean and half of its 95 % interval by Student's t."""
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return f"{mean(values):.1f} ± {half:.1f}"


def main() -> None:
    parser = write_or_show(__doc__)
    parser.add_argument("--problem", nargs="*", choices=PROBLEMS, default=list(PROBLEMS), help="which problems to run")
    parser.add_argument("--data", help="folder with Fashion-MNIST and CIFAR-10")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if given.show:
        print(table(json.loads(RESULTS.read_text())))
        return
    rows = []
    for problem in given.problem:
        setup = PROBLEMS[problem]
        for steps, rounds, max_drift in [*_each(setup.cases, None), *_each(setup.full, 0.0)]:
            begun = time.perf_counter()
            rows.append(measured(problem, steps, rounds, max_drift, given.data, given.device))
            print(table(rows[-1:]).splitlines()[-1], f"{time.perf_counter() - begun:.0f} s", flush=True)
            given.write.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
