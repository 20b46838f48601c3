"""The model of each site, next to the common one and to training alone."""

from collections.abc import Iterable

from fairmesh.report.elements import folded, note, table
from fairmesh.report.runs import Run, personal_caption, personal_table, site_models
from fairmesh.report.sections import Json, View

PLACE = 20


def told(run: Run, chosen: Run) -> Json:
    evidence = chosen.summary.get("site_models_evidence") or {}
    judged_by = evidence.get("metric", chosen.metric)
    over = {what: evidence[what] for what in ("worst", "mean") if "value" in evidence.get(what, {})}
    return {
        "site_models": site_models(chosen),
        "site_models_judged_by": judged_by,
        "site_models_worst": (evidence.get("worst") or {}).get("site"),
        "site_models_over": {what: {key: of[key] for key in ("value", "interval")} for what, of in over.items()},
    }


def shown(view: View) -> Iterable[str]:
    chosen = view.variants[0]
    if rows := personal_table(chosen):
        said = note(personal_caption(chosen))
        yield folded(
            "A model for each site: what it is, and every difference", said + table(view.ordered(rows), texts={4})
        )
        yield from map(note, sorted({text for site in view.card["site_models"] for text in site["notes"]}))
