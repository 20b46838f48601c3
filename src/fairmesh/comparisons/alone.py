"""The model that a site trains alone, on its own rows only.

Several questions need one, and each needs another model, since the rows that must not be seen in training differ:

- What could the site reach on the rows that judge it, for an objective with `against` or `discount_noise`? The model
  has seen none of these rows, a third of the training rows by default (`reference_losses.py`).
- Is the common model better for the site than its own? In a simulation (`reference_models.py`) and between
  organisations (`mesh/node/versus_local.py`) it is trained on all rows, with penalties on its size that five folds of
  the rows support (`regularised`). In a mesh, a large model, or one whose folds cannot be trained at once
  (`takes_folds`), stops early by a fifth of the rows instead.
- How small should models be, for an objective with `validated_decay`? The folds are those of the training rows alone
  (`penalties.py`).

Each is trained once in a run, by `Phases`, which continues it after a restart.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.local import Local
from fairmesh.algorithms.schedules import with_run_length
from fairmesh.comparisons.phases import Phases
from fairmesh.data.reserve import FEWEST_ROWS
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.networks.base import Network
from fairmesh.personalization.cross_fit import CrossFit, Fitted, can_judge
from fairmesh.problems.evaluator import Evaluator
from fairmesh.problems.objective import Objective, held_out_rows
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.row_loss import BoundModelLoss
from fairmesh.topology.graphs import Topology
from fairmesh.training.loop import Training, TrainingState
from fairmesh.training.options import Options
from fairmesh.training.replicas import Replica

LOOKS = 20  # how often a model is measured; the best time counts, as with early stopping
FOLDS = 5


@dataclasses.dataclass(frozen=True, eq=False)
class AloneRun:
    """How the hosted sites of a run train alone.

    Args:
        topology: The run's topology, over which nothing is sent here.
        rounds: How many rounds.
        seed: The seed of start and batches.
        options: How the run is carried out.
        network: The network of the hosted nodes.
        phases: What carries out the training, and keeps its outcome. Default: Phases(), which keeps nothing.
    """

    topology: Topology
    rounds: int
    seed: int
    options: Options
    network: Network
    phases: Phases = dataclasses.field(default_factory=Phases)

    def identity(self, problem: Prepared) -> dict[str, Any]:
        """Returns all that determines the models of the hosted sites, by name."""
        nodes = self.network.hosted.tolist()
        own = {"rounds": self.rounds, "seed": self.seed, "nodes": nodes, "options": self.options.identity()}
        return {"problem": problem.identity(), **own}


class EarlyStopped(NamedTuple):
    """The training of sites alone after some rounds, with each site's best model so far."""

    training: TrainingState
    losses: Tensor  # the least loss so far of each split and site (splits, nodes)
    models: Tensor  # those that had it, each with its own part (splits, nodes, dim + own_dim)


def early_stopped_models(
    problem: Prepared, run: AloneRun, looks: Collection[int], what: str, name: str, identity: Mapping[str, Any]
) -> EarlyStopped:
    """Trains every hosted site alone, and looks at its loss on its validation rows after the rounds `looks`.

    Args:
        problem: The problem, of which each site has validation rows.
        run: How they train.
        looks: After which rounds.
        what: What is done, in words.
        name: The name of the work.
        identity: All that determines its outcome.
    """
    splits, local = range(len(problem.every_split)), with_run_length(Local(), run.rounds)
    replicas = [Replica(run.seed, tuple(range(problem.n)), local, k) for k in splits]
    training = Training(problem, run.topology, replicas, run.options, network=run.network)
    evaluator = Evaluator(problem, "validation", training.device, training.dtype, training.data_home, splits=splits)
    nodes = run.network.hosted.cpu()
    start = training.initial()
    unmeasured = torch.full((len(replicas), len(nodes)), torch.inf, dtype=torch.float64)

    def onwards(progress: EarlyStopped, done: int) -> Iterator[tuple[int, EarlyStopped]]:
        for now, state in training.states(progress.training, done, run.rounds):
            progress = progress._replace(training=state)
            if now in looks and now > done:
                models = training.whole_models(state)
                of_sites = evaluator.of_own_models(models, nodes.expand(len(replicas), -1))["loss"]
                losses = of_sites.nan_to_num(nan=torch.inf)
                better = (losses < progress.losses).unsqueeze(-1).to(models.device)
                best = torch.where(better, models, progress.models)
                progress = EarlyStopped(state, torch.minimum(progress.losses, losses), best)
            yield now, progress

    first = EarlyStopped(start, unmeasured, training.whole_models(start))
    return run.phases.carried_out(what, name, identity, run.rounds, first, onwards)


def whole_model(problem: Prepared) -> Prepared:
    """Returns the problem of sites that train alone: all that is trained is one row, without parts that are shared."""
    return problem.changed(parts=dataclasses.replace(problem.parts, local=()), objective=Objective())


def takes_folds(problem: Prepared, i: int) -> bool:
    """Returns whether many models of a site can be trained at once, each on some of its rows: they are in memory, and
    neither a loss that calls the model, nor BatchNorm statistics, nor code of the site's own is in the way."""
    flat, rows = problem.flat_model, [problem.sites[i].train, problem.sites[i].validation, problem.sites[i].reserved]
    plain = problem.trainer is None and problem.structured is None and not isinstance(problem.loss, BoundModelLoss)
    return plain and flat.own_dim == flat.local_dim and not any(samples and samples.stream for samples in rows)


def regularised(fit: CrossFit, starts: Tensor, rounds: int) -> Fitted:
    """Returns the models of sites alone, from their starts (sites, dim), by the steps of `Local()`."""
    return fit.regularised(fit.same(starts), rounds, first_step())


def first_step() -> float:
    """Returns the length of the first step of a site alone."""
    return Local().primal_step.start  # type: ignore[union-attr]


def with_enough_rows(problem: Prepared, i: int) -> Site:
    """Returns a site, with its rows repeated if they or their units are too few to hold any out. Held-out rows are then
    known to the models, so nothing speaks for a penalty."""
    site = problem.sites[i]
    if can_judge(problem, i):
        return site
    times = max(2, math.ceil(FEWEST_ROWS / len(site.train)))
    again = site.train.take(torch.arange(times * len(site.train)) % len(site.train))
    return dataclasses.replace(site, train=dataclasses.replace(again, units=None))


def judged_apart(problem: Prepared) -> Prepared:
    """Returns the problem with the rows that judge each site as its validation set, and without them in training."""
    if problem.objective.judged_on == "validation":
        return problem.changed(objective=Objective())
    sites = [_split(site, i, problem.objective) for i, site in enumerate(problem.sites)]
    return problem.changed(sites=sites, objective=Objective())


def _split(site: Site, i: int, objective: Objective) -> Site:
    samples = site.train
    if not samples.here:
        count = objective.held_out_of(len(samples))
        train, judging = (Samples.elsewhere(part, samples) for part in (len(samples) - count, count))
        return dataclasses.replace(site, train=train, validation=judging if count else train)
    held = held_out_rows(samples, i, objective)
    if not bool(held.any()):  # too small to hold anything out, or judged on training rows
        return dataclasses.replace(site, validation=samples)
    train, judging = (samples.take(rows.nonzero().flatten()) for rows in (~held, held))
    return dataclasses.replace(site, train=train, validation=judging)
