"""Weights of subgroups, for any algorithm: what nodes remember of their subgroups' losses, and tell each other.

An algorithm sees losses and gradients in which every row counts by the ratio of its subgroup. Subgroups of one site are
weighed by the site itself. For subgroups that span sites, all nodes learn the mean loss of each by gossip.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fairmesh.networks.base import Delivery
from fairmesh.networks.roles import PerNode, Role
from fairmesh.problems.oracle import Oracle
from fairmesh.problems.subgroups import Seen, ratios_of, table_of

MEMORY = 0.98  # of the moving sums per round: about 50 batches count


class SubgroupState(NamedTuple):
    """What each hosted node remembers of its subgroups, (replicas, nodes, subgroups)."""

    sums: PerNode  # moving sums of the losses of each subgroup's rows
    counts: PerNode  # and of the number of these rows
    balances: Annotated[
        Tensor | None, Role(held_by="node", sums_to_zero=True)
    ]  # what gossip added to the node's part of the table (replicas, nodes, 2 subgroups), if subgroups span sites

    @property
    def known(self) -> Seen:
        return Seen(self.sums, self.counts)


def initial_state(oracle: Oracle) -> SubgroupState | None:
    """Returns the state before round 0, or None if subgroups have no weights."""
    if not oracle.subgroups:
        return None
    nothing = torch.zeros_like(oracle.subgroup_shares)
    across = oracle.problem.objective.subgroups == "across"
    return SubgroupState(nothing, nothing.clone(), torch.cat([nothing, nothing], dim=-1) if across else None)


def table_at(state: SubgroupState, masses: Tensor) -> Tensor:
    """Returns what the nodes know of all subgroups, as `ratios_of` reads it.

    Args:
        state: What they remember.
        masses: The weight of each subgroup's rows at each node."""
    own = table_of(state.known, masses)
    return own if state.balances is None else own + state.balances


def weights_of(state: SubgroupState, masses: Tensor, strength: float) -> Tensor:
    """Returns the weights of the subgroups as each node sees them, (..., subgroups), which sum to one."""
    table = table_at(state, masses)
    shares = table.clamp(min=0.0).chunk(2, dim=-1)[1]
    return shares / shares.sum(dim=-1, keepdim=True) * ratios_of(table, strength)


class SubgroupRound:
    """The subgroups in one round: their ratios, what was seen of them, and what is sent.

    Args:
        state: The state before the round.
        oracle: The nodes' data.
        priors: n p_i of the hosted nodes (replicas, nodes, 1)."""

    def __init__(self, state: SubgroupState, oracle: Oracle, priors: Tensor):
        self._state = state
        self._seen: SubgroupState | None = None
        self.delivery: Delivery | None = None  # of the round's message, if it has a table
        self._masses = oracle.subgroup_shares if state.balances is None else oracle.subgroup_shares * priors
        self.ratios = ratios_of(table_at(state, self._masses), oracle.problem.objective.subgroup_strength)

    def saw(self, seen: Seen, fresh: Tensor | float) -> None:
        """Notes the losses of the round's first batch. They count `fresh`, 1 while the weights follow them, else 0."""
        if self._seen is None:
            old = self._state
            sums, counts = MEMORY * old.sums + seen.sums, MEMORY * old.counts + seen.counts
            if isinstance(fresh, Tensor):
                sums, counts = torch.lerp(old.sums, sums, fresh), torch.lerp(old.counts, counts, fresh)
            self._seen = old._replace(sums=sums, counts=counts)

    def to_send(self) -> Tensor | None:
        """Returns the table that a node sends, if subgroups span sites."""
        return None if self._state.balances is None else table_at(self._seen or self._state, self._masses)

    def after(self) -> SubgroupState:
        """Returns the state after the round."""
        state = self._seen or self._state
        if self.delivery is None:
            return state
        return state._replace(balances=self.delivery.mix("subgroups") - table_of(state.known, self._masses))
