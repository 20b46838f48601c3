"""Limits what others can make a node do: how much a neighbour may send, and how often an event is logged."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

Report = Callable[..., None]  # report(level, what, **fields): a structured event, without any training data

_Key = tuple[str, str, str | None, str | None, str | None]  # level, what, site, address, reason

_EVERY_S = 60.0
_REASONS = 50  # per subject, counting each address; more reasons than this are invented by the sender
_KNOWN = 1000
_LETTERS = 500


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


@dataclass
class _Count:
    began: float
    reported: int = 0
    suppressed: int = 0


class LogLimiter:
    """Reports an event with the same site, address and reason `at_once` times in its first minute, and then once per
    minute how many more times it happened. Can be called from any thread."""

    def __init__(self, report: Report, clock: Callable[[], float] = time.monotonic):
        self._report, self._clock, self._lock = report, clock, threading.Lock()
        self._counts: dict[_Key, _Count] = {}
        self._looked = clock()

    def __call__(
        self,
        level: str,
        what: str,
        site: str | None = None,
        reason: str | None = None,
        at_once: int = 1,
        address: str | None = None,  # of a peer whose name is not known
    ) -> None:
        reason = None if reason is None else reason[:_LETTERS]
        if self._clock() - self._looked > 1:
            self.flush()
        with self._lock:
            key = level, what, site, address, reason
            if key not in self._counts and self._many(key):
                others = "several other addresses or reasons" if address else "several other reasons"
                key = level, what, None if len(self._counts) >= _KNOWN else site, None, others
            count = self._counts.setdefault(key, _Count(self._clock()))
            now = count.reported < at_once
            count.reported, count.suppressed = count.reported + now, count.suppressed + (not now)
        if now:
            self._emit(key, 0)

    def _many(self, key: _Key) -> bool:
        return len(self._counts) >= _KNOWN or sum(other[:3] == key[:3] for other in self._counts) >= _REASONS

    def close(self) -> None:
        """Reports everything that was suppressed."""
        self.flush(longer_than_s=-float("inf"))

    def flush(self, longer_than_s: float = _EVERY_S) -> None:
        """Reports what was suppressed for longer than this."""
        before = self._clock() - longer_than_s
        with self._lock:
            self._looked = self._clock()
            due = {key: count.suppressed for key, count in self._counts.items() if count.began <= before}
            for key, suppressed in due.items():
                del self._counts[key]
                if suppressed:
                    self._counts[key] = _Count(self._clock(), reported=_KNOWN)  # this report uses up the minute
        for key, suppressed in due.items():
            if suppressed:
                self._emit(key, suppressed)

    def _emit(self, key: _Key, times: int) -> None:
        level, what, site, address, reason = key
        fields = {"site": site, "address": address, "reason": reason, "more_times": times}
        self._report(level, what, **{name: value for name, value in fields.items() if value})
