"""AFL: agnostic federated learning, with a server.

Mohri, Sivek, Suresh: Agnostic Federated Learning, ICML 2019 (stochastic-AFL with the gradient of every client).
"""

from dataclasses import dataclass, field

import torch

from fairmesh.algorithms.base import Round
from fairmesh.algorithms.schedules import Measured, Schedule
from fairmesh.algorithms.server import AscentState, ServerAscent
from fairmesh.regularizers.simplex import project_onto_simplex


@dataclass(frozen=True)
class AFL(ServerAscent):
    """AFL: agnostic federated learning, with a server.

    Minimises max_lambda sum_i lambda_i f_i(w) over the simplex. In every round all nodes send their gradient and loss
    to the server, which updates the model and the weights:

        w      <- w - eta sum_i lambda_i grad f_i(w)
        lambda <- P(lambda + eta_lambda f(w))

    The topology is not used.

    Args:
        primal_step: eta, a number >= 0 or a schedule: the learning rate of the weighted gradient. Default:
            Measured(factor=2.0), which the run chooses before round 0 and which falls to 0 at its end.
        dual_step: eta_lambda, a number >= 0 or a schedule: how much a unit of loss raises a weight per round. Default:
            0.01.
        optimizer: What each node makes of its gradients, such as `fm.optimizers.AdamW()`; None for SGD. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.algorithms.AFL(dual_step=0.05), rounds=5)
        >>> fm.run(experiment).rounds
        5

    References:
        Mohri, Sivek, Suresh: Agnostic Federated Learning, ICML 2019; stochastic AFL with the gradient of every client.
    """

    primal_step: Schedule | float = field(default_factory=lambda: Measured(factor=2.0))
    dual_step: Schedule | float = 0.01

    def step(self, state: AscentState, ctx: Round) -> AscentState:
        weights = ctx.hosted(state.duals)  # lambda_i (..., nodes)
        everyone = torch.ones_like(weights, dtype=torch.bool)
        models = ctx.broadcast(state.models, everyone)
        losses, gradients = ctx.losses_and_gradients(models)
        model = state.models - ctx.step_size(self.primal_step) * ctx.average(gradients, weights)
        ascent = ctx.step_of_weights(ctx.step_size(self.dual_step)) * ctx.report(losses, everyone)
        return AscentState(model, project_onto_simplex(state.duals + ascent))
