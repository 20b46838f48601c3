"""Observers: measuring, recording, checkpoints, divergence, stopping, progress.

A run calls its observers after every round with the number of rounds done and the state.
Simulations, ranks of a cluster and nodes between organisations use this one loop and differ only in their observers.
"""

import csv
import signal
import threading
import time
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fairmesh.config.tables import register
from fairmesh.errors import BadInput, Diverged, Interrupted, TrainerFailed, nearest
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.storage.finished_work import FinishedWork
from fairmesh.storage.run_folder import Record, RunFolder
from fairmesh.storage.sharded_checkpoint import Checkpoints
from fairmesh.training.best_round import RoundScores, by_round, replaces
from fairmesh.training.loop import Best, Training, TrainingState
from fairmesh.training.meter import Meter
from fairmesh.training.result import Result

__all__ = ["CsvWriter", "EarlyStopping", "ObservedRun", "Observer", "Watch"]

_LOOK_EVERY = 50  # rounds at most between two checks for divergence
_ASK_EVERY_S = 0.5  # approximate seconds between two times that processes ask each other whether to stop


class ObservedRun:
    """A run as its observers see it.

    Attributes:
        training: The problem, network, replicas and options.
        rounds: How many rounds the run has.
        round: How many rounds are done.
        state: The state after them.
        records: Every measurement so far, one record per replica and measured round.
        new_records: The records that were measured after this round; often empty.
        diverged: Replicas that have diverged.
        settings: The run's settings, as an experiment file has them.
        folder: The run's folder, or None.
        interrupted: The run was asked to stop from outside. It raises `Interrupted` after this round.
        stop_reason: Why an observer ended the run early, or None.

    Args:
        training: The problem, network, replicas and options.
        rounds: How many rounds the run has.
        state: The state to start from.
        done: How many rounds led to it. Default: 0.
        settings: The run's settings, as an experiment file has them; None for none. Default: None.
        folder: The run's folder; None if it has none. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> class Enough(fm.observers.Observer):
        ...     def after_round(self, round, state):
        ...         if round == 3:
        ...             self.run.stop("seen enough")
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=20)
        >>> fm.run(experiment, observers=[Enough()]).rounds
        3
    """

    def __init__(
        self,
        training: Training,
        rounds: int,
        state: TrainingState,
        done: int = 0,
        settings: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ):
        self.training, self.rounds, self.round = training, rounds, done
        self.settings, self.folder = dict(settings or {}), folder
        self.records: list[Record] = []
        self.new_records: list[Record] = []
        self.diverged: list[int] = []
        self.interrupted, self.stop_reason = False, None
        self.best: Best | None = state.best  # found by measuring, so the rounds do not carry it
        self.state = state

    @property
    def name(self) -> str:
        """Returns the name of the run's folder, or "fairmesh" if it has none."""
        return self.folder.resolve().name if self.folder else "fairmesh"

    @property
    def is_last(self) -> bool:
        """Returns whether this round ends the run."""
        return self.round == self.rounds or bool(self.stop_reason)

    @property
    def measure_due(self) -> bool:
        """Returns whether this round is to be measured."""
        return self.round % self.training.options.measure_every == 0 or self.is_last

    def stop(self, reason: str) -> None:
        """Ends the run after this round, with its result. The processes of a cluster end after the next round that is
        measured, when they exchange the request. A node between organisations cannot end the run of all sites; there
        the request is ignored.

        Args:
            reason: Recorded in the summary.
        """
        self.stop_reason = self.stop_reason or reason


class Observer(ABC):
    """Is called after every round. Subclasses override what they need.

    On a cluster every process calls its own observers, with the state of the nodes that it hosts. An error that an
    observer raises ends the run; the run's folder keeps its last checkpoint and can be resumed.

    Example:
        >>> import fairmesh as fm
        >>> class Printer(fm.observers.Observer):
        ...     def after_round(self, round, state):
        ...         for record in self.run.new_records:
        ...             print(round, sorted(record)[:2])
    """

    run: ObservedRun

    def before_run(self) -> None:  # noqa: B027
        """Is called before data is read, perhaps more than once. Raises BadInput if the observer cannot work here."""

    def start(self, run: ObservedRun) -> None:
        """Is called before the first round."""
        self.run = run

    def after_round(self, round: int, state: TrainingState) -> None:  # noqa: B027
        """Is called before the first round and after every round.

        Args:
            round: How many rounds are done.
            state: The state after them. On a GPU the next round overwrites its tensors; clone what you keep.
        """

    def finish(self, error: BaseException | None) -> None:  # noqa: B027
        """Is called at the end of the run.

        Args:
            error: What ended the run, or None if it ended normally.
        """

    def after_run(self, result: Result) -> None:  # noqa: B027
        """Is called once, after a run that ended normally; not between organisations.

        Args:
            result: The outcome of all replicas.
        """


class _Function(Observer):
    """A plain function (round, state) as an observer."""

    def __init__(self, function: Callable[[int, TrainingState], Any]):
        self._function = function

    def after_round(self, round: int, state: TrainingState) -> None:
        self._function(round, state)


def as_observers(given: Iterable[Any]) -> list[Observer]:
    """Returns observers for a list of observers and plain functions (round, state). Each has said that it can work."""
    observers: list[Observer] = []
    for one in given:
        if not isinstance(one, Observer) and not callable(one):
            raise BadInput(f"observers are Observer objects or functions (round, state), got {one!r}")
        observers.append(one if isinstance(one, Observer) else _Function(one))
        observers[-1].before_run()
    return observers


def observe(run: ObservedRun, states: Iterable[tuple[int, TrainingState]], observers: Sequence[Observer]) -> None:
    """Runs the rounds and calls the observers after each, in their order.

    Args:
        run: Is kept up to date for the observers.
        states: Yields the number of rounds done and the state then, beginning with the state to start from.
        observers: What happens around the rounds.
    """
    error: BaseException | None = None
    started: list[Observer] = []
    try:
        for observer in observers:
            observer.start(run)
            started.append(observer)
        for run.round, state in states:
            run.state, run.new_records = state._replace(best=run.best), []
            for observer in observers:
                observer.after_round(run.round, run.state)
            if run.stop_reason:
                return
    except BaseException as raised:
        error = raised
        raise
    finally:
        failures = []
        for observer in reversed(started):
            try:
                observer.finish(error)
            except Exception as failure:  # the others finish too
                failures.append(failure)
        if failures and not error:
            raise failures[0]


class StopRequests(Observer):
    """Notes that the run was asked to stop. Several processes must stop after the same round, so they ask each other
    about twice per second."""

    def __init__(self, process_group: ProcessGroup, event: threading.Event):
        self._process_group, self._event = process_group, event

    def start(self, run: ObservedRun) -> None:
        self.run = run
        self._asked, self._next, self._time = run.round, 0, time.perf_counter()

    def after_round(self, round: int, state: TrainingState) -> None:
        self.run.interrupted = self._requested(round)

    def _requested(self, now: int) -> bool:
        if self._process_group.world_size == 1:
            return self._event.is_set()
        if now < self._next:
            return False
        pace = (time.perf_counter() - self._time) / max(1, now - self._asked)
        answers = self._process_group.all_gather_json([self._event.is_set(), pace])
        rounds = int(_ASK_EVERY_S / max(answers[0][1], 1e-6))  # by the leader's clock, so that all ask again at once
        self._asked, self._time = now, time.perf_counter()
        self._next = now + max(1, min(rounds, _LOOK_EVERY))
        return any(asked for asked, _ in answers)


class Divergence(Observer):
    """Raises `Diverged` once a model or a dual is not finite or has exploded; with `mark`, only notes it. It checks
    before every measurement and checkpoint, so that neither is of a diverged run."""

    def __init__(self, checkpoints: "Checkpointing | None" = None, *, mark: bool = False):
        self._checkpoints, self._mark = checkpoints, mark

    def start(self, run: ObservedRun) -> None:
        self.run, self._sound = run, run.round
        options = run.training.options  # on a GPU, check only when measuring, since each check waits for it
        on_cpu = run.training.device.type == "cpu"
        self._every = min(options.measure_every, _LOOK_EVERY) if on_cpu else options.measure_every

    def after_round(self, round: int, state: TrainingState) -> None:
        checkpoint_due = self._checkpoints and self._checkpoints.due(round)
        if not (self.run.measure_due or self.run.interrupted or checkpoint_due or round % self._every == 0):
            return
        training, process_group = self.run.training, self.run.training.network.process_group
        here = training.unsound(state).any(dim=-1)
        anywhere = process_group.all_reduce(here.long()) if process_group.world_size > 1 else here
        self.run.diverged = anywhere.nonzero().flatten().tolist()
        if self.run.diverged and not self._mark:
            saved = self._checkpoints.saved if self._checkpoints else None
            kept = "" if saved is None else f"; the checkpoint of round {saved} is kept"
            with process_group.fail_together():
                if bool(here.any()):
                    raise Diverged(training.divergence_message(state, round, self._sound) + kept)
        self._sound = round


class Measuring(Observer):
    """Measures every `measure_every` rounds and at the end, and appends the records to the run and to its folder."""

    def __init__(self, meter: Meter, folder: RunFolder | None = None):
        self._meter, self._folder = meter, folder

    def after_round(self, round: int, state: TrainingState) -> None:
        run = self.run
        if not run.measure_due or any(r["round"] == round for r in run.records[-len(run.training.replicas) :]):
            return
        run.new_records = self._meter.records(round, state.algorithm, state.sent, state.own)
        for record, replica in zip(run.new_records, run.training.replicas):
            record["seed"] = replica.seed
        run.records += run.new_records
        if self._folder:
            with run.training.network.process_group.fail_together():
                self._folder.append(run.new_records)


class KeepBest(Observer):
    """Keeps the network-average model of the best measured round by validation data, as `best_round` says."""

    def __init__(self, meter: Meter):
        self._meter = meter

    def start(self, run: ObservedRun) -> None:
        self.run, self._newest, options = run, -1, run.training.options
        if not run.best:
            return
        self._scores = RoundScores(run.training.problem, options.best_by, options.cvar_level)
        for records in by_round(run.records):  # if the run was resumed
            if records[0]["round"] % options.measure_every == 0:
                self._newest = records[0]["round"]
                self._scores.add_records(records)

    def after_round(self, round: int, state: TrainingState) -> None:
        run, best = self.run, self.run.best
        if not run.new_records or not best or round % run.training.options.measure_every or round == self._newest:
            return
        self._newest, scores = round, self._scores.add_records(run.new_records)
        better = replaces(scores, best.score)
        average = self._meter.mean(run.training.view.models(state.algorithm))
        chosen, own = better.to(average.device)[:, None], self._meter.own_of_sites(state.own)
        run.best = Best(
            torch.maximum(scores, best.score),
            torch.where(better, round, best.round),
            torch.where(chosen, average, best.model),
            None if own is None or best.own is None else torch.where(chosen.unsqueeze(-1), own, best.own),
        )
        run.state = state._replace(best=run.best)


class Checkpointing(Observer):
    """Writes the run's checkpoint every `every` rounds, at the end, when the run is asked to stop, and when a training
    function of the user's own fails. Then drops the finished work of rounds that are not repeated from it."""

    def __init__(
        self, checkpoints: Checkpoints, every: int, saved: int | None = None, finished: FinishedWork | None = None
    ):
        self._checkpoints, self._every, self.saved, self._finished = checkpoints, every, saved, finished

    def due(self, round: int) -> bool:
        return round % self._every == 0

    def after_round(self, round: int, state: TrainingState) -> None:
        if self.saved != round and (self.due(round) or self.run.is_last or self.run.interrupted):
            self._save(round)

    def _save(self, round: int) -> None:
        self._checkpoints.save(self.run.state, round)
        self.saved = round
        if self._finished:
            self._finished.drop_before(round)
            if self.run.is_last:
                self._finished.close()

    def finish(self, error: BaseException | None) -> None:
        """Keeps the rounds before one in which a training function failed, at all processes at once."""
        if isinstance(error, TrainerFailed) and self.saved != self.run.round:
            self._save(self.run.round)


class Ending(Observer):
    """Raises `Interrupted` if the run was asked to stop from outside. If an observer ended it, has the last round
    measured and checkpointed."""

    def __init__(self, last_words: Sequence[Observer]):
        self._last_words, self._pending = last_words, None

    def after_round(self, round: int, state: TrainingState) -> None:
        run, process_group = self.run, self.run.training.network.process_group
        if process_group.world_size > 1 and run.new_records:
            reasons = process_group.all_gather_json(run.stop_reason or self._pending)
            run.stop_reason = next(filter(None, reasons), None)
        elif process_group.world_size > 1 and run.stop_reason:
            self._pending, run.stop_reason = self._pending or run.stop_reason, None  # until a round is measured
        if run.stop_reason:
            for observer in self._last_words:
                observer.after_round(round, run.state)
        elif run.interrupted and not run.is_last:
            with process_group.fail_together():
                kept = "; its checkpoint is kept" if run.folder else ""
                raise Interrupted(f"stopped after round {round} of {run.rounds}{kept}")


class Watch(Observer):
    """Calls a function after every round with how many rounds are done, and with what was measured.

    Args:
        function: Takes the number of rounds done and the new records (often none).

    Example:
        >>> import fairmesh as fm
        >>> progress = fm.observers.Watch(lambda done, records: None)
    """

    def __init__(self, function: Callable[[int, list[Record]], None]):
        self._function = function

    def after_round(self, round: int, state: TrainingState) -> None:
        self._function(round, self.run.new_records)


class Progress(Observer):
    """Calls a function after every round with how many rounds are done, and with what was measured, in words."""

    def __init__(self, function: Callable[[int, str], None]):
        self._function = function

    def after_round(self, round: int, state: TrainingState) -> None:
        records = self.run.new_records
        self._function(round, self.run.training.problem.unit().progress(records) if records else "")


@dataclass
class EarlyStopping(Observer):
    """Ends the run when the worst site has not improved for a while.

    Args:
        patience: Measurements without improvement after which the run ends. Default: 5.
        metric: Which metric, as in the records; None for the one that names the worst site. Default: None.
        split: The held-out data to judge by: "test", or "validation" where sites have such data. Default: "validation".

    Example:
        >>> import fairmesh as fm
        >>> stopper = fm.observers.EarlyStopping(patience=3, split="test")
    """

    patience: int = 5
    metric: str | None = None
    split: str = "validation"

    def start(self, run: ObservedRun) -> None:
        self.run, self._scores = run, []
        for records in by_round(run.records):  # if the run was resumed
            self._note(records)
        if self.split not in ("test", "validation"):
            raise BadInput(f'split must be "test" or "validation", got {self.split!r}')

    def after_round(self, round: int, state: TrainingState) -> None:
        if not self.run.new_records:
            return
        metric = self._note(self.run.new_records)
        since = len(self._scores) - 1 - self._scores.index(max(self._scores))
        if since >= self.patience:
            self.run.stop(f"the worst site's {metric} has not improved for {since} measurements")

    def _note(self, records: list[Record]) -> str:
        """Notes the score of one measured round; returns the metric."""
        problem = self.run.training.problem
        metric = self.metric or problem.primary
        tables = [record if self.split == "test" else record.get("validation", {}) for record in records]
        if any(metric not in table for table in tables):
            raise BadInput(f"no {self.split} {metric!r} is measured{nearest(metric, tables[0])}")
        worst = sum(table[metric]["worst"] for table in tables) / len(tables)
        self._scores.append(worst if problem.higher_is_better(metric) else -worst)
        return metric


@dataclass
class CsvWriter(Observer):
    """Writes every measurement as a row of a CSV file: round, replica, bytes, epsilon; worst, mean and best of metrics.

    Args:
        path: The file. A run writes it again from the start; a resumed run keeps the rows up to its checkpoint.

    Example:
        >>> import fairmesh as fm
        >>> writer = fm.observers.CsvWriter("metrics.csv")
    """

    path: str

    def start(self, run: ObservedRun) -> None:
        self.run = run
        if run.training.network.process_group.is_leader:
            rows = [self._row(record) for record in run.records] or self._rows_before(run.round)
            Path(self.path).unlink(missing_ok=True)
            self._append(rows)

    def after_round(self, round: int, state: TrainingState) -> None:
        if self.run.training.network.process_group.is_leader:
            self._append([self._row(record) for record in self.run.new_records])

    def _rows_before(self, round: int) -> list[Record]:
        """Returns the file's rows of earlier rounds: a node that is restarted does not keep its records."""
        if round == 0 or not Path(self.path).exists():
            return []
        with open(self.path, newline="", encoding="utf-8") as file:
            return [row for row in csv.DictReader(file) if int(row["round"]) < round]

    def _append(self, rows: list[Record]) -> None:
        if not rows:
            return
        new = not Path(self.path).exists()
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            if new:
                writer.writeheader()
            writer.writerows(rows)

    def _row(self, record: Record) -> Record:
        row = {"round": record["round"], "replica": record["replica"], "seed": record["seed"]}
        for metric, numbers in record.items():
            if isinstance(numbers, dict) and "worst" in numbers:
                row |= {f"{metric}_{what}": numbers[what] for what in ("worst", "mean", "best")}
        spent = {"epsilon": record["epsilon"]} if "epsilon" in record else {}
        return row | {"bytes_total": record["bytes_total"]} | spent


register(Observer, {"early-stopping": EarlyStopping, "csv": CsvWriter})


@contextmanager
def stop_signals(handle: bool) -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C or SIGTERM sets while it is open, if `handle`. A second Ctrl-C stops at once."""
    stop = threading.Event()
    if not handle or threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number: int, frame: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
