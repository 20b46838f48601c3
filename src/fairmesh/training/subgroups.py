"""What a trained model does for the subgroups inside sites."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairmesh.errors import BadInput
from fairmesh.problems.losses import as_floats
from fairmesh.problems.metrics import measured
from fairmesh.problems.subgroups import Seen, numbered, ratios_of, table_of

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
            have no weights, or if it shares one with others that are small too.
    """

    site: str
    subgroup: str
    rows: int
    metrics: dict[str, float]
    weight: float | None = None


@torch.no_grad()
def outcomes(result: "Result", replica: int) -> list[SubgroupOutcome]:
    """Returns what the common model of a replica does for every subgroup of the sites that are here."""
    problem, made = result.problem, []
    model, row = problem.flat_model.to(torch.device("cpu"), torch.float32), result.row()[replica].cpu().float()
    for i in problem.here:
        site = problem.sites[i]
        samples = getattr(site, result.judged_on)
        if samples.subgroups is None:
            continue
        outputs, weights = model(row, as_floats(samples.inputs, torch.float32)), _weights(result, replica, i)
        for k, name in enumerate(samples.subgroup_names):
            mine = samples.subgroups == k
            if bool(mine.any()):
                found = measured(problem, outputs[mine], samples.targets[mine])
                made.append(SubgroupOutcome(str(site.name), name, int(mine.sum()), found, weights.get(name)))
    if not made:
        raise BadInput("the sites have no subgroups; give each Site (inputs, targets, subgroups)")
    return made


def _weights(result: "Result", replica: int, site: int) -> dict[str, float]:
    """Returns the weights of the subgroups by name, at the node that holds the site."""
    state, problem = result.state.subgroups, result.problem
    if state is None or state.sums.shape[1] != problem.n:
        return {}
    node = result.replicas[replica].placement.index(site)
    names = problem.subgroups_of(site)
    numbers = numbered(problem.sites[site].train, names, f"site {site}")
    shares = torch.bincount(numbers, minlength=state.sums.shape[2]).to(state.sums) / len(numbers)
    known = Seen(state.sums[replica, node], state.counts[replica, node])
    if state.balances is None:
        weights = shares * ratios_of(table_of(known, shares), problem.objective.subgroup_strength)
    else:
        masses = shares * float(problem.n * problem.prior_of_sites[site])
        table: Tensor = table_of(known, masses) + state.balances[replica, node]
        whole = table.chunk(2, dim=-1)[1].clamp(min=0.0)
        weights = whole / whole.sum() * ratios_of(table, problem.objective.subgroup_strength)
    return dict(zip(names, weights.tolist()))
