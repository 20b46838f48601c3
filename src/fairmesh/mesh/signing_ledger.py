"""The founder's ledger: which certificates the authority has signed. A text file next to the authority's key."""

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from fairmesh.errors import BadInput
from fairmesh.mesh.certificates import fingerprint, serial_of, valid_until

LEDGER = "ledger.tsv"
_HEAD = "signed\tsite\tfingerprint\tserial\tvalid until\n"
_DATE = "%Y-%m-%dT%H:%M:%SZ"


class Entry(NamedTuple):
    signed: str
    site: str
    fingerprint: str
    serial: str
    until: str

    def valid(self, now: datetime) -> bool:
        return self.until > now.strftime(_DATE)


def entries(folder: Path) -> Iterator[Entry]:
    """Yields what was signed, in order."""
    path = folder / LEDGER
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:], start=2):
        fields = line.split("\t")
        if len(fields) != len(Entry._fields):
            raise BadInput(f"{path}, line {number}: expected {len(Entry._fields)} columns, got {len(fields)}")
        yield Entry(*fields)


def refuse_other_key(folder: Path, site: str, shown: str) -> None:
    """Refuses to sign a second key for a site whose certificate for another key is still valid."""
    now = datetime.now(UTC)
    for entry in entries(folder):
        if entry.site == site and entry.fingerprint != shown and entry.valid(now):
            raise BadInput(
                f"site {site} has a certificate for another key, with the fingerprint {entry.fingerprint}, valid until "
                f"{entry.until}. To renew it, sign the request of that key again. If the site had to replace its key, "
                "sign with --new-key; every other site then has to confirm the new fingerprint with `fairmesh mesh "
                "trust`"
            )


def record(folder: Path, site: str, certificate: bytes) -> None:
    """Adds a certificate to the ledger."""
    path, now = folder / LEDGER, datetime.now(UTC)
    until = valid_until(certificate).strftime(_DATE)
    entry = Entry(now.strftime(_DATE), site, fingerprint(certificate), f"{serial_of(certificate):x}", until)
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(("" if file.tell() else _HEAD) + "\t".join(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error
