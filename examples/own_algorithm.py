"""An algorithm of one's own: exact diffusion, checked and compared with DSGD. docs/howto/extending.md explains it.

python examples/own_algorithm.py
fairmesh run examples/own-algorithm.toml
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import fairmesh as fm
from fairmesh.algorithms import plain, prior_weights


class DiffusionState(NamedTuple):
    models: Tensor  # x_i (replicas, nodes, parameters)
    corrections: fm.roles.SumsToZero  # c_i, of the same shape


@dataclass(frozen=True)
class ExactDiffusion(fm.algorithms.Algorithm):
    """Yuan, Ying, Zhao, Sayed: Exact Diffusion for Distributed Optimization and Learning, IEEE TSP 2019."""

    primal_step: fm.schedules.Schedule | float = 0.1  # eta
    mixing: float = 0.5  # beta
    optimizer: fm.optimizers.Optimizer | None = None

    def init(self, oracle, network):
        models = oracle.initial_models()
        return DiffusionState(models, torch.zeros_like(models))

    def step(self, state, ctx):
        _, gradients = ctx.losses_and_gradients(state.models)
        adapted = state.models - ctx.step_size(self.primal_step) * prior_weights(ctx) * gradients
        corrected = adapted + state.corrections
        mixed = ctx.exchange(model=plain(corrected)).mix("model")
        models = corrected + self.mixing * (mixed - corrected)
        return DiffusionState(models, models - adapted)


if __name__ == "__main__":
    fm.testing.check_algorithm(ExactDiffusion())
    data = fm.data.Digits(nodes=10, split="class")  # every site holds one digit, so sites pull apart
    for algorithm in (fm.algorithms.DSGD(0.5), ExactDiffusion(0.5)):
        result = fm.run(fm.Experiment(data, fm.Ring(), algorithm, rounds=200, sampling=fm.Sampling(order="full")))
        print(f"{type(algorithm).__name__:15} worst site {result.worst:.1%}")
