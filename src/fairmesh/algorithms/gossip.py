"""CHOCO gossip: agreement from compressed differences to public copies.

Koloskova, Stich, Jaggi: Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication,
ICML 2019 (the memory-efficient form).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.base import Round, plain
from fairmesh.compression.compressors import Compressor
from fairmesh.networks.base import Delivery, Network, Part
from fairmesh.networks.bounds import Content
from fairmesh.networks.roles import PerNeighbour
from fairmesh.numerics import random_streams
from fairmesh.numerics.random_streams import Draw

_REHEARSED = 100  # rounds of compression after which the error has settled
_SHORTEST, _LONGEST = 64, 1 << 17  # coordinates in the measurement of delta, at least and at most
_UNEQUAL = 0.5  # standard deviation of the logarithm of the coordinates' sizes


class PublicCopies(NamedTuple):
    """What the neighbours know of the models: each node's own public copy, and what it keeps of its neighbours'."""

    own: Tensor  # x_hat_i (..., nodes, dim)
    of_neighbours: PerNeighbour  # while W is fixed one row, s_i = sum_j w_ij x_hat_j; else a copy per neighbour


def zero_copies(models: Tensor, network: Network) -> PublicCopies:
    """Returns the public copies before the first message: all zero."""
    return PublicCopies(torch.zeros_like(models), network.copies(models))


def warm_copies(models: Tensor, network: Network) -> PublicCopies:
    """Returns public copies that start at the models, which must be the same at all nodes. Nothing is sent."""
    kept = network.copies(models)
    return PublicCopies(models.clone(), kept + (models if kept.ndim == models.ndim else models.unsqueeze(-2)))


def steady_consensus_step(compressor: Compressor, dim: int, beta: float) -> float:
    """Returns a consensus step size for this compressor on a graph with beta = ||I - W||.

    Gossip is stable below a multiple of delta / beta, with delta as measured by `steady_contraction`. Each
    compressor declares its multiple."""
    contraction = steady_contraction(compressor, min(dim, _LONGEST))
    step = compressor.stable_gossip_multiple() * contraction / max(beta, 1e-6)
    return min(1.0, max(0.001, round(step, 3)))  # rounded, so that machines that differ in a last bit agree


def steady_consensus_steps(compressor: Compressor, models: Tensor, network: Network) -> Tensor:
    """Returns the consensus step of every node (..., nodes, 1), chosen from the compressor and the graph."""
    return torch.ones_like(models[..., :1]) * steady_consensus_step(compressor, models.shape[-1], network.beta())


def _normal(draw: Draw, count: int) -> Tensor:
    """Returns normal numbers (1, rows, count)."""
    first, second = draw.uniforms(2 * count).split(count, dim=-1)
    return (-2.0 * (1.0 - first).log()).sqrt() * (2.0 * torch.pi * second).cos()


@lru_cache(maxsize=64)
def steady_contraction(compressor: Compressor, dim: int) -> float:
    """Returns delta in the long run, for every coordinate.

    In every round normal numbers of unequal sizes, the news, are added to what is still to be sent. The remaining error
    e then settles where E e_k^2 = (1 - delta) E (e_k + news_k)^2. The energy of the first message alone would give too
    large a delta: top-K sends most of the energy in few coordinates, but gossip must be stable in every coordinate.
    Models of few coordinates are rehearsed several times, with other sizes each time, and the least delta counts: two
    coordinates of equal size are sent well, and the models' need not be equal."""
    seed, identities = torch.zeros(1, dtype=torch.int64), torch.arange(-(-_SHORTEST // dim))

    def draw(purpose: str, t: int) -> Draw:
        return Draw(random_streams.keys(seed, purpose, t, identities), torch.float32)

    sizes = (_UNEQUAL * _normal(draw("sizes", 0), dim)).exp()
    behind, left = torch.zeros(1, len(identities), dim), torch.zeros(len(identities), dtype=torch.float64)
    for t in range(_REHEARSED):
        behind = behind + sizes * _normal(draw("news", t), dim)
        behind = behind - compressor.compress(behind, draw("rehearsal", t)).decode()
        if t >= _REHEARSED // 2:
            left += (behind / sizes).square().mean(dim=-1)[0]
    settled = float(left.max()) / (_REHEARSED - _REHEARSED // 2)
    return 1.0 / (1.0 + settled)


def disagreement(copies: PublicCopies, ctx: Round) -> Tensor:
    """Returns s_i - x_hat_i, from a node's own public copy to the weighted average of those around it.

    W is doubly stochastic, so it sums to zero over all nodes, unless the topology is `Clipped`."""
    return ctx.disagreement(copies.own, copies.of_neighbours)


def moved(models: Tensor, apart: Tensor, share: float | Tensor) -> Tensor:
    """Returns x_i + share * apart. If `apart` is a disagreement, the network's average model does not change."""
    return models.addcmul(apart, share) if isinstance(share, Tensor) else models.add(apart, alpha=share)


def gossip_step(models: Tensor, copies: PublicCopies, consensus_step: float | Tensor | None, ctx: Round) -> Tensor:
    """Returns x_i + gamma (s_i - x_hat_i)."""
    if consensus_step is None:
        raise TypeError("a state lost its consensus steps")
    return moved(models, disagreement(copies, ctx), consensus_step)


def compressed_difference(
    models: Tensor,
    copies: PublicCopies,
    compressor: Compressor,
    ctx: Round,
    purpose: str = "compression",
    content: Content = "vectors",
) -> Part:
    """Returns q_i = Q(x_i - x_hat_i), to be sent; `purpose` names its random stream."""
    code = compressor.compress(models - copies.own, ctx.draws(purpose))
    return Part(code, compressor.nominal_bits(models.shape[-1]), True, copies.of_neighbours, content)


def updated_copies(copies: PublicCopies, part: Part, delivery: Delivery, name: str) -> PublicCopies:
    """Returns the public copies after adding the differences just sent and received, which are then released."""
    of_neighbours = delivery.follow(name, copies.of_neighbours)  # first: it holds more than its result for a moment
    delivery.release(name)
    return PublicCopies(copies.own + part.rows, of_neighbours)


def gossiped_rows(
    rows: Tensor,
    copies: PublicCopies | None,
    compressor: Compressor | None,
    ctx: Round,
    allowed: Callable[[Tensor], Tensor] = lambda rows: rows,
    content: Content = "weights",
) -> tuple[dict[str, Part], Callable[[Delivery], tuple[Tensor, PublicCopies | None]]]:
    """Returns the parts of a message that gossip rows over all nodes, and a function of their delivery.

    Without a compressor the rows travel as they are and are mixed on arrival. With one, they take a gossip step, are
    projected by `allowed`, and their difference to their own public copy is sent compressed."""
    if compressor is None or copies is None:
        return {"dual": plain(rows, content)}, lambda delivery: (delivery.mix("dual"), None)
    rows = allowed(gossip_step(rows, copies, 1.0, ctx))
    part = compressed_difference(rows, copies, compressor, ctx, "dual compression", content)
    return {"dual": part}, lambda delivery: (rows, updated_copies(copies, part, delivery, "dual"))
