"""What the run brought the sites together and each of them, in words."""

from collections.abc import Iterable

from fairmesh.report.elements import folded, items, lead, note
from fairmesh.report.sections import Json, View
from fairmesh.report.sentences import verdicts

PLACE = 10
_SENTENCES = 12  # sites; the sentences of more are folded


def shown(view: View) -> Iterable[str]:
    if view.alone:
        yield lead(view.card["sentence"])
    yield _of_sites(view.card)
    yield from map(note, [*view.card["notes"], *view.card["hints"]])


def _of_sites(card: Json) -> str:
    """Returns a sentence per site. Of many sites, those that are worse off come first, and the others are folded."""
    sites = card["sites"]
    said = [(site["name"], site["sentence"], site["versus"].get("local", {}).get("verdict", "")) for site in sites]
    if len(sites) <= _SENTENCES:
        return items(said)
    first, heading = [item for item in said if item[2] == "worse"], "Worse than alone:"
    if not verdicts(sites):  # nothing to compare with: the worst ones
        first, heading = [said[i] for i in card["worst_first"][:5]], "The five worst sites:"
    every = folded(f"A sentence for each of the {len(sites)} sites", items(said))
    return (f"<p>{heading}</p>{items(first)}" if first else "") + every
