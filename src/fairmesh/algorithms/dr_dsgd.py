"""DR-DSGD: distributionally robust decentralized SGD with a KL regularizer, whose inner maximum is solved exactly.

Ben Issaid, Elgabli, Bennis: DR-DSGD: A Distributionally Robust Decentralized Learning Algorithm over Graphs, TMLR 2022.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from fairmesh.algorithms.base import Algorithm, Round, plain, prior_weights
from fairmesh.algorithms.schedules import Geometric, Schedule, as_schedule
from fairmesh.errors import BadInput
from fairmesh.networks.base import Network
from fairmesh.networks.roles import Models
from fairmesh.problems.oracle import Oracle


class DRDSGDState(NamedTuple):
    models: Models  # (..., nodes, dim)


@dataclass(frozen=True)
class DRDSGD(Algorithm):
    """x_i <- sum_j w_ij (x_j - eta m p_j exp(f_j / mu) / mu * grad f_j(x_j))."""

    primal_step: Schedule | float = field(default_factory=lambda: Geometric(1.0, 0.998))  # eta
    temperature: float = 6.0  # mu, which is m alpha in the objective's own scale

    def __post_init__(self):
        object.__setattr__(self, "primal_step", as_schedule(self.primal_step))
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise BadInput(f"temperature must be a finite number > 0, got {self.temperature}")

    def init(self, oracle: Oracle, network: Network) -> DRDSGDState:
        return DRDSGDState(oracle.initial_models())

    def step(self, state: DRDSGDState, ctx: Round) -> DRDSGDState:
        losses, gradients = ctx.losses_and_gradients(state.models)
        emphasis = prior_weights(ctx) * (losses / self.temperature).exp() / self.temperature
        models = state.models - ctx.step_size(self.primal_step) * emphasis * gradients
        return DRDSGDState(ctx.exchange(model=plain(models)).mix("model"))
