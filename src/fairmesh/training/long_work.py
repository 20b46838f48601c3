"""Says which site's training function a run waits for, if it takes long."""

import logging
import time
from collections.abc import Callable
from typing import Any

from fairmesh.problems.local_work import Activity

_FIRST_S, _LONGEST_S = 60.0, 3600.0


class LongWorkNotices:
    """Is told once per second what the processes of a run do. Says in one line for whom the run waits: after a minute,
    then at growing intervals, at least once per hour.

    Args:
        tell: Takes the line; None for the logger "fairmesh". Default: None.
        clock: Returns the time. Default: time.time.
    """

    def __init__(self, tell: Callable[[str], None] | None = None, clock: Callable[[], float] = time.time):
        self._tell, self._clock = tell or logging.getLogger("fairmesh").warning, clock
        self._longest: Activity | None = None
        self._next = _FIRST_S

    def __call__(self, every: list[Any]) -> None:
        """Takes what the processes that still work do: activities, None where a process has not begun."""
        working = [Activity(*activity) for activity in every if activity]
        longest = min(working, key=lambda activity: activity.since, default=None)
        if longest != self._longest:
            self._longest, self._next = longest, _FIRST_S
        if not longest:
            return
        seconds = self._clock() - longest.since
        if seconds >= self._next:
            self._next = seconds + min(seconds, _LONGEST_S)
            self._tell(f"{longest}, for {_in_words(seconds)} now; the run waits for it")


def _in_words(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
