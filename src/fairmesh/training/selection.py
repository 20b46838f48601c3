"""What a run without an algorithm decides before its own rounds, by models that were trained without a fold of the
rows: which weights the model has that it hands out. The same models judge later what each site should use."""

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairmesh.comparisons.handed_out import HandedOut, decided, near_prior
from fairmesh.comparisons.without_folds import folds_apart, plan_without_folds
from fairmesh.config.tables import to_table
from fairmesh.errors import BadInput, Diverged
from fairmesh.personalization.base import Personalization
from fairmesh.training.aside import trained_aside
from fairmesh.training.execution import Ready, Surroundings, with_network
from fairmesh.training.plan import Plan, with_fixed_weights
from fairmesh.training.result import Result

_FOLDS = 5


class Selection(NamedTuple):
    """What was decided before the rounds of a run."""

    handed_out: HandedOut
    plan: Plan  # of the model that is handed out
    models: Tensor  # of each replica without each of the first folds (replicas, folds, dim)
    compare: bool  # whether the run is compared with fixed weights


def selected(ready: Ready, around: Surroundings) -> Selection:
    """Returns what is decided for a run. What was decided before it was interrupted is read, and not trained again."""
    plan, phases = ready.plan, around.phases()
    if plan.problem.n == 1:
        found, nothing = HandedOut("fixed", "there is one site only"), torch.zeros(len(plan.replicas), 0, 0)
        return Selection(found, with_fixed_weights(plan), nothing, compare=False)
    identity = {
        "problem": plan.problem.identity(),
        "algorithms": [to_table(replica.algorithm) for replica in plan.replicas],
        "replicas": [[replica.seed, replica.split, list(replica.placement)] for replica in plan.replicas],
        "topology": to_table(plan.topology),
        "rounds": plan.rounds,
        "options": plan.options.identity(),
    }
    name = f"aside-{plan.process_group.rank}-decision"
    kept = phases.finished(name, identity)
    if all(plan.process_group.all_gather_json(bool(kept))):  # all train, or none does
        found = HandedOut(**_restored(json.loads(bytes(kept["decision"].tolist()))))
        models = kept["models"]
    else:
        found, models = _found(ready, around)
        decision = torch.tensor(list(json.dumps(found.as_json()).encode()), dtype=torch.uint8)
        phases.finish(name, identity, {"decision": decision, "models": models})
    chosen = plan if found.weights == "robust" else with_fixed_weights(plan)
    compare = bool(plan.options.compare_weights) and found.weights == "robust" and found.compared
    return Selection(found, chosen, models, compare)


def _restored(table: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


def _found(ready: Ready, around: Surroundings) -> tuple[HandedOut, Tensor]:
    """Trains the models of the folds, and returns what they say, with the models of what is handed out."""
    held = _without_folds(ready)
    apart = len(held.plan.replicas) // len(ready.plan.replicas)
    if around.announce:
        share = f"{apart} times without a fifth of the rows" if apart > 1 else "without a fifth of the rows"
        around.announce(f"first models are trained {share}, to see by these rows whether robust weights help")
    try:
        robust = trained_aside(held, around, "robust", "trying robust weights on held-out rows")
        robust = None if robust.diverged else robust  # marked instead of raised, if the options say so
    except Diverged:
        robust = None
    if robust and near_prior(robust):
        found = HandedOut("fixed", "robust ones stay within noise of the prior, and so make no difference")
        return found, _models_of(robust, apart)
    if robust and robust.judged_on != "test":
        found = HandedOut("fixed", "no site has rows to hold out, so nothing speaks for robust weights")
        return found, _models_of(robust, apart)
    held = held._replace(plan=with_fixed_weights(held.plan))
    fixed = trained_aside(held, around, "fixed", "trying fixed weights on held-out rows")
    if robust is None:
        return HandedOut("fixed", "with robust weights the training diverged"), _models_of(fixed, apart)
    if fixed.diverged:
        return HandedOut("robust", "with fixed weights the training diverged"), _models_of(robust, apart)
    found = decided(robust.outcomes(), fixed.outcomes())
    return found, _models_of(robust if found.weights == "robust" else fixed, apart)


def _without_folds(ready: Ready) -> Ready:
    """Returns the plan of the models of all folds, or of one if they do not fit into memory."""
    plan = ready.plan
    folds = plan.personalization.folds if isinstance(plan.personalization, Personalization) else _FOLDS
    apart = min(plan.process_group.all_gather_json(folds_apart(plan.problem, folds)))
    try:
        return with_network(plan_without_folds(plan, folds, apart))
    except BadInput:
        if apart == 1:
            raise
        return with_network(plan_without_folds(plan, folds, 1))


def _models_of(result: Result, apart: int) -> Tensor:
    return result.row().detach().cpu().unflatten(0, (-1, apart))
