"""Steps that a run measures before round 0: how curved the loss is at the initial model, on the first batches."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairmesh.algorithms.base import AtStart
from fairmesh.algorithms.schedules import Limited, Measured
from fairmesh.comparisons.phases import Phases
from fairmesh.config.tables import to_table
from fairmesh.networks.base import Network
from fairmesh.problems.oracle import Oracle
from fairmesh.training.agreement import in_a_file
from fairmesh.training.plan import Plan

_LOOKS = 12  # batches, and steps of the power iteration
_COUNTED = 6  # of the last of these, the largest curvature counts: small batches differ
_NUDGE = 1e-2  # length of the step between two gradients, in multiples of the model's norm or of 1
_NAME = "measured-steps"


def with_measured_steps(plan: Plan, network: Network, phases: Phases) -> Plan:
    """Returns the plan with the steps that its algorithms leave to the run. They are measured once in a run: a resumed
    run reads what it measured.

    Args:
        plan: The plan.
        network: The network of the run, whose processes all use the same numbers.
        phases: Where the measurements are kept.
    """
    with network.process_group.fail_together():
        training = plan.training(network)
    if training.oracle.worker is not None:  # a trainer's updates have no curvature
        rows = torch.ones(len(plan.replicas), network.n, 3, dtype=torch.float64)
    else:
        identity = training.identity() if phases.folder else {}
        rows = phases.finished(_NAME, identity).get("rows")
        if rows is None:
            rows = network.gather(at_start(training.oracle, network)).cpu()
            if network.process_group.is_leader:
                phases.finish(_NAME, identity, {"rows": rows})
    prior = training.oracle.prior.expand(len(plan.replicas), -1, -1).flatten().double().cpu()
    losses, slopes, curvatures = rows.flatten(end_dim=1).unbind(dim=-1)
    start = AtStart(network.n, prior, losses, slopes, curvatures, bounded=plan.problem.task != "numbers")
    completed = {id(replica.algorithm): replica.algorithm.measured(start) for replica in plan.replicas}
    replicas = [replace(replica, algorithm=completed[id(replica.algorithm)]) for replica in plan.replicas]
    return replace(plan, replicas=replicas, measured=plan.unmeasured)


def in_words(plan: Plan) -> str:
    """Returns which numbers were measured before round 0."""
    if not measured_table(plan):
        return f"measured before round 0: {' and '.join(plan.measured)} of every algorithm of the sweep"
    algorithm = plan.replicas[0].algorithm
    numbers = [f"{name} = {_told(getattr(algorithm, name))}" for name in plan.measured]
    return f"measured before round 0: {', '.join(numbers)}"


def _told(value: Any) -> str:
    """Returns a number as an experiment file can have it: with these settings a run is the same."""
    return in_a_file(value) if isinstance(value, Limited | Measured) else f"{value:g}"


def measured_table(plan: Plan) -> dict[str, Any]:
    """Returns the numbers that were measured before round 0, as a table that an experiment file can have. Of a sweep
    whose algorithms have different ones it is empty: its variants have them."""
    first, *others = {id(replica.algorithm): replica.algorithm for replica in plan.replicas}.values()
    table = {name: to_table(first)[name] for name in plan.measured}
    return table if all(to_table(other)[name] == table[name] for other in others for name in table) else {}


def at_start(oracle: Oracle, network: Network) -> Tensor:
    """Returns the loss, the norm of the gradient and the largest curvature of every hosted node, at the initial model:
    (replicas, nodes, 3), float64.

    The curvature is found by a power iteration on differences of gradients, each on another batch."""
    models = torch.cat([oracle.initial_models(), oracle.initial_own()], dim=-1)
    dim = oracle.model.dim
    length = _NUDGE * models[..., :dim].norm(dim=-1, keepdim=True).clamp(min=1.0)
    signs = torch.randint(2, (dim,), generator=torch.Generator().manual_seed(0)).to(models) * 2 - 1
    direction: Tensor | None = None
    losses, slopes, curvatures = [], [], []
    for k in range(_LOOKS):
        oracle.source.round_number = k
        index = torch.tensor(k, device=models.device)
        loss, gradients = oracle.losses_and_gradients(models, index, 0)
        gradients = gradients[..., :dim].clone()
        losses.append(loss)
        slopes.append(gradients.norm(dim=-1, keepdim=True))
        if direction is None:
            direction = _unit(_unit(gradients) + signs / dim**0.5)
        moved = models.clone()
        moved[..., :dim] += length * direction
        change = (oracle.losses_and_gradients(moved, index, 0)[1][..., :dim] - gradients) / length
        curvatures.append(change.norm(dim=-1, keepdim=True))
        direction = torch.where(curvatures[-1] > 0, _unit(change), direction)
    oracle.source.round_number = 0
    largest = torch.stack(curvatures[-_COUNTED:]).amax(dim=0)
    numbers = [torch.stack(losses).mean(dim=0), torch.stack(slopes).mean(dim=0), largest]
    return torch.cat(numbers, dim=-1).double()


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-30)
