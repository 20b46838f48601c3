"""How much each site counted in training, against its share of the rows: a picture, or a sentence if nothing moved."""

from fairmesh.metrics.units import defined
from fairmesh.report import charts
from fairmesh.report.elements import ROWS, figure, note
from fairmesh.report.sections import Json, View

_SAME = 1e-6  # weights that differ less from the prior are those of the prior
_ROUNDED = 0.01  # shares of rows that differ less from the prior are the prior


def weights(view: View) -> str:
    """Returns the picture of the weights of the model that the run hands out, or why there is nothing to see."""
    card = view.card
    sites = [site for site in view.sites if defined(site["weight"])]
    prior, decided = _prior_of(card), card["handed_out"]
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
    return figure(charts.weights(*columns, title=caption, prior=prior.partition(" (")[0]), caption)


def _prior_of(card: Json) -> str:
    """Returns what the prior is, as far as it is known here."""
    told = ((card["provenance"] or {}).get("data") or {}).get("sites") or []
    rows = [site.get("train", 0) for site in told]
    if len(rows) != len(card["sites"]) or not sum(rows):
        return "prior (its share of all training rows, unless the experiment names another)"
    same = all(abs(count / sum(rows) - site["prior"]) < _ROUNDED for count, site in zip(rows, card["sites"]))
    return "share of all training rows" if same else "prior (which the experiment names)"
