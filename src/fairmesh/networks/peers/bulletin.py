"""What every site announces to all: signed by it, passed on by neighbours, the newest of each kind kept."""

import json
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fairmesh.errors import BadInput
from fairmesh.networks.peers import certificates
from fairmesh.networks.peers.frames import Refused, read_json

_AT_MOST = 1 << 16  # bytes of one announcement
_NUMBER_AT_MOST = 1 << 53
_SHORT = 200  # letters, of what is shown to people


def _short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _SHORT and value.isprintable()


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _NUMBER_AT_MOST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _NUMBER_AT_MOST


def _number_or_none(value: Any) -> bool:
    return value is None or _number(value)


def _since(value: Any) -> bool:
    return isinstance(value, dict) and all(_short(key) and _number(item) for key, item in value.items())


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


# What a body must say: each kind in the order in which news of it is told, with what its fields are.
KINDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "certificate": {"pem": _is(str)},
    "facts": {
        "samples": _count,
        "inputs": _is(list),
        "targets": _is(list),
        "outputs": _count,
        "test": _is(bool),
        "validation": _is(bool),
        "group": _short,
    },
    "status": {
        "round": _count,
        "activity": _short,
        "metric": _number_or_none,
        "metric_round": _number_or_none,
        "weight": _number_or_none,
        "waiting_for": _since,
        "bytes_out": _count,
        "time": _number,
    },
    "leaving": {"site": _short, "generation": _count, "mesh": _short},
    "frozen": {"generation": _count, "round": _count},
}


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
        self.since = int(certificates.valid_from(certificate).timestamp())  # one that was renewed takes the old's place
        self.announce("certificate", {"pem": certificate.decode()}, self.since)

    def serve(self, changed: Callable[[], None]) -> None:
        """`changed` is called when there is news to pass on."""
        self._changed = changed

    def announce(self, kind: str, body: Mapping[str, Any], number: int) -> None:
        """Says something under this site's own name."""
        said = json.loads(json.dumps(body), parse_constant=lambda text: None)  # what is not finite is not JSON
        unsigned = Announcement(self._name, kind, number, said, b"")
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
        fresh.sort(key=lambda one: list(KINDS).index(one.kind))
        return now, json.dumps([one.table() for one in fresh]).encode() if fresh else None

    def heard(self, entries: bytes) -> None:
        """Takes over news of a neighbour; refuses what was not said by the site it is said to come from."""
        self._take_over(entries, own=False)

    def _take_over(self, entries: bytes, own: bool) -> None:
        try:
            found = [_read(table) for table in read_json(entries)]
        except (ValueError, TypeError, KeyError) as error:
            raise Refused("news that cannot be read") from error
        fresh = False
        for one in found:
            fresh = self._heard(one, own) or fresh
        if fresh:
            self._changed()

    def _heard(self, one: Announcement, own: bool) -> bool:
        if one.site not in self._sites or one.kind not in KINDS:
            raise Refused(f"news of kind {one.kind!r} from {one.site!r}, which this mesh does not know")
        with self._lock:
            known = self._known.get((one.site, one.kind))
        if (one.site == self._name and not own) or (known and known[1].number >= one.number):
            return False
        pem = one.body.get("pem") if one.kind == "certificate" else (self.of(one.site, "certificate") or {}).get("pem")
        if not isinstance(pem, str) or not self._signed(one, pem.encode(errors="replace")):
            raise Refused(f"news of kind {one.kind!r} that {one.site} did not sign")
        wrong = [name for name, holds in KINDS[one.kind].items() if not holds(one.body.get(name))]
        if wrong or len(one.text()) > _AT_MOST:
            raise Refused(f"news of kind {one.kind!r} from {one.site} with {wrong[0] if wrong else 'too much'} in it")
        with self._lock:
            if one.kind == "certificate":  # what was signed with another key cannot be passed on any more
                for kind in [kind for kind in KINDS if self._is_unsigned(one, kind)]:
                    del self._known[one.site, kind]
            self._put(one)
        return True

    def _signed(self, one: Announcement, pem: bytes) -> bool:
        """Whether its site signed it. What a site said while its certificate was valid stays said when it has expired:
        that refuses the site's own streams, and is no reason to refuse those who pass its news on."""
        try:
            when = min(datetime.now(UTC), certificates.valid_until(pem))
        except BadInput:
            return False
        return certificates.verified(pem, self._authority, one.site, one.text(), one.signature, when)

    def _is_unsigned(self, certificate: Announcement, kind: str) -> bool:
        known = self._known.get((certificate.site, kind))
        return (
            known is not None and kind != "certificate" and not self._signed(known[1], certificate.body["pem"].encode())
        )

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


def _read(table: Any) -> Announcement:
    site, kind, number, body = (table[name] for name in ("site", "kind", "number", "body"))
    if not (_short(site) and _short(kind) and _count(number) and isinstance(body, dict)):
        raise TypeError("not an announcement")
    return Announcement(site, kind, number, body, bytes.fromhex(table["signature"]))
