"""What the settings of algorithms, weightings and optimizers declare of themselves, as metadata of their fields."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from fairmesh.algorithms.schedules import as_schedule
from fairmesh.errors import BadInput

EXACT = {"exact": True}  # a number that replicas stack in float64 in every run
STRUCTURAL = {"structural": True}  # a number on which shapes depend: equal in all replicas of a run


def ranged(fits: Callable[[float], bool], words: str) -> dict[str, Any]:
    """Returns the metadata of a number: whether it is in its range, and what it "must" do, in words."""
    return {"range": (fits, words)}


MEMORY = ranged(lambda beta: 0 <= beta < 1, "lie in [0, 1); 0 switches the memory off")
EMPHASIS = ranged(lambda power: 0 <= power < math.inf, "be a finite number >= 0; 0 minimises the average loss")
CONSENSUS_STEP = ranged(lambda gamma: 0 < gamma <= 1, "lie in (0, 1]")
LOSS_CAP = ranged(lambda cap: 0 < cap < math.inf, "be a finite number > 0; leave it out for no cap")
LOCAL_STEPS = ranged(lambda steps: steps >= 1, "be >= 1")
PARTICIPATION = ranged(lambda share: 0 < share <= 1, "be a share in (0, 1]")
POSITIVE = ranged(lambda number: 0 < number < math.inf, "be a finite number > 0")
NOT_NEGATIVE = ranged(lambda number: 0 <= number < math.inf, "be a finite number >= 0")


class CheckedSettings:
    """A frozen dataclass that checks the ranges of its fields, and makes schedules of bare numbers."""

    def __post_init__(self):
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if "Schedule" in str(field.type) and not isinstance(value, tuple | list | dict | None):
                object.__setattr__(self, field.name, as_schedule(value))
            elif "range" in field.metadata and value is not None:
                fits, words = field.metadata["range"]
                if not fits(value):
                    raise BadInput(f"{field.name} is {value}, but must {words}")
