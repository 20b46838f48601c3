"""AD-GDA: agnostic decentralized gradient descent/ascent with compressed communication.

Zecchin, Kountouris, Gesbert: Communication-Efficient Distributionally Robust Decentralized Learning, TMLR 2022,
Algorithm 1.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from fairmesh.algorithms.base import Algorithm, Round, capped, check_dual_step, check_loss_cap, check_rate, prior_rows
from fairmesh.algorithms.gossip import (
    PublicCopies,
    difference,
    followed,
    gossiped_rows,
    no_copies,
    toward_neighbours,
)
from fairmesh.algorithms.schedules import Geometric, Schedule, as_schedule
from fairmesh.compression.compressors import Compressor, Identity
from fairmesh.networks.base import Network
from fairmesh.problems.oracle import Oracle
from fairmesh.regularizers.base import Regularizer
from fairmesh.regularizers.members import ChiSquare


class ADGDAState(NamedTuple):
    models: Tensor  # theta_i (..., nodes, dim)
    duals: Tensor  # lambda_i (..., nodes, n)
    copies: PublicCopies
    dual_copies: PublicCopies | None  # where duals travel compressed


@dataclass(frozen=True)
class ADGDA(Algorithm):
    """Every node descends its own loss weighted by its own lambda_i[i], ascends in lambda, and gossips both.

    `dual_order = "dual-first"` weighs the descent by the lambda just projected, as the published runs did. With a
    `dual_compressor`, duals too are gossiped as compressed differences to public copies, and put back into the
    regularizer's set by each receiver; without one they travel as they are, as in the paper."""

    primal_step: Schedule | float = field(default_factory=lambda: Geometric(1.0, 0.998))  # eta_theta
    dual_step: Schedule | float = 0.01  # eta_lambda
    rate: float = 1.0  # gamma, the consensus step size
    compressor: Compressor = field(default_factory=Identity)  # Q
    regularizer: Regularizer = field(default_factory=ChiSquare)  # alpha r
    dual_compressor: Compressor | None = None
    dual_order: Literal["simultaneous", "dual-first"] = "simultaneous"
    loss_cap: float | None = None  # what the ascent sees of a node's loss is at most this

    needs_server: ClassVar[bool] = False

    def __post_init__(self):
        object.__setattr__(self, "primal_step", as_schedule(self.primal_step))
        object.__setattr__(self, "dual_step", as_schedule(self.dual_step))
        check_rate(self.rate)
        check_loss_cap(self.loss_cap)

    def check(self, prior: Tensor, dim: int) -> None:
        check_dual_step(self.dual_step, self.regularizer, prior)

    def oracle_calls(self) -> int:
        return 1

    def steps(self) -> dict[str, Schedule | float]:
        return {"primal_step": self.primal_step, "dual_step": self.dual_step}

    def init(self, oracle: Oracle, network: Network) -> ADGDAState:
        models = oracle.initial_models()
        duals = prior_rows(oracle, network)
        dual_copies = None if self.dual_compressor is None else no_copies(duals, network)
        return ADGDAState(models, duals, no_copies(models, network), dual_copies)

    def step(self, state: ADGDAState, round: Round) -> ADGDAState:
        losses, gradients = round.losses_and_gradients(state.models)
        slopes = capped(losses, self.loss_cap) * round.own + self.regularizer.slope(state.duals, round.prior, round.own)
        allowed = partial(self.regularizer.project, prior=round.prior)
        duals = allowed(state.duals.addcmul(slopes, round.step_size(self.dual_step)))
        weighing = state.duals if self.dual_order == "simultaneous" else duals
        own_weights = (weighing * round.own).sum(dim=-1, keepdim=True)  # lambda_i[i]
        models = state.models.addcmul(gradients, round.step_size(self.primal_step) * own_weights, value=-1)
        del gradients
        models = toward_neighbours(models, state.copies, self.rate, round)
        message = difference(models, state.copies, self.compressor, round)
        parts, arrived = gossiped_rows(duals, state.dual_copies, self.dual_compressor, round, allowed)
        delivery = round.exchange(model=message, **parts)
        duals, dual_copies = arrived(delivery)
        return ADGDAState(models, duals, followed(state.copies, message, delivery, "model"), dual_copies)
