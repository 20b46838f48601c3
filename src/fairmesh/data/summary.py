"""What each site holds, in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.errors import BadInput


@dataclass(frozen=True)
class SiteSummary:
    """The number of samples that one site holds."""

    name: str
    group: str
    train: int  # samples
    test: int
    classes: tuple[int, ...]  # training samples of each class; empty where targets are not labels


def site_summaries(sites: Sequence[Site]) -> list[SiteSummary]:
    """Returns what each site holds, in the order of the nodes."""
    if not sites:
        raise BadInput("no site to show")
    read = [Samples.of(site.train, f"site {i}") for i, site in enumerate(sites)]
    labels = [labels for samples in read if (labels := samples.labels) is not None]
    kinds = 1 + max(int(of_site.max()) for of_site in labels) if len(labels) == len(read) else 0
    return [
        SiteSummary(
            site.name or f"node {i}",
            site.group or site.name or f"node {i}",
            len(samples),
            0 if site.test is None else len(Samples.of(site.test, f"test set of site {i}")),
            tuple(samples.class_counts(kinds) or ()) if kinds else (),
        )
        for i, (site, samples) in enumerate(zip(sites, read))
    ]
