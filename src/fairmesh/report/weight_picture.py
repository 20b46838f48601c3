"""How much each site counted in training, against its share of the rows: a picture, or a sentence if nothing moved."""

from fairmesh.metrics.units import defined
from fairmesh.report import charts
from fairmesh.report.elements import ROWS, figure, note
from fairmesh.report.sections import View
from fairmesh.report.tables import prior_of

_SAME = 1e-6  # weights that differ less from the prior are those of the prior


def weights(view: View) -> str:
    """Returns the picture of the weights of the model that the run hands out, or why there is nothing to see."""
    card = view.card
    sites = [site for site in view.sites if defined(site["weight"])]
    prior, decided = prior_of(card), card["handed_out"]
    if decided and decided["weights"] == "fixed":
        return note(
            f"Weights: the model that is handed out has fixed weights, so every site counts by its {prior}, because "
            f"{decided['why']}."
        )
    if not sites:
        return ""
    if all(abs(site["weight"] - site["prior"]) < _SAME for site in sites):
        return note(f"Weights: fixed; every site counts by its {prior}.")
    moved = sorted(sites, key=lambda site: -abs(site["weight"] - site["prior"]))[:ROWS]
    sites = [site for site in sites if site in moved]
    every = "each site" if len(sites) == len(card["sites"]) else f"the {len(sites)} sites whose weight moved most"
    means = f", means over {card['spread_by']}" if card["spread_by"] else ""
    when = "the last that is measured" if card["planned_rounds"] else "in which the model was done that is handed out"
    caption = (
        f"How much {every} counted in training (λ) at round {card['rounds']:,}, {when}{means}. Outlined is the site's "
        f"{prior}, by which it counts with fixed weights. A site counts for more than that if the model does worse "
        "there than it could."
    )
    columns = ([site[key] for site in sites] for key in ("name", "weight", "prior"))
    return figure(charts.weights(*columns, title=caption), caption)
