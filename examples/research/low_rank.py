"""Low-rank gossip: of every matrix of the difference to a public copy, a node sends the product with a few random
columns, the same at all nodes. Checked, and compared with uncompressed messages.

The columns are new in every round, so what one round leaves out is sent later. PowerSGD (Vogels, Karimireddy, Jaggi,
NeurIPS 2019) sends the columns too, and chooses them by the matrix; here both ends draw them, so they need not travel.

python examples/research/low_rank.py
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

import fairmesh as fm
from fairmesh.algorithms import Part, PublicCopies, gossip_step, prior_weights, zero_copies
from fairmesh.compression.compressors import Dense


class LowRankState(NamedTuple):
    models: fm.roles.Models  # (replicas, nodes, parameters)
    copies: PublicCopies


class Thin(NamedTuple):
    """A matrix in a row of parameters, and the orthonormal columns Q that it is multiplied by."""

    place: slice
    height: int
    columns: Tensor  # (replicas, 1, width, rank)


def projected(rows: Tensor, matrices: list[Thin]) -> Tensor:
    """What travels: M Q of every matrix M, and then all other parameters."""
    rest = torch.ones(rows.shape[-1], dtype=torch.bool)
    factors = []
    for place, height, columns in matrices:
        factors.append((rows[..., place].unflatten(-1, (height, -1)) @ columns).flatten(-2))
        rest[place] = False
    return torch.cat([*factors, rows[..., rest]], dim=-1)


def spread(sent: Tensor, matrices: list[Thin], dim: int) -> Tensor:
    """What it stands for: M Q Q^T in the place of M. It is linear, so a sum of messages stands for the sum."""
    rows, first = sent.new_zeros(*sent.shape[:-1], dim), 0
    rest = torch.ones(dim, dtype=torch.bool)
    for place, height, columns in matrices:
        end = first + height * columns.shape[-1]
        factor = sent[..., first:end].unflatten(-1, (height, -1))
        columns = columns if sent.ndim == 3 else columns.unsqueeze(1)  # a row per neighbour
        rows[..., place] = (factor @ columns.mT).flatten(-2)
        rest[place], first = False, end
    rows[..., rest] = sent[..., first:]
    return rows


@dataclass(frozen=True)
class LowRankGossip(fm.algorithms.Algorithm):
    """CHOCO-SGD whose messages are M Q for each matrix M of the difference x_i - x_hat_i."""

    primal_step: fm.schedules.Schedule | float = 0.1
    consensus_step: float = 0.02
    rank: int = field(default=1, metadata={"structural": True})
    optimizer: fm.optimizers.Optimizer | None = None

    copies_at_peak: ClassVar[int] = 14

    def init(self, oracle, network):
        models = oracle.initial_models()
        return LowRankState(models, zero_copies(models, network))

    def step(self, state, ctx):
        _, gradients = ctx.losses_and_gradients(state.models)
        models = state.models - ctx.step_size(self.primal_step) * prior_weights(ctx) * gradients
        models = gossip_step(models, state.copies, self.consensus_step, ctx)
        own, kept = state.copies
        matrices = self.matrices(ctx)
        sent = projected(models - own, matrices)
        part = Part(Dense(sent), 32 * sent.shape[-1], True, kept)
        delivery = ctx.exchange(model=part)
        arrived = delivery.follow("model", torch.zeros_like(kept[..., : sent.shape[-1]]))
        dim = models.shape[-1]
        return LowRankState(
            models, PublicCopies(own + spread(part.rows, matrices, dim), kept + spread(arrived, matrices, dim))
        )

    def matrices(self, ctx) -> list[Thin]:
        """The parameters that fewer columns shorten, with this round's columns, which all nodes draw alike."""
        found = []
        for name, shape, place in ctx.layout:
            width = math.prod(shape[1:])
            if len(shape) > 1 and self.rank < width:
                draw = ctx.server_draws(f"columns of {name}").uniforms(width * self.rank) - 0.5
                found.append(Thin(place, shape[0], torch.linalg.qr(draw.unflatten(-1, (width, self.rank))).Q))
        return found


def digits() -> fm.Problem:
    """A network with two matrices, at ten sites of which two have another instrument."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    sites = fm.data.Digits(nodes=10, split="instrument", odd=2).sites()
    return fm.Problem(model, sites, sampling=fm.Sampling(batch=16))


def main(rounds: int = 300, seeds: int = 3) -> None:
    """Prints accuracies and bytes by rank."""
    algorithms = {"no compression": fm.ChocoSGD(0.3)}
    for rank, gamma in ((4, 0.03), (16, 0.12)):
        algorithms[f"rank {rank}"] = LowRankGossip(0.3, gamma, rank)
    for name, algorithm in algorithms.items():
        result = fm.train(digits(), fm.Ring(), algorithm, rounds, seeds=range(seeds), measure_every=rounds)
        models, final = result.state.algorithm.models, result.final
        apart = float((models - models.mean(dim=-2, keepdim=True)).norm() / models.norm())
        mean = sum(record["accuracy"]["mean"] for record in final) / len(final)
        print(f"{name:16} mean {mean:.1%}  disagreement {apart:.3f}  {final[0]['bytes_total'] / 1e6:.1f} MB")


if __name__ == "__main__":
    fm.testing.check_algorithm(LowRankGossip())
    main()
