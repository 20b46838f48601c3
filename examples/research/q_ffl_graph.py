"""q-FFL without a server: a node's weight is its loss to the power q over the network's mean of these, which is
gossiped as one number. Checked, and compared with q = 0.

Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning, ICLR 2020.

python examples/research/q_ffl_graph.py
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

import fairmesh as fm
from fairmesh.algorithms import plain, prior_weights


class GraphState(NamedTuple):
    models: fm.roles.Models  # (replicas, nodes, parameters)
    balances: fm.roles.SumsToZero  # what gossip has added to a node's own p_i f_i^q (replicas, nodes, 1)
    weights: fm.roles.OwnWeights  # n lambda_i


@dataclass(frozen=True)
class GraphQFFL(fm.algorithms.Algorithm):
    """x_i <- sum_j w_ij x_j - eta n lambda_i grad f_i(x_i) with lambda_i = p_i f_i^q / sum_j p_j f_j^q."""

    primal_step: fm.schedules.Schedule | float = 0.1
    q: float = 1.0
    optimizer: fm.optimizers.Optimizer | None = None

    def init(self, oracle, network):
        models = oracle.initial_models()
        zeros = torch.zeros_like(models[..., :1])
        return GraphState(models, zeros, zeros.clone())

    def step(self, state, ctx):
        losses, gradients = ctx.losses_and_gradients(state.models)
        powers = prior_weights(ctx) * losses.clamp(min=1e-6) ** self.q
        means = powers + state.balances
        delivery = ctx.exchange(model=plain(state.models), mean=plain(means, "losses"))
        weights = powers / torch.maximum(means, powers / ctx.n)  # no node weighs more than all together
        models = delivery.mix("model") - ctx.step_size(self.primal_step) * weights * gradients
        return GraphState(models, delivery.mix("mean") - powers, weights)


def worst(q: float, rounds: int = 300) -> float:
    """The accuracy at the worst of ten sites, two of which have another instrument."""
    data = fm.data.Digits(nodes=10, split="instrument", odd=2)
    return fm.run(fm.Experiment(data, fm.Ring(), GraphQFFL(0.3, q), rounds=rounds)).worst


if __name__ == "__main__":
    fm.testing.check_algorithm(GraphQFFL(q=2.0))
    for q in (0.0, 1.0, 5.0):
        print(f"q = {q:g}: worst site {worst(q):.1%}")
