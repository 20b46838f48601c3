"""Reports that repeat themselves, told sparingly, so that nobody can fill a log by doing the same wrong thing again."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

Report = Callable[..., None]  # report(level, what, **fields): structured, and names no data

_Key = tuple[str, str, str | None, str | None, str | None]  # level, what, site, address, reason

_EVERY_S = 60.0
_REASONS = 50  # of the same subject, each address counted apart; more come from somebody who makes them up
_KNOWN = 1000
_LETTERS = 500


@dataclass
class _Count:
    began: float
    told: int = 0
    kept_back: int = 0


class Sparing:
    """Reports the same event, of the same site or address for the same reason, `at_once` times in its first minute.
    Then reports once a minute how often more it was. From any thread."""

    def __init__(self, report: Report, clock: Callable[[], float] = time.monotonic):
        self._report, self._clock, self._lock = report, clock, threading.Lock()
        self._counts: dict[_Key, _Count] = {}
        self._reasons, self._looked = Counter[tuple[str, str, str | None]](), clock()

    def __call__(
        self,
        level: str,
        what: str,
        site: str | None = None,
        reason: str | None = None,
        at_once: int = 1,
        address: str | None = None,  # of somebody whose name is not known
    ) -> None:
        reason = None if reason is None else reason[:_LETTERS]
        if self._clock() - self._looked > 1:
            self.flush()
        with self._lock:
            key = level, what, site, address, reason
            if key not in self._counts and self._many(key):
                others = "several other addresses or reasons" if address else "several other reasons"
                key = level, what, None if len(self._counts) >= _KNOWN else site, None, others
            if key not in self._counts:
                self._counts[key] = _Count(self._clock())
                self._reasons[key[:3]] += 1
            count = self._counts[key]
            now = count.told < at_once
            count.told, count.kept_back = count.told + now, count.kept_back + (not now)
        if now:
            self._tell(key, 0)

    def _many(self, key: _Key) -> bool:
        return len(self._counts) >= _KNOWN or self._reasons[key[:3]] >= _REASONS

    def flush(self) -> None:
        """Tells what was kept back longer than a minute."""
        self._flush(self._clock() - _EVERY_S)

    def close(self) -> None:
        """Tells all that was kept back."""
        self._flush(float("inf"))

    def _flush(self, before: float) -> None:
        with self._lock:
            self._looked = self._clock()
            over = {key: count.kept_back for key, count in self._counts.items() if count.began <= before}
            for key, kept_back in over.items():
                del self._counts[key]
                if kept_back:
                    self._counts[key] = _Count(self._clock(), told=_KNOWN)  # what is told now was this minute's
            self._reasons = Counter(key[:3] for key in self._counts)
        for key, kept_back in over.items():
            if kept_back:
                self._tell(key, kept_back)

    def _tell(self, key: _Key, times: int) -> None:
        level, what, site, address, reason = key
        fields = {"site": site, "address": address, "reason": reason, "more_times": times}
        self._report(level, what, **{name: value for name, value in fields.items() if value})
