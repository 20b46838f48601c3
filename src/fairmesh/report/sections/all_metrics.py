"""Every metric at every site, and how many samples of each class judge the sites."""

from collections.abc import Iterable

from fairmesh.report.elements import folded, table
from fairmesh.report.sections import View
from fairmesh.report.tables import CLASSES, of_metrics, site_name

PLACE = 70


def shown(view: View) -> Iterable[str]:
    card = view.card
    if len(card["metrics"]) > 1:
        yield f"<h3>All metrics</h3>{table(of_metrics(card, view.order), compact=True)}"
    most = max(len(site["support"] or ()) for site in view.sites)
    if most > CLASSES:  # else they have room in the table of the sites
        names = card["classes"] if len(card["classes"]) == most else [f"class {k}" for k in range(most)]
        rows = [[site_name(site), *map(str, site["support"] or ["-"] * most)] for site in view.sites]
        yield folded(f"{card['judged_on'].capitalize()} samples per class", table([["site", *names], *rows]))
