"""Writes a report: the page, its contents as JSON, and the model card."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from fairmesh.errors import refusing
from fairmesh.report.contents import contents
from fairmesh.report.html import page
from fairmesh.report.model_card import model_card
from fairmesh.report.runs import Run
from fairmesh.storage.files import open_to_others, private_files
from fairmesh.storage.strict_json import as_json

PAGE, CONTENTS, CARD = "report.html", "report.json", "model-card.md"


class Written(NamedTuple):
    """The files of a report."""

    report: Path
    json: Path
    model_card: Path | None  # of one run only


def write_report(
    runs: Sequence[Run],
    folder: Path,
    title: str,
    sentence: str = "",
    note: str = "",
) -> Written:
    """Writes report.html and report.json and, of one run, model-card.md, as private as their folder.

    Args:
        runs: The runs. Several are shown side by side.
        folder: Where to write.
        title: The title of the page.
        sentence, note: As in `page`.
    """
    told = contents(runs, title)
    text = page(runs, title, sentence, note, told)
    card = folder / CARD if len(runs) == 1 else None
    with refusing(f"cannot write the report to {folder}", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with nullcontext() if open_to_others(folder) else private_files():
            (folder / PAGE).write_text(text, encoding="utf-8")
            (folder / CONTENTS).write_text(as_json(told, indent=2) + "\n", encoding="utf-8")
            if card is not None:
                before = card.read_text(encoding="utf-8") if card.exists() else ""
                card.write_text(model_card(told["runs"][0], before), encoding="utf-8")
    return Written(folder / PAGE, folder / CONTENTS, card)
