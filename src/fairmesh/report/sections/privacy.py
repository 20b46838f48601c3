"""What a private run has spent: at each site, and of which budget."""

from collections.abc import Iterable

from fairmesh.report.elements import note, table
from fairmesh.report.runs import Run
from fairmesh.report.sections import Json, View
from fairmesh.report.sentences import privacy_rows, privacy_sentences

PLACE = 14


def told(run: Run, chosen: Run) -> Json:
    return {"privacy": run.summary.get("privacy") or {}}


def shown(view: View) -> Iterable[str]:
    if not view.card["privacy"]:
        return
    yield "<h3>Privacy</h3>"
    yield from map(note, privacy_sentences(view.card["privacy"]))
    yield table(view.ordered(privacy_rows(view.card)), compact=True)
