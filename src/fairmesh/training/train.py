"""Runs training from start to end: measured, checkpointed, and stopped on request or on divergence."""

import functools
import hashlib
import logging
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fairmesh.algorithms.base import Algorithm
from fairmesh.algorithms.schedules import with_run_length
from fairmesh.comparisons.alone import AloneRun
from fairmesh.comparisons.constants import worse_than_constant
from fairmesh.comparisons.phases import Notices, Phases
from fairmesh.comparisons.reference_losses import with_references
from fairmesh.config.tables import from_table, to_table
from fairmesh.data.reserve import reserve
from fairmesh.errors import BadInput, Diverged, FairmeshError, LostProcess
from fairmesh.evidence.outcomes import Outcomes, joined, packed, unpacked
from fairmesh.networks.base import Network
from fairmesh.networks.memory import SingleProcess
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.networks.roles import StateView
from fairmesh.personalization.base import Personalization
from fairmesh.personalization.outcome import Personalized, PersonalSite
from fairmesh.personalization.personalize import personalized, refuse_structure
from fairmesh.problems import notes
from fairmesh.problems.checks import refuse_autocast
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.problem import Problem, prepare
from fairmesh.storage.finished_work import FinishedWork
from fairmesh.storage.occupied import ALONE
from fairmesh.storage.run_folder import RunFolder
from fairmesh.storage.sharded_checkpoint import Checkpoints
from fairmesh.storage.state_tree import flatten_state, unflatten_state
from fairmesh.topology.graphs import Ring, Topology
from fairmesh.topology.mixing import with_liars
from fairmesh.training.defaults import ROUNDS, algorithm_for, completed
from fairmesh.training.long_work import LongWorkNotices
from fairmesh.training.loop import Training, TrainingState, check_fits, on_updates, trains_alone
from fairmesh.training.memory_estimate import memory_of_run
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
from fairmesh.training.replicas import Placements, Replica, replicas_of, sites_at, stacked
from fairmesh.training.result import (
    Averages,
    Result,
    about_model,
    chosen_replica,
    model_files,
    site_files,
    summary_of,
    variants_of,
)


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
        plan = _planned(
            problem, topology or Ring(), algorithm, rounds, seeds, placements, personalization, process_group, options
        )
    folder = None if out is None else RunFolder(out, resume=resume, process_group=process_group)
    if folder and folder.set_aside and announce:
        announce(f"the run that was in {folder.path} had diverged; it is now in {folder.set_aside}")
    if settings is None:  # data and model were given in Python
        tables = {"topology": to_table(plan.topology), "algorithm": to_table(plan.replicas[0].algorithm)}
        settings = {"rounds": rounds} | tables
    with stop_signals(handle_signals) as stop:
        plan = plan.with_references(Phases(folder.path / ALONE if folder else None, Notices(stop, announce)))
        with process_group.fail_together():
            first, count = plan.replicas[0].algorithm, len(plan.replicas)
            memory = memory_of_run(plan.problem, first, count, plan.options, plan.network)
        with with_threads(plan.options):
            fixed = None
            if plan.options.compare_weights:
                if announce:
                    announce("the run is trained once more with fixed weights, first, to see whether the weights help")
                fixed = put_aside(_executed(plan.with_fixed_weights(), lambda text: None, stop=stop))
            _announce_choices(plan, memory, announce)
            result = _executed(plan, announce, folder, settings, watching, stop, fixed)
    for observer in watching:
        observer.after_run(result)
    # Who announces shows the verdict too.
    if announce is None and fixed is not None and (text := result.weights_verdict().warning):
        warnings.warn(text, UserWarning, stacklevel=2)
    return result


@dataclass(frozen=True, eq=False)
class Plan:
    """A run that was not refused: all defaults are decided, and nothing is allocated yet."""

    problem: Prepared
    topology: Topology
    replicas: list[Replica]
    rounds: int
    options: Options
    network: Network
    personalization: Personalization | None

    def with_references(self, phases: Phases) -> "Plan":
        """Returns the plan with the losses that sites are compared with, for which they may train alone."""
        run = AloneRun(self.topology, self.rounds, self.replicas[0].seed, self.options, self.network, phases)
        return replace(self, problem=with_references(self.problem, run))

    def with_fixed_weights(self) -> "Plan":
        """Returns the plan of the same run with the weights of the prior."""
        fixed = {id(one): one.with_fixed_weights() for one in (replica.algorithm for replica in self.replicas)}
        replicas: Any = [replace(replica, algorithm=fixed[id(replica.algorithm)]) for replica in self.replicas]
        return replace(self, replicas=replicas, personalization=None)


def _planned(
    problem: Problem | Prepared | Sequence[Problem | Prepared],
    topology: Topology,
    algorithm: Algorithm | Sequence[Algorithm] | None,
    rounds: int,
    seeds: Sequence[int],
    placements: Placements,
    personalization: Personalization | None,
    process_group: ProcessGroup,
    options: dict[str, Any],
) -> Plan:
    """Returns the plan of a run, with the data of the nodes hosted here, or raises BadInput if it cannot be run."""
    problem = prepare(problem)
    if algorithm is None:
        own_code = problem.trainer is not None
        algorithm = algorithm_for(problem.objective, own_code)
        options = {"compare_weights": algorithm.with_fixed_weights() is not None and not own_code} | options
        objective = problem.objective if own_code else completed(problem.objective)
        if objective is not problem.objective:
            problem = problem.each(lambda split: split.changed(objective=objective))
    if not isinstance(rounds, int) or rounds < 1:
        raise BadInput(f"rounds must be a whole number >= 1, got {rounds!r}")
    chosen: Options = from_table(Options, options, "options")
    if not isinstance(topology, Topology):
        raise BadInput(f"topology must be a Topology such as fm.Ring(), got {topology!r}")
    algorithms = list(algorithm) if isinstance(algorithm, Sequence) else [algorithm]
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
    stacked(algorithms, torch.float64, torch.device("cpu"))  # refuses what cannot run in one batch
    if personalization is not None:
        refuse_structure(problem)
        problem.refuse_own_parts("personalization")
        method: Personalization = from_table(Personalization, personalization, "personalization")
        personalization = method
        problem = problem.each(lambda split: split.changed(sites=reserve(split.sites, method.share)))
    if process_group.world_size > 1:
        problem = problem.keeping(sites_at(process_group.nodes(problem.n), replicas))
    cycle = with_liars(topology.build(problem.n), chosen.lying_neighbours)
    kind = {"device": device_of(chosen.device), "dtype": DTYPES[chosen.dtype]}
    network = process_group.network(cycle, **kind, count_bytes=chosen.count_bytes)
    return Plan(problem, topology, replicas, rounds, chosen, network, personalization)


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


def _announce_choices(plan: Plan, memory: str, announce: Callable[[str], None] | None) -> None:
    """Announces what was chosen for a run, or else logs what is special about it."""
    problem, device = plan.problem, plan.network.device
    special = (
        notes.on_binary_numbers(problem),
        notes.on_parts(problem),
        notes.on_short_floats(problem),
        notes.on_stacking(problem, device),
        notes.on_augmentation(problem),
        *dict.fromkeys(on_updates(replica.algorithm, problem, plan.rounds) for replica in plan.replicas),
    )
    switched_off = notes.on_evaluation_mode(problem)
    data = notes.on_data(problem, home_of_data(problem, device), device)
    if announce:
        for line in filter(None, (*special, switched_off, data, memory)):
            announce(line)
        if problem.preprocessing is not None:
            announce(f"table: {'; '.join(problem.preprocessing.in_words())}")
    elif plan.network.process_group.is_leader:
        if switched_off:
            warnings.warn(switched_off, UserWarning, stacklevel=3)
        streamed = any(problem.sites[i].train.stream for i in problem.here)
        for line in filter(None, (*special, data if streamed else None)):
            _log_once(line)


def _executed(
    plan: Plan,
    announce: Callable[[str], None] | None,
    folder: RunFolder | None = None,
    settings: dict[str, Any] | None = None,
    observers: Sequence[Observer] = (),
    stop: threading.Event | None = None,
    fixed: Result | None = None,
) -> Result:
    """Trains the replicas to the end, from the start or from their checkpoint, and writes the outcome."""
    options, rounds, process_group = plan.options, plan.rounds, plan.network.process_group
    stop = stop or threading.Event()
    with process_group.fail_together():
        training = Training(plan.problem, plan.topology, plan.replicas, options, network=plan.network)
    started, initial = time.perf_counter(), training.initial()
    meter = Meter(training, announce)
    run = ObservedRun(training, rounds, initial, 0, settings, folder.path if folder else None)
    worker, finished, checkpointing = training.oracle.worker, None, None
    if worker is not None:
        if process_group.is_leader:
            worker.together = functools.partial(process_group.long_work, seen=LongWorkNotices(announce))
        if folder:
            finished = worker.done = FinishedWork(folder.work)
    if folder:
        checkpoints = Checkpoints(folder.checkpoint, training.network, training.roles(initial), training.identity())
        saved = None
        if folder.resuming:
            with process_group.fail_together():
                state, saved = checkpoints.load(initial)
                if saved > rounds:
                    raise BadInput(f"the checkpoint is already at round {saved}, beyond the {rounds} rounds asked for")
            run.state, run.best, run.round = state, state.best, saved
            kept = (record for record in folder.records() if record["round"] <= saved)
            # If the run is now longer, its former last round was measured off schedule.
            run.records = [r for r in kept if r["round"] % options.measure_every == 0 or r["round"] == rounds]
            folder.replace_records(run.records)
        folder.write_settings(run.settings)
        checkpointing = Checkpointing(checkpoints, options.checkpoint_every or max(1, rounds // 10), saved, finished)
    del initial  # which would take the memory of a state until the end
    recorders = [Measuring(meter, folder), KeepBest(meter), *([checkpointing] if checkpointing else [])]
    divergence = Divergence(checkpointing, mark=options.on_divergence == "mark")
    every = [StopRequests(process_group, stop), divergence, *recorders, *observers, Ending(recorders)]
    try:
        observe(run, training.states(run.state, run.round, rounds), every)
    except FairmeshError as error:
        if folder and isinstance(error, Diverged):
            folder.mark_diverged(str(error))
        if folder and not isinstance(error, LostProcess):  # its launcher restarts the run, which must find its mark
            folder.close()
        raise
    result = replace(_result(run, meter), fixed=fixed)
    if plan.personalization is not None:
        if announce:
            announce(f"choosing a model of its own for each of {plan.problem.n} sites")
        phases = Phases(folder.path / ALONE if folder else None, Notices(stop, announce))
        result = replace(result, personal=_personal(training, result, plan.personalization, phases))
    result = replace(result, seconds=time.perf_counter() - started)
    if process_group.world_size > 1:
        result = replace(result, answered=_answered(process_group, result))
    sound = not set(variants_of(result.replicas)[result.chosen_variant]["replicas"]) <= set(run.diverged)
    if sound and plan.problem.task == "numbers":
        worse = worse_than_constant(result.outcomes(), plan.problem, process_group)
        if worse is not None:
            meter.note(worse)
            result = replace(result, notes=list(meter.notes))
    if folder:
        provenance = provenance_of(plan.problem, process_group)
        with process_group.fail_together():
            write_outcome(folder, result, provenance)
        folder.close()
    return result


def _answered(process_group: ProcessGroup, result: Result) -> dict[str, Outcomes]:
    """Returns what the models answered on the test rows of all sites, from the processes that have them."""
    with process_group.fail_together():
        here = result.every_outcome()
    every = [unpacked(content) for content in process_group.all_gather(packed(here))]
    return {
        name: replace(joined([outcomes[name] for outcomes in every]), functions=here[name].functions) for name in here
    }


def _result(run: ObservedRun, meter: Meter) -> Result:
    """Returns the result, with the averages over the nodes of all processes."""
    training, state, averages = run.training, run.state, None
    models, network = training.view.models(state.algorithm), training.network
    if network.process_group.world_size > 1:
        of_nodes = network.gather(models) if trains_alone(training.algorithm) else None
        averages = Averages(meter.mean(models), meter.weights(state.algorithm), meter.own_of_sites(state.own), of_nodes)
        if not training.algorithm.needs_server:
            dual = state.average_dual
            state = state._replace(
                average_model=network.mean_of_processes(state.average_model),
                average_dual=None if dual is None else network.mean_of_processes(dual),
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
        support=meter.support(),
        notes=list(meter.notes),
        cvar_level=training.options.cvar_level,
        worst_needs_rows=training.options.worst_needs_rows,
    )
    return replace(result, chosen=chosen_replica(result, training.options.best_by))


def _personal(
    training: Training, result: Result, personalization: Personalization, phases: Phases
) -> list[Personalized]:
    """Returns the sites' own models. Each process finds those of its own sites; all processes know all numbers."""
    process_group, rows, found = training.network.process_group, result.row(), []
    models = hashlib.sha256(rows.cpu().contiguous().numpy().tobytes()).hexdigest()
    identity = {"method": to_table(personalization), "models": models, "problem": training.problem.digest()}

    def carried_out(name: str, *work: Any) -> Any:
        what = "choosing a model of its own for each site"
        return phases.carried_out(what, f"personal-{process_group.rank}-{name}", identity, *work)

    with process_group.fail_together():
        for r, replica in enumerate(training.replicas):
            if r not in result.diverged:
                problem, trace = training.problem.of_split(replica.split), training.options.trace == "auto"
                placed = {"device": training.device, "dtype": training.dtype, "trace": trace}
                settings = {"seed": replica.seed, "replica": r, "carrier": carried_out, **placed}
                found.append(personalized(problem, rows[r], personalization, **settings))
    phases.forget(f"personal-{process_group.rank}-*")
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
