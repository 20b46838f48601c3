"""BEER: gradient tracking with compressed messages. Checked, and compared with CHOCO-SGD.

Zhao, Li, Li, Richtarik, Chi: BEER: Fast O(1/T) Rate for Decentralized Nonconvex Optimization with Communication
Compression, NeurIPS 2022.

python examples/research/beer.py
"""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

import fairmesh as fm
from fairmesh.algorithms import (
    PublicCopies,
    compressed_difference,
    gossip_step,
    prior_weights,
    updated_copies,
    zero_copies,
)


class BeerState(NamedTuple):
    """A tracker is the node's own gradient plus its balance. Balances sum to zero, so a site may leave: they restart at
    zero then. A state with the tracker itself would keep a share of that site's gradient for ever."""

    models: fm.roles.Models  # (replicas, nodes, parameters)
    balances: fm.roles.SumsToZero
    copies: PublicCopies
    tracker_copies: PublicCopies


@dataclass(frozen=True)
class BEER(fm.algorithms.Algorithm):
    """v_i <- grad f_i(x_i) + b_i,  b_i <- b_i + gamma (sum_j w_ij v_hat_j - v_hat_i),  and x_i descends along v_i."""

    primal_step: fm.schedules.Schedule | float = 0.1
    consensus_step: float = 0.3
    compressor: fm.compressors.Compressor = field(default_factory=lambda: fm.compressors.TopK(0.1))
    optimizer: fm.optimizers.Optimizer | None = None

    copies_at_peak: ClassVar[int] = 19

    def init(self, oracle, network):
        models = oracle.initial_models()
        return BeerState(models, torch.zeros_like(models), zero_copies(models, network), zero_copies(models, network))

    def step(self, state, ctx):
        _, gradients = ctx.losses_and_gradients(state.models)
        balances = gossip_step(state.balances, state.tracker_copies, self.consensus_step, ctx)
        trackers = prior_weights(ctx) * gradients + balances
        models = state.models - ctx.step_size(self.primal_step) * trackers
        models = gossip_step(models, state.copies, self.consensus_step, ctx)
        model = compressed_difference(models, state.copies, self.compressor, ctx)
        tracker = compressed_difference(trackers, state.tracker_copies, self.compressor, ctx, "tracker compression")
        delivery = ctx.exchange(model=model, tracker=tracker)
        copies = updated_copies(state.copies, model, delivery, "model")
        return BeerState(models, balances, copies, updated_copies(state.tracker_copies, tracker, delivery, "tracker"))


if __name__ == "__main__":
    fm.testing.check_algorithm(BEER())
    data, full = fm.data.Digits(nodes=10, split="class"), fm.Sampling(order="full")  # every site holds one digit
    for algorithm in (fm.ChocoSGD(0.5, 0.3, fm.compressors.TopK(0.1)), BEER(0.5, 0.3, fm.compressors.TopK(0.1))):
        result = fm.run(fm.Experiment(data, fm.Ring(), algorithm, rounds=400, sampling=full))
        print(f"{type(algorithm).__name__:8} worst site {result.worst:.1%}")
