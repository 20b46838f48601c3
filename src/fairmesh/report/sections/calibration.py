"""How probable the model says its predictions are, and how often they are right."""

from collections.abc import Iterable

import torch

from fairmesh.metrics.builtin import CalibrationError, bin_of, confidences
from fairmesh.metrics.units import Unit
from fairmesh.report import charts
from fairmesh.report.answers import answers_of
from fairmesh.report.elements import figure, folded, note, pictures, table
from fairmesh.report.runs import Run
from fairmesh.report.sections import Json, View

PLACE = 50
_BINS = 10


def told(run: Run, chosen: Run) -> Json:
    return {"calibration": _calibration(chosen) or None}


def _calibration(run: Run) -> Json:
    """Returns confidence and accuracy in bins over all sites, and the calibration error of each site; nothing if the
    model's probabilities are not known."""
    ours = answers_of(run)
    if ours is None:
        return {}
    by_site = [[answers.labelled() for answers in ours.at(i)] for i in range(len(ours.sites))]
    if not any(by_site) or not all(pairs for of_site in by_site for pairs in of_site):
        return {}
    every = [[pair for pairs in of_site for pair in pairs] for of_site in by_site]
    read = [confidences(outputs, labels) for of_site in every for outputs, labels in of_site]
    sure, right = (torch.cat(column) for column in zip(*read))
    where = bin_of(sure, _BINS)
    bins = [
        {"confidence": float(sure[at].mean()), "accuracy": float(right[at].mean()), "n": int(at.sum())}
        for at in (where == k for k in range(_BINS))
        if bool(at.any())
    ]
    sites = []
    for name, of_site in zip(ours.sites, every):
        errors = [CalibrationError()(outputs, labels) for outputs, labels in of_site]
        sites.append({"name": name, "error": sum(errors) / len(errors) if errors else None})
    return {"bins": bins, "sites": sites}


def shown(view: View) -> Iterable[str]:
    found = view.card["calibration"]
    if not found:
        return
    unit = Unit("calibration error", share=False)
    bins = [[100 * one["confidence"], 100 * one["accuracy"], one["n"]] for one in found["bins"]]
    x, y, counts = zip(*bins)
    lines = [
        charts.Line("perfectly calibrated", [0, 100], [0, 100], style=1, dashed=True),
        charts.Line("the model", x, y),
    ]
    caption = "How often predictions are right, against how probable the model says they are."
    probability = "probability that the model gives its prediction, %"
    drawn = charts.curves(lines, probability, "predictions that are right, %", caption)
    yield f"<h3>Calibration</h3>{pictures([figure(drawn, caption)])}"
    rows = [[f"{said:.0f} %", f"{right:.0f} %", f"{count:,}"] for said, right, count in zip(x, y, counts)]
    header = ["mean probability", "right", "predictions"]
    yield folded("The same as numbers", table([header, *rows], compact=True))
    errors = {site["name"]: site["error"] for site in found["sites"]}
    rows = [[s["name"], unit.shown(errors.get(s["name"])) if s["measured"] else "not measured"] for s in view.sites]
    yield table([["site", unit.metric], *rows], compact=True)
    yield note("The calibration error is the mean distance from the dashed line, over bins; 0 is perfect.")
