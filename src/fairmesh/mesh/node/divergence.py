"""What happens if the numbers of a site diverge: its node tells all others, and ends. Only its own numbers end a node.
That another site has diverged is what that site says: it is logged and shown (`claims.py`), and the run waits."""

import math
from collections.abc import Sequence
from typing import Any

from fairmesh.errors import Diverged
from fairmesh.mesh.fields import shortened
from fairmesh.mesh.node.membership import Membership
from fairmesh.mesh.wire.bulletin import Bulletin

KIND = "diverged"  # of announcement


class SiteDiverged(Diverged):
    """The numbers of a site are not finite, or have exploded.

    Args:
        site: The site.
        since: The last round after which its numbers were sound.
        round: The round after which they were not.
        what: What it has, such as "an exploded model (norm 1e+07)".
    """

    def __init__(self, site: str, since: int, round: int, what: str):
        super().__init__(f"diverged between rounds {since} and {round}: {site} has {what}")
        self.site, self.since, self.round, self.what = site, since, round, shortened(what)

    def body(self, generation: int) -> dict[str, Any]:
        """Returns the announcement of this, in a generation of the mesh."""
        return {"generation": generation, "since": self.since, "round": self.round, "what": self.what}


def told(bulletin: Bulletin, membership: Membership) -> dict[str, SiteDiverged]:
    """Returns which present sites say that they have diverged in this generation, the first one first. Leaves out those
    that have said since then that they are in a later round."""
    mesh = membership.mesh
    present, found = {member.name for member in mesh.present}, list[SiteDiverged]()
    said, heard, status = bulletin.ages(KIND), bulletin.ages("status"), bulletin.of_all("status")
    for site, body in bulletin.of_all(KIND).items():
        now = body["generation"] == mesh.generation
        since = site in status and heard.get(site, math.inf) < said.get(site, 0.0)
        if site in present and now and not (since and status[site]["round"] > body["round"]):
            found.append(SiteDiverged(site, body["since"], body["round"], body["what"]))
    return {one.site: one for one in sorted(found, key=lambda one: (one.round, one.site))}


def in_words(mine: SiteDiverged, others: Sequence[SiteDiverged], advice: str, kept: Sequence[int]) -> str:
    """Returns the sentence with which a node ends whose numbers have diverged.

    Args:
        mine: What it has seen.
        others: The other sites that say this of themselves.
        advice: Which settings to lower.
        kept: The rounds of the checkpoints that this site has kept to go back to.
    """
    rounds = ", ".join(str(one) for one in kept if one < mine.round) or "none"
    also = ", ".join(f"{one.site} in round {one.round}" for one in others)
    return (
        f"{mine}. {f'Others say so of themselves: {also}. ' if also else ''}The data of {mine.site} may be in other "
        f"units than those of the other sites: compare them, and see `standardize`. Else {advice}. Either needs a new "
        "mesh. The other nodes wait. To continue this run, they vote this site out (`fairmesh mesh remove`) or, if the "
        "numbers of another site have led to this, all vote that one out; then all go back to an earlier round "
        f"(`fairmesh mesh rewind`; kept here: {rounds}). After a vote here, start this node again"
    )
