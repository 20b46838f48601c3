"""The server of the page, without a browser: who may see what, and what many or bad browsers do to it."""

import http.client
import json
import re
import socket
import threading
import time
from dataclasses import replace

import pytest

from fairmesh.errors import BadInput
from fairmesh.watch import server as module
from fairmesh.watch.server import Server, serving
from tests.watch.examples import NOW, node

PARTS = ("", "page.css", "page.js", "news")


class Changing:
    """A source that counts how often it is read, and whose node is one round further each time."""

    def __init__(self):
        self.readings = 0
        self.view_now = node()

    def view(self, wait=False):
        self.readings += 1
        return replace(self.view_now, round=1203 + self.readings, sentence=f"reading {self.readings}")


class Still:
    def view(self, wait=False):
        return node()


@pytest.fixture(scope="module")
def still():
    with serving(Still()) as server:
        yield server


def asked(server, path, method="GET", host=None, headers=None):
    """Returns the answer to a request: its status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    named = {"Host": host or f"127.0.0.1:{server.server_port}"} | (headers or {})
    connection.request(method, path, headers=named)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def raw(server, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture
def stream():
    """Opens a stream and returns a function that reads its next news."""
    opened = []

    def open_stream(server):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        connection.request("GET", f"/{server.token}/events")
        answer = connection.getresponse()
        opened.append(connection)

        def next_news():
            while True:
                line = answer.readline()
                assert line, "the stream has ended"
                if line.startswith(b"data: "):
                    return json.loads(line[6:])

        next_news.status = answer.status
        return next_news

    yield open_stream
    for connection in opened:
        connection.close()


def test_parts_of_the_page_come_with_strict_headers(still):
    for part in PARTS:
        status, headers, body = asked(still, f"/{still.token}/{part}")
        assert status == 200
        assert body
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "Server" not in headers


def test_without_the_token_nothing_is_there_and_nothing_helps(still):
    wrong = still.token[:-1] + ("a" if still.token[-1] != "a" else "b")
    paths = [
        "/",
        "/news",
        f"/{wrong}/",
        f"/{wrong}/news",
        f"/{still.token[:-3]}/",
        f"/{still.token}x/",
        "//",
        "/%00/",
    ]
    for path in paths:
        status, headers, body = asked(still, path)
        assert status == 404
        assert body == b""
        assert still.token not in str(headers)


def test_no_path_leads_to_a_file(still):
    for path in (
        "../../etc/passwd",
        "..%2f..%2fetc/passwd",
        "page.py",
        "/etc/passwd",
        "page.css/..",
        "./page.css",
        "\\",
    ):
        assert asked(still, f"/{still.token}/{path}")[0] == 404


def test_another_name_for_this_machine_is_refused(still):
    assert asked(still, f"/{still.token}/", host=f"localhost:{still.server_port}")[0] == 200
    for host in ("evil.example", f"evil.example:{still.server_port}", "127.0.0.1", "127.0.0.1:1", "[::1]"):
        status, _, body = asked(still, f"/{still.token}/", host=host)
        assert (status, body) == (404, b"")
    assert raw(still, f"GET /{still.token}/ HTTP/1.0\r\n\r\n".encode()).split()[1] == b"404"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "NONSENSE"])
@pytest.mark.quick_cases("all")
def test_only_get_and_head_are_answered(still, method):
    status, headers, body = asked(still, f"/{still.token}/", method)
    assert (status, body) == (405, b"")
    assert headers["Allow"] == "GET, HEAD"


def test_head_is_get_without_a_body(still):
    for part in PARTS:
        got, told = (asked(still, f"/{still.token}/{part}", method)[1] for method in ("GET", "HEAD"))
        assert asked(still, f"/{still.token}/{part}", "HEAD")[2] == b""
        if part != "news":  # whose age changes meanwhile
            assert got["Content-Length"] == told["Content-Length"]


def test_what_is_no_http_is_answered_without_a_word(still):
    for request in (
        b"GET /\xe9\xff/ HTTP/1.0\r\n\r\n",
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b"\r\n\r\n",
    ):
        answer = raw(still, request)
        assert still.token.encode() not in answer
        assert answer.partition(b"\r\n\r\n")[2] == b""
    assert asked(still, f"/{still.token}/")[0] == 200


def test_server_listens_on_this_machine_only(still):
    assert still.server_address[0] == "127.0.0.1"
    assert len(still.token) >= 20
    with serving(Still()) as other:
        assert other.token != still.token


def test_news_are_told_once(still):
    path = f"/{still.token}/news"
    status, headers, body = asked(still, path)
    assert status == 200
    assert "answers" in json.loads(body)["sections"]
    assert asked(still, path, headers={"If-None-Match": headers["ETag"]})[0] == 304
    assert asked(still, path, headers={"If-None-Match": '"other"'})[0] == 200


def test_news_tell_how_old_they_are_by_the_clock_of_the_server(still):
    told = json.loads(asked(still, f"/{still.token}/news")[2])
    assert abs(NOW - time.time()) > 1e6  # the examples are of another time
    assert 1 <= told["age"] < 60


def test_stream_begins_with_everything_and_goes_on_with_what_has_changed(stream, monkeypatch):
    monkeypatch.setattr(module, "_EVERY_S", 0.05)
    with serving(Changing()) as server:
        next_news = stream(server)
        first = next_news()["sections"]
        second = next_news()["sections"]
        assert {"now", "answers", "sites", "log"} <= set(first)
        assert {"now", "answers"} <= set(second)
        assert "sites" not in second
        assert int(re.findall(r"eading (\d+)", second["now"])[0]) > int(re.findall(r"eading (\d+)", first["now"])[0])


def test_nothing_is_read_while_nobody_looks(monkeypatch):
    monkeypatch.setattr(module, "_EVERY_S", 0.01)
    monkeypatch.setattr(module, "_WANTED_S", 0.1)
    source = Changing()
    with serving(source) as server:
        time.sleep(0.1)
        assert source.readings == 0
        page = asked(server, f"/{server.token}/")[2].decode()
        time.sleep(0.3)
        readings = source.readings
        time.sleep(0.2)
        assert source.readings == readings > 0
        after = asked(server, f"/{server.token}/")[2].decode()
        at = [int(re.findall(r"eading (\d+)", text)[0]) for text in (page, after)]
        assert at[1] > readings >= at[0]  # and whoever looks again sees what is new


def test_a_browser_that_never_reads_costs_no_memory_and_holds_up_nobody(stream, monkeypatch):
    monkeypatch.setattr(module, "_EVERY_S", 0.01)
    monkeypatch.setattr(module._Handler, "timeout", 0.5)
    source = Changing()
    source.view_now = replace(node(), says=("x" * 200_000,))
    with serving(source) as server:
        deaf = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(5)]
        for one in deaf:
            one.sendall(f"GET /{server.token}/events HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        next_news = stream(server)
        for _ in range(5):
            assert next_news()["sections"]
        source.view_now = replace(node(), says=("y" * 2_000_000,))  # more than the system keeps for them
        until = time.monotonic() + 10
        while server.streams._value < module.STREAMS - 1 and time.monotonic() < until:
            source.view_now = replace(node(), says=(str(time.monotonic()) * 100_000,))
            next_news()
        assert server.streams._value == module.STREAMS - 1  # theirs have ended
        for one in deaf:
            one.close()


def test_more_browsers_than_streams_are_told_to_ask_instead(still, stream, monkeypatch):
    opened = []
    while (one := stream(still)).status == 200:
        opened.append(one)
    assert 1 <= len(opened) <= module.STREAMS
    assert one.status == 503
    assert asked(still, f"/{still.token}/news")[0] == 200


def test_more_connections_than_a_browser_needs_are_closed_and_the_server_goes_on(still):
    open_connections = [
        socket.create_connection(("127.0.0.1", still.server_port)) for _ in range(module.CONNECTIONS + 20)
    ]
    assert threading.active_count() < module.CONNECTIONS + 20
    for connection in open_connections:
        connection.close()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            assert asked(still, f"/{still.token}/")[0] == 200
            break
        except (ConnectionError, http.client.HTTPException):
            time.sleep(0.05)
    else:
        raise AssertionError("the server does not answer any more")


def test_many_browsers_see_the_same_reading(monkeypatch):
    source = Changing()
    with serving(source) as server:
        bodies = []
        threads = [
            threading.Thread(target=lambda: bodies.append(asked(server, f"/{server.token}/news")[2])) for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(bodies) == 20
        assert source.readings <= 3


def test_a_reading_that_fails_leaves_the_last_page_which_says_so(capsys, monkeypatch):
    monkeypatch.setattr(module, "_EVERY_S", 0.01)
    source = Changing()
    with serving(source) as server:
        assert asked(server, f"/{server.token}/")[0] == 200
        source.view_now = None  # what no source should return
        time.sleep(0.1)
        status, _, page = asked(server, f"/{server.token}/")
        assert (status, b"Reading the files fails" in page, b"TypeError" in page) == (200, True, True)
        told = json.loads(asked(server, f"/{server.token}/news")[2])
        assert "TypeError" in told["trouble"]
        assert told["read"] > 0.05
        source.view_now = node()
        before = source.readings
        time.sleep(0.1)
        assert source.readings > before
        assert json.loads(asked(server, f"/{server.token}/news")[2])["trouble"] == ""
    assert capsys.readouterr().err.count("this reading failed") == 1


def test_first_reading_that_takes_long_does_not_put_off_the_next_one(stream, monkeypatch):
    monkeypatch.setattr(module, "_EVERY_S", 0.01)
    monkeypatch.setattr(module, "_SHARE", 1e-9)
    source = Changing()
    with serving(source) as server:
        next_news = stream(server)
        next_news(), next_news()
        assert source.readings == 2


def test_before_the_first_reading_a_browser_is_told_to_come_again(monkeypatch):
    class Slow:
        def view(self, wait=False):
            time.sleep(0.3)
            return node()

    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(module.Reader.newest, "__defaults__", (-1, 0.05))
    with serving(Slow()) as server:
        status, headers, body = asked(server, f"/{server.token}/")
        assert status == 503
        assert headers["Retry-After"]
        assert b'http-equiv="refresh"' in body


def test_port_that_is_taken_is_refused_with_a_way_out(still):
    with pytest.raises(BadInput, match=f"{still.server_port}.*leave out --port"):
        Server(Still(), still.server_port)
    with pytest.raises(BadInput, match="70000"):
        Server(Still(), 70_000)


def test_closing_ends_streams_and_threads(stream):
    before = threading.active_count()
    with serving(Changing()) as server:
        stream(server)()
        assert threading.active_count() > before
    until = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.02)
    assert threading.active_count() == before
