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
_SMALLER, _PERSONALIZE = "Train again with smaller steps.", "train again with [personalization]."
_TEST_ROWS = "Give the sites some, and train again."


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


def conclusion_of(summary: Mapping[str, Any]) -> str:
    """Returns what to take away from a run, and what to do now, in one sentence or two.

    Args:
        summary: That of a run, of one in progress, or of a variant of a sweep.
    """
    if summary["diverged"] and len(summary["diverged"]) == len(summary["final"]):
        return "The run diverged, so it has no model to use. " + _SMALLER
    if "planned_rounds" in summary:
        return (
            f"The run is not finished: this is how good the models were in round {summary['rounds']:,} of "
            f"{summary['planned_rounds']:,}, the last that all sites had measured."
        )
    if summary.get("judged_by") == "own models":
        return "Each site has trained alone and is judged by its own model: this is what training together must beat."
    uses, alone = _kinds(summary), _verdicts_on(summary, "local")
    if uses:
        return f"{_to_use(uses)}{_next_to_alone(alone, summary) if alone else ''}"
    if alone:
        return _worth(alone, summary)
    if summary["judged_on"] == "train":
        return "Nothing shows how good the model is, since no site has test rows. " + _TEST_ROWS
    again = ": run it with --with-references" if _can_be_compared(summary) else ""
    said = "Nothing says yet whether training together is worth it, since no site was compared with training alone"
    return f"{said}{again}."


def advice_of(summary: Mapping[str, Any]) -> str:
    """Returns what to do now with what a run has made, as its conclusion says it; "" if that is nothing.

    Args:
        summary: As of `conclusion_of`.
    """
    if summary["diverged"] and len(summary["diverged"]) == len(summary["final"]):
        return _SMALLER
    if "planned_rounds" in summary or summary.get("judged_by") == "own models":
        return ""
    if uses := _kinds(summary):
        return _to_use(uses)
    if alone := _verdicts_on(summary, "local"):
        return f"To give sites a model of their own, {_PERSONALIZE}" if alone["worse"] else ""
    if summary["judged_on"] == "train":
        return f"No site has test rows. {_TEST_ROWS}"
    if not _can_be_compared(summary):
        return ""
    return "To see whether training together is worth it, run it with --with-references."


def _to_use(uses: Mapping[str, Sequence[str]]) -> str:
    """Returns which sites should use what, as a sentence."""
    said = _in_words(uses, USES | {"adapted": "a model adapted from the common one"})
    return f"E{said[1:]}." if said.startswith("every") else f"{said}."


def _can_be_compared(summary: Mapping[str, Any]) -> bool:
    """Returns whether the run can be run again with references: not a private one, nor one between organisations or a
    sweep."""
    return not summary.get("privacy") and bool(summary.get("provenance")) and len(summary.get("variants", ())) < 2


def _verdicts_on(summary: Mapping[str, Any], other: str) -> dict[str, list[str]]:
    """Returns the names of the sites that are better, worse or not clearly different from another model; nothing if
    none was compared."""
    evidence = summary.get("site_models_evidence") or summary.get("evidence") or {}
    found: dict[str, list[str]] = {"better": [], "worse": [], "unclear": []}
    for site in evidence.get("sites", ()):
        difference = site.get("versus", {}).get(other)
        if difference and all(map(defined, difference.get("interval", ()))):
            found[difference["verdict"]].append(str(site["name"]))
    return found if any(found.values()) else {}


def _next_to_alone(alone: Mapping[str, Sequence[str]], summary: Mapping[str, Any]) -> str:
    better, worse, sites = len(alone["better"]), len(alone["worse"]), counted(sum(map(len, alone.values())), "site")
    on = f"on {(summary.get('site_models_evidence') or summary)['judged_on']} rows"
    if not better and not worse:
        return f" Next to training alone, no difference is clear at any of {sites} {on}."
    return (
        f" That is better than alone at {better or 'none'} of {sites} {on}, worse at {worse or 'none'}{_worse(alone)}."
    )


def _worse(alone: Mapping[str, Sequence[str]]) -> str:
    count = sum(map(len, alone.values()))
    return f" ({_sites(alone['worse'], 0)})" if 0 < len(alone["worse"]) <= min(_NAMED, count - 1) else ""


def _worth(alone: Mapping[str, Sequence[str]], summary: Mapping[str, Any]) -> str:
    """Returns whether one model for all sites is worth it, and what to do if it is not."""
    better, worse, sites = len(alone["better"]), len(alone["worse"]), counted(sum(map(len, alone.values())), "site")
    of = f"of {sites} on {summary['judged_on']} rows"
    advice = f"To give sites a model of their own, {_PERSONALIZE}"
    if worse and better:
        return (
            f"The model is better than training alone at {better} {of}, and worse at {worse}{_worse(alone)}. {advice}"
        )
    if worse:
        said = f"the model is worse than alone at {worse} {of}{_worse(alone)}, and better at none"
        return f"Training together does not pay as it is: {said}. {advice}"
    if better:
        return f"Training together is worth it: the model is better than alone at {better} {of}, and worse at none."
    return f"Training together makes no clear difference: the model is neither better nor worse than alone at any {of}."


def _kinds(summary: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the names of the sites by what they should use; nothing if the run has no models of sites."""
    names: dict[str, list[str]] = {kind: [] for kind in USES}
    for sites in zip(*(of_replica["sites"] for of_replica in summary.get("personal") or [])):
        kind = max(names, key=lambda kind: sum(site["shares"][kind] for site in sites))
        names[kind].append(str(sites[0]["name"]))
    return {kind: sites for kind, sites in names.items() if sites}


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
    kinds = _kinds(summary)
    if not any(site["rows"] for of_replica in of_replicas for site in of_replica["sites"]):
        return ["Which model: no site has enough rows to tell, so every site should use the common model."]
    said = "" if list(kinds) == ["common"] else _compared(summary, "common", "the common model")
    return [f"Which model: by held-out rows, {_in_words(kinds)}{f'; {said}' if said else ''}."]


def _in_words(kinds: Mapping[str, Sequence[str]], uses: Mapping[str, str] = USES) -> str:
    """Returns which sites should use what, given the names of the sites by what that is."""
    every = sum(map(len, kinds.values()))
    first, *others = [(_sites(names, every), uses[kind]) for kind, names in kinds.items()]
    return "; ".join([" should use ".join(first), *map(" ".join, others)])


def _sites(names: Sequence[str], of: int) -> str:
    if len(names) == of:
        return "every site"
    if len(names) > _NAMED:
        return f"{len(names)} sites"
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
