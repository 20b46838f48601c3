"""The consortium's authority, each site's key and certificate, and signatures in a site's name."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from fairmesh.errors import BadInput, optional
from fairmesh.mesh.enrol.roster import Mesh, check_label
from fairmesh.numerics import SECRET_BYTES
from fairmesh.storage.files import read_bytes, write_atomically

with optional("mesh"):
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY = "authority.pem"  # the authority's certificate, at every site
AUTHORITY_KEY = "authority.key"  # its private key, only at the founder's

_SKEW = timedelta(minutes=5)  # by which clocks may differ
SOON_DAYS = 14  # warn about a certificate that ends within this many days
_PURPOSES = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]

T = TypeVar("T")


def make_authority(folder: Path, mesh_name: str, days: float) -> Path:
    """Makes an authority that signs the sites of one mesh: `authority.pem` for everyone, and `authority.key`, which
    stays secret. Never overwrites a key.

    Returns:
        The path of `authority.pem`.
    """
    check_label(mesh_name, "mesh")
    key = _made_key(folder / AUTHORITY_KEY)
    return _write_authority(folder, key, _subject(f"{mesh_name} authority", mesh_name), days)


def renew_authority(folder: Path, days: float) -> Path:
    """Gives an authority's certificate new dates. Key and name stay, so all certificates that it signed stay valid.

    Returns:
        The path of `authority.pem`, which every site needs.
    """
    issuer, key = _authority_in(folder)
    return _write_authority(folder, key, issuer.subject, days)


def _write_authority(folder: Path, key: ec.EllipticCurvePrivateKey, name: x509.Name, days: float) -> Path:
    made = _certificate(name, name, key.public_key(), key, _clock() + timedelta(days=days))
    write_atomically(folder / AUTHORITY, made)
    return folder / AUTHORITY


def _made_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Makes a private key, and writes it to a file that only its owner can read."""
    key = ec.generate_private_key(ec.SECP256R1())
    plain = serialization.NoEncryption()
    _write_secret(path, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return key


def _authority_in(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Returns the certificate and the key of the authority in a folder."""
    issuer = _read(read_bytes(folder / AUTHORITY), AUTHORITY)
    key = _private_key(read_bytes(folder / AUTHORITY_KEY), AUTHORITY_KEY)
    if key.public_key() != issuer.public_key():
        raise BadInput(f"{folder / AUTHORITY_KEY} does not belong to {folder / AUTHORITY}")
    return issuer, key


def make_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Makes a site's private key `name.key`, which never leaves the site, and the request `name.csr` for the authority
    to sign. Never overwrites a key.

    Returns:
        The paths of key and request.
    """
    check_label(name, "site")
    paths = folder / f"{name}.key", folder / f"{name}.csr"
    key = _made_key(paths[0])
    make_secret(secret_of(paths[0]))
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    )
    write_atomically(paths[1], request.sign(key, SHA256()).public_bytes(serialization.Encoding.PEM))
    return paths


def secret_of(key: Path) -> Path:
    """Returns where the secret of a site's random draws is kept: next to its key."""
    return key.with_suffix(".secret")


def make_secret(path: Path) -> bytes:
    """Returns the secret of a site's random draws. Makes it if there is none; never overwrites one."""
    if not path.exists():
        _write_secret(path, os.urandom(SECRET_BYTES))
    found = read_bytes(path)
    if len(found) != SECRET_BYTES:
        raise BadInput(
            f"{path} has {len(found)} bytes instead of {SECRET_BYTES}: it is damaged; put it back from a backup, or, "
            "if there is none, remove it: the next start says what to do"
        )
    return found


def requested_name(request: bytes) -> str:
    """Returns the site that a request is for. Refuses a request that `make_key` would not make: it must be signed by
    its own key, of the curve P-256, and ask for exactly one name."""
    asked = _loaded(x509.load_pem_x509_csr, request, "the request")
    if not asked.is_signature_valid:
        raise BadInput(
            "the request is not signed by its own key, so it was changed on its way; ask the site for it again"
        )
    key = asked.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BadInput("the request's key is not an elliptic key P-256; make it with `fairmesh mesh key`")
    try:
        names = _alternative_names(asked)
    except ValueError as error:
        raise BadInput(f"the request cannot be read: {error}") from error
    name = check_label(_common_name(asked.subject), "the request's site")
    if names != [name]:
        raise BadInput(
            f"the request of site {name!r} has the alternative names {names}, and must have its own name alone; make "
            "it with `fairmesh mesh key`"
        )
    return name


def sign(request: bytes, authority: Path, mesh: Mesh, days: float) -> bytes:
    """Returns a certificate for a site of the mesh, signed by the authority in a folder. It ends with the authority's
    own at the latest. Only the key and the name are taken from the request."""
    name = requested_name(request)
    if name not in (member.name for member in mesh.present):
        known = ", ".join(member.name for member in mesh.present)
        raise BadInput(f"the request is for site {name!r}, which is not in the mesh {mesh.name}: {known}")
    issuer, key = _authority_in(authority)
    if _organisation(issuer) != mesh.name:
        raise BadInput(f"the authority in {authority} is of mesh {_organisation(issuer)!r}, not of {mesh.name!r}")
    begun = _clock()
    if issuer.not_valid_after_utc <= begun:
        raise BadInput(
            f"the authority expired on {_date(issuer.not_valid_after_utc)}; renew it: fairmesh mesh authority"
        )
    ends = min(begun + timedelta(days=days), issuer.not_valid_after_utc)
    public = x509.load_pem_x509_csr(request).public_key()
    return _certificate(_subject(name, mesh.name), issuer.subject, public, key, ends, site=name)


def signed_by_founder(folder: Path, data: bytes) -> bytes:
    """Returns the ECDSA signature (SHA-256) of the data under the authority's key in the founder's folder."""
    return _authority_in(folder)[1].sign(data, ec.ECDSA(SHA256()))


def is_founders(authority: bytes, data: bytes, signature: bytes) -> bool:
    """Returns whether the data was signed with the key of this authority, given as its certificate."""
    what = f"the authority's certificate ({AUTHORITY}, which the mesh's founder hands out)"
    return _verifies(_read(authority, what).public_key(), data, signature)


def _verifies(public: Any, data: bytes, signature: bytes) -> bool:
    try:
        if isinstance(public, ec.EllipticCurvePublicKey):
            public.verify(signature, data, ec.ECDSA(SHA256()))
            return True
    except InvalidSignature:
        pass
    return False


def check_certificate(
    certificate: bytes, authority: bytes, name: str, now: datetime | None = None, key: Path | None = None
) -> list[str]:
    """Returns what is wrong with a certificate for site `name`, in words; with `key`, also with its private key file.
    The list is empty if nothing is wrong."""
    try:
        issuer, held = _read(authority, "the authority's certificate"), _read(certificate)
        return list(_wrong(issuer, held, name, now or _clock(), key))
    except BadInput as error:
        return [str(error)]


def _wrong(
    issuer: x509.Certificate, held: x509.Certificate, name: str, now: datetime, key: Path | None
) -> Iterator[str]:
    try:
        if not issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            yield "the file given as the authority's certificate is not an authority's certificate"
            return
        held.verify_directly_issued_by(issuer)
        if not set(_PURPOSES) <= set(held.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value):
            yield "the certificate is not valid for both ends of a connection"
    except x509.ExtensionNotFound:
        yield "the certificate, or the authority's, does not state its purpose; it was not made by `fairmesh mesh`"
    except (InvalidSignature, ValueError, TypeError):
        yield (
            "the certificate was signed by another authority than this mesh's; put the certificate and authority.pem "
            "of this mesh's founder here: send the founder the request NAME.csr again if you have none"
        )
    try:
        names = [_common_name(held.subject), *_alternative_names(held)]
    except ValueError as error:
        names = [f"unreadable names ({error})"]
    if names != [name, name]:
        yield (
            f"the certificate is for {', '.join(sorted(map(repr, set(names))))}, not for site {name!r}; put {name}.pem "
            f"here, which the founder made from {name}.csr, or correct name and certificate in site.toml"
        )
    for what, dated in (("the certificate", held), ("the authority's certificate", issuer)):
        begins, ends = dated.not_valid_before_utc, dated.not_valid_after_utc
        if now > ends:
            yield f"{what} expired on {_date(ends)}; look at this machine's clock first, then have a new one signed"
        if now < begins:
            yield f"{what} is not valid before {_date(begins)}; is this machine's clock right?"
    if key is None:
        return
    if _private_key(read_bytes(key), str(key)).public_key() != held.public_key():
        yield f"the key {key} does not belong to the certificate; have its own request signed"
    mode = stat.S_IMODE(key.stat().st_mode)
    if mode & 0o077:
        yield f"the key {key} can be read by others (mode {mode:04o}): chmod 600 {key}"


def fingerprint(pem: bytes) -> str:
    """Returns the first 96 bits of the SHA-256 of a request's or certificate's public key, for two people to compare. A
    request and its certificate have the same fingerprint."""
    digits = public_digest(pem)
    return " ".join(digits[i : i + 4] for i in range(0, 24, 4))


def public_digest(pem: bytes) -> str:
    """Returns the SHA-256 of a request's or certificate's public key, in hexadecimal."""
    load = x509.load_pem_x509_csr if b"CERTIFICATE REQUEST" in pem else x509.load_pem_x509_certificate
    public = _loaded(load, pem, "the file").public_key()
    content = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(content).hexdigest()


def valid_from(certificate: bytes) -> datetime:
    return _read(certificate).not_valid_before_utc


def valid_until(certificate: bytes) -> datetime:
    return _read(certificate).not_valid_after_utc


def serial_of(certificate: bytes) -> int:
    return _read(certificate).serial_number


def signature(key: bytes, data: bytes) -> bytes:
    """Returns the ECDSA signature (SHA-256) of the data under a site's private key, given as PEM."""
    return _private_key(key, "the key").sign(data, ec.ECDSA(SHA256()))


def verified(
    certificate: bytes, authority: bytes, name: str, data: bytes, signature: bytes, now: datetime | None = None
) -> bool:
    """Returns whether the site `name` signed the data, with a certificate of this authority that is valid at `now`."""
    if check_certificate(certificate, authority, name, now):
        return False
    return _verifies(_read(certificate).public_key(), data, signature)


def _certificate(
    subject: x509.Name, issuer: x509.Name, public: Any, key: ec.EllipticCurvePrivateKey, ends: datetime, site: str = ""
) -> bytes:
    """Returns a certificate that the issuer's key signed, of a site or else of an authority, as PEM. It begins a little
    in the past, since clocks differ."""
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    usage = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    usage |= {"digital_signature": True, "key_cert_sign": not site, "crl_sign": not site}
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(_clock(), ends) - _SKEW)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(ca=not site, path_length=None if site else 0), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
    )
    if site:
        made = made.add_extension(x509.ExtendedKeyUsage(_PURPOSES), critical=False)
        made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(site)]), critical=False)
    return made.sign(key, SHA256()).public_bytes(serialization.Encoding.PEM)


def _subject(name: str, mesh_name: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, mesh_name), x509.NameAttribute(NameOID.COMMON_NAME, name)]
    )


def _common_name(subject: x509.Name) -> str:
    names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1:
        raise BadInput(f"there are {len(names)} common names, not one")
    return str(names[0].value)


def _organisation(certificate: x509.Certificate) -> str:
    return " ".join(str(part.value) for part in certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME))


def _alternative_names(holder: x509.Certificate | x509.CertificateSigningRequest) -> list[str]:
    """Returns every alternative name, also addresses and anything else that could be mistaken for a name."""
    try:
        found = holder.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [name.value if isinstance(name, x509.DNSName) else str(name) for name in found]


def _private_key(pem: bytes, what: str) -> ec.EllipticCurvePrivateKey:
    key = _loaded(lambda data: serialization.load_pem_private_key(data, password=None), pem, what)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadInput(f"{what} is not an elliptic private key; make one with `fairmesh mesh key`")
    return key


def _read(certificate: bytes, what: str = "the certificate") -> x509.Certificate:

    def load(pem: bytes) -> x509.Certificate:
        found = x509.load_pem_x509_certificate(pem)
        found.public_key()  # raises if it is none
        return found

    return _loaded(load, certificate, what)


def _loaded(load: Callable[[bytes], T], pem: bytes, what: str) -> T:
    try:
        return load(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadInput(f"{what} is not a PEM file of the right kind, or is damaged") from error


def _write_secret(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read, from its first byte on."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise BadInput(f"{path} exists already, and a key is never overwritten; move it away first") from error
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error
    with os.fdopen(file, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _clock() -> datetime:
    return datetime.now(UTC)


def _date(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
