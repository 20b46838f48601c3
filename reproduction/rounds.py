"""How many rounds are enough, over which graph, and what `fm.advise` finds out about it.

`python -m reproduction.rounds --write FILE` runs the parts named by `--part` (all by default, about an hour)
and writes their rows; `--show` prints the recorded ones.

- lengths: the default on the development half of the bench, on its twins with numbers to predict, and on 42 sites with
  levels of their own, in runs of 75 to 4,800 rounds. Steps fall to 0 at the end of a run, so each length is a run.
- rehearsals: the rehearsal of `fm.advise` on the same problems.
- graphs: 16 to 160 sites with levels of their own over graphs with 2 to 16 neighbours.

Errors are means over sites on test rows: shares of wrong answers, or root mean squared errors in units of the targets'
spread.
"""

import json
import logging
import time
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from fairmesh.data.site import Site
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.problem import Problem, prepare
from fairmesh.rehearsal import LENGTHS, Rehearsal, mean_error, rehearsed
from fairmesh.topology.graphs import Circulant, Exponential, Ring, Topology
from fairmesh.training.defaults import DEFAULT_ALGORITHM, ROUNDS, default_objective
from fairmesh.training.graph_choice import Mixed, default_topology
from fairmesh.training.train import train
from reproduction.recorded import write_or_show
from reproduction.sites.many import many_sites
from reproduction.sites.problems import DEVELOPMENT
from reproduction.sites.site_problem import SiteProblem
from reproduction.sites.twins import TWINS
from reproduction.workers import workers

RESULTS = Path(__file__).parent / "results" / "rounds.json"
PARTS = ("lengths", "rehearsals", "graphs")
SPLITS, SEEDS = (0, 1), (0, 1, 2)
MANY = "42-levels-numbers"
CASES = {problem.name: problem for problem in (*DEVELOPMENT, *TWINS, many_sites(42))}
POINT, RELATIVE = 0.01, 0.05  # of a share of wrong answers, and of another error: more rounds must gain more than that


class Task(NamedTuple):
    """One run; by names, so that another process can carry it out."""

    part: str
    case: str
    rounds: int = 0
    split: int = 0
    graph: str = "default"


def graph_of(name: str, n: int) -> Topology:
    """Returns a graph by its name: "ring", "exponential", "default", or how many distances a circulant one has."""
    if name.isdigit():
        return Circulant(tuple(sorted({min(n // 2, max(1, round(n ** (k / int(name))))) for k in range(int(name))})))
    named = {"ring": Ring(), "exponential": Exponential()}
    return named[name] if name in named else default_topology(n, ROUNDS, DEFAULT_ALGORITHM)


def problem_of(case: SiteProblem, sites: list[Site]) -> Prepared:
    """Returns a problem of the bench as `fm.train(problem)` trains it."""
    outputs = 1 if case.metric == "r2" else 1 + max(int(site.train[1].max()) for site in sites)
    model = partial(case.model.build, sites[0].train[0].shape[1:], outputs)
    return prepare(Problem(model, sites, objective=default_objective()))


def outcome_of(task: Task) -> dict[str, Any]:
    """Carries out a task and returns its row."""
    case = CASES[task.case] if task.case in CASES else many_sites(int(task.case.partition("-")[0]))
    problem, begun = problem_of(case, case.sites(task.split)), time.perf_counter()
    topology = graph_of(task.graph, problem.n)
    if task.part == "rehearsals":
        seen = rehearsed(problem, topology, DEFAULT_ALGORITHM) or Rehearsal((), (), False)
        return {"case": task.case, **seen._asdict(), "seconds": round(time.perf_counter() - begun, 1)}
    result = train(
        problem, topology, DEFAULT_ALGORITHM, task.rounds, seeds=SEEDS if task.part == "lengths" else SEEDS[:1],
        measure_every=task.rounds,
    )  # fmt: skip
    row = {name: value for name, value in task._asdict().items() if name != "part"}
    row["errors"] = [round(mean_error(record, problem), 4) for record in result.final]
    if task.part == "graphs":
        mixed = Mixed.over(topology.build(problem.n), DEFAULT_ALGORITHM, problem.flat_model.dim)
        start = problem.initial_whole_row(0)[: problem.flat_model.dim]
        apart = result.final[0]["consensus_models"] / float((result.row()[0].cpu() - start).square().sum())
        row |= {"neighbours": mixed.neighbours, "times": round(mixed.times(task.rounds), 1), "apart": apart**0.5}
    return row


def tasks(part: str) -> list[Task]:
    """Returns the runs of a part, the short ones first."""
    if part == "rehearsals":
        return [Task(part, case) for case in CASES]
    if part == "lengths":
        every = [Task(part, case, rounds, split) for rounds in LENGTHS for split in SPLITS for case in CASES]
        return [*every, *(Task(part, MANY, rounds, split, "ring") for rounds in LENGTHS for split in SPLITS)]
    return [
        Task(part, f"{n}-levels", rounds, graph=graph)
        for rounds in (150, 300, 600, 1200)
        for n in (16, 24, 42, 60, 100, 160)
        for graph in ("ring", "2", "3", "4", "exponential")
        if n * rounds <= 100_000
    ]


def curve(rows: Iterable[Mapping[str, Any]], case: str, graph: str = "default") -> dict[int, float]:
    """Returns the mean error after runs of each length, over splits and seeds."""
    of_case = [row for row in rows if (row["case"], row["graph"]) == (case, graph)]
    lengths = sorted({row["rounds"] for row in of_case})
    return {length: mean(e for row in of_case if row["rounds"] == length for e in row["errors"]) for length in lengths}


def enough(errors: Mapping[int, float], is_share: bool) -> int:
    """Returns where more rounds stop helping: the shortest run that is within the tolerance of the best."""
    best = min(errors.values())
    limit = best + (POINT if is_share else RELATIVE * best)
    return min(length for length, error in errors.items() if error <= limit)


def advised(rows: Iterable[Mapping[str, Any]]) -> dict[str, Rehearsal]:
    """Returns the recorded rehearsals by case."""
    return {row["case"]: Rehearsal(tuple(row["lengths"]), tuple(row["errors"]), row["is_share"]) for row in rows}


def table(recorded: Mapping[str, list[dict[str, Any]]]) -> str:
    """Returns the recorded lengths and rehearsals as a table in Markdown."""
    lines = [f"| problem | {' | '.join(f'{n:,}' for n in LENGTHS)} | enough | advised |", "|---" * 10 + "|"]
    for case, rehearsal in advised(recorded["rehearsals"]).items():
        errors = curve(recorded["lengths"], case)
        shown = [f"{errors[n]:.3f}" if n in errors else "" for n in LENGTHS]
        lines.append(f"| {case} | {' | '.join(shown)} | {enough(errors, rehearsal.is_share)} | {rehearsal.rounds} |")
    return "\n".join(lines)


def _begin() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def main() -> None:
    parser = write_or_show(__doc__)
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS), help="which parts to run")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    given = parser.parse_args()
    if given.show:
        print(table(json.loads(RESULTS.read_text())))
        return
    recorded: dict[str, list[dict[str, Any]]] = {part: [] for part in given.part}
    with workers(outcome_of, given.jobs, _begin) as carried_out:
        for task, row in carried_out([task for part in given.part for task in tasks(part)]):
            if not isinstance(row, dict):
                raise row
            recorded[task.part].append(row)
            print(*task, row["errors"], flush=True)
            given.write.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
