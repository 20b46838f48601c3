"""Step sizes as functions of the round, and those that Theorems 1 and 2 of the AD-GDA paper prescribe."""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairmesh.config.tables import register
from fairmesh.errors import BadInput


class Schedule(ABC):
    """A step size for every round. Fields may hold one value per replica, shaped (replicas, 1, 1)."""

    @abstractmethod
    def at(self, round_index: Tensor) -> Tensor:
        """The step sizes of rounds in a tensor of any shape, in float64."""

    @staticmethod
    def shorthand(value: float) -> "Schedule":
        """A bare number is a constant step."""
        return Constant(float(value))


def as_schedule(value: "Schedule | float") -> "Schedule":
    return value if isinstance(value, Schedule) else Constant(float(value))


def with_run_length(thing: Any, rounds: int) -> Any:
    """The same settings with every schedule that has no end of its own ending after so many rounds."""
    if isinstance(thing, Linear) and thing.rounds is None:
        return dataclasses.replace(thing, rounds=rounds)
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        return thing
    inner = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    changed = {name: new for name, old in inner.items() if (new := with_run_length(old, rounds)) is not old}
    return dataclasses.replace(thing, **changed) if changed else thing


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise BadInput(message)


def _check_start(start: float, what: str = "step size") -> None:
    _check(math.isfinite(start) and start >= 0, f"{what} must be a finite number >= 0, got {start}")


@dataclass(frozen=True)
class Constant(Schedule):
    """The same step size in every round."""

    value: float

    def __post_init__(self):
        _check_start(self.value)

    def at(self, round_index: Tensor) -> Tensor:
        return self.value + torch.zeros_like(round_index, dtype=torch.float64)


@dataclass(frozen=True)
class Geometric(Schedule):
    """start * ratio^t: the paper's schedule (its r^-t is a misprint: steps shrink)."""

    start: float
    ratio: float

    def __post_init__(self):
        _check_start(self.start)
        _check(0 < self.ratio <= 1, f"ratio must lie in (0, 1], got {self.ratio}")

    def at(self, round_index: Tensor) -> Tensor:
        return self.start * self.ratio ** round_index.double()


@dataclass(frozen=True)
class Linear(Schedule):
    """start * (1 - t / rounds): to zero at the end of the run, which `rounds` is where it is not given."""

    start: float
    rounds: int | None = None

    def __post_init__(self):
        _check_start(self.start)
        _check(
            self.rounds is None or self.rounds >= 1,
            f"rounds must be >= 1, got {self.rounds}; leave it out to end with the run",
        )

    def at(self, round_index: Tensor) -> Tensor:
        return self.start * self._left(round_index)

    def _left(self, round_index: Tensor) -> Tensor:
        """The share of the run that is left."""
        if self.rounds is None:
            return torch.ones_like(round_index, dtype=torch.float64)
        return (1.0 - round_index.double() / self.rounds).clamp(min=0.0)


@dataclass(frozen=True)
class Polynomial(Linear):
    """start * (1 - t / rounds)^power: to zero at the end of the run as well, with more rounds at small steps."""

    power: float = 2.0

    def __post_init__(self):
        super().__post_init__()
        good = self.power > 0 and math.isfinite(self.power)
        _check(good, f"power must be a finite number > 0, got {self.power}; 1 is a straight line")

    def at(self, round_index: Tensor) -> Tensor:
        return self.start * self._left(round_index) ** self.power


@dataclass(frozen=True)
class Staircase(Schedule):
    """start * ratio^floor(t / every)."""

    start: float
    ratio: float
    every: int

    def __post_init__(self):
        _check_start(self.start)
        _check(0 < self.ratio <= 1, f"ratio must lie in (0, 1], got {self.ratio}")
        _check(self.every >= 1, f"every must be a number of rounds >= 1, got {self.every}")

    def at(self, round_index: Tensor) -> Tensor:
        return self.start * self.ratio ** (round_index // self.every).double()


@dataclass(frozen=True)
class Theorem1(Schedule):
    """1 / sqrt(T), Theorem 1's step for models and duals alike (convex losses)."""

    rounds: int  # T

    def __post_init__(self):
        _check(self.rounds >= 1, f"rounds must be >= 1, got {self.rounds}")

    def at(self, round_index: Tensor) -> Tensor:
        return torch.zeros_like(round_index, dtype=torch.float64) + self.rounds**-0.5


@dataclass(frozen=True)
class Theorem2Dual(Schedule):
    """1 / (2 L sqrt(T)), Theorem 2's dual step (non-convex losses)."""

    smoothness: float  # L
    rounds: int  # T

    def __post_init__(self):
        _check(self.smoothness > 0, f"smoothness L must be > 0, got {self.smoothness}")
        _check(self.rounds >= 1, f"rounds must be >= 1, got {self.rounds}")

    def at(self, round_index: Tensor) -> Tensor:
        return torch.zeros_like(round_index, dtype=torch.float64) + 1 / (2 * self.smoothness * math.sqrt(self.rounds))


@dataclass(frozen=True)
class Theorem2Primal(Schedule):
    """The dual step of Theorem 2 over 16 (kappa + 1)^2: models move slower than the weights that judge them."""

    smoothness: float  # L
    condition: float  # kappa = L / mu
    rounds: int  # T

    def __post_init__(self):
        Theorem2Dual(self.smoothness, self.rounds)
        _check(self.condition >= 1, f"condition kappa = L / mu must be >= 1, got {self.condition}")

    def at(self, round_index: Tensor) -> Tensor:
        dual = 1 / (2 * self.smoothness * math.sqrt(self.rounds))
        return torch.zeros_like(round_index, dtype=torch.float64) + dual / (16 * (self.condition + 1) ** 2)


register(
    Schedule,
    {
        "constant": Constant,
        "geometric": Geometric,
        "linear": Linear,
        "polynomial": Polynomial,
        "staircase": Staircase,
        "theorem-1": Theorem1,
        "theorem-2-dual": Theorem2Dual,
        "theorem-2-primal": Theorem2Primal,
    },
)
