"""`python -m benchmarks memory`: the memory that a run announces, next to what it takes, on a CPU."""

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks.real_models import SETTINGS
from benchmarks.rounds import Setting
from fairmesh.algorithms import ADGDA, Algorithm, ChocoSGD, TrackedADGDA
from fairmesh.compression.compressors import Quantize, TopK
from fairmesh.numerics import malloc
from fairmesh.problems.models import Model
from fairmesh.regularizers.builtin import ChiSquare
from fairmesh.topology.graphs import Ring
from fairmesh.training.train import train

_GIB = 2.0**30
_ROUNDS = 3


@dataclass(frozen=True)
class _WithDropout(Model):
    """A vision transformer with dropout of 0.1 before its head and after every layer."""

    model: Model

    def build(self, shape: torch.Size, outputs: int) -> nn.Module:
        made = self.model.build(shape, outputs)
        layers = [part for layer in made.layers for part in (layer, nn.Dropout(0.1))]  # type: ignore[union-attr]
        made.layers = nn.Sequential(*layers)
        return made


def cases() -> dict[str, tuple[Setting, Algorithm]]:
    """Returns the settings and algorithms by name. They had no part in choosing the estimate's constants."""
    resnet, vit = SETTINGS["resnet18-8"], SETTINGS["vit-8"]
    quantized = ADGDA(0.05, 0.01, 0.1, Quantize(4), ChiSquare(0.01))
    return {
        "resnet18-8 ad-gda": (resnet, quantized),
        "resnet18-8 tracked-ad-gda": (resnet, TrackedADGDA()),
        "resnet18-8 choco-sgd top-1 %": (resnet, ChocoSGD(0.05, 0.1, TopK(0.01))),
        "vit-8 with dropout ad-gda": (vit._replace(model=_WithDropout(vit.model)), quantized),
        "vit-8 tracked-ad-gda": (vit, TrackedADGDA()),
    }


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a run of three rounds.

    Args:
        case: The model, the number of nodes and the algorithm.
        tuned: Whether the process kept freed memory, as `fairmesh run` does.
        announced_gib: What the run announced before it began.
        measured_gib: By how much the process grew over what it took with the problem in memory.
    """

    case: str
    tuned: bool
    announced_gib: float
    measured_gib: float

    @property
    def ratio(self) -> float:
        return self.announced_gib / self.measured_gib


def measured(case: str, tuned: bool) -> MemoryUse:
    """Trains in this process, which should do nothing else."""
    setting, algorithm = cases()[case]
    problem, said = setting.problem(), []
    before = _resident()
    with malloc.reused() if tuned else nullcontext():
        train(
            problem, Ring(), algorithm, rounds=_ROUNDS, measure_every=_ROUNDS, compare_weights=False,
            announce=said.append,
        )  # fmt: skip
    (announced,) = (float(text.split("about ")[1].split(" GiB")[0]) for text in said if text.startswith("memory"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return MemoryUse(case, tuned, announced, (peak - before) / _GIB)


def uses(names: list[str]) -> Iterator[MemoryUse]:
    """Yields each case, tuned and not, each measured in a process of its own."""
    for case in names or cases():
        for tuned in (False, True):
            call = f"json.dumps(vars(measured({case!r}, {tuned})))"
            program = f"import json; from benchmarks.memory import measured; print({call})"
            done = subprocess.run(
                [sys.executable, "-c", program],
                check=True,
                capture_output=True,
                text=True,
                cwd=Path(__file__).parents[1],
            )
            yield MemoryUse(**json.loads(done.stdout.splitlines()[-1]))


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
