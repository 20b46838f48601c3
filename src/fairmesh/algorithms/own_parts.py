"""What stays at a node, for any algorithm: local parameters and the statistics of BatchNorm layers.

An algorithm sees losses and gradients of the shared parameters. The first time that it asks for the gradients of a
batch, the node's own part takes a step on the same batch. Nothing of it is ever sent.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.optimizers import where
from fairmesh.networks.roles import PerNode
from fairmesh.problems.oracle import Oracle

_TINY = 1e-8  # as in Adam


class OwnState(NamedTuple):
    """The own part of each hosted node."""

    rows: PerNode  # local parameters and statistics (replicas, nodes, own_dim)
    momenta: PerNode  # of the local parameters (replicas, nodes, local_dim)
    squares: PerNode  # mean squares of their gradients (replicas, nodes, local_dim)
    steps: PerNode  # that were taken (replicas, nodes, 1)


def initial_own_state(oracle: Oracle) -> OwnState | None:
    """Returns the state before round 0, or None if everything is shared."""
    if not oracle.model.own_dim:
        return None
    rows = oracle.initial_own()
    nothing = torch.zeros_like(rows[..., : oracle.model.local_dim])
    return OwnState(rows, nothing, nothing.clone(), torch.zeros_like(rows[..., :1]))


class OwnRound:
    """The own parts in one round.

    Args:
        state: The state before the round.
        oracle: The nodes' data."""

    def __init__(self, state: OwnState, oracle: Oracle):
        self._oracle, self._state = oracle, state
        self._rows_of: dict[int, Tensor] = {}  # by batch: the own parts that it was first evaluated with
        self.receivers: Tensor | None = None  # nodes that have got the server's model in this round (..., nodes)

    def rows(self, call: int) -> Tensor:
        """Returns the own parts to evaluate a batch with. They are the same each time in a round."""
        return self._rows_of.get(call, self._state.rows)

    def saw(self, call: int, gradients: Tensor) -> None:
        """Takes a step with the gradients of the own parts (..., nodes, own_dim), the first time for each batch."""
        if call in self._rows_of:
            return
        self._rows_of[call] = self._state.rows
        stepped = self._stepped(gradients)
        if self.receivers is not None:
            stepped = where(self.receivers.unsqueeze(-1), stepped, self._state)
        self._state = stepped

    def became(self, call: int, rows: Tensor) -> None:
        """Takes over own parts that a training function has trained."""
        self._rows_of[call] = self._state.rows
        self._state = self._state._replace(rows=rows)

    def _stepped(self, gradients: Tensor) -> OwnState:
        """Returns the state after a step of Adam, and after the statistics have moved by their momentum."""
        old, model, parts = self._state, self._oracle.model, self._oracle.problem.parts
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

    def after(self) -> OwnState:
        """Returns the state after the round."""
        return self._state
