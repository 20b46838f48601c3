"""One batched run: tunes and trains rows that differ only in numbers of the algorithm, and makes lines of them."""

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fairmesh.algorithms import Algorithm
from fairmesh.config.overrides import flat_table
from fairmesh.config.tables import to_table
from fairmesh.data.datasets import HeldOut
from fairmesh.errors import BadInput
from fairmesh.experiment import Experiment
from fairmesh.problems.prepared import Prepared
from fairmesh.storage.run_folder import CHECKPOINT, Record
from fairmesh.training.observers import Watch
from fairmesh.training.replicas import stacked
from fairmesh.training.result import Result
from fairmesh.training.train import train
from reproduction.lines import Line, curve_of, described, final_numbers, machine
from reproduction.recipes import Row

HELD_OUT = 0.2  # share of the training data on which candidates are judged
_SAID_EVERY = 30.0  # seconds


class Runner:
    """Runs rows on a device, within a limit of memory.

    It keeps checkpoints of the run in progress in `work`, if given. Runs on a GPU take seconds and need none."""

    def __init__(
        self,
        device: str = "cpu",
        *,
        work: Path | None = None,
        memory_gib: float | None = None,
        say: Callable[[str], None] | None = None,
    ):
        self._device, self._work, self._memory, self._say = device, work, memory_gib, say
        self._folders: list[Path] = []  # checkpoints of the group in progress
        self._known: dict[Any, Prepared] = {}  # the last two problems: of a search and of the run that follows it

    def lines(self, group: list[Row], found: dict[str, Any]) -> list[Line]:
        """Tunes and trains rows that run as one batch. `found` holds results of searches that are already known."""
        started = time.perf_counter()
        searches = self._searched([row for row in group if row.label not in found]) | found
        runs = self._sound(group, searches)
        seconds = (time.perf_counter() - started) / len(group)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders.clear()
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
        """Trains every row with the candidate chosen for it.

        If a seed diverges, which shows without a test set, the next best candidate takes its place."""
        rows, runs = list(group), {}
        while rows:
            algorithms = [_with(row.experiment, searches[row.label]["chosen"]) for row in rows]
            result = self._trained(rows[0], rows[0].experiment, algorithms, rows[0].experiment.rounds)
            runs |= {row.label: run for row, run in zip(rows, _by_row(result, len(rows[0].experiment.seeds)))}
            rows = [row for row in rows if runs[row.label].diverged and _passed_over(searches[row.label])]
        return [runs[row.label] for row in group]

    def _searched(self, group: list[Row]) -> dict[str, Any]:
        """Returns, for every row with a search, the candidates with their held-out accuracies, and the best one."""
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
            chosen = _best(tried, list(row.search), ())
            if chosen is None:
                raise BadInput(f"{row.label} ({row.protocol}): every candidate of the search diverged")
            over = {name: list(values) for name, values in row.search.items()}
            found[row.label] = {"over": over, "rounds": rounds, "seeds": len(seeds), "tried": tried, "chosen": chosen}
        return found

    def _trained(self, row: Row, experiment: Experiment, algorithms: list[Algorithm], rounds: int) -> Result:
        settings = to_table(replace(experiment.options, device=self._device, memory_gib=self._memory))
        folder = self._folder(row, experiment, algorithms, rounds)
        return train(
            self._problem(experiment),
            experiment.topology,
            algorithms,
            rounds,
            seeds=experiment.seeds,
            placements=experiment.placements,
            out=folder,
            resume=folder is not None and folder.exists(),
            observers=self._watching(row, rounds),
            **settings | {"on_divergence": "mark"},
        )

    def _folder(self, row: Row, experiment: Experiment, algorithms: list[Algorithm], rounds: int) -> Path | None:
        """Returns the folder of this run's checkpoints, kept until its group is recorded. Deletes one without any."""
        if self._work is None:
            return None
        what = repr((experiment.data, experiment.sampling, experiment.seeds, algorithms, rounds))
        digest = hashlib.sha256(what.encode()).hexdigest()[:12]
        folder = self._work / f"{re.sub(r'[^a-z0-9]+', '-', f'{row.protocol} {row.label}'.lower())}-{digest}"
        if folder.exists() and not any(folder.rglob(CHECKPOINT)):
            shutil.rmtree(folder)
        self._folders.append(folder)
        return folder

    def _watching(self, row: Row, rounds: int) -> list[Watch]:
        if self._say is None:
            return []
        say, said = self._say, [time.monotonic()]

        def watch(now: int, records: list[Record]) -> None:
            if time.monotonic() - said[0] > _SAID_EVERY:
                said[0] = time.monotonic()
                say(f"  {row.label}: round {now} of {rounds}")

        return [Watch(watch)]

    def _problem(self, experiment: Experiment) -> Prepared:
        """Returns the experiment's problem, built once for rows that follow each other."""
        key = experiment.data, experiment.model, experiment.sampling
        while key not in self._known and len(self._known) > 1:
            self._known.pop(next(iter(self._known)))
        if key not in self._known:
            self._known[key] = experiment.problem()
        return self._known[key]


class _Run(NamedTuple):
    """One row's part of a batched run."""

    problem: Prepared
    records: list[Record]
    diverged: list[int]  # seeds


def _by_row(result: Result, seeds: int) -> list[_Run]:
    """Splits a batched run into rows."""
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
    """Replaces the chosen candidate by the next best one. Returns False if there is none."""
    over = search.setdefault("passed_over", [])
    over.append(search["chosen"])
    best = _best(search.get("tried", []), list(search["chosen"]), over)
    search["chosen"] = over.pop(0) if best is None else best
    return best is not None


def _best(tried: Sequence[dict], names: Sequence[str], but: Sequence[dict]) -> dict[str, float] | None:
    """Returns the values of the best candidate that did not diverge and is not in `but`, or None."""
    sound = [one for one in tried if one["worst"] >= 0 and {name: one[name] for name in names} not in but]
    best = max(sound, key=lambda one: (one["worst"], one["mean"]), default=None)
    return None if best is None else {name: best[name] for name in names}


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups rows that differ only in numbers of the algorithm. Rows that take another row's settings come last."""
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.as_row is not None):
        alike = (g for g in groups if _likeness(g[0]) == _likeness(row) and _stackable(g[0], row))
        group = next(alike, None)
        if group is None:
            groups.append([row])
        else:
            group.append(row)
    return groups


def _likeness(row: Row) -> Any:
    """Returns what the rows of one batched run must share, apart from their algorithms."""
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
    """Returns the last record of every replica, or None if it diverged."""
    return [None if r in result.diverged else record for r, record in enumerate(result.final)]


def _tried(row: Row, algorithm: Algorithm, ends: Sequence[Record | None]) -> dict[str, float]:
    """Returns a candidate with its final accuracies averaged over seeds, or -1 if a seed diverged."""
    table = flat_table(to_table(algorithm))
    sound = [end["accuracy"] for end in ends if end is not None]

    def mean(what: str) -> float:
        return round(sum(one[what] for one in sound) / len(ends), 4) if len(sound) == len(ends) else -1.0

    return {name: table[name] for name in row.search} | {"worst": mean("worst_group"), "mean": mean("mean")}
