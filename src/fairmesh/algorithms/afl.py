"""AFL: agnostic federated learning, by way of a server.

Mohri, Sivek, Suresh: Agnostic Federated Learning, ICML 2019 (stochastic-AFL with the gradient of every client).
"""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from fairmesh.algorithms.base import Algorithm, Round
from fairmesh.algorithms.schedules import Geometric, Schedule, as_schedule
from fairmesh.networks.base import Network
from fairmesh.networks.roles import Duals, Models
from fairmesh.problems.oracle import Oracle
from fairmesh.regularizers.simplex import project_onto_simplex


class AFLState(NamedTuple):
    models: Models  # the server's w (..., 1, dim)
    duals: Duals  # the server's lambda (..., 1, n)


@dataclass(frozen=True)
class AFL(Algorithm):
    """w <- w - eta sum_i lambda_i grad f_i(w);  lambda <- projection of lambda + eta_lambda f(w), every step."""

    primal_step: Schedule | float = field(default_factory=lambda: Geometric(0.1, 0.998))  # eta_w
    dual_step: Schedule | float = 0.01  # eta_lambda

    needs_server: ClassVar[bool] = True

    def __post_init__(self):
        object.__setattr__(self, "primal_step", as_schedule(self.primal_step))
        object.__setattr__(self, "dual_step", as_schedule(self.dual_step))

    def init(self, oracle: Oracle, network: Network) -> AFLState:
        return AFLState(oracle.initial_models()[..., :1, :].clone(), oracle.prior.clone())

    def step(self, state: AFLState, ctx: Round) -> AFLState:
        weights = ctx.hosted(state.duals)  # lambda_i (..., nodes)
        everyone = torch.ones_like(weights, dtype=torch.bool)
        models = ctx.broadcast(state.models, everyone)
        losses, gradients = ctx.losses_and_gradients(models)
        model = state.models - ctx.step_size(self.primal_step) * ctx.average(gradients, weights)
        ascent = ctx.step_size(self.dual_step) * ctx.report(losses, everyone)
        return AFLState(model, project_onto_simplex(state.duals + ascent))
