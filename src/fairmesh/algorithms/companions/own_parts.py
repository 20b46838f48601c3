"""What stays at a node, for any algorithm: local parameters and the statistics of BatchNorm layers.

An algorithm sees losses and gradients of the shared parameters. The first time that it asks for the gradients of a
batch, the node's own part takes a step on the same batch. Nothing of it is ever sent.
"""

from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.companions.base import Companion, CompanionInputs, Question
from fairmesh.networks.roles import PerNode
from fairmesh.problems.oracle import Oracle

_TINY = 1e-8  # as in Adam


class OwnState(NamedTuple):
    """The own part of each hosted node."""

    rows: PerNode  # local parameters and statistics (replicas, nodes, own_dim)
    momenta: PerNode  # of the local parameters (replicas, nodes, local_dim)
    squares: PerNode  # mean squares of their gradients (replicas, nodes, local_dim)
    steps: PerNode  # that were taken (replicas, nodes, 1)


class OwnParts(Companion):
    """Adds the own parts to the models that are evaluated, and lets them take a step with their gradients."""

    name = "own"
    order = 1
    needed = attrgetter("oracle.model.own_dim")
    outlives_run = True

    @staticmethod
    def init(run: CompanionInputs) -> OwnState:
        rows = run.oracle.initial_own()
        nothing = torch.zeros_like(rows[..., : run.oracle.model.local_dim])
        return OwnState(rows, nothing, nothing.clone(), torch.zeros_like(rows[..., :1]))

    def before(self, question: Question) -> None:
        question.rows = torch.cat([question.models, self.seen_with(question.call).rows], dim=-1)

    def after(self, question: Question) -> None:
        if question.own_parts is not None:
            after = self.state._replace(rows=question.own_parts)
            self.advance(question, lambda: after)
            return
        shared = question.models.shape[-1]
        self._step(question, question.gradients[..., shared:])
        question.gradients = question.gradients[..., :shared]

    def after_samples(self, question: Question) -> None:
        shared = question.models.shape[-1]
        self._step(question, question.gradients[..., shared:].mean(dim=-2))
        question.gradients = question.gradients[..., :shared]

    def _step(self, question: Question, gradients: Tensor) -> None:
        self.advance(question, lambda: stepped(self.state, gradients, self.run.oracle))


def stepped(old: OwnState, gradients: Tensor, oracle: Oracle) -> OwnState:
    """Returns the own parts after a step of Adam, and after the statistics have moved by their momentum.

    Args:
        old: The own parts before.
        gradients: Their gradients (..., nodes, own_dim).
        oracle: The nodes' data, for the settings."""
    model, parts = oracle.model, oracle.problem.parts
    parameters, statistics = old.rows.split([model.local_dim, model.own_dim - model.local_dim], dim=-1)
    slope, apart = gradients.split([model.local_dim, model.own_dim - model.local_dim], dim=-1)
    steps = old.steps + 1.0
    momenta = torch.lerp(slope, old.momenta, parts.beta1)
    direction = momenta / (1.0 - parts.beta1**steps)
    squares = old.squares
    if parts.beta2:
        squares = torch.lerp(slope.square(), old.squares, parts.beta2)
        direction = direction / ((squares / (1.0 - parts.beta2**steps)).sqrt() + _TINY)
    rows = torch.cat([parameters - parts.step * direction, statistics - model.momenta * apart], dim=-1)
    return OwnState(rows, momenta, squares, steps)
