"""PowerSGD between neighbours: differences to public copies travel as thin factors, which start from those of the round
before. Checked, and compared with factors that start at random, as `fm.compressors.LowRank` has them.

Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, NeurIPS
2019.

python examples/research/power_sgd.py
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

import fairmesh as fm
from fairmesh.algorithms import Part, PublicCopies, gossip_step, prior_weights, updated_copies, zero_copies
from fairmesh.compression.compressors import Composite, Dense


class PowerState(NamedTuple):
    models: fm.roles.Models  # (replicas, nodes, parameters)
    copies: PublicCopies
    factors: Tensor  # the right factors of all matrices, one after another


def matrices(layout, rank: int) -> list[tuple[slice, int, int]]:
    """Place, height and width of each parameter that two factors shorten."""
    shapes = [(place, shape[0], math.prod(shape[1:])) for _, shape, place in layout if shape]
    return [(place, a, b) for place, a, b in shapes if rank * (a + b) < a * b]


def assembled(left: Tensor, right: Tensor, found: list, dim: int, rank: int) -> Tensor:
    """What the receiver makes of the factors: P Q^T in the place of each matrix, and the rest as it is."""
    rows, i, j = left.new_zeros(*left.shape[:-1], dim), 0, 0
    rest = torch.ones(dim, dtype=torch.bool)
    for place, a, b in found:
        p = left[..., i : i + a * rank].unflatten(-1, (a, rank))
        q = right[..., j : j + b * rank].unflatten(-1, (b, rank))
        rows[..., place], rest[place] = (p @ q.mT).flatten(-2), False
        i, j = i + a * rank, j + b * rank
    rows[..., rest] = right[..., j:]
    return rows


@dataclass(frozen=True)
class PowerSGD(fm.algorithms.Algorithm):
    """CHOCO-SGD whose messages are P = orthonormal(M Q) and M^T P for each matrix M of the difference x_i - x_hat_i.
    What a low rank leaves out stays in the difference; that is the error feedback."""

    primal_step: fm.schedules.Schedule | float = 0.1
    consensus_step: float = 0.05
    rank: int = field(default=1, metadata={"structural": True})
    warm: bool = field(default=True, metadata={"structural": True})  # False: Q is drawn at random in every round
    optimizer: fm.optimizers.Optimizer | None = None

    copies_at_peak: ClassVar[int] = 14

    def init(self, oracle, network):
        models = oracle.initial_models()
        count = sum(self.rank * b for _, _, b in matrices(oracle.model.layout, self.rank))
        start = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(models)
        return PowerState(models, zero_copies(models, network), start.expand(*models.shape[:-1], -1).clone())

    def step(self, state, ctx):
        _, gradients = ctx.losses_and_gradients(state.models)
        models = state.models - ctx.step_size(self.primal_step) * prior_weights(ctx) * gradients
        models = gossip_step(models, state.copies, self.consensus_step, ctx)
        factors = state.factors
        if not self.warm:
            factors = ctx.draws("factors").uniforms(factors.shape[-1]) - 0.5
        message, factors = self.compressed(models - state.copies.own, factors, ctx.layout)
        nominal = 32 * sum(part.decode().shape[-1] for part in message.parts)
        part = Part(message, nominal, True, state.copies.of_neighbours)
        delivery = ctx.exchange(model=part)
        return PowerState(models, updated_copies(state.copies, part, delivery, "model"), factors)

    def compressed(self, rows: Tensor, factors: Tensor, layout) -> tuple[Composite, Tensor]:
        found, j, left, right = matrices(layout, self.rank), 0, [rows[..., :0]], [rows[..., :0]]
        rest = torch.ones(rows.shape[-1], dtype=torch.bool)
        for place, a, b in found:
            matrix = rows[..., place].unflatten(-1, (a, b))
            q = factors[..., j : j + b * self.rank].unflatten(-1, (b, self.rank))
            p = torch.linalg.qr(matrix @ q).Q
            left.append(p.flatten(-2))
            right.append((matrix.mT @ p).flatten(-2))
            j, rest[place] = j + b * self.rank, False
        sent = Dense(torch.cat(left, dim=-1)), Dense(torch.cat([*right, rows[..., rest]], dim=-1))
        put_together = partial(assembled, found=found, dim=rows.shape[-1], rank=self.rank)
        return Composite(sent, put_together), torch.cat(right, dim=-1)


def digits() -> fm.Problem:
    """A network with two matrices, at ten sites of which two have another instrument."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    sites = fm.data.Digits(nodes=10, split="instrument", odd=2).sites()
    return fm.Problem(model, sites, sampling=fm.Sampling(batch=16))


def main(rounds: int = 300, seeds: int = 3) -> None:
    """Prints accuracies and bytes for warm and for random factors."""
    problem, algorithms = digits(), {"no compression": fm.ChocoSGD(0.3)}
    for rank, gamma in ((1, 0.05), (4, 0.1)):
        algorithms[f"rank {rank}, warm"] = PowerSGD(0.3, gamma, rank)
        algorithms[f"rank {rank}, random"] = PowerSGD(0.3, gamma, rank, warm=False)
        more = fm.compressors.LowRank(rank, iterations=1)
        algorithms[f"rank {rank}, random, one more power iteration"] = fm.ChocoSGD(0.3, gamma, more)
    for name, algorithm in algorithms.items():
        result = fm.train(problem, fm.Ring(), algorithm, rounds, seeds=range(seeds), measure_every=rounds)
        models, final = result.state.algorithm.models, result.final
        apart = float((models - models.mean(dim=-2, keepdim=True)).norm() / models.norm())
        mean = sum(record["accuracy"]["mean"] for record in final) / len(final)
        print(f"{name:42} mean {mean:.1%}  disagreement {apart:.3f}  {final[0]['bytes_total'] / 1e6:.1f} MB")


if __name__ == "__main__":
    fm.testing.check_algorithm(PowerSGD())
    main()
