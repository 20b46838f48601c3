"""Whether algorithms work with their default steps, on the bench of site problems and on its twins.

    python -m reproduction.steps --show                       # the recorded table
    python -m reproduction.steps --jobs 6 --write steps.json  # run everything again

Every algorithm is run with the steps that it had by default until version 0.2 ("former"), and with a grid of steps, of
which its default is one. Recorded are the mean loss and the metric over the sites' test rows: accuracy, or RMSE in
spreads of the target. Runs "above" end with a larger loss than the best constant answer has."""

import json
import logging
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

import fairmesh as fm
from fairmesh.algorithms import Algorithm
from fairmesh.algorithms.schedules import Geometric, Linear, Measured, Polynomial
from fairmesh.data.site import Site
from reproduction.recorded import write_or_show
from reproduction.sites.problems import PROBLEMS
from reproduction.sites.running import outputs_of
from reproduction.workers import workers

RESULTS = Path(__file__).parent / "results" / "steps.json"
FACTORS, STARTS = (0.25, 0.5, 1.0, 2.0, 4.0), (0.175, 0.35, 0.7, 1.4, 2.8)  # of measured and of scaled steps
ROBUST = ("AD-GDA", "DR-DSGD", "AFL", "DRFA", "q-FFL", "TERM")  # judged by the worst site, the others by the mean
SPLITS = 3

_A = fm.algorithms
RIVALS: dict[str, Algorithm] = {
    "AD-GDA": fm.ADGDA(),
    "CHOCO-SGD": fm.ChocoSGD(),
    "DSGD": _A.DSGD(),
    "DR-DSGD": _A.DRDSGD(),
    "AFL": _A.AFL(),
    "DRFA": _A.DRFA(),
    "FedAvg": _A.FedAvg(),
    "FedProx": _A.FedProx(),
    "q-FFL": _A.QFFL(),
    "TERM": _A.TERM(),
}
_SCALED = Polynomial(0.7, power=3.0)
FORMER: dict[str, Algorithm] = {
    "AD-GDA": fm.ADGDA(Linear(6.0)),
    "CHOCO-SGD": fm.ChocoSGD(Linear(0.6)),
    "DSGD": _A.DSGD(Linear(0.6)),
    "DR-DSGD": _A.DRDSGD(Linear(3.0), temperature=6.0),
    "AFL": _A.AFL(Geometric(0.1, 0.998)),
    "DRFA": _A.DRFA(Geometric(0.02, 0.998)),
    "FedAvg": _A.FedAvg(_SCALED),
    "FedProx": _A.FedProx(_SCALED),
    "q-FFL": _A.QFFL(_SCALED),
    "TERM": _A.TERM(_SCALED),
}
NAMES = tuple(name for name, problem in PROBLEMS.items() if problem.half != "held-back")


class Task(NamedTuple):
    """One split of one problem with one algorithm: its "former" default, or a "grid" of steps."""

    problem: str
    rival: str
    what: str
    split: int

    def algorithms(self) -> dict[str, Algorithm]:
        """Returns the algorithms to run, by what the table calls them."""
        if self.what == "former":
            return {"former": FORMER[self.rival]}
        return grid(RIVALS[self.rival])


def grid(algorithm: Any) -> dict[str, Algorithm]:
    """Returns the algorithm with other steps, by what changes."""
    step = algorithm.primal_step
    field, values = ("factor", FACTORS) if isinstance(step, Measured) else ("start", STARTS)
    return {f"{field} {x:g}": replace(algorithm, primal_step=replace(step, **{field: x})) for x in values}


def default(rival: str) -> str:
    """Returns which step of its grid an algorithm has by default."""
    return next(what for what, algorithm in grid(RIVALS[rival]).items() if algorithm == RIVALS[rival])


def constant_loss(sites: Sequence[Site], numbers: bool) -> float:
    """Returns the mean over sites of the test loss of one answer, the best for all training rows together."""
    targets = torch.cat([site.train[1] for site in sites])
    if numbers:
        return mean(float((site.test[1] - targets.mean()).square().mean()) for site in sites)
    shares = torch.bincount(targets).double() / len(targets)
    return mean(float(-shares.clamp(min=1e-9).log()[site.test[1]].mean()) for site in sites)


def outcomes_of(task: Task) -> list[dict[str, Any]]:
    """Returns a row for every algorithm of a task."""
    problem, algorithms = PROBLEMS[task.problem], task.algorithms()
    sites, numbers = problem.sites(task.split), problem.metric == "r2"
    shape, outputs = sites[0].train[0].shape[1:], outputs_of(problem, sites)
    made = fm.Problem(lambda: problem.model.build(shape, outputs), sites, metrics=("rmse",) if numbers else ())
    rounds = problem.rounds // (10 if task.rival == "DRFA" else 1)  # a round of DRFA has ten steps
    options: dict[str, Any] = {"measure_every": rounds, "on_divergence": "mark", "seeds": (task.split,)}
    result = fm.train(made, fm.Ring(), list(algorithms.values()), rounds, **options)
    constant, rows = constant_loss(sites, numbers), []
    for k, (name, record) in enumerate(zip(algorithms, result.final)):
        metric = record["rmse" if numbers else "accuracy"]
        diverged = k in result.diverged or not math.isfinite(record["loss"]["mean"])
        row = {"problem": task.problem, "rival": task.rival, "what": name, "split": task.split}
        numbers_of = {"loss": record["loss"]["mean"], "mean": metric["mean"], "worst": metric["worst"]}
        row |= {"diverged": True} if diverged else {key: float(f"{x:.4g}") for key, x in numbers_of.items()}
        rows.append(row | {"constant": float(f"{constant:.4g}")})
    return rows


_NUMBERS = ("loss", "mean", "worst", "constant")


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file, one per split; none if there is no file."""
    lines = json.loads(path.read_text()) if path.exists() else []
    return [
        {key: value for key, value in line.items() if key != "splits"}
        | {"split": int(split)}
        | {key: number for key, number in zip(_NUMBERS, numbers) if number is not None}
        | ({"diverged": True} if numbers[0] is None else {})
        for line in lines
        for split, numbers in line["splits"].items()
    ]


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes rows: a line per problem, algorithm and step, with loss, mean, worst site and constant loss by split."""
    lines: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        key = {name: row[name] for name in ("problem", "rival", "what")}
        line = lines.setdefault(tuple(key.values()), key | {"splits": {}})
        line["splits"][str(row["split"])] = [row.get(name) for name in _NUMBERS]
    text = ",\n".join(map(json.dumps, lines.values()))
    path.write_text(f"[\n{text}\n]\n")


def begin() -> None:
    """Keeps a process to one core, and quiet."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


class Cell(NamedTuple):
    """An algorithm with one kind of steps on one problem, over splits."""

    runs: int
    diverged: int
    above: int  # the constant answer
    mean: float  # metric over sites; NaN if a run diverged
    worst: float


def cell(rows: Sequence[dict[str, Any]], problem: str, rival: str, what: str) -> Cell:
    """Returns what rows say about one cell of the table."""
    found = [row for row in rows if (row["problem"], row["rival"], row["what"]) == (problem, rival, what)]
    sound = [row for row in found if "diverged" not in row]
    complete = len(found) == len(sound) > 0
    return Cell(
        len(found),
        len(found) - len(sound),
        sum(row["loss"] > row["constant"] for row in sound),
        mean(row["mean"] for row in sound) if complete else math.nan,
        mean(row["worst"] for row in sound) if complete else math.nan,
    )


def behind(rows: Sequence[dict[str, Any]], problem: str, rival: str, what: str | None = None) -> float:
    """Returns how far a step, the default one unless named, is behind the best of the grid, by the worst site or by the
    mean over sites: in points of accuracy, or in percent of the best RMSE. NaN if it diverged or is not known."""
    by = "worst" if rival in ROBUST else "mean"
    values = {name: getattr(cell(rows, problem, rival, name), by) for name in grid(RIVALS[rival])}
    own, known = values[what or default(rival)], [value for value in values.values() if not math.isnan(value)]
    if not known:
        return math.nan
    if PROBLEMS[problem].metric == "r2":
        return 100 * (own / min(known) - 1)
    return 100 * (max(known) - own)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown: for each problem and algorithm, former default -> default, and how far the latter
    is behind the best of the grid."""
    problems = [name for name in NAMES if any(row["problem"] == name for row in rows)]
    rivals = [name for name in RIVALS if any(row["rival"] == name for row in rows)]
    lines = [f"| | {' | '.join(rivals)} |", "|---" * (len(rivals) + 1) + "|"]
    for problem in problems:
        cells = []
        for rival in rivals:
            former, usual = (cell(rows, problem, rival, what) for what in ("former", default(rival)))
            gap = behind(rows, problem, rival)
            cells.append(f"{_shown(former)} -> {_shown(usual)}" + ("" if math.isnan(gap) else f" ({gap:+.1f})"))
        lines.append(f"| {problem} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(cell: Cell) -> str:
    if not cell.runs:
        return "-"
    lost = f"{cell.diverged} of {cell.runs} diverged" if cell.diverged else ""
    above = f"{cell.above} of {cell.runs} above" if cell.above else ""
    return ", ".join(filter(None, [lost, above])) or f"{cell.mean:.3f}"


def tasks(problems: Sequence[str], rivals: Sequence[str], splits: int) -> list[Task]:
    """Returns all tasks, the first split first."""
    every = [(what, split) for split in range(splits) for what in ("grid", "former")]
    return [Task(problem, rival, what, split) for what, split in every for rival in rivals for problem in problems]


def main() -> None:
    parser = write_or_show(__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--problem", nargs="*", choices=NAMES, default=NAMES, help="which problems to run")
    parser.add_argument("--rival", nargs="*", choices=RIVALS, default=list(RIVALS), help="which algorithms to run")
    parser.add_argument("--splits", type=int, default=SPLITS, help="how many splits at most")
    given = parser.parse_args()
    if given.show:
        print(table(read(RESULTS)))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = read(given.write)
    done = {(row["problem"], row["rival"], row["what"], row["split"]) for row in rows}
    todo = [
        task
        for task in tasks(given.problem, given.rival, given.splits)
        if any((task.problem, task.rival, name, task.split) not in done for name in task.algorithms())
    ]
    with workers(outcomes_of, given.jobs, begin) as carried_out:
        for k, (task, outcome) in enumerate(carried_out(todo), 1):
            if isinstance(outcome, Exception):
                raise outcome
            rows += outcome
            print(f"[{k}/{len(todo)}] {task}", flush=True)
            write(rows, given.write)
    print(table(rows))


if __name__ == "__main__":
    main()
