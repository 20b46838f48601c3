"""The table of the sites with all that they are compared with, and of many, how their values are distributed."""

from collections.abc import Iterable, Mapping, Sequence

from fairmesh.metrics.units import Unit, defined
from fairmesh.report import charts
from fairmesh.report.elements import COMPACT, figure, folded, note, pictures, table
from fairmesh.report.sections import View
from fairmesh.report.sentences import REFERENCES
from fairmesh.report.tables import captions, kinds_of, of_sites

PLACE = 30


def shown(view: View) -> Iterable[str]:
    card, worst, unit = view.card, view.card["given_worst_first"][0], view.unit
    marked = {view.order.index(worst)} if defined(card["sites"][worst]["metrics"][card["metric"]]) else ()
    told = note(" ".join(captions(card))) + table(of_sites(card, view.order), marked)
    yield folded("The sites with all that they are compared with", told)
    if len(card["sites"]) > COMPACT:  # of which the first picture shows some
        values = {"this run": [site["metrics"][unit.metric] for site in card["sites"]]}
        for kind in kinds_of(card):
            values[REFERENCES.get(kind, kind)] = [site["references"].get(kind) for site in card["sites"]]
        yield pictures([distribution(values, unit)])


def distribution(values: Mapping[str, Sequence[float | None]], unit: Unit) -> str:
    """Returns the picture of how the values of many sites are distributed, a line for each label."""
    count, lines = max(map(len, values.values())), []
    for k, (label, of_sites_) in enumerate(values.items()):
        known = sorted(unit.scale * value for value in of_sites_ if defined(value))
        shares = [100 * (i + 1) / len(known) for i in range(len(known))]
        if known:
            lines.append(charts.Line(label, known, shares, style=k, step=True))
    caption = f"The {unit.metric} of all {count} sites: the share of sites with at most this value."
    return figure(charts.curves(lines, unit.label, "sites, %", caption), caption)
