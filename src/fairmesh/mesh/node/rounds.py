"""The rounds of one generation of a mesh at one node: trained, measured, checkpointed, and repeated after a crash."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fairmesh.algorithms.schedules import with_run_length
from fairmesh.errors import BadInput, Diverged, FairmeshError, Interrupted, TrainerFailed
from fairmesh.mesh.node.divergence import SiteDiverged
from fairmesh.mesh.node.leaving import cycle_of
from fairmesh.mesh.node.measurements import Measurements, judged_on
from fairmesh.mesh.node.membership import Membership
from fairmesh.mesh.node.reduction import Branch, spanning_tree
from fairmesh.mesh.node.reference_losses import with_any_references, with_kept_references
from fairmesh.mesh.node.restoring import read_shared, restored, shared
from fairmesh.mesh.node.start import Start
from fairmesh.mesh.node.store import Store, landmark_every
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.mesh.wire.transport import FIRST_ROUND, PeerTransport
from fairmesh.networks.bounds import Bounds
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.numerics.random_streams import SecretIdentities
from fairmesh.problems.evaluator import Evaluator
from fairmesh.problems.local_work import Activity
from fairmesh.problems.problem import Problem
from fairmesh.storage.run_folder import Record
from fairmesh.topology.mixing import union_of
from fairmesh.training.loop import Training, TrainingState
from fairmesh.training.observers import ObservedRun, Observer, observe
from fairmesh.training.options import DTYPES, device_of
from fairmesh.training.replicas import Replica

_CHECKPOINT_S = 60.0  # at most this much work is repeated after a crash, unless a checkpoint takes long:
_CHECKPOINT_SHARE = 0.05  # of the time at most is spent on writing them
_JOURNAL_OVER_STATE = 8  # the journal may grow to this many times the size of a model, or to:
_SMALL_JOURNAL = 16 << 20  # bytes


class Watcher(Observer, ABC):
    """Observes the rounds, and may ask them to stop."""

    @property
    @abstractmethod
    def stopping(self) -> FairmeshError | None:
        """Returns why the rounds must stop, or None."""

    @abstractmethod
    def measured(self, values: dict[str, Any], weight: float | None) -> None:
        """Takes this site's own metrics, and its own entry of lambda."""

    @abstractmethod
    def metric_failed(self, name: str, error: BadInput) -> None:
        """Is called if a metric raises at this site. The others need not stop for that: it counts as NaN here."""

    @abstractmethod
    def ignored_stop(self, reason: str, done: int) -> None:
        """Is called once if an observer asks to end the run, which a site alone cannot do."""

    @abstractmethod
    def works_locally(self, activity: Activity | None) -> None:
        """Is called when a training function of the site's own begins, and with None when its work is finished and
        stored."""

    @abstractmethod
    def trains_alone(self, done: int) -> None:
        """Is called after every round in which the site trains a model alone, before the run. Raises if it must
        stop."""

    @abstractmethod
    def raise_if_stopped(self) -> None:
        """Raises if the node must stop, or a decision of the sites is due."""

    @abstractmethod
    def log(self, level: str, what: str, **fields: Any) -> None:
        """Logs an event."""

    @abstractmethod
    def reached(self, point: str, done: int) -> None:
        """Is called at each point where tests let a node crash."""


def journal_allowed(model: int) -> int:
    """Returns to how many bytes the journal may grow before a checkpoint is due, for a model of this size."""
    return max(_SMALL_JOURNAL, _JOURNAL_OVER_STATE * model)


def identity_of(membership: Membership, problem: Problem) -> dict[str, Any]:
    """Returns the settings that determine this node's trajectory, by name: the same before and after the objective is
    fitted to the run."""
    objective = problem.objective.with_run_length(membership.experiment.rounds)
    problem = problem if objective is problem.objective else problem.with_other(objective=objective)
    return {
        "site": membership.name,
        "removed": list(membership.mesh.removed),
        "restarts": membership.mesh.restarts,
        "data and model": problem.digest(),
        "secret of the draws": "none" if membership.secret is None else SecretIdentities([membership.secret]).digest(),
        **membership.agreed,
    }


def branch_of(membership: Membership) -> Branch:
    """Returns this node's place in the tree over which the start model and the sums at the end travel."""
    cycle = cycle_of(membership.experiment.topology, membership.mesh)
    return spanning_tree(union_of(cycle))[membership.present.index(membership.position)]


class Rounds:
    """This node's part of the training."""

    def __init__(
        self,
        membership: Membership,
        problem: Problem,
        mailroom: Mailroom,
        store: Store,
        watcher: Watcher,
        pinned: Callable[[], int | None] = lambda: None,  # the round from which on everything must be kept
        measurements: Measurements | None = None,  # where to record what is measured, in order to train
        keep_all: Callable[[], bool] = lambda: False,  # whether no checkpoint to go back to may be dropped now
    ):
        self.problem, self._membership, self._mailroom, self._store = problem, membership, mailroom, store
        self._pinned, self._measurements, self._keep_all = pinned, measurements, keep_all
        self._watcher, self._experiment = watcher, membership.experiment
        experiment, present = membership.experiment, membership.present
        cycle = cycle_of(experiment.topology, membership.mesh, experiment.options.lying_neighbours)
        self._number = present.index(membership.position)
        self._neighbours = [one.position for one in membership.neighbours]
        prior = problem.prior_of_sites
        network = RemoteNetwork(
            cycle,
            [self._number],
            PeerTransport(self._number, [present.index(p) for p in self._neighbours], self._neighbours, mailroom),
            device=device_of(experiment.options.device),
            dtype=DTYPES[experiment.options.dtype],
            identities=present,
            secrets=None if membership.secret is None else [membership.secret],
            each_copy=True,  # one copy per neighbour, so that a site can leave
            bounds=Bounds(float(prior.max() / prior[self._number])),
        )
        replica = Replica(
            experiment.seeds[0], tuple(range(problem.n)), with_run_length(experiment.algorithm, experiment.rounds)
        )
        options = replace(experiment.options, keep_best=False, **dict.fromkeys(membership.not_measured, False))
        if store is None:
            problem = with_any_references(problem, membership)
        else:
            problem = with_kept_references(problem, membership, options, network, watcher.trains_alone, watcher.log)
        self.problem = problem
        self.training = Training(problem, experiment.topology, [replica], options, network=network)
        worker = self.training.oracle.worker
        if worker is not None and store is not None:
            worker.done, worker.watch = store.work, watcher.works_locally
        self.branch = branch_of(membership)
        self._identity = identity_of(membership, problem)
        self.judged_on = judged_on(problem)
        self.judge = Evaluator(
            problem,
            self.judged_on,
            self.training.device,
            self.training.dtype,
            failed=watcher.metric_failed if watcher else None,
        )
        self._run = ObservedRun(self.training, experiment.rounds, self.training.initial())

    @staticmethod
    def idle(membership: Membership, problem: Problem, mailroom: Mailroom | None = None) -> "Rounds":
        """Returns rounds that are never trained, to look at the state before the first one, or to restore another."""
        return Rounds(membership, problem, mailroom, None, None)  # type: ignore[arg-type]

    @property
    def done(self) -> int:
        """Returns how many rounds are done."""
        return self._run.round

    @property
    def state(self) -> TrainingState:
        """Returns the state after these rounds."""
        return self._run.state

    def share(self, done: int, whom: Sequence[int], start: Start) -> None:
        """Sends neighbours that have lost their state the model that all started from, and what this node knows of
        them, as of the checkpoint after round `done`."""
        self._go_to(done)
        content = start.content()
        head = len(content).to_bytes(8, "little") + content
        parts = {position: head + shared(self.state, 1 + self._neighbours.index(position)) for position in whom}
        self._mailroom.post(restoring_step(done), parts)

    def restore(self, done: int, into: Store, start: Start) -> None:
        """Waits for what the neighbours know of this site after round `done`, and writes it as a checkpoint."""
        like, names = self.state, self._membership.mesh.names
        starts: dict[str, bytes] = {}

        def read(position: int, data: bytes) -> dict[str, Tensor]:
            length = int.from_bytes(data[:8], "little")
            content = data[8 : 8 + length]
            start.refuse_other(content, names[position])
            starts[names[position]] = content
            return read_shared(data[8 + length :], like)

        found = self._mailroom.take(restoring_step(done), self._neighbours, read)
        if len(set(starts.values())) > 1:
            raise BadInput(
                f"{', '.join(starts)} say that the run started from different models, so one of them does not tell the "
                "truth; let the others vote it out, or vote for an earlier round"
            )
        state = restored(like, {names[position]: found[position] for position in self._neighbours})
        start.keep(next(iter(starts.values())))
        identity = identity_of(self._membership, replace(self.problem, model=start.model()))
        into.save(state, done, identity, len(self._membership.present))

    def train(self, done: int) -> None:
        """Trains from the checkpoint after round `done` to the last round."""
        self._go_to(done)
        last = self._experiment.rounds
        if self._measurements is None:
            raise TypeError("these rounds were made without measurements, so they can only be repeated")
        checkpoints = _Checkpointing(
            self._store,
            self._mailroom,
            self._watcher,
            self._identity,
            self._membership,
            self._pinned,
            self._measurements,
            self._keep_all,
        )
        failed = self._watcher.metric_failed
        validation = Evaluator(self.problem, "validation", self.training.device, self.training.dtype, failed=failed)
        observers = [
            self._watcher,
            _SiteDivergence(self._membership.name),
            _SiteMeasuring(self.judge, validation, self._watcher, self._number, self._measurements),
            checkpoints,
            *self._experiment.observers,
            _SiteEnding(self._watcher),
        ]
        try:
            observe(self._run, self.training.states(self.state, done, last), observers)
        except SiteDiverged:
            raise
        except Diverged as error:  # what the site would have sent in the round after
            raise SiteDiverged(self._membership.name, self.done, self.done + 1, str(error)) from error

    def _go_to(self, done: int) -> None:
        run = self._run
        if self._store.at_or_before(done) == done or done in self._store.landmarks:
            run.state = self._store.load(done, run.state, self._identity)
        run.round = done

    def state_at(self, agreed: int) -> TrainingState:
        """Returns the state after `agreed` rounds, computed again from the last checkpoint before and the journal."""
        self._go_to(agreed if agreed in self._store.landmarks else self._store.at_or_before(agreed) or 0)
        for t in range(self.done, agreed):
            self._run.state = self.training.advance(self.state, t)
        return self.state


def restoring_step(done: int) -> int:
    """Returns the step in which neighbours send a site what they know of it, before the first round of a generation
    that begins after `done` rounds."""
    return done + FIRST_ROUND - 1


class _SiteDivergence(Observer):
    """Raises SiteDiverged once this node's model or dual is not finite or has exploded, before it is measured or
    stored. It looks after every round, so that people see whose numbers exploded first."""

    def __init__(self, site: str):
        self._site = site

    def start(self, run: ObservedRun) -> None:
        self.run, self._sound = run, run.round

    def after_round(self, round: int, state: TrainingState) -> None:
        if bool(self.run.training.unsound(state).any()):
            raise SiteDiverged(self._site, self._sound, round, self.run.training.unsound_quantity(state, 0, 0))
        self._sound = round


class _SiteMeasuring(Observer):
    """Evaluates this node's own model on this site's own data."""

    def __init__(
        self, judge: Evaluator, validation: Evaluator, watcher: Watcher, number: int, measurements: Measurements
    ):
        self._judge, self._validation, self._watcher, self._number = judge, validation, watcher, number
        self._measurements = measurements

    def after_round(self, round: int, state: TrainingState) -> None:
        if not self.run.measure_due:
            return
        training, node = self.run.training, self._number
        models = training.whole_models(state)[:, 0]
        found = self._judge.of_sites(models)
        values = {name: float(value[0, node]) for name, value in found.items()}
        duals, own = training.view.duals(state.algorithm), training.view.own_weights(state.algorithm)
        weight = None if own is None else float(own[0, 0, 0]) / training.problem.n
        weight = weight if duals is None else float(duals[0, 0, node])
        validated = self._validation.of_sites(models) if self._validation else {}
        every = list(values.values()) + [float(value[0, node]) for value in validated.values()]
        sent = float(state.sent.node_bits[0, 0]), int(state.sent.node_bytes[0, 0])
        self._measurements.add(round, every, weight, sent)
        self._measurements.offer(round, models[0])
        self._watcher.measured(values | {"round": round}, weight)
        self.run.new_records = [self._record(round, state, found)]
        self.run.records += self.run.new_records

    def _record(self, round: int, state: TrainingState, found: Mapping[str, Tensor]) -> Record:
        """Returns this site's numbers as a record of a simulation with one site, for observers."""
        record: Record = {"round": round, "replica": 0, "seed": self.run.training.replicas[0].seed}
        for name, value in found.items():
            number = float(value[0, self._number])
            record[name] = {"worst": number, "mean": number, "best": number, "gap": 0.0, "sites": [number]}
        return record | {"bytes_total": int(state.sent.node_bytes.sum())}


class _Checkpointing(Observer):
    """Writes a checkpoint from time to time, by rounds, time or the journal's size, and when the rounds stop. Then
    drops what the journal no longer needs."""

    def __init__(
        self,
        store: Store,
        mailroom: Mailroom,
        watcher: Watcher,
        identity: Mapping[str, Any],
        membership: Membership,
        pinned: Callable[[], int | None],
        measurements: Measurements,
        keep_all: Callable[[], bool],
    ):
        self._store, self._mailroom, self._watcher = store, mailroom, watcher
        self._identity, self._sites, self._pinned = identity, len(membership.present), pinned
        self._measurements, self._keep_all = measurements, keep_all
        self._landmark_every = landmark_every(membership.experiment.rounds)

    def start(self, run: ObservedRun) -> None:
        self.run, self._saved, self._saved_at, self._took_s = run, run.round, time.monotonic(), 0.0

    def after_round(self, round: int, state: TrainingState) -> None:
        if round % self._landmark_every == 0 and round not in self._store.landmarks:
            thin = self._pinned() is None and not self._keep_all()  # else a certificate may still ask for any of them
            self._measurements.store_models()
            self._store.keep(self.run.state, round, self._identity, thin)
        if self._due(round, state) or (self._watcher.stopping and self._saved != round):
            self._save(round)

    def finish(self, error: BaseException | None) -> None:
        if isinstance(error, Interrupted | TrainerFailed) and self._saved != self.run.round:
            self._save(self.run.round)

    def _due(self, done: int, state: TrainingState) -> bool:
        every = self.run.training.options.checkpoint_every
        if done == self._saved:
            return False
        if every is not None and done - self._saved >= every:
            return True
        models = self.run.training.view.models(state.algorithm)
        allowed = journal_allowed(models.nbytes)
        pause = max(_CHECKPOINT_S, self._took_s / _CHECKPOINT_SHARE)
        late = every is None and time.monotonic() - self._saved_at > pause
        return late or self._mailroom.journal_bytes() + self._store.work.nbytes(self._saved) > allowed

    def _save(self, done: int) -> None:
        began = time.monotonic()
        self._watcher.reached("before checkpoint", done)
        self._measurements.store_models()
        oldest = self._store.save(self.run.state, done, self._identity, self._sites, self._pinned())
        self._watcher.reached("after checkpoint", done)
        self._measurements.drop_models()
        self._mailroom.rotate(oldest + FIRST_ROUND if oldest else 0)
        self._watcher.reached("after rotation", done)
        self._saved, self._saved_at = done, time.monotonic()
        self._took_s = self._saved_at - began


class _SiteEnding(Observer):
    """Stops when the watcher asks for it. An observer at one site cannot end the run of all sites."""

    def __init__(self, watcher: Watcher):
        self._watcher, self._ignored = watcher, False

    def after_round(self, round: int, state: TrainingState) -> None:
        if self.run.stop_reason is not None and not self._ignored:
            self._ignored = True
            self._watcher.ignored_stop(self.run.stop_reason, round)
        self.run.stop_reason = None
        if self._watcher.stopping and not self.run.is_last:
            raise self._watcher.stopping
