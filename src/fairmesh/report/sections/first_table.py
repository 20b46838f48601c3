"""The sites at a glance: one line for each, next to pictures of the same numbers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fairmesh.metrics.units import defined
from fairmesh.report import charts
from fairmesh.report.elements import COMPACT, ROWS, figure, folded, items, note, pictures, table
from fairmesh.report.network_picture import network
from fairmesh.report.sections import View, scaled
from fairmesh.report.sentences import ALONE
from fairmesh.report.style import STYLES
from fairmesh.report.tables import FIXED, USES_MODEL, at_a_glance, glance_captions
from fairmesh.report.weight_picture import weights

PLACE = 12


def shown(view: View) -> Iterable[str]:
    card, worst = view.card, view.card["given_worst_first"][0]
    known = defined(card["sites"][worst]["metrics"][card["metric"]])
    rows = at_a_glance(card, view.order, worst if known else None)
    marked = {view.order.index(worst)} if known else ()
    texts = {i for i, title in enumerate(rows[0]) if title == USES_MODEL}
    said = note(" ".join(glance_captions(card)))
    told = table(rows, marked, fold=COMPACT, texts=texts, compact=True, cards=True) + said + _sentences(view)
    drawn = pictures([_values(view), weights(view), network(view)])
    beside = " beside" if len(card["sites"]) > ROWS else ""
    yield f'<div class="first{beside}"><div>{told}</div>{drawn}</div>'


def _values(view: View) -> str:
    """Returns the picture of the sites: the models that they are given, training alone, and fixed weights; of many
    sites, only the first two."""
    card, unit = view.card, view.unit
    sites = view.sites[:COMPACT]
    drawn = list(_estimates(view, sites).items())[: 2 if len(sites) > ROWS else None]
    drawn = [(label, scaled(estimates, unit)) for label, estimates in drawn if any(defined(v) for v, _ in estimates)]
    if not drawn or (len(drawn) == 1 and not any(drawn[0][1][1])):
        return ""  # the table says the same
    series = [charts.Dots(label, *points, style=STYLES[label]) for label, points in drawn]
    every = "every site" if len(sites) == len(card["sites"]) else f"the first {len(sites)} sites of the table"
    caption = f"The {unit.metric} of {every}"
    known = any(any(one.intervals) for one in series)
    caption += f"; lines are {100 * card['intervals']['level']:.0f} % intervals." if known else "."
    return figure(charts.dots([site["name"] for site in sites], series, unit.label, caption), caption)


def _estimates(view: View, sites: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[Any, Any]]]:
    """Returns, for each kind of model, its value and its interval at the sites; the most important kind first."""
    models = {model["name"]: model for model in view.card["site_models"]}
    own = [models.get(site["name"], {}) for site in sites]
    common = [(site["metrics"][view.unit.metric], site["interval"]) for site in sites]
    alone = [(model["local"] if model else site["references"].get(ALONE), None) for site, model in zip(sites, own)]
    fixed = [(site["references"].get("average"), None) for site in sites]
    if not models:
        return {"this run": common, "alone": alone, FIXED: fixed}
    given = [(model.get("personal"), model.get("interval")) for model in own]
    return {"its model": given, "alone": alone, "common model": common, FIXED: fixed}


def _sentences(view: View) -> str:
    """Returns a sentence for each site, folded, in the order of the table."""
    card = view.card
    by_name = {one["name"]: one for one in card["site_models"] or card["sites"]}
    sites = [by_name[site["name"]] for site in view.sites if site["name"] in by_name]
    said = [(site["name"], site["sentence"], site["versus"].get(ALONE, {}).get("verdict", "")) for site in sites]
    return folded(f"The same in words, site by site ({len(said)})", items(said), again=True)
