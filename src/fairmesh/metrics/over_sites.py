"""From values by site to what is said about all sites: the worst, its tail, the mean, and how even they are."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fairmesh.errors import BadInput

LEVEL = 0.2  # the share of the sites in the tail
WORST_NEEDS_ROWS = 5  # test rows, or units; with fewer, a site is the worst by chance


def over_sites(
    values: Sequence[float] | Tensor, higher_is_better: bool, level: float = LEVEL
) -> dict[str, float | int]:
    """Returns what a metric's values by site say about all sites. Sites where it is not defined are left out.

    Args:
        values: One value per site; NaN where it is not defined or not measured.
        higher_is_better: Whether a larger value is better.
        level: The share of the sites in the tail, in (0, 1]. Default: 0.2.

    Returns:
        "worst", "best" and "mean"; "gap", the distance between best and worst; "std", the standard deviation of these
        sites, divided by their number; "worst_share", the mean of the worst ceil(level n) of n sites; "cvar", the mean
        of the worst share `level` of the sites, in which the last one counts with a fraction: of 7 sites at level 0.2,
        the worst counts 1 and the next 0.4; "jain", Jain's index (sum x)^2 / (n sum x^2), 1 if all are equal, not
        defined for negative values; "defined" and "undefined", the numbers of sites. All are NaN if no site has a
        value.

    Example:
        >>> import fairmesh as fm
        >>> table = fm.metrics.over_sites([0.9, 0.5, 0.8, 0.7, float("nan"), 0.6, 0.9], True)
        >>> table["worst"], round(table["cvar"], 3), table["worst_share"], table["undefined"]
        (0.5, 0.517, 0.55, 1)
    """
    if not 0 < level <= 1:
        raise BadInput(f"level must lie in (0, 1], got {level}")
    every = torch.as_tensor(values, dtype=torch.float64).flatten().tolist()
    found = sorted((v for v in every if not math.isnan(v)), reverse=not higher_is_better)  # the worst first
    n, counts = len(found), {"defined": len(found), "undefined": len(every) - len(found)}
    if not n:
        names = ("worst", "worst_share", "cvar", "mean", "best", "gap", "std", "jain")
        return dict.fromkeys(names, math.nan) | counts
    mean, mass = _total(found) / n, level * n
    whole, last = math.floor(mass + 1e-9), math.ceil(mass - 1e-9)
    tail = _total(found[:whole]) + (max(0.0, mass - whole) * found[whole] if whole < n else 0.0)
    squares = _total(v * v for v in found)
    return {
        "worst": found[0],
        "worst_share": _total(found[:last]) / last,
        "cvar": tail / mass,
        "mean": mean,
        "best": found[-1],
        "gap": abs(found[-1] - found[0]),
        "std": math.sqrt(_total((v - mean) * (v - mean) for v in found) / n),  # ** raises where this is infinite
        "jain": (n * mean) * (n * mean) / (n * squares) if squares > 0 and min(found) >= 0 else math.nan,
        **counts,
    }


def share_better(values: Sequence[float], reference: Sequence[float], higher_is_better: bool) -> float:
    """Returns the share of the sites that are better off than with a reference, such as the model trained alone.

    Args:
        values: The metric at each site.
        reference: The reference's metric at each site.
        higher_is_better: Whether a larger value is better.

    Returns:
        The share among the sites where both are defined; NaN if there is none. Equal values are not better.

    Example:
        >>> import fairmesh as fm
        >>> fm.metrics.share_better([0.9, 0.7, 0.8, float("nan")], [0.8, 0.7, 0.9, 0.5], True)
        0.3333333333333333
    """
    sign = 1.0 if higher_is_better else -1.0
    gains = [sign * (a - b) for a, b in zip(values, reference, strict=True) if not math.isnan(a - b)]
    return sum(gain > 0 for gain in gains) / len(gains) if gains else math.nan


def spread(values: Tensor, higher_is_better: bool) -> dict[str, Tensor]:
    """Returns worst, mean, best and the gap between best and worst over the last axis, as `over_sites` has them."""
    tables = [over_sites(row, higher_is_better) for row in values.reshape(-1, values.shape[-1])]
    return {
        name: values.new_tensor([table[name] for table in tables]).reshape(values.shape[:-1])
        for name in ("worst", "mean", "best", "gap")
    }


def _total(values: Iterable[float]) -> float:
    """Returns a sum that is exact until it is rounded, so that sites with other CPUs report the same number. Numbers
    that are too large for that are added one after another."""
    numbers = list(values)
    return (math.fsum if max(map(abs, numbers), default=0.0) < 1e300 else sum)(numbers)


def group_means(values: Tensor, groups: Sequence[str]) -> dict[str, Tensor]:
    """Returns the mean over the sites of each group, leaving out sites without a number."""
    members = {g: [i for i, name in enumerate(groups) if name == g] for g in dict.fromkeys(groups)}
    return {g: spread(values[..., sites], True)["mean"] for g, sites in members.items()}
