"""The losses that sites are compared with: what each reaches alone, or with a constant output."""

import dataclasses

import torch
from torch import Tensor

from fairmesh.algorithms.local import Local
from fairmesh.algorithms.schedules import with_run_length
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.errors import BadInput
from fairmesh.networks.base import Network
from fairmesh.problems.losses import as_floats
from fairmesh.problems.metrics import Evaluator
from fairmesh.problems.objective import Objective, held_out_last
from fairmesh.problems.problem import Problem
from fairmesh.topology.graphs import Topology
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import Replica

_LOOKS = 20  # times that local models are measured; the best time counts, as with early stopping


def with_references(
    problem: Problem, topology: Topology, rounds: int, seed: int, options: Options, network: Network
) -> Problem:
    """Returns the problem with its objective fitted to a run: its length, and a reference loss for every site.

    Each process finds the references of the sites that it hosts, and all processes learn all of them."""
    objective = problem.objective.with_run_length(rounds) if problem.objective != Objective() else problem.objective
    if isinstance(objective.against, str):
        if objective.judged_on == "training":
            raise BadInput(
                f'objective.against = "{objective.against}" needs judged_on = "held-out" or "validation": on the rows '
                "that it was trained on, a local model has almost no loss"
            )
        with network.process_group.fail_together():
            judged = judged_apart(problem)
            if objective.against == "local":
                found = _local_losses(judged, topology, rounds, seed, options, network)
            else:
                found = {i: _constant_loss(judged, i) for i in judged.here}
        gathered = network.process_group.all_gather_json({str(i): value for i, value in found.items()})
        known = {int(i): value for part in gathered for i, value in part.items()}
        names = [site.name or "" for site in problem.sites]
        objective = dataclasses.replace(objective, against={name: known[i] for i, name in enumerate(names)})
    if objective is problem.objective:
        return problem
    return dataclasses.replace(problem, objective=objective)


def judged_apart(problem: Problem) -> Problem:
    """Returns the problem with the rows that judge each site as its validation set, and without them in training."""
    if problem.objective.judged_on == "validation":
        return dataclasses.replace(problem, objective=Objective())
    sites = [_split(site, i, problem.objective) for i, site in enumerate(problem.sites)]
    return dataclasses.replace(problem, sites=sites, objective=Objective())


def _split(site: Site, i: int, objective: Objective) -> Site:
    samples, count = site.train, objective.held_out_of(len(site.train))
    if not count:  # too small to hold anything out
        return dataclasses.replace(site, validation=samples)
    parts = len(samples) - count, count
    if not samples.here:
        train, judging = (Samples.elsewhere(part, samples) for part in parts)
    else:
        order = held_out_last(samples, i, count)
        train, judging = (Samples(samples.inputs[rows], samples.targets[rows]) for rows in order.split(list(parts)))
    return dataclasses.replace(site, train=train, validation=judging)


def _local_losses(
    problem: Problem, topology: Topology, rounds: int, seed: int, options: Options, network: Network
) -> dict[int, float]:
    """Returns the least loss, over the run, of each hosted site's own model on the rows that judge the site."""
    replica = Replica(seed, tuple(range(problem.n)), with_run_length(Local(), rounds))
    training = Training(problem, topology, [replica], options, network=network)
    judge = Evaluator(problem, "validation", training.device, training.dtype, training.data_home)
    nodes = network.hosted.cpu()
    every, best = max(1, rounds // _LOOKS), torch.full((len(nodes),), torch.inf, dtype=torch.float64)
    for done, state in training.states(training.initial(), 0, rounds):
        if done and (done % every == 0 or done == rounds):
            losses = judge.of_own_models(training.view.models(state.algorithm), nodes.unsqueeze(0))["loss"][0]
            best = torch.minimum(best, losses.nan_to_num(nan=torch.inf))
    return _finite(dict(zip(nodes.tolist(), best.tolist())), problem)


def _constant_loss(problem: Problem, i: int) -> float:
    """Returns the loss of the output that is best for all training rows of a site, on the rows that judge the site."""
    site = problem.sites[i]
    model, row = problem.flat_model.to(torch.device("cpu"), torch.float32), problem.initial_row(0).float()
    with torch.no_grad():
        output = model(row, as_floats(site.train.inputs[:1], torch.float32)) * 0.0
    constant = output.detach().clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([constant], max_iter=100, line_search_fn="strong_wolfe")

    def loss_of(samples: Samples) -> Tensor:
        outputs = constant.expand(len(samples), *constant.shape[1:])
        return problem.loss(outputs, as_floats(samples.targets, torch.float32))

    def closure() -> Tensor:
        optimizer.zero_grad()
        # The penalty keeps the output of a class that the site does not have finite.
        value = loss_of(site.train) + constant.square().sum() / len(site.train)
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    with torch.no_grad():
        return _finite({i: float(loss_of(site.validation))}, problem)[i]


def _finite(found: dict[int, float], problem: Problem) -> dict[int, float]:
    for i, value in found.items():
        if not torch.isfinite(torch.tensor(value)):
            raise BadInput(
                f"the reference loss of site {i} ({problem.sites[i].name}) is {value}; give objective.against a table "
                "of losses by site, or look at this site's data"
            )
    return found
