"""Translates errors of TLS and sockets into words that an operator understands."""

import os
import re

_WORDS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no certificate",
    "unable to get local issuer certificate": "a certificate of another authority",
    "self signed certificate": "a certificate of another authority",
    "self-signed certificate": "a certificate of another authority",
    "certificate signature failure": "a certificate of another authority",
    "certificate has expired": "an expired certificate",
    "certificate is not yet valid": "a certificate that is not valid yet; do the clocks agree?",
    "Hostname mismatch": "a certificate of another site",
    "Hostname Verification Check failed": "a certificate of another site",
    "CERTIFICATE_VERIFY_FAILED": "a certificate that cannot be verified",
    "UNSUPPORTED_PROTOCOL": "an old version of TLS; TLS 1.3 is needed",
    "TLSV1_ALERT_PROTOCOL_VERSION": "an old version of TLS; TLS 1.3 is needed",
    "HTTP_REQUEST": "not TLS: a request of plain HTTP",
    "HTTPS_PROXY_REQUEST": "not TLS: a request to a proxy",
    "WRONG_VERSION_NUMBER": "not TLS",
    "ALERT_UNKNOWN_CA": "it does not know the authority of this site's certificate",
    "ALERT_CERTIFICATE_EXPIRED": "it says that this site's certificate has expired",
    "ALERT_BAD_CERTIFICATE": "it does not accept this site's certificate",
    "ALERT_CERTIFICATE_UNKNOWN": "it does not accept this site's certificate",
    "CERTIFICATE_REQUIRED": "it requires a certificate",
    "Connection refused": "connection refused: nobody listens there",
    "No route to host": "no route to it",
    "Network is unreachable": "no route to it",
    "Connection reset": "it closed the connection",
    "Connection lost": "it closed the connection",  # by asyncio
    "Broken pipe": "it closed the connection",
    "EOF occurred in violation of protocol": "it closed the connection",
    "timed out": "no answer in time",
    "Name or service not known": "its name cannot be resolved",
    "Temporary failure in name resolution": "its name cannot be resolved",
    "No address associated with hostname": "its name cannot be resolved",
}


def in_words(said: str) -> str:
    """Returns the words for an error text, or the text itself where there are none."""
    return next((words for sign, words in _WORDS.items() if sign in said), said)


def reason_of(error: Exception) -> str:
    """Returns the words for an error of a socket or of TLS."""
    if isinstance(error, TimeoutError):
        return _WORDS["timed out"]
    # asyncio gives only the error number of a failed connect.
    said = re.sub(r"\[Errno (\d+)\] Connect call failed", lambda found: os.strerror(int(found[1])), str(error))
    return in_words(said or type(error).__name__)
