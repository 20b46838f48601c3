"""Steps divided by the root of the gradient's mean squares, as in Adam."""

import torch
from torch import Tensor

from fairmesh.algorithms.base import Round

_TINY = 1e-8  # added to the root of the squares, so that a coordinate without a gradient does not move


def scaled_step(
    direction: Tensor, squares: Tensor | None, beta2: float, step: Tensor, ctx: Round
) -> tuple[Tensor | None, Tensor]:
    """Returns the new mean squares of a direction, and the step size of each coordinate.

    The step is divided by the root of the number of parameters, so that the whole step has the norm that the schedule
    gives. Without squares it stays as it is."""
    if squares is None:
        return None, step
    squares = torch.lerp(direction.square(), squares, beta2)
    return squares, coordinate_steps(squares, beta2, step, ctx.index + 1)


def coordinate_steps(squares: Tensor, beta2: float, step: Tensor, rounds: Tensor) -> Tensor:
    """Returns the step size of each coordinate, from mean squares over some rounds."""
    remembered = 1.0 - beta2 ** rounds.double()  # below 1 in the first rounds
    step = step / squares.shape[-1] ** 0.5
    return step / (squares / remembered.to(squares.dtype)).sqrt_().add_(_TINY)
