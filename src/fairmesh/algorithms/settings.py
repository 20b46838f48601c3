"""Ranges of the settings of algorithms, weightings and optimizers, by the names of their fields."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from fairmesh.algorithms.schedules import as_schedule
from fairmesh.errors import BadInput

_Range = tuple[Callable[[float], bool], str]  # whether a number is in it, and the range in words
_MEMORY: _Range = (lambda beta: 0 <= beta < 1, "lie in [0, 1); 0 switches the memory off")
_EMPHASIS: _Range = (lambda power: 0 <= power < math.inf, "be a finite number >= 0; 0 minimises the average loss")
_RANGES: dict[str, _Range] = {
    "beta1": _MEMORY,
    "beta2": _MEMORY,
    "loss_ema": _MEMORY,
    "momentum": _MEMORY,
    "q": _EMPHASIS,
    "tilt": _EMPHASIS,
    "consensus_step": (lambda gamma: 0 < gamma <= 1, "lie in (0, 1]"),
    "loss_cap": (lambda cap: 0 < cap < math.inf, "be a finite number > 0; leave it out for no cap"),
    "local_steps": (lambda steps: steps >= 1, "be >= 1"),
    "gradient_at_average": (lambda share: 0 <= share <= 1, "lie in [0, 1]; 0 is at the node's own model"),
    "max_drift": (lambda drift: 0 <= drift < math.inf, "be >= 0; 0 for full local steps, None for one from the graph"),
    "participation": (lambda share: 0 < share <= 1, "be a share in (0, 1]"),
    "floor": (lambda weight: 0 <= weight < 1, "lie in [0, 1), as the smallest weight of a client"),
    "temperature": (lambda mu: 0 < mu < math.inf, "be a finite number > 0"),
    "proximal": (lambda mu: 0 <= mu < math.inf, "be a finite number >= 0; 0 is fedavg"),
    "decay": (lambda decay: 0 <= decay < math.inf, "be a finite number >= 0"),
    "epsilon": (lambda epsilon: 0 < epsilon < math.inf, "be a finite number > 0"),
}


def check_settings(settings: Any) -> None:
    """Raises BadInput if a field of a built-in dataclass is out of its range, and makes schedules of bare numbers."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if "Schedule" in str(field.type):
            object.__setattr__(settings, field.name, as_schedule(value))
        elif value is not None and field.name in _RANGES:
            fits, words = _RANGES[field.name]
            if not fits(value):
                raise BadInput(f"{field.name} is {value}, but must {words}")
