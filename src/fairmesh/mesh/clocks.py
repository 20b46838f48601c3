"""Clocks of sites that differ: by how much, and which one is likely to be wrong."""

from collections.abc import Mapping
from typing import Any

APART_S = 300.0  # seconds that do no harm: certificates begin that much in the past


def seconds_ahead(greeting: Mapping[str, Any], now: float) -> float:
    """Returns by how many seconds the clock in a neighbour's greeting is ahead of this one; 0 if it states none."""
    clock = greeting.get("clock")
    return float(clock) - now if isinstance(clock, int | float) and abs(clock) < 1e15 else 0.0


def in_words(ahead: float) -> str:
    """Returns a difference of clocks for people."""
    size = abs(ahead)
    amount = (
        f"{size:.0f} s" if size < 600 else f"{size / 60:.0f} minutes" if size < 7200 else f"{size / 3600:.0f} hours"
    )
    return f"{amount} {'ahead of' if ahead > 0 else 'behind'} this one"


def advice(apart: Mapping[str, float], neighbours: int) -> list[str]:
    """Returns what to say about neighbours whose clocks differ from this one.

    Args:
        apart: By how many seconds the clocks of these neighbours are ahead.
        neighbours: How many neighbours there are.
    """
    same_way = len({ahead > 0 for ahead in apart.values()}) == 1
    if neighbours > 1 and len(apart) == neighbours and same_way:
        said = "; ".join(f"that of {name} is {in_words(ahead)}" for name, ahead in apart.items())
        return [f"this site's clock differs from those of all its neighbours ({said}): set it, and restart this node"]
    return [f"the clock of {name} is {in_words(ahead)}: set the one that is wrong" for name, ahead in apart.items()]
