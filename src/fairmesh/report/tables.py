"""The tables of a report as rows of text, for the page, the model card and a terminal.

The first row is the header. In a cell, text after a line break is a remark on the value above it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from fairmesh.metrics.units import Unit, defined
from fairmesh.report.elements import ROWS
from fairmesh.report.sections import Json, Rows
from fairmesh.report.sentences import ALONE, REFERENCES, WHOLE, unit_of

CLASSES = 6  # as many have room in one cell
_OVER_SITES = {
    "worst": "worst site",
    "worst_share": "mean of the worst {tail}",
    "cvar": "CVaR at {tail}",
    "mean": "mean of sites",
    "best": "best site",
    "gap": "best minus worst",
    "std": "standard deviation",
    "jain": "Jain's index",
}
USES_MODEL = "should use"
FIXED = "fixed weights"  # what readers of the first screen know the average model by
_MARKS = {"better": "▲ better", "worse": "▼ worse"}


def kinds_of(card: Json) -> list[str]:
    """Returns the models that sites are compared with."""
    found = dict.fromkeys(kind for site in card["sites"] for kind in (*site["references"], *site["versus"]))
    return sorted(found, key=lambda kind: list(REFERENCES).index(kind) if kind in REFERENCES else len(REFERENCES))


def of_sites(card: Json, order: Sequence[int]) -> Rows:
    """Returns the table of the sites: samples, metric and interval, weight, and the models they are compared with.
    Columns without any number are left out.

    Args:
        card: What the report says of the run.
        order: The numbers of the sites, from top to bottom.
    """
    unit, sites = unit_of(card), [card["sites"][i] for i in order]
    few_classes = max(len(site["support"] or ()) for site in sites) <= CLASSES
    columns: dict[str, Callable[[Json], str]] = {  # "" for what a site has not told
        "site": site_name,
        "n": _count,
        "units": lambda site: str(site["units"] or ""),
        "\n".join(["per class", *([" / ".join(card["classes"])] if card["classes"] else [])]): (
            lambda site: " / ".join(map(str, site["support"] or ())) if few_classes else ""
        ),
        _headed(unit.metric, card): lambda site: value_at(site, unit),
        f"{100 * card['intervals']['level']:.0f} % interval": lambda site: unit.interval(site["interval"]),
        "λ": lambda site: f"{site['weight']:.3f}" if defined(site["weight"]) else "",
    }
    columns |= {REFERENCES.get(kind, kind): partial(_compared, kind=kind, unit=unit) for kind in kinds_of(card)}
    cells = {title: [cell(site) for site in sites] for title, cell in columns.items()}
    told = {title: [cell or "-" for cell in column] for title, column in cells.items() if any(column)}
    return [list(told), *map(list, zip(*told.values()))]


def at_a_glance(card: Json, order: Sequence[int], worst: int | None = None) -> Rows:
    """Returns the table of the sites with one line each: what a site should use, how good that is next to training
    alone and to fixed weights, and how much the site counted in training.

    Args:
        card: What the report says of the run.
        order: The numbers of the sites, from top to bottom.
        worst: The number of the worst site. Default: None.
    """
    unit, sites = unit_of(card), card["sites"]
    own = {model["name"]: model for model in card["site_models"]}
    judged_by = unit_of(card, card["site_models_judged_by"])

    def of_own(site: Json, cell: Callable[[Json], str]) -> str:
        return cell(own[site["name"]]) if site["name"] in own else ""

    def value(site: Json) -> str:
        ends = [unit.number(end) for end in site["interval"] or ()]
        interval = "" if own or not ends else f"\n({' to '.join(ends)})"  # else the picture has it
        return (_bare(site["metrics"][unit.metric], unit) if site["measured"] else "not measured") + interval

    def alone(site: Json) -> str:
        return of_own(site, lambda model: _marked(model["local"], unit, model["versus"].get(ALONE), judged_by))

    columns: dict[str, Callable[[Json], str]] = {
        "site": lambda site: site_name(site) + ("\nworst" if worst is not None and site is sites[worst] else ""),
        "its model": lambda site: of_own(site, lambda model: _bare(model["personal"], unit)),
        **({REFERENCES[ALONE]: alone} if own else {}),
        USES_MODEL: lambda site: of_own(site, mostly),
        "common model" if own else _headed(unit.metric, card): value,
        **({} if own else {REFERENCES[ALONE]: lambda site: _beside(site, ALONE, unit)}),
        FIXED: lambda site: _beside(site, "average", unit),
        "n": _count,
        "weight λ, %": lambda site: _share(site["weight"]),
        "prior, %": lambda site: _share(site["prior"]) if defined(site["weight"]) else "",
    }
    cells = {title: [cell(sites[i]) for i in order] for title, cell in columns.items()}
    told = {title: [cell or "-" for cell in column] for title, column in cells.items() if any(column)}
    return [list(told), *map(list, zip(*told.values()))]


def glance_captions(card: Json) -> Iterable[str]:
    """Yields what a reader of the sites at a glance must know."""
    sites, unit = card["sites"], unit_of(card)
    count = f"; n is how many {card['judged_on']} samples judge a site" if any(map(_count, sites)) else ""
    yield f"Numbers are {unit.label}{count}."
    if card["spread_by"]:
        yield f"Means over {card['spread_by']}."
    if any(site["interval"] for site in sites) and not card["site_models"]:
        yield f"In brackets: {100 * card['intervals']['level']:.0f} % intervals."
    whose = ("the site's model", "the common model") if card["site_models"] else ("this run", "this run")
    next_to = [("alone", ALONE, [*sites, *card["site_models"]]), (FIXED, "average", sites)]
    known = [(who, name) for who, (name, kind, of) in zip(whose, next_to) if any(kind in one["versus"] for one in of)]
    if known:
        said = " or ".join(f"{who} is better than {name}" for who, name in known)
        said = said.replace(" or this run is better than", " or")
        yield f"▲ says that {said}, ▼ that it is worse, and by how much; unmarked differences are not clear."
    if any(defined(site["weight"]) for site in sites):
        yield f"The weight λ is how much a site counted in training; with fixed ones it counts by its {prior_of(card)}."
    if card["site_models"]:
        yield "The marked site is the worst one with its own model."
    if len(sites) > ROWS:
        yield "Sites that are worse than alone come first, then the worst."


_ROUNDED = 0.01  # shares of rows that differ less from the prior are the prior


def prior_of(card: Json) -> str:
    """Returns what the prior is, as far as it is known here."""
    told = ((card["provenance"] or {}).get("data") or {}).get("sites") or []
    rows = [site.get("train", 0) for site in told]
    if len(rows) != len(card["sites"]) or not sum(rows):
        return "prior (its share of all training rows, unless the experiment names another)"
    same = all(abs(count / sum(rows) - site["prior"]) < _ROUNDED for count, site in zip(rows, card["sites"]))
    return "prior (its share of all training rows)" if same else "prior (which the experiment names)"


def _bare(value: Any, unit: Unit) -> str:
    """Returns a value without its unit, or that it is not defined."""
    return unit.number(value) if defined(value) else unit.shown(value)


def _share(value: Any) -> str:
    return f"{100 * value:.1f}" if defined(value) else ""


def mostly(model: Mapping[str, Any]) -> str:
    """Returns what a site should use, in a word."""
    share, kind = max((share, kind) for kind, share in model["shares"].items())
    return kind if share >= WHOLE else f"mostly {kind}"


def _beside(site: Json, kind: str, unit: Unit) -> str:
    return _marked(site["references"].get(kind), unit, site["versus"].get(kind), unit)


def _marked(value: Any, unit: Unit, versus: Json | None, judged_by: Unit) -> str:
    """Returns what another model reaches at a site, and the difference from it if that is clear."""
    cell = _bare(value, unit) if defined(value) else ""
    if not versus or versus["verdict"] not in _MARKS:
        return cell
    interval = versus.get("interval")
    return f"{cell}\n{_MARKS[versus['verdict']][:1]}{f' {judged_by.difference(interval)}' if interval else ''}"


def _count(site: Json) -> str:
    return f"{'≥ ' if site['n_at_least'] else ''}{site['n']}" if defined(site["n"]) else ""


def captions(card: Json) -> Iterable[str]:
    """Yields what a reader of the table of sites must know."""
    sites = card["sites"]
    models = "each site's own model" if card["judged_by"] == "own models" else "the average of all nodes' models"
    yield f"Measured on the {card['judged_on']} samples of each site, for {models}."
    if card["spread_by"]:
        yield f"Means over {card['spread_by']}."
    if "covers" in card["intervals"]:
        yield f"Intervals cover {card['intervals']['covers']}."
    if any(site["weight"] is not None for site in sites):
        yield "λ is how much each site counts in training."
    if any(site["versus"] for site in sites):
        yield "The mark at each other model says how this run differs from it."
    if len(sites) > 1 and any("level" in one for site in sites for one in site["versus"].values()):
        yield (
            "Marks are adjusted for the number of sites: few of those that are better or worse are so by chance. Their "
            "intervals allow for that too, and are wider than 95 % ones."
        )


def of_metrics(card: Json, order: Sequence[int]) -> Rows:
    """Returns the table of every metric: what it says over all sites, and its value at every site.

    Args:
        card: What the report says of the run.
        order: The numbers of the sites, from top to bottom.
    """
    metrics = card["metrics"]
    units = [unit_of(card, name) for name in metrics]
    over = [
        [said.format(tail=card["tail"]), *(over_sites(unit, what, metrics[unit.metric].get(what)) for unit in units)]
        for what, said in _OVER_SITES.items()
        if any(what in metrics[name] for name in metrics)
    ]
    sites = [[site_name(site), *(value_at(site, unit) for unit in units)] for site in (card["sites"][i] for i in order)]
    return [["site", *(_headed(name, card) for name in metrics)], *over, *sites]


def facts(card: Json) -> Rows:
    """Returns where the model comes from, as names and texts: algorithm, graph, traffic, versions."""
    traffic, graph, provenance = card["traffic"], card["graph"], card["provenance"]
    busiest, total = (traffic[name] / 1e6 for name in ("bytes_busiest_node", "bytes_total"))
    nominal = traffic["nominal_bits_busiest"] / 8e6
    found = [
        ["algorithm", card["algorithm"]],
        *([f"setting {key}", f"{value}"] for key, value in card["changes"].items()),
        ["rounds", f"{card['rounds']}" + (f" of {card['planned_rounds']}" if card["planned_rounds"] else "")],
        ["parameters", f"{card['parameters']:,}"],
        ["sites", f"{len(card['sites'])}"],
        *([["graph", f"{graph['name']}, {len(graph['edges'])} links"]] if graph else []),
        ["sent by the busiest node", f"{busiest:.3g} MB as encoded, {nominal:.3g} MB by the paper's nominal count"],
        ["sent in all", f"{total:.3g} MB as encoded"],
    ]
    if wire := traffic["on_the_wire"]:
        payload, overhead = (wire[f"{of}_out"] / 1e6 for of in ("payload", "overhead"))
        of_it = f"{payload:.3g} MB of messages and {overhead:.3g} MB of TLS, announcements and acknowledgements"
        uncounted = "without headers of TCP and IP"
        found.append([f"sent by {wire['site']} on the wire", f"{payload + overhead:.3g} MB: {of_it}, {uncounted}"])
    if provenance:
        versions = ", ".join(f"{name} {number}" for name, number in provenance["versions"].items())
        found.append(["versions", versions])
        if digest := provenance["data"]["digest"]:
            found.append(["digest of data and model", digest])
    return found


def value_at(site: Json, unit: Unit) -> str:
    """Returns the value of a metric at a site."""
    return unit.shown(site["metrics"][unit.metric]) if site["measured"] else "not measured"


def over_sites(unit: Unit, what: str, value: float | None) -> str:
    """Returns what a metric says over all sites, such as its "gap"."""
    if what == "jain":
        return Unit("jain", share=False).shown(value)
    return unit.gap(value) if what in ("gap", "std") else unit.shown(value)


def site_name(site: Json) -> str:
    return " ".join(str(site["name"]).split())  # a name has no remark


def _headed(metric: str, card: Json) -> str:
    return metric + ("" if card["metrics"][metric]["higher_is_better"] else "\nlower is better")


def _compared(site: Json, kind: str, unit: Unit) -> str:
    """Returns the value of another model at the site, and the difference to it as a remark."""
    value, versus = site["references"].get(kind), site["versus"].get(kind)
    missing = "not defined" if site["measured"] else "not measured"
    cell = unit.shown(value) if defined(value) else "" if versus else missing if kind in site["references"] else "-"
    if not versus:
        return cell
    interval = versus.get("interval")
    difference = [unit.difference(interval)] if interval else []
    return "\n".join([cell, _MARKS.get(versus["verdict"], "unclear"), *difference])
