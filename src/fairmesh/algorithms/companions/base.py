"""The base class of companions: states and steps that go along with an algorithm, unseen by it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.optimizers import Optimizer
from fairmesh.networks.base import Delivery, Part
from fairmesh.problems.oracle import Oracle

if TYPE_CHECKING:
    from fairmesh.algorithms.round import Round


class CompanionInputs(NamedTuple):
    """What companions of a run may read."""

    oracle: Oracle
    optimizer: Optimizer | None = None


@dataclass(slots=True)
class Question:
    """Losses and gradients that an algorithm asks for. Companions change the question before the oracle sees it, and
    the answer before the algorithm does."""

    models: Tensor  # where it asks (..., nodes, dim)
    index: Tensor  # in which round
    call: int  # on which of its batches
    rows: Tensor  # what is evaluated (..., nodes, dim and what companions add)
    evaluate: Callable[["Question"], tuple[Tensor, Tensor]]  # -> losses and gradients at the rows
    receivers: Tensor | None  # the nodes that have got the server's model in this round (..., nodes); None for all
    losses: Tensor
    gradients: Tensor
    own_parts: Tensor | None = None  # the own parts afterwards, if the evaluation itself has changed them

    def at_receivers(self, new: Any, old: Any) -> Any:
        """Returns a new state at the nodes that take part, and the old one at the others."""
        if self.receivers is None or old is None:
            return new
        chosen = self.receivers.unsqueeze(-1)
        return type(old)(*(torch.where(chosen, after, before) for after, before in zip(new, old)))


class Companion(ABC):
    """Something that goes along with every round of an algorithm: it may change what the algorithm asks and what it is
    answered, and add parts to the message. An object lives for one round.

    A subclass is a file in this folder, which is found by itself. Its state is a NamedTuple of tensors with a row per
    hosted node, or None; it becomes part of checkpoints under the companion's name.

    Args:
        state: The state before the round.
        ctx: The round, which it must not keep: a cycle of references would hold on to the tensors of past rounds.
        run: What it may read of the run.

    Attributes:
        name: The name of its state.
        order: Questions and answers pass companions with lower numbers first. If several replace `evaluate`, the last
            one counts.
        needed: CompanionInputs -> a true value if the run has this companion.
        outlives_run: Whether results read its state. Default: False, only further rounds need it.
    """

    name: ClassVar[str]
    order: ClassVar[int]
    needed: ClassVar[attrgetter]
    outlives_run: ClassVar[bool] = False

    def __init__(self, state: Any, ctx: "Round", run: CompanionInputs):
        self.state, self.run = state, run
        self._seen_with: dict[int, Any] = {}

    @staticmethod
    @abstractmethod
    def init(run: CompanionInputs) -> Any:
        """Returns the state before round 0."""

    def before(self, question: Question) -> None:  # noqa: B027
        """Changes what is evaluated."""

    def after(self, question: Question) -> None:  # noqa: B027
        """Reads and changes losses and gradients."""

    def after_samples(self, question: Question) -> None:  # noqa: B027
        """Reads and changes gradients of single samples (..., nodes, samples, dim)."""

    def parts(self) -> Mapping[str, Part]:
        """Returns what it adds to the round's message. Default: nothing."""
        return {}

    def sent(self, delivery: Delivery) -> None:  # noqa: B027
        """Notes the delivery of the message."""

    def end(self) -> Any:
        """Returns the state after the round."""
        return self.state

    def seen_with(self, call: int) -> Any:
        """Returns the state before the batch of a call was first asked for, so that a second question sees the same."""
        return self._seen_with.get(call, self.state)

    def advance(self, question: Question, after: Callable[[], Any]) -> None:
        """Sets the state to `after()` at the nodes that take part. Only the first question about a batch does so."""
        if question.call not in self._seen_with:
            before = self._seen_with[question.call] = self.state
            self.state = question.at_receivers(after(), before)
