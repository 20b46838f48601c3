"""Limits how much one sender may send: a token bucket."""

import time
from collections.abc import Callable


class TokenBucket:
    """Allows `per_second` on average, and up to `at_once` after a pause."""

    def __init__(self, per_second: float, at_once: float, clock: Callable[[], float] = time.monotonic):
        self.per_second, self.at_once, self._clock = per_second, at_once, clock
        self._left, self._looked = at_once, clock()

    def spend(self, amount: float) -> bool:
        """Returns whether this amount is allowed now. An amount that is not allowed costs nothing."""
        now = self._clock()
        self._left = min(self.at_once, self._left + (now - self._looked) * self.per_second)
        self._looked = now
        allowed = amount <= self._left
        self._left -= amount * allowed
        return allowed
