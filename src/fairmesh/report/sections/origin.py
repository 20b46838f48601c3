"""Where the model comes from: facts, files and settings."""

from collections.abc import Iterable

from fairmesh.report.elements import escaped, folded, table
from fairmesh.report.sections import View
from fairmesh.report.tables import facts

PLACE = 100


def shown(view: View) -> Iterable[str]:
    card = view.card
    told = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>" for name, value in facts(card))
    yield f"<h3>Where the model comes from</h3><dl>{told}</dl>"
    if card["files"]:
        files = [[file["name"], file["holds"], file["sha256"][:16]] for file in card["files"]]
        yield table([["file", "holds", "SHA-256, first 16 digits"], *files], fold=8, texts=(1,), compact=True)
    if card["settings"]:
        yield folded("Settings of the experiment", f"<pre>{escaped(card['settings'])}</pre>")
