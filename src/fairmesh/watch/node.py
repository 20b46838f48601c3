"""Views of a mesh as one of its nodes sees it, by the node's state folder."""

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.mesh.node import claims, life
from fairmesh.mesh.node.now import HANGS_S, age_of, few_of_a_kind, further, is_silent, now, unit_of, worst_site
from fairmesh.mesh.node.watching import LOG, event_in_words, is_current, live_status
from fairmesh.storage.occupied import SUMMARY
from fairmesh.watch.finished import Finished
from fairmesh.watch.records import Records
from fairmesh.watch.view import (
    Edge,
    Estimate,
    Line,
    Missing,
    Phase,
    Privacy,
    Refusal,
    Site,
    SiteState,
    Traffic,
    View,
    Vote,
    Wait,
)

PROGRESS, RESULT = "progress", "result"  # folders of the run so far, and of its result
CLAIMED = frozenset({"doing", "round", "value", "value_round", "weight", "bytes_sent", "epsilon"})
_SHORT_WAIT_S = 2.0  # such waits are part of every round
_LINES, _LOG_TAIL = 20, 1 << 16  # of the log, where lines that repeat each other count as one
_REFUSES = "refuse"  # begins what the log says of connections and messages that are refused
_COUNTS = ("time", "seconds", "since", "more_times")  # in which lines differ that repeat each other
_GONE = ("silent", "unreachable", "unknown")  # what such a site has said that it does is over, or may be
_RATE_S = 30.0  # over which bytes per second are counted


class NodeSource:
    """What a node knows of its mesh, by its state folder. The node may run, end or be started meanwhile.

    Args:
        state: The node's state folder.
        site: The site's file, for the commands that sentences name; None if it is not known.
    """

    def __init__(self, state: Path, site: Path | None = None):
        self._state, self._site = state, site or "SITE"
        self._records = {name: Records(state / name) for name in (PROGRESS, RESULT)}
        self._finished, self._sent = Finished(state / RESULT), deque[tuple[float, int]]()
        self._last: View | None = None
        live_status(state)  # refuses a folder of which it cannot tell anything

    def view(self, wait: bool = False) -> View:
        """Returns what is known now. It reads only what is new, and never fails for what a node does to its folder.

        Args:
            wait: Whether to wait for what the report says of a finished run. Default: False.
        """
        at = time.time()
        try:
            seen = live_status(self._state)
        except BadInput as error:
            return self._unreadable(at, str(error))
        said, events = now(seen, at, self._site), _events(self._state / LOG)
        view = View(
            kind="node",
            title=seen.get("mesh", self._state.resolve().parent.name),
            state=life.state_in(seen["activity"]),
            sentence=said.sentence,
            urgency=said.urgency,  # type: ignore[arg-type]
            seen_at=at,
            news_at=seen["time"],
            live=seen["running"],
            log=tuple(_without_repetitions(events))[-_LINES:],
            refused=tuple(_without_repetitions([event for event in events if str(event["what"]).startswith(_REFUSES)]))[
                -_LINES:
            ],
        )
        if "sites" not in seen:
            return view
        self._last = self._seen(view, seen, at)
        if view.state == life.FINISHED:
            self._last = self._with_result(self._last, wait)
        return self._last

    def _unreadable(self, at: float, why: str) -> View:
        before = self._last or View("node", self._state.name, life.NOT_RUNNING, why, "act", at, None)
        return replace(before, sentence=why, urgency="act", seen_at=at, live=False, seconds_left=None, waits=())

    def _seen(self, view: View, seen: Mapping[str, Any], at: float) -> View:
        names, age, known = list(seen["sites"]), age_of(seen, at), bool(seen["metric_name"])
        place = {name: i for i, name in enumerate(names)}
        ended, worst = view.state == life.FINISHED, worst_site(seen)
        sites = tuple(_site(name, seen, age) for name in names)
        rate, left = None if seen["paused_for"] else seen["rounds_per_s"], seen["seconds_left"]
        records = self._records[RESULT if ended else PROGRESS]
        records.read(seen["metric_name"] or "", [[0]])
        curves = records.curves
        return replace(
            view,
            seen_from=seen["site"],
            round=seen["round"],
            rounds=seen["rounds"],
            rounds_per_s=rate,
            seconds_left=None if left is None else max(0.0, left - age),
            phase=_phase(seen["phase"]),
            metric=unit_of(seen) if known else None,
            higher_is_better=seen.get("higher_is_better", True),
            sites=sites,
            order=tuple(_by_concern(seen, sites)),
            worst=sites[place[worst]].value if worst else None,
            worst_site=place[worst] if worst else None,
            mean=None if seen["mean"] is None else Estimate(seen["mean"]),
            edges=tuple(_edges(seen, place)),
            waits=() if ended else tuple(_waits(seen, place, age)),
            chain=tuple(place[name] for name in seen["waiting_chain"] if name in place) if seen["paused_for"] else (),
            missing=_missing(seen, place, age),
            quiet=is_current(seen) and age >= HANGS_S,
            curves=curves if len(curves.sites) in (0, len(sites)) else replace(curves, sites=()),
            privacy=_privacy(seen.get("privacy")),
            traffic=self._traffic(seen),
            refusals=tuple(_refusals(seen, place, age)),
            votes=tuple(Vote(what, tuple(sorted(voters))) for what, voters in seen["votes"].items()),
            says=tuple(self._says(seen)),
            notes=(f"As {seen['site']} sees it. What other sites tell of themselves is their claim.",),
            removed=tuple(seen["removed"]),
        )

    def _says(self, seen: Mapping[str, Any]) -> Iterator[str]:
        if seen.get("uses"):
            yield f"this site uses {seen['uses']}"
        yield from further(seen, self._site)

    def _with_result(self, view: View, wait: bool) -> View:
        """Returns the view with what the report says of the result; who said what of a site stays."""
        if not (self._state / RESULT / SUMMARY).exists():
            return view
        told = self._finished.added_to(replace(view, says=()), wait)
        sites = tuple(replace(site, uses=site.uses if site.own else "") for site in told.sites)
        says, notes = (*view.says, *told.says), (*told.notes, *view.notes)
        edges, privacy, traffic = view.edges, view.privacy or told.privacy, view.traffic
        return replace(
            told,
            sites=sites,
            says=says,
            advice="",  # this site has chosen its model, and each of the others its own
            notes=tuple(dict.fromkeys(notes)),
            edges=edges,
            privacy=privacy,
            traffic=traffic,
        )

    def _traffic(self, seen: Mapping[str, Any]) -> Traffic:
        """Returns this site's traffic; bytes per second by what was sent since the views of half a minute ago."""
        sent, edges = seen["bytes_out"], seen["edges"].values()
        if self._sent and (sent < self._sent[-1][1] or seen["time"] < self._sent[-1][0]):  # started again
            self._sent.clear()
        if not self._sent or seen["time"] > self._sent[-1][0]:
            self._sent.append((seen["time"], sent))
        while self._sent[0][0] < seen["time"] - _RATE_S:
            self._sent.popleft()
        (began, first), (until, last) = self._sent[0], self._sent[-1]
        per_s = (last - first) / (until - began) if until > began and seen["running"] else None
        received = sum(edge["bytes_in"] for edge in edges)
        return Traffic("this site", sent, received, on_the_wire=seen["wire_out"], per_s=per_s)


def _site(name: str, seen: Mapping[str, Any], age: float) -> Site:
    """Returns what is known of a site. What others say of themselves is marked."""
    told, own = seen["sites"][name], name == seen["site"]
    shares = (seen["lambda"] or {"sites": {}})["sites"]
    remarks = [*seen["ignored"].get(name, ()), *(f"its data: {why}" for why in seen["unusual"].get(name, ()))]
    spent = ((seen.get("privacy") or {}).get("sites") or {}).get(name)
    site = Site(
        name,
        own=own,
        state=_state(name, seen),
        weight=shares.get(name),
        prior=seen["prior"].get(name),
        epsilon=seen["privacy"]["epsilon"] if own and seen.get("privacy") else spent,
        remarks=tuple(few_of_a_kind(remarks)),
        claimed=frozenset() if own else CLAIMED,
    )
    if not told:
        return site
    value, interval = told["metric"], told.get("interval")
    return replace(
        site,
        doing="" if site.state == "ended" else f"was {told['activity']}" if site.state in _GONE else told["activity"],
        round=told["round"],
        heard_s_ago=0.0 if own else max(0.0, told["heard_s_ago"] + age),
        value=None if value is None else Estimate(value, None if interval is None else tuple(interval)),
        value_round=told["metric_round"],
        bytes_sent=told["wire_out"],
    )


def _state(name: str, seen: Mapping[str, Any]) -> SiteState:
    """Returns what is known of how a site is: first by this node, then by what the site says."""
    told, own = seen["sites"][name], name == seen["site"]
    state, edge = life.state_in(told["activity"]) if told else "", seen["edges"].get(name)
    if life.FINISHED in (state, life.state_in(seen["activity"])):
        return "ended"
    if own and not seen["running"]:
        died = life.state_in(seen["activity"]) == life.NOT_RUNNING
        return "died" if died else "diverged" if (seen.get("ended") or {}).get("diverged") else "stopped"
    if state == life.DIVERGED or name in {claim["by"] for claim in seen["diverged"]}:
        return "diverged"
    if edge is not None and edge["connected"] is False:
        return "unreachable"
    if not told or not (own or is_current(seen)):
        return "unknown"
    if not own and is_silent(told, len(seen["sites"])):
        return "silent"
    return "stopped" if state == life.STOPPED else _at_work(told)


def _at_work(told: Mapping[str, Any]) -> SiteState:
    waiting = [told["time"] - since for since in told["waiting_for"].values()]
    return "waits" if any(seconds > _SHORT_WAIT_S for seconds in waiting) else "at work"


def _by_concern(seen: Mapping[str, Any], sites: tuple[Site, ...]) -> list[int]:
    """Returns the sites in the order in which they need attention: this one, those that cannot be reached or have
    diverged, those that are silent, the others by their round."""
    rank = {"diverged": 0, "unreachable": 0, "unknown": 1, "silent": 2}

    def key(i: int) -> tuple[bool, int, int, float]:
        site = sites[i]
        return not site.own, rank.get(site.state, 3), site.round or 0, -(site.heard_s_ago or 0.0)

    return sorted(range(len(sites)), key=key)


def _edges(seen: Mapping[str, Any], place: Mapping[str, int]) -> Iterator[Edge]:
    """Yields the connections of the mesh. Only those of this node are seen here."""
    own, known = seen["site"], seen["edges"]
    graph = seen.get("graph") or [[own, name] for name in known]
    for one, other in graph:
        if one not in place or other not in place:
            continue
        ends = (place[one], place[other]) if other != own else (place[other], place[one])
        edge = known.get(other if one == own else one) if own in (one, other) else None
        if edge is None:
            yield Edge(ends)
        else:
            yield Edge(ends, edge["connected"], edge["bytes_out"], edge["bytes_in"])


def _waits(seen: Mapping[str, Any], place: Mapping[str, int], age: float) -> Iterator[Wait]:
    """Yields who waits for whom. A wait is as long as the site that waits says, by its own clock alone, and lasts since
    its report arrived here."""
    own = seen["site"]
    for name, since in seen["waiting_for"].items():
        if name in place:
            yield Wait(place[own], place[name], max(0.0, seen["time"] - since) + age)
    for name, told in seen["sites"].items():
        if name == own or not told:
            continue
        for awaited, since in told["waiting_for"].items():
            if awaited in place:
                seconds = max(0.0, told["time"] - since) + max(0.0, told["heard_s_ago"]) + age
                yield Wait(place[name], place[awaited], seconds, seen=False)


def _missing(seen: Mapping[str, Any], place: Mapping[str, int], age: float) -> Missing | None:
    missing = seen["missing"] or {"sites": (), "seconds": 0.0}
    sites = tuple(place[name] for name in missing["sites"] if name in place)  # it may be "the others"
    return Missing(sites, missing["seconds"] + age) if sites else None


def _refusals(seen: Mapping[str, Any], place: Mapping[str, int], age: float) -> Iterator[Refusal]:
    for one in seen["refusing"]:
        if one["by"] in place and one["site"] in place:
            seconds = max(0.0, seen["time"] + age - one["since"])
            by, site = place[one["by"]], place[one["site"]]
            yield Refusal(by, site, one["reason"], seconds, claims.refused(one), one.get("times"))


def _privacy(privacy: Mapping[str, Any] | None) -> Privacy | None:
    if not privacy:
        return None
    return Privacy(privacy["epsilon"], privacy["budget"], privacy["delta"], privacy.get("unit") or "")


def _phase(phase: Mapping[str, Any] | None) -> Phase | None:
    return Phase(phase["what"], phase["done"], phase["of"]) if phase else None


def _events(path: Path) -> list[dict[str, Any]]:
    """Returns the last events of a node's log."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _LOG_TAIL))
            lines = file.read(_LOG_TAIL).splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        with suppress(ValueError, RecursionError):  # one that is cut
            events.append(json.loads(line))
    return [event for event in events if isinstance(event, dict) and {"time", "level", "what"} <= event.keys()]


def _without_repetitions(events: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """Yields the lines of a log. Of warnings that repeat each other, with no news between them, only the last one, with
    how often it was said."""
    found: dict[object, list[Mapping[str, Any]]] = {}  # equal events, the one that was said last at the end
    for event in events:
        subject = str({key: value for key, value in event.items() if key not in _COUNTS})
        if event["level"] == "info":
            yield from map(_line, found.values())
            found = {}
            yield _line([event])
        else:
            found[subject] = [*found.pop(subject, []), event]
    yield from map(_line, found.values())


def _line(equal: Sequence[Mapping[str, Any]]) -> Line:
    first, last = equal[0], equal[-1]
    text = event_in_words(last)
    if len(equal) > 1:
        times = sum(event.get("more_times", 1) for event in equal)
        text = event_in_words({key: value for key, value in last.items() if key != "more_times"})
        text += f" ({times:,} times since {str(first['time']).replace('T', ' ').removesuffix('Z')})"
    return Line(str(last["time"]), str(last["level"]), text)
