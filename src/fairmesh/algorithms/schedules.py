"""Step sizes as functions of the round, also those of the AD-GDA paper's theorems. Public as `fm.schedules`."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from fairmesh.config.ranges import Count, NotNegative, Positive, UpToOne, Within
from fairmesh.config.tables import register

__all__ = [
    "Constant",
    "Geometric",
    "Limited",
    "Linear",
    "Measured",
    "Polynomial",
    "Schedule",
    "Staircase",
    "Theorem1",
    "Theorem2Dual",
    "Theorem2Primal",
]


class Schedule(ABC):
    """Base class of schedules: a step size for every round t = 0, 1, ...

    Within a run, fields may hold one value per replica, shaped (replicas, 1, 1).

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> class Harmonic(fm.schedules.Schedule):
        ...     def at(self, round_index):
        ...         return 1 / (1.0 + round_index.double())
        >>> Harmonic().at(torch.tensor([0, 1, 3])).tolist()
        [1.0, 0.5, 0.25]
    """

    @abstractmethod
    def at(self, round_index: Tensor) -> Tensor:
        """Returns the step sizes of rounds.

        Args:
            round_index: Rounds t >= 0, in an integer tensor of any shape.

        Returns:
            A float64 tensor of the same shape, or one that it broadcasts to.
        """

    def with_run_length(self, rounds: int) -> "Schedule":
        """Returns the schedule for a run of this length. Override it if the schedule can end with the run. Default: the
        schedule itself.

        Args:
            rounds: The number of rounds of the run.
        """
        return self

    @property
    def unmeasured(self) -> bool:
        """Whether a number of the schedule is to be measured before round 0. Default: False."""
        return False

    def with_curvature(self, curvature: float) -> "Schedule":
        """Returns the schedule with the numbers that it leaves to the run. Override it, and `unmeasured`, if there are
        such numbers. Default: the schedule itself.

        Args:
            curvature: The largest curvature of the loss that a unit of the step meets at any node, > 0.
        """
        return self

    @staticmethod
    def shorthand(value: float) -> "Schedule":
        """Returns the schedule that a bare number stands for: a constant step."""
        return Constant(float(value))


def as_schedule(value: "Schedule | float") -> "Schedule":
    return value if isinstance(value, Schedule) else Constant(float(value))


def with_run_length(thing: Any, rounds: int) -> Any:
    """Returns the same settings, with every schedule in them fitted to a run of this length."""
    return _with_schedules(thing, lambda schedule: schedule.with_run_length(rounds))


def with_curvature(thing: Any, curvature: float) -> Any:
    """Returns the same settings, with the measured numbers of every schedule in them that leaves some to the run."""
    return _with_schedules(thing, lambda schedule: schedule.with_curvature(curvature))


def _with_schedules(thing: Any, change: Callable[["Schedule"], "Schedule"]) -> Any:
    if isinstance(thing, Schedule):
        thing = change(thing)
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        return thing
    inner = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    changed = {name: new for name, old in inner.items() if (new := _with_schedules(old, change)) is not old}
    return dataclasses.replace(thing, **changed) if changed else thing


def two_digits(number: float) -> float:
    """Returns a number with two digits, which does not depend on the last bits of a measurement and can be named."""
    return float(f"{number:.2g}") if number > 0 else number


@dataclass(frozen=True)
class Constant(Schedule):
    """The same step size in every round: eta_t = value.

    Wherever a schedule is expected, a bare number means the same.

    Args:
        value: The step size, >= 0.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.schedules.Constant(0.1).at(torch.tensor([0, 5])).tolist()
        [0.1, 0.1]
    """

    value: NotNegative

    def at(self, round_index: Tensor) -> Tensor:
        return self.value + torch.zeros_like(round_index, dtype=torch.float64)


@dataclass(frozen=True)
class Geometric(Schedule):
    """Geometric decay: eta_t = start * ratio^t.

    This is the schedule of the AD-GDA paper, which prints ratio^-t by mistake.

    Args:
        start: The step size of round 0, >= 0.
        ratio: The factor per round, in (0, 1].

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.schedules.Geometric(1.0, 0.5).at(torch.tensor([0, 1, 2])).tolist()
        [1.0, 0.5, 0.25]
    """

    start: NotNegative
    ratio: UpToOne

    def at(self, round_index: Tensor) -> Tensor:
        return self.start * self.ratio ** round_index.double()


@dataclass(frozen=True)
class Linear(Schedule):
    """Linear decay to zero: eta_t = start * (1 - t / rounds), and 0 afterwards.

    Args:
        start: The step size of round 0, >= 0.
        rounds: The number of rounds until the step is 0, >= 1; None for the length of the run. Default: None.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.schedules.Linear(1.0, rounds=4).at(torch.arange(5)).tolist()
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """

    start: NotNegative
    rounds: Count | None = None

    def at(self, round_index: Tensor) -> Tensor:
        return self.start * self._left(round_index)

    def with_run_length(self, rounds: int) -> "Linear":
        return dataclasses.replace(self, rounds=rounds) if self.rounds is None else self

    def _left(self, round_index: Tensor) -> Tensor:
        """Returns the share of the run that is left."""
        if self.rounds is None:
            return torch.ones_like(round_index, dtype=torch.float64)
        return (1.0 - round_index.double() / self.rounds).clamp(min=0.0)


@dataclass(frozen=True)
class Polynomial(Linear):
    """Polynomial decay to zero: eta_t = start * (1 - t / rounds)^power, and 0 afterwards.

    Args:
        start: The step size of round 0, >= 0.
        rounds: The number of rounds until the step is 0, >= 1; None for the length of the run. Default: None.
        power: The exponent, > 0; 1 is linear decay, more spends more rounds at small steps. Default: 2.0.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.schedules.Polynomial(1.0, rounds=4, power=2.0).at(torch.arange(5)).tolist()
        [1.0, 0.5625, 0.25, 0.0625, 0.0]
    """

    power: Positive = 2.0

    def at(self, round_index: Tensor) -> Tensor:
        return self.start * self._left(round_index) ** self.power


def limited(steps: Tensor, schedule: "Schedule | float") -> Tensor:
    """Returns steps of nodes or coordinates, none above the limit of the schedule, if it has one."""
    limit: float | Tensor | None = schedule.limit if isinstance(schedule, Measured | Limited) else None
    if limit is None:
        return steps
    return steps.clamp(max=limit.to(steps.dtype) if isinstance(limit, Tensor) else limit)  # one per replica


@dataclass(frozen=True)
class Measured(Linear):
    """A step that the run chooses before round 0: eta_t = factor / L * (1 - t / rounds)^power.

    L is the largest curvature of the loss that a unit of the step meets at any node, measured on the first batches at
    the initial model. So the step fits the scale of inputs, targets and weights. The number that was used is in
    summary.json, and a run that names it as `start` is the same.

    Args:
        start: The step size of round 0, >= 0, which is then used as it is; None to measure it. Default: None.
        rounds: The number of rounds until the step is 0, >= 1; None for the length of the run. Default: None.
        factor: Multiplies the measured step, > 0. Default: 1.0.
        power: The exponent of the decay, > 0; 1 is linear. Default: 1.0.
        limit: Largest learning rate at a node, > 0, for algorithms whose weights multiply the step; None for no limit,
            or, if `start` is None, to measure it too. Default: None.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> step = fm.schedules.Measured(factor=0.5).with_run_length(4).with_curvature(20.0)
        >>> [round(size, 6) for size in step.at(torch.arange(5)).tolist()]
        [0.025, 0.01875, 0.0125, 0.00625, 0.0]
    """

    start: NotNegative | None = None  # type: ignore[assignment]
    factor: Positive = 1.0
    power: Positive = 1.0
    limit: Positive | None = None

    def at(self, round_index: Tensor) -> Tensor:
        start = self.factor if self.start is None else self.start  # of a curvature of 1, until it is measured
        return start * self._left(round_index) ** self.power

    @property
    def unmeasured(self) -> bool:
        return self.start is None

    def with_curvature(self, curvature: float) -> "Measured":
        return dataclasses.replace(self, start=two_digits(self.factor / curvature)) if self.unmeasured else self


@dataclass(frozen=True)
class Limited(Polynomial):
    """Polynomial decay of steps that are scaled as in Adam, with a limit on the local steps of a client.

    A client's gradients do not vanish where those of all clients together do, so that local steps which are divided by
    the latter can be too long for the client's loss. No coordinate of a local step has a larger learning rate than
    `limit`.

    Args:
        start: The step size of round 0, >= 0.
        rounds: The number of rounds until the step is 0, >= 1; None for the length of the run. Default: None.
        power: The exponent, > 0; 1 is linear decay, more spends more rounds at small steps. Default: 2.0.
        limit: Largest learning rate of a local step, > 0; None to measure it before round 0, as in `Measured`. Default:
            None.
        factor: Multiplies the measured limit, > 0. Default: 0.5.

    Example:
        >>> import fairmesh as fm
        >>> fm.schedules.Limited(0.7).with_curvature(20.0).limit
        0.025
    """

    limit: Positive | None = None
    factor: Positive = 0.5

    @property
    def unmeasured(self) -> bool:
        return self.limit is None

    def with_curvature(self, curvature: float) -> "Limited":
        return dataclasses.replace(self, limit=two_digits(self.factor / curvature)) if self.unmeasured else self


@dataclass(frozen=True)
class Staircase(Geometric):
    """Step decay: eta_t = start * ratio^floor(t / every).

    Args:
        start: The step size of round 0, >= 0.
        ratio: The factor per stair, in (0, 1].
        every: Rounds per stair, >= 1.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.schedules.Staircase(1.0, 0.5, every=10).at(torch.tensor([0, 9, 10, 25])).tolist()
        [1.0, 1.0, 0.5, 0.25]
    """

    every: Count

    def at(self, round_index: Tensor) -> Tensor:
        return super().at(round_index // self.every)


@dataclass(frozen=True)
class Theorem1(Schedule):
    """The step size of Theorem 1 of the AD-GDA paper, for convex losses: eta = 1 / sqrt(T), primal and dual.

    Args:
        rounds: T, the number of rounds of the run, >= 1.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.schedules.Theorem1(rounds=100).at(torch.tensor(0)).item()
        0.1
    """

    rounds: Count

    def at(self, round_index: Tensor) -> Tensor:
        return torch.zeros_like(round_index, dtype=torch.float64) + self.rounds**-0.5


@dataclass(frozen=True)
class Theorem2Dual(Schedule):
    """The dual step size of Theorem 2 of the AD-GDA paper, for non-convex losses: eta = 1 / (2 L sqrt(T)).

    Args:
        smoothness: L, the Lipschitz constant of the gradients, > 0.
        rounds: T, the number of rounds of the run, >= 1.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.schedules.Theorem2Dual(smoothness=2.0, rounds=100).at(torch.tensor(0)).item()
        0.025
    """

    smoothness: Positive
    rounds: Count

    def at(self, round_index: Tensor) -> Tensor:
        return torch.zeros_like(round_index, dtype=torch.float64) + 1 / (2 * self.smoothness * math.sqrt(self.rounds))


@dataclass(frozen=True)
class Theorem2Primal(Schedule):
    """The primal step size of Theorem 2 of the AD-GDA paper: eta = 1 / (2 L sqrt(T)) / (16 (kappa + 1)^2).

    Args:
        smoothness: L, the Lipschitz constant of the gradients, > 0.
        condition: kappa = L / mu, the condition number of the inner maximum, >= 1.
        rounds: T, the number of rounds of the run, >= 1.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.schedules.Theorem2Primal(smoothness=2.0, condition=1.0, rounds=100).at(torch.tensor(0)).item()
        0.000390625
    """

    smoothness: Positive
    condition: Annotated[float, Within("[1, inf)")]
    rounds: Count

    def at(self, round_index: Tensor) -> Tensor:
        dual = 1 / (2 * self.smoothness * math.sqrt(self.rounds))
        return torch.zeros_like(round_index, dtype=torch.float64) + dual / (16 * (self.condition + 1) ** 2)


register(
    Schedule,
    {
        "constant": Constant,
        "geometric": Geometric,
        "limited": Limited,
        "linear": Linear,
        "measured": Measured,
        "polynomial": Polynomial,
        "staircase": Staircase,
        "theorem-1": Theorem1,
        "theorem-2-dual": Theorem2Dual,
        "theorem-2-primal": Theorem2Primal,
    },
)
