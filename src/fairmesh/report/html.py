"""A report as one page that needs no other file and no script, and prints on A4."""

import html
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from fairmesh.metrics.units import Unit, defined
from fairmesh.report import tables
from fairmesh.report.contents import Json, contents
from fairmesh.report.plots import curve, dots, network, reliability, scaled_series
from fairmesh.report.runs import (
    SHOWN,
    Run,
    caption_of,
    check_comparable,
    chosen_of,
    personal_table,
    ranked,
    rows_of,
    site_table,
    subgroup_table,
    unequal_choices,
    worst_sites,
)
from fairmesh.report.sentences import REFERENCES, unit_of, verdicts
from fairmesh.report.style import svg

_SENTENCES = 12  # sites; the sentences of more are folded
_ROWS = 24  # rows of a table; more are folded
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
tr.low>*{background:var(--mark)}small{display:block}td small{color:var(--soft)}
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
    note: str = "",
    told: Json | None = None,
) -> str:
    """Returns a page: what the runs brought each site in words, tables, pictures, and where the models come from.

    Args:
        runs: The runs, which must be comparable. A sweep is one run.
        title: The title.
        sentence: What the page shows, in words. Default: "".
        note: What the reader of its numbers must know. Default: "".
        told: The contents, if they are known. Default: None.
    """
    check_comparable(runs)
    told = told or contents(runs, title)
    cards, several = told["runs"], len(runs) > 1
    parts = [f"<h1>{_text(title)}</h1>", _lead(sentence) if sentence else "", _note(note)]
    if several:
        chosen = [chosen_of(run) for run in runs]
        parts += [_items((card["label"], card["sentence"]) for card in cards)]
        parts += [_table(rows_of(chosen)), _note(caption_of(chosen))]
        parts += [_note(text) for text in unequal_choices(runs)]
        parts += ["<h2>Curves</h2>", _curves(chosen), "<h2>Site by site</h2>", *_side_by_side(chosen, cards)]
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
    order, variants = _in_order(card), ranked(run)[0]
    chosen = variants[0]
    yield _lead(card["sentence"]) if lead else ""
    yield _sentences(card)
    yield from map(_note, [*card["notes"], *card["hints"]])
    if card["sweep"]:
        yield from _sweep(card)
    yield "<h3>Sites</h3>" + _note(" ".join(tables.captions(card)))
    worst = card["worst_first"][0]
    marked = {order.index(worst)} if defined(card["sites"][worst]["metrics"][card["metric"]]) else ()
    yield _table(tables.of_sites(card, order), marked)
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
    if left_out := tables.of_left_out(card):
        yield f"<h3>Trained without the site</h3>{_table(left_out)}"
        yield _note("What a site that takes no part can expect of the model.")
    if len(card["metrics"]) > 1:
        yield f"<h3>All metrics</h3>{_table(tables.of_metrics(card, order))}"
    if classes := tables.of_classes(card, order):
        yield _folded(f"{card['judged_on'].capitalize()} samples per class", _table(classes))
    if own := personal_table(chosen):
        yield f"<h3>The sites' own models</h3>{_table(own)}"
        notes = {site["note"] for one in chosen.summary["personal"] for site in one["sites"] if "note" in site}
        yield from map(_note, sorted(notes))
    if subgroups := subgroup_table(chosen):
        yield f"<h3>Subgroups inside the sites</h3>{_table(subgroups)}"
    facts = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in tables.facts(card))
    yield f"<h3>Where the model comes from</h3><dl>{facts}</dl>"
    if card["files"]:
        files = [[one["name"], one["holds"], one["sha256"][:16]] for one in card["files"]]
        yield _table([["file", "holds", "SHA-256, first 16 digits"], *files], fold=8, texts=(1,))
    if card["settings"]:
        yield _folded("Settings of the experiment", f"<pre>{_text(card['settings'])}</pre>")


def _sentences(card: Json) -> str:
    """Returns a sentence per site. Of many sites, those that are worse off come first, and the others are folded."""
    sites = card["sites"]
    said = [(site["name"], site["sentence"], site["versus"].get("local", {}).get("verdict", "")) for site in sites]
    if len(sites) <= _SENTENCES:
        return _items(said)
    first, heading = [item for item in said if item[2] == "worse"], "Worse than alone:"
    if not verdicts(sites):  # nothing to compare with: the worst ones
        first, heading = [said[i] for i in card["worst_first"][:5]], "The five worst sites:"
    every = _folded(f"A sentence for each of the {len(sites)} sites", _items(said))
    return (f"<p>{heading}</p>{_items(first)}" if first else "") + every


def _in_order(card: Json) -> list[int]:
    """Returns the numbers of the sites in their own order or, of many sites, the worst first."""
    return list(range(len(card["sites"]))) if len(card["sites"]) <= _ROWS else card["worst_first"]


def _sweep(card: Json) -> Iterable[str]:
    """Yields the ranking of a sweep's variants."""
    sweep = card["sweep"]
    yield f"<h3>{len(sweep['variants'])} variants, the best first</h3>"
    yield _table(tables.of_variants(card), {0}, fold=12)
    yield _note(f"{sweep['choice']}.")
    if sweep["ranked_on"] == "validation":
        said = (
            "The first one is what model.safetensors holds: the best on the sites' validation samples, smoothed over "
            "the rounds. The others are ranked by the worst site on the validation samples after the last round."
        )
    else:
        said = (
            f"There are no validation samples, so the variants are ranked on the {card['judged_on']} samples, and the "
            "numbers of the first one are too good. Give sites validation samples."
        )
    yield _note(f"{said} All else on this page is about the first one.")


def _site_picture(card: Json) -> str:
    """Returns the picture of the sites: the run, and each model that it is compared with."""
    unit, order = unit_of(card), _in_order(card)[:_DOTS]
    sites = [card["sites"][i] for i in order]
    rows = [{"value": site["metrics"][unit.metric], "interval": site["interval"]} for site in sites]
    series = {"this run": scaled_series(rows, unit.scale)}
    for kind in tables.kinds_of(card):
        rows = [{"value": site["references"].get(kind)} for site in sites]
        if any(defined(row["value"]) for row in rows):
            series[REFERENCES.get(kind, kind)] = scaled_series(rows, unit.scale)
    drawn = dots([site["name"] for site in sites], series, unit.label)
    which = "every site" if len(card["sites"]) <= _DOTS else f"the {_DOTS} worst sites"
    caption = f"{unit.metric} of {which}" + (", the worst at the top" if len(card["sites"]) > _ROWS else "")
    known = any(series["this run"]["intervals"])
    caption += f"; lines are {100 * card['intervals']['level']:.0f} % intervals." if known else "."
    return _figure(drawn, f"{unit.metric} of every site", caption)


def _side_by_side(runs: Sequence[Run], cards: Sequence[Json]) -> Iterable[str]:
    """Yields a table and a picture of the sites under several runs, and of their weights."""
    order, unit, low = _in_order(cards[0]), unit_of(cards[0]), worst_sites(runs)
    header, *rows = site_table([replace(run, label=card["label"]) for run, card in zip(runs, cards)])
    yield _table([header, *(rows[i] for i in order)], {at for at, i in enumerate(order) if i in low})
    pictured, order = cards[:SHOWN], order[:_DOTS]
    names = [cards[0]["sites"][i]["name"] for i in order]
    values: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for k, card in enumerate(pictured):
        sites = [card["sites"][i] for i in order]
        values[card["label"]] = {"values": [unit.scale * site["metrics"][unit.metric] for site in sites]}
        lambdas, priors = ([site[key] for site in sites] for key in ("weight", "prior"))
        if lambdas[0] is not None:
            weights[card["label"]] = {"values": lambdas, "style": k, "origins": priors}
    drawn = dots(names, values, unit.label)
    pictures = [_figure(drawn, f"{unit.metric} of every site under each run", f"{unit.metric} site by site.")]
    if weights:
        said = (
            f"How much each site counts in {', '.join(weights)}. Arrows begin at the site's prior, its share of all "
            "training rows unless the experiment names another."
        )
        pictures.append(_figure(dots(names, weights, "weight λ of the site"), "weight of every site", said))
    yield _pictures(pictures)


def _curves(runs: Sequence[Run]) -> str:
    """Returns pictures of the worst site and the mean against rounds, and of the worst against traffic."""
    drawn, left = list(runs)[:SHOWN], len(runs) - SHOWN
    wanted = [("worst", "rounds"), ("mean", "rounds")]
    if any(run.summary["bytes_busiest_node"] for run in drawn):
        wanted.append(("worst", "bytes_busiest_node"))
    said = {"worst": "Worst site", "mean": "Mean over sites"}
    axes = {"rounds": "against rounds", "bytes_busiest_node": "against what the busiest node sent"}
    pictures = [
        _figure(curve(drawn, what, x), f"{said[what]}, {runs[0].metric} {axes[x]}", f"{said[what]} {axes[x]}.")
        for what, x in wanted
    ]
    bands = sorted({run.spread_by() for run in drawn if run.spread_by()})
    note = "There is one replica, so lines have no band."
    if bands:
        note = f"Lines are means over {' or '.join(bands)}; bands span the lowest and the highest of them."
    return _pictures(pictures) + _note(note + (f" {left} more runs are in the table only." if left > 0 else ""))


def _network(card: Json) -> str:
    """Returns the picture of who talks to whom."""
    graph, sites, unit = card["graph"], card["sites"], unit_of(card)
    if graph["name"] == "server":
        return _note(f"All {len(sites)} sites talk to a server, and not to each other.")
    edges = graph["edges"] if card["traffic"]["bytes_total"] else []
    if graph["placed"]:
        drawn = network([str(i) for i in range(len(sites))], edges)
        said = "Numbers are nodes; the sites take other nodes in each replica."
    else:
        values = [unit.scale * site["metrics"][unit.metric] for site in sites]
        drawn = network([site["name"] for site in sites], edges, values, unit.label, card["worst_first"][0])
        said = "The square is the worst site."
    caption = f"Who talks to whom: {graph['name']}, {len(edges)} links. {said}"
    return _figure(drawn, f"the network of {len(sites)} sites and {len(edges)} links", caption)


def _calibration(card: Json) -> Iterable[str]:
    """Yields the reliability diagram of the network and the calibration error of each site."""
    found = card["calibration"]
    if not found:
        return
    drawn, unit = reliability(found["bins"]), Unit("calibration error", share=False)
    caption = (
        "How often predictions are right, against how probable the model says they are; below: how many there are."
    )
    yield f"<h3>Calibration</h3>{_pictures([_figure(drawn, 'reliability diagram over all sites', caption)])}"
    errors = {site["name"]: site["error"] for site in found["sites"]}
    sites = [card["sites"][i] for i in _in_order(card)]
    rows = [[s["name"], unit.shown(errors.get(s["name"])) if s["measured"] else "not measured"] for s in sites]
    yield _table([["site", unit.metric], *rows])
    yield _note("The calibration error is the mean distance from the dashed line, over bins; 0 is perfect.")


def _text(value: object) -> str:
    return html.escape(str(value))


def _lead(text: str) -> str:
    return f'<p class="lead">{_text(text)}</p>'


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>' if text else ""


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{_text(summary)}</summary>{body}</details>"


def _items(said: Iterable[Sequence[str]]) -> str:
    """Returns a list of names and what is said of them, with their verdict as a third item if there is one."""
    items = []
    for name, text, *verdict in said:
        kind = f" class={verdict[0]}" if verdict and verdict[0] in ("better", "worse") else ""
        items.append(f"<li><b{kind}>{_text(name)}</b>: {_text(text)}</li>")
    return f'<ul class="sites">{"".join(items)}</ul>'


def _cell(text: object) -> str:
    """Returns a cell. Lines after the first are a remark, coloured by the mark of a verdict."""
    value, *remark = map(_text, str(text).split("\n"))
    if not remark:
        return value
    kind = {"▲": " class=better", "▼": " class=worse"}.get(remark[0][:1], "")
    return f"{value}<small{kind}>{'<br>'.join(remark)}</small>"


def _table(
    rows: Sequence[Sequence[str]], marked: Iterable[int] = (), fold: int = _ROWS, texts: Collection[int] = ()
) -> str:
    """Returns a table whose first row and first column are headers. Rows after the first `fold` are folded.

    Args:
        rows: The header, and the rows.
        marked: The numbers of rows to mark.
        fold: How many rows are always visible. Default: 24.
        texts: The numbers of columns with words, which begin at the left, as the first one does. Default: ().
    """
    marked = set(marked)
    left = [' class="text"' if i in texts else "" for i in range(len(rows[0]))]
    header = "".join(f'<th scope="col"{side}>{_cell(cell)}</th>' for side, cell in zip(left, rows[0]))
    body = [
        f'<tr{" class=low" if i in marked else ""}><th scope="row">{_cell(row[0])}</th>'
        + "".join(f"<td{side}>{_cell(cell)}</td>" for side, cell in zip(left[1:], row[1:]))
        + "</tr>"
        for i, row in enumerate(rows[1:])
    ]

    def table(lines: Sequence[str]) -> str:
        inside = f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        return f'<div class="scroll" role="region" aria-label="table" tabindex="0">{inside}</div>'

    if len(body) <= fold:
        return table(body)
    fold = min(fold, 12)
    return table(body[:fold]) + _folded(f"{len(body) - fold} more rows", table(body[fold:]))


def _figure(figure: Any, description: str, caption: str) -> str:
    return f"<figure>{svg(figure, description)}<figcaption>{_text(caption)}</figcaption></figure>"


def _pictures(figures: Iterable[str]) -> str:
    return f'<div class="pictures">{"".join(figures)}</div>'
