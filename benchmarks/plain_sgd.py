"""`python -m benchmarks loops`: CPU time of DSGD's rounds, next to the same work as a plain loop over nodes."""

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks import real_models, rounds
from benchmarks.rounds import Setting
from fairmesh.algorithms import DSGD
from fairmesh.errors import BadInput
from fairmesh.numerics import malloc
from fairmesh.problems.prepared import Prepared
from fairmesh.topology.graphs import Ring
from fairmesh.training.loop import Training, TrainingState
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of

_STEP = 0.05
_PAIRS, _SECONDS = (5, 40), 12.0  # rounds of each, at least and at most, and the time to stay within


def cases() -> dict[str, Setting]:
    """Returns every model of the benchmarks that is timed on a CPU."""
    return rounds.SETTINGS | {name: real_models.SETTINGS[name] for name in real_models.ON["cpu"]}


class PlainLoop:
    """DSGD over a ring as one writes it in PyTorch: a module and an optimizer per node, whose parameters are views of
    one stack of models, and a product with W."""

    def __init__(self, module: nn.Module, data: list[tuple[Tensor, Tensor]], batch: int):
        self._models = [copy.deepcopy(module) for _ in data]
        self._optimizers = [torch.optim.SGD(model.parameters(), lr=_STEP) for model in self._models]
        self._stack = torch.stack([parameters_to_vector(model.parameters()).detach() for model in self._models])
        for model, row in zip(self._models, self._stack):
            vector_to_parameters(row, model.parameters())
        matrix = Ring().build(len(data))[0].matrix
        self._matrix = torch.tensor(matrix.toarray(), dtype=torch.float32)
        self._data, self._batch = data, batch

    def average(self) -> Tensor:
        """Returns the mean of all models, as one row."""
        return self._stack.mean(dim=0)

    def step(self) -> None:
        """Runs one round."""
        for model, optimizer, (inputs, targets) in zip(self._models, self._optimizers, self._data):
            chosen = torch.randint(len(targets), (self._batch,))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[chosen].float() / 255), targets[chosen]).backward()
        self._stack.copy_(self._matrix @ self._stack)
        for optimizer in self._optimizers:
            optimizer.step()


@dataclass(frozen=True)
class LoopTiming:
    """A round of DSGD on one thread of a CPU, in CPU time.

    Args:
        case: The model and the number of nodes.
        at_once: How many models are evaluated at once.
        tuned: Whether freed memory stays in the process, for both.
        problem_s: Seconds to make the problem, with its checks.
        first_round_s: Seconds from then to the end of round 0.
        ms_per_round: The median over rounds.
        loop_ms: That of the plain loop, whose rounds take turns with these.
        ratio: The median over pairs of rounds of this time over the loop's.
    """

    case: str
    at_once: str
    tuned: bool
    problem_s: float
    first_round_s: float
    ms_per_round: float
    loop_ms: float
    ratio: float


def timings(names: list[str], tuned: bool) -> Iterator[LoopTiming]:
    """Yields the timing of each case, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names or cases():
            if name not in cases():
                raise BadInput(f"there is no case {name!r}; choose from {', '.join(cases())}")
            with malloc.reused() if tuned else nullcontext():
                yield _timing(name, cases()[name], tuned)
    finally:
        torch.set_num_threads(threads)


def _timing(name: str, setting: Setting, tuned: bool) -> LoopTiming:
    made: list[Prepared] = []
    making = _seconds(lambda: made.append(setting.problem()))
    (problem,), every = made, replicas_of([DSGD(_STEP)], [0], None, setting.nodes)
    run: list[tuple[Training, TrainingState]] = []

    def begin() -> None:
        training = Training(problem, Ring(), every, Options())
        run.append((training, training.advance(training.initial(), 0)))

    first, done = _seconds(begin), 1

    def step() -> None:
        nonlocal done
        training, state = run.pop()
        run.append((training, training.advance(state, done)))
        done += 1

    data = [(site.train.inputs, site.train.targets) for site in problem.sites]
    loop = PlainLoop(problem.initial.model, data, setting.batch)  # type: ignore[arg-type]

    def pair() -> tuple[float, float]:
        return _seconds(step), _seconds(loop.step)

    pair()  # warm-up
    least, most = _PAIRS
    pairs = [pair() for _ in range(max(least, min(most, int(_SECONDS / sum(pair())))))]
    mine, its = (1e3 * statistics.median(times) for times in zip(*pairs))
    at_once = problem.at_once(torch.device("cpu"))
    return LoopTiming(
        name, "all" if at_once is None else str(at_once), tuned, making, first, mine, its,
        statistics.median(a / b for a, b in pairs),
    )  # fmt: skip


def _seconds(function: Callable[[], None]) -> float:
    """Returns the CPU time of a call."""
    start = time.process_time()
    function()
    return time.process_time() - start
