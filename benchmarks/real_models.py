"""`python -m benchmarks models`: times rounds of networks of usual size, next to plain loops over nodes."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rounds import Setting, device_times, host_times, loop_of, most
from fairmesh.algorithms import ADGDA, Algorithm, TrackedADGDA
from fairmesh.algorithms.schedules import Geometric
from fairmesh.compression.compressors import Quantize
from fairmesh.numerics import malloc
from fairmesh.problems.models import Model
from fairmesh.problems.prepared import Prepared
from fairmesh.regularizers.builtin import ChiSquare
from fairmesh.topology.graphs import Ring
from fairmesh.training.cuda_graph import CapturedRounds
from fairmesh.training.loop import Training
from fairmesh.training.options import Options, device_of
from fairmesh.training.replicas import replicas_of


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
        )
        self.first_norm, self.second_norm = nn.GroupNorm(32, after), nn.GroupNorm(32, after)
        changes = stride != 1 or before != after
        self.skip = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(32, after))
            if changes
            else nn.Identity()
        )

    def forward(self, images: Tensor) -> Tensor:
        inside = self.second_norm(self.second(F.relu(self.first_norm(self.first(images)))))
        return F.relu(inside + self.skip(images))


@dataclass(frozen=True)
class ResNet18(Model):
    """ResNet-18 with GroupNorm: 11.2 million parameters."""

    def build(self, shape: torch.Size, outputs: int) -> nn.Module:
        stem = [nn.Conv2d(shape[0], 64, 7, 2, 3, bias=False), nn.GroupNorm(32, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        widths = [64, 64, 128, 256, 512]
        blocks = [
            block
            for before, after in itertools.pairwise(widths)
            for block in (_Block(before, after, 1 if before == after else 2), _Block(after, after, 1))
        ]
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, outputs))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        batch, count, width = tokens.shape
        parts = self.queries(self.before_attention(tokens)).view(batch, count, 3, self.heads, width // self.heads)
        attended = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4))
        tokens = tokens + self.mixed(attended.transpose(1, 2).reshape(batch, count, width))
        return tokens + self.inner(self.before_inner(tokens))


class _Transformer(nn.Module):
    def __init__(
        self, shape: torch.Size, outputs: int, width: int = 192, depth: int = 6, heads: int = 3, patch: int = 8
    ):
        super().__init__()
        self.patches = nn.Conv2d(shape[0], width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn(1, (shape[1] // patch) * (shape[2] // patch), width))
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(depth)), nn.LayerNorm(width))
        self.head = nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.layers(tokens).mean(dim=1))


@dataclass(frozen=True)
class VisionTransformer(Model):
    """A vision transformer of 6 layers of width 192: 2.7 million parameters."""

    def build(self, shape: torch.Size, outputs: int) -> nn.Module:
        return _Transformer(shape, outputs)


def _separable(before: int, after: int, stride: int) -> nn.Sequential:
    """A depthwise and a pointwise convolution, each normalized."""
    return nn.Sequential(
        nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False), nn.GroupNorm(8, before), nn.Hardswish(),
        nn.Conv2d(before, after, 1, bias=False), nn.GroupNorm(8, after), nn.Hardswish(),
    )  # fmt: skip


@dataclass(frozen=True)
class MobileNet(Model):
    """Eleven depthwise separable convolutions, as in MobileNet, with GroupNorm: 1.1 million parameters."""

    def build(self, shape: torch.Size, outputs: int) -> nn.Module:
        stem = [nn.Conv2d(shape[0], 32, 3, 2, 1, bias=False), nn.GroupNorm(8, 32), nn.Hardswish()]
        widths = [32, 64, 128, 128, 256, 256, *[384] * 5, 512]
        blocks = [
            _separable(before, after, 2 if after in (128, 256) and before != after else 1)
            for before, after in itertools.pairwise(widths)
        ]
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, outputs))


class _Recurrent(nn.Module):
    def __init__(self, features: int, width: int, outputs: int):
        super().__init__()
        self.lstm, self.head = nn.LSTM(features, width, 2, batch_first=True), nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        rows = images.transpose(1, 2).flatten(2)  # (batch, rows, numbers in a row)
        return self.head(self.lstm(rows)[0][:, -1])


@dataclass(frozen=True)
class LSTM(Model):
    """Two LSTM layers of width 256 that read an image row by row: 0.9 million parameters."""

    def build(self, shape: torch.Size, outputs: int) -> nn.Module:
        return _Recurrent(shape[0] * shape[2], 256, outputs)


SETTINGS = {
    "mobilenet-8": Setting(8, 64, (3, 32, 32), 10, MobileNet(), 16, primal_step=0.05),
    "lstm-8": Setting(8, 64, (3, 32, 32), 10, LSTM(), 16, primal_step=0.05),
    "resnet18-8": Setting(8, 64, (3, 32, 32), 10, ResNet18(), 16, primal_step=0.05),
    "vit-8": Setting(8, 64, (3, 32, 32), 10, VisionTransformer(), 16, primal_step=0.05),
    "resnet18-10": Setting(10, 320, (3, 64, 64), 10, ResNet18(), 32, primal_step=0.05),
    "vit-10": Setting(10, 320, (3, 64, 64), 10, VisionTransformer(), 32, primal_step=0.05),
}
ON = {"cpu": ["resnet18-8", "vit-8", "mobilenet-8", "lstm-8"], "cuda": ["resnet18-10", "vit-10"]}


@dataclass(frozen=True)
class RealTiming:
    """A round of one replica.

    Args:
        case: The model and the number of nodes.
        algorithm: The algorithm.
        precision: That of the gradients.
        first_round_s: Seconds from the start of training to the end of round 0, compilation included.
        ms_per_round: The median over rounds.
        ms_low: The end of the fastest tenth.
        ms_high: The beginning of the slowest tenth.
        copies: The memory at the peak, as a multiple of all models; None on a CPU.
        over_loop: The time as a multiple of that of a plain loop over nodes; None if it was not run.
    """

    case: str
    algorithm: str
    precision: str
    first_round_s: float
    ms_per_round: float
    ms_low: float
    ms_high: float
    copies: float | None
    over_loop: float | None


def algorithms(setting: Setting) -> dict[str, Algorithm]:
    """Returns the algorithms that are timed."""
    step = Geometric(setting.primal_step, 0.998)
    return {
        "ad-gda": ADGDA(step, setting.dual_step, 0.1, Quantize(4), ChiSquare(0.01)),
        "tracked-ad-gda": TrackedADGDA(),
    }


@malloc.reused()
def timings(
    device: str, names: list[str], precisions: list[str], methods: list[str], fuse: bool = False
) -> Iterator[RealTiming]:
    """Yields the timing of every case with every algorithm and precision."""
    where = device_of(device)
    for name in names or ON[where.type]:
        setting = SETTINGS[name]
        problem = setting.problem()
        for precision in precisions or ["float32"]:
            for method in methods or list(algorithms(setting)):
                yield _timing(name, problem, setting, method, precision, where, fuse)


def _timing(
    name: str, problem: Prepared, setting: Setting, method: str, precision: Any, device: torch.device, fuse: bool
) -> RealTiming:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    every = replicas_of([algorithms(setting)[method]], [0], None, problem.n)
    training = Training(problem, Ring(), every, Options(device=str(device), precision=precision))
    if on_gpu:
        step = CapturedRounds(training.after_round, training.initial(), 0, device, fuse).advance
        step()
        torch.cuda.synchronize()
    else:
        state, done = training.initial(), 0

        def step() -> None:
            nonlocal state, done
            state, done = training.advance(state, done), done + 1

        step()
    first = time.perf_counter() - started
    if on_gpu:
        copies = torch.cuda.max_memory_allocated(device) / (4 * problem.n * problem.flat_model.dim)
        times, ratio = device_times(step, 60), None
    else:
        copies, loop = None, loop_of(problem, setting, device) if method == "ad-gda" else None
        times, *others = host_times([step, *([loop] if loop else [])], 1, 5, device)
        ratio = sorted(a / b for a, b in zip(times, others[0]))[len(times) // 2] if others else None
    ordered = sorted(times)
    low, high = most(times)
    return RealTiming(name, method, precision, first, ordered[len(ordered) // 2], low, high, copies, ratio)
