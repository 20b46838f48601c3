"""How every algorithm does with its defaults, what `fm.advise` recommends, and the best of a grid.

`python -m reproduction.defaults --write FILE` takes about ten minutes on two cores; `--show` prints the table of the
recorded runs. The best of the grid is that with the highest mean over splits, so it is a little lucky: as if tuned
on the test rows themselves.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import fairmesh as fm
from fairmesh.data.datasets import Data
from fairmesh.experiment import load_experiment
from fairmesh.problems.models import FullyConnected, Logistic, Model
from fairmesh.topology.graphs import Ring, Topology
from fairmesh.training.defaults import default_objective
from reproduction.recorded import write_or_show
from reproduction.steps import FORMER

RESULTS = Path(__file__).parent / "results" / "defaults.json"
HOSPITALS = Path(__file__).parents[1] / "examples" / "hospitals.toml"
REPEATS = 4  # splits of the digits; seeds of the hospitals


@dataclass(frozen=True)
class _Setup:
    data: Data | None  # None for the hospitals of examples/
    model: Model = field(default_factory=Logistic)
    topology: Topology = field(default_factory=Ring)


PROBLEMS = {
    "digits, two unusual sites of ten": _Setup(fm.data.Digits(nodes=10, odd=2)),
    "the same, a small MLP": _Setup(fm.data.Digits(nodes=10, odd=2), FullyConnected()),
    "digits, one class per site": _Setup(fm.data.Digits(nodes=10, split="class")),
    "digits, six unusual sites of thirty": _Setup(fm.data.Digits(nodes=30, odd=6)),
    "hospitals (examples/hospitals.toml)": _Setup(None),
}
ALGORITHMS = {
    "TrackedADGDA": fm.TrackedADGDA(),
    # with the default steps of version 0.2; `python -m reproduction.steps --show` has those of today
    "ADGDA": FORMER["AD-GDA"],
    "ChocoSGD": FORMER["CHOCO-SGD"],
    "DSGD": FORMER["DSGD"],
    "DRDSGD": FORMER["DR-DSGD"],
    "DRFA": FORMER["DRFA"],
    "AFL": FORMER["AFL"],
}
GRIDS: dict[str, tuple[fm.algorithms.Algorithm, dict[str, tuple[float, ...]]]] = {
    "TrackedADGDA": (
        fm.TrackedADGDA(compressor=fm.compressors.Quantize(8, block=512)),
        {"primal_step.start": (0.35, 0.7, 1.4), "regularizer.strength": (0.02, 0.05, 0.2)},
    ),
    "ADGDA": (
        fm.ADGDA(primal_step=fm.schedules.Linear(6.0)),
        {"primal_step.start": (3.0, 6.0, 12.0), "dual_step": (0.003, 0.01, 0.03)},
    ),
}


def experiment(setup: _Setup, algorithm: fm.algorithms.Algorithm, sweep: dict[str, Any] | None = None) -> fm.Experiment:
    """Returns the experiment of one case."""
    options = fm.Options(measure_every=600, on_divergence="mark")
    if setup.data is None:
        seeds = tuple(range(REPEATS))
        return load_experiment(
            HOSPITALS, algorithm=algorithm, rounds=600, seeds=seeds, sweep=sweep or {}, options=options
        )
    return fm.Experiment(
        setup.data,
        setup.topology,
        algorithm,
        rounds=600,
        model=setup.model,
        splits=REPEATS,
        sweep=sweep or {},
        options=options,
    )


def _row(problem: str, what: str, settings: str, rounds: int, result: fm.Result, which: list[int]) -> dict[str, Any]:
    worst, average = result.values("worst"), result.values("mean")
    return {
        "problem": problem,
        "what": what,
        "settings": settings,
        "rounds": rounds,
        "worst": [worst[k] for k in which],
        "mean": [average[k] for k in which],
        "diverged": [k for k in result.diverged if k in which],
    }


def without_discount(advice: fm.Experiment) -> fm.Experiment:
    """Returns the same experiment, whose weights follow the losses on held-out rows as they are."""
    return replace(advice, objective=replace(default_objective(), discount_noise=False))


def measured(problem: str) -> list[dict[str, Any]]:
    """Runs every case of one problem and returns its rows."""
    setup, rows = PROBLEMS[problem], []
    for name, algorithm in ALGORITHMS.items():
        result = fm.run(experiment(setup, algorithm))
        rows.append(_row(problem, name, "defaults", 600, result, list(range(REPEATS))))
    advice = fm.advise(experiment(setup, fm.ADGDA())).experiment
    for what, one in (("advice", advice), ("advice without discount_noise", without_discount(advice))):
        rows.append(_row(problem, what, str(one.algorithm), one.rounds, fm.run(one), list(range(REPEATS))))
    candidates = []
    for name, (algorithm, sweep) in GRIDS.items():
        swept = experiment(setup, algorithm, sweep)
        result = fm.run(swept)
        by_settings: dict[str, list[int]] = {}
        for k, replica in enumerate(result.replicas):
            by_settings.setdefault(str(replica.algorithm), []).append(k)
        for settings, which in by_settings.items():
            candidates.append(_row(problem, f"best of a grid, {name}", settings, 600, result, which))
    rows.append(max((row for row in candidates if not row["diverged"]), key=lambda row: mean(row["worst"])))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a table in Markdown: worst site (and mean) in percent."""
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    lines = [f"| | {' | '.join(problems)} |", "|---" * (len(problems) + 1) + "|"]
    shown = list(dict.fromkeys(row["what"].partition(",")[0] for row in rows))
    for what in shown:
        cells = []
        for problem in problems:
            [row] = [one for one in rows if one["problem"] == problem and one["what"].partition(",")[0] == what]
            worst = [100 * value for value in row["worst"]]
            cell = f"{mean(worst):.1f} ± {stdev(worst):.1f} ({100 * mean(row['mean']):.1f})"
            cells.append("diverged" if row["diverged"] else cell)
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    given = write_or_show(__doc__).parse_args()
    if given.show:
        print(table(json.loads(RESULTS.read_text())))
        return
    rows = []
    for problem in PROBLEMS:
        rows += measured(problem)
        print(table([row for row in rows if row["problem"] == problem]), flush=True)
        given.write.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
