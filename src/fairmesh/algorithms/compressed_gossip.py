"""CHOCO gossip: agreement from compressed differences to public copies.

Koloskova, Stich, Jaggi: Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication,
ICML 2019 (the memory-efficient form).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.base import Round
from fairmesh.compression import Compressor
from fairmesh.networks.base import Delivery, Network, Part


class PublicCopies(NamedTuple):
    """What the network knows of the models: each node's own public copy, and what it keeps of its neighbours'."""

    own: Tensor  # x_hat_i (..., nodes, dim)
    kept: Tensor  # while W is fixed the one row s_i = sum_j w_ij x_hat_j, else a copy of each neighbour's


def no_copies(models: Tensor, network: Network) -> PublicCopies:
    """Before the first message every public copy is zero."""
    return PublicCopies(torch.zeros_like(models), network.copies(models))


def toward_neighbours(models: Tensor, copies: PublicCopies, rate: float | Tensor, round: Round) -> Tensor:
    """Gossip: x_i + gamma (s_i - x_hat_i). W is doubly stochastic, so over all nodes the added terms sum to zero and
    the network's average model is untouched."""
    apart = round.mixed_copies(copies.kept) - copies.own
    return models.addcmul(apart, rate) if isinstance(rate, Tensor) else models.add(apart, alpha=rate)


def difference(
    models: Tensor, copies: PublicCopies, compressor: Compressor, round: Round, purpose: str = "compression"
) -> Part:
    """q_i = Q(x_i - x_hat_i), to be sent; `purpose` names its random stream."""
    code = compressor.compress(models - copies.own, round.draws(purpose))
    return Part(code, compressor.nominal_bits(models.shape[-1]), followed=True)


def followed(copies: PublicCopies, part: Part, delivery: Delivery, name: str) -> PublicCopies:
    """The public copies with the differences just sent and received added."""
    return PublicCopies(copies.own + part.rows, delivery.follow(name, copies.kept))
