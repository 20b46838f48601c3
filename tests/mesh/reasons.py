"""Reasons in a node's log, found by the text of TLS or of the socket that they translate."""

from fairmesh.mesh.wire.tls_stream import in_words


def reason(sign: str) -> str:
    """Returns the words for a text of TLS or of a socket; fails if it has none."""
    words = in_words(sign)
    assert words != sign
    return words


NO_CERTIFICATE = reason("PEER_DID_NOT_RETURN_A_CERTIFICATE")
OTHER_AUTHORITY = reason("unable to get local issuer certificate")
OTHER_SITE = reason("Hostname mismatch")
EXPIRED = reason("certificate has expired")
OLD_TLS = reason("UNSUPPORTED_PROTOCOL")
NOT_TLS = reason("WRONG_VERSION_NUMBER")
PLAIN_HTTP = reason("HTTP_REQUEST")
AUTHORITY_UNKNOWN_THERE = reason("ALERT_UNKNOWN_CA")
NOT_ACCEPTED_THERE = reason("ALERT_BAD_CERTIFICATE")
NOBODY_LISTENS = reason("Connection refused")
NO_ANSWER = reason("timed out")
CLOSED = reason("Connection reset")
