"""Writes status.json of a run in progress, once a second at most, for `fairmesh watch` and `fairmesh status`. Nothing
reads it to compute, and a run that has finished removes it."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fairmesh
from fairmesh.config.registry import registered_name
from fairmesh.errors import BadInput, CheckpointError, Diverged, Interrupted, LostProcess, in_a_line
from fairmesh.evidence.intervals import Share
from fairmesh.networks.memory import SingleProcess
from fairmesh.problems.prepared import Prepared
from fairmesh.storage.files import write_atomically
from fairmesh.storage.occupied import STATUS
from fairmesh.storage.run_folder import Record, RunFolder
from fairmesh.storage.run_status import DIVERGED, FAILED, FORMAT, RUNNING, STOPPED, locked, machine
from fairmesh.storage.strict_json import as_json
from fairmesh.topology.mixing import union_of
from fairmesh.training.loop import TrainingState
from fairmesh.training.observers import Observer
from fairmesh.training.options import Options
from fairmesh.training.plan import Plan
from fairmesh.training.result import Result, variants_of
from fairmesh.training.rounds_per_second import Pace
from fairmesh.training.summary import by_own_models

_EVERY_S = 1.0
_LINES = 20  # of what the run says
_PREPARING, _SUMMING_UP = "preparing", "summing up"

Announce = Callable[[str], None] | None


class RunStatus(Observer):
    """Tells how far a run is. As an observer of the run it is told of rounds; work outside of them calls `phase`. This
    one tells nobody: `telling` gives one that writes."""

    def phase(self, what: str, done: int = 0, of: int = 0) -> None:
        """Notes work outside the rounds.

        Args:
            what: What is done, in words.
            done: How much of it is done. Default: 0.
            of: Of how much; 0 if that is not known. Default: 0.
        """

    def heard(self, announce: Announce) -> Announce:
        """Returns a function that announces as this one does, and keeps the last lines."""
        return announce


class _Written(RunStatus):
    """Writes what it is told to a run's folder."""

    def __init__(self, folder: Path, plan: Plan, is_locked: bool, result: Result | None = None, what: str = _PREPARING):
        self._path, self._pace = folder / STATUS, Pace()
        self._before, self._begun = self._path.read_bytes() if self._path.exists() else b"", result is not None
        facts = {"run": FORMAT, "version": fairmesh.__version__, "locked": is_locked, "machine": machine()}
        self._facts = as_json(facts | {"began": time.time()} | _facts(plan))[:-1]  # once, since it may be long
        self._plan, self._rows, self._records = plan, _rows(plan.problem)[0], result.final if result else list[Record]()
        self._known: dict[str, Any] = {"round": -1, "sites": []}
        self._round, self._phase, self._next = plan.rounds if result else 0, {"name": what, "done": 0, "of": 0}, 0.0
        self._lines: deque[dict[str, Any]] = deque(maxlen=_LINES)
        self._write(RUNNING)

    def phase(self, what: str, done: int = 0, of: int = 0) -> None:
        if time.monotonic() >= self._next or what != (self._phase or {}).get("name"):
            self._phase = {"name": what, "done": done, "of": of}
            self._write(RUNNING)

    def heard(self, announce: Announce) -> Announce:
        if announce is None:
            return None

        def announced(text: str) -> None:
            self._lines.append({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "text": text})
            announce(text)

        return announced

    def after_round(self, round: int, state: TrainingState) -> None:
        self._begun, self._round = True, round
        if self.run.new_records:
            self._records = self.run.new_records
        if time.monotonic() >= self._next or self._phase or self.run.is_last:
            self._phase = {"name": _SUMMING_UP, "done": 0, "of": 0} if self.run.is_last else None
            self._write(RUNNING)

    def end(self, error: BaseException | None) -> None:
        """Says how the run has ended. One that has its result says it in its summary; one that was refused before its
        first round leaves what was there."""
        refused = isinstance(error, BadInput | CheckpointError) and not self._begun
        if refused and self._before:
            with suppress(OSError):
                self._path.write_bytes(self._before)
        elif refused or error is None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
        elif isinstance(error, Diverged):
            self._write(DIVERGED, str(error))
        elif isinstance(error, Interrupted | LostProcess | KeyboardInterrupt | SystemExit):
            self._write(STOPPED, str(error))
        else:
            self._write(FAILED, in_a_line(error))

    def _measured(self) -> dict[str, Any]:
        """Returns the sites' accuracies in the last measured round with their intervals, since they are shares of
        independent rows. Other metrics, and means over replicas, have no intervals before the run ends."""
        metric, records = self._plan.problem.primary, self._records
        unknown = metric != "accuracy" or len(self._plan.replicas) > 1 or not any(self._rows) or not records
        if not unknown and records[0]["round"] != self._known["round"]:
            values = by_own_models(records[0])[metric]["sites"]
            sites = [(value, *Share(value, n).interval()) if n else None for value, n in zip(values, self._rows)]
            self._known = {"round": records[0]["round"], "sites": sites}
        return self._known

    def _write(self, state: str, reason: str = "") -> None:
        self._next = time.monotonic() + _EVERY_S
        self._pace.note(self._round, paused=bool(self._phase))
        news = {
            "time": time.time(),
            "state": state,
            "reason": reason,
            "round": self._round,
            "rounds_per_s": self._pace.rounds_per_s(),
            "phase": self._phase,
            "measured": self._measured(),
            "log": list(self._lines),
        }
        with suppress(BadInput):  # a full disk is reported by what must be written
            write_atomically(self._path, f"{self._facts}, {as_json(news)[1:]}".encode(), durable=False)


@contextmanager
def telling(folder: RunFolder, plan: Plan) -> Iterator[RunStatus]:
    """Yields what tells how far a run is, while the `with` block lasts; nobody, if another of its processes does. The
    folder is locked meanwhile."""
    if not plan.process_group.is_leader:
        yield RunStatus()
        return
    with _written(folder.path, plan) as status:
        yield status


@contextmanager
def telling_after(folder: str | os.PathLike | None, result: Result, what: str) -> Iterator[RunStatus]:
    """Yields what tells of work that belongs to a run and comes after its result, such as its references. If the work
    ends early, the folder says so until the run is resumed.

    Args:
        folder: The run's folder; None to tell nobody.
        result: The run's result.
        what: What is done, in words.
    """
    if folder is None or result.topology is None:
        yield RunStatus()
        return
    cycle = result.topology.build(result.problem.n)
    plan = Plan(
        result.problem, result.topology, cycle, result.replicas, result.rounds, Options(), SingleProcess(), None
    )
    with _written(Path(folder), plan, result, what) as status:
        yield status


@contextmanager
def _written(folder: Path, plan: Plan, *after: Any) -> Iterator[_Written]:
    """Locks a folder and yields what writes into it how far a run is, which says at the end how it has ended."""
    with locked(folder) as is_locked:
        status = _Written(folder, plan, is_locked, *after)
        try:
            yield status
        except BaseException as error:
            status.end(error)
            raise
        status.end(None)


def _facts(plan: Plan) -> dict[str, Any]:
    """Returns what does not change during a run."""
    problem, algorithm = plan.problem, plan.replicas[0].algorithm
    rows, judged_on = _rows(problem)
    unit, privacy = problem.unit(), problem.privacy
    return {
        "algorithm": registered_name(algorithm),
        "rounds": plan.rounds,
        "metric": problem.primary,
        "share": unit.share,
        "unit": unit.unit,
        "higher_is_better": problem.higher_is_better(problem.primary),
        "judged_on": judged_on,
        "sites": [str(site.name) for site in problem.sites],
        "rows": rows,
        "prior": problem.prior_of_sites.tolist(),
        "server": algorithm.needs_server,
        "edges": [] if algorithm.needs_server else _edges(plan),
        "replicas": len(plan.replicas),
        "variants": variants_of(plan.replicas),
        "privacy": privacy
        and {"budget": privacy.epsilon, "delta": privacy.delta, "unit": plan.private.unit if plan.private else ""},
    }


def _rows(problem: Prepared) -> tuple[list[int | None], str]:
    """Returns how many independent rows judge each site, and what they are: "test", or "train" if no site has test
    rows. None for a site whose rows are at another process, or belong to units such as patients."""
    split = problem.of_split(0)
    judged_on = "test" if split.held_out("test")[1] else "train"
    sets, of_site = split.held_out(judged_on)
    if any(samples.units is not None for samples in sets):
        return [None] * problem.n, judged_on
    return [None if k < 0 else len(sets[k]) for k in of_site] or [None] * problem.n, judged_on


def _edges(plan: Plan) -> list[list[int]]:
    """Returns which sites talk to each other in some round; nothing if that differs between replicas."""
    placements = {replica.placement for replica in plan.replicas}
    if len(placements) > 1:
        return []
    (site_of,) = placements
    return [[site_of[int(i)], site_of[int(j)]] for i, j in zip(*union_of(plan.cycle).matrix.nonzero()) if i < j]
