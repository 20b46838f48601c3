"""EXTRA: decentralized gradient descent without the bias of gossip. Checked, and compared with DSGD.

Shi, Ling, Wu, Yin: EXTRA: An Exact First-Order Algorithm for Decentralized Consensus Optimization, SIAM J. Optim. 2015.

python examples/research/extra.py
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

import fairmesh as fm
from fairmesh.algorithms import plain, prior_weights


class ExtraState(NamedTuple):
    models: fm.roles.Models  # x_i (replicas, nodes, parameters)
    corrections: fm.roles.SumsToZero  # sum over past rounds of (sum_j w_ij x_j - x_i) / 2


@dataclass(frozen=True)
class EXTRA(fm.algorithms.Algorithm):
    """x_i <- sum_j w_ij x_j - eta grad f_i(x_i) + c_i. This is EXTRA with its second matrix (I + W) / 2, with the sum
    over past rounds kept as c_i, so that a site may leave."""

    primal_step: fm.schedules.Schedule | float = 0.1
    optimizer: fm.optimizers.Optimizer | None = None

    def init(self, oracle, network):
        models = oracle.initial_models()
        return ExtraState(models, torch.zeros_like(models))

    def step(self, state, ctx):
        _, gradients = ctx.losses_and_gradients(state.models)
        mixed = ctx.exchange(model=plain(state.models)).mix("model")
        descended = mixed - ctx.step_size(self.primal_step) * prior_weights(ctx) * gradients
        return ExtraState(descended + state.corrections, state.corrections + (mixed - state.models) / 2)


def disagreement(algorithm: fm.algorithms.Algorithm, rounds: int) -> float:
    """How far the nodes are from their average at the end, relative to their norm. Every site holds one digit."""
    data, full = fm.data.Digits(nodes=10, split="class"), fm.Sampling(order="full")
    options = fm.Options(measure_every=rounds)
    experiment = fm.Experiment(data, fm.Ring(), algorithm, rounds, sampling=full, weight_decay=0.1, options=options)
    models = fm.run(experiment).state.algorithm.models
    return float((models - models.mean(dim=-2, keepdim=True)).norm() / models.norm())


if __name__ == "__main__":
    fm.testing.check_algorithm(EXTRA())
    for algorithm in (fm.algorithms.DSGD(0.3), EXTRA(0.3)):
        print(f"{type(algorithm).__name__:6} disagreement {disagreement(algorithm, 300):.1e}")
