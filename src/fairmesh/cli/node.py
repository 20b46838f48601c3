"""`fairmesh node` and `fairmesh status`: run one site of a mesh, and show its status and that of the others."""

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairmesh.cli.terminal import Json, Track, few, print_json, readable_toml, say, show_rows, show_table
from fairmesh.cli.without_torch import leave_out_torch
from fairmesh.errors import BadInput, duration
from fairmesh.mesh.enrol.roster import SiteFile
from fairmesh.storage.occupied import PERSONAL

if TYPE_CHECKING:
    from fairmesh.watch.sources import Source

Site = Annotated[Path, typer.Argument(metavar="SITE", help="This site's site.toml.", callback=readable_toml)]


def watched(path: Path) -> Path:
    """Refuses a path where nothing is, before anything is imported that reads a run or a node."""
    if not path.exists():
        raise BadInput(f"there is no {path}; give the folder of a run, or the site.toml of a mesh")
    return path


Watched = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="A site's site.toml or its state folder, or the folder of a run.", callback=watched
    ),
]
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(text: str, option: str) -> float:
    """Returns '90', '90s', '30m', '2h' or '1d' in seconds."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not parts:
        raise BadInput(f"{option} {text!r}: write a time such as 90s, 30m, 2h or 1d")
    return float(parts[1]) * _UNITS[parts[2] or "s"]


def node(
    site: Site,
    patience: Annotated[
        str, typer.Option(help="Stop after waiting this long for a neighbour, such as 30m or 2h.")
    ] = "",
    prometheus: Annotated[int | None, typer.Option(help="A port of 127.0.0.1 for Prometheus metrics.")] = None,
    track: Track = [],  # noqa: B006
    json_: Json = False,
) -> None:
    """Run a site's node until the mesh has finished.

    It runs unattended. Started again, it continues where it was."""
    from fairmesh.mesh.node.state_lock import LEFT_S, locked

    waits = seconds_of(patience, "--patience") if patience else math.inf
    with locked(SiteFile.read(site).state, LEFT_S) as lock:  # before imports, so that `status` sees that it starts
        from fairmesh.mesh.node.running import run_node
        from fairmesh.trackers import trackers_of

        folder = run_node(site, patience_s=waits, monitor_port=prometheus, trackers=trackers_of(track), lock=lock)
    from fairmesh.mesh.node.now import few_of_a_kind
    from fairmesh.mesh.node.versus_local import sentences
    from fairmesh.mesh.node.watching import own_model_in_words
    from fairmesh.report.contents import card
    from fairmesh.report.runs import Run, caption_of, few_sentences, rows_of

    finished = Run.from_folder(folder)
    if json_:
        print_json(finished.summary | {"folder": str(folder)})
        return
    show_rows(rows_of([finished]))
    if caption := caption_of([finished]):
        say(caption)
    versus = [site["versus"]["local"] for site in finished.evidence.get("sites", ()) if site["versus"].get("local")]
    of_sites = few_sentences(sentences(finished.summary), [one["verdict"] for one in versus])
    in_all = [card(finished)["sentence"]] if len(of_sites) < len(versus) else []
    notes = (*finished.summary.get("notes", ()), *finished.evidence.get("notes", ()))
    for sentence in (*notes, *of_sites, *in_all, *few_of_a_kind(finished.contradictions())):
        say(sentence)
    if uses := own_model_in_words(folder.parent):
        say(f"this site uses {uses}: {folder.parent / PERSONAL}")
    say(f"the result is the same at every site: {folder}; for a page with plots: fairmesh report {folder}")


def status(path: Watched, json_: Json = False) -> None:
    """Show how a mesh is, as one node sees it, or how a run is.

    First what to do now, and how old the news is. Then two tables. What other sites tell of themselves is their claim.

    Of each site: round: how many rounds it has done; state: what it does now; the metric on its own test rows, and in
    round: the round in which it was measured; prior: its share of all rows; lambda: its share of the weights; waits
    for: for whom, and for how long; sent: all bytes that it has sent since it began; reported: how long ago its last
    news arrived.

    Of each neighbour: connected: whether there is a connection now, empty if the node does not run; last seen: how long
    ago anything came over it; messages: model messages since this site began; payload: their bytes; overhead: all other
    bytes of the connection, such as encryption and news."""
    leave_out_torch()
    from fairmesh.watch.sources import source_of, state_of

    found = state_of(path)
    if not found:
        _status_of_run(source_of(path), json_)
        return
    from fairmesh.mesh.node.life import FINISHED, state_in
    from fairmesh.mesh.node.now import age_of
    from fairmesh.mesh.node.now import now as now_of
    from fairmesh.mesh.node.watching import live_status

    state, site = found
    seen, at = live_status(state), time.time()
    said = now_of(seen, at, site or "SITE")
    if state_in(seen["activity"]) == FINISHED:  # then the report has more to say, as on the page
        view = source_of(path).view(wait=True)
        said = said._replace(sentence=view.sentence, urgency=view.urgency)
    if json_:
        print_json(seen | said._asdict())
        return
    say(f"{said.sentence}{_as_of(at - seen['time']) if seen['running'] else ''}")
    if "sites" not in seen:
        return
    age = age_of(seen, at)
    of_sites = few(_site_rows(seen, seen["metric_name"], age), _by_concern(seen))
    show_table(of_sites, f"mesh {seen['mesh']}, seen from {seen['site']}")
    show_table(few(_edge_rows(seen, at)), "edges of this node")
    if seen["refusing"]:
        show_table(few(_refusal_rows(seen, at)), "refused messages")
    for sentence in filter(None, _sentences(seen, site or Path("SITE"), age)):
        say(sentence)


def _as_of(age: float) -> str:
    return f" (news of {duration(age)} ago)"


def _status_of_run(source: "Source", json_: bool) -> None:
    """Shows how a run is: its sentence, its sites, and what else is to be known."""
    view = source.view(wait=True)
    if json_:
        print_json({"sentence": view.sentence, "urgency": view.urgency, "state": view.state, "news_at": view.news_at})
        return
    say(f"{view.sentence}{_as_of(view.age_s) if view.live and view.age_s is not None else ''}")
    if view.sites and view.metric:
        rows = [["site", view.metric.metric, "prior", "lambda"]]
        for site in view.sites:
            value = view.metric.with_interval(site.value.value, site.value.interval) if site.value else ""
            rows.append([site.name, value, _digits(site.prior, 3), _digits(site.weight)])
        show_table(few(rows, list(view.order)))
    for sentence in (*view.says, *view.notes):
        say(sentence)


def _by_concern(seen: dict[str, Any]) -> list[int]:
    """Returns the sites in the order in which they need attention: this one, those that were not heard of, then those
    whose last report is oldest, in the earliest round."""

    from fairmesh.mesh.node.now import is_silent

    def key(name: str) -> tuple[bool, bool, int, float]:
        reported = seen["sites"][name]
        if not reported:
            return name != seen["site"], False, 0, 0.0
        silent = is_silent(reported, len(seen["sites"]))
        return name != seen["site"], True, 0 if silent else reported["round"], -reported["heard_s_ago"]

    names = list(seen["sites"])
    return sorted(range(len(names)), key=lambda i: key(names[i]))


def _sentences(seen: dict[str, Any], site: Path, age: float) -> Iterator[str | None]:
    """Yields what a status says besides its sentence and tables."""
    from fairmesh.mesh.node.now import further, unit_of

    if weights := seen["lambda"]:
        done = weights["round"]
        yield f"lambda: each site's share of the weights in round {done}, the last one that all sites have measured"
    if seen.get("uses"):
        yield f"this site uses {seen['uses']}"
    if privacy := seen.get("privacy"):
        spent = "not known yet" if privacy["epsilon"] is None else f"{privacy['epsilon']:.3g}"
        most = max((value for value in privacy["sites"].values() if value is not None), default=None)
        others = "" if most is None else f"; the most that any site says is {most:.3g}"
        yield f"privacy: epsilon {spent} of {privacy['budget']:g} is spent here, at delta {privacy['delta']:g}{others}"
    if seen["worst"] is not None:
        shown = unit_of(seen).shown
        own = "" if seen["metric"] is None else f", here {shown(seen['metric'])}"
        worst = f"worst site {shown(seen['worst'])}, mean {shown(seen['mean'])}{own}"
        yield f"{seen['metric_name']} in recent rounds: {worst}"
    yield from further(seen, site)
    yield _expected_end(seen, age)
    yield f"{seen['activity']}, round {seen['round']} of {seen['rounds']}, as of {_ago(age)} ago"


def _expected_end(seen: dict[str, Any], age: float) -> str | None:
    """Returns when the last round is expected, or for whom the run waits."""
    from fairmesh.mesh.node.life import AT_WORK, state_in
    from fairmesh.training.rounds_per_second import rate_in_words

    if state_in(seen["activity"]) not in AT_WORK:
        return None
    if seen["paused_for"]:
        return f"paused, waiting for {', which waits for '.join(seen['paused_for'])}"
    if seen["seconds_left"] is None:
        return None
    left = max(0.0, seen["seconds_left"] - age)
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + left))
    return f"expected end: in {_ago(left)}, {moment}, at {rate_in_words(seen['rounds_per_s'])}"


def _site_rows(seen: dict[str, Any], metric: str, status_age: float = 0.0) -> list[list[str]]:
    from fairmesh.mesh.announcements import SHOWN
    from fairmesh.mesh.node.life import FINISHED
    from fairmesh.mesh.node.now import is_silent

    rows = [["site", "round", "state", metric, "in round", "prior", "lambda", "waits for", "sent", "reported", *SHOWN]]
    shares = (seen.get("lambda") or {"sites": {}})["sites"]
    ended = seen["activity"] == FINISHED  # then all sites have their result
    for name, reported in seen["sites"].items():
        if not reported:
            rows.append([name, "", "not heard of yet", *[""] * (7 + len(SHOWN))])
            continue
        # By this site's clock; a difference of the other's own moments is exact too.
        age = reported["heard_s_ago"] + status_age
        silent = is_silent(reported, len(seen["sites"]))
        awaited = {} if ended else reported["waiting_for"]
        waits = ", ".join(f"{who} ({_ago(max(0.0, reported['time'] - t + age))})" for who, t in awaited.items())
        activity = FINISHED if ended else f"silent; was {reported['activity']}" if silent else reported["activity"]
        metric_round = "" if reported["metric_round"] is None else str(reported["metric_round"])
        rows.append([name, str(reported["round"]), activity, _digits(reported["metric"]), metric_round])
        rows[-1] += [_digits(seen["prior"].get(name), 3), _digits(shares.get(name)), waits]
        rows[-1] += [f"{reported['wire_out']:,} B", f"{_ago(age)} ago"]
        rows[-1] += [str(reported.get(field, "")) for field in SHOWN]
    return rows


def _digits(value: float | None, count: int = 4) -> str:
    return "" if value is None else f"{value:.{count}g}"


def _edge_rows(seen: dict[str, Any], now: float) -> list[list[str]]:
    heads = ["messages out", "payload", "overhead", "messages in", "payload", "overhead"]
    rows = [["neighbour", "connected", "last seen", *heads]]
    for name, edge in seen["edges"].items():
        last = "never" if edge["last_seen"] is None else f"{_ago(now - edge['last_seen'])} ago"
        counts = [edge[f"{of}_{way}"] for way in ("out", "in") for of in ("messages", "bytes", "overhead")]
        connected = {True: "yes", False: "no"}.get(edge["connected"], "")
        rows.append([name, connected, last, *(f"{count:,}" for count in counts)])
    return rows


def _refusal_rows(seen: dict[str, Any], now: float) -> list[list[str]]:
    from fairmesh.mesh.node.claims import refused

    rows = [["site", "refuses messages of", "why", "the other end", "since", "times"]]
    for refusal in seen["refusing"]:
        since = f"{_ago(max(0.0, now - refusal['since']))} ago"
        rows.append([refusal["by"], refusal["site"], refusal["reason"], refused(refusal), since])
        rows[-1].append(str(refusal.get("times", "")))
    return rows


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
