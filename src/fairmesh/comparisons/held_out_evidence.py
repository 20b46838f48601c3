"""What a site's own model brings on held-out rows, where there are no test rows.

Each row is answered by models that were trained without it, mixed by weights that the row's fold had no part in."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fairmesh.evidence.intervals import LEVEL, Number, Share
from fairmesh.evidence.means import mean_of
from fairmesh.evidence.verdicts import Difference, difference_of, differences_of

HELD_OUT = "held-out"
_SMALLEST = 0.01  # of the other model's loss: a smaller difference is unclear, whatever its interval


def held_out_evidence(personal: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the comparison of the sites' own models with the common one and with training alone, as `evidence_table`
    has it, by the losses on held-out rows. Intervals are Student's. A difference below 1 % of the loss is unclear.

    Args:
        personal: The tables of the sites' own models, one per replica, whose numbers are averaged.
    """
    by_site = [[site.get("held_out_versus", {}) for site in sites] for sites in zip(*(of["sites"] for of in personal))]
    names = [str(site["name"]) for site in personal[0]["sites"]]
    sites: list[dict[str, Any]] = [{"name": name, "versus": {}} for name in names]
    mean = {}
    for other in dict.fromkeys(name for of_site in by_site for table in of_site for name in table):
        known = {i: [table[other] for table in of_site] for i, of_site in enumerate(by_site) if all(of_site)}
        estimates = {i: _estimate(tables) for i, tables in known.items()}
        losses = {i: _mean(tables, "of") for i, tables in known.items()}
        found = differences_of(list(estimates.values()), False, [True] * len(estimates))
        for i, difference in zip(estimates, found):
            sites[i]["versus"][other] = _at_least(difference, losses[i])
        mean[other] = _at_least(difference_of(_over_sites(list(estimates.values())), False), _average(losses.values()))
    return {
        "level": LEVEL,
        "metric": "loss",
        "judged_on": HELD_OUT,
        "mean": {"versus": mean},
        "sites": sites,
    }


def _estimate(tables: Sequence[Mapping[str, float]]) -> Number:
    """Returns the difference at a site. Replicas have the same rows, so their errors are not independent."""
    units = int(tables[0]["units"])
    return Number(_mean(tables, "difference"), units, _mean(tables, "error"), freedom=max(1, units - 1))


def _over_sites(estimates: Sequence[Number]) -> Number | Share:
    """Returns the mean over sites. Two or three units of a site may be alike by chance, so its error is at least what
    the sites' spread says."""
    found, values = mean_of(estimates), [one.value for one in estimates if not math.isnan(one.value)]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    wider = isinstance(found, Number) and error > found.error
    return Number(found.value, found.rows, error, freedom=len(values) - 1) if wider else found


def _mean(tables: Sequence[Mapping[str, float]], name: str) -> float:
    return _average(table[name] for table in tables)


def _average(values: Any) -> float:
    return statistics.fmean(values)


def _at_least(difference: Difference, loss: float) -> dict[str, Any]:
    """Returns a difference as a table, which is unclear if it is a trace of the loss."""
    table = difference.table()
    return table | ({"verdict": "unclear"} if abs(difference.difference) < _SMALLEST * abs(loss) else {})
