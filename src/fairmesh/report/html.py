"""Runs as people look at them: tables, plots, and a self-contained page."""

import html
from collections.abc import Sequence

from fairmesh.report.plots import bars, curves
from fairmesh.report.runs import (
    Run,
    check_comparable,
    metric_table,
    metrics_by_site,
    personal_table,
    rows_of,
    site_table,
    subgroup_table,
    worst_sites,
)
from fairmesh.report.style import svg

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;margin:.5rem 0}
th,td{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:right}th:first-child,td:first-child{text-align:left}
th{border-bottom:2px solid #999}tr.low td{background:#fbeeee}svg{max-width:100%;height:auto}
pre{background:#f6f6f6;padding:.7rem;overflow:auto}
.note{color:#666;font-size:13px}
"""


def _table(rows: Sequence[Sequence[str]], marked: set[int] = frozenset()) -> str:  # type: ignore[assignment]
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row)

    body = "".join(f"<tr{' class=low' if i in marked else ''}>{cells(r, 'td')}</tr>" for i, r in enumerate(rows[1:]))
    return f"<table><tr>{cells(rows[0], 'th')}</tr>{body}</table>"


def page(
    runs: Sequence[Run],
    title: str,
    sentence: str = "",
    settings: str = "",
    rows: Sequence[Sequence[str]] | None = None,
    note: str = "",
) -> str:
    """Returns a self-contained page with the table of runs, the curves, and every site with its weight.

    Args:
        runs: The runs, which must be comparable.
        title: The title.
        sentence: What the page shows, in words.
        settings: Settings to print at the end.
        rows: A table to show instead of that of the runs, with its header.
        note: What the reader of the table must know.
    """
    check_comparable(runs)
    shown = rows_of(runs)
    rows = rows or [list(shown[0]), *(list(row.values()) for row in shown)]
    sites = site_table(runs)
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(sentence)}</p>" if sentence else "",
        _table(rows),
        f'<p class="note">{html.escape(note)}</p>' if note else "",
        *(f'<p class="note">{html.escape(one)}</p>' for run in runs for one in run.notes()),
        "<h2>On the way</h2>",
        svg(curves(runs), "curves"),
        "<h2>Site by site</h2>",
        svg(bars(runs), "sites"),
        _table(sites, worst_sites(runs)) if len(sites) <= 201 else "",
    ]
    if any(run.weights() for run in runs):
        parts += [
            "<h2>Where the weight went</h2>",
            svg(bars(runs, "weights"), "weights"),
            '<p class="note">λ is how much each site counts; the dotted line is an equal share.</p>',
        ]
    for run in runs:
        of_run = f": {html.escape(run.label)}" if len(runs) > 1 else ""
        if metrics := metric_table(run):
            parts += [f"<h2>All metrics{of_run}</h2>", _table(metrics), _table(metrics_by_site(run))]
        if own := personal_table(run):
            parts += [
                f"<h2>The sites' own models{f': {html.escape(run.label)}' if len(runs) > 1 else ''}</h2>",
                _table(own),
            ]
            notes = {site["note"] for one in run.summary["personal"] for site in one["sites"] if "note" in site}
            parts += [f'<p class="note">{html.escape(note)}</p>' for note in sorted(notes)]
        if subgroups := subgroup_table(run):
            parts += [
                f"<h2>Subgroups inside the sites{f': {html.escape(run.label)}' if len(runs) > 1 else ''}</h2>",
                _table(subgroups),
            ]
    if settings:
        parts += ["<h2>Settings</h2>", f"<pre>{html.escape(settings)}</pre>"]
    judged = runs[0].summary["judged_on"]
    parts.append(
        f'<p class="note">Measured on the {judged} data of each site, for the average of all nodes\' models. '
        "Traffic is in bytes of messages as they are encoded, headers included; nominal is the paper's count: bits "
        "per parameter, without norms, signs, indices and headers.</p>"
    )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    return f"{head}<style>{_STYLE}</style>" + "<body>" + "".join(parts) + "</body></html>\n"
