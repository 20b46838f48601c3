"""What every site announces to all: signed by it, passed on by neighbours, the newest of each kind kept."""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fairmesh.networks.peers import certificates
from fairmesh.networks.peers.frames import Refused

_AT_MOST = 1 << 16  # bytes of one announcement
KINDS = ("certificate", "facts", "status", "leaving", "frozen")


class Announcement(NamedTuple):
    """What a site says under its name; of two of one kind the one with the higher number holds."""

    site: str
    kind: str
    number: int
    body: dict[str, Any]
    signature: bytes

    def text(self) -> bytes:
        return json.dumps([self.site, self.kind, self.number, self.body], sort_keys=True).encode()

    def table(self) -> dict[str, Any]:
        return {**self._asdict(), "signature": self.signature.hex()}


class Bulletin:
    """All announcements a site knows, each checked against the certificate of the site it comes from."""

    def __init__(self, name: str, key: bytes, certificate: bytes, authority: bytes, sites: tuple[str, ...]):
        self._name, self._key, self._authority, self._sites = name, key, authority, set(sites)
        self._known: dict[tuple[str, str], tuple[int, Announcement]] = {}  # with the order of arrival
        self._order, self._lock = 0, threading.Lock()
        self._changed: Callable[[], None] = lambda: None
        self.announce("certificate", {"pem": certificate.decode()}, 0)

    def serve(self, changed: Callable[[], None]) -> None:
        """`changed` is called when there is news to pass on."""
        self._changed = changed

    def announce(self, kind: str, body: Mapping[str, Any], number: int) -> None:
        """Says something under this site's own name."""
        unsigned = Announcement(self._name, kind, number, dict(body), b"")
        made = unsigned._replace(signature=certificates.signature(self._key, unsigned.text()))
        with self._lock:
            known = self._known.get((self._name, kind))
            if known and known[1].number >= number:
                return
            self._put(made)
        self._changed()

    def _put(self, one: Announcement) -> None:
        self._order += 1
        self._known[one.site, one.kind] = self._order, one

    def of(self, site: str, kind: str) -> dict[str, Any] | None:
        with self._lock:
            found = self._known.get((site, kind))
        return None if found is None else found[1].body

    def of_all(self, kind: str) -> dict[str, dict[str, Any]]:
        with self._lock:
            return {site: one.body for (site, what), (_, one) in self._known.items() if what == kind}

    def news(self, since: int) -> tuple[int, bytes | None]:
        """What came after a point of the order, certificates first, as bytes, and where the order is now."""
        with self._lock:
            fresh = [one for order, one in self._known.values() if order > since]
            now = self._order
        fresh.sort(key=lambda one: KINDS.index(one.kind))
        return now, json.dumps([one.table() for one in fresh]).encode() if fresh else None

    def heard(self, entries: bytes) -> None:
        """Takes over news of a neighbour; refuses what was not said by the site it is said to come from."""
        self._take_over(entries, own=False)

    def _take_over(self, entries: bytes, own: bool) -> None:
        try:
            tables = json.loads(entries)
            found = [
                Announcement(t["site"], t["kind"], int(t["number"]), dict(t["body"]), bytes.fromhex(t["signature"]))
                for t in tables
            ]
        except (ValueError, TypeError, KeyError) as error:
            raise Refused("news that cannot be read") from error
        fresh = False
        for one in found:
            fresh = self._heard(one, own) or fresh
        if fresh:
            self._changed()

    def _heard(self, one: Announcement, own: bool) -> bool:
        if one.site not in self._sites or one.kind not in KINDS or len(one.text()) > _AT_MOST:
            raise Refused(f"news of kind {one.kind!r} from {one.site!r}, which this mesh does not know")
        with self._lock:
            known = self._known.get((one.site, one.kind))
        if (one.site == self._name and not own) or (known and known[1].number >= one.number):
            return False
        pem = one.body.get("pem") if one.kind == "certificate" else (self.of(one.site, "certificate") or {}).get("pem")
        if not isinstance(pem, str) or not certificates.verified(
            pem.encode(), self._authority, one.site, one.text(), one.signature
        ):
            raise Refused(f"news of kind {one.kind!r} that {one.site} did not sign")
        with self._lock:
            self._put(one)
        return True

    def saved(self) -> bytes:
        """Everything known, to be read again by `restored`."""
        return self.news(0)[1] or b"[]"

    def restored(self, path: Path) -> None:
        """What was known, and said, before a restart, as far as it can be read."""
        if path.exists():
            try:
                self._take_over(path.read_bytes(), own=True)
            except Refused:
                path.unlink()
