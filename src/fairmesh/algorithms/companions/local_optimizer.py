"""The memory of each node's optimizer, which turns gradients into directions before the algorithm sees them."""

from operator import attrgetter
from typing import Any, cast

from fairmesh.algorithms.companions.base import Companion, CompanionInputs, Question
from fairmesh.algorithms.optimizers import Optimizer


class LocalOptimizer(Companion):
    """Makes directions of gradients."""

    name = "optimizer"
    order = 2
    needed = attrgetter("optimizer")

    @staticmethod
    def init(run: CompanionInputs) -> Any:
        return cast(Optimizer, run.optimizer).init(run.oracle.initial_models())

    def after(self, question: Question) -> None:
        optimizer, memory = cast(Optimizer, self.run.optimizer), self.seen_with(question.call)
        question.gradients, after = optimizer.direction(
            memory, question.gradients, question.models, self.run.oracle.model.layout
        )
        self.advance(question, lambda: after)
