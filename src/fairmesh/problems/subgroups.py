"""Subgroups inside sites: their numbers, and the weights that follow from their losses."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fairmesh.data.reserve import FEWEST_ROWS
from fairmesh.data.samples import Samples
from fairmesh.errors import BadInput
from fairmesh.problems.batches import Batches
from fairmesh.problems.hosted_nodes import HostedNodes
from fairmesh.problems.judge import Judge
from fairmesh.problems.losses_of_nodes import Losses

OTHERS = "(others)"  # the rows of a site whose subgroups are too small to have a weight of their own


class Seen(NamedTuple):
    """Losses by subgroup, (replicas, nodes, subgroups)."""

    sums: Tensor  # of the losses of a subgroup's rows
    counts: Tensor  # of these rows


def numbered(samples: Samples, names: Sequence[str], where: str) -> Tensor:
    """Returns each row's subgroup as a number among `names` (rows,)."""
    if samples.subgroups is None:
        raise BadInput(
            f"objective.subgroups needs the subgroup of every row, and {where} has none; give each Site "
            "(inputs, targets, subgroups)"
        )
    if OTHERS in samples.subgroup_names:
        raise BadInput(f"{where} has the subgroup {OTHERS!r}, which stands for small subgroups; give it another name")
    unknown = [name for name in samples.subgroup_names if name not in names and OTHERS not in names]
    if unknown:
        raise BadInput(f"{where} has the subgroup {unknown[0]!r}; objective.subgroup_names are {', '.join(names)}")
    of_name = [names.index(name if name in names else OTHERS) for name in samples.subgroup_names]
    return torch.tensor(of_name, dtype=torch.int64)[samples.subgroups]


def own_names(samples: Samples) -> tuple[str, ...]:
    """Returns the subgroups of a site that have a weight of their own. Those with fewer than 10 rows share one."""
    if samples.subgroups is None:
        return ()
    counts = torch.bincount(samples.subgroups, minlength=len(samples.subgroup_names)).tolist()
    large = tuple(name for name, count in zip(samples.subgroup_names, counts) if count >= FEWEST_ROWS)
    return large if len(large) == sum(count > 0 for count in counts) else (*large, OTHERS)


def seen_in(losses: Tensor, numbers: Tensor, weights: Tensor, subgroups: int) -> Seen:
    """Returns the sums of losses (..., rows) and of rows by subgroup. A row that only fills a batch weighs nothing."""
    member = (numbers.unsqueeze(-1) == torch.arange(subgroups, device=numbers.device)).to(losses.dtype)
    member = member * (weights > 0).to(losses.dtype).unsqueeze(-1)
    return Seen((losses.unsqueeze(-1) * member).sum(dim=-2), member.sum(dim=-2))


def table_of(known: Seen, masses: Tensor) -> Tensor:
    """Returns each node's part in the losses and in the rows of all subgroups: (replicas, nodes, 2 subgroups).

    Args:
        known: The losses of the subgroups, as the nodes remember them.
        masses: The weight of each subgroup's rows at each node (replicas, nodes, subgroups)."""
    rows = known.counts.sum(dim=-1, keepdim=True)
    mean = known.sums.sum(dim=-1, keepdim=True) / rows.clamp(min=torch.finfo(rows.dtype).tiny)
    each = torch.where(known.counts > 0, known.sums / known.counts.clamp(min=torch.finfo(rows.dtype).tiny), mean)
    return torch.cat([masses * each, masses], dim=-1)


def ratios_of(table: Tensor, strength: float | Tensor) -> Tensor:
    """Returns by how much the loss of a row of each subgroup is multiplied: (..., subgroups).

    With P_g the share of a subgroup's rows, F_g its mean loss and F the mean of all, the weights of the subgroups are
    proportional to P_g exp(F_g / (strength F)), the worst mixture at a Kullback-Leibler distance, and the ratio is that
    weight divided by P_g.

    Args:
        table: P_g F_g of all subgroups, then P_g (..., 2 subgroups), up to a common factor.
        strength: How far the weights stay near the shares of the rows."""
    tiny = torch.finfo(table.dtype).tiny
    losses, masses = table.clamp(min=0.0).chunk(2, dim=-1)
    whole = masses.sum(dim=-1, keepdim=True).clamp(min=tiny)
    mean = losses.sum(dim=-1, keepdim=True) / whole
    exponents = losses / masses.clamp(min=tiny) / (strength * mean).clamp(min=tiny)
    exponents = torch.where(masses > 0, exponents, torch.zeros_like(exponents))
    raised = (exponents - exponents.amax(dim=-1, keepdim=True)).exp()
    return raised * whole / (masses * raised).sum(dim=-1, keepdim=True).clamp(min=tiny)


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
        if not self._judge.apart:
            return gradients, losses, seen
        inputs, targets, weights = self._batches.judging(round_index, call)
        numbers = self._batches.of_judging_rows(self._numbers, round_index, call)
        with torch.no_grad():
            each = self._losses.judging_samples(rows, inputs, targets)
        weighed = weights * of_nodes.gather(1, numbers)  # divided by its sum: few rows hold no exact shares
        return gradients, (each * weighed).sum(dim=-1) / weighed.sum(dim=-1), self._seen(each, numbers, weights)

    def _seen(self, each: Tensor, numbers: Tensor, weights: Tensor) -> Seen:
        return Seen(*(part.view(*self._nodes.shape, -1) for part in seen_in(each, numbers, weights, self._count)))
