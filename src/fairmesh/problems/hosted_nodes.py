"""The nodes that are computed here, in every replica: their random streams, and whose rows each of them holds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairmesh.data.site import Site
from fairmesh.errors import BadInput
from fairmesh.numerics import random_streams
from fairmesh.numerics.random_streams import SecretIdentities

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
