"""How a run ends if the numbers of a site diverge: that site tells all others, and all nodes end with one sentence.

A site can only say this of itself. The others then end too, since the run cannot continue without it. Each of them
announces that it has heard, and nodes stay for a moment until all have."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fairmesh.errors import Diverged
from fairmesh.mesh.members import Mesh
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.mesh.wire.kinds import shortened

KIND = "diverged"  # of announcement


class SiteDiverged(Diverged):
    """The numbers of a site are not finite, or have exploded.

    Args:
        site: The site.
        since: The last round after which its numbers were sound.
        round: The round after which they were not.
        what: What it has, such as "an exploded model (norm 1e+07)".
        norm: The norm of these numbers, or None if they are not finite.
    """

    def __init__(self, site: str, since: int, round: int, what: str, norm: float | None):
        super().__init__(f"diverged between rounds {since} and {round}: {site} has {what}")
        self.site, self.since, self.round, self.what = site, since, round, shortened(what)
        self.norm = norm if norm is not None and math.isfinite(norm) else None

    def body(self, generation: int) -> dict[str, Any]:
        """Returns the announcement that the run ends because of this, in a generation of the mesh."""
        largest = None if self.norm is None else min(self.norm, 1e15)
        found = {"site": self.site, "since": self.since, "round": self.round, "what": self.what, "norm": largest}
        return {"generation": generation, **found}


def told(bulletin: Bulletin, mesh: Mesh) -> list[SiteDiverged]:
    """Returns which present sites have said that they diverged in this generation: the first one first, and of those in
    one round the one with the largest numbers."""
    found = [
        SiteDiverged(site, body["since"], body["round"], body["what"], body["norm"])
        for site, body in _of_generation(bulletin, mesh).items()
        if body["site"] == site  # what one site says about another does not count
    ]
    return sorted(found, key=lambda one: (one.round, -math.inf if one.norm is None else -one.norm, one.site))


def unaware(bulletin: Bulletin, mesh: Mesh) -> list[str]:
    """Returns the present sites that have not announced that their run ends."""
    heard = _of_generation(bulletin, mesh)
    return [member.name for member in mesh.present if member.name not in heard]


def _of_generation(bulletin: Bulletin, mesh: Mesh) -> dict[str, Mapping[str, Any]]:
    present = {member.name for member in mesh.present}
    every = bulletin.of_all(KIND).items()
    return {site: body for site, body in every if site in present and body["generation"] == mesh.generation}


def in_words(found: Sequence[SiteDiverged], advice: str, kept: Sequence[int]) -> str:
    """Returns the sentence with which all nodes end.

    Args:
        found: The sites that diverged, the first one first.
        advice: Which settings to lower.
        kept: The rounds of the checkpoints that this site has kept to go back to.
    """
    first, *others = found
    later = "".join(f", then {one.site} in round {one.round}" for one in others)
    rounds = ", ".join(str(one) for one in kept if one < first.round) or "none"
    return (
        f"{first}{later}. The data of {first.site} may be in other units than those of the other sites: compare them, "
        f"and see `standardize`. Else {advice}. Either needs a new mesh. To continue this run without a site, vote it "
        "out (`fairmesh mesh remove`), start the node again, and then go back to an earlier round (`fairmesh mesh "
        f"rewind`; kept here: {rounds})"
    )
