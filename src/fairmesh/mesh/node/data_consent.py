"""A site's consent to begin although the data of some site looks different from that of the others.

With `on_unusual_data = "wait"` in site.toml, a node does not begin before a person at its site has looked at the
warning and accepted it with `fairmesh mesh accept`. What is accepted are the sentences of the warning, so a site whose
data has changed since must be accepted again.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fairmesh.errors import BadInput, nearest
from fairmesh.mesh.node.watching import read_status
from fairmesh.storage.files import read_record, write_record

_ACCEPTED = "accepted.json"
_ACCEPT_AGAIN = "move it away, and accept the sites' data again (fairmesh mesh accept)"


def accept(state: Path, site: str) -> list[str]:
    """Records that a person accepts how the data of a site looks. The node of this state folder looks for it.

    Returns:
        The sentences that were accepted.
    """
    unusual = read_status(state).get("unusual", {})
    if site not in unusual:
        named = f"; those that look different: {', '.join(unusual)}" if unusual else "; no site's data does"
        raise BadInput(f"the data of {site} does not look different{named}{nearest(site, unusual)}")
    record = read_record(state / _ACCEPTED, _ACCEPT_AGAIN) | {site: unusual[site]}
    write_record(state / _ACCEPTED, record)
    return unusual[site]


def unaccepted(state: Path, unusual: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the sites whose data looks different, and which nobody here has accepted as they look now."""
    record = read_record(state / _ACCEPTED, _ACCEPT_AGAIN)
    return [site for site, sentences in unusual.items() if record.get(site) != list(sentences)]
