"""What to take away from the run, in words: the conclusion first, then what it rests on."""

from collections.abc import Iterable

from fairmesh.report.elements import items, lead, note
from fairmesh.report.sections import View
from fairmesh.report.sentences import traffic_sentence

PLACE = 10


def shown(view: View) -> Iterable[str]:
    card = view.card
    yield lead(card["conclusion"])
    yield note(card["sentence"])
    yield note(traffic_sentence(card))
    if card["headline"]:
        yield items(text.split(": ", 1) for text in card["headline"])
    if card["sweep"]:
        yield note(f"{card['sweep']['choice']}. All variants are below.")
    yield from map(note, [*card["notes"], *card["hints"]])
