"""The penalty on its model's size that each site finds before a run, from its own rows in folds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairmesh.algorithms.local import Local
from fairmesh.comparisons.alone import AloneRun
from fairmesh.data.reserve import FEWEST_ROWS
from fairmesh.personalization.cross_fit import CrossFit, sites_at_once
from fairmesh.problems.objective import Objective
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.row_loss import BoundModelLoss
from fairmesh.training.options import DTYPES, device_of

# Small sites cannot tell large penalties apart: to most of them a constant answer looks best, though all sites together
# learn more. With at most 30 no planted problem was harmed (python -m reproduction.decay).
PENALTIES = (0.0, 0.1, 1.0, 3.0, 10.0, 30.0)
FINDING = "finding how small models should be"
_LARGEST_MODEL = 10_000  # parameters; the search would take longer than the run
_FOLDS, _STEPS, _ERRORS, _LARGE = 5, 300, 1.0, False


def validated_penalties(
    problem: Prepared, sites: Sequence[int], run: AloneRun, name: str, identity: Mapping[str, Any]
) -> Tensor:
    """Returns the penalty of each of these sites, as `Objective.validated_decay` says.

    Args:
        problem: The problem of one split.
        sites: The numbers of the sites.
        run: How sites train alone.
        name: The name of the work.
        identity: All that determines its outcome.
    """
    found = torch.zeros(len(sites), dtype=torch.float64)
    able = [i for i in sites if _is_able(problem.sites[i].train)]
    if not able or not _is_simple(problem):
        return found
    # A site alone has no parts that are shared. It learns from training rows only: others may judge the run.
    own = [replace(site, validation=None, reserved=None) for site in problem.sites]
    alone = problem.changed(sites=own, parts=replace(problem.parts, local=()), objective=Objective())
    device, dtype = device_of(run.options.device), DTYPES[run.options.dtype]
    start, steps = alone.initial_row(run.seed).to(device, dtype), min(run.rounds, _STEPS)
    for part in sites_at_once(alone, able, _FOLDS, dtype, len(PENALTIES)):

        def carrier(how: str, *work: Any, part: list[int] = part) -> Any:
            return run.phases.carried_out(FINDING, f"{name}-{part[0]}", identity, *work)

        fit = CrossFit(alone, part, _FOLDS, run.seed, device, dtype, run.options.trace == "auto", carrier)
        fit.large_batches = _LARGE
        penalties = fit.least_penalties(fit.same(start.expand(len(part), -1)), steps, _step(), PENALTIES, _ERRORS)
        found[[list(sites).index(i) for i in part]] = penalties
    return found


def _step() -> float:
    return Local().primal_step.start  # type: ignore[union-attr]


def _is_able(samples: Any) -> bool:
    return samples.stream is None and len(samples) >= FEWEST_ROWS


def _is_simple(problem: Prepared) -> bool:
    """Returns whether many models can be trained at once, each on some of a site's rows."""
    flat = problem.flat_model
    statistics = flat.own_dim > flat.local_dim  # of BatchNorm layers: folds would need statistics of their own
    plain = problem.trainer is None and problem.structured is None and not isinstance(problem.loss, BoundModelLoss)
    return plain and not statistics and flat.dim + flat.own_dim <= _LARGEST_MODEL
