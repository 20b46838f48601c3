"""Estimates how much memory a run needs and how much is free, before anything large is allocated."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.base import Algorithm
from fairmesh.errors import BadInput
from fairmesh.problems.losses import as_floats
from fairmesh.problems.oracle import AS_FLOATS_UP_TO
from fairmesh.problems.problem import Problem

_DUAL_COPIES = 8  # of all dual weights
_ACTIVATIONS = 4  # times what one pass keeps for its gradient: that, its gradients, and a layer's workspace
_AHEAD = 24 << 20  # bytes of what is computed for many rounds at once, and of temporary values
_KEPT = 7  # twelfths of its models and duals: three copies and an average, twice while they are merged
_SHARE = 0.9  # of the free memory that a run may use
_GIB = 2.0**30


class Footprint(NamedTuple):
    """An upper estimate of the bytes at the peak of a round."""

    fixed: int  # data, tables over all pairs of nodes, what is computed ahead
    per_replica: int
    description: str
    kept: int = 0  # in main memory, per replica of a finished portion, until all are merged

    def of(self, replicas: int) -> int:
        return self.fixed + replicas * self.per_replica


def footprint(
    problem: Problem, algorithm: Algorithm, dtype: torch.dtype, data_counts: bool, hosted: int | None = None
) -> Footprint:
    """Returns the footprint of a run.

    Args:
        problem: The problem.
        algorithm: The algorithm.
        dtype: Of models and duals.
        data_counts: Whether a copy of the data is in the same memory.
        hosted: How many nodes this process hosts; None for all.
    """
    every, dim = problem.n, problem.flat_model.dim
    n = every if hosted is None else hosted
    batch, samples = _batch_bytes(problem, dtype)
    models = algorithm.copies_at_peak * n * dim * dtype.itemsize
    duals = _DUAL_COPIES * n * every * dtype.itemsize if algorithm.keeps_node_rows() else 0
    held = [split.sites[i] for split in problem.every_split for i in problem.here]
    data = sum(s.train.inputs.nbytes + s.train.targets.nbytes for s in held) if data_counts else 0
    floats = sum(s.train.inputs.numel() for s in held) * dtype.itemsize
    data += floats if data_counts and floats <= AS_FLOATS_UP_TO else 0
    description = (f"data ({data / _GIB:.2f} GiB), " if data > 0.01 * _GIB else "") + (
        f"{n:,} nodes x {dim:,} parameters ({models / _GIB:.2f} GiB), batches of {samples} ({n * batch / _GIB:.2f} GiB)"
        + (f", {n:,} x {every:,} weights ({duals / _GIB:.2f} GiB)" if duals else "")
    )
    return Footprint(
        data + n * every * dtype.itemsize + _AHEAD,
        models + n * batch + duals,
        description,
        _KEPT * (models + duals) // 12,
    )


def _batch_bytes(problem: Problem, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the bytes that a node's batch needs with all that a pass keeps for its gradient, and its samples. Runs
    one pass to find out."""
    train = max((problem.sites[i].train for i in problem.here), key=len)
    samples = len(train) if problem.sampling.order == "full" else problem.sampling.batch
    inputs = as_floats(train.inputs[torch.arange(min(samples, 8)) % len(train)], torch.float32)
    row = problem.initial_row(0).float().requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model = problem.flat_model.to(torch.device("cpu"), torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(row, inputs)
    kept.pop(row.untyped_storage().data_ptr(), None)
    kept[inputs.untyped_storage().data_ptr()] = inputs.nbytes
    a_sample = (sum(kept.values()) + outputs.nbytes) / len(inputs)
    return int(_ACTIVATIONS * a_sample * samples * dtype.itemsize / 4), samples


def free_bytes(device: torch.device) -> int | None:
    """Returns how many bytes can still be allocated, or None if the system does not say."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    try:  # a container may allow less
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        used -= next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)  # can be dropped
        return min(free, max(0, int((group / "memory.max").read_text()) - used))
    except (OSError, ValueError):
        return free


def replicas_that_fit(
    need: Footprint, replicas: int, limit: float | None, device: torch.device, sharing: int = 1
) -> tuple[int, str]:
    """Returns how many replicas can run at once if `sharing` processes share the machine's memory, and a sentence about
    it. Refuses a run of which not even one replica fits."""
    free = free_bytes(device)
    share = _SHARE / (sharing if device.type == "cpu" else 1)
    usable = limit * _GIB if limit is not None else None if free is None else share * free
    whole = need.of(replicas)
    if usable is None:
        return replicas, f"memory: about {whole / _GIB:.2f} GiB"
    fit, waiting = min(replicas, int((usable - need.fixed) // need.per_replica)), 0
    if fit < replicas and device.type == "cpu":  # finished portions wait in the same memory
        waiting = replicas * need.kept
        fit = int((usable - need.fixed - waiting) // need.per_replica)
    if fit < 1:
        there = f"{usable / _GIB:.2f} GiB can be used" + ("" if limit is None else f" (memory_gib = {limit:g})")
        raise BadInput(
            f"one replica needs about {need.of(1) / _GIB:.2f} GiB on {device} ({need.description})"
            + (f" and the results of {replicas} replicas take {waiting / _GIB:.2f} GiB" if waiting else "")
            + f", but {there}; use fewer nodes or replicas, a smaller model or batch, or a machine with more memory"
        )
    text = f"memory: about {need.of(fit) / _GIB:.2f} GiB of {usable / _GIB:.2f} GiB"
    return fit, text if fit == replicas else f"{text}; {replicas} replicas run {fit} at a time"
