"""A plan while it is carried out: its network, its rounds, and the folder, checkpoints and observers around them."""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from fairmesh.comparisons.alone import AloneRun
from fairmesh.comparisons.phases import Notices, Phases
from fairmesh.comparisons.reference_losses import with_references
from fairmesh.errors import BadInput, Diverged, FairmeshError, LostProcess
from fairmesh.networks.base import Network
from fairmesh.storage.finished_work import FinishedWork
from fairmesh.storage.occupied import ALONE
from fairmesh.storage.run_folder import RunFolder
from fairmesh.storage.sharded_checkpoint import Checkpoints
from fairmesh.training.long_work import LongWorkNotices
from fairmesh.training.loop import Training, TrainingState
from fairmesh.training.measured_steps import with_measured_steps
from fairmesh.training.memory_estimate import memory_of_run
from fairmesh.training.meter import Meter
from fairmesh.training.observers import (
    Checkpointing,
    Divergence,
    Ending,
    KeepBest,
    Measuring,
    ObservedRun,
    Observer,
    StopRequests,
    observe,
)
from fairmesh.training.options import DTYPES, device_of
from fairmesh.training.plan import Plan
from fairmesh.training.private import Budget, decisions
from fairmesh.training.run_status import RunStatus, telling

Announce = Callable[[str], None] | None


class Ready(NamedTuple):
    """A plan with its network, which fits into memory."""

    plan: Plan
    network: Network
    memory: str  # a sentence about the memory that the run takes


def with_network(plan: Plan) -> Ready:
    """Returns a plan with its network. Raises BadInput if the run does not fit into memory."""
    options, process_group = plan.options, plan.process_group
    kind = {"device": device_of(options.device), "dtype": DTYPES[options.dtype], "count_bytes": options.count_bytes}
    with process_group.fail_together():
        network = process_group.network(plan.cycle, **kind)
        first = plan.replicas[0].algorithm
        memory = memory_of_run(plan.problem, first, len(plan.replicas), options, network)
    return Ready(plan, network, memory)


class Surroundings(NamedTuple):
    """What is around a run: who stops it, whom it tells, and where it is written."""

    stop: threading.Event
    announce: Announce = None
    folder: RunFolder | None = None
    status: RunStatus = RunStatus()

    def notices(self) -> Notices:
        """Returns what shows and stops long work outside of the rounds."""
        return Notices(self.stop, self.announce, self.status.phase)

    def phases(self) -> Phases:
        """Returns what carries out long work outside of the rounds, such as sites that train alone."""
        return Phases(self.folder.path / ALONE if self.folder else None, self.notices())


@contextmanager
def surrounded(
    plan: Plan, stop: threading.Event, announce: Announce, folder: RunFolder | None
) -> Iterator[Surroundings]:
    """Yields what is around a run, which tells in its folder how far it is."""
    if folder is None:
        yield Surroundings(stop, announce)
        return
    with telling(folder, plan) as status:
        yield Surroundings(stop, status.heard(announce), folder, status)


def with_reference_losses(ready: Ready, around: Surroundings) -> Ready:
    """Returns the plan with the reference losses that its objective needs. To find them, sites may train alone."""
    plan, objective = ready.plan, ready.plan.problem.objective
    if not objective.needs_references and objective.with_run_length(plan.rounds) is objective:
        return ready
    seed = plan.replicas[0].seed
    alone = AloneRun(plan.topology, plan.rounds, seed, plan.options, ready.network, around.phases())
    return ready._replace(plan=replace(plan, problem=with_references(plan.problem, alone)))


def with_steps(ready: Ready, around: Surroundings) -> Ready:
    """Returns the plan with the steps that its algorithms leave to the run."""
    if not ready.plan.unmeasured:
        return ready
    return ready._replace(plan=with_measured_steps(ready.plan, ready.network, around.phases()))


@contextmanager
def execution(
    ready: Ready, around: Surroundings, settings: Mapping[str, Any] | None = None, observers: Sequence[Observer] = ()
) -> Iterator["Execution"]:
    """Yields a run that is ready for its rounds, from the start or from its checkpoint. Marks in its folder whether it
    diverged, and then lets go of the folder."""
    run, folder = Execution(ready, around, settings or {}, observers), around.folder
    try:
        yield run
    except FairmeshError as error:
        if folder and isinstance(error, Diverged):
            folder.mark_diverged(str(error))
        if folder and not isinstance(error, LostProcess):  # after that, its launcher continues the run
            folder.close()
        raise
    if folder:
        folder.close()


class Execution:
    """A run that is carried out."""

    def __init__(self, ready: Ready, around: Surroundings, settings: Mapping[str, Any], observers: Sequence[Observer]):
        self.plan, self.around, self.process_group = ready.plan, around, ready.plan.process_group
        folder, options = around.folder, ready.plan.options
        with self.process_group.fail_together():
            training = self.training = self.plan.training(ready.network)
        self._started, initial = time.perf_counter(), training.initial()
        self.meter = Meter(training, around.announce)
        self.observed = ObservedRun(training, self.plan.rounds, initial, 0, settings, folder.path if folder else None)
        recorders: list[Observer] = [Measuring(self.meter, folder), KeepBest(self.meter)]
        finished, checkpointing = _connected_trainers(training, around), None
        if folder:
            checkpointing = self._checkpointing(folder, initial, finished)
            recorders += [checkpointing, around.status]
        divergence = Divergence(checkpointing, mark=options.on_divergence == "mark")
        first = [StopRequests(self.process_group, around.stop), divergence]
        first += [Budget(self.plan.private)] if self.plan.private else []
        self._observers = [*first, *recorders, *observers, Ending(recorders)]

    def _checkpointing(self, folder: RunFolder, initial: TrainingState, finished: FinishedWork | None) -> Checkpointing:
        """Loads the folder's checkpoint and records, if the run is resumed, and writes the settings. Returns the
        observer that writes the next checkpoints."""
        training, run, rounds = self.training, self.observed, self.plan.rounds
        identity, private = training.identity(), self.plan.private
        identity |= {"privacy.json": decisions(private)} if private else {}
        checkpoints = Checkpoints(folder.checkpoint, training.network, training.roles(initial), identity)
        if folder.resuming:
            with self.process_group.fail_together():
                state, done = checkpoints.load(initial)
                if done > rounds:
                    raise BadInput(f"the checkpoint is already at round {done}, beyond the {rounds} rounds asked for")
            run.state, run.best, run.round = state, state.best, done
            recorded = (record for record in folder.records() if record["round"] <= done)
            # If the run is now longer, its former last round was measured off schedule.
            every = self.plan.options.measure_every
            due = [r for r in recorded if r["round"] % every == 0 or r["round"] == rounds]
            run.records = [r for r in due if training.problem.primary in r]
            if len(run.records) < len(due):
                metric, last = training.problem.primary, due[-1]["round"]
                self.meter.note(f"{metric} was not measured before round {last}, so the measurements begin there")
            folder.replace_records(run.records)
        folder.write_settings(run.settings)
        saved = run.round if folder.resuming else None
        return Checkpointing(checkpoints, self.plan.options.checkpoint_every or max(1, rounds // 10), saved, finished)

    def to_the_end(self) -> None:
        """Does the rounds that are left."""
        run = self.observed
        observe(run, self.training.states(run.state, run.round, self.plan.rounds), self._observers)

    @property
    def seconds(self) -> float:
        """Returns how long the run has taken."""
        return time.perf_counter() - self._started


def _connected_trainers(training: Training, around: Surroundings) -> FinishedWork | None:
    """Connects the sites' training functions, if there are any, with the run, which then says which site it waits for.
    Returns where their finished work is kept, or None without a folder."""
    worker, process_group = training.oracle.worker, training.network.process_group
    if not worker:
        return None
    if process_group.is_leader:
        worker.together = functools.partial(process_group.long_work, seen=LongWorkNotices(around.announce))
    if not around.folder:
        return None
    finished = worker.done = FinishedWork(around.folder.work)
    return finished
