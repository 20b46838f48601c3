"""The least time that a round can take on this machine.

The floor divides the bytes and operations that the mathematics of AD-GDA with a quantizer needs by speeds measured in
the same run. It does not depend on how the stack implements the round. A round is a chain of phases, each of which
needs the one before. Within a phase, moving and computing overlap, so the phase takes the longer of the two. Phases
follow each other, so their times add up.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from fairmesh.problems.problem import Problem
from fairmesh.problems.row_loss import as_floats

_FLOAT = 4  # bytes


class Phase(NamedTuple):
    """The work of one phase, for all nodes of one replica."""

    name: str
    bytes: float
    products: float = 0.0  # floating-point operations of matrix products and convolutions
    operations: float = 0.0  # elementwise


class Rates(NamedTuple):
    """What this machine does per second."""

    bytes: float  # read and written when copying a buffer as large as the state
    products: float  # operations of a large float32 matrix product
    operations: float  # elementwise, in place, on numbers in a cache; unlimited on a GPU

    def seconds(self, phase: Phase) -> float:
        """Returns the least time that a phase can take."""
        computing = phase.products / self.products + phase.operations / self.operations
        return max(phase.bytes / self.bytes, computing)


def phases(problem: Problem, degree: int) -> list[Phase]:
    """Returns the phases of a round of one replica."""
    nodes, dim = problem.n, problem.flat_model.dim
    train = problem.sites[0].train
    batch = problem.sampling.batch
    values = nodes * batch * train.inputs[0].numel()
    stored = train.inputs.element_size()
    numbers = nodes * dim
    weights = nodes * nodes
    return [
        # read as stored, written as floats; gathered, converted, scaled
        Phase("batch", values * (stored + _FLOAT), operations=3 * values),
        # inputs read forward and for the weights' gradient, models read, gradients written
        Phase("losses and gradients", 2 * _FLOAT * values + 2 * _FLOAT * numbers, products=nodes * _products(problem)),
        # weights read and written twice: a step with its regularizer, sorted, projected
        Phase("dual step", 4 * _FLOAT * weights, operations=weights * (12 + math.log2(max(2, nodes)))),
        # models, gradients, public and mixed copies read; models and differences written; norms summed
        Phase("descent and gossip", 6 * _FLOAT * numbers, operations=7 * numbers),
        # differences read, levels written; a 32-bit hash of 10 operations for two numbers, a conversion, and scaling,
        # adding, rounding, limiting
        Phase("compression", 2 * _FLOAT * numbers, operations=10 * numbers),
        # levels, public and mixed copies read, both copies written; decoded, added, mixed with every neighbour
        Phase("exchange", 5 * _FLOAT * numbers, operations=(2 + 2 * (degree + 1)) * numbers),
        # levels read once more, converted, counted
        Phase("bytes", _FLOAT * numbers, operations=3 * numbers),
        # models read for the mean over nodes
        Phase("time average", _FLOAT * numbers, operations=numbers),
    ]


def _products(problem: Problem) -> float:
    """Returns the floating-point operations of one node's forward and backward pass."""
    train, batch = problem.sites[0].train, problem.sampling.batch
    inputs = as_floats(train.inputs[torch.arange(batch) % len(train)], torch.float32)
    targets = train.targets[torch.arange(batch) % len(train)]
    row = problem.initial_row(0).float().requires_grad_()
    model = problem.flat_model.to(torch.device("cpu"), torch.float32)
    with FlopCounterMode(display=False) as counter:
        problem.loss(model(row, inputs), targets).backward()
    return float(counter.get_total_flops())


def rates(device: torch.device, state_bytes: int) -> Rates:
    """Measures this machine."""
    large = device.type == "cuda"
    size = max(1 << 28 if large else 1 << 20, state_bytes) // 8
    source, target = torch.rand(size, device=device), torch.empty(size, device=device)
    moved = 8 * size / _seconds(lambda: target.copy_(source), device)
    side = 8192 if large else 1024
    left, right = torch.rand(side, side, device=device), torch.rand(side, side, device=device)
    multiplied = 2 * side**3 / _seconds(lambda: left @ right, device)
    if large:
        return Rates(moved, multiplied, math.inf)
    done = 0.0
    for count in (1 << 16, 1 << 17, 1 << 18, 1 << 19):
        numbers = torch.rand(count)
        done = max(done, count / _seconds(lambda n=numbers: n.mul_(1.0), device))
    return Rates(moved, multiplied, done)


def _seconds(function: Callable[[], Any], device: torch.device, repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[3:])[(repeats - 3) // 2]


def floor_ms(problem: Problem, degree: int, replicas: int, measured: Rates) -> float:
    """Returns the floor of one round of all replicas."""
    return 1e3 * replicas * sum(measured.seconds(phase) for phase in phases(problem, degree))
