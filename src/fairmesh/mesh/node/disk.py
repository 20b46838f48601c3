"""How much disk a node needs: the size of a checkpoint, and a bound for the whole run."""

from typing import NamedTuple

from fairmesh.data.site import Site
from fairmesh.mesh.node.membership import Membership, common_problem, facts
from fairmesh.mesh.node.rounds import journal_allowed, untrained
from fairmesh.problems.prepared import Prepared
from fairmesh.storage.state_tree import flatten_state
from fairmesh.training.loop import TrainingState

_CHECKPOINTS = 1 + 3  # being written, and kept to go back to
_TO_CONTINUE = 3  # checkpoints
_TRAINER_ROWS = 2  # of the size of the model, that a training function keeps from round to round, as Adam does
_SEGMENTS = 4  # of the journal, since the oldest checkpoint
_MODELS = 10  # of the best rounds, of the site alone, in the result, and in the one that is not confirmed yet
_SMALL = 32 << 20  # bytes of the log, the metrics and all other files


class Disk(NamedTuple):
    """What a node needs, in bytes."""

    model: int
    checkpoint: int  # at most
    work: int  # finished local work of one round by a training function, if there is one
    at_most: int  # during the run, everything together
    at_the_end: int  # when every site has its result


def alike_everywhere(membership: Membership, own: Site) -> Prepared:
    """Returns the problem of all sites as it is if each has as much data as this one, for estimates."""
    said = facts(own)
    return common_problem(membership, own, {member.name: said for member in membership.mesh.present})


def disk_of(membership: Membership, own: Site) -> Disk:
    """Returns what the node of a site with this data needs. Makes the state before the first round."""
    problem = alike_everywhere(membership, own)
    state = untrained(membership, problem)
    model = (problem.flat_model.dim + problem.flat_model.own_dim) * state.average_model.element_size()
    checkpoint, work, kept = checkpoint_bytes(state), 0, _TO_CONTINUE
    if problem.trainer is not None:
        checkpoint += _TRAINER_ROWS * model
        work = (1 + _TRAINER_ROWS) * model
        kept = max(kept, len(membership.present) + 2)  # rounds are long, so that each may end with a checkpoint
    at_most = (kept + _CHECKPOINTS) * checkpoint + kept * work
    at_most += _SEGMENTS * (journal_allowed(model) + model + work) + _MODELS * model + _SMALL
    return Disk(model, checkpoint, work, at_most, 4 * model + _SMALL)


def checkpoint_bytes(state: TrainingState) -> int:
    """Returns the size of a checkpoint, without its header."""
    return sum(tensor.nbytes for tensor in flatten_state(state).values())
