"""A report as one page that needs no other file and no script, and prints on A4."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from fairmesh.report import plots
from fairmesh.report.contents import contents
from fairmesh.report.elements import ROWS, UNFOLDED, escaped, figure, items, lead, note, pictures, table
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
from fairmesh.report.sections import Json, View, in_order, sections
from fairmesh.report.sections.curves import curves
from fairmesh.report.sections.sites import distribution
from fairmesh.report.sentences import unit_of

# Nothing is executed or loaded, even if a text of another site were taken for markup. Pictures have styles
# and images inline.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
STYLE = files("fairmesh.report").joinpath("page.css").read_text(encoding="utf-8")


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
    cards, several = told["runs"], len(runs) > 1
    parts = [f"<h1>{escaped(title)}</h1>", lead(sentence) if sentence else "", note(remark)]
    if several:
        parts += _side_by_side(runs, cards)
    for run, card in zip(runs, cards):
        view = View(card, ranked(run)[0], alone=not several)
        body = "".join(element for section in sections() for element in section.shown(view))
        if several:
            body = f'<section class="run"><h2>{escaped(card["label"])}</h2>{body}</section>'
        parts.append(body)
    parts.append(note(f"Written by fairmesh {told['fairmesh']} on {told['written'][:16].replace('T', ' at ')} UTC."))
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    )
    head += f"<title>{escaped(title)}</title><style>\n{STYLE}</style></head>"
    return f"{head}<body><main>{''.join(parts)}</main></body></html>\n"


def _side_by_side(every: Sequence[Run], cards: Sequence[Json]) -> Iterable[str]:
    """Yields what several runs brought, next to each other: tables, curves, and pictures of the sites and of their
    weights."""
    runs = [chosen_of(run) for run in every]
    yield items((card["label"], card["sentence"]) for card in cards)
    yield table(rows_of(runs)) + note(caption_of(runs))
    yield from map(note, unequal_choices(every))
    yield f"<h2>Curves</h2>{curves(runs)}<h2>Site by site</h2>"
    order, unit, low = in_order(cards[0]), unit_of(cards[0]), worst_sites(runs)
    header, *rows = site_table([replace(run, label=card["label"]) for run, card in zip(runs, cards)])
    yield table([header, *(rows[i] for i in order)], {at for at, i in enumerate(order) if i in low})
    pictured, order = cards[:SHOWN], order if len(order) <= ROWS else order[:UNFOLDED]
    names = [cards[0]["sites"][i]["name"] for i in order]
    values: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for k, card in enumerate(pictured):
        sites = [card["sites"][i] for i in order]
        values[card["label"]] = {"values": [unit.scale * site["metrics"][unit.metric] for site in sites]}
        lambdas, priors = ([site[key] for site in sites] for key in ("weight", "prior"))
        if lambdas[0] is not None:
            weights[card["label"]] = {"values": lambdas, "style": k, "origins": priors}
    drawn = plots.dots(names, values, unit.label)
    few = len(names) < len(cards[0]["sites"])
    some = f", the first {len(names)} of the table" if few else ""
    made = [figure(drawn, f"{unit.metric} of every site under each run", f"{unit.metric} site by site{some}.")]
    if few:
        scaled = {
            card["label"]: [unit.scale * site["metrics"][unit.metric] for site in card["sites"]] for card in pictured
        }
        made.append(distribution(scaled, unit))
    if weights:
        said = (
            f"How much each site counts in {', '.join(weights)}. Arrows begin at the site's prior, its share of all "
            "training rows unless the experiment names another."
        )
        made.append(figure(plots.dots(names, weights, "weight λ of the site"), "weight of every site", said))
    yield pictures(made)
