"""The nodes that are computed here, in every replica: their random streams, whose rows each of them holds, which of
these it is trained on, and which judge the models that the weights follow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.data.units import units_of
from fairmesh.errors import BadInput
from fairmesh.numerics import random_streams
from fairmesh.numerics.random_streams import SecretIdentities
from fairmesh.problems.objective import held_out_rows

if TYPE_CHECKING:
    from fairmesh.problems.prepared import Prepared


class HostedNodes:
    """A stack of hosted nodes. Node i of a replica holds the rows of site placement[i] in the replica's split.

    Args:
        problem: The sites, and the settings.
        hosted: The numbers of the hosted nodes (nodes,), on the device that computes.
        identities: Those of their random streams.
        seeds: The seed of each replica.
        placements: The sites at all nodes (replicas, n); None for site i at node i.
        splits: The split of each replica; empty for the first of all.
        dtype: Of models and data.
    """

    def __init__(
        self,
        problem: "Prepared",
        hosted: Tensor,
        identities: Tensor | SecretIdentities,
        seeds: Sequence[int],
        placements: Tensor | None,
        splits: Sequence[int],
        dtype: torch.dtype,
    ):
        self.problem, self.dtype, self.device = problem, dtype, hosted.device
        self.numbers: list[int] = hosted.tolist()
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=self.device)
        self._identities = identities
        everywhere = torch.arange(problem.n).expand(len(self.seeds), -1)
        placements = (everywhere if placements is None else placements).to(self.device)
        absent = set(placements.index_select(1, hosted).flatten().tolist()) - set(problem.here)
        if absent:
            raise BadInput(f"nodes hosted here hold the data of sites {sorted(absent)}, which is at another host")
        # Site i of split k is number k n + i among the sites of all splits.
        first_of_split = problem.n * torch.tensor(splits or [0] * len(self.seeds), device=self.device).unsqueeze(-1)
        self.placements = placements + first_of_split  # (replicas, n)
        self.sites = self.placements.index_select(1, hosted)  # (replicas, nodes)
        self.shape = tuple(self.sites.shape)
        self.rows = self.sites.numel()  # of a stack of their models

    def of_sites(self, numbers: Tensor) -> Tensor:
        """Returns the entries of the hosted nodes (replicas, nodes, 1) among those of the sites of all splits."""
        return numbers.to(self.device)[self.sites].unsqueeze(-1)

    def of_all(self, numbers: Tensor) -> Tensor:
        """Returns the entries of all nodes (replicas, 1, n) among those of the sites of all splits."""
        return numbers.to(self.device)[self.placements].unsqueeze(1)

    def keys(self, purpose: str, rounds: Tensor | int) -> Tensor:
        """Returns the keys of the nodes' random numbers for one purpose: (rounds, replicas, nodes) if rounds are
        (rounds, 1), and (replicas, nodes) for one."""
        return random_streams.keys(self.seeds, purpose, rounds, self._identities)

    def site(self, replica: int, place: int) -> tuple[int, Site]:
        """Returns the site whose rows a hosted node holds, and its number."""
        split, i = divmod(int(self.sites[replica, place]), self.problem.n)
        return i, self.problem.every_split[split].sites[i]


@dataclass(frozen=True)
class Division:
    """The rows of the sites that are here, numbered one after another, and what each hosted node does with its own.

    Args:
        samples: The rows.
        order: The row that stands at each place; None for their own order.
        starts: The first training row of each hosted node (replicas, nodes, 1).
        sizes: How many training rows it has, (replicas, nodes, 1).
        trained: How many of these it trains on until the others rejoin them.
        rejoin: The first round in which it trains on all; None for never, or if it always does.
        judged_from: The first of the rows that judge it, other than its batches (replicas, nodes, 1).
        judges: How many these are; 0 everywhere if batches judge.
        apart: How many units of them it does not train on; as many as rows if each is a unit of its own. Rows of one
            unit are alike, so that chance goes by units.
    """

    samples: list[Samples]
    order: Tensor | None
    starts: Tensor
    sizes: Tensor
    trained: Tensor
    rejoin: int | None
    judged_from: Tensor
    judges: Tensor
    apart: Tensor

    def sizes_in(self, rounds: Tensor) -> Tensor:
        """Returns how many rows each hosted node trains on, for rounds that broadcast with (replicas, nodes, 1)."""
        return self.trained if self.rejoin is None else torch.where(rounds < self.rejoin, self.trained, self.sizes)


def division_of(nodes: HostedNodes, sizes: Tensor) -> Division:
    """Returns the division that the problem's objective asks for.

    Args:
        nodes: The hosted nodes.
        sizes: How many training rows each site of each split has.
    """
    problem = nodes.problem
    here = torch.zeros(problem.n, dtype=sizes.dtype).index_fill_(0, torch.tensor(problem.here), 1)
    rows_here = here.to(sizes.device).repeat(len(problem.every_split)) * sizes
    starts = rows_here.cumsum(0) - rows_here
    own, first = nodes.of_sites(sizes), nodes.of_sites(starts)
    nobody = torch.zeros_like(own)
    whole = Division(problem.train_sets, None, first, own, own, None, nobody, nobody, nobody)
    if problem.objective.judged_on == "validation":
        return _with_validation_sets(whole, nodes, int(rows_here.sum()))
    if problem.objective.judged_on == "held-out":
        return _with_held_out_rows(whole, nodes, sizes, starts)
    return whole


def _with_validation_sets(whole: Division, nodes: HostedNodes, trained: int) -> Division:
    """Returns the division with the validation sets behind the `trained` rows. Each node is judged by its site's."""
    sets: list[Samples] = []
    of_site: list[int] = []
    for split in nodes.problem.every_split:
        for i, site in enumerate(split.sites):
            if site.validation is None:
                raise BadInput(
                    f"site {i} ({site.name}) has no validation set; with objective.judged_on = "
                    '"validation" every site needs one'
                )
        of_split, which_set = split.held_out("validation")
        of_site += [len(sets) + max(k, 0) for k in which_set]  # one that is elsewhere judges no node here
        sets += of_split
    lengths, which = torch.tensor([len(samples) for samples in sets]), torch.tensor(of_site)
    first = trained + lengths.cumsum(0) - lengths
    judges = nodes.of_sites(lengths[which])
    return replace(
        whole,
        samples=[*whole.samples, *sets],
        judged_from=nodes.of_sites(first[which]),
        judges=judges,
        apart=nodes.of_sites(torch.tensor([units_of(samples) for samples in sets])[which]),
    )


def _with_held_out_rows(whole: Division, nodes: HostedNodes, sizes: Tensor, starts: Tensor) -> Division:
    """Returns the division in which each site's held-out rows, which judge it, come last among its rows."""
    problem = nodes.problem
    held_out, units = [0] * len(sizes), [0] * len(sizes)  # no node here is of a site elsewhere
    begins, orders = starts.tolist(), []
    for k, split in enumerate(problem.every_split):
        for i in problem.here:
            samples, place = split.sites[i].train, k * problem.n + i
            held = held_out_rows(samples, i, problem.objective)
            held_out[place] = int(held.sum())
            units[place] = held_out[place] if samples.units is None else len(samples.units[held].unique())
            orders += [begins[place] + part.nonzero().flatten() for part in (~held, held)]
    counts = torch.tensor(held_out, device=sizes.device)
    judges = torch.where(counts == 0, sizes, counts)  # one too small to hold any out is judged on its training rows
    return replace(
        whole,
        order=torch.cat(orders),
        trained=nodes.of_sites(sizes - counts),
        rejoin=problem.objective.rejoin_round(),
        judged_from=nodes.of_sites(starts + sizes - judges),
        judges=nodes.of_sites(judges),
        apart=nodes.of_sites(torch.tensor(units, device=sizes.device)),
    )
