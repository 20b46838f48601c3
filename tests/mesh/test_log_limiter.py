"""The log limiter counts repeated reports; reasons are words that an operator understands."""

import socket
import ssl

import pytest

from fairmesh.mesh.wire.limits import LogLimiter
from fairmesh.mesh.wire.tls_stream import reason_of
from tests.mesh.reasons import reason


class Clock:
    def __init__(self):
        self.now, self.said = 0.0, []
        self.limiter = LogLimiter(self._report, lambda: self.now)

    def _report(self, level: str, what: str, **fields) -> None:
        self.said.append((what, fields))


def test_same_is_told_once_a_minute_with_a_count():
    clock = Clock()
    for _ in range(5000):
        clock.limiter("warning", "refused", reason="no certificate")
        clock.now += 0.05
    assert clock.said[0] == ("refused", {"reason": "no certificate"})
    assert [fields["more_times"] for _, fields in clock.said[1:]] == pytest.approx([1199, 1200, 1200, 1200], abs=20)
    clock.limiter.close()
    assert 1 + sum(fields["more_times"] for _, fields in clock.said[1:]) == 5000


def test_log_tells_held_back_repeats_though_nothing_follows():
    clock = Clock()
    for _ in range(3):
        clock.limiter("warning", "refused", "beta", "a reason")
    clock.now = 59.0
    clock.limiter.flush()
    assert len(clock.said) == 1
    clock.now = 60.0
    clock.limiter.flush()
    assert clock.said[1:] == [("refused", {"site": "beta", "reason": "a reason", "more_times": 2})]


def test_reasons_that_are_made_up_fill_neither_log_nor_memory():
    clock = Clock()
    for i in range(50_000):
        clock.limiter("warning", "refused", f"site-{i % 7}", f"reason {i} " + "x" * 10_000)
    assert len(clock.said) <= 7 * 51
    assert max(len(fields["reason"]) for _, fields in clock.said) <= 500
    assert len(clock.limiter._counts) <= 7 * 51


def test_same_reason_for_another_site_or_from_another_address_is_told_too():
    clock = Clock()
    for site in ("alpha", "beta"):
        clock.limiter("warning", "refused", site, "a reason")
    assert [fields["site"] for _, fields in clock.said] == ["alpha", "beta"]
    clock = Clock()
    for address in ("10.0.0.1", "10.0.0.2", "10.0.0.1"):
        clock.limiter("warning", "refused", address=address, reason="no certificate")
    clock.limiter.close()
    assert clock.said == [
        ("refused", {"address": "10.0.0.1", "reason": "no certificate"}),
        ("refused", {"address": "10.0.0.2", "reason": "no certificate"}),
        ("refused", {"address": "10.0.0.1", "reason": "no certificate", "more_times": 1}),
    ]


def test_refusals_from_many_addresses_fill_neither_log_nor_memory():
    clock = Clock()
    for i in range(50_000):
        clock.limiter("warning", "refused", address=f"2001:db8::{i:x}", reason="no certificate")
    clock.limiter.close()
    assert len(clock.said) <= 52
    what, fields = clock.said[-1]
    assert (what, fields["more_times"], "address" in fields) == ("refused", 49_949, False)


@pytest.mark.parametrize(
    ("error", "sign"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('10.0.0.1', 1)"), "Connection refused"),
        (
            OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 1, 0, 0), [Errno"),
            "Connection refused",
        ),
        (OSError(113, "Connect call failed ('10.0.0.1', 1)"), "No route to host"),
        (TimeoutError(), "timed out"),
        (ConnectionResetError("Connection lost"), "Connection reset"),
        (ssl.SSLEOFError(8, "EOF occurred in violation of protocol (_ssl.c:1006)"), "Connection reset"),
        (ssl.SSLError(1, "[SSL: HTTP_REQUEST] http request (_ssl.c:1006)"), "HTTP_REQUEST"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
    ],
)
def test_operators_read_words(error, sign):
    assert reason_of(error) == reason(sign)


def test_operators_read_the_text_of_an_error_without_words():
    assert reason_of(OSError("something else")) == "something else"
