"""A node in one generation of the mesh, up to its last round: it agrees with the others on the data and on the model to
start from, and trains."""

from collections.abc import Sequence

from fairmesh.errors import listed
from fairmesh.mesh.node import data_agreement, divergence, life, result
from fairmesh.mesh.node.claims import PUT_BACK
from fairmesh.mesh.node.measurements import Schedule
from fairmesh.mesh.node.node import Node
from fairmesh.mesh.node.rounds import Rounds, branch_of, restoring_step
from fairmesh.mesh.node.start import Start
from fairmesh.mesh.node.store import PROGRESS, RESULT, TABLE, Store
from fairmesh.mesh.wire.links import Links
from fairmesh.mesh.wire.transport import FIRST_ROUND
from fairmesh.problems.prepared import Prepared
from fairmesh.storage.run_folder import Record
from fairmesh.trackers import TrackedReplica


class Generation:
    """What a node has while it takes part in a generation. Its mailroom is open; `problem`, `links` and `rounds` come
    with the states that follow.

    Args:
        node: The node.
    """

    problem: Prepared  # of all present sites
    start: Start
    links: Links  # to the neighbours
    rounds: Rounds

    def __init__(self, node: Node):
        membership = node.membership
        self.store = Store(node.folder, membership.mesh.generation, node.log)
        self.done = self.store.newest or 0
        first = self.done + FIRST_ROUND if self.done else 0
        # Neighbours that have lost their state get one from this generation's start.
        lost = node.ledger.restored() if self.done and self.done == node.ledger.begun[-1].start else []
        self.owed = [neighbour.position for neighbour in membership.neighbours if neighbour.name in lost]
        self.mailroom = node.open.enter_context(node.opened(first))
        for position in self.owed:
            self.mailroom.owe(position, restoring_step(self.done))
        node.machines.begin(membership.mesh.generation, first)
        if self.mailroom.other_machine:
            said = "this machine differs from before; messages that were sent stay as they are"
            node.log("warning", said, difference=self.mailroom.other_machine)


def agree_on_data(node: Node) -> str:
    """Enters the newest generation. If this site has diverged in it before a restart, it has still."""
    membership = node.membership
    diverged = divergence.told(node.bulletin, membership).get(membership.name)
    node.ledger.vote()
    if diverged and not node.ledger.has_voted:  # else it must compute again how far it had come
        raise diverged
    node.reached = lambda: 0
    node.generation = generation = Generation(node)
    generation.problem, generation.start = data_agreement.settle(node, generation.mailroom)
    data_agreement.show(node, generation.problem)
    generation.links = node.open.enter_context(node.linked(generation.mailroom))
    return life.TRAINING if generation.done else life.ON_START


def agree_on_start(node: Node) -> str:
    """Takes over the model that all sites start from."""
    generation, membership = node.generation, node.membership
    generation.start.agree(generation.mailroom, branch_of(membership), membership.around, membership.present)
    generation.problem = node.problem(membership)
    return life.TRAINING


def train(node: Node) -> str:
    """Does all rounds that are left."""
    generation = node.generation
    _measure(node)
    generation.rounds = rounds = Rounds(node, generation.problem, generation.mailroom, generation.store)
    node.reached = lambda: rounds.done
    if generation.owed:
        rounds.share(generation.done, generation.owed, generation.start)
    rounds.train(generation.done)
    return life.ENDING if _has_result(node) else life.COLLECTING


def _has_result(node: Node) -> bool:
    """Returns whether this site has the result that it has announced. One that the disk has damaged since is computed
    again."""
    folder = node.folder / RESULT
    announced = node.bulletin.of(node.membership.name, "result")
    if not folder.exists() or result.is_intact(folder, announced.get("digest", "")):
        return folder.exists()
    node.log("warning", "the result is damaged, or it is not known whether it is; it is computed again", folder=RESULT)
    return False


def _measure(node: Node) -> None:
    """Begins or continues what all sites measure in this generation."""
    membership, experiment, generation = node.membership, node.membership.experiment, node.generation
    options = experiment.options
    schedule = Schedule(
        experiment.rounds,
        options.measure_every,
        "last" if node.private else options.best_by,  # no site tells its metrics without noise
        experiment.seeds[0],
        options.cvar_level,
        node.ledger.measured_since(),
    )
    for tracker in node.trackers:
        settings, run = result.settings_of(membership) | {"site": membership.name}, membership.mesh.name
        tracker.begin(membership.names, node.folder)
        tracker.add_replica(0, TrackedReplica(f"{run}, seen from {membership.name}", run, settings, "0"))

    def after_record(records: Sequence[Record]) -> None:
        result.write_progress(membership, generation.problem, records, node.folder / PROGRESS)
        for tracker in node.trackers:
            tracker.add_records(records)

    start, landmarks = node.ledger.begun[-1].start, lambda: tuple(generation.store.landmarks)
    node.measurements.after_record = after_record
    names, problem = membership.names, generation.problem
    node.measurements.enter(membership.mesh.generation, start, schedule, problem, names, landmarks)
    if lost := node.measurements.lost(generation.done):
        reason = f"{node.folder / TABLE} lacks rounds {listed(lost)} of this site; {PUT_BACK}"
        node.log(
            "error", "this site's own measurements are damaged, and the run cannot end without them", reason=reason
        )
