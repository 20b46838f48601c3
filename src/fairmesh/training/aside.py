"""Runs next to the main one, which they are compared with or decide on. They write no folder of their own."""

import json

import torch

from fairmesh.comparisons.phases import Phases
from fairmesh.errors import Interrupted
from fairmesh.storage.state_tree import checked_like, flatten_state, unflatten_state
from fairmesh.training.execution import Execution, Ready, Surroundings, execution
from fairmesh.training.finish import finish, only_models
from fairmesh.training.observers import as_observers
from fairmesh.training.result import Result

_NAME, _TOLD = "aside", "told"


def trained_aside(ready: Ready, around: Surroundings, name: str, what: str) -> Result:
    """Returns the result of a run next to the main one, which says how far it is. If the main run was interrupted after
    this one had ended, its rounds are not done again.

    Args:
        ready: The plan.
        around: The surroundings of the main run.
        name: The name of the run among those of the main one.
        what: What is done, in words.
    """
    notices = around.notices()
    watching = as_observers([lambda done, state: notices(what, done, ready.plan.rounds)])
    try:
        with execution(ready, Surroundings(around.stop, announce=lambda text: None), observers=watching) as run:
            _to_the_end(run, around.phases(), f"{_NAME}-{ready.plan.process_group.rank}-{name}")
            return finish(run)
    except Interrupted as error:  # which speaks of a checkpoint, but only what is finished is kept
        then = "; what was finished before is kept, and resuming begins with this" if around.folder else ""
        raise Interrupted(f"stopped while {what}{then}") from error


def forget_asides(phases: Phases) -> None:
    """Removes what was kept in case that the main run is interrupted."""
    phases.forget(f"{_NAME}-*")


def _to_the_end(run: Execution, phases: Phases, name: str) -> None:
    """Does the rounds of a run, or reads where they ended."""
    observed, identity = run.observed, {"run": run.training.identity(), "rounds": run.plan.rounds}
    kept = phases.finished(name, identity)
    if all(run.process_group.all_gather_json(bool(kept))):  # all train, or none does
        told = json.loads(bytes(kept.pop(_TOLD).tolist()))
        like = only_models(observed.state)
        observed.state = unflatten_state(like, checked_like(like, kept))
        observed.round, observed.records, observed.diverged = told["round"], told["records"], told["diverged"]
        return
    run.to_the_end()
    told = {"round": observed.round, "records": observed.records, "diverged": observed.diverged}
    text = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)
    phases.finish(name, identity, flatten_state(only_models(observed.state)) | {_TOLD: text})
