"""What all trackers have in common: what is written, in which order, and what happens when a library fails."""

import json
import logging
import math
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from fairmesh.training.result import Result, variants_of
from fairmesh.training.summary import summary_of

Status = Literal["finished", "failed", "interrupted"]


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


class FinalTable(NamedTuple):
    """The final values of all sites.

    Args:
        columns: Their names.
        rows: One row per site.

    Example:
        >>> from fairmesh.trackers import FinalTable
        >>> print(FinalTable(["site", "accuracy"], [["north", 0.9]]).markdown())
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

    A library that raises is reported once, as a warning of the logger `fairmesh`. Nothing more is tracked then, and the
    run goes on.

    Example:
        >>> import fairmesh as fm
        >>> issubclass(fm.trackers.TensorBoard, fm.trackers.Tracker)
        True
    """

    extra: ClassVar[str]  # of pyproject.toml, which installs the library
    report: Callable[[str], None] = staticmethod(logging.getLogger("fairmesh").warning)

    variables: ClassVar[Mapping[str, str]] = {}  # of the environment, while the library is imported or called

    _tracking: bool = False  # while there is a run, and the library has not failed
    _replicas: dict[int, TrackedReplica]  # by their number
    _memory: dict[str, tuple[str | None, int]]  # for a resumed run: the id and the last round of each replica, by key
    _sites: Sequence[str]
    _folder: Path | None  # the run's folder for what trackers write

    # What a tracker defines.

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
    def write_result(
        self, replica: TrackedReplica, round: int, intervals: Mapping[str, float], table: FinalTable
    ) -> None:
        """Writes the ends of the intervals, and the final values of all sites with them."""

    @abstractmethod
    def close(self, replica: TrackedReplica, status: Status) -> None:
        """Closes the library's run."""

    # As an observer

    def before_run(self) -> None:
        with optional(self.extra), environment(self.variables):
            self.load()

    def start(self, run: ObservedRun) -> None:
        self.run = run
        if not run.training.network.process_group.is_leader:
            return
        replicas = run.training.replicas
        names = replica_names(replicas, run.name)
        self.begin([str(site.name) for site in run.training.problem.sites], run.folder)
        for r, replica in enumerate(replicas):
            settings = run.settings | {"algorithm": to_table(replica.algorithm), "seed": replica.seed}
            self.add_replica(r, TrackedReplica(names[r], run.name, _shown(settings), str(r)), len(replicas) == 1)
        self.add_records(run.records)

    def after_round(self, round: int, state: TrainingState) -> None:
        if self.run.new_records:
            self.add_records(self.run.new_records)

    def finish(self, error: BaseException | None) -> None:
        if error:
            interrupted = type(error).__name__ in ("Interrupted", "KeyboardInterrupt")
            self.end("interrupted" if interrupted else "failed")

    def after_run(self, result: Result) -> None:
        if self._tracking:
            self.end_with(summary_of(result))

    # The same for runs without observers, such as the nodes of a mesh

    def begin(self, sites: Sequence[str], folder: Path | None) -> None:
        """Begins to track a run.

        Args:
            sites: Their names.
            folder: The run's folder; None if it has none.
        """
        self.end("interrupted")  # an earlier run, or generation of a mesh, that was not ended
        self._replicas, self._memory, self._sites = {}, {}, list(sites)
        self._folder = folder and folder / TRACKERS
        if folder and (folder / TRACKERS / f"{self.extra}.json").exists():
            self._memory = json.loads((folder / TRACKERS / f"{self.extra}.json").read_text(encoding="utf-8"))
        self._tracking = True

    def add_replica(self, number: int, replica: TrackedReplica, alone: bool = True) -> None:
        """Adds a replica of the run, and continues the library's run of it if there is one.

        Args:
            number: Its number, from 0.
            replica: The replica.
            alone: Whether it is the only one. Default: True.
        """
        self._replicas[number] = replica
        self._call(self._open, replica, alone)

    def add_records(self, records: Sequence[Record]) -> None:
        """Writes records, except those that were written before.

        Args:
            records: As a run has them.
        """
        for record in records if self._tracking else ():
            numbers = dict(numbers_of(record, self._sites))
            self._call(self._write, self._replicas[record["replica"]], record["round"], numbers)

    def end_with(self, summary: Mapping[str, Any]) -> None:
        """Writes the final values of all sites, and ends.

        Args:
            summary: As summary.json has it.
        """
        for variant in summary["variants"]:
            for number in self._replicas.keys() & set(variant["replicas"]):
                table, intervals = final_table(summary, variant, number)
                self._call(self.write_result, self._replicas[number], summary["rounds"], intervals, table)
        self.end("finished")

    def end(self, status: Status) -> None:
        """Closes the library's runs.

        Args:
            status: How the run ended.
        """
        for replica in self._replicas.values() if self._tracking else ():
            self._call(self.close, replica, status)
        self._tracking = False

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls the library, unless it has failed before: what only informs must not end a run."""
        if not self._tracking:
            return
        try:
            with environment(self.variables):
                function(*arguments)
        except Exception as error:
            self._tracking, name = False, type(self).__name__
            self.report(f"{name} failed, so nothing more is tracked there, and the run goes on: {in_a_line(error)}")

    def _open(self, replica: TrackedReplica, alone: bool) -> None:
        replica.id, replica.written = self._memory.get(replica.key, (None, -1))
        self.open(replica, self._folder or Path("."), alone)
        self._remember(replica)

    def _write(self, replica: TrackedReplica, round: int, numbers: Mapping[str, float]) -> None:
        if round > replica.written:
            self.write(replica, round, numbers)
            replica.written = round
            self._remember(replica)

    def _remember(self, replica: TrackedReplica) -> None:
        self._memory[replica.key] = replica.id, replica.written
        if self._folder:
            self._folder.mkdir(exist_ok=True)
            write_atomically(self._folder / f"{self.extra}.json", json.dumps(self._memory).encode())


def replica_names(replicas: Sequence[Replica], run: str) -> list[str]:
    """Returns a name for each replica: the run's, or what tells replicas apart."""
    if len(replicas) == 1:
        return [run]
    varying = [key for key in ("seed", "split") if len({getattr(replica, key) for replica in replicas}) > 1]
    names = []
    changes = {r: variant["changes"] for variant in variants_of(replicas) for r in variant["replicas"]}
    for r, replica in enumerate(replicas):
        parts = [f"{key}={value}" for key, value in changes[r].items()]
        names.append(", ".join(parts + [f"{key} {getattr(replica, key)}" for key in varying]))
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
    summary: Mapping[str, Any], variant: Mapping[str, Any], number: int
) -> tuple[FinalTable, dict[str, float]]:
    """Returns the final values of all sites, and the ends of their intervals, which are those of all replicas of a
    variant.

    Args:
        summary: As summary.json has it.
        variant: One of its variants.
        number: The number of the replica.
    """
    metric, evidence = summary["metric"], variant.get("evidence", {})
    of_sites = {row["name"]: row for row in evidence.get("sites", ())}
    of_all = {f"{metric}/{what}": evidence[what] for what in ("worst", "mean") if evidence}
    intervals: dict[str, float] = {}
    for where, row in ({f"{metric}/site/{name}": row for name, row in of_sites.items()} | of_all).items():
        ends = zip(("low", "high"), row["interval"])
        intervals |= {f"interval/{where}/{end}": x for end, x in ends if x is not None and math.isfinite(x)}
    final = next((record for record in summary["final"] if record["replica"] == number), summary["final"][0])
    columns: dict[str, Sequence[Any]] = {"site": list(map(str, summary["sites"])), metric: final[metric]["sites"]}
    if evidence:
        nothing = {"interval": (None, None), "n": None}
        rows = [of_sites.get(name, nothing) for name in columns["site"]]
        low, high = zip(*(row["interval"] for row in rows))
        share = f"{100 * evidence['level']:g} %"
        columns |= {f"{share} from": low, f"{share} to": high, "test rows": [row["n"] for row in rows]}
        if any("units" in row for row in rows):
            columns["test units"] = [row.get("units") for row in rows]
    if "lambda" in final:
        columns["lambda"] = final["lambda"]
    return FinalTable(list(columns), list(map(list, zip(*columns.values())))), intervals


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of the environment for a while."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


def file_name(text: str) -> str:
    """Returns a text as the name of a file."""
    return re.sub(r"[^\w.=+-]+", "-", text).strip("-") or "run"
