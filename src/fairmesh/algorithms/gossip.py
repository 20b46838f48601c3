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
from fairmesh.networks.roles import PerNeighbour
from fairmesh.numerics import random_streams
from fairmesh.numerics.random_streams import Draw

_REHEARSED = 100  # rounds of compression after which what is left behind has settled
_LONGEST = 1 << 17  # coordinates of a rehearsal
_UNEQUAL = 0.5  # the spread of the logarithm of their sizes


class PublicCopies(NamedTuple):
    """What the network knows of the models: each node's own public copy, and what it keeps of its neighbours'."""

    own: Tensor  # x_hat_i (..., nodes, dim)
    of_neighbours: PerNeighbour  # while W is fixed one row, s_i = sum_j w_ij x_hat_j; else a copy per neighbour


def zero_copies(models: Tensor, network: Network) -> PublicCopies:
    """Before the first message every public copy is zero."""
    return PublicCopies(torch.zeros_like(models), network.copies(models))


def warm_copies(models: Tensor, network: Network) -> PublicCopies:
    """Where all nodes begin with the same row, every public copy can be that from the start: nothing need be sent."""
    kept = network.copies(models)
    return PublicCopies(models.clone(), kept + (models if kept.ndim == models.ndim else models.unsqueeze(-2)))


def steady_consensus_step(compressor: Compressor, dim: int, network: Network) -> float:
    """A consensus step size for this compressor on this graph: gossip is steady below some multiple of delta over
    ||I - W||, with delta as it is measured. Each compressor declares its multiple."""
    contraction = steady_contraction(compressor, min(dim, _LONGEST))
    rate = compressor.stable_gossip_multiple() * contraction / max(network.beta(), 1e-6)
    return min(1.0, max(0.001, round(rate, 3)))  # rounded, so that machines that differ in a last bit agree


def _normal(draw: Draw, count: int) -> Tensor:
    """Normal numbers (1, 1, count)."""
    first, second = draw.uniforms(2 * count).split(count, dim=-1)
    return (-2.0 * (1.0 - first).log()).sqrt() * (2.0 * torch.pi * second).cos()


@lru_cache(maxsize=64)
def steady_contraction(compressor: Compressor, dim: int) -> float:
    """delta in the long run and for every coordinate: what is left behind, e, settles where E e_k^2 = (1 - delta)
    E (e_k + news_k)^2 if in every round as much news is added to what is to be sent, here normal numbers of unequal
    sizes. The energy of the first message alone promises too much: top-K sends most of it, but few coordinates, and
    gossip is stable only if it is so in each."""
    seed, identity = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    def draw(purpose: str, t: int) -> Draw:
        return Draw(random_streams.keys(seed, purpose, t, identity), torch.float32)

    sizes = (_UNEQUAL * _normal(draw("sizes", 0), dim)).exp()
    behind, left = torch.zeros(1, 1, dim), []
    for t in range(_REHEARSED):
        behind = behind + sizes * _normal(draw("news", t), dim)
        behind = behind - compressor.compress(behind, draw("rehearsal", t)).decode()
        left.append(float((behind / sizes).square().mean()))
    settled = sum(left[_REHEARSED // 2 :]) / (_REHEARSED - _REHEARSED // 2)
    return 1.0 / (1.0 + settled)


def disagreement(copies: PublicCopies, ctx: Round) -> Tensor:
    """s_i - x_hat_i: from a node's own public copy to the average of those around it. W is doubly stochastic, so over
    all nodes it sums to zero."""
    return ctx.mixed_copies(copies.of_neighbours) - copies.own


def moved(models: Tensor, apart: Tensor, share: float | Tensor) -> Tensor:
    """x_i moved by a share of `apart`; where that is a disagreement, the network's average model is untouched."""
    return models.addcmul(apart, share) if isinstance(share, Tensor) else models.add(apart, alpha=share)


def gossip_step(models: Tensor, copies: PublicCopies, rate: float | Tensor, ctx: Round) -> Tensor:
    """Gossip: x_i + gamma (s_i - x_hat_i)."""
    return moved(models, disagreement(copies, ctx), rate)


def compressed_difference(
    models: Tensor, copies: PublicCopies, compressor: Compressor, ctx: Round, purpose: str = "compression"
) -> Part:
    """q_i = Q(x_i - x_hat_i), to be sent; `purpose` names its random stream."""
    code = compressor.compress(models - copies.own, ctx.draws(purpose))
    return Part(code, compressor.nominal_bits(models.shape[-1]), followed=True)


def updated_copies(copies: PublicCopies, part: Part, delivery: Delivery, name: str) -> PublicCopies:
    """The public copies with the differences just sent and received added."""
    return PublicCopies(copies.own + part.rows, delivery.follow(name, copies.of_neighbours))


def gossiped_rows(
    rows: Tensor,
    copies: PublicCopies | None,
    compressor: Compressor | None,
    ctx: Round,
    allowed: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> tuple[dict[str, Part], Callable[[Delivery], tuple[Tensor, PublicCopies | None]]]:
    """Rows over all nodes on their way: as they are, mixed on arrival; or moved toward the public copies and put back
    where they are `allowed`, the difference to their own copy sent compressed."""
    if compressor is None or copies is None:
        return {"dual": plain(rows)}, lambda delivery: (delivery.mix("dual"), None)
    rows = allowed(gossip_step(rows, copies, 1.0, ctx))
    part = compressed_difference(rows, copies, compressor, ctx, "dual compression")
    return {"dual": part}, lambda delivery: (rows, updated_copies(copies, part, delivery, "dual"))
