"""What follows from the round's number alone (keys, batches, step sizes), worked out for many rounds at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairmesh.numerics.tracing import values_readable

_ROUNDS = 256  # ahead at most
_NUMBERS = 1 << 20  # of one quantity are kept at most, unless one round needs more


class RoundCache:
    """On a CPU a small operation costs more to call than to run, so a function of the round is evaluated for a block of
    rounds and then read off. A round that is recorded once and replayed works out its own, by operations on tensors
    alone."""

    def __init__(self):
        self._known: dict[Any, tuple[int, Tensor, Any]] = {}

    def at(self, what: Any, function: Callable[[Tensor], Tensor], round_index: Tensor, owner: Any = None) -> Tensor:
        """This round's row of `function`, which turns rounds (k,) into (k, ...). `what` names the quantity; where it
        holds an object's id, `owner` keeps that object alive."""
        if not values_readable(round_index):
            return function(round_index.reshape(1)).squeeze(0)
        number = int(round_index)
        first, values, _ = self._known.get(what, (number, None, owner))
        if values is None or not first <= number < first + len(values):
            # Blocks begin at multiples of their length, whenever one is asked for: a power in the middle of a vector
            # can differ in its last bit from one alone, and a resumed run must not.
            size = function(torch.arange(1)).numel() if values is None else values[0].numel()
            block = max(1, min(_ROUNDS, _NUMBERS // max(1, size)))
            first = number // block * block
            values = function(torch.arange(first, first + block))
            self._known[what] = first, values, owner
        return values[number - first]
