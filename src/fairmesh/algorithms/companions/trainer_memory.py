"""What the sites' own training functions keep, and their updates in the place of gradients."""

from operator import attrgetter
from typing import Annotated, NamedTuple

from torch import Tensor

from fairmesh.algorithms.companions.base import Companion, CompanionInputs, Question
from fairmesh.errors import BadInput
from fairmesh.networks.roles import Role
from fairmesh.problems.local_work import no_memory


class TrainerState(NamedTuple):
    """What the functions keep, as bytes."""

    memory: Annotated[Tensor, Role(held_by="node", any_length=True)]  # (replicas, nodes, length)


class TrainerMemory(Companion):
    """Lets the training functions work instead of computing gradients."""

    name = "trainer"
    order = 3
    needed = attrgetter("oracle.problem.trainer")

    _trained = False

    @staticmethod
    def init(run: CompanionInputs) -> TrainerState:
        return TrainerState(no_memory(*run.oracle.initial_models().shape[:2]))

    def before(self, question: Question) -> None:
        question.evaluate = self._worked

    def _worked(self, question: Question) -> tuple[Tensor, Tensor]:
        if self._trained:
            raise BadInput(
                "the algorithm asks for gradients more than once per round, but a trainer gives one update; use "
                "an algorithm or settings with one gradient per round"
            )
        self._trained = True
        oracle, memory = self.run.oracle, self.state.memory
        work = oracle.trained(question.rows, question.index, question.call, memory, question.receivers)
        self.state, question.own_parts = TrainerState(work.memory), work.own
        return work.losses, work.updates
