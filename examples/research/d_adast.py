"""D-AdaST: descent and ascent whose steps adapt to the gradients seen so far, and agree between nodes since what they
are computed from is gossiped. Checked, and the steps compared with those of nodes that keep to their own gradients.

Huang, Li, Shen, He, Xu: Achieving Near-Optimal Convergence for Distributed Minimax Optimization with Adaptive
Stepsizes, NeurIPS 2024.

python examples/research/d_adast.py
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

import fairmesh as fm
from fairmesh.algorithms import STRUCTURAL, Positive, Sent, Share, plain, prior_rows


class AdaptiveState(NamedTuple):
    models: fm.roles.Models  # x_i (replicas, nodes, parameters)
    duals: fm.roles.Duals  # lambda_i (replicas, nodes, nodes of the network)
    accumulators: fm.roles.Common  # m_i and l_i; they only set steps, so the share of a site that left may stay


@dataclass(frozen=True)
class DAdaST(fm.algorithms.Algorithm):
    """Solves min_x max_lambda of (1/n) sum_i lambda_i f_i(x) + strength r(lambda). Node i does in every round

        m_i <- m_i + |g_i|^2,   l_i <- l_i + |h_i|^2        g_i in x, h_i in its copy of lambda
        x_i <- x_i - gamma_x max(m_i, l_i)^-alpha g_i
        lambda_i <- P(lambda_i + gamma_lambda l_i^-beta h_i)

    and then takes the averages of x, lambda, m and l with its neighbours. alpha > beta, so descent becomes the slower
    of the two by itself. Without `tracking` m and l are not averaged, and the steps of nodes never agree (D-TiAda).

    g_i = n lambda_i[i] grad f_i(x_i) and h_i = f_i(x_i) e_i + strength grad r(lambda_i), as in AD-GDA, but with a step
    in x that does not shrink with the number of nodes. m and l are one number each for all coordinates, as in the
    paper's analysis. The paper has no weights of nodes as its dual, and no constants for them: the two steps and the
    strength are chosen here.

    Args:
        primal_step: gamma_x, a number >= 0 or a schedule. Default: 3.0.
        dual_step: gamma_lambda, a number >= 0 or a schedule. Default: 0.3.
        alpha: The power of the primal step, in (0, 1). Default: 0.6.
        beta: The power of the dual step, in (0, alpha). Default: 0.4.
        start: What accumulators start at, > 0. Default: 1.0.
        regularizer: strength times r, as in AD-GDA. Default: ChiSquare(0.001).
        tracking: Whether accumulators are gossiped. Default: True.
    """

    primal_step: fm.schedules.Schedule | float = 3.0
    dual_step: fm.schedules.Schedule | float = 0.3
    alpha: Share = 0.6
    beta: Share = 0.4
    start: Positive = 1.0
    regularizer: fm.regularizers.Regularizer = field(default_factory=lambda: fm.ChiSquare(0.001))
    tracking: bool = field(default=True, metadata=STRUCTURAL)

    def check(self, prior, dim):
        self.regularizer.check(prior)
        if self.alpha <= self.beta:
            raise fm.BadInput(
                f"beta must be below alpha, or ascent is slower than descent; got {self.beta}, {self.alpha}"
            )

    def keeps_node_rows(self) -> bool:
        return True

    def message(self):
        parts = Sent("model"), Sent("dual", "weights")
        return (*parts, Sent("accumulators", "losses")) if self.tracking else parts

    def init(self, oracle, network):
        models = oracle.initial_models()
        accumulators = torch.ones_like(models[..., :1]).repeat(1, 1, 2) * self.start
        return AdaptiveState(models, prior_rows(oracle, network), accumulators)

    def step(self, state, ctx):
        losses, gradients = ctx.losses_and_gradients(state.models)
        g = ctx.n * (state.duals * ctx.own).sum(dim=-1, keepdim=True) * gradients
        h = losses * ctx.own + self.regularizer.gradient(state.duals, ctx.prior, ctx.own)
        norms = torch.cat([row.square().sum(dim=-1, keepdim=True) for row in (g, h)], dim=-1)
        accumulators = state.accumulators + norms
        descent = ctx.step_size(self.primal_step) * accumulators.amax(dim=-1, keepdim=True) ** -self.alpha
        ascent = ctx.step_of_weights(ctx.step_size(self.dual_step)) * accumulators[..., 1:] ** -self.beta
        models = state.models - descent * g
        duals = self.regularizer.project(state.duals + ascent * h, ctx.prior)
        parts = {"model": plain(models), "dual": plain(duals, "weights")}
        if self.tracking:
            parts["accumulators"] = plain(accumulators, "losses")
        delivery = ctx.exchange(**parts)
        if self.tracking:
            accumulators = delivery.mix("accumulators")
        return AdaptiveState(delivery.mix("model"), delivery.mix("dual"), accumulators)


CANDIDATES = tuple(
    replace(DAdaST(), primal_step=step, regularizer=fm.ChiSquare(strength))
    for strength in (0.001, 0.01)
    for step in (1.0, 3.0, 10.0)
)


def spread(tracking: bool, rounds: int = 300) -> float:
    """How many times longer the longest descent of ten nodes is than the shortest, after some rounds."""
    data = fm.data.Digits(nodes=10, split="instrument", odd=2)
    result = fm.run(fm.Experiment(data, fm.Ring(), DAdaST(tracking=tracking), rounds=rounds))
    scales = result.state.algorithm.accumulators.amax(dim=-1)
    return float((scales.amax(dim=1) / scales.amin(dim=1)).max() ** DAdaST().alpha)


if __name__ == "__main__":
    fm.testing.check_algorithm(DAdaST())
    for tracking in (False, True):
        print(f"tracking = {tracking}: longest over shortest step of ten nodes {spread(tracking):.2f}")
