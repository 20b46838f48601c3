"""Clipped gossip: a node moves towards each neighbour's copy by at most a radius, so that no neighbour moves it far.

He, Karimireddy, Jaggi: Byzantine-robust decentralized learning via ClippedGossip, 2022. The radius adapts:

    tau_i^2 = sum_{j near} w_ij |x_hat_j - x_hat_i|^2 / sum_{j far} w_ij

where the `liars` neighbours with the most distant copies are far and the others near.
"""

import torch
from torch import Tensor


def clipped_weights(weights: Tensor, distances: Tensor, liars: int) -> Tensor:
    """Returns w_ij min(1, tau_i / distance_ij).

    Args:
        weights: w_ij (..., nodes, others), 0 for those that are no neighbours.
        distances: Between the public copies of node i and of j (..., nodes, others); 0 to itself.
        liars: How many neighbours of each node may send anything, >= 1.
    """
    met = weights > 0
    known = torch.where(met, distances, -torch.ones_like(distances))
    far = torch.zeros_like(met.expand_as(distances)).scatter(-1, known.topk(liars, dim=-1).indices, True) & met
    near = (weights * distances.square()).masked_fill(far, 0.0).sum(dim=-1, keepdim=True)
    radius = (near / weights.expand_as(distances).masked_fill(~far, 0.0).sum(dim=-1, keepdim=True)).sqrt()
    return torch.where(distances > radius, weights * radius / distances, weights)
