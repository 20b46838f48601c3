"""Announcements of every site to all others: signed by the site, passed on by neighbours; the newest of each kind.

A member can sign as many announcements as it likes. So each neighbour may pass on only so many of each site, and only
so large ones; what exceeds this is dropped before its signature is verified. What is accepted goes once to each other
neighbour, so passing on cannot multiply a flood.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fairmesh.errors import BadInput
from fairmesh.mesh.enrol import certificates
from fairmesh.mesh.wire.frames import Refused, read_json
from fairmesh.mesh.wire.kinds import KINDS, count, text, too_deep, wrong
from fairmesh.mesh.wire.limits import TokenBucket

_AT_MOST = 1 << 14  # bytes of one announcement, unless its kind needs more or less; `follow` has all sites' signatures
FOLLOW_AT_MOST = 1 << 18
TABLE_AT_MOST = 1 << 18
_AT_MOST_OF = {
    "certificate": 1 << 12,
    "facts": 1 << 12,
    "status": 1 << 13,
    "measured": 1 << 16,
    "follow": FOLLOW_AT_MOST,
    "table": TABLE_AT_MOST,
}
_A_FRAME = 1 << 15  # bytes of news per frame
_PER_SECOND, _AT_ONCE = 4.0, 40.0  # announcements of one site that a neighbour may pass on
OUTPUTS = 10_000  # of a model, unless the experiment lists more classes


class Announcement(NamedTuple):
    """A signed statement of one site. Of two of the same kind, the one with the higher number counts."""

    site: str
    kind: str
    number: int
    body: dict[str, Any]
    signature: bytes

    def text(self) -> bytes:
        return json.dumps([self.site, self.kind, self.number, self.body], sort_keys=True).encode()

    def table(self) -> dict[str, Any]:
        return {**self._asdict(), "signature": self.signature.hex()}


class _Known(NamedTuple):
    order: int  # of arrival
    one: Announcement
    source: object | None  # the stream over which it came
    since: float  # when, by time.monotonic()


@dataclass(eq=False)
class Bulletin:
    """All announcements that a site knows, each checked against the certificate of the site that made it. One that
    declares more than `outputs` outputs of the model is refused, before anything of that size is allocated."""

    name: str
    key: bytes
    certificate: bytes
    authority: bytes
    sites: tuple[str, ...]
    refusal: Callable[[str, bytes], str | None] = lambda site, certificate: None  # of a key that is not confirmed
    outputs: int = OUTPUTS

    def __post_init__(self):
        self._unconfirmed: dict[str, bytes] = {}  # the refused certificate of a site
        self._older: dict[str, bytes] = {}  # a certificate of a site that has a newer one
        self._said: dict[str, int] = {}  # the highest number of this site's own announcements that others have
        self._by_clock: set[str] = set()  # the kinds whose numbers this site takes from its clock
        self._known: dict[tuple[str, str], _Known] = {}  # by site and kind
        self._allowed: dict[tuple[str, str], TokenBucket] = {}  # by neighbour and site
        self._order, self._lock = 0, threading.RLock()
        self.changed: Callable[[], None] = lambda: None  # called when there is news to pass on
        self.since = int(certificates.valid_from(self.certificate).timestamp())  # a renewed one replaces the old
        self.announce("certificate", {"pem": self.certificate.decode()}, self.since)

    def announce(self, kind: str, body: Mapping[str, Any], number: int | None = None) -> None:
        """Announces something in this site's name. It replaces the previous announcement of its kind, unless that has
        the same number or a higher one."""
        said = json.loads(json.dumps(body), parse_constant=lambda text: None)  # JSON has no NaN and no infinity
        with self._lock:
            known = self.entry(self.name, kind)
            if number is None:
                number = self.next_number(kind)
                self._by_clock.add(kind)
            if known is not None and known.number >= number:
                return
            self._put(self._signed_here(Announcement(self.name, kind, number, said, b"")))
        self.changed()

    def _signed_here(self, one: Announcement) -> Announcement:
        return one._replace(signature=certificates.signature(self.key, one.text()))

    def _put(self, one: Announcement, source: object | None = None) -> None:
        self._order += 1
        self._known[one.site, one.kind] = _Known(self._order, one, source, time.monotonic())

    def next_number(self, kind: str, after: int = -1) -> int:
        """Returns a number for this site's next announcement of a kind, higher than all before and than `after`."""
        known = self.entry(self.name, kind)
        before = max(after, self._said.get(kind, -1), -1 if known is None else known.number)
        return max(before + 1, int(1000 * time.time()))

    def entry(self, site: str, kind: str) -> Announcement | None:
        with self._lock:
            found = self._known.get((site, kind))
        return None if found is None else found.one

    def ages(self, kind: str) -> dict[str, float]:
        """Returns for each site how many seconds ago its announcement arrived here. Its own clock may be wrong."""
        now = time.monotonic()
        return {known.one.site: now - known.since for known in self._of_kind(kind)}

    def _of_kind(self, *kinds: str) -> list[_Known]:
        with self._lock:
            return [known for kind in kinds for (_, what), known in self._known.items() if what == kind]

    def signed_by(self, site: str, kind: str, number: int, body: Mapping[str, Any], signature: str) -> bool:
        """Returns whether a site has signed an announcement that another site quotes."""
        certificate = self.of(site, "certificate")
        try:
            quoted = Announcement(site, kind, number, dict(body), bytes.fromhex(signature))
        except ValueError:
            return False
        return certificate is not None and self._signed(quoted, certificate["pem"].encode())

    def of(self, site: str, kind: str) -> dict[str, Any] | None:
        found = self.entry(site, kind)
        return None if found is None else found.body

    def of_all(self, kind: str) -> dict[str, dict[str, Any]]:
        return {known.one.site: known.one.body for known in self._of_kind(kind)}

    def news(self, since: int, stream: object | None = None) -> tuple[int, bytes | None]:
        """Returns the announcements that arrived after point `since`, as many as fit a frame, and the point up to which
        they go. They keep the order of arrival, so that a certificate precedes what was signed with it. Those that came
        over `stream` are left out."""
        with self._lock:
            fresh = sorted((k.order, k.one) for k in self._known.values() if k.order > since)
            theirs = {k.order for k in self._known.values() if stream is not None and k.source is stream}
        texts: list[str] = []
        for order, one in fresh:
            since = order
            if order not in theirs:
                texts.append(json.dumps(one.table()))
            if sum(map(len, texts)) > _A_FRAME:
                break
        return since, f"[{','.join(texts)}]".encode() if texts else None

    def quoted(self, *kinds: str) -> list[bytes]:
        """Returns all announcements of some kinds, one per frame, in the order of the kinds."""
        return [f"[{json.dumps(known.one.table())}]".encode() for known in self._of_kind(*kinds)]

    def heard(self, entries: bytes, neighbour: str = "", stream: object | None = None) -> set[str]:
        """Takes over news from a neighbour that came over a stream.

        Returns:
            The sites of which some announcements were dropped, because the neighbour passes on too many.

        Raises:
            Refused: If an announcement was not signed by the site that it names.
        """
        try:
            found = [_read(table) for table in read_json(entries)]
        except (ValueError, TypeError, KeyError) as error:
            raise Refused("news that cannot be read") from error
        fresh, dropped = False, set[str]()
        for one in found:
            if not self._is_new(one) and not self._is_older_certificate(one):
                continue
            allowed = self._allowed.setdefault((neighbour, one.site), TokenBucket(_PER_SECOND, _AT_ONCE))
            if not allowed.spend(1):
                dropped.add(one.site)
                continue
            if not self._is_new(one):
                self._note_older(one)
                continue
            fresh = (self._said_before(one) if one.site == self.name else self._heard(one, stream)) or fresh
        if fresh:
            self.changed()
        return dropped

    def _is_new(self, one: Announcement) -> bool:
        if one.site not in self.sites or one.kind not in KINDS:
            raise Refused(f"news of kind {one.kind!r} from {one.site!r}, which this mesh does not know")
        known = self.entry(one.site, one.kind)
        return known is None or known.number < one.number or self._replaces(one, known)

    def _replaces(self, one: Announcement, known: Announcement) -> bool:
        """Returns whether a certificate replaces one with a higher number: one of a key that was replaced, or one that
        is not valid yet because the founder's clock was ahead."""
        if one.kind != "certificate" or one.body == known.body or one.site == self.name:
            return False
        pem = known.body["pem"].encode()
        return certificates.valid_from(pem) > datetime.now(UTC) or self.refusal(one.site, pem) is not None

    def _is_older_certificate(self, one: Announcement) -> bool:
        known = self.of(one.site, "certificate")
        pem = one.body.get("pem")
        if one.kind != "certificate" or one.site == self.name or known is None or not isinstance(pem, str):
            return False
        return pem != known["pem"] and self._older.get(one.site) != pem.encode(errors="replace")

    def _note_older(self, one: Announcement) -> None:
        """Remembers the old certificate of a site. A neighbour that has not confirmed the new key yet passes on what
        the old one signed, which is no reason to refuse that neighbour."""
        pem = one.body["pem"].encode(errors="replace")
        if self._signed(one, pem):
            self._older[one.site] = pem

    def _said_before(self, one: Announcement) -> bool:
        """Takes note of an announcement of this site itself that others have, with a higher number than it knows. It
        was made before a restart, perhaps while this site's clock was ahead. What this site says now must have a higher
        number to count."""
        if one.kind == "certificate" or not self._signed(one, self.certificate):
            return False
        with self._lock:
            self._said[one.kind] = max(one.number, self._said.get(one.kind, -1))
            known = self.entry(self.name, one.kind)
            if known is None or one.kind not in self._by_clock:
                return False
            self._put(self._signed_here(known._replace(number=one.number + 1)))
        return True

    def _heard(self, one: Announcement, stream: object | None = None) -> bool:
        if len(one.text()) > _AT_MOST_OF.get(one.kind, _AT_MOST):
            raise Refused(f"news of kind {one.kind!r} from {one.site} with too much in it")
        pem = one.body.get("pem") if one.kind == "certificate" else (self.of(one.site, "certificate") or {}).get("pem")
        if not isinstance(pem, str) or not self._signed(one, pem.encode(errors="replace")):
            others = [known[one.site] for known in (self._unconfirmed, self._older) if one.site in known]
            if any(self._signed(one, other) for other in others):
                return False  # only one of this site and the neighbour that passes it on has confirmed the new key
            raise Refused(f"news of kind {one.kind!r} that {one.site} did not sign")
        if one.kind == "certificate" and one.site != self.name and self.refusal(one.site, pem.encode()):
            self._unconfirmed[one.site] = pem.encode()
            return False
        found = wrong(one.kind, one.body, self.outputs)
        if found:
            raise Refused(f"news of kind {one.kind!r} from {one.site} with {found} in it")
        with self._lock:
            if one.kind == "certificate":  # what the old key signed can no longer be passed on
                said = {kind: self.entry(one.site, kind) for kind in KINDS if kind != "certificate"}
                for kind, before in said.items():
                    if before is not None and not self._signed(before, pem.encode()):
                        del self._known[one.site, kind]
            self._put(one, stream)
        return True

    def _signed(self, one: Announcement, pem: bytes) -> bool:
        """Returns whether its site signed it. An announcement stays valid after the certificate has expired. The
        expiry ends the site's own streams, but is no reason to refuse neighbours that pass its announcements on."""
        try:
            when = min(datetime.now(UTC), certificates.valid_until(pem))
        except BadInput:
            return False
        return certificates.verified(pem, self.authority, one.site, one.text(), one.signature, when)

    def saved(self) -> bytes:
        """Returns everything known, for `restored` to read again."""
        with self._lock:
            every = sorted((known.order, known.one) for known in self._known.values())
        return json.dumps([one.table() for _, one in every]).encode()

    def restored(self, path: Path) -> list[str]:
        """Reads what was known before a restart. Signs this site's own announcements again, since its key may be new.

        Returns:
            What was passed over: it would be refused if it arrived now, since the file is damaged.
        """
        if not path.exists():
            return []
        try:
            tables = list(read_json(path.read_bytes()))
        except (ValueError, TypeError):
            return ["the file is damaged"]
        passed_over = []
        for table in tables:
            try:
                one = _read(table)
                if one.kind == "status":  # of before the restart, and so perhaps of a node that no longer runs
                    continue
                if one.site == self.name and one.kind != "certificate":
                    one = self._signed_here(one)
                if self._is_new(one):
                    self._heard(one)
            except (ValueError, TypeError, KeyError, Refused) as error:
                passed_over.append(str(error) if isinstance(error, Refused) else "an announcement that cannot be read")
        return passed_over


def _read(table: Any) -> Announcement:
    site, kind, number, body = (table[name] for name in ("site", "kind", "number", "body"))
    if not (text()(site) and text()(kind) and count()(number) and isinstance(body, dict)) or too_deep(body):
        raise TypeError("not an announcement")
    return Announcement(site, kind, number, body, bytes.fromhex(table["signature"]))
