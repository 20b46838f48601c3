"""The ranking of a sweep's variants."""

from collections.abc import Iterable

from fairmesh.report.elements import note, table
from fairmesh.report.runs import Run, choices_in_words, ranked
from fairmesh.report.sections import Json, View
from fairmesh.report.tables import Rows, over_sites

PLACE = 20
_SAID = {
    True: "The first one is what model.safetensors holds: the best on the sites' validation samples, smoothed over the "
    "rounds. The others are ranked by the worst site on the validation samples after the last round.",
    False: "There are no validation samples, so the variants are ranked on the {judged_on} samples, and the numbers of "
    "the first one are too good. Give sites validation samples.",
}
_PRIVATE = "They are in the order in which they were given: metrics have no noise, so no private run is chosen by them."


def told(run: Run, chosen: Run) -> Json:
    variants, ranked_on = ranked(run)
    if len(variants) == 1:
        return {"sweep": None}
    rows = [
        {
            "changes": variant.summary["variants"][0]["changes"],
            "validation_worst": variant.over_sites("worst", "validation"),
            **{what: variant.over_sites(what) for what in ("worst", "mean", "gap")},
            "replicas": variant.summary["replicas"],
            "diverged": len(variant.summary["diverged"]),
        }
        for variant in variants
    ]
    return {"sweep": {"ranked_on": ranked_on, "choice": choices_in_words([run])[0], "variants": rows}}


def shown(view: View) -> Iterable[str]:
    sweep = view.card["sweep"]
    if not sweep:
        return
    ranked_on = sweep["ranked_on"]
    yield f"<h3>{len(sweep['variants'])} variants{', the best first' if ranked_on else ''}</h3>"
    yield table(_rows(view), {0}, fold=12)
    said = _SAID[ranked_on == "validation"].format(judged_on=view.card["judged_on"]) if ranked_on else _PRIVATE
    yield note(f"{said} All else on this page is about the first one.")


def _rows(view: View) -> Rows:
    sweep, unit = view.card["sweep"], view.unit
    varied = list(dict.fromkeys(key for row in sweep["variants"] for key in row["changes"]))
    numbers = {"worst": f"worst {unit.metric}, {view.card['judged_on']}", "mean": "mean", "gap": "gap"}
    if sweep["ranked_on"] == "validation":
        numbers = {"validation_worst": f"worst {unit.metric}, validation"} | numbers
    rows = []
    for k, row in enumerate(sweep["variants"]):
        cells = {name: over_sites(unit, name, row[name]) for name in numbers}
        if row["diverged"] == row["replicas"]:
            cells = dict.fromkeys(numbers, "diverged")
        elif row["diverged"]:
            cells["worst"] += f" ({row['diverged']} of {row['replicas']} diverged)"
        rows.append([str(k + 1), *(f"{row['changes'].get(key)}" for key in varied), *cells.values()])
    return [["rank", *varied, *numbers.values()], *rows]
