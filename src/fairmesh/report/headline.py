"""The first sentences of a run: what training together brought, what the weights brought, and which site uses what."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fairmesh.errors import listed

_NAMED = 4  # sites; of more, their number is told
_USES = {"common": "the common model", "adapted": "one adapted from it", "own": "a model of its rows alone"}


def headline(summary: Mapping[str, Any]) -> list[str]:
    """Returns the sentences; none for a run without models for its sites and without a choice of weights.

    Args:
        summary: That of a run or of a variant of a sweep.
    """
    return [*_together(summary), *_weights(summary), *_uses(summary)]


def _together(summary: Mapping[str, Any]) -> list[str]:
    found = summary.get("site_models_evidence")
    if not found:
        return []
    against = {name: _counts(found["sites"], name) for name in ("local", "common")}
    parts = [
        f"better than {other} at {counts['better']} of {counts.total()} sites, worse at {counts['worse']}"
        for other, counts in ((_OTHERS[name], counts) for name, counts in against.items())
        if counts.total()
    ]
    return [f"The model that each site is given is {', and '.join(parts)} (on test rows)."] if parts else []


_OTHERS = {"local": "training alone", "common": "the common model"}


def _counts(sites: Sequence[Mapping[str, Any]], other: str) -> Counter[str]:
    return Counter(site["versus"][other]["verdict"] for site in sites if other in site["versus"])


def _weights(summary: Mapping[str, Any]) -> list[str]:
    found = summary.get("handed_out")
    if not found:
        return []
    said = f"The common model has {found['weights']} weights: {found['why']}."
    verdicts = Counter(site["outcome"] for site in (summary.get("weights") or {"sites": {}})["sites"].values())
    if verdicts:
        said += (
            f" On test rows they helped {verdicts['helped']} of {verdicts.total()} sites and hurt {verdicts['hurt']}."
        )
    return [said]


def _uses(summary: Mapping[str, Any]) -> list[str]:
    of_replicas = summary.get("personal")
    if not of_replicas:
        return []
    names: dict[str, list[str]] = {kind: [] for kind in _USES}
    for sites in zip(*(of_replica["sites"] for of_replica in of_replicas)):
        ((kind, _),) = Counter(site["uses"] for site in sites).most_common(1)
        names[kind].append(str(sites[0]["name"]))
    every = sum(map(len, names.values()))
    told = [f"{_USES[kind]} at {_sites(sites, every)}" for kind, sites in names.items() if sites]
    return [f"Which model: {'; '.join(told)}."]


def _sites(names: Sequence[str], of: int) -> str:
    if len(names) == of:
        return "every site"
    return listed(names) if len(names) <= _NAMED else f"{len(names)} sites"
