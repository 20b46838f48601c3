"""The sites' own models."""

from collections.abc import Iterable

from fairmesh.report.elements import note, table
from fairmesh.report.runs import personal_table
from fairmesh.report.sections import View

PLACE = 80


def shown(view: View) -> Iterable[str]:
    chosen = view.variants[0]
    if rows := personal_table(chosen):
        yield f"<h3>The sites' own models</h3>{table(view.ordered(rows))}"
        notes = {site["note"] for own in chosen.personal() for site in own["sites"] if "note" in site}
        yield from map(note, sorted(notes))
