"""AD-GDA: agnostic decentralized gradient descent/ascent with compressed communication.

Zecchin, Kountouris, Gesbert: Communication-Efficient Distributionally Robust Decentralized Learning, TMLR 2022,
Algorithm 1.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal, NamedTuple

from torch import Tensor

from fairmesh.algorithms.base import (
    Algorithm,
    GossipSettings,
    Round,
    capped,
    check_consensus_step,
    check_dual_step,
    check_loss_cap,
    prior_rows,
)
from fairmesh.algorithms.gossip import (
    PublicCopies,
    compressed_difference,
    gossip_step,
    gossiped_rows,
    updated_copies,
    zero_copies,
)
from fairmesh.algorithms.schedules import Geometric, Schedule, as_schedule
from fairmesh.compression.compressors import Compressor, Identity
from fairmesh.networks.base import Network
from fairmesh.networks.roles import OVER_NODES, Duals, Models
from fairmesh.problems.oracle import Oracle
from fairmesh.regularizers.base import Regularizer
from fairmesh.regularizers.members import ChiSquare


class ADGDAState(NamedTuple):
    models: Models  # theta_i (..., nodes, dim)
    duals: Duals  # lambda_i (..., nodes, n)
    copies: PublicCopies
    dual_copies: Annotated[PublicCopies | None, OVER_NODES]  # where duals travel compressed


@dataclass(frozen=True)
class ADGDA(Algorithm):
    """Every node descends its own loss weighted by its own lambda_i[i], ascends in lambda, and gossips both.

    `dual_order = "dual-first"` weighs the descent by the lambda just projected, as the published runs did. With a
    `dual_compressor`, duals too are gossiped as compressed differences to public copies, and put back into the
    regularizer's set by each receiver; without one they travel as they are, as in the paper."""

    primal_step: Schedule | float = field(default_factory=lambda: Geometric(1.0, 0.998))  # eta_theta
    dual_step: Schedule | float = 0.01  # eta_lambda
    consensus_step: float = 1.0  # gamma, the consensus step size
    compressor: Compressor = field(default_factory=Identity)  # Q
    regularizer: Regularizer = field(default_factory=ChiSquare)  # alpha r
    dual_compressor: Compressor | None = None
    dual_order: Literal["simultaneous", "dual-first"] = "simultaneous"
    loss_cap: float | None = None  # what the ascent sees of a node's loss is at most this

    def __post_init__(self):
        object.__setattr__(self, "primal_step", as_schedule(self.primal_step))
        object.__setattr__(self, "dual_step", as_schedule(self.dual_step))
        check_consensus_step(self.consensus_step)
        check_loss_cap(self.loss_cap)

    def check(self, prior: Tensor, dim: int) -> None:
        check_dual_step(self.dual_step, self.regularizer, prior)

    def robust_regularizer(self) -> Regularizer:
        return self.regularizer

    def keeps_node_rows(self) -> bool:
        return True

    def gossip_settings(self) -> GossipSettings:
        return GossipSettings(self.compressor, self.consensus_step)

    def init(self, oracle: Oracle, network: Network) -> ADGDAState:
        models = oracle.initial_models()
        duals = prior_rows(oracle, network)
        dual_copies = None if self.dual_compressor is None else zero_copies(duals, network)
        return ADGDAState(models, duals, zero_copies(models, network), dual_copies)

    def step(self, state: ADGDAState, ctx: Round) -> ADGDAState:
        losses, gradients = ctx.losses_and_gradients(state.models)
        slopes = capped(losses, self.loss_cap) * ctx.own + self.regularizer.gradient(state.duals, ctx.prior, ctx.own)
        allowed = partial(self.regularizer.project, prior=ctx.prior)
        duals = allowed(state.duals.addcmul(slopes, ctx.step_size(self.dual_step)))
        weighting = state.duals if self.dual_order == "simultaneous" else duals
        own_weights = (weighting * ctx.own).sum(dim=-1, keepdim=True)  # lambda_i[i]
        models = state.models.addcmul(gradients, ctx.step_size(self.primal_step) * own_weights, value=-1)
        del gradients
        models = gossip_step(models, state.copies, self.consensus_step, ctx)
        message = compressed_difference(models, state.copies, self.compressor, ctx)
        parts, arrived = gossiped_rows(duals, state.dual_copies, self.dual_compressor, ctx, allowed)
        delivery = ctx.exchange(model=message, **parts)
        duals, dual_copies = arrived(delivery)
        return ADGDAState(models, duals, updated_copies(state.copies, message, delivery, "model"), dual_copies)
