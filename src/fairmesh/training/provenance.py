"""Where a model comes from: the versions that trained it, and what each site's data is, in numbers and digests."""

import platform
from typing import Any

import torch

import fairmesh
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.numerics import trees
from fairmesh.problems.prepared import Prepared

_SETS = ("train", "validation", "test")


def provenance_of(problem: Prepared, process_group: ProcessGroup) -> dict[str, Any]:
    """Returns the versions and a description of the data without any row of it, of all processes' sites.

    The digest of a site covers the inputs and targets of its training samples, and numbers are those of the first
    split of the data. A private run has none, by which a guess at the rows could be confirmed, and counts units."""
    private = problem.privacy is not None
    labelled, here = problem.classes is not None, dict.fromkeys(problem.here, "") if private else problem.digests_here()
    mine = [(i, digest, _classes(problem, i) if labelled else {}) for i, digest in here.items()]
    known = {i: (digest, facts) for held in process_group.all_gather_json(mine) for i, digest, facts in held}
    sites = []
    for i, site in enumerate(problem.sites):
        sets = {name: getattr(site, name) for name in _SETS}
        counts = {name: len(samples or ()) for name, samples in sets.items()}
        digest, facts = known[i]
        sites.append({"name": site.name, "group": site.group, **counts, **facts, "digest": digest.split(" ")[0]})
    return {
        "versions": {"fairmesh": fairmesh.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "data": {
            "inputs": trees.shapes(problem.sites[0].train.inputs),
            "classes": problem.classes,
            "splits": len(problem.every_split),
            "digest": "" if private else problem.digest({i: digest for i, (digest, _) in known.items()}),
            "sites": sites,
        },
    }


def _classes(problem: Prepared, i: int) -> dict[str, dict[str, list[int]]]:
    """Returns how many samples of each class the sets of site i have."""
    sets = {name: getattr(problem.sites[i], name) for name in _SETS}
    counts = {name: samples.class_counts(problem.classes or 0) for name, samples in sets.items() if samples}
    return {"classes": {name: found for name, found in counts.items() if found is not None}}
