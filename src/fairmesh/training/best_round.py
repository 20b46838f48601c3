"""Which measured round is the best: one rule for simulations, clusters and runs between organisations.

Small validation sets make every measurement noisy, and the best of many noisy numbers is often only the luckiest. So
each site's metric is smoothed over the measurements before, the sites are compared after that, and of rounds that are
equally good the last one counts. docs/howto/models.md has the measurements behind this.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fairmesh.metrics.over_sites import LEVEL, over_sites
from fairmesh.problems.prepared import Prepared
from fairmesh.storage.run_folder import Record

_SAME = 1e-12  # scores that differ by less are equal: their sums were only rounded differently


class RoundScores:
    """Scores measured rounds, one after another. A score never depends on later measurements.

    Site i's metric x_i(t) at measurement t is smoothed to the mean of x_i(0), ..., x_i(t) with weights
    smoothing^(t - s). Sites where the metric is not defined (NaN) are left out. A round that has no number at a site
    that had one before is never the best: its model has diverged.

    Args:
        problem: Says which metric counts, and whether higher is better.
        best_by: What is compared over sites, as `over_sites` names it: "worst", "cvar", "worst_share" or "mean".
        level: The share of the sites that "cvar" and "worst_share" are means over. Default: 0.2.
    """

    smoothing = 0.5

    def __init__(self, problem: Prepared, best_by: str, level: float = LEVEL):
        self.metric, self._best_by = problem.primary, best_by
        self._level, self._higher = level, problem.higher_is_better(self.metric)
        self._sums = self._counts = torch.zeros((), dtype=torch.float64)

    def add(self, values: Tensor) -> Tensor:
        """Adds a measurement.

        Args:
            values: The metric of every replica at every site (replicas, sites), NaN where it is not defined.

        Returns:
            The scores of this round (replicas,); larger is better, and -inf if it cannot be the best.
        """
        values = values.double()
        known = values.isfinite()
        broken = values.isinf() | (~known & (self._counts > 0))  # NaN where there was a number before
        self._sums = self.smoothing * self._sums + values.masked_fill(~known, 0.0)
        self._counts = self.smoothing * self._counts + known.double()
        smooth = self._sums / self._counts
        tables = [over_sites(row, self._higher, self._level) for row in smooth]
        score = torch.tensor([table[self._best_by] for table in tables], dtype=torch.float64)
        score = score if self._higher else -score
        return score.masked_fill(score.isnan() | broken.any(dim=-1), -torch.inf)

    def add_records(self, records: Sequence[Record]) -> Tensor:
        """Adds the records of a measured round, one per replica. Returns their scores, as `add` does."""
        values = [record["validation"][self.metric]["sites"] for record in records]
        return self.add(torch.tensor(values, dtype=torch.float64))


def by_round(records: Sequence[Record]) -> list[list[Record]]:
    """Returns the records of each measured round, from the first to the last."""
    rounds: dict[int, list[Record]] = {}
    for record in records:
        rounds.setdefault(record["round"], []).append(record)
    return [rounds[number] for number in sorted(rounds)]


def replaces(score: Tensor, best: Tensor) -> Tensor:
    """Returns whether a round with this score replaces the best round so far. A later one replaces an equal one."""
    return (score >= best - _SAME) & (score > -torch.inf)


def decided_in_words(decided: Mapping[str, Any]) -> str:
    """Returns whose numbers have decided which round of a run between organisations is the best, in sentences."""
    said = f"In round {decided['round']}, {decided['worst']} was the worst site by its own numbers"
    said = f"{said} ({decided['metric']} {decided['value']:.4g})."
    if "by_numbers" in decided:
        sites = ", ".join(decided["not_kept_by"])
        said = f"{said} By all numbers it would be round {decided['by_numbers']}, of which {sites} kept no model."
    if "without" not in decided:
        return said
    others = [f"{done} without {site}" for site, done in decided["without"].items()]
    if not others:
        return f"{said} The choice is the same without the numbers of any one site."
    return f"{said} Without the numbers of one site, another round would be the best: {', '.join(others)}."
