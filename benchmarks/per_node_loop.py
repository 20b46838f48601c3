"""AD-GDA simulated as a plain per-node PyTorch loop.

Agnostic decentralised gradient descent-ascent with compressed communication: each node holds an ordinary
``nn.Module``, takes a stochastic primal step and a dual step on its own data, gossips, and sends its neighbours the
quantised change of its model. The nodes are visited one after the other in a Python loop.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def project_simplex(x: Tensor) -> Tensor:
    """Euclidean projection of a vector onto the probability simplex (sort-based)."""
    ordered = torch.sort(x, descending=True).values
    counts = torch.arange(1, x.numel() + 1, device=x.device)
    threshold = ((ordered.cumsum(0) - 1) / counts).max()
    return (x - threshold).clamp(min=0)


def quantise(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Random quantisation of a vector: its quantised value and the signed integer levels (held as floats)."""
    d = x.numel()
    tau = 1 + min(d / 2 ** (2 * bits), math.sqrt(d) / 2**bits)
    norm = x.norm()
    safe_norm = norm.clamp(min=torch.finfo(x.dtype).tiny)  # a zero vector has zero levels
    levels = x.sign() * torch.floor(2**bits * x.abs() / safe_norm + torch.rand_like(x))
    return norm / (2**bits * tau) * levels, levels


def entropy_bytes(levels: Tensor, bits: int) -> Tensor:
    """Bytes needed to send the levels at their zeroth-order entropy."""
    top = 2**bits + 1  # rounding may lift the highest level, 2**bits, by one
    histogram = torch.histc(levels, bins=2 * top + 1, min=-top - 0.5, max=top + 0.5)
    entropy = torch.special.entr(histogram / levels.numel()).sum() / math.log(2)
    return entropy * levels.numel() / 8


@dataclass
class Node:
    """What one node holds."""

    model: nn.Module
    images: Tensor
    labels: Tensor
    theta: Tensor  # the model's parameters, flat
    hat: Tensor  # the model as the network knows it
    mixed: Tensor  # the weighted sum of the neighbours' public copies
    dual: Tensor  # the weights over nodes


class PerNodeLoop:
    """AD-GDA over a network of nodes, one node at a time."""

    def __init__(
        self,
        module: nn.Module,
        data: Sequence[tuple[Tensor, Tensor]],
        neighbours: Sequence[dict[int, float]],
        *,
        batch: int,
        bits: int = 4,
        primal_step: float = 1.0,
        ratio: float = 0.998,
        dual_step: float = 0.01,
        consensus_step: float = 0.1,
        strength: float = 0.01,
    ) -> None:
        """Start every node from a copy of module; neighbours[i] is {j: W[i, j]}, i itself included."""
        self.neighbours = neighbours
        self.batch = batch
        self.bits = bits
        self.primal_step = primal_step
        self.ratio = ratio
        self.dual_step = dual_step
        self.consensus_step = consensus_step
        self.strength = strength
        self.round = 0

        n = len(data)
        self.nodes: list[Node] = []
        for images, labels in data:
            model = copy.deepcopy(module).to(images.device)
            theta = parameters_to_vector(model.parameters()).detach()
            self.nodes.append(
                Node(
                    model=model,
                    images=images,
                    labels=labels,
                    theta=theta,
                    hat=torch.zeros_like(theta),
                    mixed=torch.zeros_like(theta),
                    dual=torch.full((n,), 1 / n, device=images.device),
                )
            )
        device = self.nodes[0].theta.device
        self.bytes_sent = torch.zeros(n, dtype=torch.float64, device=device)
        self.average = torch.zeros_like(self.nodes[0].theta)  # running mean of the network-average model

    def step(self) -> None:
        """Run one round."""
        network_mean = torch.stack([node.theta for node in self.nodes]).mean(dim=0)
        self.average += (network_mean - self.average) / (self.round + 1)

        messages: list[Tensor] = []
        duals: list[Tensor] = []
        for i, node in enumerate(self.nodes):
            loss, gradient = self._loss_and_gradient(node)
            duals.append(self._dual_ascent(i, node, loss))

            # Primal descent, then gossip.
            theta = node.theta - self.primal_step * self.ratio**self.round * node.dual[i] * gradient
            theta += self.consensus_step * (node.mixed - node.hat)
            node.theta = theta
            vector_to_parameters(theta, node.model.parameters())

            # Compress what the neighbours do not know yet.
            message, levels = quantise(theta - node.hat, self.bits)
            messages.append(message)
            receivers = sum(j != i for j in self.neighbours[i])
            self.bytes_sent[i] += entropy_bytes(levels, self.bits) * receivers

        # Exchange: every node hears its neighbours' messages and dual weights.
        for i, node in enumerate(self.nodes):
            node.hat += messages[i]
            node.dual = torch.zeros_like(node.dual)
            for j, weight in self.neighbours[i].items():
                node.mixed.add_(messages[j], alpha=weight)
                node.dual.add_(duals[j], alpha=weight)
        self.round += 1

    def _loss_and_gradient(self, node: Node) -> tuple[Tensor, Tensor]:
        """Loss of a node's model on a fresh minibatch, and its flat gradient."""
        index = torch.randint(len(node.labels), (self.batch,), device=node.labels.device)
        images = node.images[index].float() / 255
        loss = F.cross_entropy(node.model(images), node.labels[index])
        gradients = torch.autograd.grad(loss, list(node.model.parameters()))
        return loss.detach(), torch.cat([gradient.flatten() for gradient in gradients])

    def _dual_ascent(self, i: int, node: Node, loss: Tensor) -> Tensor:
        """Node i's dual weights after a projected ascent step on its regularised loss."""
        slope = -2 * self.strength * (node.dual * len(self.nodes) - 1)
        slope[i] += loss
        return project_simplex(node.dual + self.dual_step * slope)
