"""Follows the metrics.jsonl of a run that is being written: reads only what is new, and keeps a bounded number of
points, however many rounds are measured."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairmesh.storage.occupied import METRICS
from fairmesh.watch.view import Curve, Curves

POINTS = 400  # of a curve at most
SITES = 600  # whose curves are kept at most, over all variants; of more, only those of the only variant
_HEAD = re.compile(rb'^\{"round": (\d+), ')  # with which a record begins
_TAIL = 1 << 12  # bytes before the place where reading goes on, by which another file is told from a longer one

Number = float | None


class Followed:
    """The lines that are added to a file. It says when the file is another one than before."""

    def __init__(self, path: Path):
        self._path = path
        self._offset, self._tail, self._file = 0, b"", (0, 0)

    def lines(self, begin_again: Callable[[], None]) -> Iterator[bytes]:
        """Yields the whole lines that are new; a last one that is still being written comes later.

        Args:
            begin_again: Is called before the first line if the file has been replaced.
        """
        try:
            with open(self._path, "rb") as file:
                if not self._goes_on(file):
                    self._offset, self._tail = 0, b""
                    begin_again()
                state = os.fstat(file.fileno())
                self._file = state.st_dev, state.st_ino
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self._tail = (self._tail + line)[-_TAIL:] if len(line) < _TAIL else line[-_TAIL:]
                    yield line
        except OSError:  # not there yet, or moved away
            return

    def _goes_on(self, file: Any) -> bool:
        """Returns whether a file begins with what was read before."""
        state = os.fstat(file.fileno())
        if not self._offset:
            return not any(self._file) or self._file == (state.st_dev, state.st_ino)
        if state.st_size < self._offset:
            return False
        file.seek(self._offset - len(self._tail))
        return file.read(len(self._tail)) == self._tail


@dataclass
class Point:
    """What was measured after a round, of every variant: the mean over its replicas, and the lowest and highest."""

    round: int
    worst: tuple[tuple[Number, Number, Number], ...]
    mean: tuple[tuple[Number, Number, Number], ...]
    sites: tuple[tuple[tuple[Number, Number, Number], ...], ...] = ()  # of each variant, if they are not too many


@dataclass
class Thinned:
    """Points of some measured rounds, at equal distances: every one until there are too many, then every second, ..."""

    stride: int = 1
    seen: int = 0  # measured rounds
    points: list[Point] = field(default_factory=list)

    @property
    def wants_next(self) -> bool:
        """Returns whether the next measured round is one to keep."""
        return self.seen % self.stride == 0

    def add(self, point: Point | None) -> None:
        """Adds the next measured round; None if it is not wanted."""
        if point is not None and self.wants_next:
            self.points.append(point)
            if len(self.points) >= POINTS:
                self.points, self.stride = self.points[::2], 2 * self.stride
        self.seen += 1


class Records:
    """The records of a run, as far as they are shown.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path):
        self._followed = Followed(folder / METRICS)
        self._variants: list[list[int]] = []
        self._metric = ""
        self._begin_again()

    def _begin_again(self) -> None:
        self._thinned = Thinned()
        self._round, self._lines = -1, list[bytes]()  # of the round that is being read
        self.newest: list[dict[str, Any]] = []  # the records of the last round
        self._of_variants: list[Curves] = []

    def read(self, metric: str, variants: Sequence[Sequence[int]]) -> None:
        """Reads what is new.

        Args:
            metric: What sites are judged by; "" for what the records begin with.
            variants: The replicas of each variant.
        """
        known = [list(replicas) for replicas in variants]
        if (metric, known) != (self._metric, self._variants) and (self._metric or self._variants):
            self._followed = Followed(self._followed._path)
            self._begin_again()
        self._metric, self._variants = metric, known
        before = self._thinned.seen, self._round, len(self._lines)
        for line in self._followed.lines(self._begin_again):
            self._take(line)
        if (self._thinned.seen, self._round, len(self._lines)) != before or not self.curves.rounds:
            self._renew()

    def _take(self, line: bytes) -> None:
        """Takes a line. Those of a round that is not shown are not parsed: of a long run, nearly all."""
        head = _HEAD.match(line)
        done = int(head[1]) if head else _parsed(line).get("round", self._round)
        if done != self._round and self._lines:
            self._thinned.add(self._point(self._records()) if self._thinned.wants_next else None)
            self._lines = []
        self._round = done
        self._lines.append(line)

    def _records(self) -> list[dict[str, Any]]:
        records = [_parsed(line) for line in self._lines]
        return [record | record.get("own_models", {}) for record in records if record]

    def _renew(self) -> None:
        """Makes the curves anew, with the last round."""
        newest = self._records()
        self.newest = newest or self.newest
        last = self._point(newest) if newest else None
        points = [*self._thinned.points, *([last] if last is not None else [])]
        rounds = tuple(point.round for point in points)
        self._of_variants = [
            Curves(
                rounds,
                _curve([p.worst[k] for p in points]),
                _curve([p.mean[k] for p in points]),
                _of_sites([p.sites[k] if k < len(p.sites) else () for p in points]),
            )
            for k in range(len(self._variants))
        ]

    def _point(self, records: Sequence[Mapping[str, Any]]) -> Point | None:
        """Returns the point of a measured round; None if its records are not what this version writes."""
        tables = {r.get("replica", 0): r.get(self._metric) for r in records}
        tables = {r: table for r, table in tables.items() if isinstance(table, dict)}
        if not tables:
            return None
        worst, mean = (
            tuple(_over([tables[r].get(what) for r in replicas if r in tables]) for replicas in self._variants)
            for what in ("worst", "mean")
        )
        known = {r: table["sites"] for r, table in tables.items() if isinstance(table.get("sites"), list)}
        sites: tuple[tuple[tuple[Number, Number, Number], ...], ...] = ()
        if len(self._variants) == 1 or len(self._variants) * max(map(len, known.values()), default=0) <= SITES:
            of_variants = ([known[r] for r in replicas if r in known] for replicas in self._variants)
            sites = tuple(tuple(map(_over, zip(*of_sites))) for of_sites in of_variants)
        return Point(int(records[0]["round"]), worst, mean, sites)

    @property
    def curves(self) -> Curves:
        """Returns the curves of the run, or of the first variant of a sweep."""
        return self._of_variants[0] if self._of_variants else Curves()

    @property
    def of_variants(self) -> list[Curves]:
        """Returns the curves of every variant; without the sites if they are too many."""
        return self._of_variants

    def values(self, what: str, replicas: Sequence[int], metric: str = "") -> list[Any]:
        """Returns an entry of the newest records of some replicas: of a metric's table, or of the record itself."""
        found = [record for record in self.newest if record.get("replica", 0) in replicas]
        tables = [record.get(metric) or {} for record in found] if metric else found
        return [table[what] for table in tables if isinstance(table, dict) and table.get(what) is not None]


_NOTHING: tuple[Number, Number, Number] = (None, None, None)


def _of_sites(points: Sequence[Sequence[tuple[Number, Number, Number]]]) -> tuple[Curve, ...]:
    """Returns the curve of each site that the last point has."""
    sites = len(points[-1]) if points else 0
    return tuple(_curve([point[i] if i < len(point) else _NOTHING for point in points]) for i in range(sites))


def mean_of(values: Sequence[Any]) -> Number:
    """Returns the mean of those that are numbers; None if there is none."""
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return sum(numbers) / len(numbers) if numbers else None


def _over(values: Sequence[Any]) -> tuple[Number, Number, Number]:
    """Returns the mean, the lowest and the highest of values over replicas."""
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return (sum(numbers) / len(numbers), min(numbers), max(numbers)) if numbers else _NOTHING


def _curve(points: Sequence[tuple[Number, Number, Number]]) -> Curve:
    values, low, high = (tuple(column) for column in zip(*points)) if points else ((), (), ())
    return Curve(values) if low == high else Curve(values, low, high)


def _parsed(line: bytes) -> dict[str, Any]:
    """Returns a line as a table; {} if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) and isinstance(record.get("round"), int) else {}
