"""What a node shows to people and monitors: a structured log, what it passes over, status.json, metrics for
Prometheus."""

import json
import logging
import logging.handlers
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fairmesh.errors import BadInput, in_a_line, optional, printable
from fairmesh.mesh.announcements import QUIET_AT_MOST_S
from fairmesh.mesh.node.life import FINISHED, NOT_RUNNING, SLOW_DISK, STARTING, STOPPED, described, state_in
from fairmesh.mesh.node.now import is_away, is_silent
from fairmesh.mesh.node.state_lock import running_since
from fairmesh.mesh.wire.connections import keep_from_forks
from fairmesh.mesh.wire.limits import Report
from fairmesh.storage.files import read_record, write_record
from fairmesh.storage.occupied import PERSONAL, SUMMARY
from fairmesh.storage.strict_json import as_json

STATUS = "status.json"
LOG = "log.jsonl"
_LOG_BYTES, _LOG_FILES = 4 << 20, 3
_REPORT_BYTES, _REPORT_S_PER_SITE = 150, 0.05  # of a site's status on the wire; and at least between two of them
_FIRST_QUIET_S, _QUIET_S, _QUIET_BYTES_PER_S = 15.0, 120.0, 30.0  # between two that say nothing new
_IGNORED_AT_MOST = 20  # things of one site; a member can find new ones without end
_Given = TypeVar("_Given")

_LASTING = frozenset(  # events that every file of the log repeats: what ran here, who approved it, what was decided
    {
        "started",
        "approved",
        "the sites' data is agreed",
        "vote",
        "all have voted",
        "decided",
        "continuing",
        "diverged",
        "a site says that it has diverged",
        "a site contradicts itself",
        "a site says that another contradicts itself",
        "accepted here",
    }
)
_LASTING_AT_MOST = 200


def event_in_words(event: Mapping[str, Any]) -> str:
    """Returns what a line of the log says, without its time and level."""
    rest = ", ".join(
        f"{key} {value}" for key, value in event.items() if value is not None and key not in ("time", "level", "what")
    )
    return f"{event['what']}{': ' + rest if rest else ''}"


def _for_people(event: Mapping[str, Any]) -> str:
    mark = "" if event["level"] == "info" else f"{event['level']}: "
    return printable(f"{event['time'][11:19]}  {mark}{event_in_words(event)}")


class _File(logging.handlers.RotatingFileHandler):
    """The log in the state folder, of bounded size. When it begins another file, the first line says what came before
    and since when the log is complete, and the lasting events are repeated."""

    def __init__(self, path: Path):
        try:
            super().__init__(path, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES, encoding="utf-8")
        except OSError as error:
            raise BadInput(
                f"cannot write the log {path}: {error.strerror or error}; move away what is there"
            ) from error
        self.lasting: list[dict[str, Any]] = []
        self._path = path

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignores errors: a full disk is reported by what must be written."""

    def doRollover(self) -> None:
        super().doRollover()
        if self.stream is None:
            return
        older = sorted(self._path.parent.glob(f"{self._path.name}.*")) or [self._path]
        head = {
            "time": _now(),
            "level": "info",
            "what": "the log continues",
            "file": older[0].name,
            "reason": f"the file before this one was full; the log is complete since {_first_time(older[-1])}. Lines "
            "before that were removed, except for those repeated below",
        }
        for event in (head, *(event | {"repeated": True} for event in list(self.lasting))):
            self.stream.write(as_json(event) + "\n")
        self.stream.flush()


def _first_time(path: Path) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return str(json.loads(file.readline())["time"])
    except (OSError, ValueError, KeyError):
        return "this moment"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Log:
    """Logs events with fields: as text on a terminal, and as JSON lines elsewhere and in the state folder, where the
    log's size is bounded. No field ever contains training data."""

    def __init__(self, folder: Path, stream: Any = None):
        self._shown, self._kept = logging.StreamHandler(stream or sys.stderr), _File(folder / LOG)
        self._to_text = _for_people if self._shown.stream.isatty() else as_json

    def __call__(self, level: str, what: str, **fields: Any) -> None:
        event = {"time": _now(), "level": level, "what": what} | fields
        self._shown.handle(logging.makeLogRecord({"msg": self._to_text(event)}))
        self._kept.handle(logging.makeLogRecord({"msg": as_json(event)}))
        if what in _LASTING:
            lasting = self._kept.lasting
            lasting.append(event)
            if len(lasting) > _LASTING_AT_MOST:  # a site that votes again and again must not push out all others
                kinds = [one["what"] for one in lasting]
                del lasting[kinds.index(max(kinds, key=kinds.count))]

    def close(self) -> None:
        self._shown.close()
        self._kept.close()


class Aside:
    """What this node has put aside since it was started, instead of ending: what other sites say and cannot be true
    here, and its own steps that only show or compare, if they fail. Both are named in the log and in the status.

    Args:
        report: Logs an event.
    """

    def __init__(self, report: Report):
        self._report = report
        self._reported: set[tuple[object, ...]] = set()
        self._ignored: dict[str, dict[str, str]] = {}  # the reasons, by site and what is ignored
        self._failed: dict[str, str] = {}  # the reason, by what failed

    def once(self, about: tuple[object, ...], level: str, what: str, **fields: Any) -> None:
        """Logs an event, unless one about the same was logged before."""
        if about not in self._reported:
            self._reported.add(about)
            self._report(level, what, **fields)

    def ignore(self, site: str, what: str, reason: str) -> None:
        """Says, once, that something that a site has announced is not used."""
        reasons = self._ignored.setdefault(site, {})
        if what not in reasons and len(reasons) < _IGNORED_AT_MOST:
            reasons[what] = reason[:400]
            self._report("warning", f"{what} of a site are ignored", site=site, reason=reason[:400])

    def tried(self, what: str, part: Callable[[], _Given], otherwise: _Given) -> _Given:
        """Returns what a step gives that only shows or compares. If it fails, says so and returns something else: no
        such step ends a node, whatever numbers the other sites have sent."""
        try:
            return part()
        except Exception as error:
            reason = in_a_line(error)
            if self._failed.get(what) != reason:
                self._failed[what] = reason
                self._report("error", f"{what} failed; the node goes on without it", reason=reason)
            return otherwise

    def view(self) -> dict[str, list[str]]:
        """Returns what of each site is ignored and why, in sentences."""
        return {
            site: [f"its {what} are ignored: {reason}" for what, reason in list(reasons.items())]
            for site, reasons in list(self._ignored.items())
        }


class Cadence:
    """When a site tells the others about itself: in the next second if it matters; of its rounds as often as a budget
    of bytes allows; and ever more rarely while nothing changes, so that a mesh at rest costs little."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._told: tuple[object, object] = (None, None)  # what matters and what does not, as it was told last,
        self._told_at = -math.inf  # when,
        self._again_s = 0.0  # and after how many seconds it is told again at the latest

    def due(self, matters: object, rest: object, sites: int, bytes_per_s: float) -> float | None:
        """Returns after how many seconds at the latest it is told again, if it is to be told now.

        Args:
            matters: What the others should know soon.
            rest: What may wait.
            sites: How many there are: over each edge go the reports of nearly all.
            bytes_per_s: That all their reports may take over an edge, for the rest.
        """
        reports = (sites - 1) * _REPORT_BYTES
        least, most = max(1.0, _REPORT_S_PER_SITE * sites), max(_QUIET_S, reports / _QUIET_BYTES_PER_S)
        paced, waited = min(max(least, reports / max(bytes_per_s, 1e-9)), most), self._clock() - self._told_at
        news = [now != told for now, told in zip((matters, rest), self._told)]
        if waited < (least if news[0] else min(paced, self._again_s) if news[1] else self._again_s):
            return None
        grown = 2 * paced if news[1] else 2 * self._again_s
        self._again_s = min(_FIRST_QUIET_S if news[0] else max(_FIRST_QUIET_S, grown), most, QUIET_AT_MOST_S)
        self._told, self._told_at = (matters, rest), self._clock()
        return self._again_s


def write_status(folder: Path, status: Mapping[str, Any]) -> None:
    """Writes status.json for `fairmesh status`. A full disk is no reason to stop, so errors are ignored."""
    with suppress(BadInput):
        write_record(folder / STATUS, status, durable=False)


class Waiting(NamedTuple):
    """Who waits for whom, as far as both ends say so."""

    chain: list[str]  # a site, whom it waits for, and so on; the last one is where to look
    says: str  # what one end of the next wait says, and the other does not confirm; "" if nothing


def waiting_chain(site: str, sites: Mapping[str, Mapping[str, Any]], own: str, away: Collection[str] = ()) -> Waiting:
    """Follows from a site whom each has waited for longest. A site that withholds its messages can say that it waits
    for any other. So what one says counts if the awaited one says itself that it has not sent that message.

    Args:
        site: Where the chain begins.
        sites: What each site has said last: its `round`, since when it waits for others (`waiting_for`), of how many
            rounds it has sent its messages (`rounds_sent`), and its `activity`.
        own: This site, whose waits this node sees itself.
        away: Sites that are silent, or neighbours without a connection: what these have said last is not so any more.
            The chain ends at such a site. Default: none.
    """
    chain = [site]
    while chain[-1] not in away and (others := sites.get(chain[-1], {}).get("waiting_for")):
        waits, awaited = chain[-1], min(others.items(), key=lambda item: item[1])[0]
        if awaited in chain:
            break
        doubt = "" if awaited in away else _doubt(sites[waits]["round"], sites.get(awaited))
        if doubt and waits != own:
            return Waiting(chain, f"{waits} says that it waits for {awaited}, which {doubt}")
        chain.append(awaited)
        if doubt and awaited in sites:
            return Waiting(chain, f"{awaited} {doubt}")
    return Waiting(chain, "")


def _doubt(done: int, awaited: Mapping[str, Any] | None) -> str:
    """Returns what speaks against a wait for a site's message of the round after `done`, in words; "" if nothing."""
    if awaited is None:
        return "has not said how far it is"
    if awaited["activity"] == SLOW_DISK:  # then others wait until it acknowledges theirs
        return ""
    return "says that it has sent its message" if awaited["rounds_sent"] > done else ""


def read_status(folder: Path) -> dict[str, Any]:
    path = folder / STATUS
    status = read_record(path, "its node writes it anew, within seconds after it is started")
    if not status:
        raise BadInput(
            f"there is no {path}: this node has not been started, or ended at once; run `fairmesh node`, which says "
            f"why, or see failure.txt in {folder.parent}, if a job of NVFlare starts it"
        )
    return status


def live_status(folder: Path) -> dict[str, Any]:
    """Returns the status that a node has written last, with whether it runs now (`running`) and what it does, and
    without what is not so any more. A node that has just been started has only these, and since when it runs
    (`time`)."""
    since = running_since(folder)
    if since is not None and not (folder / STATUS).exists():
        return {"time": since, "running": True, "activity": described(STARTING)}
    status = read_status(folder)
    status["running"], status["uses"] = since is not None, own_model_in_words(folder)
    if since is None and status["activity"] not in (FINISHED, STOPPED):
        status["activity"] = described(NOT_RUNNING)
    if since is not None and status["time"] < since:
        status["activity"] = described(STARTING)
    if status["sites"].get(status["site"]):
        status["sites"][status["site"]]["activity"] = status["activity"]
    return _without_what_is_over(status)


def is_current(status: Mapping[str, Any]) -> bool:
    """Returns whether the process that runs now has written a status, as `live_status` returns it: not one that has
    ended, also if the node was started again since."""
    return status["running"] and state_in(status["activity"]) != STARTING


def _without_what_is_over(status: dict[str, Any]) -> dict[str, Any]:
    """Returns a status without what was so when it was written or said, and may be over: if its process has ended, all
    connections and waits; and of sites that are away or silent, for whom they say that they wait."""
    current, sites, own = is_current(status), status["sites"], status["site"]
    if not current:
        edges = {name: edge | {"connected": None} for name, edge in status.get("edges", {}).items()}
        status |= _NO_WAITS | {"waiting_chain": [own], "edges": edges}
    for name, told in sites.items():
        gone = not current or (name != own and told and (is_away(name, status) or is_silent(told, len(sites))))
        if told and gone:
            told["waiting_for"] = {}
    return status


_NO_WAITS: dict[str, Any] = {
    "waiting_for": {},
    "paused_for": [],
    "unconfirmed_wait": "",
    "missing": None,
    "phase": None,
    "rounds_per_s": None,
    "seconds_left": None,
}


_USES = {
    "common": "the common model",
    "adapted": "a model adapted from the common one",
    "own": "a model of its own rows alone",
}


def uses_in_words(own: Mapping[str, Any]) -> str:
    """Returns which model a site uses, given the summary of its own one."""
    shares, kind = sorted(own["weights"].items(), key=lambda item: -item[1]), _USES[own["uses"]]
    made_of = "; ".join(f"{100 * share:.0f} % {name}" for name, share in shares)
    used = f"a mixture, whose largest part is {kind} ({made_of})" if shares[1:] else kind
    return f"{used}; {own['note']}" if own.get("note") else used


def own_model_in_words(folder: Path) -> str:
    """Returns which model the site of a state folder uses; "" if it has not chosen one."""
    with suppress(OSError, ValueError, KeyError):
        return uses_in_words(json.loads((folder / PERSONAL / SUMMARY).read_text(encoding="utf-8")))
    return ""


class Monitor:
    """Serves the last status as Prometheus metrics on a port of the loopback interface."""

    def __init__(self, port: int):
        with optional("mesh"):
            from prometheus_client import CollectorRegistry, start_http_server
        self._status: Mapping[str, Any] = {}
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]
        try:
            server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise BadInput(f"cannot listen on 127.0.0.1:{port} for Prometheus: {error.strerror or error}") from error
        keep_from_forks([server])

    def show(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Any:
        """Yields the metrics; the Prometheus library calls this for every fetch."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status
        if not status:
            return
        primary = status["metric_name"]
        for name, text, value in (
            ("round", "Rounds that this node has completed.", status["round"]),
            ("rounds", "Rounds of the whole run.", status["rounds"]),
            ("certificate_days", "Days until this site's certificate ends.", status["certificate_days"]),
            ("worst", f"The worst site's {primary} in recent rounds.", status["worst"]),
            ("mean", f"The mean {primary} in recent rounds.", status["mean"]),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"fairmesh_{name}", text, value=value)
        phase = GaugeMetricFamily("fairmesh_phase", "Share done of a long work outside the rounds.", labels=["phase"])
        waiting = GaugeMetricFamily("fairmesh_waiting_seconds", "How long this node waits for a site.", labels=["site"])
        connected = GaugeMetricFamily("fairmesh_connected", "1 while a neighbour is connected.", labels=["site"])
        sent = CounterMetricFamily("fairmesh_edge_bytes", "Bytes over an edge.", labels=["site", "direction", "of"])
        if status["phase"] is not None:
            phase.add_metric([status["phase"]["what"]], status["phase"]["done"] / status["phase"]["of"])
        for site, since in status["waiting_for"].items():
            waiting.add_metric([site], max(0.0, status["time"] - since))
        for site, edge in status["edges"].items():
            connected.add_metric([site], float(edge["connected"]))
            for direction in ("out", "in"):
                sent.add_metric([site, direction, "messages"], edge[f"bytes_{direction}"])
                sent.add_metric([site, direction, "overhead"], edge[f"overhead_{direction}"])
        yield from (phase, waiting, connected, sent)
