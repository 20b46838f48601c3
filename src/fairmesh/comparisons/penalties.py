"""The penalty on its model's size that each site finds before a run, from its own rows in folds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairmesh.comparisons.alone import FOLDS, AloneRun, first_step, takes_folds, whole_model
from fairmesh.data.reserve import can_hold_out
from fairmesh.personalization.cross_fit import CrossFit, sites_at_once
from fairmesh.problems.prepared import Prepared
from fairmesh.training.options import DTYPES, device_of

# Small sites cannot tell large penalties apart: to most of them a constant answer looks best, though all sites together
# learn more. With at most 30 no planted problem was harmed (python -m reproduction.decay).
PENALTIES = (0.0, 0.1, 1.0, 3.0, 10.0, 30.0)
FINDING = "finding the decay of models"
_LARGEST_MODEL = 10_000  # parameters; the search would take longer than the run
_STEPS, _ERRORS = 300, 1.0


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
    if problem.objective.validated_decay == "numbers" and problem.classes:
        return found
    able = [i for i in sites if takes_folds(problem, i) and can_hold_out(problem.sites[i].train)]
    if not able or problem.flat_model.dim + problem.flat_model.own_dim > _LARGEST_MODEL:
        return found
    # A site learns from its training rows only: others may judge the run.
    own = [replace(site, validation=None, reserved=None) for site in problem.sites]
    alone = whole_model(problem.changed(sites=own))
    device, dtype = device_of(run.options.device), DTYPES[run.options.dtype]
    start, steps = alone.initial_row(run.seed).to(device, dtype), min(run.rounds, _STEPS)
    for part in sites_at_once(alone, able, FOLDS, dtype, len(PENALTIES)):

        def carrier(how: str, *work: Any, part: list[int] = part) -> Any:
            return run.phases.carried_out(FINDING, f"{name}-{part[0]}", identity, *work)

        fit = CrossFit(alone, part, FOLDS, run.seed, device, dtype, run.options.trace == "auto", carrier)
        penalties = fit.least_penalties(fit.same(start.expand(len(part), -1)), steps, first_step(), PENALTIES, _ERRORS)
        found[[list(sites).index(i) for i in part]] = penalties
    return found
