"""Where the primary metric is defined: an AUROC needs rows of both classes."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from fairmesh.data.samples import Samples
from fairmesh.errors import BadInput, listed
from fairmesh.metrics.base import NamedMetric

if TYPE_CHECKING:
    from fairmesh.problems.prepared import Prepared


def undefined_sites(problem: "Prepared", split: str) -> list[int]:
    """Returns the sites whose rows are here and do not define the primary metric, whatever a model answers there: an
    AUROC where all rows have the same class.

    Args:
        problem: The problem. Of several splits of the data, all must leave it undefined.
        split: Which rows judge: "test", "validation" or "train".
    """
    found = []
    for of_split in problem.every_split:
        sets, which = of_split.held_out(split)  # type: ignore[arg-type]
        undefined = {k for k, samples in enumerate(sets) if not _is_defined(of_split, samples)}
        found.append({i for i, k in enumerate(which) if k in undefined})
    return sorted(set.intersection(*found))


def _is_defined(problem: "Prepared", samples: Samples) -> bool:
    metric, targets = problem.metrics.get(problem.primary), samples.labels if samples.stream else samples.targets
    if not isinstance(metric, NamedMetric) or problem.task in ("masks", "several") or targets is None:
        return True  # only the outputs of a model can tell
    targets = targets.unique(dim=0)  # equal ones change nothing
    with torch.no_grad(), suppress(Exception):  # rows without a class: the first measurement explains it
        outputs = problem.readings.predictions(problem.probe.model(problem.probe.row, problem.probe.inputs))
        return not math.isnan(metric(torch.zeros(len(targets), *outputs.shape[1:]), targets))
    return True


def undefined_in_words(problem: "Prepared", sites: Sequence[int], split: str) -> str:
    """Returns at which sites the primary metric is not defined, and what follows; nothing if there is none.

    Args:
        problem: The problem.
        sites: The numbers of these sites.
        split: Which rows judge.
    """
    if not sites:
        return ""
    names = listed([str(problem.sites[i].name) for i in sites], 10)
    return (
        f"{problem.primary} is not defined at {names}, whose {split} rows {_lack(problem)}: there is no verdict on "
        f"{'it' if len(sites) == 1 else 'them'}, and the worst site and the mean are those of the other sites"
    )


def undefined_everywhere(problem: "Prepared", split: str) -> BadInput:
    """Returns the error of a primary metric that is defined at no site.

    Args:
        problem: The problem.
        split: Which rows judge.
    """
    more = {"test": "hold out more rows (test_share of a table)", "validation": "validate on more rows"}
    return BadInput(
        f"primary = {problem.primary!r} is not defined at any site, since the {split} rows of each {_lack(problem)}; "
        f'{more.get(split, "give other rows")}, or choose another metric, such as primary = "loss"'
    )


def _lack(problem: "Prepared") -> str:
    return "do not vary" if problem.task == "numbers" else "lack a class that it needs"
