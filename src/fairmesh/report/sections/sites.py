"""The table of the sites, their picture, and who talks to whom."""

from collections.abc import Iterable, Mapping, Sequence

from fairmesh.metrics.units import Unit, defined
from fairmesh.report import plots
from fairmesh.report.elements import ROWS, UNFOLDED, figure, note, pictures, table
from fairmesh.report.sections import View
from fairmesh.report.sentences import REFERENCES
from fairmesh.report.tables import captions, kinds_of, of_sites

PLACE = 30


def shown(view: View) -> Iterable[str]:
    card, worst = view.card, view.card["worst_first"][0]
    yield "<h3>Sites</h3>" + note(" ".join(captions(card)))
    marked = {view.order.index(worst)} if defined(card["sites"][worst]["metrics"][card["metric"]]) else ()
    yield table(of_sites(card, view.order), marked)
    drawn = []
    if view.alone or any(site["references"] or site["interval"] for site in card["sites"]):
        drawn += _values(view)  # else the picture of all runs shows the same
    if card["graph"]:
        drawn.append(_network(view))
    yield pictures(drawn) if drawn else ""


def _values(view: View) -> Iterable[str]:
    """Yields the picture of the sites: the run, and each model that it is compared with. Of many sites it shows some,
    and a second one shows how the values of all are distributed."""
    unit, count = view.unit, len(view.card["sites"])
    rows = [{"value": site["metrics"][unit.metric], "interval": site["interval"]} for site in view.sites]
    series = {"this run": plots.scaled_series(rows, unit.scale)}
    for kind in kinds_of(view.card):
        rows = [{"value": site["references"].get(kind)} for site in view.sites]
        if any(defined(row["value"]) for row in rows):
            series[REFERENCES.get(kind, kind)] = plots.scaled_series(rows, unit.scale)
    shown = count if count <= ROWS else UNFOLDED
    few = {label: {key: column[:shown] for key, column in one.items()} for label, one in series.items()}
    drawn = plots.dots([site["name"] for site in view.sites[:shown]], few, unit.label)
    caption = f"{unit.metric} of {'every site' if shown == count else f'the first {shown} sites of the table'}"
    known = any(series["this run"]["intervals"])
    caption += f"; lines are {100 * view.card['intervals']['level']:.0f} % intervals." if known else "."
    yield figure(drawn, caption, caption)
    if shown < count:
        yield distribution({label: one["values"] for label, one in series.items()}, unit)


def distribution(values: Mapping[str, Sequence[float]], unit: Unit) -> str:
    """Returns the picture of how the values of many sites are distributed, a line for each label."""
    count = max(map(len, values.values()))
    caption = f"{unit.metric} of all {count} sites: the share of sites with at most this value."
    return figure(plots.distributions(values, unit.label), caption, caption)


def _network(view: View) -> str:
    """Returns the picture of who talks to whom."""
    card, unit = view.card, view.unit
    graph, sites = card["graph"], card["sites"]
    if graph["name"] == "server":
        return note(f"All {len(sites)} sites talk to a server, and not to each other.")
    edges = graph["edges"] if card["traffic"]["bytes_total"] else []
    if graph["placed"]:
        drawn = plots.network([str(i) for i in range(len(sites))], edges)
        said = "Numbers are nodes; the sites take other nodes in each replica."
    else:
        values = [unit.scale * site["metrics"][unit.metric] for site in sites]
        drawn = plots.network([site["name"] for site in sites], edges, values, unit.label, card["worst_first"][0])
        said = "The square is the worst site."
    caption = f"Who talks to whom: {graph['name']}, {len(edges)} links. {said}"
    return figure(drawn, f"the network of {len(sites)} sites and {len(edges)} links", caption)
