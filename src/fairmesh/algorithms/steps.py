"""Local steps, and steps with momentum, divided by the root of the gradient's mean squares, as in Adam."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.base import Algorithm, Round, fresh_share
from fairmesh.algorithms.schedules import Polynomial, Schedule
from fairmesh.algorithms.settings import EXACT, STRUCTURAL
from fairmesh.config.ranges import Memory
from fairmesh.networks.roles import Models

_TINY = 1e-8  # added to the root of the squares, so that a coordinate without a gradient does not move


def scaled_step(
    direction: Tensor, squares: Tensor | None, beta2: float, step: Tensor, number: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Returns the new mean squares of a direction, and the step size of each coordinate, in the step of this number,
    from 1 on.

    The step is divided by the root of the number of parameters, so that the whole step has the norm that the schedule
    gives. Without squares it stays as it is."""
    if squares is None:
        return None, step
    squares = torch.lerp(direction.square(), squares, beta2)
    return squares, coordinate_steps(squares, beta2, step, number)


def coordinate_steps(squares: Tensor, beta2: float, step: Tensor, rounds: Tensor) -> Tensor:
    """Returns the step size of each coordinate, from mean squares over some rounds."""
    remembered = 1.0 - beta2 ** rounds.double()  # below 1 in the first rounds
    step = step / squares.shape[-1] ** 0.5
    return step / (squares / remembered.to(squares.dtype)).sqrt_().add_(_TINY)


def descended(models: Tensor, gradients: Tensor, step: Tensor, local_steps: int, ctx: Round) -> Tensor:
    """Returns models after local steps: the first along the given gradients, each other one on a batch of its own."""
    models = models.addcmul(gradients, step, value=-1)
    for call in range(1, local_steps):
        models = models.addcmul(ctx.losses_and_gradients(models, call)[1], step, value=-1)
    return models


class Moved(NamedTuple):
    """What a step changes, each (..., nodes, dim)."""

    models: Models
    momenta: Tensor
    squares: Tensor | None  # mean squares of the momenta, if steps are scaled


@dataclass(frozen=True)
class ScaledSteps(Algorithm):
    """An algorithm whose models take steps with momentum that need no tuning.

    Args:
        primal_step: eta, a number >= 0 or a schedule: the length of a step in the Euclidean norm, or the learning rate
            if `beta2 = 0`. Default: Polynomial(0.7, power=3.0), which falls to 0 at the end of the run.
        beta1: Memory of the momentum, in [0, 1), as in Adam; 0 for no momentum. Default: 0.9.
        beta2: Memory of the mean squares that steps are divided by, in [0, 1), as in Adam; 0 for unscaled steps.
            Default: 0.99.
    """

    primal_step: Schedule | float = field(default_factory=lambda: Polynomial(0.7, power=3.0))
    beta1: Memory = field(default=0.9, metadata=EXACT, kw_only=True)
    beta2: Memory = field(default=0.99, metadata=STRUCTURAL, kw_only=True)

    def at_rest(self, models: Tensor) -> Moved:
        """Returns models before their first step."""
        return Moved(models, torch.zeros_like(models), torch.zeros_like(models) if self.beta2 else None)

    def moved(self, before: Moved, gradients: Tensor, ctx: Round, times: int = 1) -> Moved:
        """Returns models after a step along gradients; a step that is not scaled is `times` as long."""
        momenta = torch.lerp(before.momenta, gradients, fresh_share(self.beta1, gradients.dtype))
        squares, step = scaled_step(momenta, before.squares, self.beta2, ctx.step_size(self.primal_step), ctx.index + 1)
        step = step if squares is not None else step * times
        return Moved(before.models.addcmul(momenta, step, value=-1), momenta, squares)
