"""How fast rounds follow each other, over the last minutes."""

import time
from collections import deque
from collections.abc import Callable

from fairmesh.errors import duration

_PACE_S = 300.0  # over which the rate of rounds is measured


def left_in_words(seconds: float) -> str:
    """Returns how long the rounds that are left will take, in words."""
    return "a few seconds left" if seconds < 10 else f"about {duration(seconds)} left"


def rate_in_words(rounds_per_s: float) -> str:
    """Returns how fast rounds are done, in words, such as "1.44 rounds per second" or "30 rounds per hour"."""
    per, rate = ("second", rounds_per_s) if rounds_per_s >= 0.1 else ("hour", 3600 * rounds_per_s)
    return f"{rate:,.0f} rounds per {per}" if rate >= 99.5 else f"{rate:.3g} rounds per {per}"


class Pace:
    """How many rounds are done per second, over the last minutes and without pauses, by a clock that nobody sets."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()  # moments with the rounds done then

    def note(self, done: int, paused: bool) -> None:
        """Takes how many rounds are done. While the run is `paused`, nothing is measured."""
        if paused or (self._seen and done < self._seen[-1][1]):
            self._seen.clear()
        if not paused:
            self._seen.append((self._clock(), done))
        while self._seen and self._seen[0][0] < self._clock() - _PACE_S:
            self._seen.popleft()

    def rounds_per_s(self) -> float | None:
        """Returns the rate, or None if no round was done yet."""
        if len(self._seen) < 2:
            return None
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return (last - first) / (now - began) if last > first and now > began else None
