"""The model card: what a model is, on what data it was judged, and where it comes from, as Markdown.

Parts that only people can write are blanks between comments. A card that is written again keeps them."""

import re
from collections.abc import Iterable, Sequence

from fairmesh.errors import listed
from fairmesh.report import tables
from fairmesh.report.sections import Json
from fairmesh.report.sentences import privacy_rows, privacy_sentences

_BLANKS = {
    "intended-use": "What is the model for, and who may use it?",
    "not-for": "What must it not be used for?",
    "people": "Who is responsible for it, and whom can users ask?",
    "data": "Whose data is it, when and how was it collected, and under which consent or licence?",
    "limitations": "Which limits are known that the numbers below do not show?",
}
_TO_FILL_IN = "**[to be filled in]**"


def model_card(card: Json, before: str = "") -> str:
    """Returns the model card of a run as Markdown.

    Args:
        card: What the report says of the run.
        before: The card as it was, whose blanks people may have filled in. Default: "".
    """
    filled = dict(re.findall(r"<!-- yours: ([\w-]+) -->\n(.*?)\n<!-- end -->", before, flags=re.S))

    def blank(name: str) -> str:
        return f"<!-- yours: {name} -->\n{filled.get(name, f'{_TO_FILL_IN} {_BLANKS[name]}')}\n<!-- end -->"

    order, settings = range(len(card["sites"])), card["settings"].strip().replace("```", "")
    files = [[file["name"], file["holds"], file["bytes"], file["sha256"]] for file in card["files"]]
    own = [[model["name"], model["sentence"]] for model in card["site_models"]]
    parts = [
        f"# Model card: {_text(card['label'])}",
        "Text between `yours` and `end` is kept when `fairmesh report` writes this file again.",
        "## Use",
        *(blank(name) for name in ("intended-use", "not-for", "people")),
        "## Results",
        *map(_text, card["headline"]),
        _text(card["sentence"]),
        _table([["site", "its model"], *own]) if own else "",
        " ".join(tables.captions(card)),
        _table(tables.of_sites(card, order)),
        _table(tables.of_metrics(card, order)),
        *map(_text, card["notes"]),
        *(["## Privacy", *map(_text, privacy_sentences(card["privacy"]))] if card["privacy"] else []),
        _table(privacy_rows(card)) if card["privacy"] else "",
        "## Data",
        blank("data"),
        *_data(card),
        "## Limitations",
        blank("limitations"),
        *_limits(card),
        "## Training",
        _table([["", ""], *tables.facts(card)]),
        f"All settings (experiment.toml):\n\n```toml\n{settings}\n```" if settings else "",
        "## Files",
        _table([["file", "holds", "bytes", "SHA-256"], *files]) if files else "No model has been written yet.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _text(value: object) -> str:
    """Returns text in which Markdown finds no markup of somebody else's: names come from other sites."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(str(value).split()))


def _table(rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(_text(cell) for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _data(card: Json) -> Iterable[str]:
    """Yields what each site holds, without any row of it."""
    if not card["provenance"]:
        yield "The data stays at the sites; no description of it was shared beyond the numbers above."
        return
    data = card["provenance"]["data"]
    predicted = f"one of {data['classes']} classes" if data["classes"] else "numbers"
    yield f"Each sample has inputs of shape {data['inputs']}; the model predicts {predicted}."
    sets = ("train", "validation", "test")
    if card["privacy"]:
        yield "Of training data, the number of units is told, and no digest."
        yield _table(
            [["site", "group", *sets], *([s["name"], s["group"], *(s[n] for n in sets)] for s in data["sites"])]
        )
    else:
        rows = [
            [site["name"], site["group"], *(site[name] for name in sets), site["digest"][:16]] for site in data["sites"]
        ]
        yield _table([["site", "group", *sets, "SHA-256 of training data"], *rows])
    if data["classes"] and any("classes" in site for site in data["sites"]):
        rows = [
            [site["name"], *(" / ".join(map(str, site.get("classes", {}).get(name, ["-"]))) for name in sets)]
            for site in data["sites"]
        ]
        yield _table([["samples per class", *sets], *rows])


def _limits(card: Json) -> Iterable[str]:
    """Yields limits that the numbers show."""
    unmeasured = [site["name"] for site in card["sites"] if not site["measured"]]
    counts = {site["name"]: site["units"] or site["n"] for site in card["sites"] if site["measured"]}
    small = [name for name, count in counts.items() if count is not None and count < 50]
    rows = "units" if any(site["units"] for site in card["sites"]) else "samples"
    worse = [site["name"] for site in card["sites"] if site["versus"].get("local", {}).get("verdict") == "worse"]
    for names, said in (
        (unmeasured, "No number says how the model does at"),
        (small, f"Fewer than 50 {rows} judge the model at"),
        (worse, "The model is worse than the site's own model at"),
    ):
        if names:
            yield f"{said} {_text(listed(names, 20))}."
