"""Runs the missing rows of recipes, group by group, in this process or in several.

Every line is written as soon as it is known, so an interrupted command resumes where it stopped."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fairmesh.config.registry import registered_name
from fairmesh.data.datasets import COOS7, Data, Fewer
from fairmesh.data.datasets.download import folder_of
from fairmesh.data.datasets.sources import SOURCES, is_whole, places
from fairmesh.errors import BadInput, FairmeshError
from fairmesh.problems.models import Logistic, PaperCNN
from reproduction.batched import Runner, grouped
from reproduction.lines import Line, lines_of, machine, record, was_run_as
from reproduction.recipes import RECIPES, Row, rows_of
from reproduction.workers import workers

Done = dict[tuple[str, str], Line]  # (protocol, label) -> recorded line


def reproduce(
    recipes: Sequence[str],
    results: Path,
    device: str = "cpu",
    *,
    jobs: int = 1,
    work: Path | None = None,
    change: Callable[[Row], Row] = lambda row: row,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, str]:
    """Runs the missing rows of recipes. A row that fails does not stop the others.

    Args:
        recipes: names of recipes.
        results: folder of the result files.
        device: "cpu" or "cuda".
        jobs: number of processes.
        work: folder for checkpoints of the runs in progress.
        change: applied to every row before it runs.
        say: called with messages on progress.

    Returns:
        The rows left out because their data is missing, each with the reason.

    Raises:
        FairmeshError: the first error of a row, after the other rows are done."""
    rows = [change(row) for recipe in recipes for row in rows_of(recipe)]
    known = [line for recipe in {*RECIPES, *recipes} for line in lines_of(results, recipe)]
    done = {_key(line): line for line in known}
    missing = _missing(rows, done)
    reasons = {data: _absence(data) for data in dict.fromkeys(row.experiment.data for row in missing)}
    groups = grouped([row for row in missing if reasons[row.experiment.data] is None])
    clock = _Clock(groups, say)
    try:
        _carry_out(groups, done, results, device, jobs, work, clock, say)
    finally:
        if clock.number:
            record(results, clock.sitting(device, jobs))
    return {row.label: str(reason) for row in missing if (reason := reasons[row.experiment.data]) is not None}


def _key(line: Line) -> tuple[str, str]:
    return line["protocol"], f"{line['recipe']}: {line['row']}"


def _missing(rows: Sequence[Row], done: Done) -> list[Row]:
    """Returns rows that are not recorded with their present settings, and rows that take their settings from these."""
    missing = {(row.protocol, row.label) for row in rows if _differs(row, done)}
    return [row for row in rows if {(row.protocol, row.label), (row.protocol, row.as_row)} & missing]


def _differs(row: Row, done: Done) -> bool:
    line, like = done.get((row.protocol, row.label)), done.get((row.protocol, str(row.as_row)))
    if line is None or not was_run_as(line, row):
        return True
    return like is not None and like["search"]["chosen"] != line["search"]["chosen"]


def _absence(data: Data) -> str | None:
    """Returns why a dataset is missing, or None. Downloads official files now, before several processes need them."""
    data = _whole(data)
    source = SOURCES.get(registered_name(data))
    if isinstance(data, COOS7) and source and not any(is_whole(source, place) for place in places(source, data.folder)):
        files = " and ".join(file.name for file in source.files)
        return f"COOS7 has to be supplied by hand; put {files} into {places(source, data.folder)[0]}"
    try:
        if source:
            folder_of(source, getattr(data, "folder", None))
    except BadInput as error:
        return str(error)
    return None


def _whole(data: Data) -> Data:
    return data.data if isinstance(data, Fewer) else data


def _carry_out(
    groups: list[list[Row]],
    done: Done,
    results: Path,
    device: str,
    jobs: int,
    work: Path | None,
    clock: "_Clock",
    say: Callable[[str], None],
) -> None:
    failed: list[FairmeshError] = []
    for dependent in (False, True):  # rows that take another row's settings run after it
        wave = [group for group in groups if (group[0].as_row is not None) == dependent]
        wave = (
            sorted(wave, key=_cost, reverse=True) if jobs > 1 else wave
        )  # the longest first, so that all processes end together
        tasks: list[Task] = []
        for group in wave:
            try:
                tasks.append((group, {row.label: _found_for(row, done) for row in group if row.as_row}))
            except BadInput as error:
                failed.append(error)
        given = (device, work, None, say) if jobs == 1 else (device, work, _share_of_memory(device, jobs), None)
        with workers(_lines, jobs, _begin, *given) as carried_out:
            for (group, _), outcome in carried_out(tasks):
                if isinstance(outcome, FairmeshError):
                    say(f"{group[0].label}, {group[0].protocol} protocol: {outcome}")
                    failed.append(outcome)
                    continue
                for line in outcome:
                    done[_key(line)] = line
                    record(results, line)
                clock.passed(group)
    if failed:
        raise failed[0]


def _found_for(row: Row, done: Done) -> dict[str, Any]:
    like = done.get((row.protocol, str(row.as_row)))
    if like is None:
        raise BadInput(f"{row.label} takes its settings from '{row.as_row}'; run that recipe first or together with it")
    return {"as": row.as_row, "chosen": like["search"]["chosen"]}


Task = tuple[list[Row], dict[str, Any]]  # rows that run as one batch; searches already known for them


def _share_of_memory(device: str, jobs: int) -> float | None:
    if not device.startswith("cuda"):
        return None
    return 0.8 * torch.cuda.mem_get_info(torch.device(device))[0] / 2**30 / jobs


_of_this_process: list[Runner] = []  # the worker's runner


def _begin(device: str, work: Path | None, memory_gib: float | None, say: Callable[[str], None] | None) -> None:
    _of_this_process[:] = [Runner(device, work=work, memory_gib=memory_gib, say=say)]


def _lines(task: Task) -> list[Line]:
    return _of_this_process[0].lines(*task)


class _Clock:
    """Reports progress and estimates the time left."""

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
        """Returns how many runs were made in this session, and how long they took."""
        minutes = (time.perf_counter() - self._started) / 60
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        done = {"runs": self.number, "minutes": round(minutes, 2), "jobs": jobs, "machine": machine(device)}
        return {"recipe": "sittings", "row": when, "protocol": "", **done}


def _cost(group: Sequence[Row]) -> float:
    """Returns a rough cost of a group, to order groups and to estimate the time left."""
    e = group[0].experiment
    nodes = getattr(getattr(_whole(e.data), "partition", None), "nodes", 10)
    a_node = 1.0 if isinstance(e.model, Logistic) else 40.0 if isinstance(e.model, PaperCNN) else 2.0
    searched = sum(math.prod(map(len, row.search.values())) for row in group if row.search) * group[0].search_seeds
    rounds = e.rounds * len(group) * len(e.seeds) + (group[0].search_rounds or e.rounds) * searched
    steps = rounds * getattr(e.algorithm, "local_steps", 1)
    return a_node * (nodes if isinstance(nodes, int) else 10) * steps + 2e6
