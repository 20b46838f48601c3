"""What a run brought each site and the network, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from fairmesh.comparisons.reference_models import TITLES
from fairmesh.errors import counted, in_bytes
from fairmesh.evidence.many import chance_in_words, excludes_zero
from fairmesh.evidence.verdicts import verdict_in_words
from fairmesh.metrics.units import Unit, defined

ALONE = "local"
REFERENCES = TITLES | {ALONE: "alone"}
"""The models that sites are compared with, by their names in JSON, and what tables call them."""


USES = {
    "own": "a model of the site's rows alone",
    "adapted": "one adapted from the common model",
    "common": "the common model",
}
"""What a site should use, by how `PersonalSite.uses` names it."""
WHOLE = 0.995  # a model of which other kinds are only traces


def unit_of(card: Mapping[str, Any], metric: str | None = None) -> Unit:
    """Returns how a card shows a metric; None for the primary one."""
    metric = str(metric or card["metric"])
    return Unit.of(metric, card["metrics"][metric])


def site_sentence(site: Mapping[str, Any], card: Mapping[str, Any]) -> str:
    """Returns what the run brought one site."""
    unit, value = unit_of(card), site["metrics"][card["metric"]]
    if not site["measured"]:
        return f"not measured: it has no {card['judged_on']} samples" if site["n"] == 0 else "not measured"
    interval = unit.interval(site["interval"])
    at_least = "at least " if site["n_at_least"] else ""
    of = f" on {at_least}{site['n']} {card['judged_on']} samples" if site["n"] else ""
    of += f" of {counted(site['units'], 'unit')}" if site["units"] else ""
    told = f"{unit.metric} {unit.shown(value)}{f' ({interval})' if interval else ''}{of}"
    if ALONE not in site["versus"]:
        return told + (f"; not compared with alone: {site['why_not_compared']}" if site["why_not_compared"] else "")
    said = f"{verdict_in_words(site['versus'][ALONE], unit, 'alone')}; {told}"
    constant = site["versus"].get("constant")
    if constant and constant["verdict"] != "better":
        said += "; not clearly better than a constant answer"
    return said


def site_model_sentence(model: Mapping[str, Any], card: Mapping[str, Any]) -> str:
    """Returns what a site should use, and how that differs from training alone and from the common model."""
    unit, judged_by = unit_of(card), unit_of(card, card["site_models_judged_by"])
    share, kind = max((share, kind) for kind, share in model["shares"].items())
    mostly = "" if share >= WHOLE else "mostly "
    said = f"should use {mostly}{USES[kind]} ({unit.metric} {unit.shown(model['personal'])})"
    for name, other in ((ALONE, "alone"), ("common", "the common model")):
        if kind != name and name in model["versus"]:
            said += f"; {verdict_in_words(model['versus'][name], judged_by, other)}"
    return said


def network_sentence(card: Mapping[str, Any]) -> str:
    """Returns what the run brought the sites together."""
    metric, sites, over = card["metric"], card["sites"], card["over_sites"]
    if not defined(over["worst"]):
        return "diverged: no replica has a result" if card["diverged"] else f"{metric} is not defined at any site"
    measured = [site for site in sites if defined(site["metrics"][metric])]
    worst, unit = sites[card["worst_first"][0]], unit_of(card)  # with its own interval, as tables of sites have it
    mean = card["intervals"].get("mean") or {"value": over["mean"], "interval": None}
    with_common = "With the common model, worst" if card["headline"] else "Worst"
    at_worst = unit.with_interval(worst["metrics"][metric], worst["interval"])
    parts = [
        f"{with_common} at {worst['name']}: {metric} {at_worst}.",
        f"Mean over {len(measured)} sites: {unit.with_interval(mean['value'], mean['interval'])}.",
    ]
    counts = verdicts(sites)
    if counts:
        total = sum(counts.values())
        who = "The common model is better" if card["headline"] else "Better"  # which may not be what sites are given
        first = f"{who} than alone at {counts['better']} of {total} sites, worse at {counts['worse']}"
        chance = chance_in_words(_by_themselves(sites), counts["better"] + counts["worse"], total)
        parts.insert(0, f"{first}, no clear difference at {counts['unclear']}.{f' {chance}.' if chance else ''}")
    if card["diverged"]:
        parts.append(f"{card['diverged']} of {card['replicas']} replicas diverged and are left out.")
    return " ".join(parts)


def traffic_sentence(card: Mapping[str, Any]) -> str:
    """Returns how much has left a site; "" if sites have sent nothing."""
    traffic, wire = card["traffic"], card["traffic"]["on_the_wire"]
    if wire:
        sent, overhead = in_bytes(wire["payload_out"]), in_bytes(wire["overhead_out"])
        return f"What has left {wire['site']}: {sent} of model messages and {overhead} of overhead; no rows."
    if not traffic["bytes_total"]:
        return ""
    busiest, total = in_bytes(traffic["bytes_busiest_node"]), in_bytes(traffic["bytes_total"])
    return f"What leaves a site: {busiest} of model messages at the busiest one, {total} at all together; no rows."


def verdicts(sites: Sequence[Mapping[str, Any]], other: str = ALONE) -> dict[str, int]:
    """Returns how many sites are better, worse, or not clearly different; nothing if none was compared."""
    found = [site["versus"][other]["verdict"] for site in sites if other in site["versus"]]
    return {kind: found.count(kind) for kind in ("better", "unclear", "worse")} if found else {}


def _by_themselves(sites: Sequence[Mapping[str, Any]], other: str = ALONE) -> int:
    """Returns how many sites differ if one looks at each alone; of those that tell no interval, how many say so."""
    found = [site["versus"][other] for site in sites if other in site["versus"]]
    return sum(excludes_zero(one["interval"]) if one.get("interval") else one["verdict"] != "unclear" for one in found)


def hints(card: Mapping[str, Any]) -> list[str]:
    """Returns how to get what the report does not have, beside what its conclusion says."""
    found, sites = [], card["sites"]
    between = card["provenance"] is None or bool(card.get("privacy"))  # where neither is possible
    if card["left_out"] is None and not between and len(sites) > 2:
        found.append("To see how the model does at a site that took no part, run with --leave-one-out.")
    return found


def privacy_sentences(privacy: Mapping[str, Any]) -> list[str]:
    """Returns what a private run has spent, and what that does not cover, in sentences; none without privacy.

    Args:
        privacy: The entry of summary.json; {} if there is none.
    """
    if not privacy:
        return []
    measured = "Metrics are measured on held-out rows without noise, which this does not cover."
    if "evaluation_epsilon" in privacy:  # between organisations
        once = privacy["evaluation_epsilon"]
        measured = (
            f"Metrics are one evaluation of each site's test rows, with noise for epsilon = {once:g} of their own."
        )
        measured += _evaluation_noise(privacy.get("evaluation_deviation", {}))
        measured = measured if once else "Sites have told no metrics."
    said = [
        f"Private per {privacy['unit']}: no site has spent more than epsilon = {privacy['epsilon']:.3g} of "
        f"{privacy['budget']:g} at delta = {privacy['delta']:g} on its training rows. {measured}"
    ]
    if privacy.get("loss_share"):
        said.append("The weights of the sites follow losses with noise, so part of their differences is that noise.")
    if "together" in privacy:
        said.append(
            f"That is for each of {privacy['models']} models. Whoever sees all of them, or the best of them, learns "
            f"what epsilon = {privacy['together']:.3g} allows."
        )
    if privacy.get("secret", "").startswith("from the seed"):
        said.append(
            "The noise was drawn from the seed (privacy.repeatable), so whoever knows the seed can remove it: do not "
            "publish this model as private."
        )
    return said


def _evaluation_noise(deviations: Mapping[str, Mapping[str, float]]) -> str:
    """Returns how large the noise in the sites' metrics is, in a sentence."""
    told = [deviation["accuracy"] for deviation in deviations.values() if "accuracy" in deviation]
    if not told:
        return ""
    least, most = 100 * min(told), 100 * max(told)
    spread = f"{most:.2g}" if most < 1.05 * least else f"{least:.2g} to {most:.2g}"
    return (
        f" That noise has a standard deviation of {spread} points of accuracy at a site, so that sites may differ by "
        "twice as much for no other reason."
    )


def privacy_rows(card: Mapping[str, Any]) -> list[list[str]]:
    """Returns what every site has spent of its budget, with a header; of several splits, for the first.

    Args:
        card: What the report says of a private run.
    """
    privacy, names = card["privacy"], [str(site["name"]) for site in card["sites"]]
    by_name = privacy.get("sites", {})  # between organisations, where sites tell nothing but what they have spent
    spent = [by_name.get(name) for name in names] if by_name else privacy["epsilons"][: len(names)]
    columns = [
        ["site", *names],
        ["epsilon spent", *("not told" if one is None else f"{one:.3g}" for one in spent)],
        *([what, *[f"{privacy[key]:g}"] * len(names)] for what, key in _SAME_AT_ALL.items()),
    ]
    if "units" in privacy:
        columns.insert(1, ["units", *(f"{count:,}" for count in privacy["units"][: len(names)])])
        columns += [
            ["noise, in clips", *(f"{noise:.3g}" for noise in privacy["noise"][: len(names)])],
            ["expected batch", *[f"{privacy['batch']:.3g}"] * len(names)],
        ]
    return [list(row) for row in zip(*columns)]


_SAME_AT_ALL = {"budget": "budget", "delta": "delta", "clip": "clip"}
