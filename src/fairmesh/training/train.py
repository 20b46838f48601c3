"""Runs training from start to end: measured, checkpointed, and stopped on request or on divergence."""

import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from fairmesh.algorithms.base import Algorithm
from fairmesh.algorithms.schedules import with_run_length
from fairmesh.comparisons.reference_losses import with_references, worse_than_constant
from fairmesh.config.tables import from_table, to_table
from fairmesh.data.reserve import reserve
from fairmesh.errors import BadInput, Diverged, FairmeshError, Interrupted, LostProcess, nearest
from fairmesh.evidence.outcomes import Outcomes, joined, packed, unpacked
from fairmesh.networks.memory import SingleProcess
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.networks.roles import StateView
from fairmesh.personalization.base import Personalization
from fairmesh.personalization.outcome import Personalized, PersonalSite
from fairmesh.personalization.personalize import personalized, refuse_structure
from fairmesh.problems import notes
from fairmesh.problems.checks import refuse_autocast
from fairmesh.problems.problem import Problem, with_splits
from fairmesh.storage.finished_work import FinishedWork
from fairmesh.storage.run_folder import RunFolder
from fairmesh.storage.sharded_checkpoint import Checkpoints
from fairmesh.storage.state_tree import flatten_state, unflatten_state
from fairmesh.topology.graphs import Ring, Topology
from fairmesh.topology.mixing import with_liars
from fairmesh.training.defaults import ROUNDS, algorithm_for, completed
from fairmesh.training.long_work import LongWorkNotices
from fairmesh.training.loop import Training, TrainingState, check_fits, on_updates
from fairmesh.training.memory_estimate import footprint_of, memory_sentence
from fairmesh.training.meter import Meter
from fairmesh.training.observers import (
    Checkpointing,
    Divergence,
    Ending,
    KeepBest,
    Measuring,
    ObservedRun,
    Observer,
    StopRequests,
    as_observers,
    observe,
    stop_signals,
)
from fairmesh.training.options import DTYPES, Options, device_of, home_of_data, with_threads
from fairmesh.training.provenance import provenance_of
from fairmesh.training.replicas import (
    Placements,
    Replica,
    replicas_of,
    sites_at,
    stacked,
)
from fairmesh.training.result import (
    Averages,
    Result,
    about_model,
    chosen_replica,
    model_files,
    site_files,
    summary_of,
    trains_alone,
    variants_of,
)


def train(
    problem: Problem | Sequence[Problem],
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
    one batch. Each gives the same result as if it ran alone.

    Args:
        problem: The model, the loss and the sites' data; or a list of problems that differ only in which rows of a site
            are for training and which for testing, so that results show how much depends on the split.
        topology: Who talks to whom; None for a ring. Default: None.
        algorithm: The algorithm, or several that differ only in their numbers. None for the one that does best on many
            kinds of sites (docs/concepts/weights.md): `TrackedADGDA()`, weights that follow held-out rows unless
            the problem has an objective of its own, and `compare_weights`. With a trainer, `TrackedADGDA` with steps
            for its updates (docs/howto/own-training-code.md), and nothing else. Default: None.
        rounds: Rounds to train, >= 1. Every node sends at most one message per neighbour and round. Default: 600.
        seeds: Seeds of the replicas, whole numbers >= 0. Default: (0,).
        placements: Which site each node holds: None for site i at node i; a number of random placements; a list of
            permutations; or "by-seed" for one random placement per seed. Default: None.
        personalization: How sites get models of their own after the last round, such as
            `fm.personalization.Mixture()`. Every site then reserves a share of its training rows, which the common
            model is not trained on. None for only the common model. Default: None.
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
    refuse_autocast()
    process_group = process_group or SingleProcess()
    with process_group.fail_together():
        watching = as_observers(observers)
    topology = topology or Ring()
    problem = problem if isinstance(problem, Problem) else with_splits(problem)
    if algorithm is None:
        algorithm, own_code = algorithm_for(problem.objective, problem.trainer is not None), problem.trainer is not None
        options = {"compare_weights": algorithm.with_fixed_weights() is not None and not own_code} | options
        objective = problem.objective if own_code else completed(problem.objective)
        if objective is not problem.objective:
            problem = problem.each(lambda split: split.with_other(objective=objective))
    with process_group.fail_together():
        replicas, chosen = _checked(problem, topology, algorithm, rounds, seeds, placements, options)
        if personalization is not None:
            refuse_structure(problem)
            problem.refuse_own_parts("personalization")
            method: Personalization = from_table(Personalization, personalization, "personalization")
            personalization = method
            problem = problem.each(lambda split: split.with_other(sites=reserve(split.sites, method.share)))
        problem = (
            problem
            if process_group.world_size == 1
            else problem.keeping(sites_at(process_group.nodes(problem.n), replicas))
        )
        kind = {"device": device_of(chosen.device), "dtype": DTYPES[chosen.dtype]}
        network = process_group.network(
            with_liars(topology.build(problem.n), chosen.lying_neighbours), **kind, count_bytes=chosen.count_bytes
        )
    problem = with_references(problem, topology, rounds, replicas[0].seed, chosen, network)
    with process_group.fail_together():
        need = footprint_of(problem, replicas, chosen, process_group)
        sharing = process_group.local_world_size
        memory = memory_sentence(need, len(replicas), chosen.memory_gib, kind["device"], sharing)
    folder = None if out is None else RunFolder(out, resume=resume, process_group=process_group)
    if folder and folder.set_aside and announce:
        announce(f"the run that was in {folder.path} had diverged; it is now in {folder.set_aside}")
    fixed = None
    if chosen.compare_weights:
        if announce:
            announce("the run is trained once more with fixed weights, first, to see whether the weights help")
        again: dict[str, Any] = options | {"compare_weights": False}
        unweighted = [fixed_one for one in _listed(algorithm) if (fixed_one := one.with_fixed_weights())]
        fixed = put_aside(
            train(
                problem, topology, unweighted, rounds,
                seeds=seeds, placements=placements, process_group=process_group, announce=lambda text: None, **again,
            )
        )  # fmt: skip
    switched_off = notes.on_evaluation_mode(problem)
    data = notes.on_data(problem, home_of_data(problem, kind["device"]), kind["device"])
    parts, short = notes.on_parts(problem), notes.on_short_floats(problem)
    special = (parts, short, notes.on_stacking(problem, kind["device"]), notes.on_augmentation(problem))
    special = (
        notes.on_binary_numbers(problem),
        *special,
        *dict.fromkeys(on_updates(one, problem) for one in _listed(algorithm)),
    )
    if announce:
        for line in filter(None, (*special, switched_off, data, memory)):
            announce(line)
        if problem.preprocessing is not None:
            announce(f"table: {'; '.join(problem.preprocessing.in_words())}")
    elif process_group.is_leader:
        if switched_off:
            warnings.warn(switched_off, UserWarning, stacklevel=2)
        streamed = any(problem.sites[i].train.stream is not None for i in problem.here)
        for line in filter(None, (*special, data if streamed else None)):
            _log_once(line)
    if settings is None:  # data and model were given in Python
        settings = {"rounds": rounds, "topology": to_table(topology), "algorithm": to_table(replicas[0].algorithm)}
    with with_threads(chosen), stop_signals(handle_signals) as stop:
        with process_group.fail_together():
            training = Training(problem, topology, replicas, chosen, network=network)
        result = _run(training, rounds, folder, settings, watching, stop, personalization, announce, fixed)
    return _ended(result, watching, announce)


def put_aside(result: Result) -> Result:
    """Returns a result that waits in main memory while another run trains: with its models and weights, without what
    only further rounds would need."""
    state = result.state
    slim = state._replace(
        algorithm=StateView(state.algorithm).only_shown(state.algorithm), optimizer=None, trainer=None
    )
    on_host = unflatten_state(slim, {name: tensor.cpu() for name, tensor in flatten_state(slim).items()})
    return replace(result, state=on_host)


@functools.cache
def _log_once(line: str) -> None:
    """Logs a choice that was made for a run. Python writes it to stderr unless logging is configured otherwise."""
    logging.getLogger("fairmesh").warning(line)


def _ended(result: Result, observers: Sequence[Observer], announce: Callable[[str], None] | None) -> Result:
    """Returns the result after the observers have seen it, with a warning if the weights went where they cannot help.
    Who announces shows the verdict too."""
    for observer in observers:
        observer.after_run(result)
    if announce is None and result.fixed is not None and (text := result.weights_verdict().warning):
        warnings.warn(text, UserWarning, stacklevel=3)
    return result


def _listed(algorithm: Algorithm | Sequence[Algorithm]) -> list[Algorithm]:
    return list(algorithm) if isinstance(algorithm, Sequence) else [algorithm]


def _checked(
    problem: Problem,
    topology: Topology,
    algorithm: Algorithm | Sequence[Algorithm],
    rounds: int,
    seeds: Sequence[int],
    placements: Placements,
    options: dict[str, Any],
) -> tuple[list[Replica], Options]:
    """Returns the replicas and options, or raises BadInput if they cannot be run."""
    if not isinstance(rounds, int) or rounds < 1:
        raise BadInput(f"rounds must be a whole number >= 1, got {rounds!r}")
    known = {field.name for field in fields(Options)}
    for name in options:
        if name not in known:
            raise BadInput(f"train() has no option {name!r}{nearest(name, known)}")
    chosen = Options(**options)
    if not isinstance(topology, Topology):
        raise BadInput(f"topology must be a Topology such as fm.Ring(), got {topology!r}")
    algorithms = _listed(algorithm)
    for one in algorithms:
        if not isinstance(one, Algorithm):
            raise BadInput(f"algorithm must be an Algorithm such as fm.ADGDA(), or a list of them, got {one!r}")
    algorithms = [with_run_length(from_table(Algorithm, one, "algorithm"), rounds) for one in algorithms]
    replicas = replicas_of(algorithms, seeds, placements, problem.n, len(problem.every_split))
    if chosen.keep_best and not problem.held_out("validation")[1]:
        raise BadInput("keep_best needs validation sets; give each Site, or the Problem, one")
    if chosen.compare_weights and any(a.with_fixed_weights() is None for a in algorithms):
        raise BadInput("compare_weights needs an algorithm with weights of its own, such as tracked-ad-gda")
    if chosen.own_models and any(a.needs_server for a in algorithms):
        raise BadInput("own_models: nodes of an algorithm with a server have no models of their own")
    for one in algorithms:
        check_fits(one, problem)
    stacked(algorithms, torch.float64, torch.device("cpu"))  # refuses what cannot run in one batch, even if it need not
    return replicas, chosen


def _run(
    training: Training,
    rounds: int,
    folder: RunFolder | None,
    settings: dict[str, Any],
    observers: Sequence[Observer],
    stop: threading.Event,
    personalization: Personalization | None,
    announce: Callable[[str], None] | None,
    fixed: Result | None,
) -> Result:
    """Trains the replicas to the end, from the start or from their checkpoint."""
    options, process_group = training.options, training.network.process_group
    started, initial = time.perf_counter(), training.initial()
    meter = _meter(training, announce)
    worker, finished = training.oracle.worker, None
    if worker is not None:
        notices = LongWorkNotices(announce)
        worker.together = functools.partial(
            process_group.long_work, seen=notices if process_group.is_leader else lambda every: None
        )
    if worker is not None and folder:
        finished = worker.done = FinishedWork(folder.work)
    about = (settings, folder.path if folder else None)
    run, checkpointing = ObservedRun(training, rounds, initial, 0, *about), None
    if folder:
        checkpoints = Checkpoints(folder.checkpoint, training.network, training.roles(initial), training.identity())
        saved = None
        if folder.resuming:
            with process_group.fail_together():
                state, done = checkpoints.load(initial)
                if done > rounds:
                    raise BadInput(f"the checkpoint is already at round {done}, beyond the {rounds} rounds asked for")
            run, saved = ObservedRun(training, rounds, state, done, *about), done
            kept = (record for record in folder.records() if record["round"] <= done)
            # If the run is now longer, its former last round was measured off schedule.
            run.records = [r for r in kept if r["round"] % options.measure_every == 0 or r["round"] == rounds]
            folder.replace_records(run.records)
        folder.write_settings(settings)
        every_so_often = options.checkpoint_every or max(1, rounds // 10)
        checkpointing = Checkpointing(checkpoints, every_so_often, saved, finished)
    del initial  # which would take the memory of a state until the end
    measuring, keeping = Measuring(meter, folder), KeepBest(meter)
    recorders = [measuring, keeping, *([checkpointing] if checkpointing else [])]
    every = [
        StopRequests(process_group, stop),
        Divergence(checkpointing, mark=options.on_divergence == "mark"),
        *recorders,
        *observers,
        Ending(recorders),
    ]
    try:
        observe(run, training.states(run.state, run.round, rounds), every)
    except FairmeshError as error:
        if folder and isinstance(error, Diverged):
            folder.mark_diverged(str(error))
        if folder and not isinstance(error, LostProcess):  # its launcher restarts the run, which must find its mark
            folder.close()
        raise
    result = replace(_result(run, meter, time.perf_counter() - started), fixed=fixed)
    if personalization is not None:
        if announce:
            announce(f"choosing a model of its own for each of {training.problem.n} sites")
        personal = _personal(training, result, personalization, stop)
        result = replace(result, personal=personal, seconds=time.perf_counter() - started)
    if process_group.world_size > 1:
        result = replace(result, answered=_answered(training, result))
    sound = not set(variants_of(result.replicas)[result.chosen_variant]["replicas"]) <= set(run.diverged)
    if sound and training.problem.task == "numbers":
        worse = worse_than_constant(result.outcomes(), training.problem, process_group)
        if worse is not None:
            meter.note(worse)
            result = replace(result, notes=list(meter.notes))
    if folder:
        provenance = provenance_of(training.problem, process_group)
        with process_group.fail_together():
            write_outcome(folder, result, provenance)
        folder.close()
    return result


def _answered(training: Training, result: Result) -> dict[str, Outcomes]:
    """Returns what the models answered on the test rows of all sites, from the processes that have them."""
    process_group = training.network.process_group
    with process_group.fail_together():
        here = result.every_outcome()
    every = [unpacked(content) for content in process_group.all_gather(packed(here))]
    return {
        name: replace(joined([outcomes[name] for outcomes in every]), functions=here[name].functions) for name in here
    }


def _meter(training: Training, announce: Callable[[str], None] | None) -> Meter:
    return Meter(
        training.problem,
        training.placements,
        training.device,
        training.dtype,
        training.network,
        training.view,
        splits=[replica.split for replica in training.replicas],
        at_server=training.algorithm.needs_server,
        home=training.data_home,
        own_models=training.options.own_models or trains_alone(training.algorithm),
        announce=announce,
    )


def _result(run: ObservedRun, meter: Meter, seconds: float) -> Result:
    """Returns the result, with the averages over the nodes of all processes."""
    training, state, averages = run.training, run.state, None
    if training.network.process_group.world_size > 1:
        averages = Averages(
            meter.mean(training.view.models(state.algorithm)),
            meter.weights(state.algorithm),
            meter.own_of_sites(state.own),
            training.network.gather(training.view.models(state.algorithm))
            if trains_alone(training.algorithm)
            else None,
        )
        if not training.algorithm.needs_server:
            mean = training.network.mean_of_processes
            state = state._replace(
                average_model=mean(state.average_model),
                average_dual=None if state.average_dual is None else mean(state.average_dual),
            )
    result = Result(
        training.problem,
        training.replicas,
        run.round,
        run.records,
        state,
        run.diverged,
        meter.judged_on,
        averages,
        run.stop_reason,
        seconds,
        support=meter.support(),
        notes=list(meter.notes),
        cvar_level=training.options.cvar_level,
        worst_needs_rows=training.options.worst_needs_rows,
    )
    return replace(result, chosen=chosen_replica(result, training.options.best_by))


def _personal(
    training: Training, result: Result, personalization: Personalization, stop: threading.Event
) -> list[Personalized]:
    """Returns the sites' own models. Each process finds those of its own sites; all processes know all numbers."""
    process_group, rows = training.network.process_group, result.row()

    def go_on(done: int, steps: int) -> None:
        if stop.is_set():
            raise Interrupted(
                "stopped after the last round, while the sites chose their own models; resume to repeat it"
            )

    found = []
    with process_group.fail_together():
        for r, replica in enumerate(training.replicas):
            if r not in result.diverged:
                found.append(
                    personalized(
                        training.problem.of_split(replica.split),
                        rows[r],
                        personalization,
                        seed=replica.seed,
                        replica=r,
                        device=training.device,
                        dtype=training.dtype,
                        trace=training.options.trace == "auto",
                        progress=go_on,
                    )
                )
    if process_group.world_size == 1:
        return found
    every = process_group.all_gather_json([one.table() for one in found])
    for k, one in enumerate(found):
        sites = {site.number: site for site in one.sites}
        for tables in every:
            for table in tables[k]["sites"]:
                sites.setdefault(table["number"], PersonalSite(state_dicts={}, **table))
        found[k] = replace(one, sites=[sites[i] for i in sorted(sites)])
    return found


def write_outcome(folder: RunFolder, result: Result, provenance: dict[str, Any]) -> None:
    """Writes the models and the summary of a finished run."""
    folder.write_preprocessing([split.preprocessing for split in result.problem.every_split])
    for file in [*model_files(result), *site_files(result)]:
        about = about_model(result, file.replica, file.which) | ({} if file.site is None else {"site": file.site})
        state_dict = result.state_dict(file.replica, file.which, file.site)  # type: ignore[arg-type]
        folder.write_model(file.name, state_dict, about)
    for personal in result.personal:
        suffix = f"-{personal.replica}" if personal.replica else ""
        for site in personal.sites:
            if site.state_dicts:  # else another process has the site's data
                about = about_model(result, personal.replica, "personal") | {"site": site.name}
                folder.write_model(f"personal-{site.number}{suffix}", site.tensors(), about, from_all=True)
    folder.write_outcomes(packed(result.every_outcome()))
    folder.write_summary(summary_of(result) | {"provenance": provenance})
