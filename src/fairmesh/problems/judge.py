"""Which losses the weights of the sites follow: on which rows, compared with what, and for how long."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairmesh.problems.batches import Batches
from fairmesh.problems.hosted_nodes import Division, HostedNodes
from fairmesh.problems.losses_of_nodes import Losses
from fairmesh.problems.objective import LEARNABLE


class Judge:
    """Measures models on the rows that judge each hosted node: the batches that it trains on.

    Args:
        division: The nodes' rows.
        batches: The batches.
        losses: The losses on them.
    """

    apart = False  # whether other rows judge than those of the batches

    def __init__(self, division: Division, batches: Batches, losses: Losses):
        self.division, self.batches, self.all_losses = division, batches, losses

    def losses(self, rows: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns the loss of each row of a stack of models: (nodes,)."""
        return self._mean(self.all_losses.of_batch, rows, round_index, call)

    def errors(self, rows: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns the share of samples that each row misclassifies: (nodes,)."""
        return self._mean(self.all_losses.errors, rows, round_index, call)

    def settled(self, on_batch: Tensor, rows: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns the same as `losses`, without another pass where those on the training batch, `on_batch`, count."""
        return on_batch

    def _mean(self, function: Callable[..., Tensor], rows: Tensor, round_index: Tensor, call: int) -> Tensor:
        with torch.no_grad():
            (mean,) = self.batches.mean(lambda *batch: (function(rows, *batch),), round_index, call)
        return mean


class ByRowsApart(Judge):
    """A node is judged by rows of its own for that: held-out rows, or a validation set."""

    apart = True

    @torch.no_grad()
    def losses(self, rows: Tensor, round_index: Tensor, call: int) -> Tensor:
        return self.all_losses.judging(rows, *self.batches.judging(round_index, call))

    @torch.no_grad()
    def errors(self, rows: Tensor, round_index: Tensor, call: int) -> Tensor:
        return self.all_losses.judging_errors(rows, *self.batches.judging(round_index, call))

    def settled(self, on_batch: Tensor, rows: Tensor, round_index: Tensor, call: int) -> Tensor:
        return self.losses(rows, round_index, call)


class Standard:
    """How losses become what the weights follow. Here they stay as they are; subclasses compare them."""

    discounts_noise = False

    def excess(self, losses: Tensor) -> Tensor:
        """Returns losses (replicas, nodes, 1) as the weights follow them."""
        return losses

    def learnable_shares(self, losses: Tensor) -> Tensor:
        """Returns how much of each loss a model can lower, in [0, 1]."""
        return torch.ones_like(losses)


class AgainstReferences(Standard):
    """The weights follow a loss minus the site's reference plus the mean of all references, at least 0.

    Args:
        excess: Each node's reference minus the mean (replicas, nodes, 1).
    """

    def __init__(self, excess: Tensor):
        self._excess = excess

    def excess(self, losses: Tensor) -> Tensor:
        return (losses - self._excess).clamp_(min=0.0)


class DiscountedNoise(Standard):
    """A loss counts only as far as a model can lower it and chance does not explain it. The losses stay as they are
    here: a weighting discounts them, by `learnable_shares` and by how many rows judge.

    Args:
        local: The loss that each site reaches alone (replicas, nodes, 1).
        untrained: Its loss before training.
    """

    discounts_noise = True

    def __init__(self, local: Tensor, untrained: Tensor):
        self._local, self._untrained = local, untrained

    def learnable_shares(self, losses: Tensor) -> Tensor:
        learned = 1.0 - torch.minimum(self._local, losses) / self._untrained
        return (learned / LEARNABLE).clamp_(0.0, 1.0).pow_(4)


def standard_of(nodes: HostedNodes) -> Standard:
    """Returns what the problem's objective compares losses with."""
    problem = nodes.problem
    objectives = [(split.objective, [site.name or "" for site in split.sites]) for split in problem.every_split]

    def of_nodes(numbers: Sequence[Tensor]) -> Tensor:
        return nodes.of_sites(torch.cat(list(numbers)).to(nodes.device, nodes.dtype))

    if problem.objective.discount_noise:
        learnable = [objective.learnable(names, problem.here) for objective, names in objectives]
        return DiscountedNoise(*map(of_nodes, zip(*learnable)))
    if problem.objective.against is None:
        return Standard()
    references = [objective.references(names) for objective, names in objectives]
    return AgainstReferences(of_nodes([numbers - numbers.mean() for numbers in references]))


def judge_of(nodes: HostedNodes, *parts: Any) -> Judge:
    """Returns the judge that the problem's objective asks for, from the arguments of `Judge`."""
    return Judge(*parts) if nodes.problem.objective.judged_on == "training" else ByRowsApart(*parts)
