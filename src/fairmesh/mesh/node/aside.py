"""What a node puts aside instead of ending: what other sites say and cannot be true here, and its own steps that only
show or compare, if they fail. Both are named in the log and in the status."""

from collections.abc import Callable
from typing import TypeVar

from fairmesh.errors import in_a_line
from fairmesh.mesh.wire.links import Report

_AT_MOST = 20  # things of one site; a member can find new ones without end
_What = TypeVar("_What")


class Aside:
    """What this node has put aside since it was started.

    Args:
        report: Logs an event.
    """

    def __init__(self, report: Report):
        self._report = report
        self._ignored: dict[tuple[str, str], str] = {}  # the reason, by site and what is ignored
        self._failed: dict[str, str] = {}  # the reason, by what failed

    def ignore(self, site: str, what: str, reason: str) -> None:
        """Says, once, that something that a site has announced is not used."""
        of_site = [known for whose, known in list(self._ignored) if whose == site]
        if what not in of_site and len(of_site) < _AT_MOST:
            self._ignored[site, what] = reason[:400]
            self._report("warning", f"{what} of a site are ignored", site=site, reason=reason[:400])

    def tried(self, what: str, part: Callable[[], _What], otherwise: _What) -> _What:
        """Returns what a step gives that only shows or compares. If it fails, says so and returns something else: no
        such step ends a node, whatever numbers the other sites have sent."""
        try:
            return part()
        except Exception as error:
            reason = in_a_line(error)
            if self._failed.get(what) != reason:
                self._failed[what] = reason
                self._report("error", f"{what} failed; the node goes on without it", reason=reason)
            return otherwise

    def view(self) -> dict[str, list[str]]:
        """Returns what of each site is ignored and why, in sentences."""
        found: dict[str, list[str]] = {}
        for (site, what), reason in list(self._ignored.items()):
            found.setdefault(site, []).append(f"its {what} are ignored: {reason}")
        return found
