"""A report as one page that needs no other file and no script, and prints on A4."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.resources import files

from fairmesh.report import charts
from fairmesh.report.comparison import differences
from fairmesh.report.contents import contents
from fairmesh.report.elements import COMPACT, ROWS, UNFOLDED, escaped, figure, folded, lead, note, pictures, table
from fairmesh.report.runs import (
    SHOWN,
    Run,
    caption_of,
    check_comparable,
    chosen_of,
    ranked,
    rows_of,
    site_table,
    unequal_choices,
    worst_sites,
)
from fairmesh.report.sections import FIRST_SCREEN, Json, View, in_order, scaled, sections
from fairmesh.report.sections.curves import curves
from fairmesh.report.sections.sites import distribution
from fairmesh.report.sentences import unit_of

STYLE = files("fairmesh.report").joinpath("page.css").read_text(encoding="utf-8")
_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
# Nothing is executed, loaded or styled by others, even if a text of another site were taken for markup.
_POLICY = f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'"


def page(runs: Sequence[Run], title: str, sentence: str = "", remark: str = "", told: Json | None = None) -> str:
    """Returns a page: what the runs brought each site in words, tables, pictures, and where the models come from.

    Args:
        runs: The runs, which must be comparable. A sweep is one run.
        title: The title.
        sentence: What the page shows, in words. Default: "".
        remark: What the reader of its numbers must know. Default: "".
        told: The contents, if they are known. Default: None.
    """
    check_comparable(runs)
    told = told or contents(runs, title)
    shown = _default_first(list(zip(runs, told["runs"])))
    views = [View(card, ranked(run)[0], alone=len(runs) == 1) for run, card in shown]
    parts = [f"<h1>{escaped(title)}</h1>", lead(sentence) if sentence else "", note(remark)]
    if len(runs) == 1:
        parts += [_first_screen(views[0]), _details(views[0])]
    else:
        parts += [f"<h2>{escaped(views[0].card['label'])}</h2>", _first_screen(views[0])]
        parts += ["<h2>Next to the others</h2>", *_side_by_side([run for run, _ in shown], [card for _, card in shown])]
        parts.append(_folded_run(views[0], "all else about it", _details(views[0])))
        parts += [
            _folded_run(view, view.card["conclusion"], _first_screen(view) + _details(view)) for view in views[1:]
        ]
    parts.append(note(f"Written by fairmesh {told['fairmesh']} on {told['written'][:16].replace('T', ' at ')} UTC."))
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    )
    head += f"<title>{escaped(title)}</title><style>{STYLE}</style></head>"
    return f"{head}<body><main>{''.join(parts)}</main></body></html>\n"


def _default_first(shown: list[tuple[Run, Json]]) -> list[tuple[Run, Json]]:
    """Returns runs with the first one at the front that decided which model it hands out, as the default does."""
    first = next((pair for pair in shown if pair[1]["handed_out"]), shown[0])
    return [first, *(pair for pair in shown if pair is not first)]


def _first_screen(view: View) -> str:
    return "".join(part for section in sections() if section.PLACE < FIRST_SCREEN for part in section.shown(view))


def _details(view: View) -> str:
    return "".join(part for section in sections() if section.PLACE >= FIRST_SCREEN for part in section.shown(view))


def _folded_run(view: View, said: str, body: str) -> str:
    summary = f"<summary><b>{escaped(view.card['label'])}</b>: {escaped(said)}</summary>"
    return f'<section class="run"><details>{summary}{body}</details></section>'


def _side_by_side(every: Sequence[Run], cards: Sequence[Json]) -> Iterable[str]:
    """Yields what several runs brought, next to each other: a table and curves, and folded the sites."""
    runs = [chosen_of(run) for run in every]
    caption = caption_of(runs)  # intervals of the worst site differ from its own, which the first screen has
    yield table(rows_of(runs)) + note(
        caption and f"{caption} That of the worst allows for not knowing which site it is."
    )
    first, *others = every
    yield from map(note, [*unequal_choices(every), *(text for run in others for text in differences(first, run))])
    yield curves(runs)
    order, unit, low = in_order(cards[0]), unit_of(cards[0]), worst_sites(runs)
    header, *rows = site_table([replace(run, label=card["label"]) for run, card in zip(runs, cards)])
    marked = {at for at, i in enumerate(order) if i in low}
    sites = table([header, *(rows[i] for i in order)], marked, fold=COMPACT, compact=True)
    pictured, order = cards[:SHOWN], order if len(order) <= ROWS else order[:UNFOLDED]
    names = [cards[0]["sites"][i]["name"] for i in order]
    series = []
    for k, card in enumerate(pictured):
        values = [(card["sites"][i]["metrics"][unit.metric], card["sites"][i]["interval"]) for i in order]
        series.append(charts.Dots(card["label"], *scaled(values, unit), style=k))
    few = len(names) < len(cards[0]["sites"])
    caption = f"The {unit.metric} site by site{f', the first {len(names)} of the table' if few else ''}."
    made = [figure(charts.dots(names, series, unit.label, caption), caption)]
    if few:
        of_all = {card["label"]: [site["metrics"][unit.metric] for site in card["sites"]] for card in pictured}
        made.append(distribution(of_all, unit))
    yield folded("Site by site", pictures(made) + sites)
