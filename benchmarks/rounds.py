"""`python -m benchmarks rounds`: times a simulated round, next to the machine's floor and a plain per-node loop."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.floor import floor_ms, rates
from benchmarks.per_node_loop import PerNodeLoop
from fairmesh.algorithms import ADGDA
from fairmesh.algorithms.schedules import Geometric
from fairmesh.compression.compressors import Quantize
from fairmesh.data.site import Site
from fairmesh.errors import BadInput
from fairmesh.numerics import malloc
from fairmesh.problems.batches import Sampling
from fairmesh.problems.models import FullyConnected, Logistic, Model, PaperCNN
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.problem import Problem, prepare
from fairmesh.regularizers.builtin import ChiSquare
from fairmesh.topology.graphs import Ring
from fairmesh.training.cuda_graph import CapturedRounds
from fairmesh.training.loop import Training
from fairmesh.training.options import Options, device_of
from fairmesh.training.replicas import replicas_of

_CONSENSUS_STEP, _BITS = 0.1, 4
_STATE_COPIES = 8  # a round touches about this many copies of all models
_SECONDS = 6.0  # spent on a case on a CPU, and again on its loop


class Setting(NamedTuple):
    """A case: nodes on a ring, images of a dataset's shape, one of the paper's models."""

    nodes: int
    samples: int  # per node
    shape: tuple[int, ...]
    classes: int
    model: Model
    batch: int
    primal_step: float = 1.0
    dual_step: float = 0.01

    def problem(self) -> Prepared:
        """Returns synthetic images: each class is a pattern in noise. The time does not depend on what is learned."""
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, self.classes, (self.nodes, self.samples), generator=generator)
        patterns = torch.randint(0, 200, (self.classes, *self.shape), generator=generator, dtype=torch.uint8)
        sites = []
        for held in labels:
            noise = torch.randint(0, 56, (self.samples, *self.shape), generator=generator, dtype=torch.uint8)
            sites.append(Site((patterns[held] + noise, held)))
        torch.manual_seed(0)
        module = self.model.build(torch.Size(self.shape), self.classes)
        return prepare(Problem(module, sites, sampling=Sampling(batch=self.batch)))

    def algorithm(self) -> ADGDA:
        step = Geometric(self.primal_step, 0.998)
        return ADGDA(step, self.dual_step, _CONSENSUS_STEP, Quantize(_BITS), ChiSquare(0.01))


SETTINGS = {
    "logistic-10": Setting(10, 6000, (1, 28, 28), 10, Logistic(), 50),
    "fc-50": Setting(50, 1200, (1, 28, 28), 10, FullyConnected(), 50),
    "cifar-cnn-20": Setting(20, 2500, (3, 32, 32), 10, PaperCNN(), 50, primal_step=0.1),
    "coos7-cnn-10": Setting(10, 1000, (2, 64, 64), 7, PaperCNN(), 32, primal_step=0.1),
}
LARGE = {
    "logistic-1000": Setting(1000, 60, (1, 28, 28), 10, Logistic(), 16, dual_step=1e-3),
    "logistic-10000": Setting(10_000, 60, (1, 28, 28), 10, Logistic(), 16, dual_step=1e-4),
}


@dataclass(frozen=True)
class Timing:
    """The time of one round of all replicas, in milliseconds: its median, and the range of the middle 80 %."""

    case: str
    replicas: int
    ms_per_round: float
    ms_low: float
    ms_high: float
    ms_per_replica: float
    floor_ms: float
    over_floor: float
    loop_ms: float | None  # one replica; None for large cases and for several replicas
    speedup_over_loop: float | None  # per replica


def _setting(name: str) -> Setting:
    known = SETTINGS | LARGE
    if name not in known:
        raise BadInput(f"there is no case {name!r}; choose from {', '.join(known)}")
    return known[name]


def timings(device: str, names: list[str] | None = None, replicas: list[int] | None = None) -> Iterator[Timing]:
    """Yields the timing of each case with each number of replicas."""
    for name in names or SETTINGS:
        problem = _setting(name).problem()
        for count in replicas or ([1, 20] if device_of(device).type == "cuda" else [1, 4]):
            yield timing(name, problem, count, device_of(device))


@malloc.reused()
def timing(name: str, problem: Prepared, replicas: int, device: torch.device) -> Timing:
    """Returns the timing of one case. On a CPU, stack and loop take turns, so that other load slows both alike."""
    setting = _setting(name)
    step = stack(problem, setting, replicas, device)
    loop = loop_of(problem, setting, device) if replicas == 1 and name in SETTINGS else None
    if device.type == "cuda":
        times = device_times(step, 300)
        loops = host_times([loop], 1, 20, device)[0] if loop else []
        ratio = statistics.median(loops) / statistics.median(times) if loops else None
    else:
        times, *others = host_times([step, *([loop] if loop else [])], *_blocks(step, loop), device)
        loops = others[0] if others else []
        ratio = statistics.median(slow / fast for slow, fast in zip(loops, times)) if loops else None
    measured = rates(device, _STATE_COPIES * replicas * problem.n * problem.flat_model.dim * 4)
    floor = floor_ms(problem, 2, replicas, measured)
    middle, (low, high) = statistics.median(times), most(times)
    return Timing(
        name, replicas, middle, low, high, middle / replicas, floor, middle / floor,
        statistics.median(loops) if loops else None, ratio,
    )  # fmt: skip


def stack(problem: Prepared, setting: Setting, replicas: int, device: torch.device) -> Callable[[], None]:
    """Returns a function that runs one more round of all replicas."""
    every = replicas_of([setting.algorithm()], range(replicas), None, problem.n)
    training = Training(problem, Ring(), every, Options(device=str(device)))
    if device.type == "cuda":
        return CapturedRounds(training.after_round, training.initial(), 0, device).advance
    state, done = training.initial(), 0

    def step() -> None:
        nonlocal state, done
        state, done = training.advance(state, done), done + 1

    return step


def loop_of(problem: Prepared, setting: Setting, device: torch.device) -> Callable[[], None]:
    """Returns a function that runs one more round as a plain per-node loop."""
    matrix = Ring().build(problem.n)[0].matrix
    around = [{int(j): float(matrix[i, j]) for j in matrix[[i]].indices} for i in range(problem.n)]
    data = [(site.train.inputs.to(device), site.train.targets.to(device)) for site in problem.sites]
    module: Any = problem.initial.model
    loop = PerNodeLoop(
        module, data, around, batch=setting.batch, bits=_BITS, primal_step=setting.primal_step,
        consensus_step=_CONSENSUS_STEP, dual_step=setting.dual_step,
    )  # fmt: skip
    return loop.step


def device_times(step: Callable[[], None], rounds: int) -> list[float]:
    """Returns the milliseconds between GPU events around each round."""
    for _ in range(20):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def _blocks(step: Callable[[], None], loop: Callable[[], None] | None) -> tuple[int, int]:
    """Returns the rounds per block and the number of blocks that fit into the time allowed."""
    start = time.perf_counter()
    for function in (step, loop):
        if function:
            function()
            function()
    each = (time.perf_counter() - start) / 2
    rounds = max(1, min(100, round(1.0 / each)))  # many, because the first ones after a switch find cold caches
    return rounds, max(5, min(40, round(2 * _SECONDS / (each * rounds))))


def host_times(
    functions: list[Callable[[], None]], rounds: int, blocks: int, device: torch.device
) -> list[list[float]]:
    """Returns each function's milliseconds per round, in alternating blocks. The first block of each is warm-up."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(blocks + 1):
        for function, found in zip(functions, times):
            start = time.perf_counter()
            for _ in range(rounds):
                function()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found.append(1e3 * (time.perf_counter() - start) / rounds)
    return [found[1:] for found in times]


def most(times: list[float]) -> tuple[float, float]:
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return ordered[tenth], ordered[-1 - tenth]


def profile(device: str, name: str, replicas: int, rounds: int = 10) -> list[tuple[str, float, float]]:
    """Returns operations or kernels with their milliseconds and calls per round, the longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    where = device_of(device)
    setting = _setting(name)
    step = stack(setting.problem(), setting, replicas, where)
    for _ in range(5):
        step()
    on_gpu = where.type == "cuda"
    with watch(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(rounds):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    rows = [
        (e.key, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e3 / rounds, e.count / rounds)
        for e in profiler.key_averages()
    ]
    return sorted(rows, key=lambda row: -row[1])
