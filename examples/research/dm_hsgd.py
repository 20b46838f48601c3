"""DM-HSGD: a robust objective by hybrid gradients of both players, tracked over the network. Checked, and its noise
compared with that of plain stochastic gradients.

Xian, Huang, Zhang, Huang: A Faster Decentralized Algorithm for Nonconvex Minimax Problems, NeurIPS 2021.

python examples/research/dm_hsgd.py
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

import fairmesh as fm
from fairmesh.algorithms import plain, prior_rows

WEIGHTS = fm.roles.Role(over_nodes=True, on_simplex=True)


class HybridState(NamedTuple):
    models: fm.roles.Models  # x_i (replicas, nodes, parameters)
    duals: fm.roles.Duals  # lambda_i (replicas, nodes, nodes of the network)
    previous: Tensor  # x_i of the round before
    previous_duals: Annotated[Tensor, WEIGHTS]
    estimates: Tensor  # of the gradient in x
    dual_estimates: Annotated[Tensor, fm.roles.OVER_NODES]
    balances: fm.roles.SumsToZero  # what gossip has added to the estimates: trackers are the sum of both
    dual_balances: Annotated[fm.roles.SumsToZero, fm.roles.OVER_NODES]


@dataclass(frozen=True)
class DMHSGD(fm.algorithms.Algorithm):
    """d_i <- g(z_i; batch) + (1 - beta) (d_i - g(z_i of the round before; the same batch)) for z = (x, lambda), and
    descent in x, ascent in lambda along the tracked averages of d. Asking for one batch twice gives the same samples
    and the same random numbers, so the difference of the two gradients is small where the model moved little."""

    primal_step: fm.schedules.Schedule | float = 0.1
    dual_step: fm.schedules.Schedule | float = 0.1
    beta: float = 0.1
    regularizer: fm.regularizers.Regularizer = field(default_factory=lambda: fm.ChiSquare(0.01))

    copies_at_peak: ClassVar[int] = 16

    def init(self, oracle, network):
        x, duals = oracle.initial_models(), prior_rows(oracle, network)
        zeros = (torch.zeros_like(x), torch.zeros_like(duals))
        return HybridState(x, duals, x.clone(), duals.clone(), *zeros, *(z.clone() for z in zeros))

    def step(self, state, ctx):
        def slopes(models: Tensor, duals: Tensor) -> tuple[Tensor, Tensor]:
            losses, gradients = ctx.losses_and_gradients(models)
            weights = ctx.n * (duals * ctx.own).sum(dim=-1, keepdim=True)
            return weights * gradients, losses * ctx.own + self.regularizer.gradient(duals, ctx.prior, ctx.own)

        before = slopes(state.previous, state.previous_duals)
        now = slopes(state.models, state.duals)
        memory = (1.0 - self.beta) * (ctx.index > 0).to(state.models.dtype)  # none before round 0
        kept = (state.estimates, state.dual_estimates)
        d, e = (new + memory * (old - past) for new, old, past in zip(now, kept, before))
        delivery = ctx.exchange(
            model=plain(state.models),
            tracker=plain(d + state.balances),
            dual=plain(state.duals, "weights"),
            dual_tracker=plain(e + state.dual_balances),
        )
        u, v = delivery.mix("tracker"), delivery.mix("dual_tracker")
        models = delivery.mix("model") - ctx.step_size(self.primal_step) * u
        ascended = delivery.mix("dual") + ctx.step_of_weights(ctx.step_size(self.dual_step)) * v
        duals = self.regularizer.project(ascended, ctx.prior)
        return HybridState(models, duals, state.models, state.duals, d, e, u - d, v - e)


def noise(beta: float, rounds: int = 200, seeds: int = 8) -> float:
    """The variance over seeds of a node's estimate at the end, with a step so small that all runs stay together."""
    problem = fm.testing.small_problem(batch=2)
    run = fm.train(problem, fm.Ring(), DMHSGD(1e-4, 0.0, beta), rounds, seeds=range(seeds), own_models=True)
    return float(run.state.algorithm.estimates.var(dim=0).mean())


if __name__ == "__main__":
    fm.testing.check_algorithm(DMHSGD())
    print(f"variance of the estimates, beta = 0.1 over beta = 1: {noise(0.1) / noise(1.0):.3f}")
