"""Estimates how much memory a run needs and how much is free, before anything large is allocated."""

import functools
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fairmesh.algorithms.base import Algorithm
from fairmesh.data.rows import stays_apart
from fairmesh.data.sealed import rows_of_units
from fairmesh.data.site import Site
from fairmesh.data.units import units_of
from fairmesh.errors import BadInput
from fairmesh.networks.base import Network
from fairmesh.numerics import malloc, trees
from fairmesh.privacy.accounting import static_shape
from fairmesh.problems.batches import AS_FLOATS_UP_TO, Sampling
from fairmesh.problems.evaluator import evaluated_at_once
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.private_oracle import NUMBERS_AT_ONCE
from fairmesh.problems.problem import Problem, prepare
from fairmesh.problems.row_loss import BoundModelLoss, as_floats, augmented
from fairmesh.problems.unit_gradients import unit_gradients
from fairmesh.topology.graphs import Ring
from fairmesh.training.loop import Training
from fairmesh.training.options import DTYPES, Options, device_of, home_of_data
from fairmesh.training.replicas import replicas_of

_DUAL_COPIES = 8  # of all dual weights
_ACTIVATIONS = 4  # times what one pass keeps for its gradient: that, its gradients, and a layer's workspace
_AHEAD = 24 << 20  # bytes of what is computed for many rounds at once, and of temporary values
_KEPT = 3  # models that a finished run keeps besides those of its nodes: averages, the best one
_UNIT_COPIES = 3  # of the gradients of the units that are held at once: by layer, joined, and without those cut off
_NOISE_COPIES = 6  # in float64, of what is as long as a model: key stream, noise, sums
_WIDEST = 4  # times the largest activation: what an evaluation holds
_FRAGMENTED = 1.6  # times what is alive: memory that a process keeps, where blocks of many sizes leave gaps (measured)
_MARGIN = 1.2  # on copies that a toy's round holds
_ROWS = 6  # models of its own that a process holds: initial rows, modules, counters of random numbers
_MEASURED_FROM = 64 << 20  # bytes of models; below that, copies are not measured
_TOY_NODES, _TOY_NUMBERS = 16, 600_000  # more than what is computed for several rounds at once
_PROFILER_LOG = "KINETO_LOG_LEVEL"
_CPU = torch.device("cpu")
_USUAL = Options()
_SHARE = 0.9  # of the free memory that a run may use
_GIB = 2.0**30
_WHAT_HELPS = (
    "a round holds {:.0f} copies of the trained parameters of all nodes: train fewer parameters (parts.frozen, "
    "fm.models.LoRA), or choose an algorithm that holds fewer copies (ChocoSGD about 12, DSGD 9); or use "
    "smaller batches, fewer nodes, or several machines (fairmesh launch)"
)


class Footprint(NamedTuple):
    """An upper estimate of the bytes at the peak of a round."""

    fixed: int  # data, tables over all pairs of nodes, what is computed ahead
    per_replica: int
    description: str
    copies: float = 0.0  # of all models, at the peak of a round

    def of(self, replicas: int) -> int:
        return self.fixed + replicas * self.per_replica


def footprint(
    problem: Prepared, algorithm: Algorithm, options: Options = _USUAL, hosted: int | None = None
) -> Footprint:
    """Returns the memory that a run needs in one process.

    Args:
        problem: The problem.
        algorithm: The algorithm.
        options: Those of the run. Default: Options().
        hosted: How many nodes this process hosts; None for all. Default: None.
    """
    device, size = device_of(options.device), DTYPES[options.dtype].itemsize
    every, dim = problem.n, problem.flat_model.dim + problem.flat_model.own_dim
    n, at_once = hosted or every, problem.at_once(device)
    batch, copies = _batch_bytes(problem, size), _copies(algorithm, every, n * dim * size, at_once is None)
    models = int(copies * n * dim * size)
    passes = n * batch.pass_ if at_once is None else 0  # of all nodes at once, so for every replica
    fixed_passes = (at_once or 0) * batch.pass_ + batch.evaluation
    duals = _DUAL_COPIES * n * every * size if algorithm.keeps_node_rows() else 0
    units = _unit_bytes(problem, n, size, device)
    read_ahead = n * _streamed_bytes(problem, batch.samples, algorithm.oracle_calls())
    data = 0 if read_ahead else _data_bytes(problem, device, size)
    waiting = 0
    if options.compare_weights and device.type == "cpu":  # the run with fixed weights waits while this one trains
        waiting = ((n + _KEPT) * dim + (n * every if duals else 0)) * size
    shown = {
        "data": data if data > 0.01 * _GIB else 0,
        f"{n:,} nodes x {dim:,} parameters": models,
        "gradients of single units, and noise": units.fixed + units.per_replica,
        f"batches of {batch.samples}": passes + fixed_passes + n * batch.inputs + read_ahead,
        f"{n:,} x {every:,} weights": duals,
        "models with fixed weights, not if compare_weights = False": waiting,
    }
    gaps = _FRAGMENTED if malloc.libraries and device.type == "cpu" else 1.0
    frozen = sum(tensor.numel() for tensor in problem.flat_model.fixed()) * size
    return Footprint(
        int(data + frozen + n * every * size + gaps * (fixed_passes + units.fixed + _ROWS * 4 * dim) + _AHEAD),
        int(gaps * (models + passes + n * batch.inputs + duals + units.per_replica)) + read_ahead + waiting,
        ", ".join(f"{part} ({count / _GIB:.2f} GiB)" for part, count in shown.items() if count),
        copies,
    )


def _copies(algorithm: Algorithm, nodes: int, of_models: int, stacked: bool) -> float:
    """Returns how many copies of all models a round holds at its peak, given the bytes of one copy."""
    optimizer = algorithm.local_optimizer()
    copies = float(algorithm.copies_at_peak + (optimizer.copies_at_peak if optimizer else 0))
    if copies * of_models <= _MEASURED_FROM:
        return copies
    measured = _MARGIN * measured_copies(algorithm, nodes, stacked) or copies
    declared = "copies_at_peak" in vars(type(algorithm))  # by the class itself: fairmesh.testing checks it
    return min(copies, measured) if declared else measured  # with other settings, a class may hold fewer


def _data_bytes(problem: Prepared, device: torch.device, size: int) -> int:
    """Returns the bytes of copies of the data on the device, and of its numbers as floats of a size in bytes."""
    if home_of_data(problem, device).type != device.type:
        return 0
    sets = problem.train_sets
    apart = stays_apart([samples.inputs for samples in sets], device)  # then no copy is made
    sizes = [samples.sealed.size() if samples.sealed else (len(samples), samples.nbytes) for samples in sets]
    floats = sum(trees.numbers_per_sample(samples.inputs) * rows for samples, (rows, _) in zip(sets, sizes)) * size
    return (0 if apart else sum(count for _, count in sizes)) + (floats if floats <= AS_FLOATS_UP_TO else 0)


class _UnitBytes(NamedTuple):
    """The bytes that privacy takes: gradients of single units, and noise."""

    fixed: int = 0
    per_replica: int = 0


def _unit_bytes(problem: Prepared, nodes: int, size: int, device: torch.device) -> _UnitBytes:
    """Returns what a private round holds besides models and batches; nothing without privacy."""
    if problem.privacy is None:
        return _UnitBytes()
    shape, dim = _private_shape(problem), problem.flat_model.dim
    per_unit = unit_gradients(problem, problem.flat_model, shape.rows).numbers(nodes, dim)
    most = NUMBERS_AT_ONCE[device.type] // shape.rows  # of all replicas together, but one unit of each at least
    noise = _NOISE_COPIES * nodes * (dim + shape.most_units) * 8
    if shape.units * per_unit >= most:
        return _UnitBytes(_UNIT_COPIES * size * most, _UNIT_COPIES * size * per_unit + noise)
    return _UnitBytes(0, _UNIT_COPIES * size * shape.units * per_unit + noise)


class _PrivateShape(NamedTuple):
    """The static shape of a private round."""

    units: int  # of a draw
    rows: int  # of a unit
    most_units: int  # of a site


def _private_shape(problem: Prepared) -> _PrivateShape:
    sizes = [len(samples) if samples.sealed else units_of(samples) for samples in problem.train_sets]
    units = max(static_shape(size, problem.sampling.batch) for size in sizes)
    rows = rows_of_units(problem.train_sets, problem.privacy.rows_per_unit) if problem.privacy else 1
    return _PrivateShape(units, rows, max(sizes))


def _streamed_bytes(problem: Prepared, samples: int, calls: int) -> int:
    """Returns the bytes of one node's batches that are read from streams: that of the round, a copy, and those of the
    next rounds. 0 if all sets are in memory."""
    sets, sampling = problem.train_sets, problem.sampling
    ahead = [stream.source.prefetch if stream.source.workers else 0 for one in sets if (stream := one.stream)]
    if not ahead:
        return 0
    batches = (2 + max(ahead)) * calls * (1 if sampling.order == "full" else sampling.batches_per_step)
    return batches * samples * max(one.nbytes // len(one) for one in sets)


class _Batch(NamedTuple):
    """The bytes that one node's batch takes."""

    samples: int
    inputs: int  # of its inputs and what augmentation makes of them
    pass_: int  # of all that a pass keeps for its gradient, and of a layer's workspace
    evaluation: int  # of a pass over test samples, of all models together


def _batch_bytes(problem: Prepared, size: int) -> _Batch:
    """Runs one pass in training mode, with dropout and augmentation, to find out what it keeps, for numbers of a size
    in bytes."""
    train = max((problem.sites[i].train for i in problem.here), key=len)
    samples = len(train) if problem.sampling.order == "full" else problem.sampling.batch
    if problem.privacy is not None:
        shape = _private_shape(problem)
        samples = shape.units * shape.rows
    seen = train.seen
    few = torch.arange(min(samples, 8)) % len(seen)
    inputs, targets = (as_floats(trees.at(part, few), torch.float32) for part in (seen.inputs, seen.targets))
    if problem.augmenter is not None:
        inputs, targets = problem.augmenter.check(inputs, targets)
    row = problem.initial_whole_row(0).float().requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model, key = problem.flat_model.to(_CPU, torch.float32), torch.zeros((), dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        inputs, targets = augmented(problem.augmenter, inputs, targets, key)
        if isinstance(problem.loss, BoundModelLoss):
            outputs = problem.loss.of_batch(model, row, inputs, targets, key)
        else:
            outputs = model(row, inputs, key)
    for held in (row, *model.fixed()):  # of which there is one, whatever the batch
        kept.pop(held.untyped_storage().data_ptr(), None)
    for part in trees.leaves(inputs):
        kept[part.untyped_storage().data_ptr()] = part.nbytes
    unit = samples * size / 4 / len(few)
    activations = sum(kept.values()) + outputs.nbytes
    tested = sum(len(samples) for samples in problem.held_out("test")[0])
    at_once = min(tested, evaluated_at_once(1, trees.numbers_per_sample(inputs)))
    evaluation = int(_WIDEST * max(kept.values()) / len(few) * size / 4 * at_once)
    return _Batch(samples, int(2 * trees.nbytes(inputs) * unit), int(_ACTIVATIONS * activations * unit), evaluation)


def measured_copies(algorithm: Algorithm, nodes: int, stacked: bool = False) -> float:
    """Returns how many copies of all models a round holds at its peak, by one round of a toy; 0 if the algorithm cannot
    train the toy. Models that are evaluated all at once (`stacked`) are traced, which compares gradients of all."""
    try:
        return _measured_copies(algorithm, min(nodes, _TOY_NODES), stacked)
    except Exception:  # settings may fit only the real problem; its class says how many copies it holds then
        return 0.0


@functools.lru_cache(maxsize=32)
def _measured_copies(algorithm: Algorithm, nodes: int, stacked: bool) -> float:
    sites = [Site((torch.zeros(2, 100), torch.arange(2))) for _ in range(nodes)]
    outputs = max(200, _TOY_NUMBERS // (101 * nodes))
    at_once = "all" if stacked else 1
    problem = prepare(Problem(nn.Linear(100, outputs), sites, sampling=Sampling(batch=1), models_at_once=at_once))
    replicas = replicas_of([algorithm], [0], None, nodes)

    def two_rounds() -> Any:
        training = Training(problem, Ring(), replicas, Options(trace="auto" if stacked else "no"))
        state = training.advance(training.initial(), 0)
        return training.advance(state, 1)

    return peak_bytes(two_rounds)[0] / (nodes * problem.flat_model.dim * 4)


def peak_bytes(function: Callable[[], Any]) -> tuple[int, Any]:
    """Returns the most bytes of CPU tensors alive at once, over those alive before, as torch's allocator reports them,
    temporaries inside an operation included; and what the function returned."""
    level = os.environ.get(_PROFILER_LOG)
    os.environ[_PROFILER_LOG] = level or "99"  # the profiler would write to stderr when it starts
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            result = function()
    finally:
        if level is None:
            del os.environ[_PROFILER_LOG]
    recorded = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted((e for e in recorded if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        live += event.nbytes()  # type: ignore[attr-defined]
        peak = max(peak, live)
    return peak, result


def free_bytes(device: torch.device) -> float:
    """Returns how many bytes can still be allocated; infinity if the system does not say."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    group = Path("/sys/fs/cgroup")
    free = _entry(Path("/proc/meminfo"), "MemAvailable:") * 1024
    try:  # a container may allow less
        used = int((group / "memory.current").read_text()) - _entry(group / "memory.stat", "inactive_file", 0)
        return min(free, max(0, int((group / "memory.max").read_text()) - used))
    except (OSError, ValueError):
        return free


def _entry(path: Path, name: str, missing: float = math.inf) -> float:
    """Returns the number after a name in one of the system's tables."""
    try:
        rows = (line.split() for line in path.read_text().splitlines())
        return next(int(row[1]) for row in rows if row[0] == name)
    except (OSError, StopIteration, ValueError):
        return missing


def memory_of_run(problem: Prepared, algorithm: Algorithm, replicas: int, options: Options, network: Network) -> str:
    """Returns a sentence about the memory that replicas need at once. Refuses more than fit. Where they fit only if
    freed memory is returned to the system, the process keeps none of it from now on."""
    sharing = network.process_group.local_world_size
    need = partial(footprint, problem, algorithm, options, len(network.hosted))
    try:
        return memory_sentence(need(), replicas, options.memory_gib, network.device, sharing)
    except BadInput:
        if not malloc.libraries:
            raise
    malloc.give_back()
    return memory_sentence(need(), replicas, options.memory_gib, network.device, sharing)


def memory_sentence(need: Footprint, replicas: int, limit: float | None, device: torch.device, sharing: int = 1) -> str:
    """Returns a sentence about the memory that replicas need at once. Refuses more than fit.

    Args:
        need: What they need.
        replicas: How many there are.
        limit: How many GiB they may take; None for most of what is free.
        device: Where they train.
        sharing: How many processes share the machine's memory. Default: 1.
    """
    whole = need.of(replicas)
    usable = limit * _GIB if limit else free_bytes(device) * _SHARE / (sharing if device.type == "cpu" else 1)
    if whole <= usable:
        of_usable = f" of {usable / _GIB:.2f} GiB" if usable < math.inf else ""
        return f"memory: about {whole / _GIB:.2f} GiB{of_usable}"
    fit = int((usable - need.fixed) // need.per_replica)
    room = f"{usable / _GIB:.2f} GiB can be used" + (f" (memory_gib = {limit:g})" if limit else "")
    if fit < 1:
        raise BadInput(
            f"one replica needs about {need.of(1) / _GIB:.2f} GiB on {device} ({need.description}), but {room}; "
            f"{_WHAT_HELPS.format(need.copies)}"
        )
    raise BadInput(
        f"only {fit} of {replicas} replicas fit into memory at once: all need about {whole / _GIB:.2f} GiB on "
        f"{device}, but {room}; run {fit} at a time, by fewer seeds, splits, placements or values of the sweep"
    )
