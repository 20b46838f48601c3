"""The samples of every site: which are here, what judges whom, and how much each site counts."""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.problems.data_checks import scaled_prior

_SETS = ("train", "test", "validation", "reserved")


@dataclass(frozen=True, eq=False, kw_only=True)
class SiteSamples:
    """The sites of a problem, all of whose sets are read: the side of a `Prepared` that knows no model."""

    sites: Sequence[Site]
    prior: Sequence[float] | None

    @property
    def n(self) -> int:
        """The number of nodes."""
        return len(self.sites)

    @cached_property
    def here(self) -> list[int]:
        """The sites whose data this process holds: all of them in a simulation."""
        return [i for i, site in enumerate(self.sites) if site.train.here]

    @property
    def example(self) -> Samples:
        """Training samples of the first site that is here: those that can be looked at."""
        return self.sites[self.here[0]].train.seen

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How rows of a table became inputs, or None if the sites' data is not from a table."""
        return next((site.table.preprocessing for site in self.sites if site.table), None)

    @cached_property
    def prior_of_sites(self) -> Tensor:
        """The prior p (n,), float64; sums to one."""
        return scaled_prior(self.prior, [len(site.train) for site in self.sites])

    @property
    def shares_of_samples(self) -> Tensor:
        """The share of each site in all training samples (n,), float64."""
        return scaled_prior(None, [len(site.train) for site in self.sites])

    def held_out(self, split: Literal["test", "validation", "train"]) -> tuple[list[Samples], list[int]]:
        """Returns the distinct sets of a split that are here, and the index of the one that judges each site.

        The index is -1 if another process holds the set, or if the site has none. There are no indices if no site has
        one."""
        every = [getattr(site, split) for site in self.sites]
        here = dict.fromkeys(samples for samples in every if samples and samples.here)
        places = {samples: k for k, samples in enumerate(here)}
        return list(places), [places.get(samples, -1) for samples in every] if any(every) else []

    def sites_keeping(self, kept: Collection[int]) -> list[Site]:
        """Returns the sites for a process that holds the data of some of them, and the sizes of the others."""

        @functools.cache
        def held(samples: Samples | None, here: bool) -> Samples | None:  # a set that sites share stays one
            if samples is None:
                return None
            if here:
                return samples.alone()
            away = Samples.elsewhere(len(samples), samples)
            return dataclasses.replace(away, subgroup_names=samples.subgroup_names)

        made = []
        for i, site in enumerate(self.sites):
            sets: dict[str, Any] = {name: held(getattr(site, name), i in kept) for name in _SETS}
            table = site.table and site.table.without_rows()
            made.append(dataclasses.replace(site, table=table, **sets))
        return made
