"""The server of the page: read-only, on this machine's loopback, behind a random token.

One thread reads and renders, for all browsers and only while there is one. A stream has no queue: it gets what is
newest when it can take it, so a slow or sleeping browser costs no memory."""

import hmac
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from fairmesh.errors import BadInput, in_a_line
from fairmesh.report.charts import escaped
from fairmesh.watch.page import SCRIPT, STYLE, failed_reading, live_page, rendered
from fairmesh.watch.view import View

if TYPE_CHECKING:
    from fairmesh.watch.sources import Source

STREAMS, CONNECTIONS = 24, 64  # open at once; a browser that gets no stream asks every two seconds instead
_EVERY_S, _SHARE = 1.0, 0.05  # between two readings; and the most of a processor's time that they take
_BEAT_S = 5.0  # after which a stream says something, so that a browser knows that it is there
_WANTED_S = 3 * _BEAT_S  # after the last request, nobody looks
_PATIENCE_S = 10.0  # with a browser that does not read, and for the first reading
_SOON = '<!doctype html><meta http-equiv="refresh" content="2"><title>fairmesh</title><p>The files are being read ...'
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class Edition:
    """What the page says at one moment.

    Args:
        number: How many editions there were before.
        view: What was seen.
        sections: The page's sections.
        since: The number of the edition in which each section was last changed.
        at: When its view was read, on the clock of `time.monotonic`.
        trouble: Why the reading after it has failed; "" if it has not. Default: "".
    """

    number: int
    view: View
    sections: dict[str, str]
    since: dict[str, int] = field(default_factory=dict)
    at: float = 0.0
    trouble: str = ""

    @property
    def read_s_ago(self) -> float:
        """How many seconds ago its view was read."""
        return time.monotonic() - self.at

    def news(self, after: int = -1) -> dict[str, Any]:
        """Returns what has changed after an edition, for the browser."""
        age = self.view.age_s
        return {
            "age": None if age is None else age + self.read_s_ago,
            "live": self.view.live,
            "trouble": self.trouble and failed_reading(self.trouble),
            "read": self.read_s_ago,
            "title": f"{self.view.title}: {self.view.state}",
            "sections": {name: html for name, html in self.sections.items() if self.since[name] > after},
        }


class Reader:
    """The thread that reads a source and renders it while somebody looks."""

    def __init__(self, source: "Source"):
        self._source = source
        self._changed = threading.Condition()
        self._edition: Edition | None = None
        self._read_at = self._wanted_until = -1.0
        self._closed = threading.Event()
        self.trouble = ""  # why the last reading has failed
        self._thread = threading.Thread(target=self._read, name="reader", daemon=True)
        self._thread.start()

    def newest(self, after: int = -1, patience_s: float = _PATIENCE_S) -> Edition | None:
        """Returns the newest edition as soon as there is one after the edition `after`. After so many seconds, or where
        the reader is closed, the last one; None if there is none yet."""
        asked = time.monotonic()
        with self._changed:
            idle = asked >= self._wanted_until  # nobody has looked, so the last edition may be old
            self._wanted_until = asked + _WANTED_S
            self._changed.notify_all()

            def is_there() -> bool:
                edition = self._edition
                return edition is not None and edition.number > after and (not idle or self._read_at >= asked)

            self._changed.wait_for(lambda: self._closed.is_set() or is_there(), patience_s)
            return self._edition

    def close(self) -> None:
        """Ends the thread and all streams."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        self._thread.join()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def _read(self) -> None:
        while not self._closed.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._closed.is_set() or time.monotonic() < self._wanted_until)
            began, is_first = time.thread_time(), self._edition is None
            try:
                view = self._source.view()
                self._publish(view, rendered(view))
                self.trouble = ""
            except Exception as error:  # whatever it is, the next reading may be fine, and the page must not end
                self._failed(in_a_line(error))
            took_s = 0.0 if is_first else time.thread_time() - began  # the first one reads all, the next what is new
            self._closed.wait(max(_EVERY_S, took_s / _SHARE))

    def _failed(self, trouble: str) -> None:
        """Says, here and on the page, that a reading has failed."""
        self._read_at = time.monotonic()
        if trouble == self.trouble:
            return
        print(f"this reading failed, and the page shows the last one: {trouble}", file=sys.stderr)
        with self._changed:
            self.trouble = trouble
            if self._edition is not None:
                self._edition = replace(self._edition, number=self._edition.number + 1, trouble=trouble)
            self._changed.notify_all()

    def _publish(self, view: View, sections: dict[str, str]) -> None:
        before, number = self._edition, 0
        if before is not None:
            changed = sections != before.sections or view.news_at != before.view.news_at or bool(before.trouble)
            number = before.number + changed
        since = {
            name: before.since[name] if before and before.sections.get(name) == html else number
            for name, html in sections.items()
        }
        with self._changed:
            self._read_at = time.monotonic()
            self._edition = Edition(number, view, sections, since, self._read_at)
            self._changed.notify_all()


class Server(ThreadingHTTPServer):
    """Serves one source to browsers of this machine.

    Args:
        source: Where views come from.
        port: A port of 127.0.0.1; 0 for any that is free. Default: 0.
        token: The secret part of the address. Default: a random one.

    Raises:
        BadInput: The port is taken.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, source: "Source", port: int = 0, token: str = ""):
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadInput(
                f"cannot listen on port {port} of 127.0.0.1: {reason}; choose another, or leave out --port for any that"
                " is free"
            ) from error
        self.token = token or secrets.token_urlsafe(18)
        self.reader = Reader(source)
        self.streams = threading.BoundedSemaphore(STREAMS)
        self._connections = threading.BoundedSemaphore(CONNECTIONS)
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    @property
    def address(self) -> str:
        """The address of the page, with its token."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if error and not isinstance(error, OSError):  # a browser that has gone, or does not read, is no news
            print(f"a request failed: {in_a_line(error)}", file=sys.stderr)


@contextmanager
def serving(source: "Source", port: int = 0, token: str = "") -> Iterator[Server]:
    """Serves a source meanwhile."""
    server = Server(source, port, token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="server", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.reader.close()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = _PATIENCE_S  # for a request to come, and for each write

    def do_GET(self) -> None:
        name = self._asked()
        if name is None:
            self._answer(HTTPStatus.NOT_FOUND)
        elif name == "page.css":
            self._answer(HTTPStatus.OK, STYLE, "text/css")
        elif name == "page.js":
            self._answer(HTTPStatus.OK, SCRIPT, "text/javascript")
        elif name == "events":
            self._stream()
        elif (edition := self.server.reader.newest()) is None:
            said = _SOON + escaped(self.server.reader.trouble and failed_reading(self.server.reader.trouble))
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, said, "text/html", {"Retry-After": "2"})
        elif name == "news":
            tag = f'"{self.server.token[:6]}-{edition.number}"'
            if self.headers.get("If-None-Match") == tag:
                self._answer(HTTPStatus.NOT_MODIFIED, headers={"ETag": tag})
            else:
                self._answer(HTTPStatus.OK, json.dumps(edition.news()), "application/json", {"ETag": tag})
        else:
            page = live_page(edition.view, edition.sections, edition.trouble, edition.read_s_ago)
            self._answer(HTTPStatus.OK, page, "text/html")

    do_HEAD = do_GET

    def _asked(self) -> str | None:
        """Returns which part of the page is asked for; None if there is none, or not for whoever asks. A page of
        another site that has made its name lead to this machine is known by the name that it asks."""
        path = self.path.partition("?")[0].encode("utf-8", "replace")
        prefix = f"/{self.server.token}/".encode()
        right = hmac.compare_digest(path[: len(prefix)], prefix)
        name = path[len(prefix) :].decode("utf-8", "replace")
        known = name in ("", "page.css", "page.js", "events", "news")
        return name if right and known and self.headers.get("Host") in self.server.hosts else None

    def _answer(
        self, status: HTTPStatus, body: str = "", kind: str = "text/plain", headers: dict[str, str] | None = None
    ) -> None:
        content = body.encode("utf-8", "replace")
        self._begin(
            status, {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))} | (headers or {})
        )
        if self.command != "HEAD":
            self.wfile.write(content)

    def _begin(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in (_HEADERS | headers | {"Connection": "close"}).items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True

    def _stream(self) -> None:
        if not self.server.streams.acquire(blocking=False):
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, headers={"Retry-After": "2"})
            return
        try:
            self._begin(HTTPStatus.OK, {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
            if self.command != "HEAD":
                self._send_news()
        finally:
            self.server.streams.release()

    def _send_news(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        self.wfile.write(b"retry: 2000\n\n")
        sent = -1
        while not self.server.reader.closed:
            edition = self.server.reader.newest(sent, _BEAT_S)
            if edition is not None:
                news = json.dumps(edition.news(sent))
                self.wfile.write(f"event: news\ndata: {news}\n\n".encode("utf-8", "replace"))
                sent = edition.number

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers what is no GET or HEAD, or no HTTP, without a word."""
        self.command = getattr(self, "command", None) or "GET"
        is_method = code == HTTPStatus.NOT_IMPLEMENTED
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED if is_method else HTTPStatus(code), headers={"Allow": "GET, HEAD"})

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: addresses have the token."""
