"""Runs recipes: searches on held-out training data, trains rows that can be stacked as one batched run, and writes one
line a row, so that what was stopped goes on where it was."""

import multiprocessing
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fairmesh.algorithms import Algorithm
from fairmesh.errors import BadInput
from fairmesh.experiment import Experiment
from fairmesh.metrics import Record
from fairmesh.problems.base import Problem
from fairmesh.problems.datasets import COOS7, Data, Fewer, HeldOut
from fairmesh.problems.datasets.sources import SOURCES, found
from fairmesh.problems.models import Logistic, PaperCNN
from fairmesh.recording import train
from fairmesh.replicas import stacked
from fairmesh.reproduce.lines import Line, curve_of, described, final_numbers, lines_of, machine, record
from fairmesh.reproduce.recipes import Row, rows_of
from fairmesh.result import Result
from fairmesh.settings import flat_table, to_table

HELD_OUT = 0.2  # the share of the training data that searches are judged by


def reproduce(
    recipes: Sequence[str],
    results: Path,
    device: str = "cpu",
    *,
    jobs: int = 1,
    work: Path | None = None,
    change: Callable[[Row], Row] = lambda row: row,
    say: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Runs what is missing of the recipes, each row changed by `change`, in so many processes; returns the labels of
    rows left out because their data is not here. `work` is where the checkpoint of a run in progress is kept."""
    rows = [change(row) for recipe in recipes for row in rows_of(recipe)]
    done = {(line["protocol"], f"{r}: {line['row']}"): line for r in recipes for line in lines_of(results, r)}
    missing = [row for row in rows if _differs(row, done.get((row.protocol, row.label)))]
    absent = {row.experiment.data for row in missing if _cannot_be_fetched(row.experiment.data)}
    groups = grouped([row for row in missing if row.experiment.data not in absent])
    clock = _Clock(groups, say)
    try:
        _carry_out(groups, done, results, device, jobs, work, clock)
    finally:
        if clock.number:
            record(results, clock.sitting(device, jobs))
    return [row.label for row in missing if row.experiment.data in absent]


def _carry_out(
    groups: list[list[Row]],
    done: dict[tuple[str, str], Line],
    results: Path,
    device: str,
    jobs: int,
    work: Path | None,
    clock: "_Clock",
) -> None:
    for dependent in (False, True):  # those that take another's settings wait for it
        wave = [group for group in groups if (group[0].as_row is not None) == dependent]
        wave = sorted(wave, key=_cost, reverse=True) if jobs > 1 else wave  # so that all processes end together
        tasks = [(group, {row.label: _found_for(row, done) for row in group if row.as_row}) for group in wave]
        with _workers(jobs, device, work) as carried_out:
            for group, lines in carried_out(tasks):
                for line in lines:
                    done[line["protocol"], f"{line['recipe']}: {line['row']}"] = line
                    record(results, line)
                clock.passed(group)


def _found_for(row: Row, done: dict[tuple[str, str], Line]) -> dict[str, Any]:
    like = done.get((row.protocol, str(row.as_row)))
    if like is None:
        raise BadInput(f"{row.label} takes its settings from '{row.as_row}': run that recipe with it")
    return {"as": row.as_row, "chosen": like["search"]["chosen"]}


Task = tuple[list[Row], dict[str, Any]]  # rows that run as one; what was found for those that take another's settings


@contextmanager
def _workers(jobs: int, device: str, work: Path | None) -> Iterator[Callable[[list[Task]], Iterable]]:
    """Carries out tasks here, or in other processes: a GPU that waits for one is busy with another."""
    if jobs == 1:
        runner = Runner(device, work=work)
        yield lambda tasks: ((group, runner.lines(group, found)) for group, found in tasks)
        return
    memory = _share_of_memory(device, jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(device, work, memory)) as pool:

        def carried_out(tasks: list[Task]) -> Iterable:
            futures = {pool.submit(_lines_in_worker, *task): task[0] for task in tasks}
            failed: list[BaseException] = []
            try:
                for future in as_completed(futures):
                    error = future.exception()
                    if error is None:
                        yield futures[future], future.result()
                    else:
                        failed.append(error)  # the others go on: what they find is kept
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
            if failed:
                raise failed[0]

        yield carried_out


def _share_of_memory(device: str, jobs: int) -> float | None:
    if not device.startswith("cuda"):
        return None
    return 0.8 * torch.cuda.mem_get_info()[0] / 2**30 / jobs


_of_this_process: list["Runner"] = []  # a worker's own


def _begin(device: str, work: Path | None, memory_gib: float | None) -> None:
    _of_this_process[:] = [Runner(device, work=work, memory_gib=memory_gib)]


def _lines_in_worker(group: list[Row], found: dict[str, Any]) -> list[Line]:
    return _of_this_process[0].lines(group, found)


class _Clock:
    """Says what is done and how long the rest may take."""

    def __init__(self, groups: Sequence[list[Row]], say: Callable[[str], None]):
        self._say, self._started, self._count = say, time.perf_counter(), len(groups)
        self._left, self._passed, self.number = sum(map(_cost, groups)), 0.0, 0
        if groups:
            say(f"{sum(map(len, groups))} rows in {self._count} batched runs")

    def passed(self, group: list[Row]) -> None:
        self._passed, self._left, self.number = (
            self._passed + _cost(group),
            self._left - _cost(group),
            self.number + 1,
        )
        elapsed = time.perf_counter() - self._started
        left = elapsed * self._left / self._passed / 60
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        self._say(
            f"[{self.number}/{self._count}] {group[0].label}{more}, {group[0].protocol} protocol; "
            f"{elapsed / 60:.1f} min so far, about {left:.1f} min left"
        )

    def sitting(self, device: str, jobs: int) -> Line:
        """How much was done at one go, and how long it took."""
        minutes = (time.perf_counter() - self._started) / 60
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        done = {"runs": self.number, "minutes": round(minutes, 2), "jobs": jobs, "machine": machine(device)}
        return {"recipe": "sittings", "row": when, "protocol": "", **done}


class Runner:
    """Carries out rows on a device, in at most so much memory; keeps the checkpoint of the run in progress in `work`,
    where given: a GPU's runs take seconds and need none."""

    def __init__(self, device: str = "cpu", *, work: Path | None = None, memory_gib: float | None = None):
        self._device, self._work, self._memory = device, work, memory_gib
        self._known: dict[Any, Problem] = {}  # the last two: a search and what it is for

    def lines(self, group: list[Row], found: dict[str, Any]) -> list[Line]:
        """Searches and trains rows that run as one; `found` holds searches that need not be made."""
        started = time.perf_counter()
        searches = self._searched([row for row in group if row.label not in found]) | found
        runs = self._sound(group, searches)
        seconds = (time.perf_counter() - started) / len(group)
        return [
            {
                "recipe": row.recipe,
                "row": row.name,
                "protocol": row.protocol,
                "settings": described(row),
                "search": searches[row.label],
                "seeds": list(row.experiment.seeds),
                "nodes": problem.n,
                "parameters": problem.flat_model.dim,
                "final": final_numbers([record for record in records if record["round"] == row.experiment.rounds]),
                "curve": curve_of(records),
                "diverged": diverged,
                "seconds": round(seconds, 2),
                "machine": machine(self._device),
            }
            for row, (problem, records, diverged) in zip(group, runs)
        ]

    def _sound(self, group: list[Row], searches: dict[str, Any]) -> list["_Run"]:
        """Trains every row with what was chosen for it. Where a seed diverges, which shows without a test set, the next
        best candidate takes its place."""
        rows, runs = list(group), {}
        while rows:
            algorithms = [_with(row.experiment, searches[row.label]["chosen"]) for row in rows]
            result = self._trained(rows[0], rows[0].experiment, algorithms, rows[0].experiment.rounds)
            runs |= {row.label: run for row, run in zip(rows, _by_row(result, len(rows[0].experiment.seeds)))}
            rows = [row for row in rows if runs[row.label].diverged and _passed_over(searches[row.label])]
        return [runs[row.label] for row in group]

    def _searched(self, group: list[Row]) -> dict[str, Any]:
        """For every row that is searched for: the candidates with their worst group's held-out accuracy, the best."""
        found: dict[str, Any] = {row.label: {"over": {}, "tried": [], "chosen": {}} for row in group}
        candidates = {row.label: _candidates(row) for row in group if row.search}
        if not candidates:
            return found
        first = group[0]
        rounds, seeds = first.search_rounds or first.experiment.rounds, first.experiment.seeds[: first.search_seeds]
        judged = replace(
            first.experiment,
            data=HeldOut(first.experiment.data, HELD_OUT),
            seeds=seeds,
            options=replace(first.experiment.options, measure_every=rounds, count_bytes=False),
        )
        every = [algorithm for algorithms in candidates.values() for algorithm in algorithms]
        result = self._trained(first, judged, every, rounds)
        ends = iter(zip(*[iter(_sound(result))] * len(seeds)))
        for row in group:
            if not row.search:
                continue
            tried = [_tried(row, algorithm, next(ends)) for algorithm in candidates[row.label]]
            best = max(tried, key=lambda one: (one["worst"], one["mean"]))
            if best["worst"] < 0:
                raise BadInput(f"{row.label} ({row.protocol}): every candidate of the search diverged")
            over = {name: list(values) for name, values in row.search.items()}
            chosen = {name: best[name] for name in row.search}
            found[row.label] = {"over": over, "rounds": rounds, "seeds": len(seeds), "tried": tried, "chosen": chosen}
        return found

    def _trained(self, row: Row, experiment: Experiment, algorithms: list[Algorithm], rounds: int) -> Result:
        name = re.sub(r"\W+", "-", f"{row.protocol} {row.label} {type(experiment.data).__name__}")
        folder = self._work / name if self._work else None
        return train(
            self._problem(experiment),
            experiment.topology,
            algorithms,
            rounds,
            seeds=experiment.seeds,
            placements=experiment.placements,
            out=folder,
            resume=bool(folder and (folder / "checkpoint.safetensors").exists()),
            **to_table(replace(experiment.options, device=self._device, memory_gib=self._memory, on_divergence="mark")),
        )

    def _problem(self, experiment: Experiment) -> Problem:
        """The experiment's problem, made once for rows that follow each other."""
        key = experiment.data, experiment.model, experiment.sampling
        while key not in self._known and len(self._known) > 1:
            self._known.pop(next(iter(self._known)))
        if key not in self._known:
            self._known[key] = experiment.problem()
        return self._known[key]


class _Run(NamedTuple):
    """A row's share of a batched run."""

    problem: Problem
    records: list[Record]
    diverged: list[int]  # seeds


def _by_row(result: Result, seeds: int) -> list[_Run]:
    """A batched run cut into rows of so many seeds."""
    cuts = [range(start, start + seeds) for start in range(0, len(result.replicas), seeds)]
    return [
        _Run(
            result.problem,
            [record for record in result.records if record["replica"] in cut],
            [r - cut.start for r in result.diverged if r in cut],
        )
        for cut in cuts
    ]


def _passed_over(search: dict[str, Any]) -> bool:
    """Puts the next best candidate that is sound in the place of the chosen one; False where there is none."""
    over = search.setdefault("passed_over", [])
    over.append(search["chosen"])
    names = list(search["chosen"])
    left = [
        one for one in search.get("tried", []) if one["worst"] >= 0 and {name: one[name] for name in names} not in over
    ]
    if not left:
        search["chosen"] = over.pop(0)
        return False
    best = max(left, key=lambda one: (one["worst"], one["mean"]))
    search["chosen"] = {name: best[name] for name in names}
    return True


def _cannot_be_fetched(data: Data) -> bool:
    """COOS7 has to be supplied by hand."""
    data = data.data if isinstance(data, Fewer) else data
    return isinstance(data, COOS7) and found(SOURCES["coos7"], data.folder) is None


def _differs(row: Row, line: Line | None) -> bool:
    """Whether a recorded line is not of this row as it stands."""
    return line is None or line["settings"] != described(row)


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in numbers of the algorithm only run as one; those that take another's settings come last."""
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.as_row is not None):
        fitting = (g for g in groups if _likeness(g[0]) == _likeness(row) and _stackable(g[0], row))
        group = next(fitting, None)
        if group is None:
            groups.append([row])
        else:
            group.append(row)
    return groups


def _likeness(row: Row) -> Any:
    """What rows of one batched run have in common, but for their algorithms."""
    e = row.experiment
    ours = e.data, e.topology, e.model, e.sampling, e.rounds, e.seeds, e.options
    return *ours, row.protocol, row.search_rounds, row.search_seeds, bool(row.search)


def _stackable(a: Row, b: Row) -> bool:
    try:
        stacked([a.experiment.algorithm, b.experiment.algorithm], torch.float64, torch.device("cpu"))
    except BadInput:
        return False
    return True


def _candidates(row: Row) -> list[Algorithm]:
    return replace(row.experiment, sweep=row.search).algorithms()


def _with(experiment: Experiment, changes: dict[str, float]) -> Algorithm:
    (algorithm,) = replace(experiment, sweep={name: (value,) for name, value in changes.items()}).algorithms()
    return algorithm


def _sound(result: Result) -> list[Record | None]:
    """The last record of every replica; None of one that diverged."""
    return [None if r in result.diverged else record for r, record in enumerate(result.final)]


def _tried(row: Row, algorithm: Algorithm, ends: Sequence[Record | None]) -> dict[str, float]:
    """A candidate and how it ended, averaged over seeds: -1 where one diverged."""
    table = flat_table(to_table(algorithm))
    sound = [end["accuracy"] for end in ends if end is not None]

    def mean(what: str) -> float:
        return round(sum(one[what] for one in sound) / len(ends), 4) if len(sound) == len(ends) else -1.0

    return {name: table[name] for name in row.search} | {"worst": mean("worst_group"), "mean": mean("mean")}


def _cost(group: Sequence[Row]) -> float:
    """Roughly how long a group takes, in any unit: for the time left."""
    e = group[0].experiment
    nodes = len(e.seeds) and (50 if e.rounds > 2000 else 10)
    a_round = 1.0 if isinstance(e.model, Logistic) else 40.0 if isinstance(e.model, PaperCNN) else 2.0
    searched = sum(len(_candidates(row)) for row in group if row.search) * group[0].search_seeds
    rounds = e.rounds * len(group) * len(e.seeds) + (group[0].search_rounds or e.rounds) * searched
    return a_round * nodes * rounds + 2e6
