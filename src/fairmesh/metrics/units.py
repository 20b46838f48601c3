"""How numbers of a metric are shown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard


def defined(value: Any) -> TypeGuard[float]:
    """Returns whether this is a number, and finite."""
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass(frozen=True)
class Unit:
    """A metric as tables and sentences show it: a share in per cent, with differences in points, or a plain number.

    Args:
        metric: The name of the metric.
        share: Whether it is a share, from 0 to 1.
        unit: The unit of its numbers, such as "mmHg"; empty if it has none or it is not known. Default: "".
    """

    metric: str
    share: bool
    unit: str = ""

    @staticmethod
    def of(metric: str, table: Mapping[str, Any]) -> "Unit":
        """Returns how a metric is shown, from what summary.json or report.json says about it."""
        return Unit(metric, table["share"], table.get("unit") or "")

    @property
    def _suffix(self) -> str:
        return " %" if self.share else f" {self.unit}".rstrip()

    @property
    def scale(self) -> int:
        """What its values are multiplied by in pictures."""
        return 100 if self.share else 1

    @property
    def label(self) -> str:
        """Its name at the axis of a picture."""
        return f"{self.metric}, {self._suffix.strip()}".removesuffix(", ")

    def number(self, value: float) -> str:
        """Returns a value without its unit, such as "81.0"."""
        return f"{100 * value:.1f}" if self.share else f"{value:.4g}"

    def shown(self, value: Any) -> str:
        """Returns a value, such as "81.0 %"."""
        if not defined(value):
            return "infinite" if isinstance(value, float) and math.isinf(value) else "not defined"
        return self.number(value) + self._suffix

    def interval(self, ends: Sequence[float] | None) -> str:
        """Returns an interval of values, such as "71.0 to 80.2 %"; nothing if it is not known."""
        if not ends or not all(map(defined, ends)):
            return ""
        return f"{self.number(ends[0])} to {self.shown(ends[1])}"

    def with_interval(self, value: Any, ends: Sequence[float] | None) -> str:
        """Returns a value and its interval where it is known, such as "75.9 % (71.0 to 80.2)"."""
        known = self.interval(ends).removesuffix(self._suffix)
        return self.shown(value) + (f" ({known})" if known else "")

    def progress(self, records: Sequence[Mapping[str, Any]]) -> str:
        """Returns the worst site and the mean over sites, averaged over the records of a measured round, in words."""

        def shown(what: str) -> str:
            values = [record[self.metric][what] for record in records]
            return self.shown(sum(values) / len(values))

        of = "" if self.metric == "accuracy" else f"'s {self.metric}"
        return f"worst site{of} {shown('worst')}, mean {shown('mean')}"

    def gap(self, value: Any) -> str:
        """Returns a distance between two values, such as "3.4 points"."""
        return self.shown(value).replace(" %", " points")

    @property
    def of_differences(self) -> str:
        """What follows the number of a difference: "points", its unit, or in which metric it is."""
        return "points" if self.share else self.unit or f"in {self.metric}"

    def difference(self, ends: Sequence[float], signed: bool = True) -> str:
        """Returns an interval of differences, such as "+3 to +9"."""

        def shown(end: float) -> str:  # two digits of a plain number, one of less than a point; all before the point
            size, digits = self.scale * abs(end), ".1g" if self.share else ".2g"
            whole = 0.95 <= size < 1e6 or size == 0 if self.share else 10 <= size < 1e6
            sign = "−" if end < 0 else "+" if signed and end > 0 else ""
            return f"{sign}{size:{'.0f' if whole else digits}}"

        low, high = map(shown, ends)
        return f"{low} to {high}"
