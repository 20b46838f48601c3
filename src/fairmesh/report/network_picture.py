"""Who talks to whom, as a picture."""

from fairmesh.report import charts
from fairmesh.report.elements import figure, note
from fairmesh.report.sections import View, scaled


def network(view: View) -> str:
    """Returns the picture; nothing if it is not known."""
    if not view.card["graph"]:
        return ""
    card, unit = view.card, view.unit
    graph, sites = card["graph"], card["sites"]
    if graph["name"] == "server":
        return note(f"All {len(sites)} sites talk to a server, and not to each other.")
    edges = graph["edges"] if card["traffic"]["bytes_total"] else []
    shades = ""
    if graph["placed"]:
        nodes = [charts.Node(str(i)) for i in range(len(sites))]
        said = "Numbers are nodes; the sites take other nodes in each replica."
    else:
        models = {model["name"]: model["personal"] for model in card["site_models"]}
        given = [models.get(site["name"], site["metrics"][unit.metric]) for site in sites]
        values, _ = scaled([(value, None) for value in given], unit)
        worst_to_best = sorted((v for v in values if v is not None), reverse=not card["higher_is_better"]) or [0.0]
        worst, best = worst_to_best[0], worst_to_best[-1]
        shades_of = [None if v is None or worst == best else (best - v) / (best - worst) for v in values]
        nodes = [
            charts.Node(site["name"], unit.shown(value), worst=i == card["given_worst_first"][0], shade=k)
            for i, (site, value, k) in enumerate(zip(sites, given, shades_of))
        ]
        shades = f"{unit.metric}, from {unit.shown(best / unit.scale)} to {unit.shown(worst / unit.scale)}"
        by = " with its own model" if models else ""
        said = f"The square is the worst site{by}; darker sites do worse."
    caption = f"Who talks to whom: {graph['name']}, {len(edges)} links. {said}"
    title = f"the network of {len(sites)} sites and {len(edges)} links"
    return figure(charts.network(nodes, edges, title, shades=shades), caption)
