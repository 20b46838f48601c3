"""What gRPC prints becomes entries of a log, counted; what others print stays where it was, and nothing is lost."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairmesh.mesh.node.handshakes import told
from fairmesh.mesh.wire.log_limiter import Sparing
from fairmesh.mesh.wire.tls_errors import in_words

HEAD = "I1115 12:33:56.583701   31284 ssl_transport_security.cc:2563] "
FAILED = HEAD + "Handshake failed with error SSL_ERROR_SSL: error:100000c0:SSL routines:OPENSSL_internal:"
NODE = """
import os, sys
sys.path[:0] = {path!r}
from fairmesh.node.handshakes import sifted
with sifted() as handshakes:
    os.write(2, b"before the log\\n{failed}PEER_DID_NOT_RETURN_A_CERTIFICATE: x\\n")
    handshakes.listen(lambda level, what, **fields: print(level, what, fields, flush=True))
    print("python", file=sys.stderr)
    os.write(2, b"native\\n{failed}HTTP_REQUEST: x\\n{failed}HTTP_REQUEST: x\\n")
    os.write(2, b"F1115 12:33:56.5 1 a.cc:1] Check failed\\nlast")
    {end}
"""
HEARD = [
    "warning refused {'reason': 'no certificate'}",
    "warning refused {'reason': 'not TLS: a request of plain HTTP'}",
]
AGAIN = "warning refused {'reason': 'not TLS: a request of plain HTTP', 'more_times': 1}"


def run(end: str, **options) -> subprocess.CompletedProcess:
    text = NODE.format(path=sys.path, failed=FAILED, end=end)
    return subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, timeout=60, **options)


def test_lines_of_grpc_go_to_the_log_and_all_others_where_they_went():
    done = run("pass", stderr=subprocess.PIPE)
    assert done.stdout.splitlines() == [*HEARD, AGAIN]
    assert sorted(done.stderr.splitlines()) == sorted(
        ["before the log", "python", "native", "F1115 12:33:56.5 1 a.cc:1] Check failed", "last"]
    )
    assert done.returncode == 0


@pytest.mark.parametrize("end", ["os.abort()", "os.kill(os.getpid(), 9)", "os._exit(3)"])
def test_the_last_words_of_a_node_that_crashes_are_not_lost(end, tmp_path):
    with open(tmp_path / "errors", "w") as errors:
        done = run(end, stderr=errors)
    assert done.returncode != 0
    until = time.monotonic() + 10
    while not (said := (tmp_path / "errors").read_text()).endswith("last") and time.monotonic() < until:
        time.sleep(0.02)  # the sieve outlives the node by moments
    for line in ("before the log", "python", "native", "Check failed", "last"):
        assert line in said


def test_a_closed_standard_error_is_none():
    done = run("os.write(2, b'more\\n')", preexec_fn=lambda: os.close(2))
    assert done.returncode == 0
    assert done.stdout.splitlines() == [*HEARD, AGAIN]


def test_standard_error_is_as_it_was_afterwards():
    text = "\nprint('after', file=sys.stderr)\nos.write(2, b'and native\\n')\n"
    text = NODE.format(path=sys.path, failed=FAILED, end="pass") + text
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith("lastafter\nand native\n")


class Clock:
    def __init__(self):
        self.now, self.said = 0.0, []
        self.sparing = Sparing(self._report, lambda: self.now)

    def _report(self, level: str, what: str, **fields) -> None:
        self.said.append((what, fields))


def test_the_same_is_told_once_a_minute_with_a_count():
    clock = Clock()
    for _ in range(5000):
        clock.sparing("warning", "refused", reason="no certificate")
        clock.now += 0.05
    assert clock.said[0] == ("refused", {"reason": "no certificate"})
    assert [fields["more_times"] for _, fields in clock.said[1:]] == pytest.approx([1199, 1200, 1200, 1200], abs=20)
    clock.sparing.close()
    assert 1 + sum(fields["more_times"] for _, fields in clock.said[1:]) == 5000


def test_what_was_kept_back_is_told_though_nothing_follows():
    clock = Clock()
    for _ in range(3):
        clock.sparing("warning", "refused", "beta", "a reason")
    clock.now = 59.0
    clock.sparing.flush()
    assert len(clock.said) == 1
    clock.now = 60.0
    clock.sparing.flush()
    assert clock.said[1:] == [("refused", {"site": "beta", "reason": "a reason", "more_times": 2})]


def test_reasons_that_are_made_up_fill_neither_log_nor_memory():
    clock = Clock()
    for i in range(50_000):
        clock.sparing("warning", "refused", f"site-{i % 7}", f"reason {i} " + "x" * 10_000)
    assert len(clock.said) <= 7 * 51
    assert max(len(fields["reason"]) for _, fields in clock.said) <= 500
    assert len(clock.sparing._counts) <= 7 * 51


def test_another_site_with_the_same_reason_is_told_too():
    clock = Clock()
    for site in ("alpha", "beta"):
        clock.sparing("warning", "refused", site, "a reason")
    assert [fields["site"] for _, fields in clock.said] == ["alpha", "beta"]


def test_a_failed_handshake_without_words_is_told_as_it_is_and_idle_talk_is_not():
    clock = Clock()
    told(HEAD + "Handshake failed with error SOMETHING_NEW: x", clock.sparing)
    told(HEAD + "subchannel 1 is happy", clock.sparing)
    told("E" + HEAD[1:] + "No match found for server name: gamma", clock.sparing)
    assert clock.said == [
        ("refused", {"reason": "SOMETHING_NEW: x"}),
        ("gRPC says", {"reason": "No match found for server name: gamma"}),
    ]


def test_operators_read_words():
    said = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:1: connect: Connection refused (111)"
    assert in_words(said) == "connection refused: nobody listens there"
    assert in_words("something else") == "something else"


def test_the_sieve_needs_nothing_but_pythons_own_library():
    text = (Path(__file__).parents[2] / "src" / "fairmesh" / "mesh" / "node" / "stderr_filter.py").read_text()
    assert "fairmesh" not in text


def test_grpc_imported_before_tls_1_2_was_forbidden_is_refused():
    text = f"import sys; sys.path[:0] = {sys.path!r}\nimport grpc\nimport fairmesh.mesh.wire.links"
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_SSL_CIPHER_SUITES"}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, env=environment)
    assert "before fairmesh could forbid TLS 1.2" in done.stderr
    assert done.returncode != 0
