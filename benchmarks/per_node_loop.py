"""One round of AD-GDA the way peers simulate it: a Python loop over nodes, torch operations for each.

The yardstick of `fairmesh bench rounds`. It is written to be as quick as such a loop can be: a node's module looks into
one flat row, so nothing is copied between module and gossip; gradients land in a flat row too; everything that can be
in place is. It does what the stacked round does: batches, losses and gradients, dual step and projection, compression,
mixing, the mean over time of the network's average model, and the bytes of every message, though these only as the
entropy of its levels, not as the exact length of an encoded message.
"""

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def bytes_of(counts: Tensor) -> Tensor:
    """The entropy of a message with this histogram."""
    total = counts.sum()
    return torch.special.entr(counts / total).sum() * (total / (8 * math.log(2.0)))


class Node:
    """A site's data, its module, and its rows: model, public copy, mixed copy, weights."""

    def __init__(self, module: nn.Module, inputs: Tensor, targets: Tensor, neighbours: dict[int, float], nodes: int):
        device = inputs.device
        self.module, self.inputs, self.targets, self.neighbours = module.to(device), inputs, targets, neighbours
        parameters = list(self.module.parameters())
        self.model = torch.cat([p.detach().flatten() for p in parameters])
        self.gradient = torch.zeros_like(self.model)
        sizes = [p.numel() for p in parameters]
        for parameter, row, slope in zip(parameters, self.model.split(sizes), self.gradient.split(sizes)):
            parameter.data, parameter.grad = row.view_as(parameter), slope.view_as(parameter)
        self.public, self.mixed = torch.zeros_like(self.model), torch.zeros_like(self.model)
        self.weights = torch.full((nodes,), 1.0 / nodes, device=device)  # lambda_i


def projected(row: Tensor, counts: Tensor) -> Tensor:
    """Euclidean projection onto the simplex; `counts` is 1, 2, ..., n."""
    descending = row.sort(descending=True).values
    excess = descending.cumsum(0).sub_(1.0)
    support = (descending * counts > excess).sum()
    return row.sub(excess[support - 1] / support).clamp_(min=0.0)


class PerNodeLoop:
    """AD-GDA with b-bit quantized differences and a chi-square regularizer over a fixed graph."""

    def __init__(
        self,
        module: nn.Module,
        data: Sequence[tuple[Tensor, Tensor]],  # one pair (uint8 images, labels) per node
        neighbours: Sequence[dict[int, float]],  # of each node, itself included: node -> weight in W
        *,
        batch: int,
        bits: int = 4,
        primal_step: float = 1.0,
        ratio: float = 0.998,
        dual_step: float = 0.01,
        rate: float = 0.1,
        strength: float = 0.01,
    ):
        self.nodes = [
            Node(copy.deepcopy(module), inputs, targets, around, len(data))
            for (inputs, targets), around in zip(data, neighbours)
        ]
        device, dim = self.nodes[0].model.device, len(self.nodes[0].model)
        self.batch, self.rate, self.strength, self.round = batch, rate, strength, 0
        self.primal_step, self.ratio, self.dual_step = primal_step, ratio, dual_step
        self.levels = 2.0**bits
        self.unit = 1.0 / (self.levels * (1.0 + min(dim / 4.0**bits, math.sqrt(dim) / 2.0**bits)))
        self.counts = torch.arange(1, len(data) + 1, device=device)
        self.average = torch.zeros_like(self.nodes[0].model)  # theta_o, the mean over time
        self.bytes_sent = torch.zeros(len(data), device=device)  # by each node

    def step(self) -> None:
        """One round."""
        step, n, share = self.primal_step * self.ratio**self.round, len(self.nodes), 1.0 / (self.round + 1)
        messages, duals = [], []
        self.average.mul_(1.0 - share)
        for i, node in enumerate(self.nodes):
            drawn = torch.randint(len(node.inputs), (self.batch,), device=node.inputs.device)
            inputs = node.inputs.index_select(0, drawn).float().div_(255.0)  # far quicker than inputs[drawn]
            node.gradient.zero_()
            loss = nn.functional.cross_entropy(node.module(inputs), node.targets.index_select(0, drawn))
            loss.backward()
            with torch.no_grad():
                weight = node.weights[i].clone()  # lambda_i[i] before its step
                slopes = (node.weights * n).sub_(1.0).mul_(-2.0 * self.strength)
                slopes[i] += loss
                duals.append(projected(node.weights.add(slopes, alpha=self.dual_step), self.counts))
                self.average.add_(node.model, alpha=share / n)
                node.model.sub_(node.gradient.mul_(weight).mul_(step))
                node.model.add_(node.mixed, alpha=self.rate).sub_(node.public, alpha=self.rate)
                difference = node.model - node.public
                norm = difference.norm()
                levels = difference.abs().mul_(self.levels / norm).add_(torch.rand_like(difference)).floor_()
                levels.mul_(difference.sign_())
                counts = torch.bincount(levels.long().add_(int(self.levels)), minlength=int(2 * self.levels) + 1)
                self.bytes_sent[i] += bytes_of(counts) * (len(node.neighbours) - 1)
                messages.append(levels.mul_(norm * self.unit))
        with torch.no_grad():
            for node, message in zip(self.nodes, messages):
                node.public.add_(message)
                node.weights = torch.zeros_like(node.weights)
                for j, weight in node.neighbours.items():
                    node.mixed.add_(messages[j], alpha=weight)
                    node.weights.add_(duals[j], alpha=weight)
        self.round += 1
