"""The rounds of one generation of a mesh at one node: trained, measured, checkpointed, and repeated after a crash."""

import functools
import hashlib
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from fairmesh.comparisons.alone import AloneRun
from fairmesh.comparisons.phases import Phases
from fairmesh.comparisons.reference_losses import with_any_references, with_references
from fairmesh.errors import BadInput, Diverged, Interrupted, TrainerFailed
from fairmesh.mesh.announcements import WEIGHT
from fairmesh.mesh.node.divergence import SiteDiverged
from fairmesh.mesh.node.measurements import judged_on
from fairmesh.mesh.node.membership import Membership
from fairmesh.mesh.node.reduction import Branch, spanning_tree
from fairmesh.mesh.node.start import Start
from fairmesh.mesh.node.states import cycle_of, read_shared, restored, shared
from fairmesh.mesh.node.store import Store, landmark_every
from fairmesh.mesh.wire.chains import OWN, first_hash
from fairmesh.mesh.wire.journal import storing
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.mesh.wire.transport import FIRST_ROUND, PeerTransport
from fairmesh.networks.base import Network
from fairmesh.networks.bounds import Bounds
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.networks.transport import Transport
from fairmesh.numerics.random_streams import SecretIdentities
from fairmesh.problems.evaluator import Evaluator
from fairmesh.problems.identity import fingerprint
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.primary import undefined_in_words, undefined_sites
from fairmesh.storage.occupied import ALONE
from fairmesh.storage.run_folder import Record
from fairmesh.topology.mixing import union_of
from fairmesh.training.loop import Training, TrainingState
from fairmesh.training.observers import ObservedRun, Observer, observe
from fairmesh.training.options import DTYPES, device_of
from fairmesh.training.pace import Echo, RoundCost, round_cost
from fairmesh.training.plan import Plan

if TYPE_CHECKING:
    from fairmesh.mesh.node.node import Node

_CHECKPOINT_S = 60.0  # at most this much work is repeated after a crash, unless a checkpoint takes long:
_CHECKPOINT_SHARE = 0.05  # of the time at most is spent on writing them
_JOURNAL_OVER_STATE = 8  # the journal may grow to this many times the size of a model, or to:
_SMALL_JOURNAL = 16 << 20  # bytes


def journal_allowed(model: int) -> int:
    """Returns to how many bytes the journal may grow before a checkpoint is due, for a model of this size."""
    return max(_SMALL_JOURNAL, _JOURNAL_OVER_STATE * model)


def identity_of(membership: Membership, problem: Prepared) -> dict[str, Any]:
    """Returns the settings that determine this node's trajectory, by name: the same before and after the objective is
    fitted to the run."""
    objective = problem.objective.with_run_length(membership.experiment.rounds)
    problem = problem if objective is problem.objective else problem.changed(objective=objective)
    return {
        "site": membership.name,
        "removed": list(membership.mesh.removed),
        "restarts": membership.mesh.restarts,
        "problem": problem.identity(),
        "secret of the draws": secret_of(membership),
        **membership.agreed,
    }


def branch_of(membership: Membership) -> Branch:
    """Returns this node's place in the tree over which the start model and the sums at the end travel."""
    cycle = cycle_of(membership.topology, membership.mesh)
    return spanning_tree(union_of(cycle))[membership.number]


def network_of(membership: Membership, problem: Prepared, transport: Transport) -> RemoteNetwork:
    """Returns the present sites as this node reaches them."""
    experiment, present, number = membership.experiment, membership.present, membership.number
    prior = problem.prior_of_sites
    return RemoteNetwork(
        cycle_of(membership.topology, membership.mesh, experiment.options.lying_neighbours),
        [number],
        transport,
        device=device_of(experiment.options.device),
        dtype=DTYPES[experiment.options.dtype],
        identities=present,
        secrets=[membership.secret] if membership.secret else (),
        each_copy=True,  # one copy per neighbour, so that a site can leave
        bounds=Bounds(float(prior.max() / prior[number])),
    )


def plan_of(membership: Membership, problem: Prepared) -> Plan:
    """Returns the plan of the run, by its only seed."""
    experiment = membership.experiment
    return Plan.of(
        problem,
        membership.topology,
        experiment.algorithm,
        experiment.rounds,
        seeds=experiment.seeds[:1],
        options=membership.options,
        cycle=cycle_of(membership.topology, membership.mesh, experiment.options.lying_neighbours),
    )


def untrained(membership: Membership, problem: Prepared) -> TrainingState:
    """Returns the state before the first round. Nothing is trained or sent for it, so it needs no mailroom."""
    return _untold(membership, problem, Echo()).initial()


def cost_of_a_round(membership: Membership, problem: Prepared) -> RoundCost:
    """Measures what a round costs this node by rounds with nobody else, of which nothing is kept."""
    echo = Echo()
    return round_cost(_untold(membership, problem, echo), echo)


def _untold(membership: Membership, problem: Prepared, echo: Echo) -> Training:
    """Returns the rounds of this node without neighbours, and with losses to compare it with that mean nothing."""
    problem = with_any_references(problem, membership.experiment.rounds, [membership.name])
    return plan_of(membership, problem).training(network_of(membership, problem, echo))


def phases_of(node: "Node") -> Phases:
    """Returns who watches what this site trains alone, and where it is kept."""

    def unusable(file: str) -> None:
        why = "it is damaged, or of another run, of other data, of another secret of this site, or of another start"
        node.log(
            "warning", "what this site has trained alone cannot be used; it is trained again", file=file, reason=why
        )

    state = node.membership.site.state
    return Phases(state / ALONE, node.oversight.works_alone, unusable, functools.partial(storing, state))


def alone_run(node: "Node", network: Network) -> AloneRun:
    """Returns how this site trains alone."""
    experiment, options = node.membership.experiment, node.membership.options
    return AloneRun(node.membership.topology, experiment.rounds, experiment.seeds[0], options, network, phases_of(node))


def _with_references(problem: Prepared, node: "Node", network: Network) -> Prepared:
    """Returns the problem with the losses that its objective compares this site's with, such as that of a model that it
    trains alone. They are found once in a run, from this site's data only. Those on disk are used if they are of this
    run and of this site's data and start; sites that leave or come back do not change them."""
    identity = alone_identity(problem, node.membership)
    return with_references(problem, alone_run(node, network), identity=identity, told=False)


def alone_identity(problem: Prepared, membership: Membership) -> dict[str, Any]:
    """Returns all that determines what this site trains alone. It has the start of the run, which all sites agree on,
    and not this site's number among those that are still in the mesh."""
    (mine,) = [site for site in problem.sites if site.train.here]
    sets = [mine.train, mine.validation] if problem.objective.judged_on == "validation" else [mine.train]
    start = problem.initial_whole_row(membership.experiment.seeds[0]).numpy().tobytes()
    return {
        "site": membership.name,
        "agreed": membership.agreed,
        "secret of the draws": secret_of(membership),
        "rows": [fingerprint(samples) for samples in sets],
        "start": hashlib.sha256(start).hexdigest(),
    }


def secret_of(membership: Membership) -> str:
    """Returns a digest of the secret that this site's draws come from."""
    return "none" if membership.secret is None else SecretIdentities([membership.secret]).digest()


def restore(
    membership: Membership, problem: Prepared, mailroom: Mailroom, done: int, into: Store, start: Start
) -> None:
    """Waits for what the neighbours know of this site after round `done`, and writes it as a checkpoint."""
    like, names = untrained(membership, problem), membership.mesh.names
    starts: dict[str, bytes] = {}

    def read(position: int, data: bytes) -> dict[str, Tensor]:
        length = int.from_bytes(data[:8], "little")
        content = data[8 : 8 + length]
        start.refuse_other(content, names[position])
        starts[names[position]] = content
        return read_shared(data[8 + length :], like)

    parts = mailroom.take(restoring_step(done), membership.around, read)
    if len(set(starts.values())) > 1:
        raise BadInput(
            f"{', '.join(starts)} say that the run started from different models, so one of them does not tell the "
            "truth; let the others vote it out, or vote for an earlier round"
        )
    state = restored(like, {names[position]: parts[position] for position in membership.around})
    start.keep(next(iter(starts.values())))
    identity = identity_of(membership, problem.changed(model=start.model()))
    into.save(state, done, identity, len(membership.present))


class Rounds:
    """This node's part of the training in the generation of its membership."""

    def __init__(self, node: "Node", problem: Prepared, mailroom: Mailroom, store: Store):
        self.node, self.mailroom, self.store, self.membership = node, mailroom, store, node.membership
        membership, oversight = node.membership, node.oversight
        around, present = membership.around, membership.present
        peers = PeerTransport(membership.number, [present.index(position) for position in around], around, mailroom)
        network = network_of(membership, problem, peers)
        problem = _with_references(problem, node, network)
        plan = plan_of(membership, problem)
        if node.private is not None:
            restored = membership.name in node.ledger.restored()
            plan = node.private.entered(plan, membership, node.ledger.begun[-1].start, restored)
        self.problem, self.training = problem, plan.training(network)
        worker = self.training.oracle.worker
        if worker is not None:
            worker.done, worker.watch = store.work, oversight.works_locally
        self.identity, self.judge = identity_of(membership, problem), self.evaluator(judged_on(problem))
        if undefined := undefined_sites(problem, on := judged_on(problem)):
            what = "the metric that decides is not defined here, so this site has no verdict"
            node.aside.once((what,), "warning", what, reason=undefined_in_words(problem, undefined, on))
        self._compared = _neighbours_in_every_graph(membership)
        self._run = ObservedRun(self.training, membership.experiment.rounds, self.training.initial())

    def evaluator(self, split: Literal["test", "validation", "train"]) -> Evaluator:
        """Returns what measures models on a split of this site's data."""
        failed = self.node.oversight.metric_failed
        return Evaluator(self.problem, split, self.training.device, self.training.dtype, failed=failed)

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
        content, around = start.content(), self.membership.around
        head = len(content).to_bytes(8, "little") + content
        parts = {position: head + shared(self.state, 1 + around.index(position)) for position in whom}
        self.mailroom.post(restoring_step(done), parts)

    def train(self, done: int) -> None:
        """Trains from the checkpoint after round `done` to the last round."""
        self._go_to(done)
        self._begin_hashes(done)
        experiment = self.membership.experiment
        observers = [
            self.node.oversight,
            _SiteMeasuring(self),
            _Checkpointing(self),
            *experiment.observers,
            _SiteEnding(self),
        ]
        try:
            observe(self._run, self.training.states(self.state, done, experiment.rounds), observers)
        except SiteDiverged:
            raise
        except Diverged as error:  # what the site would have sent in the round after
            raise SiteDiverged(self.membership.name, self.done, self.done + 1, str(error)) from error

    def _go_to(self, done: int) -> None:
        if self.store.at_or_before(done) == done or done in self.store.landmarks:
            self._run.state = self.store.load(done, self.state, self.identity)
        self._run.round = done

    def _begin_hashes(self, done: int) -> None:
        """Continues the running hashes of messages where they were at the checkpoint after round `done`."""
        generation, start = self.membership.mesh.generation, self.node.ledger.begun[-1].start
        hashes = dict.fromkeys([OWN, *self.membership.around], first_hash(generation, start))
        if done != start:
            try:
                kept = self.store.hashes()[str(done)]
                hashes = {who: str(kept[str(who)]) for who in hashes}
            except (BadInput, KeyError):
                hashes, file = {}, str(self.store.hashes_path.relative_to(self.node.folder))
                what = "the running hashes of messages are lost; this site and its neighbours do not compare messages"
                self.node.log("warning", f"{what} until the next decision of all sites", file=file)
        self.mailroom.chains.begin(done, hashes)

    def keep_hashes(self, done: int) -> None:
        """Writes the running hashes, before the checkpoint after round `done`."""
        self.store.keep_hashes(done, self.mailroom.chains.after(done))

    def hashes(self, done: int) -> tuple[str | None, dict[str, str]]:
        """Returns the running hash of what this site has sent, and of what it has taken from each neighbour whose
        messages can be compared; None and nothing where they are not known."""
        known, names = self.mailroom.chains.after(done), self.membership.mesh.names
        return known.get(OWN), {names[who]: known[who] for who in self._compared if who in known}

    def state_at(self, agreed: int) -> TrainingState:
        """Returns the state after `agreed` rounds, computed again from the last checkpoint before and the journal."""
        self._go_to(agreed if agreed in self.store.landmarks else self.store.at_or_before(agreed) or 0)
        for t in range(self.done, agreed):
            self._run.state = self.training.advance(self.state, t)
        return self.state


def _neighbours_in_every_graph(membership: Membership) -> list[int]:
    """Returns the positions of the neighbours that get this node's whole message in every round."""
    cycle, present = cycle_of(membership.topology, membership.mesh), membership.present
    weights = [
        {at: mixing.matrix[membership.number, present.index(at)] for at in membership.around} for mixing in cycle
    ]
    return [at for at in membership.around if all(of_round[at] for of_round in weights)]


def restoring_step(done: int) -> int:
    """Returns the step in which neighbours send a site what they know of it, before the first round of a generation
    that begins after `done` rounds."""
    return done + FIRST_ROUND - 1


class _SiteMeasuring(Observer):
    """Evaluates this node's own model on this site's own data. Raises SiteDiverged once its model or dual is not finite
    or has exploded, before it is measured or stored. It looks after every round, so that people see whose numbers
    exploded first."""

    def __init__(self, rounds: Rounds):
        self._site, self._number, self._node = rounds.membership.name, rounds.membership.number, rounds.node
        self._judge, self._validation, self._hashes = rounds.judge, rounds.evaluator("validation"), rounds.hashes
        self._private = rounds.node.private

    def start(self, run: ObservedRun) -> None:
        self.run, self._sound = run, run.round

    def after_round(self, round: int, state: TrainingState) -> None:
        training, number = self.run.training, self._number
        if bool(training.unsound(state).any()):
            raise SiteDiverged(self._site, self._sound, round, training.unsound_quantity(state, 0, 0))
        self._sound = round
        if not self.run.measure_due:
            return
        models = training.whole_models(state)[:, 0]
        values = self._measured(models)
        duals, own = training.view.duals(state.algorithm), training.view.own_weights(state.algorithm)
        weight = None if own is None else float(own[0, 0, 0]) / training.problem.n
        weight = weight if duals is None else float(duals[0, 0, number])
        weight = weight if WEIGHT(weight) else None  # others would refuse it
        if self._private is not None:  # what is measured on rows stays here
            self._node.log("info", "measured here, and not told", round=round, **values)
            values = self._private.told(values, training)
        validated = self._validation.of_sites(models) if self._validation and self._private is None else {}
        every = [*values.values(), *(float(value[0, number]) for value in validated.values())]
        sent = float(state.sent.node_bits[0, 0]), int(state.sent.node_bytes[0, 0])
        self._node.measurements.add(round, every, weight, sent, *self._hashes(round))
        self._node.measurements.offer(round, models[0])
        self._node.oversight.measured(values | {"round": round}, weight)
        # For observers, a record of a simulation with this site alone.
        record: Record = {"round": round, "replica": 0, "seed": training.replicas[0].seed}
        for name, value in values.items():
            record[name] = {"worst": value, "mean": value, "best": value, "gap": 0.0, "sites": [value]}
        self.run.new_records = [record | {"bytes_total": sent[1]}]
        self.run.records += self.run.new_records

    def _measured(self, models: Tensor) -> dict[str, float]:
        """Returns each metric of this node's model at its site. Where one row makes the user's code raise, a private
        node goes on, since others would see that it has stopped."""
        try:
            return {name: float(value[0, self._number]) for name, value in self._judge.of_sites(models).items()}
        except Exception as error:
            if self._private is None:
                raise
            self._node.log("warning", "its own rows cannot be measured", error=type(error).__name__)
            return dict.fromkeys(self._judge.names, math.nan)


class _Checkpointing(Observer):
    """Writes a checkpoint from time to time, by rounds, time or the journal's size, and when the rounds stop. Then
    drops what the journal no longer needs."""

    def __init__(self, rounds: Rounds):
        self._rounds, self._node, self._store = rounds, rounds.node, rounds.store
        self._landmark_every = landmark_every(rounds.membership.experiment.rounds)

    def start(self, run: ObservedRun) -> None:
        self.run, self._saved, self._saved_at, self._took_s = run, run.round, time.monotonic(), 0.0

    def after_round(self, round: int, state: TrainingState) -> None:
        ledger = self._node.ledger
        if round % self._landmark_every == 0 and round not in self._store.landmarks:
            # Else a certificate may still ask for any of them.
            thin = ledger.pinned is None and not ledger.somebody_goes_back()
            self._node.measurements.store_models()
            self._store.keep(self.run.state, round, self._rounds.identity, thin)
        if self._due(round, state) or (self._node.oversight.stopping and self._saved != round):
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
        allowed = journal_allowed(self.run.training.view.models(state.algorithm).nbytes)
        pause = max(_CHECKPOINT_S, self._took_s / _CHECKPOINT_SHARE)
        late = every is None and time.monotonic() - self._saved_at > pause
        return late or self._rounds.mailroom.journal_bytes() + self._store.work.nbytes(self._saved) > allowed

    def _save(self, done: int) -> None:
        node, rounds, began = self._node, self._rounds, time.monotonic()
        node.observe("before checkpoint", done)
        node.measurements.store_models()
        reach = len(rounds.membership.present)
        rounds.keep_hashes(done)
        if node.private is not None:
            node.private.keep()
        oldest = self._store.save(self.run.state, done, rounds.identity, reach, node.ledger.pinned)
        node.observe("after checkpoint", done)
        node.measurements.drop_models()
        rounds.mailroom.rotate(oldest + FIRST_ROUND if oldest else 0)
        node.observe("after rotation", done)
        self._saved, self._saved_at = done, time.monotonic()
        self._took_s = self._saved_at - began


class _SiteEnding(Observer):
    """Stops when the watch asks for it. An observer at one site cannot end the run of all sites."""

    def __init__(self, rounds: Rounds):
        self._node = rounds.node

    def after_round(self, round: int, state: TrainingState) -> None:
        if self.run.stop_reason is not None:
            what = "an observer asked to end the run; one site cannot, so the run continues"
            self._node.aside.once((what,), "warning", what, round=round, reason=self.run.stop_reason)
        self.run.stop_reason = None
        if self._node.oversight.stopping and not self.run.is_last:
            raise self._node.oversight.stopping
