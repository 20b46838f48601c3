"""What has gone over a site's connections since it began, also before restarts of its node.

It is counted in memory and written every second, so a node that is killed forgets the last second."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.mesh.wire.mailroom import Counters
from fairmesh.storage.files import read_record, write_record
from fairmesh.storage.run_folder import TRAFFIC


class TrafficCount:
    """Counts what goes over this site's connections, and keeps it in the state folder.

    Args:
        folder: The state folder.
        site: This site.
    """

    def __init__(self, folder: Path, site: str):
        self._path, self._site = folder / TRAFFIC, site
        known = _read(self._path)
        self.damaged = known is None  # so that what was counted before is lost
        self._edges, self._written = known or {}, {}

    def over(self, neighbour: str) -> Counters:
        """Returns the counters of the connection to a neighbour, which go on counting."""
        return self._edges.setdefault(neighbour, Counters())

    def total(self, of: str) -> int:
        """Returns the sum of a counter, such as "wire_out", over all neighbours, also over those that have left."""
        return sum(getattr(counters, of) for counters in list(self._edges.values()))

    def keep(self) -> None:
        """Writes the counts, if they have changed. A power cut may lose the newest, which only inform."""
        table = self._table()
        if table != self._written:
            write_record(self._path, table, durable=False)
            self._written = table

    def _table(self) -> dict[str, Any]:
        edges = dict(self._edges)
        of_edges = [counters.view() for counters in edges.values()]
        counts = {
            f"{of}_{way}": sum(edge[f"{key}_{way}"] for edge in of_edges)
            for way in ("out", "in")
            for of, key in (("payload", "bytes"), ("overhead", "overhead"))
        }
        return {"site": self._site} | counts | {"neighbours": {name: dict(vars(one)) for name, one in edges.items()}}


def _read(path: Path) -> dict[str, Counters] | None:
    """Returns the counters by neighbour; {} if there is no file, None if it is damaged."""
    with suppress(BadInput):
        neighbours = read_record(path, "remove it: it only counts").get("neighbours", {})
        return {name: Counters(**counts) for name, counts in neighbours.items()}
    return None
