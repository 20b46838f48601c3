"""Watches whether one site takes most of the weight lambda, which may be right, or the effect of broken data."""

from collections.abc import Mapping
from typing import Any

_MOST = 0.5  # of lambda, and
_TIMES_PRIOR = 2.0  # times its share before training, for
_SHARE_OF_ROUNDS = 0.05  # of the run without a measurement in between that says otherwise


class WeightWatch:
    """Says which sites have had more than half of lambda, and more than twice their share before training, for at
    least 5 % of the rounds."""

    def __init__(self, rounds: int):
        self._rounds = rounds
        self._since: dict[str, int] = {}  # the round in which it was first measured so

    def heavy(self, sites: Mapping[str, Mapping[str, Any]], prior: Mapping[str, float]) -> dict[str, dict[str, Any]]:
        """Takes what sites have announced, and returns for each heavy site its weight, its share before training, and
        the rounds since when and up to which this was measured."""
        found = {}
        # Weights by a shadow price sum to one only once the price has settled; until then all of them may be large.
        total = max(1.0, sum(told.get("weight") or 0.0 for told in sites.values()))
        for site, told in sites.items():
            weight, measured, share = told.get("weight"), told.get("metric_round"), prior.get(site)
            weight = None if weight is None else weight / total
            if weight is None or measured is None or share is None or weight <= max(_MOST, _TIMES_PRIOR * share):
                self._since.pop(site, None)
                continue
            since = min(self._since.setdefault(site, int(measured)), int(measured))  # after going back to a round
            self._since[site] = since
            if measured - since >= _SHARE_OF_ROUNDS * self._rounds:
                found[site] = {"weight": weight, "prior": share, "since": since, "round": int(measured)}
        return found
