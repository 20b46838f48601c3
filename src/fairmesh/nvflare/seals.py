"""The seal of a connection of calls: nobody between two sites can open one in a site's name, read it, or add to it.

Each side draws a pair of keys for this connection alone. It signs the public one with the key by which it signs
announcements. All later calls are encrypted with keys that both derive from the two pairs, and that are never written
down. So whoever steals a site's files later cannot read what was recorded before.
"""

import os
from dataclasses import dataclass
from typing import Protocol

from fairmesh.errors import optional
from fairmesh.mesh.wire.frames import Refused

with optional("mesh"):
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

OPENS, ANSWERS = b"fairmesh opens a connection\0", b"fairmesh answers an opening\0"  # what a signature is for
PUBLIC = 64  # hexadecimal digits of a public key
_KEY, _NONCE = 32, 12


class Identity(Protocol):
    """The key of this site, and the certificates that the others have shown."""

    def certificate_of(self, site: str) -> bytes:
        """Returns the certificate by which a site signs."""
        ...

    def signed(self, data: bytes) -> bytes:
        """Returns this site's signature of data."""
        ...

    def signed_by(self, site: str, data: bytes, signature: bytes) -> bool:
        """Returns whether a site has signed the data, by a certificate that it has shown to this one."""
        ...


@dataclass(frozen=True)
class Seal:
    """Encrypts and authenticates the calls of one connection, with a key of its own for each direction."""

    outgoing: "AESGCM"
    incoming: "AESGCM"

    def sealed(self, content: bytes, head: bytes) -> bytes:
        """Returns the content so that only the peer can read it, and only together with this head."""
        nonce = os.urandom(_NONCE)
        return nonce + self.outgoing.encrypt(nonce, content, head)

    def opened(self, content: bytes, head: bytes) -> bytes:
        """Returns what the peer has sealed. Raises Refused if it was not the peer, or not with this head."""
        try:
            return self.incoming.decrypt(content[:_NONCE], content[_NONCE:], head)
        except (InvalidTag, ValueError) as error:
            raise Refused("a call that was not sealed by its sender: forged, spliced or damaged on its way") from error


class Half:
    """What one side draws for a connection."""

    def __init__(self):
        self._key = X25519PrivateKey.generate()
        self.public = self._key.public_key().public_bytes_raw().hex()

    def agreed(self, other: str, transcript: bytes, dialled: bool) -> Seal:
        """Returns the seal that both sides derive.

        Args:
            other: The other side's public key.
            transcript: What both sides have signed.
            dialled: Whether this side has dialled.
        """
        try:
            shared = self._key.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
        except ValueError as error:
            raise Refused("a connection whose public key is none") from error
        derived = HKDF(SHA256(), 2 * _KEY, salt=None, info=transcript).derive(shared)
        keys = AESGCM(derived[:_KEY]), AESGCM(derived[_KEY:])
        return Seal(*keys) if dialled else Seal(*reversed(keys))
