"""What all trackers have in common: what is written, in which order, and what happens when a library fails.

Libraries are called by a thread of their own, so that a slow disk or a server that is gone never delays a round.
"""

import logging
import math
import queue
import re
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import fairmesh
from fairmesh.config.overrides import flat_table
from fairmesh.config.tables import to_table
from fairmesh.errors import in_a_line, optional
from fairmesh.storage.files import write_atomically
from fairmesh.storage.run_folder import TRACKERS, Record
from fairmesh.training.loop import TrainingState
from fairmesh.training.observers import ObservedRun, Observer
from fairmesh.training.replicas import Replica
from fairmesh.training.result import Result, summary_of, variants_of

Status = Literal["finished", "failed", "interrupted"]

_PATIENCE_S = 60.0  # without progress, after which the end of a run waits no longer for a library
_WAITING_AT_MOST = 10_000  # calls of a library that have not been made yet


@dataclass
class TrackedReplica:
    """One replica, as a tracker writes it: a run of its own in the tracker's library.

    Args:
        name: What tells it from other replicas: the run's name, or its seed and settings, such as "seed 1".
        run: The name of the whole run.
        settings: The settings of this replica, as an experiment file has them.
        key: Its number and seed, from which the library may derive a name of a file.
        id: The library's name of its run, once it is known. Default: None.
        written: The last round that was written. Default: -1.
        handle: What the library needs to write. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> fm.trackers.TrackedReplica("seed 1", "hospitals", {"rounds": 100}, "1").written
        -1
    """

    name: str
    run: str
    settings: dict[str, Any]
    key: str
    id: str | None = None
    written: int = -1
    handle: Any = field(default=None, repr=False)

    @property
    def flat_settings(self) -> dict[str, Any]:
        """Returns the settings with dotted names."""
        return flat_table(self.settings)


class Table(NamedTuple):
    """The final values of all sites.

    Args:
        columns: Their names.
        rows: One row per site.

    Example:
        >>> from fairmesh.trackers.base import Table
        >>> print(Table(["site", "accuracy"], [["north", 0.9]]).markdown())
        | site | accuracy |
        |---|---|
        | north | 0.9 |
    """

    columns: list[str]
    rows: list[list[Any]]

    def markdown(self) -> str:
        """Returns the table as Markdown."""

        def line(cells: Sequence[Any]) -> str:
            shown = ("" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells)
            return f"| {' | '.join(one.replace('|', '/') for one in shown)} |"

        return "\n".join([line(self.columns), f"|{'---|' * len(self.columns)}", *map(line, self.rows)])


class Tracker(Observer):
    """Writes every measurement to a library that people look at runs with. Subclasses call the library.

    Every replica is a run of the library: its settings, a curve of each metric at each site and over all sites, the
    weights lambda, the bytes that were sent, and at the end the sites' values with their intervals. A resumed run
    continues where its tracker was. On a cluster the first process writes.

    A library that raises or that does not answer is reported once, as a warning of the logger `fairmesh`. Nothing more
    is tracked then, and the run goes on.

    Example:
        >>> import fairmesh as fm
        >>> issubclass(fm.trackers.TensorBoard, fm.trackers.Tracker)
        True
    """

    extra: ClassVar[str]  # of pyproject.toml, which installs the library
    report: Callable[[str], None] = staticmethod(logging.getLogger("fairmesh").warning)

    _writer: "_Writer | None" = None
    _replicas: dict[int, TrackedReplica]  # by their number in the whole run
    _sites: Sequence[str]
    _given: dict[int, int]  # the last round of each that was given to the thread
    _folder: Path | None  # for what a resumed run must know

    # What a tracker defines. All but `load` is called in a thread of its own.

    @abstractmethod
    def load(self) -> None:
        """Imports the library."""

    @abstractmethod
    def open(self, replica: TrackedReplica, folder: Path, alone: bool) -> None:
        """Opens the library's run of a replica: the one with its `id`, or a new one, whose `id` it sets.

        Args:
            replica: The replica.
            folder: Where to write, unless the tracker has a place of its own; it may not exist yet.
            alone: Whether it is the only replica.
        """

    @abstractmethod
    def write(self, replica: TrackedReplica, round: int, numbers: Mapping[str, float]) -> None:
        """Writes what was measured after a round, so that it is kept if the process dies."""

    @abstractmethod
    def write_result(self, replica: TrackedReplica, round: int, intervals: Mapping[str, float], table: Table) -> None:
        """Writes the ends of the intervals, and the final values of all sites with them."""

    @abstractmethod
    def close(self, replica: TrackedReplica, status: Status) -> None:
        """Closes the library's run."""

    # As an observer

    def before_run(self) -> None:
        with optional(self.extra):
            self.load()

    def start(self, run: ObservedRun) -> None:
        self.run = run
        if not run.training.network.process_group.is_leader:
            return
        every = run.every_replica
        names = replica_names(every, run.name)
        if run.first_replica == 0:
            self.begin([str(site.name) for site in run.training.problem.sites], run.folder)
        for r, replica in enumerate(run.training.replicas, run.first_replica):
            settings = run.settings | {"algorithm": to_table(replica.algorithm), "seed": replica.seed}
            self.add_replica(r, TrackedReplica(names[r], run.name, _shown(settings), str(r)), len(every) == 1)
        self.add_records(run.records, run.first_replica)

    def after_round(self, round: int, state: TrainingState) -> None:
        if self.run.new_records:
            self.add_records(self.run.new_records, self.run.first_replica)

    def finish(self, error: BaseException | None) -> None:
        if error is not None:
            interrupted = type(error).__name__ in ("Interrupted", "KeyboardInterrupt")
            self.end("interrupted" if interrupted else "failed")

    def after_run(self, result: Result) -> None:
        if self._writer is not None:
            self.end_with(summary_of(result))

    # The same for runs without observers, such as the nodes of a mesh

    def begin(self, sites: Sequence[str], folder: Path | None) -> None:
        """Begins to track a run.

        Args:
            sites: Their names.
            folder: The run's folder; None if it has none.
        """
        self.end("interrupted")  # an earlier run, or generation of a mesh, that was not ended
        self._replicas, self._sites, self._given = {}, list(sites), {}
        self._folder = None if folder is None else folder / TRACKERS
        self._writer = _Writer(type(self).__name__, self.report)

    def add_replica(self, number: int, replica: TrackedReplica, alone: bool = True) -> None:
        """Adds a replica of the run, and continues the library's run of it if there is one.

        Args:
            number: Its number in the whole run, from 0.
            replica: The replica.
            alone: Whether it is the only one. Default: True.
        """
        self._replicas[number] = replica
        self._call(self._open, replica, alone)

    def add_records(self, records: Sequence[Record], first_replica: int = 0) -> None:
        """Writes records, except those that were written before.

        Args:
            records: As a run has them.
            first_replica: The number of the replica that they count as 0. Default: 0.
        """
        for record in records if self._writer is not None else ():
            number, round = first_replica + record["replica"], record["round"]
            if round > self._given.get(number, -1):
                self._given[number] = round
                self._call(self._write, self._replicas[number], round, dict(numbers_of(record, self._sites)))

    def end_with(self, summary: Mapping[str, Any]) -> None:
        """Writes the final values of all sites, and ends.

        Args:
            summary: As summary.json has it.
        """
        for variant in summary["variants"]:
            table, intervals = final_table(summary, variant)
            for number in variant["replicas"]:
                if (replica := self._replicas.get(number)) is not None:
                    self._call(self.write_result, replica, summary["rounds"], intervals, table(number))
        self.end("finished")

    def end(self, status: Status) -> None:
        """Closes the library's runs, and waits until all is written, but not for a library that does not answer.

        Args:
            status: How the run ended.
        """
        if self._writer is None:
            return
        for replica in self._replicas.values():
            self._call(self.close, replica, status)
        self._writer.close()
        self._writer = None

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._writer is not None:
            self._writer.put(function, *arguments)

    def _open(self, replica: TrackedReplica, alone: bool) -> None:
        if (path := self._memory_of(replica)) is not None and path.exists():
            replica.id, written = path.read_text(encoding="utf-8").split("\n")[:2]
            replica.written = int(written)
        self.open(replica, Path(".") if self._folder is None else self._folder, alone)
        self._remember(replica)

    def _write(self, replica: TrackedReplica, round: int, numbers: Mapping[str, float]) -> None:
        if round > replica.written:
            self.write(replica, round, numbers)
            replica.written = round
            self._remember(replica)

    def _memory_of(self, replica: TrackedReplica) -> Path | None:
        """Returns the file that has the library's name of a replica's run, and the last round that was written."""
        return None if self._folder is None else self._folder / f"{self.extra}-{replica.key}.txt"

    def _remember(self, replica: TrackedReplica) -> None:
        if (path := self._memory_of(replica)) is not None:
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, f"{replica.id}\n{replica.written}\n".encode())


class _Writer:
    """A thread that calls a library, one call after another, until one raises."""

    def __init__(self, name: str, report: Callable[[str], None]):
        self._name, self._report = name, report
        self._calls: queue.Queue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.Queue(_WAITING_AT_MOST)
        self._failed, self._made = threading.Event(), 0
        self._thread = threading.Thread(target=self._work, name=f"fairmesh {name}", daemon=True)
        self._thread.start()

    def put(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._failed.is_set():
            return
        try:
            self._calls.put_nowait((function, arguments))
        except queue.Full:
            self._fail(f"it is {_WAITING_AT_MOST} measurements behind")

    def close(self) -> None:
        """Waits for the calls that remain, as long as the library makes progress."""
        made = -1
        if not self._failed.is_set():
            self._calls.put(None)
        while not self._failed.is_set() and self._thread.is_alive() and made < self._made:
            made = self._made
            self._thread.join(_PATIENCE_S)
            if made == self._made and self._thread.is_alive():
                self._fail(f"it has not answered for {_PATIENCE_S:g} seconds")

    def _work(self) -> None:
        while not self._failed.is_set():
            call = self._calls.get()
            if call is None:
                return
            function, arguments = call
            try:
                function(*arguments)
            except Exception as error:
                self._fail(in_a_line(error))
            self._made += 1

    def _fail(self, reason: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            self._report(f"{self._name} failed, so nothing more is tracked there, and the run goes on: {reason}")


def replica_names(replicas: Sequence[Replica], run: str) -> list[str]:
    """Returns a name for each replica: the run's, or what tells replicas apart."""
    if len(replicas) == 1:
        return [run]
    varying = {
        "seed": len({one.seed for one in replicas}) > 1,
        "split": len({one.split for one in replicas}) > 1,
    }
    names = []
    changes = {r: variant["changes"] for variant in variants_of(replicas) for r in variant["replicas"]}
    for r, one in enumerate(replicas):
        parts = [f"{key}={value}" for key, value in changes[r].items()]
        parts += [f"{what} {getattr(one, what)}" for what, varies in varying.items() if varies]
        names.append(", ".join(parts))
    if len(set(names)) < len(names):  # replicas that differ in their placement only
        names = [f"{name}, replica {r}".removeprefix(", ") for r, name in enumerate(names)]
    return names


def _shown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of one replica, without what says how many there are and who watches."""
    left_out = ("seeds", "sweep", "splits", "placements", "observers")
    return {"fairmesh": fairmesh.__version__} | {key: v for key, v in settings.items() if key not in left_out}


def numbers_of(record: Mapping[str, Any], sites: Sequence[str], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields all numbers of a record under the names that trackers show, without those that are not defined.

    Args:
        record: One replica's measurements after some round.
        sites: The names of the sites.
        prefix: What the names begin with. Default: "".
    """
    for key, value in record.items():
        if key in ("round", "replica", "seed", "split"):
            continue
        if key == "lambda":
            found = {f"lambda/{site}": weight for site, weight in zip(sites, value)}
        elif isinstance(value, Mapping) and "sites" in value:
            found = {f"{key}/{what}": value[what] for what in ("worst", "mean", "best", "gap")}
            found |= {f"{key}/site/{site}": number for site, number in zip(sites, value["sites"])}
            if 1 < len(value["groups"]) < len(sites):
                found |= {f"{key}/group/{group}": number for group, number in value["groups"].items()}
        elif isinstance(value, Mapping):
            yield from numbers_of(value, sites, f"{prefix}{key}/")
            continue
        else:
            found = {key: value}
        for name, number in found.items():
            if isinstance(number, int | float) and math.isfinite(number):
                yield prefix + name, float(number)


def final_table(
    summary: Mapping[str, Any], variant: Mapping[str, Any]
) -> tuple[Callable[[int], Table], dict[str, float]]:
    """Returns the final values of all sites, as a function of the replica's number, and the ends of their intervals,
    which are those of all replicas of a variant.

    Args:
        summary: As summary.json has it.
        variant: One of its variants.
    """
    metric, evidence = summary["metric"], variant.get("evidence")
    rows_of = {row["name"]: row for row in evidence["sites"]} if evidence else {}
    intervals: dict[str, float] = {}
    for name, row in [*rows_of.items(), *((what, evidence[what]) for what in ("worst", "mean") if evidence)]:
        where = f"{metric}/site/{name}" if name in rows_of else f"{metric}/{name}"
        ends = {f"interval/{where}/{end}": value for end, value in zip(("low", "high"), row["interval"])}
        intervals |= {key: value for key, value in ends.items() if value is not None and math.isfinite(value)}

    def table(number: int) -> Table:
        final = next((one for one in summary["final"] if one["replica"] == number), summary["final"][0])
        weights = final.get("lambda")
        percent = "" if not evidence else f"{100 * evidence['level']:g} %"
        columns = ["site", metric, *([f"{percent} from", f"{percent} to", "test rows"] if evidence else [])]
        columns += ["lambda"] if weights else []
        rows = []
        for i, site in enumerate(map(str, summary["sites"])):
            row: list[Any] = [site, final[metric]["sites"][i]]
            if evidence:
                row += [*rows_of[site]["interval"], rows_of[site]["n"]] if site in rows_of else [None, None, None]
            rows.append(row + ([weights[i]] if weights else []))
        return Table(columns, rows)

    return table, intervals


def file_name(text: str) -> str:
    """Returns a text as the name of a file."""
    return re.sub(r"[^\w.=+-]+", "-", text).strip("-") or "run"
