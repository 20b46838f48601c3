"""Steps that a run measures before round 0: how curved the loss is at the initial model, on the first batches."""

from dataclasses import replace

import torch
from torch import Tensor

from fairmesh.algorithms.base import Algorithm, AtStart
from fairmesh.comparisons.phases import Phases
from fairmesh.networks.base import Network
from fairmesh.problems.oracle import Oracle
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
    if not any(replica.algorithm.unmeasured() for replica in plan.replicas):
        return plan
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
    priors = training.oracle.prior.expand(len(plan.replicas), -1, -1).squeeze(1).double().cpu()
    replicas = [
        replace(replica, algorithm=_completed(replica.algorithm, AtStart(prior, *of_nodes.unbind(dim=-1))))
        for replica, prior, of_nodes in zip(plan.replicas, priors, rows)
    ]
    return replace(plan, replicas=replicas)


def _completed(algorithm: Algorithm, start: AtStart) -> Algorithm:
    return algorithm.measured(start) if algorithm.unmeasured() else algorithm


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
