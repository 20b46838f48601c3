"""The rounds of one generation of a mesh at one node: trained, measured, checkpointed, and done again after a crash."""

import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Literal

from fairmesh.algorithms.schedules import with_run_length
from fairmesh.compression import DecodeError
from fairmesh.errors import Diverged, FairmeshError, Interrupted
from fairmesh.mesh.node.leaving import cycle_of
from fairmesh.mesh.node.membership import Membership, start_digest
from fairmesh.mesh.node.reduction import spanning_tree
from fairmesh.mesh.node.store import Store
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.mesh.wire.transport import FIRST_ROUND, PeerTransport
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.problems.evaluation import Evaluator
from fairmesh.problems.problem import Problem
from fairmesh.topology.mixing import union_of
from fairmesh.training.loop import Training, TrainingState
from fairmesh.training.options import DTYPES, device_of
from fairmesh.training.replicas import Replica

_CHECKPOINT_S = 60.0  # so much work at most is done again after a crash
_JOURNAL_OVER_STATE = 8  # the journal may grow to so many times the size of a model, or to:
_SMALL_JOURNAL = 16 << 20  # bytes


class Watcher(ABC):
    """Is told how the rounds go, and may ask them to stop."""

    @property
    @abstractmethod
    def stopping(self) -> FairmeshError | None:
        """Why the rounds shall stop, once they shall."""

    @abstractmethod
    def progressed(self, done: int) -> None:
        """So many rounds are done."""

    @abstractmethod
    def measured(self, values: dict[str, Any], primary: str, weight: float | None) -> None:
        """This site's own numbers, and its own entry of lambda."""

    @abstractmethod
    def reached(self, point: str, done: int) -> None:
        """A point at which a crash may fall."""


def identity_of(membership: Membership, problem: Problem) -> dict[str, Any]:
    """The settings that determine this node's trajectory, by name."""
    return {
        "site": membership.name,
        "removed": list(membership.mesh.removed),
        "data and model": problem.digest(),
        **membership.agreed,
    }


class Rounds:
    """This node's part of the training."""

    def __init__(self, membership: Membership, problem: Problem, mailroom: Mailroom, store: Store, watcher: Watcher):
        self.problem, self._membership, self._mailroom, self._store = problem, membership, mailroom, store
        self._watcher, self._experiment = watcher, membership.experiment
        experiment, present = membership.experiment, membership.present
        cycle = cycle_of(experiment.topology, membership.mesh)
        self._number = present.index(membership.position)
        self._neighbours = [one.position for one in membership.neighbours]
        network = RemoteNetwork(
            cycle,
            [self._number],
            PeerTransport(self._number, [present.index(p) for p in self._neighbours], self._neighbours, mailroom),
            device=device_of(experiment.options.device),
            dtype=DTYPES[experiment.options.dtype],
            identities=present,
            each_copy=True,  # so that a site can leave
        )
        replica = Replica(
            experiment.seeds[0], tuple(range(problem.n)), with_run_length(experiment.algorithm, experiment.rounds)
        )
        options = replace(experiment.options, **dict.fromkeys(membership.not_measured, False))
        self.training = Training(problem, experiment.topology, [replica], options, network=network)
        self.branch = spanning_tree(union_of(cycle))[self._number]
        self._identity = identity_of(membership, problem)
        self.judged_on: Literal["test", "train"] = "test" if problem.sites[self._number].test is not None else "train"
        self.judge = Evaluator(problem, self.judged_on, self.training.device, self.training.dtype)
        self.done, self.state = 0, self.training.initial()

    def compare_starts(self) -> None:
        """Refuses a neighbour that would begin from another model."""
        mine = start_digest(self.problem, self._experiment.seeds[0])

        def same(position: int, theirs: bytes) -> None:
            if theirs[:32] != mine[:32]:
                raise DecodeError(
                    f"it starts from another model ({theirs[32:].decode(errors='replace').strip()} there, "
                    f"{mine[32:].decode().strip()} here)"
                )

        self._mailroom.post(0, dict.fromkeys(self._neighbours, mine))
        self._mailroom.take(0, self._neighbours, same)

    def train(self, done: int) -> None:
        """The rounds from the checkpoint after round `done` to the last."""
        options, last, watcher = self._experiment.options, self._experiment.rounds, self._watcher
        self._go_to(done)
        saved, saved_at = done, time.monotonic()
        watcher.progressed(done)
        while self.done < last:
            try:
                self.state = self.training.advance(self.state, self.done)
            except Interrupted:
                self._save()
                raise
            self.done += 1
            watcher.progressed(self.done)
            if self.done % options.measure_every == 0 or self.done == last:
                self._measure(saved)
            if self._checkpoint_due(saved, saved_at):
                self._save()
                saved, saved_at = self.done, time.monotonic()
            if watcher.stopping:
                self._save()
                raise watcher.stopping

    def _go_to(self, done: int) -> None:
        if self._store.at_or_before(done) == done:
            self.state = self._store.load(done, self.state, self._identity)
        self.done = done

    def state_at(self, agreed: int) -> TrainingState:
        """The state after so many rounds, done again from the checkpoint before and what was received since."""
        self._go_to(self._store.at_or_before(agreed) or 0)
        for t in range(self.done, agreed):
            self.state = self.training.advance(self.state, t)
        return self.state

    def _checkpoint_due(self, saved: int, saved_at: float) -> bool:
        every = self._experiment.options.checkpoint_every
        if every is not None and self.done - saved >= every:
            return True
        allowed = max(_SMALL_JOURNAL, _JOURNAL_OVER_STATE * self.state.algorithm.models.nbytes)
        late = every is None and time.monotonic() - saved_at > _CHECKPOINT_S
        return late or self._mailroom.journal_bytes() > allowed

    def _save(self) -> None:
        self._watcher.reached("before checkpoint", self.done)
        oldest = self._store.save(self.state, self.done, self._identity, len(self._membership.present))
        self._watcher.reached("after checkpoint", self.done)
        self._mailroom.rotate(oldest + FIRST_ROUND if oldest else 0)
        self._watcher.reached("after rotation", self.done)

    def _measure(self, saved: int) -> None:
        if bool(self.training.unsound(self.state).any()):
            raise Diverged(self.training.divergence_message(self.state, self.done, saved))
        found = self.judge.of_sites(self.state.algorithm.models[:, 0])
        values = {name: float(value[0, self._number]) for name, value in found.items()} | {"round": self.done}
        duals, own = (getattr(self.state.algorithm, name, None) for name in ("duals", "weights"))
        weight = None if own is None else float(own[0, 0, 0]) / self.problem.n
        weight = weight if duals is None else float(duals[0, 0, self._number])
        self._watcher.measured(values, self.problem.primary, weight)
