"""What the run brought the sites together and each of them, in words."""

from collections.abc import Iterable

from fairmesh.report.elements import folded, items, lead, note
from fairmesh.report.sections import Json, View
from fairmesh.report.sentences import verdicts

PLACE = 10
_SENTENCES = 12  # sites; the sentences of more are folded
_NAMED = 10  # of them, with one verdict


def shown(view: View) -> Iterable[str]:
    if view.card["headline"]:
        yield items(text.split(": ", 1) for text in view.card["headline"])
    if view.alone:
        yield lead(view.card["sentence"])
    yield _of_sites(view.card)
    yield from map(note, [*view.card["notes"], *view.card["hints"]])


def _of_sites(card: Json) -> str:
    """Returns a sentence per site. Of many sites, some of those that are worse or better off, or the worst ones, come
    first, and all are folded."""
    sites = card["site_models"] or card["sites"]
    said = [(site["name"], site["sentence"], site["versus"].get("local", {}).get("verdict", "")) for site in sites]
    if len(sites) <= _SENTENCES:
        return items(said)
    found = []
    for verdict in ("worse", "better"):
        named = [item for item in said if item[2] == verdict]
        some = f", {_NAMED} of {len(named)}" if len(named) > _NAMED else ""
        found.append(f"<p>{verdict.capitalize()} than alone{some}:</p>{items(named[:_NAMED])}" if named else "")
    if not verdicts(sites):  # nothing to compare with
        found = ["<p>The five worst sites:</p>", items([said[i] for i in card["worst_first"][:5]])]
    return "".join(found) + folded(f"A sentence for each of the {len(sites)} sites", items(said))
