"""How the model does at each site when it is trained without that site."""

import json
from collections.abc import Iterable

from fairmesh.comparisons.leave_one_out import LEFT_OUT
from fairmesh.report.elements import note, table
from fairmesh.report.runs import Run, mean_of
from fairmesh.report.sections import Json, View
from fairmesh.report.tables import site_name
from fairmesh.storage.strict_json import with_nan

PLACE = 60


def told(run: Run, chosen: Run) -> Json:
    path = run.folder / LEFT_OUT if run.folder else None
    if path is None or not path.exists():
        return {"left_out": None}
    stored = with_nan(json.loads(path.read_text(encoding="utf-8")))
    means = {name: [mean_of(column) for column in zip(*rows)] for name, rows in stored["values"].items()}  # over seeds
    sites = [
        {"name": str(name), "metrics": {metric: means[metric][i] for metric in means}}
        for i, name in enumerate(stored["sites"])
    ]
    return {"left_out": {"judged_on": stored["judged_on"], "sites": sites}}


def shown(view: View) -> Iterable[str]:
    if not view.card["left_out"]:
        return
    unit = view.unit
    with_it = {site["name"]: site["metrics"][unit.metric] for site in view.card["sites"]}
    rows = [
        [site_name(site), unit.shown(site["metrics"].get(unit.metric)), unit.shown(with_it.get(site["name"]))]
        for site in view.card["left_out"]["sites"]
    ]
    header = ["site", f"{unit.metric}, trained without it", f"{unit.metric}, trained with it"]
    yield f"<h3>Trained without the site</h3>{table(view.ordered([header, *rows]), compact=True)}"
    yield note("What a site that takes no part can expect of the model.")
