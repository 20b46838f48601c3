"""Losses and gradients in which every row counts by the ratio of its subgroup."""

import torch
from torch import Tensor

from fairmesh.problems.batches import Batches
from fairmesh.problems.hosted_nodes import HostedNodes
from fairmesh.problems.judge import ByRowsApart, Judge
from fairmesh.problems.losses_of_nodes import Losses
from fairmesh.problems.subgroups import Seen, seen_in


class SubgroupLosses:
    """The subgroups of the hosted nodes' rows, and their losses.

    Args:
        nodes: The hosted nodes.
        batches: Their batches.
        losses: The losses on them.
        judge: On which rows the losses count.
    """

    def __init__(self, nodes: HostedNodes, batches: Batches, losses: Losses, judge: Judge):
        self._nodes, self._batches, self._losses, self._judge = nodes, batches, losses, judge
        problem, order = nodes.problem, judge.division.order
        self._count = problem.subgroup_count
        numbers = {i: problem.subgroup_numbers(i) for i in problem.here}
        of_rows = torch.cat(list(numbers.values()))
        self._numbers = (of_rows if order is None else of_rows[order]).to(batches.data_device)  # of each row
        shares = torch.zeros(problem.n, self._count, dtype=torch.float64)
        for i, of_site in numbers.items():
            shares[i] = torch.bincount(of_site, minlength=self._count) / len(of_site)
        # Of each node's rows (replicas, nodes, subgroups).
        self.shares = shares.to(nodes.device, nodes.dtype)[nodes.sites]

    def gradients(self, rows: Tensor, round_index: Tensor, call: int, ratios: Tensor) -> tuple[Tensor, Tensor, Seen]:
        """Returns gradients and losses of a stack of models, with each row's loss multiplied by the ratio of its
        subgroup, and the losses by subgroup; the losses on the rows that judge.

        Args:
            rows: The models (nodes, dim + own_dim).
            round_index: The round.
            call: Which of its batches.
            ratios: (replicas, nodes, subgroups).
        """
        of_nodes = ratios.flatten(0, 1)

        def on_batch(number: int, inputs, targets, key: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
            numbers = self._batches.of_rows(self._numbers, round_index, number)
            weighed = weights * of_nodes.gather(1, numbers)
            gradients, (losses, each) = self._losses.gradients_and_samples(rows, inputs, targets, key, weighed)
            return gradients, losses, *self._seen(each, numbers, weights)

        gradients, losses, *sums_and_counts = self._batches.sums(on_batch, round_index, call)
        gradients, losses, seen = (
            gradients / self._batches.repeats,
            losses / self._batches.repeats,
            Seen(*sums_and_counts),
        )
        if not isinstance(self._judge, ByRowsApart):
            return gradients, losses, seen
        inputs, targets, weights = self._batches.judging(round_index, call)
        numbers = self._batches.of_judging_rows(self._numbers, round_index, call)
        with torch.no_grad():
            each = self._losses.judging_samples(rows, inputs, targets)
        weighed = weights * of_nodes.gather(1, numbers)  # divided by its sum: few rows hold no exact shares
        return gradients, (each * weighed).sum(dim=-1) / weighed.sum(dim=-1), self._seen(each, numbers, weights)

    def _seen(self, each: Tensor, numbers: Tensor, weights: Tensor) -> Seen:
        return Seen(*(part.view(*self._nodes.shape, -1) for part in seen_in(each, numbers, weights, self._count)))
