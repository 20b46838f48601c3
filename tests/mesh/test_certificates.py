"""Keys, certificates and signatures: what the authority signs, what it refuses, and which faults are reported."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from fairmesh.mesh.enrol import certificates
from fairmesh.mesh.enrol.certificates import (
    check_certificate,
    fingerprint,
    make_authority,
    make_key,
    renew_authority,
    sign,
    signature,
    valid_until,
    verified,
)
from tests.refusals import missing_from, refused


@pytest.fixture
def home(tmp_path) -> Path:
    make_authority(tmp_path, "trial", days=30)
    return tmp_path


def made(home: Path, mesh, name: str = "alpha", days: float = 20) -> tuple[Path, bytes]:
    """Makes a site's key and returns it with its certificate."""
    key, request = make_key(home, name)
    return key, sign(request.read_bytes(), home, mesh, days)


def authority(home: Path) -> bytes:
    return (home / "authority.pem").read_bytes()


def request_for(name: str, alternatives: list[x509.GeneralName], key=None) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else [])
    asked = x509.CertificateSigningRequestBuilder().subject_name(subject)
    if alternatives:
        asked = asked.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return asked.sign(key or ec.generate_private_key(ec.SECP256R1()), SHA256()).public_bytes(Encoding.PEM)


def test_signed_certificate_has_nothing_wrong_and_private_keys_can_be_read_by_their_owner_alone(home, mesh):
    key, certificate = made(home, mesh)
    assert check_certificate(certificate, authority(home), "alpha", datetime.now(UTC), key) == []
    assert [stat.S_IMODE(path.stat().st_mode) for path in (key, home / "authority.key")] == [0o600] * 2


def test_key_is_never_written_over(home):
    make_key(home, "alpha")
    before = {path: path.read_bytes() for path in home.iterdir()}
    with refused(home / "alpha.key", "exists"):
        make_key(home, "alpha")
    with refused(home / "authority.key", "exists"):
        make_authority(home, "trial", days=30)
    assert {path: path.read_bytes() for path in home.iterdir()} == before


def test_certificate_can_serve_both_ends_of_a_connection_and_sign_no_other(home, mesh):
    _, pem = made(home, mesh)
    certificate = x509.load_pem_x509_certificate(pem)
    extensions = certificate.extensions
    constraints = extensions.get_extension_for_class(x509.BasicConstraints)
    usage = extensions.get_extension_for_class(x509.KeyUsage)
    assert (constraints.critical, constraints.value.ca) == (True, False)
    assert (usage.critical, usage.value.digital_signature, usage.value.key_cert_sign) == (True, True, False)
    purposes = {purpose.dotted_string for purpose in extensions.get_extension_for_class(x509.ExtendedKeyUsage).value}
    assert purposes == {"1.3.6.1.5.5.7.3.1", "1.3.6.1.5.5.7.3.2"}
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName("alpha")]
    issuer = x509.load_pem_x509_certificate(authority(home))
    own = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (own.ca, own.path_length) == (True, 0)


def test_certificate_begins_a_little_in_the_past_and_ends_with_the_authority_at_the_latest(home, mesh):
    _, short = made(home, mesh, "alpha", days=20)
    _, long = made(home, mesh, "beta", days=1000)
    now = datetime.now(UTC)
    begun = x509.load_pem_x509_certificate(short).not_valid_before_utc
    assert timedelta(minutes=4) < now - begun < timedelta(minutes=7)
    assert abs(valid_until(short) - now - timedelta(days=20)) < timedelta(minutes=1)
    assert valid_until(long) == valid_until(authority(home))


def test_serial_numbers_differ(home, mesh):
    _, one = made(home, mesh, "alpha")
    again = sign((home / "alpha.csr").read_bytes(), home, mesh, 20)
    assert len({x509.load_pem_x509_certificate(pem).serial_number for pem in (one, again)}) == 2


ALPHA = x509.DNSName("alpha")
REQUESTS = {
    "no site of the mesh": (lambda: request_for("delta", [x509.DNSName("delta")]), ["'delta'", "mesh trial"]),
    "another site": (lambda: request_for("alpha", [x509.DNSName("beta")]), ["'alpha'", "'beta'"]),
    "another site too": (lambda: request_for("alpha", [ALPHA, x509.DNSName("beta")]), ["'alpha'", "'beta'"]),
    "an address too": (lambda: request_for("alpha", [ALPHA, x509.RFC822Name("a@b")]), ["'alpha'", "a@b"]),
    "its name twice": (lambda: request_for("alpha", [ALPHA] * 2), ["site 'alpha'", "['alpha', 'alpha']"]),
    "no alternative name": (lambda: request_for("alpha", []), ["'alpha'", "alternative name"]),
    "no common name": (lambda: request_for("", [ALPHA]), [0, "common name"]),
    "no name of a site": (lambda: request_for("Alpha", [x509.DNSName("Alpha")]), ["'Alpha'", 63]),
    "RSA": (lambda: request_for("alpha", [ALPHA], rsa.generate_private_key(65537, 2048)), ["P-256"]),
    "another curve": (lambda: request_for("alpha", [ALPHA], ec.generate_private_key(ec.SECP384R1())), ["P-256"]),
    "nonsense": (lambda: b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n", ["PEM"]),
    "nothing": (lambda: b"", ["PEM"]),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_authority_refuses_a_request_that_is_not_one_sites_own(home, mesh, case):
    make, names = REQUESTS[case]
    with refused(*names):
        sign(make(), home, mesh, 20)


def test_request_changed_on_its_way_is_refused(home, mesh):
    asked = x509.load_pem_x509_csr(request_for("alpha", [x509.DNSName("alpha")]))
    content = asked.public_bytes(Encoding.DER)
    assert content.count(b"alpha") == 2
    changed = x509.load_der_x509_csr(content.replace(b"alpha", b"gamma")).public_bytes(Encoding.PEM)
    with refused("signed"):
        sign(changed, home, mesh, 20)


def test_site_that_has_left_gets_no_certificate(home, mesh):
    with refused("'gamma'", "mesh trial", "alpha, beta"):
        made(home, mesh.without("gamma"), "gamma")


@pytest.mark.parametrize(("name", "days", "words"), [("other", 30, ["'other'", "'trial'"]), ("trial", -1, ["expired"])])
def test_authority_of_another_mesh_and_one_that_has_expired_do_not_sign(tmp_path, mesh, name, days, words):
    make_authority(tmp_path, name, days)
    with refused(tmp_path if days > 0 else f"{datetime.now(UTC) - timedelta(days=1):%Y-%m-%d}", "authority", *words):
        made(tmp_path, mesh)


def test_certificate_of_another_authority_of_a_site_and_with_another_name_are_reported(home, mesh, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    make_authority(other, "trial", days=30)  # the same name, another key
    (_, own), (_, theirs) = made(home, mesh), made(other, mesh)
    for certificate, issuer, name, words in (
        (theirs, authority(home), "alpha", ["signed", "another authority"]),
        (own, own, "alpha", ["authority's certificate"]),
        (own, authority(home), "beta", ["'alpha'", "'beta'"]),
    ):
        [said] = check_certificate(certificate, issuer, name)
        assert missing_from(said, *words) == []


def test_expired_certificate_and_one_not_yet_valid_are_reported(home, mesh):
    _, expired = made(home, mesh, days=-2)
    [said] = check_certificate(expired, authority(home), "alpha")
    assert missing_from(said, "expired", f"{valid_until(expired):%Y-%m-%d %H:%M}") == []
    _, early = made(home, mesh, "beta")
    said = check_certificate(early, authority(home), "beta", datetime.now(UTC) - timedelta(days=1))
    begins = x509.load_pem_x509_certificate(early).not_valid_before_utc
    assert missing_from(said[0], f"{begins:%Y-%m-%d %H:%M}", "clock") == []
    said = check_certificate(early, authority(home), "beta", datetime.now(UTC) + timedelta(days=40))
    assert [("expired" in line, "authority" in line) for line in said] == [(True, False), (True, True)]


def test_key_of_another_certificate_and_one_that_others_can_read_are_reported(home, mesh):
    key, _ = made(home, mesh)
    _, certificate = made(home, mesh, "beta")
    key.chmod(0o640)
    another, readable = check_certificate(certificate, authority(home), "beta", key=key)
    assert missing_from(another, key, "certificate") == []
    assert missing_from(readable, "0640", f"chmod 600 {key}") == []
    [absent] = check_certificate(certificate, authority(home), "beta", key=home / "none.key")
    assert missing_from(absent, home / "none.key") == []


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"])
def test_damaged_certificate_is_reported_not_raised(home, damage):
    assert len(check_certificate(damage, authority(home), "alpha")) == 1
    assert len(check_certificate(authority(home), damage, "alpha")) == 1


def test_request_and_its_certificate_have_one_fingerprint_and_others_another(home, mesh):
    _, certificate = made(home, mesh)
    _, other = made(home, mesh, "beta")
    assert fingerprint((home / "alpha.csr").read_bytes()) == fingerprint(certificate)
    assert len({fingerprint(pem) for pem in (certificate, other, authority(home))}) == 3
    assert len(fingerprint(certificate).split()) == 6


def test_signature_holds_for_its_data_its_name_and_its_authority_only(home, mesh, tmp_path_factory):
    key, certificate = made(home, mesh)
    stranger, _ = made(home, mesh, "beta")
    other = tmp_path_factory.mktemp("other")
    make_authority(other, "trial", days=30)
    signed = signature(key.read_bytes(), b"round 7")
    assert verified(certificate, authority(home), "alpha", b"round 7", signed)
    assert not verified(certificate, authority(home), "alpha", b"round 8", signed)
    assert not verified(certificate, authority(home), "beta", b"round 7", signed)
    assert not verified(certificate, authority(other), "alpha", b"round 7", signed)
    assert not verified(certificate, authority(home), "alpha", b"round 7", signature(stranger.read_bytes(), b"round 7"))
    assert not verified(certificate, authority(home), "alpha", b"round 7", b"")
    later = datetime.now(UTC) + timedelta(days=25)
    assert not verified(certificate, authority(home), "alpha", b"round 7", signed, later)


def test_renewed_authority_has_new_dates_and_what_it_signed_stays_valid(home, mesh, monkeypatch):
    key, certificate = made(home, mesh)
    before = authority(home)
    renew_authority(home, 3000)
    assert fingerprint(authority(home)) == fingerprint(before)
    assert valid_until(authority(home)) - valid_until(before) > timedelta(days=2900)
    again = sign((home / "alpha.csr").read_bytes(), home, mesh, 20)
    for issuer in (before, authority(home)):  # sites get the new one at different times
        for one in (certificate, again):
            assert check_certificate(one, issuer, "alpha", datetime.now(UTC), key) == []


def test_authority_that_a_clock_ahead_has_dated_is_mended(tmp_path, mesh, monkeypatch):
    with monkeypatch.context() as ahead:
        ahead.setattr(certificates, "_clock", lambda: datetime.now(UTC) + timedelta(days=400))
        make_authority(tmp_path, "trial", 30)
        key, certificate = made(tmp_path, mesh)
    assert "clock" in " ".join(check_certificate(certificate, authority(tmp_path), "alpha", key=key))
    renew_authority(tmp_path, 3000)
    mended = sign((tmp_path / "alpha.csr").read_bytes(), tmp_path, mesh, 20)
    assert check_certificate(mended, authority(tmp_path), "alpha", key=key) == []
