"""What a trained model does for the subgroups inside sites."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fairmesh.algorithms.companions.subgroups import Subgroups, SubgroupState, weights_of
from fairmesh.errors import BadInput
from fairmesh.numerics import trees
from fairmesh.problems.evaluator import measured
from fairmesh.problems.row_loss import answering, as_floats

if TYPE_CHECKING:
    from fairmesh.training.result import Result


@dataclass(frozen=True)
class SubgroupOutcome:
    """The common model's outcome for one subgroup of one site.

    Args:
        site: The site's name.
        subgroup: The subgroup's name.
        rows: The number of samples that judge it.
        metrics: Each metric on these samples.
        weight: The weight of the subgroup among those of its site, or among all if they span sites; None if subgroups
            have no weights, if it shares one with others that are small too, or on a cluster.
    """

    site: str
    subgroup: str
    rows: int
    metrics: dict[str, float]
    weight: float | None = None


def has_subgroups(result: "Result") -> bool:
    """Returns whether all sites are here, and some of the samples that judge them have subgroups."""
    problem = result.problem
    judges = [getattr(problem.sites[i], result.judged_on) for i in problem.here]
    return len(problem.here) == problem.n and any(one is not None and one.subgroups is not None for one in judges)


@torch.no_grad()
def outcomes(result: "Result", replica: int) -> list[SubgroupOutcome]:
    """Returns what the common model of a replica does for every subgroup of the sites that are here."""
    problem, made = result.problem.of_split(result.replicas[replica].split), []
    model, shared = problem.flat_model.to(torch.device("cpu"), torch.float32), not problem.flat_model.own_dim
    for i in problem.here:
        site = problem.sites[i]
        samples = getattr(site, result.judged_on)
        if samples.subgroups is None:
            continue
        row = result.whole_row(replica, site=None if shared else str(site.name)).cpu().float()
        inputs, targets = (as_floats(part, torch.float32) for part in (samples.inputs, samples.targets))
        found, each = answering(model, problem.loss, at_once=1)(row.unsqueeze(0), inputs, targets)
        outputs, losses, weights = found[0], each[0], _weights(result, replica, i)
        for k, name in enumerate(samples.subgroup_names):
            mine = samples.subgroups == k
            if bool(mine.any()):
                found = measured(problem, outputs[mine], trees.at(targets, mine), losses[mine])
                made.append(SubgroupOutcome(str(site.name), name, int(mine.sum()), found, weights.get(name)))
    if not made:
        raise BadInput(
            f"the sites' {result.judged_on} samples have no subgroups; give each Site (inputs, targets, subgroups)"
        )
    return made


def _weights(result: "Result", replica: int, site: int) -> dict[str, float]:
    """Returns the weights of the subgroups by name, at the node that holds the site."""
    state, problem = getattr(result.state.companions, Subgroups.name, None), result.problem
    if state is None or state.sums.shape[1] != problem.n:
        return {}
    node = result.replicas[replica].placement.index(site)
    names = problem.subgroups_of(site)
    numbers = problem.subgroup_numbers(site)
    shares = torch.bincount(numbers, minlength=state.sums.shape[2]).to(state.sums) / len(numbers)
    balances = None if state.balances is None else state.balances[replica, node]
    of_node = SubgroupState(state.sums[replica, node], state.counts[replica, node], balances)
    masses = shares if state.balances is None else shares * float(problem.n * problem.prior_of_sites[site])
    return dict(zip(names, weights_of(of_node, masses, problem.objective.subgroup_strength).tolist()))
