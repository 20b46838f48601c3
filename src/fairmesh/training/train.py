"""Runs training from start to end: measured, checkpointed, and stopped on request or on divergence."""

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fairmesh.algorithms.base import Algorithm
from fairmesh.algorithms.fitting import on_updates
from fairmesh.config.tables import to_table
from fairmesh.networks.memory import SingleProcess
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.personalization.base import Personalization
from fairmesh.personalization.personalize import NOT_CHOSEN, too_large_to_choose
from fairmesh.problems import notes
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.problem import Problem
from fairmesh.storage.run_folder import RunFolder
from fairmesh.topology.graphs import Topology
from fairmesh.training.agreement import on_too_few_rounds
from fairmesh.training.aside import forget_asides, trained_aside
from fairmesh.training.defaults import ROUNDS
from fairmesh.training.execution import (
    Announce,
    Ready,
    Surroundings,
    execution,
    surrounded,
    with_network,
    with_reference_losses,
    with_steps,
)
from fairmesh.training.finish import finish, on_host
from fairmesh.training.graph_choice import topology_to_resume
from fairmesh.training.loop import TrainingState
from fairmesh.training.measured_steps import in_words as measured_in_words
from fairmesh.training.meter import undefined_primary
from fairmesh.training.observers import Observer, as_observers, stop_signals
from fairmesh.training.options import home_of_data, with_threads
from fairmesh.training.plan import Plan, with_fixed_weights
from fairmesh.training.private import forget_secret, kept_in, on_privacy, refuse_observers
from fairmesh.training.replicas import Placements
from fairmesh.training.result import Result
from fairmesh.training.selection import selected


def train(
    problem: Problem | Prepared | Sequence[Problem | Prepared],
    topology: Topology | None = None,
    algorithm: Algorithm | Sequence[Algorithm] | None = None,
    rounds: int = ROUNDS,
    *,
    seeds: Sequence[int] = (0,),
    placements: Placements = None,
    personalization: Personalization | None = None,
    out: Any = None,
    resume: bool = False,
    settings: dict[str, Any] | None = None,
    observers: Sequence[Observer | Callable[[int, TrainingState], Any]] = (),
    announce: Callable[[str], None] | None = None,
    handle_signals: bool = False,
    process_group: ProcessGroup | None = None,
    **options: Any,
) -> Result:
    """Trains a model on the data of all sites.

    Every algorithm is trained on every split of the data, with every placement and every seed. These replicas run as
    one batch. Each gives the same result as if it ran alone, with the steps that `Result.measured` names: steps that
    the run measures before round 0 are the same in all replicas.

    Args:
        problem: The model, the loss and the sites' data; or a list of problems that differ only in which rows of a site
            are for training and which for testing, so that results show how much depends on the split.
        topology: Who talks to whom. None for a ring of up to 12 nodes and, above that, the sparsest graph for which the
            rounds suffice (docs/concepts/gossip.md). Default: None.
        algorithm: The algorithm, or several that differ only in their numbers. None for the one that does best on many
            kinds of sites (docs/concepts/weights.md): `TrackedADGDA()`, weights that follow held-out rows unless
            the problem has an objective of its own, `choose_weights` and `compare_weights`. With a trainer,
            `TrackedADGDA` with steps for its updates (docs/howto/own-training-code.md), and nothing else. Default:
            None.
        rounds: Rounds to train, >= 1. Every node sends at most one message per neighbour and round. Default: 600.
        seeds: Seeds of the replicas, whole numbers >= 0. Default: (0,).
        placements: Which site each node holds: None for site i at node i; a number of random placements; a list of
            permutations; or "by-seed" for one random placement per seed. Default: None.
        personalization: How sites get models of their own after the last round, such as
            `fm.personalization.Mixture()`. Every site then reserves a share of its training rows, which the common
            model is not trained on. None for `Choice()` if the algorithm was left out, by models without folds of the
            rows instead of reserved ones; else for only the common model. Default: None.
        out: The folder to write: metrics, summary, models and checkpoint. None to write nothing. Default: None.
        resume: Whether to continue from the checkpoint in `out`. Default: False.
        settings: The settings to write into `out`; None for those of the topology and the algorithm. Default: None.
        observers: Called after every round: `fm.observers.Observer` objects, or functions of the number of rounds done
            and the state. Default: ().
        announce: Called with sentences about the model and the memory that the run takes, before the first round, and
            with one about the personalization, after the last. None to log only what is special, once per process: what
            BatchNorm and parts of the model do, models that are evaluated one after another, streamed data. The logger
            is `logging.getLogger("fairmesh")`, which writes to stderr by default. Default: None.
        handle_signals: Whether Ctrl-C and SIGTERM stop the run after a whole round, with a checkpoint. Otherwise the
            process's signal handlers are left alone. Default: False.
        process_group: The processes that train together, if this is one of several, each with some of the nodes and
            their data; all call `train` and all get the result. Default: None.
        **options: The fields of `fm.Options`, such as `measure_every=10`.

    Returns:
        The measurements and models of all replicas.

    Raises:
        BadInput: A setting or a site's data cannot be used.
        Diverged: The models are not finite or have exploded.
        CheckpointError: The checkpoint is damaged or belongs to another experiment.
        Interrupted: Ctrl-C or SIGTERM arrived and `handle_signals` is True; the checkpoint is kept.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> labels = torch.arange(20) % 2
        >>> sites = [fm.Site((torch.randn(20, 3) + labels[:, None], labels)) for _ in range(4)]
        >>> problem = fm.Problem(torch.nn.Linear(3, 2), sites, test=sites[0].train)
        >>> result = fm.train(problem, fm.Ring(), fm.TrackedADGDA(), rounds=20, seeds=range(3), measure_every=10)
        >>> len(result.values("worst"))
        3
    """
    process_group = process_group or SingleProcess()
    with process_group.fail_together():
        watching = as_observers(observers)
        topology = topology_to_resume(out, resume) if topology is None else topology
        plan = Plan.of(
            problem, topology, algorithm, rounds, seeds=seeds, placements=placements, personalization=personalization,
            process_group=process_group, options=options,
        )  # fmt: skip
    return train_plan(
        plan, out=out, resume=resume, settings=settings or {}, observers=watching, announce=announce,
        handle_signals=handle_signals,
    )  # fmt: skip


def train_plan(
    plan: Plan,
    *,
    out: str | os.PathLike | None,
    resume: bool,
    settings: Mapping[str, Any],
    observers: Sequence[Observer],
    announce: Announce,
    handle_signals: bool,
) -> Result:
    """Carries out a plan and returns its result. The arguments are those of `train`; empty settings stand for those of
    the topology and the algorithm."""
    if plan.private:
        refuse_observers(observers)
    ready = with_network(plan)
    for split in ("test", "validation") if plan.options.keep_best else ("test",):
        undefined_primary(plan.problem, plan.process_group, split)  # refuses one that no site defines
    folder = None if out is None else _opened(out, resume, plan.process_group, announce)
    with stop_signals(handle_signals) as stop, surrounded(plan, stop, announce, folder) as around:
        if plan.private:
            private = kept_in(folder, plan.private, plan.replicas[0].seed, plan.process_group)
            ready = ready._replace(plan=replace(plan, private=private))
        ready = with_steps(with_reference_losses(ready, around), around)
        plan = ready.plan
        _say_choices(ready, around.announce)
        with with_threads(plan.options):
            selection = selected(ready, around) if plan.options.choose_weights else None
            compared = selection.compare if selection else plan.options.compare_weights
            fixed = _trained_with_fixed_weights(ready, around) if compared else None
            if selection:
                ready = ready._replace(plan=selection.plan)
            with execution(ready, around, settings or _settings_of(plan), observers) as run:
                run.to_the_end()
                result = finish(run, fixed, selection)
            if plan.private:
                forget_secret(folder, plan.process_group)
            if selection or fixed:
                forget_asides(around.phases())
    for observer in observers:
        observer.after_run(result)
    if fixed and announce is None and (text := result.weights_verdict().warning):  # else the caller shows the verdict
        warnings.warn(text, UserWarning, stacklevel=3)  # of the caller of fm.train
    return result


def _opened(out: str | os.PathLike, resume: bool, process_group: ProcessGroup, announce: Announce) -> RunFolder:
    folder = RunFolder(out, resume=resume, process_group=process_group)
    if folder.set_aside and announce:
        announce(f"the run that was in {folder.path} had diverged; it is now in {folder.set_aside}")
    return folder


def _settings_of(plan: Plan) -> dict[str, Any]:
    """Returns what is known of the settings of a run whose data and model were given in Python."""
    algorithm = plan.replicas[0].algorithm
    return {"rounds": plan.rounds, "topology": to_table(plan.topology), "algorithm": to_table(algorithm)}


def _trained_with_fixed_weights(ready: Ready, around: Surroundings) -> Result:
    """Returns the result of the same run with fixed weights."""
    if around.announce:
        around.announce("first the run is trained with fixed weights, to see whether the weights help")
    twin = ready._replace(plan=replace(with_fixed_weights(ready.plan), personalization=None))
    return on_host(trained_aside(twin, around, "twin", "training with fixed weights"))


@functools.cache
def _log_once(line: str) -> None:
    """Logs a choice that was made for a run. Python writes it to stderr unless logging is configured otherwise."""
    logging.getLogger("fairmesh").warning(line)


def _told_only(plan: Plan, problem: Prepared) -> Iterator[str | None]:
    """Yields what is announced, and not logged."""
    yield notes.on_single_classes(problem)
    if plan.private:
        yield on_privacy(plan.private, [replica.split for replica in plan.replicas])
    if plan.measured:
        yield measured_in_words(plan)
    if plan.options.choose_weights and too_large_to_choose(problem):
        yield NOT_CHOSEN


def _say_choices(ready: Ready, announce: Announce) -> None:
    """Announces all that was chosen for a run. Without `announce`, logs once per process what is special about it."""
    plan, problem, device = ready.plan, ready.plan.problem, ready.network.device
    algorithm = plan.replicas[0].algorithm
    several = any(replica.algorithm != algorithm for replica in plan.replicas)  # each spreads news at its own pace
    special = (
        notes.on_binary_numbers(problem),
        None if several else on_too_few_rounds(plan.cycle, plan.rounds, algorithm, problem.flat_model.dim),
        notes.on_empty_columns(problem),
        notes.on_parts(problem),
        notes.on_short_floats(problem),
        notes.on_stacking(problem, device),
        notes.on_augmentation(problem),
        notes.on_units(problem),
        *(_told_only(plan, problem) if announce else ()),
        *dict.fromkeys(on_updates(replica.algorithm, problem, plan.rounds) for replica in plan.replicas),
    )
    switched_off = notes.on_evaluation_mode(problem)
    data = notes.on_data(problem, home_of_data(problem, device), device)
    if announce:
        for line in filter(None, (*special, switched_off, data, ready.memory)):
            announce(line)
        if problem.preprocessing:
            announce(f"table: {'; '.join(problem.preprocessing.in_words())}")
    elif plan.process_group.is_leader:
        if switched_off:
            warnings.warn(switched_off, UserWarning, stacklevel=4)
        streamed = any(samples.stream for samples in problem.train_sets)
        for line in filter(None, (*special, data if streamed else None)):
            _log_once(line)
