"""Ranges of numbers, as part of the type of a field: a configured class refuses a number that lies outside."""

import math
from typing import Annotated, NamedTuple


class Within(NamedTuple):
    """The interval that a number must lie in, such as "[0, 1)", and what else to say to somebody who gives another."""

    interval: str
    advice: str = ""

    def __repr__(self) -> str:  # as it stands in the signatures of the documentation
        return self.interval

    def has(self, number: float) -> bool:
        """Returns whether a number lies in the interval."""
        low, high = map(float, self.interval[1:-1].split(","))
        above = low <= number if self.interval[0] == "[" else low < number
        return above and (number <= high if self.interval[-1] == "]" else number < high)

    def refusal(self, number: float) -> str:
        """Returns why a number is refused, as what follows its name in a sentence."""
        low, high = self.interval[1:-1].split(", ")
        bound = f"be a finite number {'>=' if self.interval[0] == '[' else '>'} {low}"
        words = bound if float(high) == math.inf else f"lie in {self.interval}"
        return f"must {words}, got {number}" + (f"; {self.advice}" if self.advice else "")


Count = Annotated[int, Within("[1, inf)")]
Natural = Annotated[int, Within("[0, inf)")]
Positive = Annotated[float, Within("(0, inf)")]
NotNegative = Annotated[float, Within("[0, inf)")]
Share = Annotated[float, Within("(0, 1)")]  # neither nothing nor all
UpToOne = Annotated[float, Within("(0, 1]")]
Memory = Annotated[float, Within("[0, 1)", "0 switches the memory off")]  # of a moving average
