"""Subgroups inside the sites."""

from collections.abc import Iterable

from fairmesh.report.elements import table
from fairmesh.report.runs import subgroup_table
from fairmesh.report.sections import View

PLACE = 90


def shown(view: View) -> Iterable[str]:
    if rows := subgroup_table(view.variants[0]):
        yield f"<h3>Subgroups inside the sites</h3>{table(view.ordered(rows), compact=True)}"
