"""Whether an algorithm can train on a problem."""

import dataclasses

from fairmesh.algorithms.base import Algorithm
from fairmesh.algorithms.schedules import Limited, Measured, with_run_length
from fairmesh.errors import BadInput
from fairmesh.problems.objective import Objective
from fairmesh.problems.prepared import Prepared


def check_fits(algorithm: Algorithm, problem: Prepared) -> None:
    """Raises BadInput if the algorithm cannot train on the problem."""
    algorithm.check(problem.prior_of_sites, problem.flat_model.dim)
    optimizer = algorithm.local_optimizer()
    if optimizer is not None:
        optimizer.check(problem.flat_model.layout)
    check_objective(algorithm, problem.objective)
    if problem.trainer is not None:
        check_updates(algorithm, problem.objective)


def trains_alone(algorithm: Algorithm) -> bool:
    """Returns whether every node trains alone, so that each site is judged by its own node's model."""
    return not algorithm.sends and not algorithm.needs_server


def check_updates(algorithm: Algorithm, objective: Objective) -> None:
    """Raises BadInput if the algorithm cannot work with the updates of a training function."""
    name, steps = type(algorithm).__name__, getattr(algorithm, "local_steps", 1)
    if steps > 1 and algorithm.oracle_calls() <= steps:
        raise BadInput(
            f"local_steps = {steps}: with a trainer, {name} takes one update per round; set local_steps = 1 and let "
            "the training function take as many steps as it likes"
        )
    if algorithm.oracle_calls() > 1 or (algorithm.needs_server and not algorithm.sends):
        raise BadInput(
            f"{name} does not work with the updates of a trainer; use tracked-ad-gda, ad-gda, choco-sgd, dsgd, or with "
            "a server fedavg (local_steps = 1) or afl"
        )
    if algorithm.local_optimizer() is not None:
        raise BadInput(
            f"algorithm.optimizer is for gradients, but {name} gets the updates of a trainer; leave it out, and use "
            "any optimizer inside the training function"
        )
    if objective.needs_local_models or objective.needs_penalties:
        raise BadInput(
            "objective: sites are compared with models of their own, for which the trainer would have to train every "
            "site alone first; give objective.local_losses as a table, or leave out discount_noise, against and "
            "validated_decay"
        )


def on_updates(algorithm: Algorithm, problem: Prepared, rounds: int) -> str | None:
    """Returns that an algorithm has its default step, which is for gradients, if a training function gives updates."""
    if problem.trainer is None or not dataclasses.is_dataclass(algorithm):
        return None
    step = algorithm.steps().get("primal_step")
    default = {field.name: field.default_factory for field in dataclasses.fields(algorithm)}.get("primal_step")
    if not callable(default) or (
        step != with_run_length(default(), rounds) and not isinstance(step, Measured | Limited)
    ):
        return None
    return (
        f"{type(algorithm).__name__} has its default primal_step = {step}, which is for gradients, but a trainer gives "
        'updates. "Your own training code as a node", in the documentation, says which steps apply them whole; without '
        "an algorithm, fairmesh takes such steps"
    )


def check_objective(algorithm: Algorithm, objective: Objective) -> None:
    """Raises BadInput if the algorithm's weights cannot follow the objective."""
    name = type(algorithm).__name__
    if objective.discount_noise and not algorithm.discounts_noise():
        raise BadInput(
            "objective.discount_noise = true needs an algorithm whose nodes know the mean loss, such as tracked-ad-gda "
            f"with its default weighting; {name} as it is set does not. An experiment without an algorithm has this "
            f"objective: for {name}, name the algorithm, as in fm.Experiment(data, algorithm={name}()).problem(), or "
            "give the experiment or the problem objective=fm.Objective()"
        )
    if objective.subgroups and algorithm.needs_server:
        raise BadInput(f"objective.subgroups needs an algorithm without a server, such as tracked-ad-gda; got {name}")
    if objective.subgroups == "across" and not algorithm.keeps_prior_weights():
        raise BadInput(
            'objective.subgroups = "across" weighs subgroups instead of sites, so it needs an algorithm in which sites '
            f'keep the weights of their prior: tracked-ad-gda with the weighting "prior-weights"; got {name}'
        )
