"""The losses that an objective compares sites with: what each reaches alone, untrained, or with a constant output."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fairmesh.comparisons.alone import LOOKS, AloneRun, early_stopped_models, judged_apart
from fairmesh.comparisons.constants import answered, best_constant, initial_outputs
from fairmesh.comparisons.penalties import validated_penalties
from fairmesh.errors import BadInput
from fairmesh.problems.objective import Objective
from fairmesh.problems.prepared import Prepared, with_splits
from fairmesh.problems.row_loss import BoundModelLoss, as_floats

FINDING = "finding reference losses"
_FIELDS = ("local_losses", "untrained_losses", "constant_losses", "penalties")  # of an objective


def with_references(
    problem: Prepared, run: AloneRun, *, identity: Mapping[str, Any] | None = None, told: bool = True
) -> Prepared:
    """Returns the problem with its objective fitted to a run: its length, and the losses that sites are compared with.
    These are found once, by each process for the sites that it hosts.

    Args:
        problem: The problem.
        run: How sites train alone.
        identity: All that determines the losses; None to find it from the problem. Default: None.
        told: Whether processes tell each other their losses. Nodes between organisations do not. Default: True.
    """
    objective = problem.objective.with_run_length(run.rounds)
    if not objective.needs_references:
        if objective is problem.objective:
            return problem
        return problem.each(lambda split: split.changed(objective=objective))
    group, sites = run.network.process_group, run.network.hosted.tolist()
    name = f"reference-losses-{group.rank}" if group.rank else "reference-losses"
    with group.fail_together():
        identity = identity or run.identity(problem)
        losses = run.phases.finished(name, identity)
        if not losses:
            losses = _found(problem, objective, run, name, identity)
            run.phases.finish(name, identity, losses)
            run.phases.forget(f"{name}-begun*")
    here = {field: dict(zip(sites, rows.T.tolist())) for field, rows in losses.items()}  # by site, one of each split
    everywhere = group.all_gather_json(here) if told else [here]
    fitted = []
    for k, split in enumerate(problem.every_split):
        tables = {
            field: {str(split.sites[int(i)].name): row[k] for part in everywhere for i, row in part[field].items()}
            for field in here
            if getattr(objective, field) is None
        }
        fitted.append(split.changed(objective=dataclasses.replace(objective, **tables)))
    return with_splits(fitted, same_sites=False)


def with_any_references(problem: Prepared, rounds: int, sites: Sequence[str]) -> Prepared:
    """Returns the problem with losses of these sites that mean nothing, for rounds of which no result is used."""
    objective = problem.objective.with_run_length(rounds)
    if objective.needs_references:
        objective = dataclasses.replace(objective, **{field: dict.fromkeys(sites, 1.0) for field in _FIELDS})
    return problem.changed(objective=objective)


def _found(
    problem: Prepared, objective: Objective, run: AloneRun, name: str, identity: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Returns the losses of the hosted sites (splits, nodes), by the field of the objective."""
    judged, sites = problem.each(judged_apart), run.network.hosted.tolist()
    fixed = [_fixed_losses(split, objective, sites, run.seed) for split in judged.every_split]
    losses = {field: torch.tensor([of_split[field] for of_split in fixed], dtype=torch.float64) for field in fixed[0]}
    if objective.needs_local_models:
        every = max(1, run.rounds // LOOKS)
        looks = {*range(every, run.rounds + 1, every), run.rounds}
        local = early_stopped_models(judged, run, looks, FINDING, f"{name}-begun", identity).losses
        reached = losses.get("untrained_losses", local)  # by a site whose model diverges if it trains alone
        losses["local_losses"] = torch.where(local.isfinite(), local, reached)
    if objective.needs_penalties:
        found = [
            validated_penalties(split, sites, run, f"{name}-begun-{k}", identity)
            for k, split in enumerate(problem.every_split)
        ]
        losses["penalties"] = torch.stack(found)
    for field, rows in losses.items():
        for row in rows.tolist():
            for i, loss in zip(sites, row):
                if not math.isfinite(loss):
                    raise BadInput(
                        f"objective.{field} of site {i} ({problem.sites[i].name}) is {loss}; look at this site's data, "
                        "or give a table of losses by site"
                    )
    return losses


def _fixed_losses(problem: Prepared, objective: Objective, sites: list[int], seed: int) -> dict[str, list[float]]:
    """Returns the fields of the objective that need no training: a loss of each site."""
    if not objective.needs_constants:
        return {}
    untrained = [_untrained_loss(problem, i, seed) for i in sites]
    if objective.against != "constant" and isinstance(problem.loss, BoundModelLoss):
        return {"untrained_losses": untrained}
    constants = []
    for i in sites:
        outputs, targets = answered(best_constant(problem, i), problem.sites[i].validation)
        constants.append(float(problem.output_loss(outputs, targets)))
    return {"constant_losses": constants, "untrained_losses": list(map(max, constants, untrained))}


def _untrained_loss(problem: Prepared, i: int, seed: int) -> float:
    """Returns the loss of the initial model on the rows that judge a site."""
    samples = problem.sites[i].validation.some()
    targets = as_floats(samples.targets, torch.float32)
    if isinstance(problem.loss, BoundModelLoss):
        model, row = problem.flat_model.to(torch.device("cpu"), torch.float32), problem.initial_whole_row(seed).float()
        with torch.no_grad():
            return float(problem.loss.of_samples(model, row, as_floats(samples.inputs, torch.float32), targets).mean())
    return float(problem.output_loss(initial_outputs(problem, samples, seed), targets))
