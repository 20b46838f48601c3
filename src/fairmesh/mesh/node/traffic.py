"""What has gone over a site's connections since it began, also before restarts of its node.

It is counted in memory and written every second, so a node that is killed forgets the last second."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from fairmesh.mesh.wire.mailroom import Counters
from fairmesh.storage.files import write_atomically
from fairmesh.storage.run_folder import TRAFFIC
from fairmesh.storage.strict_json import as_json


class TrafficCount:
    """Counts what goes over this site's connections, and keeps it in the state folder.

    Args:
        folder: The state folder.
        site: This site.
    """

    def __init__(self, folder: Path, site: str):
        self._path, self._site = folder / TRAFFIC, site
        self._edges, self._written = _read(self._path), ""

    def over(self, neighbour: str) -> Counters:
        """Returns the counters of the connection to a neighbour, which go on counting."""
        return self._edges.setdefault(neighbour, Counters())

    def total(self, of: str) -> int:
        """Returns the sum of a counter, such as "wire_out", over all neighbours, also over those that have left."""
        return sum(getattr(counters, of) for counters in list(self._edges.values()))

    def keep(self) -> None:
        """Writes the counts, if they have changed. A power cut may lose the newest, which only inform."""
        text = as_json(self._table())
        if text != self._written:
            write_atomically(self._path, text.encode(), durable=False)
            self._written = text

    def _table(self) -> dict[str, Any]:
        edges = dict(self._edges)
        of_edges = [counters.view() for counters in edges.values()]
        counts = {
            f"{of}_{way}": sum(edge[f"{key}_{way}"] for edge in of_edges)
            for way in ("out", "in")
            for of, key in (("payload", "bytes"), ("overhead", "overhead"))
        }
        return {"site": self._site} | counts | {"neighbours": {name: vars(one) for name, one in edges.items()}}


def _read(path: Path) -> dict[str, Counters]:
    """Returns the counters by neighbour; none if there is no file, or a damaged one, since they only inform."""
    with suppress(OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
        told: Mapping[str, Mapping[str, Any]] = json.loads(path.read_bytes())["neighbours"]
        names = [field.name for field in fields(Counters)]
        return {str(name): Counters(**{key: max(0, int(one[key])) for key in names}) for name, one in told.items()}
    return {}
