"""A node refuses strangers and wrong messages and logs the reason. All tests disturb one running mesh, which must end
where an undisturbed one ends."""

import json
import os
import shutil
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

import fairmesh as fm
from fairmesh.cli.node import status as show_status
from fairmesh.experiment import load_experiment
from fairmesh.mesh.enrol.certificates import signature
from fairmesh.mesh.enrol.roster import host_and_port
from fairmesh.mesh.preflight import checks
from fairmesh.mesh.wire import frames
from fairmesh.mesh.wire.bulletin import Announcement
from fairmesh.mesh.wire.greeting import COMPATIBILITY, apart_in_words
from fairmesh.mesh.wire.journal import Journal
from tests.mesh import fleet
from tests.mesh.experiments import experiment
from tests.mesh.reasons import (
    EXPIRED,
    NO_CERTIFICATE,
    NOBODY_LISTENS,
    NOT_TLS,
    OLD_TLS,
    OTHER_AUTHORITY,
    OTHER_SITE,
    PLAIN_HTTP,
)
from tests.mesh.scenarios import Run
from tests.mesh.stranger import apart, certified, foreign, handshaken, hello_of, spoken
from tests.refusals import missing_from

pytestmark = pytest.mark.quick_cases(30)  # all: later tests count what earlier ones have sent

EXPERIMENT = experiment(20, 4)
NAMES = ["alpha", "beta", "gamma", "delta"]  # a ring; each dials the next, and alpha delta
STOP_AT = 12


def dies(point: str, step: int) -> None:
    """A node that dies once it has computed its message of a step."""
    if (point, step) == ("computed", STOP_AT):
        time.sleep(1)  # what it sent before arrives
        os._exit(9)


class Door(Run):
    """The node of gamma, in the middle of the run. It waits for beta, which dials it, and delta, which it dials. Alpha
    is not a neighbour of gamma."""

    silent: socket.socket  # a connection over which nothing is said

    @property
    def founder(self) -> Path:
        return self.folder / "mesh"

    @property
    def address(self) -> str:
        return self.mesh.member("gamma").address

    def log(self) -> list[dict]:
        return self.every_event("gamma")

    def status(self, name: str = "gamma") -> dict:
        return super().status(name)

    def says(self, reason: str, site: str | None = None, what: str = "refused") -> dict:
        """Waits for the entry of the log that holds a reason, and returns it."""

        def entries() -> list[dict]:
            of_it = [entry for entry in self.events("gamma", what) if entry.get("site") == site]
            return [entry for entry in of_it if reason in entry.get("reason", "")]

        self.until(entries, 30)  # a neighbour long gone is dialled every 15 s
        return entries()[0]

    def refuses_beta(self, end: dict, *names: object) -> None:
        """Passes if beta was told one reason, which holds the names, and the log of gamma has the same."""
        [told] = end["told"]
        assert missing_from(told, *names) == []
        self.says(told.removeprefix("beta: "), "beta")

    def as_beta(self, say) -> dict:
        home = self.folder / "beta"
        return apart(self.folder, lambda: spoken(home, "beta", self.address, "gamma", say))

    def after_greeting(self, *what: bytes) -> dict:
        """Sends frames as beta after a correct greeting."""
        return self.as_beta(lambda due: [frames.hello(hello_of(self.folder / "beta", due=due)), *what])

    def memory_kib(self) -> int:
        status = Path(f"/proc/{self.running['gamma']}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.running['gamma']}/fd"))


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    with Door(tmp_path_factory.mktemp("refusals"), NAMES, EXPERIMENT) as found:
        load_experiment(found.folder / "experiment.toml").problem()  # what this imports, forked processes need not
        found.start("alpha", "gamma")
        found.start("beta", "delta", observe=dies)
        assert [found._ended(name, 60) for name in ("beta", "delta")] == [9, 9], found.logs()
        found.until(lambda: set(found.status()["waiting_for"]) == {"beta", "delta"})
        with socket.create_connection(host_and_port(found.address, "it"), timeout=20) as found.silent:
            yield found


# Before a word is said


def _plainly(door: Door, said: bytes) -> bytes:
    with socket.create_connection(host_and_port(door.address, "it"), timeout=5) as plain:
        plain.sendall(said)
        return plain.recv(1)


HANDSHAKES = {
    NO_CERTIFICATE: lambda door: handshaken(door.address),
    PLAIN_HTTP: lambda door: _plainly(door, b"GET / HTTP/1.1\r\n\r\n"),
    NOT_TLS: lambda door: _plainly(door, bytes(100)),
    OLD_TLS: lambda door: handshaken(door.address, door.folder / "beta", "beta", tls_1_2=True),
    OTHER_AUTHORITY: lambda door: handshaken(
        door.address, foreign(door.folder / "foreign", "beta", door.founder), "beta"
    ),
    EXPIRED: lambda door: handshaken(
        door.address, certified(door.folder / "expired", "beta", door.founder, -1), "beta"
    ),
}


@pytest.mark.parametrize("reason", HANDSHAKES)
def test_stranger_without_this_authoritys_certificate_or_tls_1_3_is_refused_and_told_by_the_log_alone(door, reason):
    assert HANDSHAKES[reason](door) == b""
    said = door.says(reason)
    assert (said["level"], said["address"]) == ("warning", "127.0.0.1")
    lines = (door.folder / "gamma.log").read_text().splitlines()
    assert [line for line in lines if not line.startswith("{")] == []


def test_neighbours_certificate_is_accepted_with_tls_1_3(door):
    assert handshaken(door.address, door.folder / "beta", "beta") != b""


# With a certificate of the mesh's authority


@pytest.mark.parametrize(("name", "word"), [("omega", "neighbour"), ("alpha", "neighbour"), ("delta", "dials")])
def test_name_that_is_no_site_a_site_that_is_no_neighbour_and_one_that_shall_be_dialled_are_refused(door, name, word):
    home = door.folder / name
    if name not in NAMES:
        certified(home, name, door.founder)
    end = apart(door.folder, lambda: spoken(home, name, door.address, "gamma", lambda due: []))
    [told] = end["told"]
    assert (end["frames"], missing_from(told, name, word)) == (1, [])
    door.says(told.removeprefix(f"{name}: "), name)


def _hello(door: Door, due: int, **changes) -> bytes:
    return frames.hello(hello_of(door.folder / "beta", due=due, **changes))


GREETINGS = {
    "an old protocol": (
        lambda door, due: frames.hello(hello_of(door.folder / "beta", due=due), protocol=0),
        ["protocol", 0, frames.PROTOCOL],
    ),
    "another experiment": (
        lambda door, due: _hello(door, due, agreed={"rounds": 999}),
        ["rounds", "20 here", "999 there"],
    ),
    "another compatibility": (
        lambda door, due: _hello(door, due, agreed={"compatibility number of fairmesh": 99}, version="7.0"),
        [f"fairmesh 7.0 there and {fm.__version__} here", f"numbers are 99 and {COMPATIBILITY}", "install"],
    ),
    "other sites": (lambda door, due: _hello(door, due, members=["beta", "gamma"]), ["sites"]),
    "another site's name": (
        lambda door, due: _hello(door, due, site="alpha"),
        ["'alpha'", "beta"],
    ),
    "no experiment": (lambda door, due: frames.hello({"site": "beta"}), ["experiment"]),
    "no steps": (lambda door, due: _hello(door, due, holds="all"), ["steps"]),
    "more durable than due": (lambda door, due: _hello(door, due, holds=[5, 2]), ["step 5", 2]),
    "garbage": (lambda door, due: b"\xff" * 100, ["greeting", "first frame"]),
    "nothing": (lambda door, due: b"", ["first frame", "0 bytes"]),
    "half a greeting": (lambda door, due: _hello(door, due)[:-1], ["JSON"]),
    "no table": (lambda door, due: frames.hello([1]), ["table"]),  # type: ignore[arg-type]
    "a novel": (lambda door, due: _hello(door, due, more="x" * (1 << 18)), ["hello", "bytes"]),
}


@pytest.mark.parametrize("case", GREETINGS)
def test_greeting_of_something_else_is_refused_by_its_reason_on_both_sides(door, case):
    made, names = GREETINGS[case]
    door.refuses_beta(door.as_beta(lambda due: [made(door, due)]), *names)


@pytest.mark.parametrize("of", ["JSON", "news"])
def test_brackets_without_end_are_refused(door, of):
    bomb = b"[" * 200_000
    greeting = frames.hello({})[:-2] + bomb
    end = door.after_greeting(frames.news(bomb)) if of == "news" else door.as_beta(lambda due: [greeting])
    door.refuses_beta(end, of)


# After a good greeting, with beta's own key: beta's software is wrong, or was stolen


def _old(door: Door) -> bytes:
    """Returns what beta sent gamma in its last step."""
    copy = door.folder / "journal"
    shutil.copytree(door.folder / "beta" / "state" / "generation-1", copy, dirs_exist_ok=True)
    journal = Journal(copy)
    journal.close()
    return journal.sent(STOP_AT - 1)[door.mesh.position("gamma")]


def _news(door: Door, site: str, kind: str, body: dict, signed_by: str) -> bytes:
    one = Announcement(site, kind, int(1e15), body, b"")
    key = (door.folder / signed_by / f"{signed_by}.key").read_bytes()
    return frames.news(json.dumps([one._replace(signature=signature(key, one.text())).table()]).encode())


def _message(step: int, payload: bytes, durable: int = 0) -> bytes:
    return frames.message(step, durable, payload)


STREAMS = {
    "a replayed step": (lambda d: _message(STOP_AT - 1, _old(d)), ["replayed", "step 11", "step 12"]),
    "the first step again": (lambda d: _message(0, b""), ["replayed", "step 0", "step 12"]),
    "a future step": (lambda d: _message(STOP_AT + 1, _old(d)), ["future", "step 13"]),
    "a far future step": (lambda d: _message(2**63, b"?"), ["future", f"step {2**63}"]),
    "an old message as the step's": (lambda d: _message(STOP_AT, _old(d)), ["step 12"]),
    "a message cut short": (lambda d: _message(STOP_AT, _old(d)[:-1]), ["step 12"]),
    "a message that is none": (lambda d: _message(STOP_AT, b"\x80pickle"), ["step 12"]),
    "nothing as a message": (lambda d: _message(STOP_AT, b""), ["step 12"]),
    "too large a message": (lambda d: _message(STOP_AT, bytes(500_000)), ["500000 bytes"]),
    "what was never sent acknowledged": (lambda d: frames.ack(1 << 40), ["acknowledges", f"step {1 << 40}"]),
    "the same with a message": (lambda d: _message(STOP_AT, b"", 1 << 41), ["acknowledges", f"step {1 << 41}"]),
    "an acknowledgement that says nothing new": (lambda d: frames.ack(0), ["acknowledges", "step 0 again"]),
    "an acknowledgement with a body": (lambda d: frames.ack(3) + b"?", ["acknowledgement", 10, 9]),
    "half a head": (lambda d: _message(3, b"")[:4], ["message", "header"]),
    "another kind": (lambda d: bytes([99]) + b"?", ["kind 99"]),
    "a probe where nothing is checked": (lambda d: frames.probe(3), [f"kind {frames.Kind.PROBE:d}"]),
    "nothing": (lambda d: b"", ["kind 0"]),
    "another's news": (lambda d: _news(d, "alpha", "status", {}, "beta"), ["'status'", "alpha", "sign"]),
    "another's certificate": (
        lambda d: _news(d, "alpha", "certificate", {"pem": (d.folder / "beta/beta.pem").read_text()}, "beta"),
        ["'certificate'", "alpha", "sign"],
    ),
    "news of a stranger": (lambda d: _news(d, "omega", "status", {}, "beta"), ["'status'", "'omega'"]),
    "news of a new kind": (lambda d: _news(d, "beta", "gossip", {}, "beta"), ["'gossip'", "'beta'"]),
    "a vote that is none": (lambda d: _news(d, "beta", "vote", {"sites": 7}, "beta"), ["'vote'", "generation"]),
    "news without a form": (lambda d: frames.news(b'[{"site": []}]'), ["news"]),
    "news that are not packed": (lambda d: bytes([frames.Kind.NEWS]) + b"[]", ["news"]),
    "news that grow without end": (lambda d: frames.news(b"[" + b" " * (1 << 24) + b"]"), ["news", "524,288"]),
}  # fmt: skip


REPEATED = {  # how often, what, and words of the refusal
    "all news asked for again": (4, lambda d: frames.again(), ["announcements", "again"]),
    "the end said again": (2, lambda d: frames.finished(), ["finished"]),
}


@pytest.mark.parametrize("case", REPEATED)
def test_small_frames_have_a_price(door, case):
    times, made, names = REPEATED[case]
    door.refuses_beta(door.after_greeting(*[made(door)] * times), *names)


def test_neighbour_that_connects_again_may_not_ask_for_all_news_more_often(door):
    door.after_greeting(*[frames.again()] * 4)
    door.refuses_beta(door.after_greeting(frames.again()), "announcements", "again")


@pytest.mark.parametrize("case", STREAMS)
def test_frames_that_no_neighbour_sends_are_refused_with_the_reason_on_both_sides(door, case):
    made, names = STREAMS[case]
    door.refuses_beta(door.after_greeting(made(door)), *names)
    assert set(door.status()["waiting_for"]) == {"beta", "delta"}


def test_refused_sender_is_named_in_the_status(door, capsys):
    door.after_greeting(_message(STOP_AT, b"\x80pickle"))
    door.until(lambda: door.status()["refusing"])
    [mine] = door.status()["refusing"]
    assert (mine["by"], mine["site"]) == ("gamma", "beta")
    assert mine["reason"]
    assert mine["times"] >= 1
    assert 0 <= time.time() - mine["since"] < 600
    show_status(door.folder / "gamma" / fleet.SITE)
    assert missing_from(capsys.readouterr().out, "refuses messages of", "beta", mine["reason"]) == []
    door.says("", "beta", "refuses a site's messages; told to all sites")


def test_frame_that_is_too_long_is_refused_by_its_length_before_it_is_read(door):
    before = door.memory_kib()
    end = door.after_greeting(_message(STOP_AT, bytes(64 << 20)))
    door.refuses_beta(end, f"{(64 << 20) + 17:,} bytes")
    assert door.memory_kib() < before + (32 << 10)


def test_neighbour_cannot_take_more_than_its_streams(door):
    home = door.folder / "beta"
    end = apart(door.folder, lambda: spoken(home, "beta", door.address, "gamma", lambda due: [], streams=9))
    assert end["frames"] == 1
    door.refuses_beta(end, "8 streams")


# Many at once


@pytest.mark.slow
def test_thousand_connections_of_one_address_cost_little_and_keep_no_neighbour_of_that_address_out(door):
    def crowd() -> dict:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        opened: list[socket.socket] = []
        for i in range(1000):
            opened.append(socket.create_connection(host_and_port(door.address, "it"), timeout=5))
            if i % 2:
                opened[-1].sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a handshake
        for i in range(0, 1000, 4):
            with suppress(OSError):  # the oldest had to go
                opened[i] = context.wrap_socket(opened[i])
        peak = {"files": door.files(), "memory_kib": door.memory_kib()}
        met = spoken(door.folder / "beta", "beta", door.address, "gamma", lambda due: [b"\xff"])
        for one in opened:
            one.close()
        return peak | {"met": met["frames"]}

    files, memory = door.files(), door.memory_kib()
    peak = apart(door.folder, crowd, 60)
    assert peak["met"] > 0
    assert files + 100 < peak["files"] < files + 300  # of 2,048 connections at most an eighth are of one address
    assert peak["memory_kib"] < memory + (100 << 10)
    door.until(lambda: door.files() <= files + 5)
    for _ in range(2):
        apart(door.folder, crowd, 60)
    assert door.memory_kib() < memory + (100 << 10)  # no more for having happened before
    door.until(lambda: door.files() <= files + 5)


def test_crowd_is_a_line_in_the_log_and_a_count(door):
    said = [entry for entry in door.log() if entry["what"] == "refused" and entry.get("reason") == NO_CERTIFICATE]
    assert 1 <= len(said) <= 4  # a minute each


@pytest.mark.slow
def test_stranger_who_says_nothing_is_cut_off(door):
    assert door.silent.recv(1) == b""


# Who is dialled


@pytest.mark.parametrize(
    ("holder", "reason"),
    [("alpha", OTHER_SITE), pytest.param("foreign", OTHER_AUTHORITY, marks=pytest.mark.slow)],
)
def test_neighbour_that_answers_must_have_the_name_and_this_authority(door, holder, reason):
    home = foreign(door.folder / "false", "delta", door.founder) if holder == "foreign" else door.folder / holder
    name = "delta" if holder == "foreign" else holder
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(home / f"{name}.pem", home / f"{name}.key")
    over = threading.Event()
    with socket.create_server(host_and_port(door.mesh.member("delta").address or "", "it")) as server:
        server.settimeout(0.1)

        def answer() -> None:
            while not over.is_set():
                try:
                    with context.wrap_socket(server.accept()[0], server_side=True) as secured:
                        secured.recv(1)
                except OSError:
                    continue

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            found = checked(door, "gamma")["neighbour delta"]
            door.says(reason, "delta", "cannot connect")
        finally:
            over.set()
            answering.join()
    assert not found["ok"]
    assert missing_from(found["found"], *(["alpha", "delta"] if holder == "alpha" else [reason])) == []
    assert set(door.status()["waiting_for"]) == {"beta", "delta"}


# fairmesh mesh check


def checked(door: Door, site: str, clock_s: float = 0.0, home: Path | None = None) -> dict[str, dict]:
    """Returns every check of a site by its subject."""

    def work() -> list[dict]:
        now = time.time
        time.time = lambda: now() + clock_s
        return [asdict(one) for one in checks((home or door.folder / site) / fleet.SITE)]

    return {one["what"]: one for one in apart(door.folder, work)}


def test_check_meets_a_neighbour_and_compares_experiment_clocks_and_certificates(door):
    found = checked(door, "beta")
    assert {what for what, one in found.items() if not one["ok"]} == set()
    assert missing_from(found["neighbour gamma"]["found"], door.address, "gamma", "0.0 s", "29", "ms", "Mbit/s") == []
    assert missing_from(found["time of the run"]["found"], "gamma", "20 rounds", "rounds per second") == []
    assert "node" in found["neighbour alpha"]["found"]  # it does not run, so that alpha is not checked
    door.until(lambda: any(entry["what"] == "checked" and entry["site"] == "beta" for entry in door.log()))


def test_check_names_the_field_in_which_experiments_differ(door):
    home = door.folder / "beta-of-another-mind"
    shutil.copytree(door.folder / "beta", home)
    text = (home / "experiment.toml").read_text()
    fleet.amend(door.founder, home, {"experiment.toml": text.replace("rounds = 20", "rounds = 21")})
    found = checked(door, "beta", home=home)["neighbour gamma"]
    assert not found["ok"]
    assert missing_from(found["found"], "rounds", "21 here", "20 there") == []


@pytest.mark.parametrize(("ahead_s", "word"), [(1000.0, "behind"), (-1000.0, "ahead")])
def test_check_compares_clocks(door, ahead_s, word):
    found = checked(door, "beta", ahead_s)["neighbour gamma"]
    assert not found["ok"]
    assert missing_from(found["found"], "clock", apart_in_words(-ahead_s), word) == []


def test_check_says_that_a_node_does_not_run(door):
    found = checked(door, "gamma")
    assert NOBODY_LISTENS in found["neighbour delta"]["found"]
    assert found["listening"]["ok"]
    assert {what for what, one in found.items() if not one["ok"]} == {"neighbour beta", "neighbour delta"}


# And then


def test_check_beside_a_running_node_leaves_its_stream_alone(door):
    door.start("beta")
    door.until(lambda: door.status()["edges"]["beta"]["connected"])
    before = door.status()["edges"]["beta"]
    assert checked(door, "beta")["neighbour gamma"]["ok"]
    found = checked(door, "gamma")["neighbour beta"]
    assert found["ok"]
    assert "connected" in found["found"]
    time.sleep(1.1)  # a status later
    after = door.status()["edges"]["beta"]
    assert after["connected"]
    assert after["connections"] == before["connections"]


def test_run_ends_where_an_undisturbed_one_ends(door, tmp_path):
    door.start("delta")
    with Run(tmp_path, NAMES, EXPERIMENT) as calm:
        calm.start(*NAMES)
        assert calm.end(*NAMES) == door.end(*NAMES)
    assert door.status()["edges"]["beta"]["refused"] >= len(STREAMS)
