"""Whose key is whose: the founder's ledger of the certificates that the authority has signed, a text file next to the
authority's key, and the keys by which a site knows the others.

The founder could sign any key for any name, so another key of a site is refused until a person has confirmed its
fingerprint.

The first key of a site that the authority has signed is recorded. A certificate with other dates for the same key is
accepted and logged. A site that has to replace its key reads the new fingerprint out to the others, and they confirm it
with `fairmesh mesh trust`; from then on the old key is refused.
"""

import csv
import os
import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.mesh.enrol.certificates import fingerprint, serial_of, valid_until
from fairmesh.storage.files import private_folder, read_record, write_record

LEDGER = "ledger.tsv"
_COLUMNS = ("signed", "site", "fingerprint", "serial", "valid until")
_DATE = "%Y-%m-%dT%H:%M:%SZ"
_KEYS, _TRUSTED = "keys.json", "trusted.json"
_NEW_KEYS = (
    "put it back from a backup. If there is none, move it away: the node then records the keys that it meets next, so "
    "let every site read out its fingerprint, and compare them with those of `fairmesh status --json`"
)
_CONFIRM_AGAIN = "move it away, and confirm the keys again that sites have replaced (fairmesh mesh trust)"

Report = Callable[..., None]


def refuse_other_key(folder: Path, site: str, shown: str) -> None:
    """Refuses to sign a second key for a site whose certificate for another key, by the ledger, is still valid."""
    path, now = folder / LEDGER, datetime.now(UTC).strftime(_DATE)
    if not path.exists():
        return
    with open(path, encoding="utf-8", newline="") as file:
        for number, entry in enumerate(csv.reader(file, delimiter="\t"), start=1):
            if len(entry) != len(_COLUMNS):
                raise BadInput(f"{path}, line {number}: expected {len(_COLUMNS)} columns, got {len(entry)}")
            if number > 1 and entry[1] == site and entry[2] != shown and entry[4] > now:
                raise BadInput(
                    f"site {site} has a certificate for another key, with the fingerprint {entry[2]}, valid until "
                    f"{entry[4]}. To renew it, sign the request of that key again. If the site had to replace its key, "
                    "sign with --new-key; every other site then has to confirm the new fingerprint with `fairmesh mesh "
                    "trust`"
                )


def record_signed(folder: Path, site: str, certificate: bytes) -> None:
    """Adds a certificate to the founder's ledger."""
    path = folder / LEDGER
    dates = [moment.strftime(_DATE) for moment in (datetime.now(UTC), valid_until(certificate))]
    entry = (dates[0], site, fingerprint(certificate), f"{serial_of(certificate):x}", dates[1])
    try:
        with open(path, "a", encoding="utf-8") as file:
            for row in [entry] if file.tell() else [_COLUMNS, entry]:
                file.write("\t".join(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error


def trust(state: Path, site: str, text: str) -> str:
    """Records that a person has confirmed a site's fingerprint. The site's node looks for it when it meets that key.

    Returns:
        The fingerprint in its usual form.
    """
    digits = re.sub(r"[\s:]", "", text).lower()
    if not re.fullmatch(r"[0-9a-f]{24}", digits):
        raise BadInput(
            f"{text!r} is not a fingerprint: it has 24 hexadecimal digits, such as `fairmesh mesh key` shows"
        )
    shown = " ".join(digits[i : i + 4] for i in range(0, 24, 4))
    private_folder(state)
    write_record(state / _TRUSTED, read_record(state / _TRUSTED, _CONFIRM_AGAIN) | {site: shown})
    return shown


class KnownKeys:
    """The keys that the node with this state folder has recorded. Can be used from any thread."""

    def __init__(self, state: Path, report: Report):
        self._state, self._report, self._lock = state, report, threading.Lock()
        self._keys: dict[str, dict[str, Any]] = read_record(state / _KEYS, _NEW_KEYS)
        self._unconfirmed: dict[str, str] = {}  # the fingerprint of a key that was refused, by site

    def refusal(self, site: str, certificate: bytes) -> str:
        """Returns why a certificate of a site cannot be accepted, or "". It must be one that the authority signed."""
        shown, serial = fingerprint(certificate), f"{serial_of(certificate):x}"
        with self._lock:
            known = self._keys.get(site)
            if known and shown in known["retired"]:
                return f"{site}'s key {shown} was replaced, and may be stolen; {site} must use its new key"
            if known and shown != known["fingerprint"]:
                try:
                    confirmed = read_record(self._state / _TRUSTED, _CONFIRM_AGAIN).get(site)
                except BadInput as error:
                    return str(error)
                if confirmed != shown:
                    return self._refused(site, shown)
                self._report("warning", "a site has a new key, which was confirmed here", site=site, fingerprint=shown)
                known = {"retired": [*known["retired"], known["fingerprint"]]}
            elif known and serial != known["serial"]:
                self._report("info", "a site has a new certificate for the same key", site=site, fingerprint=shown)
            elif known:
                return ""
            retired = known["retired"] if known else []
            self._keys[site] = {"fingerprint": shown, "serial": serial, "retired": retired}
            self._unconfirmed.pop(site, None)
            write_record(self._state / _KEYS, self._keys)
        return ""

    def _refused(self, site: str, shown: str) -> str:
        reason = (
            f"{site} has a new key with the fingerprint {shown}; if {site} reads out the same, confirm it: "
            f'fairmesh mesh trust site.toml {site} "{shown}"'
        )
        if self._unconfirmed.get(site) != shown:
            self._unconfirmed[site] = shown
            self._report("warning", "a site has a new key, which must be confirmed", site=site, reason=reason)
        return reason

    def view(self) -> dict[str, dict[str, str | None]]:
        """Returns the recorded fingerprint of each site, and the one that waits for confirmation, for the status."""
        with self._lock:
            return {
                site: {"fingerprint": known["fingerprint"], "unconfirmed": self._unconfirmed.get(site)}
                for site, known in self._keys.items()
            }
