"""What a node tells people and monitors: a structured log, status.json, numbers for Prometheus."""

import json
import logging
import logging.handlers
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput, optional
from fairmesh.storage.files import replace_quickly
from fairmesh.storage.strict_json import as_json

STATUS = "status.json"
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_LOG_BYTES, _LOG_FILES = 4 << 20, 3


class _Lines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        return as_json(record.__dict__["fields"])


class _ForPeople(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = dict(record.__dict__["fields"])
        moment, what = fields.pop("time"), fields.pop("what")
        level = fields.pop("level")
        rest = ", ".join(f"{key} {value}" for key, value in fields.items() if value is not None)
        rest = "".join(c if c.isprintable() else "?" for c in rest)  # others' words are no commands to a terminal
        mark = "" if level == "info" else f"{level}: "
        return f"{moment[11:19]}  {mark}{what}{': ' + rest if rest else ''}"


class Log:
    """Events with fields: to the terminal as sentences, elsewhere and to the state folder as JSON lines of bounded
    size. Nothing of the data is ever a field."""

    def __init__(self, folder: Path, stream: Any = None):
        stream = stream or sys.stderr
        self._logger = logging.Logger("fairmesh.mesh.node")
        shown = logging.StreamHandler(stream)
        shown.setFormatter(_ForPeople() if stream.isatty() else _Lines())
        kept = logging.handlers.RotatingFileHandler(
            folder / "log.jsonl", maxBytes=_LOG_BYTES, backupCount=_LOG_FILES, encoding="utf-8"
        )
        kept.setFormatter(_Lines())
        kept.handleError = lambda record: None  # a full disk is reported by what must be written, not by the log
        for handler in (shown, kept):
            self._logger.addHandler(handler)

    def __call__(self, level: str, what: str, **fields: Any) -> None:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        told = {"time": moment, "level": level, "what": what} | fields
        self._logger.log(_LEVELS[level], what, extra={"fields": told})


def write_status(folder: Path, status: Mapping[str, Any]) -> None:
    """For `fairmesh status`. A disk without room for it is no reason to stop."""
    try:
        replace_quickly(folder / STATUS, as_json(status, indent=1).encode())
    except BadInput:
        return


def read_status(folder: Path) -> dict[str, Any]:
    path = folder / STATUS
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"there is no {path}: this node has not been started yet") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {error}") from error


class Monitor:
    """The last status as numbers that Prometheus fetches from a port of the loopback interface."""

    def __init__(self, port: int):
        with optional("mesh"):
            from prometheus_client import CollectorRegistry, start_http_server
        self._status: Mapping[str, Any] = {}
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]
        try:
            start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise BadInput(f"cannot listen on 127.0.0.1:{port} for Prometheus: {error.strerror or error}") from error

    def show(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Any:
        """Called by Prometheus' library for every fetch."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status
        if not status:
            return
        yield GaugeMetricFamily("fairmesh_round", "Rounds this node has done.", value=status["round"])
        yield GaugeMetricFamily("fairmesh_rounds", "Rounds of the whole run.", value=status["rounds"])
        days = status["certificate_days"]
        yield GaugeMetricFamily("fairmesh_certificate_days", "Until this site's certificate ends.", value=days)
        waiting = GaugeMetricFamily("fairmesh_waiting_seconds", "How long a neighbour is waited for.", labels=["site"])
        for site, since in status["waiting_for"].items():
            waiting.add_metric([site], max(0.0, status["time"] - since))
        yield waiting
        if status["worst"] is not None:
            primary, worst, mean = status["metric_name"], status["worst"], status["mean"]
            yield GaugeMetricFamily("fairmesh_worst", f"The worst site's {primary}, of recent rounds.", value=worst)
            yield GaugeMetricFamily("fairmesh_mean", f"The mean {primary}, of recent rounds.", value=mean)
        connected = GaugeMetricFamily("fairmesh_connected", "1 while the stream to a neighbour is up.", labels=["site"])
        sent = CounterMetricFamily("fairmesh_edge_bytes", "Bytes over an edge.", labels=["site", "direction", "of"])
        for site, edge in status["edges"].items():
            connected.add_metric([site], float(edge["connected"]))
            for direction in ("out", "in"):
                sent.add_metric([site, direction, "messages"], edge[f"bytes_{direction}"])
                sent.add_metric([site, direction, "beside"], edge[f"overhead_{direction}"])
        yield connected
        yield sent
