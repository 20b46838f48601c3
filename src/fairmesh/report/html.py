"""A report as one page that needs no other file and no script, and prints on A4."""

import html
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from fairmesh.metrics.units import Unit, defined
from fairmesh.report.contents import Json, contents
from fairmesh.report.plots import curve, dots, network, reliability
from fairmesh.report.runs import (
    SHOWN,
    Run,
    caption_of,
    check_comparable,
    chosen_of,
    personal_table,
    ranked,
    rows_of,
    subgroup_table,
    unequal_choices,
    worst_sites,
)
from fairmesh.report.sentences import REFERENCES, unit_of, verdicts
from fairmesh.report.style import svg

_SENTENCES = 12  # sites; the sentences of more are folded
_ROWS = 24  # rows of a table; more are folded
_OVER_SITES = {
    "worst": "worst site",
    "worst_share": "mean of the worst {tail}",
    "cvar": "CVaR at {tail}",
    "mean": "mean of sites",
    "gap": "best minus worst",
    "std": "standard deviation",
    "jain": "Jain's index",
}
_DOTS = 60  # sites in one picture

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1b1b;--soft:#555;--paper:#fff;--line:#ccc;--mark:#fdf0e3;--box:#f4f5f6;
--good:#00583a;--bad:#9c2a00}
@media (prefers-color-scheme:dark){:root{--ink:#e8e8e8;--soft:#b4b4b4;--paper:#161718;--line:#444;--mark:#3d2b16;
--box:#222425;--good:#6fd6ab;--bad:#ffa680}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;color:var(--ink);background:var(--paper);
max-width:76rem;margin:0 auto;padding:1.2rem 1rem 3rem}
h1{font-size:1.6rem;line-height:1.25;margin:.3rem 0 .6rem}h2{font-size:1.25rem;margin:2.2rem 0 .4rem}
h3{font-size:1.05rem;margin:1.5rem 0 .3rem}
.lead{font-size:1.12rem;margin:.3rem 0}.sites{padding-left:1.2rem;margin:.5rem 0}.sites li{margin:.15rem 0}
.note{color:var(--soft);font-size:.88rem;margin:.3rem 0}
.scroll{overflow-x:auto;margin:.5rem 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.28rem .6rem;border-bottom:1px solid var(--line);text-align:right;vertical-align:top}
th:first-child,td:first-child{text-align:left}tbody th{font-weight:400}thead th{border-bottom:2px solid var(--soft);
vertical-align:bottom}
tr.low>*{background:var(--mark)}td small{display:block;color:var(--soft)}
td,tbody th,th small{white-space:nowrap}td.text,th.text{text-align:left}
.better{color:var(--good)}.worse{color:var(--bad)}b.better,b.worse{font-weight:600}
.pictures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));gap:.5rem 1.5rem;
align-items:start}
figure{margin:.6rem 0;max-width:31rem}figcaption{color:var(--soft);font-size:.88rem}
svg{width:100%;height:auto}svg text{fill:var(--ink)!important}
details{margin:.5rem 0}summary{cursor:pointer;padding:.15rem 0}
section.run{border-top:2px solid var(--line);margin-top:2rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;font-size:.92rem;margin:.5rem 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
pre{background:var(--box);padding:.7rem;overflow:auto;font-size:.8rem}code{overflow-wrap:anywhere}
@media (max-width:40rem){body{font-size:15px}dl{grid-template-columns:1fr}dd{margin-bottom:.4rem}
th,td{padding:.25rem .4rem}}
@media print{@page{size:A4;margin:15mm}:root{color-scheme:light;--ink:#000;--soft:#444;--paper:#fff;--line:#bbb;
--mark:#eee;--box:#f4f4f4;--good:#000;--bad:#000}
body{font-size:10pt;max-width:none;padding:0}h2,h3,summary{break-after:avoid}tr,figure,li{break-inside:avoid}
thead{display:table-header-group}table{font-size:7pt}th,td{padding:2pt 3pt}.scroll{overflow:visible}
.pictures{grid-template-columns:1fr 1fr}
details:not([open])>*{display:revert}details::details-content{content-visibility:visible;height:auto}
section.run{break-before:page}pre{white-space:pre-wrap;columns:2}}
"""


def page(
    runs: Sequence[Run],
    title: str,
    sentence: str = "",
    rows: Sequence[Sequence[str]] | None = None,
    note: str = "",
    told: Json | None = None,
) -> str:
    """Returns a page: what the runs brought each site in words, tables, pictures, and where the models come from.

    Args:
        runs: The runs, which must be comparable. A sweep is one run.
        title: The title.
        sentence: What the page shows, in words. Default: "".
        rows: A table to show instead of that of the runs, with its header. Default: None.
        note: What the reader of that table must know. Default: "".
        told: The contents, if they are known. Default: None.
    """
    check_comparable(runs)
    told = told or contents(runs, title)
    cards, several = told["runs"], len(runs) > 1
    parts = [f"<h1>{_text(title)}</h1>", _lead(sentence) if sentence else ""]
    if several:
        chosen = [chosen_of(run) for run in runs]
        parts += [_items((card["label"], card["sentence"]) for card in cards)]
        parts += [_table(rows or rows_of(chosen)), _note(note if rows else caption_of(chosen))]
        parts += [_note(text) for text in unequal_choices(runs)]
        parts += ["<h2>Curves</h2>", _curves(chosen), "<h2>Site by site</h2>", *_side_by_side(runs, cards)]
    elif rows:
        parts += [_table(rows), _note(note)]
    for run, card in zip(runs, cards):
        body = "".join(_of_run(run, card, lead=not several))
        if several:
            body = f'<section class="run"><h2>{_text(card["label"])}</h2>{body}</section>'
        parts.append(body)
    parts.append(_note(f"Written by fairmesh {told['fairmesh']} on {told['written'][:16].replace('T', ' at ')} UTC."))
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
    )
    head += f"<title>{_text(title)}</title><style>{_STYLE}</style></head>"
    return f"{head}<body><main>{''.join(parts)}</main></body></html>\n"


def _of_run(run: Run, card: Json, lead: bool) -> Iterable[str]:
    """Yields the parts of the page about one run: first what it brought each site, last where it comes from."""
    yield _lead(card["sentence"]) if lead else ""
    yield _sentences(card)
    yield from map(_note, [*card["notes"], *card["hints"]])
    variants, _ = ranked(run)
    chosen = variants[0]
    if card["sweep"]:
        yield from _sweep(card)
    yield f"<h3>Sites</h3>{_sites(card)}"
    compared = any(site["references"] or site["interval"] for site in card["sites"])
    pictures = [_site_picture(card)] if lead or compared else []  # else the picture of all runs shows the same
    pictures += [_network(card)] if card["graph"] else []
    yield _pictures(pictures) if pictures else ""
    if lead:
        best = [replace(one, label=one.label.removeprefix(f"{run.label}: ")) for one in variants[:SHOWN]]
        yield f"<h3>Curves</h3>{_curves(best)}"
        if len(variants) > SHOWN:
            yield _note(f"Curves of the {SHOWN} best of {len(variants)} variants; the table above has all.")
    yield from _calibration(card)
    yield from _left_out(card)
    yield from _all_metrics(card)
    yield from _own_models(chosen)
    yield from _subgroups(chosen)
    yield from _origin(card)
    if card["settings"]:
        yield f"<details><summary>Settings of the experiment</summary><pre>{_text(card['settings'])}</pre></details>"


def _sentences(card: Json) -> str:
    """Returns a sentence per site. Of many sites, those that are worse off come first, and the others are folded."""
    sites = card["sites"]
    said = [(site["name"], site["sentence"], _verdict(site)) for site in sites]
    if len(sites) <= _SENTENCES:
        return _items(said)
    worse = [one for one in said if one[2] == "worse"]
    counts = verdicts(sites)
    if not counts:  # nothing to compare with: the worst ones
        by_metric = card["worst_first"]
        shown_first = [said[i] for i in by_metric[:5]]
        first = "The five worst sites:"
    else:
        shown_first, first = worse, "Worse than alone:" if worse else ""
    heading = f"<p>{first}</p>{_items(shown_first)}" if shown_first else ""
    return f"{heading}<details><summary>A sentence for each of the {len(sites)} sites</summary>{_items(said)}</details>"


def _verdict(site: Json) -> str:
    return site["versus"].get("local", {}).get("verdict", "")


def _in_order(card: Json) -> list[int]:
    """Returns the numbers of the sites in their own order or, of many sites, the worst first."""
    return list(range(len(card["sites"]))) if len(card["sites"]) <= _ROWS else card["worst_first"]


def _value(site: Json, unit: Unit) -> str:
    return unit.shown(site["metrics"][unit.metric]) if site["measured"] else "not measured"


def _sites(card: Json) -> str:
    """Returns the table of the sites: samples, metric and interval, weight, and the models they are compared with."""
    unit, metric, sites = unit_of(card), card["metric"], card["sites"]
    kinds = [kind for kind in _kinds(sites) if any(kind in s["references"] or kind in s["versus"] for s in sites)]
    has = {key: any(site[key] is not None for site in sites) for key in ("n", "support", "interval", "weight")}
    has["support"] = has["support"] and max(len(site["support"] or ()) for site in sites) <= 6
    level = f"{100 * card['intervals']['level']:.0f} % interval"
    names = " / ".join(map(_text, card["classes"]))
    per_class = f"per class<br><small>{names}</small>" if names else "per class"
    header = ["site", *(["n"] if has["n"] else []), *([per_class] if has["support"] else []), _headed(metric, card)]
    header += [level] if has["interval"] else []
    header += [*(["λ"] if has["weight"] else []), *(REFERENCES.get(kind, kind) for kind in kinds)]
    rows, low = [], set()
    order = _in_order(card)
    worst = card["worst_first"][0]
    for at, i in enumerate(order):
        site = sites[i]
        cells = [_text(site["name"])]
        cells += ["-" if site["n"] is None else f"{'≥ ' if site['n_at_least'] else ''}{site['n']}"] if has["n"] else []
        cells += [" / ".join(map(str, site["support"] or ["-"]))] if has["support"] else []
        cells.append(_value(site, unit))
        cells += [unit.interval(site["interval"]) or "-"] if has["interval"] else []
        cells += ["-" if site["weight"] is None else f"{site['weight']:.3f}"] if has["weight"] else []
        cells += [_compared(site, kind, unit) for kind in kinds]
        rows.append(cells)
        if i == worst and defined(site["metrics"][metric]):
            low.add(at)
    models = "each site's own model" if card["judged_by"] == "own models" else "the average of all nodes' models"
    captions = [f"Measured on the {card['judged_on']} samples of each site, for {models}."]
    captions += [f"Means over {card['spread_by']}."] if card["spread_by"] else []
    captions += [f"Intervals cover {card['intervals']['covers']}."] if "covers" in card["intervals"] else []
    captions += ["λ is how much each site counts in training."] if has["weight"] else []
    captions += ["Below each other model: how this run differs from it."] if any(s["versus"] for s in sites) else []
    return _note(" ".join(captions)) + _table([header, *rows], low, escaped=True)


def _kinds(sites: Sequence[Json]) -> list[str]:
    found = dict.fromkeys(kind for site in sites for kind in (*site["references"], *site["versus"]))
    return sorted(found, key=lambda kind: list(REFERENCES).index(kind) if kind in REFERENCES else len(REFERENCES))


def _compared(site: Json, kind: str, unit: Unit) -> str:
    """Returns a cell: the value of another model at the site, and the difference to it."""
    value, versus = site["references"].get(kind), site["versus"].get(kind)
    missing = "not defined" if site["measured"] else "not measured"
    cell = unit.shown(value) if defined(value) else "" if versus else missing if kind in site["references"] else "-"
    if versus:
        verdict = versus["verdict"]
        mark = {"better": "▲ better", "worse": "▼ worse"}.get(verdict, "unclear")
        ends = versus.get("interval")
        shown = f"<br>{unit.difference(ends).removesuffix(' points')}" if ends else ""
        cell += f'<small class="{verdict}">{mark}{shown}</small>'
    return cell


def _headed(metric: str, card: Json) -> str:
    return _text(metric) + ("" if card["metrics"][metric]["higher_is_better"] else "<br><small>lower is better</small>")


def _over(unit: Unit, what: str, value: float | None) -> str:
    if what == "jain":
        return f"{value:.3f}" if defined(value) else "not defined"
    return unit.gap(value) if what in ("gap", "std") else unit.shown(value)


def _all_metrics(card: Json) -> Iterable[str]:
    """Yields a table of every metric at every site, and one of the samples per class where there are many classes."""
    sites, names, order = card["sites"], list(card["metrics"]), _in_order(card)
    if len(names) > 1:
        units = [unit_of(card, name) for name in names]
        header = ["site", *(_headed(name, card) for name in names)]
        rows = [[_text(sites[i]["name"]), *(_value(sites[i], unit) for unit in units)] for i in order]
        over = [
            [
                f"<em>{said.format(tail=card['tail'])}</em>",
                *(_over(unit, what, card["metrics"][unit.metric].get(what)) for unit in units),
            ]
            for what, said in _OVER_SITES.items()
            if any(what in card["metrics"][name] for name in names)
        ]
        yield f"<h3>All metrics</h3>{_table([header, *over, *rows], escaped=True)}"
    counted = [site["support"] for site in sites if site["support"]]
    if counted and max(map(len, counted)) > 6:
        most = max(map(len, counted))
        rows = [[sites[i]["name"], *map(str, sites[i]["support"] or ["-"] * most)] for i in order]
        classes = card["classes"] if len(card["classes"]) == most else [f"class {k}" for k in range(most)]
        table = _table([["site", *classes], *rows])
        yield f"<details><summary>{_text(card['judged_on'].capitalize())} samples per class</summary>{table}</details>"


def _sweep(card: Json) -> Iterable[str]:
    """Yields the ranking of a sweep's variants."""
    sweep, metric, unit = card["sweep"], card["metric"], unit_of(card)
    varied = list(dict.fromkeys(key for row in sweep["variants"] for key in row["changes"]))
    validated = sweep["ranked_on"] == "validation"
    header = ["rank", *varied, *([f"worst {metric}, validation"] if validated else [])]
    header += [f"worst {metric}, {card['judged_on']}", "mean", "gap"]
    rows = []
    for k, row in enumerate(sweep["variants"]):
        lost = row["diverged"] == row["replicas"]
        numbers = [*(["validation_worst"] if validated else []), "worst", "mean", "gap"]
        cells = ["diverged"] * len(numbers) if lost else [_over(unit, name, row[name]) for name in numbers]
        if row["diverged"] and not lost:
            cells[-3] += f" ({row['diverged']} of {row['replicas']} diverged)"
        rows.append([str(k + 1), *(f"{row['changes'].get(key)}" for key in varied), *cells])
    yield f"<h3>{len(rows)} variants, the best first</h3>"
    yield _table([header, *rows], {0}, fold=12)
    yield _note(f"{sweep['choice']}.")
    if validated:
        yield _note(
            "The first one is what model.safetensors holds: the best on the sites' validation samples, smoothed over "
            "the rounds. All else on this page is about it. The others are ranked by the worst site on the validation "
            "samples after the last round."
        )
    else:
        yield _note(
            f"There are no validation samples, so the variants are ranked on the {card['judged_on']} samples, and the "
            "numbers of the first one are too good. Give sites validation samples. All else on this page is about the "
            "first one."
        )


def _dots(card: Json) -> tuple[list[str], dict[str, Any], str]:
    """Returns the arguments of the picture of the sites: the run, and each model that it is compared with."""
    sites, metric, unit = card["sites"], card["metric"], unit_of(card)
    order, scale = _in_order(card)[:_DOTS], unit.scale
    scaled = lambda value: scale * value if defined(value) else float("nan")  # noqa: E731
    intervals = [
        [scale * end for end in found] if (found := sites[i]["interval"]) and all(map(defined, found)) else None
        for i in order
    ]
    series = {"this run": {"values": [scaled(sites[i]["metrics"][metric]) for i in order], "intervals": intervals}}
    for kind in _kinds(sites):
        values = [scaled(sites[i]["references"].get(kind)) for i in order]
        if any(map(defined, values)):
            series[REFERENCES.get(kind, kind)] = {"values": values, "intervals": [None] * len(order)}
    return [sites[i]["name"] for i in order], series, unit.label


def _site_picture(card: Json) -> str:
    return _figure(dots(*_dots(card)), f"{card['metric']} of every site", _dots_caption(card))


def _dots_caption(card: Json) -> str:
    text = (
        f"{card['metric']} of every site"
        if len(card["sites"]) <= _DOTS
        else f"{card['metric']} of the {_DOTS} worst sites"
    )
    text += ", the worst at the top" if len(card["sites"]) > _ROWS else ""
    with_intervals = any(site["interval"] for site in card["sites"])
    return text + (f"; lines are {100 * card['intervals']['level']:.0f} % intervals." if with_intervals else ".")


def _side_by_side(runs: Sequence[Run], cards: Sequence[Json]) -> Iterable[str]:
    """Yields a table and a picture of the sites under several runs, and of their weights."""
    first, names = cards[0], [site["name"] for site in cards[0]["sites"]]
    metric, order, unit = first["metric"], _in_order(first), unit_of(first)
    header = ["site", *(_text(card["label"]) for card in cards)]
    rows = [[_text(names[i]), *(_value(card["sites"][i], unit) for card in cards)] for i in order]
    low = worst_sites([chosen_of(run) for run in runs])
    yield _table([header, *rows], {at for at, i in enumerate(order) if i in low}, escaped=True)
    pictured = cards[:SHOWN]
    series = {
        card["label"]: {
            "values": [unit.scale * card["sites"][i]["metrics"][metric] for i in order[:_DOTS]],
            "intervals": [None] * len(order[:_DOTS]),
        }
        for card in pictured
    }
    shown_names, label = [names[i] for i in order[:_DOTS]], unit.label
    pictures = [
        _figure(dots(shown_names, series, label), f"{metric} of every site under each run", f"{metric} site by site.")
    ]
    weighed = [card for card in pictured if card["sites"][0]["weight"] is not None]
    if weighed:
        series = {
            card["label"]: {
                "values": [card["sites"][i]["weight"] for i in order[:_DOTS]],
                "intervals": [None] * len(order[:_DOTS]),
                "style": pictured.index(card),
                "origins": [card["sites"][i]["prior"] for i in order[:_DOTS]] if _has_prior(card) else None,
            }
            for card in weighed
        }
        drawn = dots(shown_names, series, "weight λ of the site")
        only = f" in {weighed[0]['label']}" if len(weighed) == 1 else ""
        said = f"How much each site counts{only}."
        if any(map(_has_prior, weighed)):
            said += (
                " Arrows begin at the site's prior, its share of all training rows unless the experiment names another."
            )
        pictures.append(_figure(drawn, "weight of every site", said))
    yield _pictures(pictures)


def _has_prior(card: Json) -> bool:
    return all(site["prior"] is not None for site in card["sites"])


def _curves(runs: Sequence[Run]) -> str:
    """Returns pictures of the worst site and the mean against rounds, and of the worst against traffic."""
    drawn, left = list(runs)[:SHOWN], len(runs) - SHOWN
    wanted = [("worst", "rounds"), ("mean", "rounds"), ("worst", "bytes_busiest_node")]
    said = {"worst": "Worst site", "mean": "Mean over sites"}
    against = {"rounds": "against rounds", "bytes_busiest_node": "against what the busiest node sent"}
    sends = any(run.summary["bytes_busiest_node"] for run in drawn)
    pictures = [
        _figure(curve(drawn, what, x), f"{said[what]}, {runs[0].metric} {against[x]}", f"{said[what]} {against[x]}.")
        for what, x in wanted
        if sends or x == "rounds"
    ]
    bands = sorted({run.spread_by() for run in drawn if run.spread_by()})
    note = (
        f"Lines are means over {' or '.join(bands)}; bands span the lowest and the highest of them."
        if bands
        else "There is one replica, so lines have no band."
    )
    return _pictures(pictures) + _note(note + (f" {left} more runs are in the table only." if left > 0 else ""))


def _network(card: Json) -> str:
    """Returns the picture of who talks to whom."""
    graph, sites, metric = card["graph"], card["sites"], card["metric"]
    names, edges = [site["name"] for site in sites], graph["edges"]
    if graph["name"] == "server":
        return f'<p class="note">All {len(sites)} sites talk to a server, and not to each other.</p>'
    if not card["traffic"]["bytes_total"]:
        edges = []
    unit = unit_of(card)
    values = None if graph["placed"] else [unit.scale * site["metrics"][metric] for site in sites]
    worst = None if graph["placed"] else card["worst_first"][0]
    drawn = network([str(i) for i in range(len(names))] if graph["placed"] else names, edges, values, unit.label, worst)
    caption = f"Who talks to whom: {graph['name']}, {len(edges)} links."
    caption += (
        " Numbers are nodes; the sites take other nodes in each replica."
        if graph["placed"]
        else " The square is the worst site."
    )
    return _figure(drawn, f"the network of {len(names)} sites and {len(edges)} links", caption)


def _calibration(card: Json) -> Iterable[str]:
    """Yields the reliability diagram of the network and the calibration error of each site."""
    found = card["calibration"]
    if not found:
        return
    yield "<h3>Calibration</h3>"
    yield _pictures([_figure(reliability(found["bins"]), "reliability diagram over all sites", _RELIABILITY)])
    errors = {site["name"]: site["error"] for site in found["sites"]}
    unit = Unit("calibration error", share=False)
    rows = [
        [site["name"], unit.shown(errors.get(site["name"])) if site["measured"] else "not measured"]
        for site in (card["sites"][i] for i in _in_order(card))
    ]
    yield _table([["site", "calibration error"], *rows])
    yield _note("The calibration error is the mean distance from the dashed line, over bins; 0 is perfect.")


_RELIABILITY = (
    "How often predictions are right, against how probable the model says they are; below: how many there are."
)


def _left_out(card: Json) -> Iterable[str]:
    """Yields how the model does at each site when it is trained without that site."""
    found, metric, unit = card["left_out"], card["metric"], unit_of(card)
    if not found:
        return
    with_it = {site["name"]: site["metrics"][metric] for site in card["sites"]}
    rows = [
        [site["name"], unit.shown(site["metrics"].get(metric)), unit.shown(with_it.get(site["name"]))]
        for site in found["sites"]
    ]
    yield "<h3>Trained without the site</h3>"
    yield _table([["site", f"{metric}, trained without it", f"{metric}, trained with it"], *rows])
    yield _note("What a site that takes no part can expect of the model.")


def _own_models(run: Run) -> Iterable[str]:
    if own := personal_table(run):
        yield f"<h3>The sites' own models</h3>{_table(own)}"
        yield from map(
            _note, sorted({site["note"] for one in run.summary["personal"] for site in one["sites"] if "note" in site})
        )


def _subgroups(run: Run) -> Iterable[str]:
    if subgroups := subgroup_table(run):
        yield f"<h3>Subgroups inside the sites</h3>{_table(subgroups)}"


def _origin(card: Json) -> Iterable[str]:
    """Yields where the model comes from: algorithm, traffic, data, versions, and files."""
    traffic, provenance = card["traffic"], card["provenance"]
    sent = [traffic["bytes_busiest_node"] / 1e6, traffic["bytes_total"] / 1e6, traffic["nominal_bits_busiest"] / 8e6]
    facts = [
        ("algorithm", card["algorithm"]),
        *((f"setting {key}", value) for key, value in card["changes"].items()),
        ("rounds", f"{card['rounds']}" + (f" of {card['planned_rounds']}" if card["planned_rounds"] else "")),
        ("parameters", f"{card['parameters']:,}"),
        ("sent by the busiest node", f"{sent[0]:.3g} MB as encoded, {sent[2]:.3g} MB by the paper's nominal count"),
        ("sent in all", f"{sent[1]:.3g} MB as encoded"),
    ]
    if provenance:
        facts += [("versions", ", ".join(f"{name} {number}" for name, number in provenance["versions"].items()))]
        facts += [("digest of data and model", provenance["data"]["digest"])]
    yield "<h3>Where the model comes from</h3><dl>"
    yield "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts) + "</dl>"
    if card["files"]:
        rows = [[one["name"], one["holds"], one["sha256"][:16]] for one in card["files"]]
        yield _table([["file", "holds", "SHA-256, first 16 digits"], *rows], fold=8, texts=(1,))


def _text(value: object) -> str:
    return html.escape(str(value))


def _lead(text: str) -> str:
    return f'<p class="lead">{_text(text)}</p>'


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>' if text else ""


def _items(said: Iterable[Sequence[str]]) -> str:
    """Returns a list of names and what is said of them, with their verdict as a third item if there is one."""
    items = []
    for name, text, *verdict in said:
        kind = verdict[0] if verdict else ""
        items.append(
            f"<li><b{f' class={kind}' if kind in ('better', 'worse') else ''}>{_text(name)}</b>: {_text(text)}</li>"
        )
    return f'<ul class="sites">{"".join(items)}</ul>'


def _table(
    rows: Sequence[Sequence[str]],
    marked: Iterable[int] = (),
    fold: int = _ROWS,
    escaped: bool = False,
    texts: Collection[int] = (),
) -> str:
    """Returns a table whose first row and first column are headers. Rows after the first `fold` are folded.

    Args:
        rows: The header, and the rows.
        marked: The numbers of rows to mark.
        fold: How many rows are always visible. Default: 24.
        escaped: Whether cells are HTML already. Default: False.
        texts: The numbers of columns with words, which begin at the left, as the first one does. Default: ().
    """
    form, marked = (str if escaped else _text), set(marked)
    left = [' class="text"' if i in texts else "" for i in range(len(rows[0]))]
    header = "".join(f'<th scope="col"{side}>{form(cell)}</th>' for side, cell in zip(left, rows[0]))
    body = [
        f'<tr{" class=low" if i in marked else ""}><th scope="row">{form(row[0])}</th>'
        + "".join(f"<td{side}>{form(cell)}</td>" for side, cell in zip(left[1:], row[1:]))
        + "</tr>"
        for i, row in enumerate(rows[1:])
    ]

    def table(lines: Sequence[str]) -> str:
        inside = f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        return f'<div class="scroll" role="region" aria-label="table" tabindex="0">{inside}</div>'

    if len(body) <= fold:
        return table(body)
    fold = min(fold, 12)
    more = f"<details><summary>{len(body) - fold} more rows</summary>{table(body[fold:])}</details>"
    return table(body[:fold]) + more


def _figure(figure: Any, description: str, caption: str) -> str:
    return f"<figure>{svg(figure, description)}<figcaption>{_text(caption)}</figcaption></figure>"


def _pictures(figures: Iterable[str]) -> str:
    return f'<div class="pictures">{"".join(figures)}</div>'
