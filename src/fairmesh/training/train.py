"""A run from start to end: measured, checkpointed, stopped on request or when it stops making sense."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any

import torch

from fairmesh.algorithms.base import Algorithm
from fairmesh.algorithms.schedules import with_run_length
from fairmesh.config.tables import to_table
from fairmesh.errors import BadInput, Diverged, Interrupted, nearest
from fairmesh.networks.memory import SingleProcess
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.numerics import malloc
from fairmesh.problems.problem import Problem
from fairmesh.storage.run_folder import Record, RunFolder
from fairmesh.storage.sharded_checkpoint import Checkpoints
from fairmesh.topology.graphs import Topology
from fairmesh.training.loop import Best, Training, TrainingState
from fairmesh.training.metrics import Meter
from fairmesh.training.options import DTYPES, Options, device_of
from fairmesh.training.portions import (
    Watch,
    merged,
    on_host,
    portions,
    that_fit,
)
from fairmesh.training.replicas import (
    Placements,
    Replica,
    replicas_of,
    sites_at,
    stacked,
)
from fairmesh.training.result import Averages, Result, summary_of

_LOOK_EVERY = 50  # rounds between looks for divergence, at most
_ASK_EVERY_S = 0.5  # seconds between hosts' questions whether one of them was asked to stop, about


def train(
    problem: Problem,
    topology: Topology,
    algorithm: Algorithm | Sequence[Algorithm],
    rounds: int,
    *,
    seeds: Sequence[int] = (0,),
    placements: Placements = None,
    out: Any = None,
    resume: bool = False,
    settings: dict[str, Any] | None = None,
    watch: Watch | None = None,
    announce: Callable[[str], None] | None = None,
    process_group: ProcessGroup | None = None,
    **options: Any,
) -> Result:
    """Trains a model on the data of all sites.

    Every algorithm is trained with every placement and every seed. These replicas run as one batch, or in as few
    batches as the memory allows. Each gives the same result as if it ran alone.

    Args:
        problem: The model, the loss and the sites' data.
        topology: Who talks to whom, such as `fm.Ring()`.
        algorithm: The algorithm, or several that differ only in their numbers.
        rounds: Rounds to train, >= 1. Every node sends at most one message per neighbour and round.
        seeds: Seeds of the replicas, whole numbers >= 0. Default: (0,).
        placements: Which site each node holds: None for node i at site i; a number of random placements; a list of
            permutations; or "by-seed" for one random placement per seed. Default: None.
        out: The folder to write: metrics, summary, models and checkpoint. None to write nothing. Default: None.
        resume: Whether to continue from the checkpoint in `out`. Default: False.
        settings: The settings to write into `out`; None for those of the topology and the algorithm. Default: None.
        watch: Called after every round with the number of rounds done and the list of new records, which is often
            empty. Default: None.
        announce: Called once, before the first round, with a sentence about the memory that the run takes. Default:
            None.
        process_group: The processes that train together, if this is one of several, each with some of the nodes and
            their data; all call `train` and all get the result. Default: None.
        **options: The fields of `fm.Options`, such as `measure_every=10`.

    Returns:
        The measurements and models of all replicas.

    Raises:
        BadInput: A setting or a site's data cannot be used.
        Diverged: The models are not finite or have exploded.
        CheckpointError: The checkpoint is damaged or belongs to another experiment.
        Interrupted: Ctrl-C or SIGTERM arrived while `out` was being written; the checkpoint is kept.

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
        replicas, chosen = _checked(problem, topology, algorithm, rounds, seeds, placements, options)
        problem = (
            problem
            if process_group.world_size == 1
            else problem.keeping(sites_at(process_group.nodes(problem.n), replicas))
        )
        at_once, sentence = that_fit(problem, replicas, chosen, process_group)
    folder = None if out is None else RunFolder(out, resume=resume, process_group=process_group)
    if folder and folder.resuming:
        at_once, sentence = folder.replicas_at_once(len(replicas)), f"{sentence}; resumed as it was begun"
    at_once = min(process_group.all_gather_json(at_once))
    if announce:
        announce(sentence)
    if process_group.world_size > 1 and at_once < len(replicas):
        with process_group.fail_together():
            raise BadInput(
                f"only {at_once} of {len(replicas)} replicas fit at once beside each other, and on a cluster all must; "
                "use more machines or fewer replicas"
            )
    if at_once >= len(replicas):
        with process_group.fail_together():
            kind = {"device": device_of(chosen.device), "dtype": DTYPES[chosen.dtype]}
            network = process_group.network(topology.build(problem.n), **kind, count_bytes=chosen.count_bytes)
            training = Training(problem, topology, replicas, chosen, network=network)
        return _Recorder(training, rounds, folder, settings, watch).run()
    started, results = time.perf_counter(), []
    for portion in portions(replicas, at_once):
        inside = RunFolder(portion.folder(folder.path), resume=resume, process_group=process_group) if folder else None
        training = Training(problem, topology, portion.replicas, chosen, portion.first)
        one = _Recorder(training, rounds, inside, settings, portion.watch(watch, rounds)).run()
        results.append(replace(one, state=on_host(one.state)))
        del training, one  # frees the device before the next
    result = merged(results, replicas)
    if folder:
        folder.write_settings(settings or _settings(topology, replicas, rounds))
        folder.replace_records(result.records)
        _write_outcome(folder, result, time.perf_counter() - started)
        folder.close()
    return result


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
    algorithms = list(algorithm) if isinstance(algorithm, Sequence) else [algorithm]
    for one in algorithms:
        if not isinstance(one, Algorithm):
            raise BadInput(f"algorithm must be an Algorithm such as fm.ADGDA(), or a list of them, got {one!r}")
    algorithms = [with_run_length(one, rounds) for one in algorithms]
    replicas = replicas_of(algorithms, seeds, placements, problem.n)
    if chosen.keep_best and not problem.held_out("validation")[0]:
        raise BadInput("keep_best needs validation sets; give each Site, or the Problem, one")
    if chosen.measure_phi and any(getattr(a, "regularizer", None) is None for a in algorithms):
        raise BadInput("measure_phi needs an algorithm with a regularizer, such as ad-gda")
    if chosen.own_models and any(a.needs_server for a in algorithms):
        raise BadInput("own_models: nodes of an algorithm with a server have no models of their own")
    for one in algorithms:
        one.check(problem.prior_of_sites, problem.flat_model.dim)
    stacked(algorithms, torch.float64, torch.device("cpu"))  # refuses what cannot run together, also where it need not
    return replicas, chosen


class _Recorder:
    """Watches a training: measures, writes the folder, looks for divergence, stops on request."""

    def __init__(
        self, training: Training, rounds: int, folder: RunFolder | None, settings: dict | None, watch: Watch | None
    ):
        options = training.options
        self.training, self.rounds, self.folder, self.watch = training, rounds, folder, watch
        self.process_group = training.network.process_group
        regularizers = [getattr(replica.algorithm, "regularizer", None) for replica in training.replicas]
        cpu = torch.device("cpu")
        self.meter = Meter(
            training.problem,
            training.placements,
            training.device,
            training.dtype,
            training.network,
            at_server=training.algorithm.needs_server,
            home=training.data_home,
            own_models=options.own_models,
            regularizer=stacked(regularizers, torch.float64, cpu) if options.measure_phi else None,  # type: ignore[arg-type]
            alpha_of_sum=training.algorithm.alpha_of_sum,
        )
        self.settings = settings or _settings(training.topology, training.replicas, rounds)
        self.records: list[Record] = []
        self.diverged: list[int] = []

    def run(self) -> Result:
        training, options, folder = self.training, self.training.options, self.folder
        identity = training.identity() if folder else {}
        checkpoints = folder and Checkpoints(folder.checkpoint, training.network, training.holder_of, identity)
        state, done = training.initial(), 0
        if folder and checkpoints and folder.resuming:
            with self.process_group.fail_together():
                state, done = checkpoints.load(state)
                if done > self.rounds:
                    raise BadInput(
                        f"the checkpoint is already at round {done}, beyond the {self.rounds} rounds asked for"
                    )
            every = options.measure_every  # the end of a run that is now extended was measured off schedule
            kept = [record for record in folder.records() if record["round"] <= done]
            self.records = [r for r in kept if r["round"] % every == 0 or r["round"] == self.rounds]
            folder.replace_records(self.records)
        if folder:
            folder.write_settings(self.settings)
        started, sound, saved = time.perf_counter(), done, done if folder and folder.resuming else None
        pace = options.checkpoint_every or max(1, self.rounds // 10)
        on_cpu = training.device.type == "cpu"  # a GPU is not made to wait more often than it is measured
        look = min(options.measure_every, _LOOK_EVERY) if on_cpu else options.measure_every
        best = state.best  # found by measuring, so the round loop does not carry it
        with malloc.reused() if on_cpu else nullcontext(), _stop_requests(folder is not None) as stop:
            requests = _Requests(self.process_group, stop)
            for now, current in training.states(state, done, self.rounds):
                state = current._replace(best=best)
                last = now == self.rounds
                stopping = requests.stop(now)  # asked once: a request that comes later waits for the next round
                measured = now % options.measure_every == 0 or last
                if measured or now % look == 0 or stopping or (folder and now % pace == 0):
                    self._refuse_diverged(state, now, sound, saved)
                    sound = now
                fresh: list[Record] = []
                if measured and not any(record["round"] == now for record in self.records[-len(training.replicas) :]):
                    fresh, state = self._measured(now, state)
                    best = state.best
                if checkpoints and saved != now and (now % pace == 0 or last or stopping):
                    checkpoints.save(state, now)
                    saved = now
                if self.watch:
                    self.watch(now, fresh)
                if stopping and not last:
                    self._end()
                    with self.process_group.fail_together():
                        raise Interrupted(f"stopped after round {now} of {self.rounds}; its checkpoint is kept")
        result = self._result(state)
        if folder:
            with self.process_group.fail_together():
                _write_outcome(folder, result, time.perf_counter() - started)
        self._end()
        return result

    def _end(self) -> None:
        if self.folder:
            self.folder.close()

    def _result(self, state: TrainingState) -> Result:
        """With the averages over all nodes, wherever hosted."""
        training, averages = self.training, None
        if self.process_group.world_size > 1:
            averages = Averages(self.meter.mean(state.algorithm.models), self.meter.weights(state.algorithm))
            if not training.algorithm.needs_server:
                kept = {name: getattr(state, name) for name in ("average_model", "average_dual", "iterate")}
                mean = training.network.mean_of_processes
                state = state._replace(**{name: None if t is None else mean(t) for name, t in kept.items()})
        judged_on, problem = self.meter.judged_on, training.problem
        return Result(problem, training.replicas, self.rounds, self.records, state, self.diverged, judged_on, averages)

    def _measured(self, now: int, state: TrainingState) -> tuple[list[Record], TrainingState]:
        training = self.training
        fresh = self.meter.records(now, state.algorithm, state.sent)
        for record, replica in zip(fresh, training.replicas):
            record["seed"] = replica.seed
        self.records += fresh
        if self.folder:
            with self.process_group.fail_together():
                self.folder.append(fresh)
        if state.best is None or now % training.options.measure_every:
            return fresh, state
        average = self.meter.mean(state.algorithm.models)
        scores = self.meter.worst_on_validation(average)
        better = scores > state.best.score
        best = Best(
            torch.where(better, scores, state.best.score),
            torch.where(better, now, state.best.round),
            torch.where(better.to(average.device)[:, None], average, state.best.model),
        )
        return fresh, state._replace(best=best)

    def _refuse_diverged(self, state: TrainingState, now: int, sound: int, saved: int | None) -> None:
        here = self.training.unsound(state).any(dim=-1)
        anywhere = self.process_group.all_reduce(here.long()) if self.process_group.world_size > 1 else here
        self.diverged = anywhere.nonzero().flatten().tolist()
        if not self.diverged or self.training.options.on_divergence == "mark":
            return
        kept = "" if saved is None else f"; the checkpoint of round {saved} is kept"
        self._end()
        with self.process_group.fail_together():
            if bool(here.any()):
                raise Diverged(self.training.divergence_message(state, now, sound) + kept)


def _settings(topology: Topology, replicas: Sequence[Replica], rounds: int) -> dict[str, Any]:
    """What is known of a run whose data and model were given in Python."""
    return {"rounds": rounds, "topology": to_table(topology), "algorithm": to_table(replicas[0].algorithm)}


def _write_outcome(folder: RunFolder, result: Result, seconds: float) -> None:
    for r in range(len(result.replicas)):
        suffix = f"-{r}" if r else ""
        folder.write_model(f"model{suffix}", result.state_dict(r))
        folder.write_model(f"model-time-average{suffix}", result.state_dict(r, "time-average"))
        if result.state.best is not None:
            folder.write_model(f"model-best{suffix}", result.state_dict(r, "best"))
        if result.state.iterate is not None:
            folder.write_model(f"model-iterate{suffix}", result.state_dict(r, "iterate"))
    folder.write_summary(summary_of(result, seconds))


class _Requests:
    """Whether to stop: of several hosts all stop after the same round, so they ask each other, about twice a second."""

    def __init__(self, process_group: ProcessGroup, event: threading.Event):
        self._process_group, self._event = process_group, event
        self._asked, self._next, self._time = 0, 0, time.perf_counter()

    def stop(self, now: int) -> bool:
        if self._process_group.world_size == 1:
            return self._event.is_set()
        if now < self._next:
            return False
        pace = (time.perf_counter() - self._time) / max(1, now - self._asked)
        answers = self._process_group.all_gather_json([self._event.is_set(), pace])
        rounds = int(
            _ASK_EVERY_S / max(answers[0][1], 1e-6)
        )  # by the first host's clock, so that all ask again at once
        self._asked, self._time = now, time.perf_counter()
        self._next = now + max(1, min(rounds, _LOOK_EVERY))
        return any(asked for asked, _ in answers)


@contextmanager
def _stop_requests(handle: bool) -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets, where a checkpoint can be kept; a second Ctrl-C stops at once."""
    stop = threading.Event()
    if not handle or threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number: int, frame: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
