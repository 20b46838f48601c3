"""Announcements of every site to all others: signed by the site, passed on by neighbours; the newest of each kind.

A member can sign as many announcements as it likes. So each neighbour may pass on only so many of each site and kind,
and only so large ones, as `announcements.KINDS` declares; what exceeds this is dropped before its signature is
verified. What is accepted goes once to each other neighbour, so passing on cannot multiply a flood.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fairmesh.errors import BadInput
from fairmesh.mesh.announcements import KINDS, TOLD, wrong
from fairmesh.mesh.enrol import certificates
from fairmesh.mesh.fields import Terms, count, text, too_deep
from fairmesh.mesh.wire.frames import Refused, read_json
from fairmesh.mesh.wire.limits import TokenBucket
from fairmesh.mesh.wire.tls_stream import Credentials

_COMPARED = "measured"  # the kind of which also older announcements are looked at
_ALIKE = ("facts", "table")  # what all sites must know alike before the first round
_SUPERSEDED_AT_MOST = 64
A_FRAME = 1 << 15  # bytes of news per frame


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
    entry: Announcement
    source: object  # the stream over which it came; for what did not come over one, the bulletin itself
    since: float  # when, by time.monotonic()


@dataclass(eq=False)
class Bulletin:
    """All announcements that a site knows, each checked against the certificate of the site that made it, and against
    what `announcements.KINDS` declares. What contradicts the terms of the mesh is refused, before anything of that size
    is allocated: readers get checked bodies only."""

    name: str
    credentials: Credentials
    terms: Terms
    refusal: Callable[[str, bytes], str] = lambda site, certificate: ""  # of a key that is not confirmed

    def __post_init__(self):
        self._unconfirmed: dict[str, bytes] = {}  # the refused certificate of a site
        self._older: dict[str, bytes] = {}  # a certificate of a site that has a newer one
        self._said: dict[str, int] = {}  # the highest number of this site's own announcements that others have
        self._by_clock: set[str] = set()  # the kinds whose numbers this site takes from its clock
        self._known: dict[tuple[str, str], _Known] = {}  # by site and kind
        self._allowed: dict[tuple[str, str, str], TokenBucket] = {}  # by neighbour, site and kind
        self._superseded = deque[Announcement](maxlen=_SUPERSEDED_AT_MOST)
        self._order, self._lock = 0, threading.RLock()
        # Called when there is news to pass on, with whether it is urgent. What sites tell every few seconds is not.
        self.changed: Callable[[bool], None] = lambda urgent: None
        self.since = int(
            certificates.valid_from(self.credentials.certificate).timestamp()
        )  # a renewed one replaces the old
        self.announce("certificate", {"pem": self.credentials.certificate.decode()}, self.since)

    def announce(self, kind: str, body: Mapping[str, Any], number: int | None = None) -> None:
        """Announces something in this site's name. It replaces the previous announcement of its kind, unless that has
        the same number or a higher one."""
        said = json.loads(json.dumps(body), parse_constant=lambda text: None)  # JSON has no NaN and no infinity
        with self._lock:
            if number is None:
                number = self.next_number(kind)
                self._by_clock.add(kind)
            if self._number(self.name, kind) >= number:
                return
            self._put(self._signed_here(Announcement(self.name, kind, number, said, b"")), self)
        self.changed(kind not in TOLD)

    def _signed_here(self, entry: Announcement) -> Announcement:
        return entry._replace(signature=certificates.signature(self.credentials.key, entry.text()))

    def _put(self, entry: Announcement, source: object) -> None:
        self._order += 1
        self._known[entry.site, entry.kind] = _Known(self._order, entry, source, time.monotonic())

    def next_number(self, kind: str, after: int = -1) -> int:
        """Returns a number for this site's next announcement of a kind, higher than all before and than `after`."""
        before = max(after, self._said.get(kind, -1), self._number(self.name, kind))
        return max(before + 1, int(1000 * time.time()))

    def _number(self, site: str, kind: str) -> int:
        """Returns the number of a site's announcement, -1 if none is known."""
        known = self.entry(site, kind)
        return known.number if known else -1

    def entry(self, site: str, kind: str) -> Announcement | None:
        with self._lock:
            known = self._known.get((site, kind))
        return known and known.entry

    def ages(self, kind: str) -> dict[str, float]:
        """Returns for each site how many seconds ago its announcement arrived here. Its own clock may be wrong."""
        now = time.monotonic()
        return {known.entry.site: now - known.since for known in self._of_kind(kind)}

    def _of_kind(self, *kinds: str) -> list[_Known]:
        with self._lock:
            return [known for kind in kinds for (_, what), known in self._known.items() if what == kind]

    def signed_by(self, site: str, kind: str, number: int, body: Mapping[str, Any], signature: str) -> bool:
        """Returns whether a site has signed an announcement that another site quotes."""
        try:
            quoted = Announcement(site, kind, number, dict(body), bytes.fromhex(signature))
        except ValueError:
            return False
        return self._signed(quoted, self._certificate(site))

    def of(self, site: str, kind: str) -> dict[str, Any]:
        """Returns what a site announced; nothing if no announcement of this kind is known."""
        known = self.entry(site, kind)
        return known.body if known else {}

    def _certificate(self, site: str) -> bytes:
        """Returns the certificate that a site announced, b"" if none is known."""
        return self.of(site, "certificate").get("pem", "").encode()

    def of_all(self, kind: str) -> dict[str, dict[str, Any]]:
        return {known.entry.site: known.entry.body for known in self._of_kind(kind)}

    def news(self, since: int, stream: object = None) -> tuple[int, bytes]:
        """Returns the announcements that arrived after point `since`, as many as fit a frame, and the point up to which
        they go; b"" if there are none. They keep the order of arrival, so that a certificate precedes what was signed
        with it. Those that came over `stream` are left out."""
        if since >= self._order:
            return since, b""
        with self._lock:
            fresh = sorted((known for known in self._known.values() if known.order > since), key=lambda k: k.order)
        texts: list[str] = []
        for known in fresh:
            since = known.order
            if known.source is not stream:
                texts.append(json.dumps(known.entry.table()))
            if sum(map(len, texts)) > A_FRAME:
                break
        return since, f"[{','.join(texts)}]".encode() if texts else b""

    def quoted(self, *kinds: str) -> list[bytes]:
        """Returns all announcements of some kinds, one per frame, in the order of the kinds."""
        return [f"[{json.dumps(known.entry.table())}]".encode() for known in self._of_kind(*kinds)]

    def heard(self, entries: bytes, neighbour: str = "", stream: object = None) -> set[str]:
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
        fresh, dropped = set[str](), set[str]()
        for entry in found:
            if not (self._is_new(entry) or self._is_older_certificate(entry) or self._is_other_row(entry)):
                continue
            if not self._bucket(neighbour, entry).spend(1):
                dropped.add(entry.site)
                continue
            if not self._is_new(entry):
                self._note_older(entry)
                self._note_superseded(entry)
                continue
            if self._said_before(entry) if entry.site == self.name else self._heard(entry, stream or self):
                fresh.add(entry.kind)
        if fresh:
            self.changed(not fresh <= TOLD.keys())
        return dropped

    def waits_for_keys(self) -> bool:
        """Returns whether announcements of a site are passed over until its new key is confirmed."""
        return any(self._certificate(site) != pem for site, pem in self._unconfirmed.items())

    def _bucket(self, neighbour: str, entry: Announcement) -> TokenBucket:
        """Returns what limits how many announcements of this site and kind a neighbour may pass on. Each kind has its
        own, so that a flood of one, such as of metrics, does not keep votes from anybody."""
        kind = KINDS[entry.kind]
        place = neighbour, entry.site, entry.kind
        return self._allowed.setdefault(place, TokenBucket(kind.per_second, kind.at_once))

    def _is_new(self, entry: Announcement) -> bool:
        if entry.site not in self.terms.neighbours or entry.kind not in KINDS:
            raise Refused(f"news of kind {entry.kind!r} from {entry.site!r}, which this mesh does not know")
        known = self.entry(entry.site, entry.kind)
        return not known or known.number < entry.number or self._replaces(entry, known) or _is_twin(entry, known)

    def _replaces(self, entry: Announcement, known: Announcement) -> bool:
        """Returns whether a certificate replaces one with a higher number: one of a key that was replaced, or one that
        is not valid yet because the founder's clock was ahead."""
        if entry.kind != "certificate" or entry.body == known.body or entry.site == self.name:
            return False
        pem = known.body["pem"].encode()
        return certificates.valid_from(pem) > datetime.now(UTC) or bool(self.refusal(entry.site, pem))

    def _is_older_certificate(self, entry: Announcement) -> bool:
        known, pem = self._certificate(entry.site), _pem(entry)
        if entry.kind != "certificate" or entry.site == self.name or not known or not pem:
            return False
        return pem not in (known, self._older.get(entry.site))

    def _note_older(self, entry: Announcement) -> None:
        """Remembers the old certificate of a site. A neighbour that has not confirmed the new key yet passes on what
        the old one signed, which is no reason to refuse that neighbour."""
        if self._signed(entry, _pem(entry)):
            self._older[entry.site] = _pem(entry)

    def _is_other_row(self, entry: Announcement) -> bool:
        """Returns whether this is not the newest announcement of another site's metrics, and differs from it."""
        known = self.entry(entry.site, _COMPARED)
        return entry.kind == _COMPARED and entry.site != self.name and known is not None and known.body != entry.body

    def _note_superseded(self, entry: Announcement) -> None:
        """Keeps metrics that came after newer ones, so that they are compared: a site that tells two sites different
        things may number these as it likes."""
        signed = entry.kind == _COMPARED and self._signed(entry, self._certificate(entry.site))
        if signed and not wrong(entry.kind, entry.body, self.terms.by(entry.site)):
            self._superseded.append(entry)

    def superseded(self) -> list[Announcement]:
        """Returns the metrics that came after newer ones of their site, since this was asked last."""
        return [self._superseded.popleft() for _ in range(len(self._superseded))]

    def _said_before(self, entry: Announcement) -> bool:
        """Takes note of an announcement of this site itself that others have, with a higher number than it knows. It
        was made before a restart, perhaps while this site's clock was ahead. What this site says now must have a higher
        number to count."""
        if entry.kind == "certificate" or not self._signed(entry, self.credentials.certificate):
            return False
        with self._lock:
            self._said[entry.kind] = max(entry.number, self._said.get(entry.kind, -1))
            known = self.entry(self.name, entry.kind)
            if not known or entry.kind not in self._by_clock:
                return False
            self._put(self._signed_here(known._replace(number=entry.number + 1)), self)
        return True

    def _heard(self, entry: Announcement, source: object) -> bool:
        if len(entry.text()) > KINDS[entry.kind].at_most:
            raise Refused(f"news of kind {entry.kind!r} from {entry.site} with too much in it")
        pem = _pem(entry) if entry.kind == "certificate" else self._certificate(entry.site)
        if not self._signed(entry, pem):
            others = [known[entry.site] for known in (self._unconfirmed, self._older) if entry.site in known]
            if any(self._signed(entry, other) for other in others):
                return False  # only one of this site and the neighbour that passes it on has confirmed the new key
            raise Refused(f"news of kind {entry.kind!r} that {entry.site} did not sign")
        if entry.kind == "certificate" and entry.site != self.name and self.refusal(entry.site, pem):
            self._unconfirmed[entry.site] = pem
            return False
        found = wrong(entry.kind, entry.body, self.terms.by(entry.site))
        if found:
            raise Refused(f"news of kind {entry.kind!r} from {entry.site} with {found} in it")
        with self._lock:
            self._put(entry, source)
            if entry.kind == "certificate":
                self._put_after_certificate(entry.site, pem)
        return True

    def _put_after_certificate(self, site: str, pem: bytes) -> None:
        """Passes on what a site has said before after its new certificate, with which it is verified. What the old key
        signed can no longer be passed on."""
        said = [known for (who, kind), known in self._known.items() if who == site and kind != "certificate"]
        for known in sorted(said, key=lambda known: known.order):
            place = site, known.entry.kind
            self._order += 1
            self._known[place] = known._replace(order=self._order)
            if not self._signed(known.entry, pem):
                del self._known[place]

    def _signed(self, entry: Announcement, pem: bytes) -> bool:
        """Returns whether its site signed it. An announcement stays valid after the certificate has expired. The
        expiry ends the site's own streams, but is no reason to refuse neighbours that pass its announcements on."""
        try:
            when = min(datetime.now(UTC), certificates.valid_until(pem))
        except BadInput:
            return False
        return certificates.verified(pem, self.credentials.authority, entry.site, entry.text(), entry.signature, when)

    def saved(self) -> bytes:
        """Returns everything known, for `restored` to read again."""
        with self._lock:
            every = sorted(self._known.values(), key=lambda known: known.order)
        return json.dumps([known.entry.table() for known in every]).encode()

    def restored(self, path: Path) -> list[str]:
        """Reads what was known before a restart. Signs this site's own announcements again, since its key may be new.

        Returns:
            What was passed over: it would be refused if it arrived now, since the file is damaged.
        """
        if not path.exists():
            return []
        try:
            tables = read_json(path.read_bytes())
        except (OSError, ValueError):
            tables = []
        if not isinstance(tables, list) or not tables:  # a site knows at least its own certificate
            return ["the file is damaged; the neighbours tell again what they know"]
        passed_over = []
        for table in tables:
            try:
                entry = _read(table)
                if entry.kind == "status":  # of before the restart, and so perhaps of a node that no longer runs
                    continue
                if entry.site == self.name and entry.kind != "certificate":
                    entry = self._signed_here(entry)
                if self._is_new(entry):
                    self._heard(entry, self)
            except (ValueError, TypeError, KeyError, Refused) as error:
                passed_over.append(str(error) if isinstance(error, Refused) else "an announcement that cannot be read")
        return passed_over


def _is_twin(entry: Announcement, known: Announcement) -> bool:
    """Returns whether an announcement counts in place of another one with the same number. A site that tells two sites
    different things would set them against each other, if each kept to what it has heard first."""
    same = entry.kind in _ALIKE and entry.number == known.number
    return same and entry.text() > known.text()


def _pem(entry: Announcement) -> bytes:
    """Returns the certificate in an announcement, b"" if there is none."""
    pem = entry.body.get("pem")
    return pem.encode(errors="replace") if isinstance(pem, str) else b""


def _read(table: Any) -> Announcement:
    site, kind, number, body = (table[name] for name in ("site", "kind", "number", "body"))
    if not (text()(site) and text()(kind) and count()(number) and isinstance(body, dict)) or too_deep(body):
        raise TypeError("not an announcement")
    return Announcement(site, kind, number, body, bytes.fromhex(table["signature"]))
