"""How many rounds are enough, and over which graph: runs of different lengths, each with its own schedule of steps.

`python -m reproduction.rounds --write FILE` runs the cases and writes their rows; `--show` prints the recorded ones.
`--part lengths` trains the default on the development half of the bench, on its twins with numbers to predict and on 42
sites with levels of their own; `--part graphs` trains many sites over graphs of different density.
"""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fairmesh.algorithms.tracked_ad_gda import TrackedADGDA
from fairmesh.data.site import Site
from fairmesh.problems.problem import Problem
from fairmesh.topology.graphs import Circulant, Complete, Exponential, Ring, Topology
from fairmesh.training.graph_choice import Mixed
from fairmesh.training.train import train
from reproduction.recorded import write_or_show
from reproduction.sites.many import many_sites
from reproduction.sites.problems import DEVELOPMENT
from reproduction.sites.site_problem import SiteProblem
from reproduction.sites.twins import TWINS
from reproduction.workers import workers

RESULTS = Path(__file__).parent / "results" / "rounds.json"
LENGTHS = (75, 150, 300, 600, 1200, 2400, 4800)
SEEDS = (0, 1, 2)
CASES = {problem.name: problem for problem in (*DEVELOPMENT, *TWINS, many_sites(42))}
_HELD_OUT = 0.25


def spread_out(n: int, hops: int) -> Circulant:
    offsets = {min(n // 2, max(1, round(n ** (k / hops)))) for k in range(hops)}
    return Circulant(tuple(sorted(offsets)))


class Task(NamedTuple):
    part: str
    case: str
    rounds: int
    split: int = 0
    graph: str = ""


def graph_of(name: str, n: int) -> Topology | None:
    if name.startswith("hops"):
        return spread_out(n, int(name[4:]))
    return {"": None, "ring": Ring(), "exponential": Exponential(), "complete": Complete()}[name]


def problem_of(case: SiteProblem, sites: list[Site]) -> Problem:
    numbers = case.metric == "r2"
    outputs = 1 if numbers else 1 + max(int(site.train[1].max()) for site in sites)
    shape = sites[0].train[0].shape[1:]
    return Problem(partial(case.model.build, shape, outputs), sites)


def held_out(sites: list[Site], split: int) -> list[Site]:
    made = []
    for i, site in enumerate(sites):
        x, y = site.train
        order = torch.from_numpy(np.random.default_rng((split, i)).permutation(len(y)))
        judging, rest = order.tensor_split([max(1, round(_HELD_OUT * len(y)))])
        made.append(Site((x[rest], y[rest]), test=(x[judging], y[judging]), name=site.name))
    return made


def outcome_of(task: Task) -> dict[str, Any]:
    case = CASES[task.case] if task.case in CASES else many_sites(int(task.case.partition("-")[0]))
    sites = case.sites(task.split)
    if task.part == "rehearsals":
        sites = held_out(sites, task.split)
    begun = time.perf_counter()
    topology = graph_of(task.graph, len(sites))
    result = train(
        problem_of(case, sites), topology, rounds=task.rounds, seeds=SEEDS if task.part == "lengths" else (0,),
        measure_every=max(1, task.rounds // 10), compare_weights=False,
    )  # fmt: skip
    numbers = case.metric == "r2"
    row: dict[str, Any] = task._asdict()
    row["mean"] = [_judged(record, numbers)[0] for record in result.final]
    row["worst"] = [_judged(record, numbers)[1] for record in result.final]
    row["losses"] = np.round([record["loss"]["sites"] for record in result.final], 5).tolist()
    row["loss"] = [float(np.mean(record["loss"]["sites"])) for record in result.final]
    row["consensus"] = [record["consensus_models"] for record in result.final]
    start = torch.stack(
        [result.problem.initial_whole_row(seed) for seed in ([0, 1, 2] if len(result.replicas) == 3 else [0])]
    )
    row["moved"] = (result.row().cpu() - start[:, : result.row().shape[1]]).square().sum(-1).tolist()
    row["bytes"] = result.final[0]["bytes_busiest_node"]
    row["curve"] = [
        (r["round"], round(float(np.mean(r["loss"]["sites"])), 5), r["consensus_models"])
        for r in result.records
        if r["replica"] == 0
    ]
    if topology is not None:
        mixed = Mixed.over(topology.build(len(sites)), TrackedADGDA(), result.row().shape[1])
        row |= {"mixing": mixed.times(1), "degree": mixed.neighbours}
    row["seconds"] = round(time.perf_counter() - begun, 2)
    return row


def _judged(record: dict[str, Any], numbers: bool) -> tuple[float, float]:
    values = np.sqrt(record["loss"]["sites"]) if numbers else np.array(record["accuracy"]["sites"])
    return float(values.mean()), float(values.max() if numbers else values.min())


def _begin() -> None:
    import logging
    import warnings

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def tasks(part: str) -> list[Task]:
    if part == "graphs":
        names = ("ring", "hops2", "hops3", "hops4", "exponential")
        return [
            Task(part, f"{n}-levels", rounds, graph=graph)
            for rounds in (150, 300, 600, 1200)
            for n in (16, 24, 42, 60, 100, 160)
            for graph in names
            if not (n > 60 and rounds > 600)
        ]
    if part == "rehearsals":
        return [Task(part, case, rounds, split) for rounds in LENGTHS[:5] for case in CASES for split in (0, 1)]
    return [
        Task(part, case, rounds, split, graph)
        for rounds in LENGTHS
        for split in (0, 1)
        for case in CASES
        for graph in (("ring", "hops2") if case.startswith("42") else ("",))
        if not (split and rounds == LENGTHS[-1])
    ]


def main() -> None:
    parser = write_or_show(__doc__)
    parser.add_argument("--part", choices=("lengths", "graphs", "rehearsals"), default="lengths")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--longest", type=int, default=4800)
    given = parser.parse_args()
    rows = []
    with workers(outcome_of, given.jobs, _begin) as carried_out:
        for task, row in carried_out([task for task in tasks(given.part) if task.rounds <= given.longest]):
            if not isinstance(row, dict):
                print(task, row, flush=True)
                continue
            rows.append(row)
            print(
                row["part"],
                row["case"],
                row["graph"],
                row["rounds"],
                row["split"],
                row["mean"],
                row["seconds"],
                flush=True,
            )
            given.write.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
