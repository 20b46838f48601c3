"""Computes what depends only on the round's number (keys, batches, step sizes) for many rounds at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairmesh.numerics.tracing import values_readable

_ROUNDS = 256  # ahead at most
_NUMBERS = 1 << 20  # at most, per quantity, unless one round needs more


class RoundCache:
    """Evaluates functions of the round for a block of rounds at once. On a CPU, calling a small operation costs more
    than running it. A round that is traced once and replayed computes its own values, by operations on tensors only."""

    def __init__(self):
        self._known: dict[Any, tuple[int, Tensor, Any]] = {}

    def at(self, what: Any, function: Callable[[Tensor], Tensor], round_index: Tensor, owner: Any = None) -> Tensor:
        """Returns this round's row of `function`, which turns rounds (k,) into (k, ...). `what` names the quantity; if
        it contains an object's id, `owner` keeps that object alive."""
        if not values_readable(round_index):
            return function(round_index.reshape(1)).squeeze(0)
        number = int(round_index)
        first, values, _ = self._known.get(what, (number, None, owner))
        if values is None or not first <= number < first + len(values):
            # Blocks always begin at multiples of their length. A power inside a vector can differ in its last bit from
            # one computed alone, and a resumed run must give the same bits.
            size = function(torch.arange(1)).numel() if values is None else values[0].numel()
            block = max(1, min(_ROUNDS, _NUMBERS // max(1, size)))
            first = number // block * block
            values = function(torch.arange(first, first + block))
            self._known[what] = first, values, owner
        return values[number - first]
