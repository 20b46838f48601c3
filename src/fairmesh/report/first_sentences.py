"""The first sentences of a run: what training together brought, what the weights brought, and which site uses what."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fairmesh.comparisons.weights import decision_in_words
from fairmesh.errors import counted
from fairmesh.evidence.verdicts import verdict_in_words
from fairmesh.metrics.units import Unit, defined
from fairmesh.report.sentences import USES
from fairmesh.training.result import Result
from fairmesh.training.summary import summary_of

_NAMED = 4  # sites; of more, their number is told


def headline(result: Result) -> str:
    """Returns the first sentences of a run, one per line.

    They say what training together brought, what the weights brought, and which site should use what. A run that names
    its algorithm and compares nothing has none.

    Args:
        result: The result of `fm.train` or `fm.run`.

    Example:
        >>> import fairmesh as fm
        >>> way = fm.personalization.Choice(steps=5, local_steps=5)
        >>> result = fm.run(fm.Experiment(fm.data.Digits(nodes=4, odd=1), rounds=20, personalization=way))
        >>> [line.split(":")[0] for line in fm.report.headline(result).splitlines()]
        ['Training together', 'Weights', 'Which model']
    """
    return "\n".join(headline_of(summary_of(result)))


def headline_of(summary: Mapping[str, Any]) -> list[str]:
    """Returns the sentences; none for a run without models for its sites and without a comparison of weights.

    Args:
        summary: That of a run or of a variant of a sweep.
    """
    return [*_together(summary), *_weights(summary), *_uses(summary)]


def _together(summary: Mapping[str, Any]) -> list[str]:
    said = _compared(summary, "local", "alone")
    return [f"Training together: {said}."] if said else []


def _compared(summary: Mapping[str, Any], other: str, name: str) -> str:
    """Returns how the models that sites are given differ from others, in words; nothing if it is not known."""
    found = summary.get("site_models_evidence")
    if not found:
        return ""
    differences = [site["versus"][other] for site in found["sites"] if other in site["versus"]]
    verdicts = Counter(one["verdict"] for one in differences if all(map(defined, one["interval"])))
    if not verdicts:
        return f"not compared with {name}, since no site has enough rows"
    better, worse, sites = verdicts["better"], verdicts["worse"], counted(verdicts.total(), "site")
    sites += " that could be compared" if verdicts.total() < len(found["sites"]) else ""
    names = {verdict: _few(found["sites"], other, verdict) for verdict in ("better", "worse")}
    said = (
        f"on {found['judged_on']} rows better than {name} at {better or 'none'} of {sites}{names['better']}, worse at "
        f"{worse or 'none'}{names['worse']}"
    )
    if verdicts.total() > 1:
        unit = Unit.of(found["metric"], summary["metrics"][found["metric"]])
        said += f"; on average over sites {verdict_in_words(found['mean']['versus'][other], unit)}"
    return said


def _few(sites: Sequence[Mapping[str, Any]], other: str, verdict: str) -> str:
    """Returns the names of the sites with a verdict in brackets, if they are few and not all."""
    names = [str(site["name"]) for site in sites if site["versus"].get(other, {}).get("verdict") == verdict]
    return f" ({_sites(names, 0)})" if 0 < len(names) <= min(_NAMED, len(sites) - 1) else ""


def _weights(summary: Mapping[str, Any]) -> list[str]:
    parts = []
    if decided := summary.get("handed_out"):
        parts.append(decision_in_words(decided["weights"], decided["why"]))
    outcomes = Counter(site["outcome"] for site in (summary.get("weights") or {"sites": {}})["sites"].values())
    if outcomes and summary["judged_on"] == "test":
        helped, hurt = (outcomes[what] or "none" for what in ("helped", "hurt"))
        sites = counted(outcomes.total(), "site")
        parts.append(f"on test rows they helped {helped} of {sites} against fixed weights, and hurt {hurt}")
    return [f"Weights: {'; '.join(parts)}."] if parts else []


def _uses(summary: Mapping[str, Any]) -> list[str]:
    of_replicas = summary.get("personal")
    if not of_replicas:
        return []
    names: dict[str, list[str]] = {kind: [] for kind in USES}
    for sites in zip(*(of_replica["sites"] for of_replica in of_replicas)):
        kind = max(names, key=lambda kind: sum(site["shares"][kind] for site in sites))
        names[kind].append(str(sites[0]["name"]))
    every = sum(map(len, names.values()))
    kinds = [kind for kind, sites in names.items() if sites]
    if not any(site["rows"] for of_replica in of_replicas for site in of_replica["sites"]):
        return ["Which model: no site has enough rows to tell, so every site should use the common model."]
    told = [f"{_sites(names[kind], every)} {USES[kind]}" for kind in kinds]
    told[0] = f"{_sites(names[kinds[0]], every)} should use {USES[kinds[0]]}"
    said = "" if kinds == ["common"] else _compared(summary, "common", "the common model")
    return [f"Which model: by held-out rows, {'; '.join(told)}{f'; {said}' if said else ''}."]


def _sites(names: Sequence[str], of: int) -> str:
    if len(names) == of:
        return "every site"
    if len(names) > _NAMED:
        return f"{len(names)} sites"
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
