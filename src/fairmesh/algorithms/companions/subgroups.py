"""Weights of subgroups, for any algorithm: what nodes remember of their subgroups' losses, and tell each other.

An algorithm sees losses and gradients in which every row counts by the ratio of its subgroup. Subgroups of one site are
weighed by the site itself. For subgroups that span sites, all nodes learn the mean loss of each by gossip.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.companions.base import Companion, CompanionInputs, Question
from fairmesh.networks.base import Delivery, Part, plain
from fairmesh.networks.roles import PerNode, Role
from fairmesh.problems.subgroups import Seen, ratios_of, table_of

if TYPE_CHECKING:
    from fairmesh.algorithms.round import Round

MEMORY = 0.98  # of the moving sums per round: about 50 batches count


class SubgroupState(NamedTuple):
    """What each hosted node remembers of its subgroups, (replicas, nodes, subgroups)."""

    sums: PerNode  # moving sums of the losses of each subgroup's rows
    counts: PerNode  # moving sums of the number of these rows
    balances: Annotated[
        Tensor | None, Role(held_by="node", sums_to_zero=True)
    ]  # what gossip added to the node's part of the table (replicas, nodes, 2 subgroups), if subgroups span sites

    @property
    def known(self) -> Seen:
        return Seen(self.sums, self.counts)


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


class Subgroups(Companion):
    """Weighs the rows of a batch by the ratios of their subgroups, remembers the losses, and sends what nodes know of
    subgroups that span sites."""

    name = "subgroups"
    order = 0
    needed = attrgetter("oracle.problem.objective.subgroups")
    outlives_run = True

    def __init__(self, state: SubgroupState, ctx: "Round", run: CompanionInputs):
        Companion.__init__(self, state, ctx, run)
        self._noted = False  # whether the losses of the round's first batch are in the state
        self._delivery: Delivery | None = None  # of the round's message, if it has a table
        shares = run.oracle.subgroups.shares
        self._masses = shares if state.balances is None else shares * (ctx.n * ctx.hosted(ctx.prior)).unsqueeze(-1)
        self._ratios = ratios_of(table_at(state, self._masses), run.oracle.problem.objective.subgroup_strength)

    @staticmethod
    def init(run: CompanionInputs) -> SubgroupState:
        nothing = torch.zeros_like(run.oracle.subgroups.shares)
        across = run.oracle.problem.objective.subgroups == "across"
        return SubgroupState(nothing, nothing.clone(), torch.cat([nothing, nothing], dim=-1) if across else None)

    def before(self, question: Question) -> None:
        question.evaluate = self._weighed

    def _weighed(self, question: Question) -> tuple[Tensor, Tensor]:
        index, oracle = question.index, self.run.oracle
        losses, gradients, seen = oracle.by_subgroup(question.rows, index, question.call, self._ratios)
        if not self._noted:
            self._note(seen, oracle.step_of_weights(1.0, index))
        return losses, gradients

    def _note(self, seen: Seen, fresh: Tensor | float) -> None:
        """Adds the losses of the round's first batch. They count `fresh`, 1 while the weights follow them, else 0."""
        self._noted, old = True, self.state
        sums, counts = MEMORY * old.sums + seen.sums, MEMORY * old.counts + seen.counts
        if isinstance(fresh, Tensor):
            sums, counts = torch.lerp(old.sums, sums, fresh), torch.lerp(old.counts, counts, fresh)
        self.state = old._replace(sums=sums, counts=counts)

    def parts(self) -> Mapping[str, Part]:
        if self.state.balances is None:
            return {}
        return {"subgroups": plain(table_at(self.state, self._masses), "losses")}

    def sent(self, delivery: Delivery) -> None:
        self._delivery = delivery

    def end(self) -> SubgroupState:
        if self._delivery is None or self.state.balances is None:
            return self.state
        balances = self._delivery.mix("subgroups") - table_of(self.state.known, self._masses)
        return self.state._replace(balances=balances)
