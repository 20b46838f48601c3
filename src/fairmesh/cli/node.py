"""`fairmesh node` and `fairmesh status`: run one site of a mesh, and show its status and that of the others."""

import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fairmesh.cli.terminal import Json, Track, print_json, readable_toml, say, show_rows, show_table
from fairmesh.errors import BadInput

_SILENT_S, _SILENT_S_PER_SITE = 60.0, 0.2  # without a report; a site reports every 0.05 s per site, or every second
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(text: str, option: str) -> float:
    """Returns '90', '90s', '30m', '2h' or '1d' in seconds."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not parts:
        raise BadInput(f"{option} {text!r}: write a time such as 90s, 30m, 2h or 1d")
    return float(parts[1]) * _UNITS[parts[2] or "s"]


def node(
    site: Annotated[Path, typer.Argument(help="The site's file, site.toml.", callback=readable_toml)],
    patience: Annotated[
        str | None, typer.Option(help="Stop after waiting this long for a neighbour, such as 30m or 2h.")
    ] = None,
    prometheus: Annotated[int | None, typer.Option(help="A port of 127.0.0.1 for Prometheus metrics.")] = None,
    track: Track = [],  # noqa: B006
    json_: Json = False,
) -> None:
    """Run a site's node until the mesh has finished.

    It runs unattended. Started again, it continues where it was."""
    from fairmesh.mesh.node.state_lock import LEFT_S, locked
    from fairmesh.mesh.roster import SiteFile

    waits = None if patience is None else seconds_of(patience, "--patience")
    with locked(SiteFile.read(site).state, LEFT_S) as lock:  # before imports, so that `status` sees that it starts
        from fairmesh.mesh.node.running import run_node
        from fairmesh.trackers import trackers_of

        folder = run_node(
            site,
            patience_s=waits,
            monitor_port=prometheus,
            trackers=trackers_of(track),
            lock=lock,
        )
    from fairmesh.mesh.node.versus_local import sentences
    from fairmesh.report.runs import Run, caption_of, rows_of

    finished = Run.from_folder(folder)
    if json_:
        print_json(finished.summary | {"folder": str(folder)})
        return
    show_rows(rows_of([finished]))
    if caption := caption_of([finished]):
        say(caption)
    for sentence in (*finished.evidence.get("notes", ()), *sentences(finished.summary)):
        say(sentence)
    say(f"the result is the same at every site: {folder}; for a page with plots: fairmesh report {folder}")


def status(
    site: Annotated[Path, typer.Argument(help="The site's file, site.toml.", callback=readable_toml)],
    json_: Json = False,
) -> None:
    """Show the status of a mesh, as one node sees it.

    For each site: its round, metric and lambda, whom it waits for, and when it reported. For each neighbour: the
    traffic."""
    from fairmesh.mesh import clocks
    from fairmesh.mesh.node import claims
    from fairmesh.mesh.node.watching import STARTING, live_status
    from fairmesh.mesh.roster import SiteFile

    seen = live_status(SiteFile.read(site).state)
    if json_:
        print_json(seen)
        return
    now = time.time()
    age = now - seen["time"]
    if "sites" not in seen:
        say(f"{seen['activity']}, since {_ago(age)}")
        return
    metric = seen["metric_name"]
    show_table(_site_rows(seen, metric), f"mesh {seen['mesh']}, seen from {seen['site']}")
    if weights := seen.get("lambda"):
        done = weights["round"]
        say(f"lambda: each site's share of the weights in round {done}, the last one that all sites have measured")
    show_table(_edge_rows(seen, now), "edges of this node")
    if seen["refusing"]:
        show_table(_refusal_rows(seen, now), "refused messages")
    for sentence in (*claims.sentences(seen).values(), *map(claims.diverged, seen.get("diverged", ()))):
        say(sentence)
    if seen["worst"] is not None:
        own = "" if seen["metric"] is None else f", here {seen['metric']:.4g}"
        say(f"{metric} in recent rounds: worst site {seen['worst']:.4g}, mean {seen['mean']:.4g}{own}")
    first, *others = seen.get("waiting_chain", [seen["site"]])
    if others:
        said = ", which waits for ".join(others)
        say(f"{first} waits for {said}" + (f": look at {others[-1]} first" if len(others) > 1 else ""))
    others = {name: version for name, version in seen.get("versions", {}).items() if version != seen["version"]}
    if others:
        said = ", ".join(f"{version} at {name}" for name, version in others.items())
        say(f"versions of fairmesh differ, and are compatible: {seen['version']} here, {said}")
    for sentence in clocks.advice(seen.get("clocks", {}), len(seen["edges"])):
        say(sentence)
    for name, key in seen.get("keys", {}).items():
        if key["unconfirmed"]:
            say(
                f"{name} has a new key, {key['unconfirmed']}, instead of {key['fingerprint']}: let {name} read it out, "
                f'then run: fairmesh mesh trust {site} {name} "{key["unconfirmed"]}"'
            )
    for name, reasons in seen.get("ignored", {}).items():
        say(f"{name}: {'; '.join(reasons)}")
    for name, reasons in seen.get("unusual", {}).items():
        said = "this site's data looks" if name == seen["site"] else f"the data of {name} looks"
        say(f"{said} different from that of the other sites: {'; '.join(reasons)}")
    for name in seen.get("unaccepted", ()):
        say(f"this node waits; if the data of {name} is right, accept it: fairmesh mesh accept {site} {name}")
    for name, heavy in seen.get("heavy", {}).items():
        say(
            f"{name} has {heavy['weight']:.0%} of the weight since round {heavy['since']}, and {heavy['prior']:.0%} "
            "before training: it is hard to learn, or its data is broken; ask it to check its data"
        )
    for decision, voters in seen["votes"].items():
        say(f"votes to {decision}: {', '.join(sorted(voters))}")
    if sentence := _expected_end(seen, age):
        say(sentence)
    more = ""
    if not seen["running"] and seen["activity"] != "finished":
        more = f"; look at log.jsonl in its state folder, and start it again: fairmesh node {site}"
    elif seen["running"] and age >= 10 and seen["activity"] != STARTING:
        more = f"; its process runs, but has written nothing for {_ago(age)}: does it hang?"
    say(f"{seen['activity']}, round {seen['round']} of {seen['rounds']}, as of {_ago(age)} ago{more}")


def _expected_end(seen: dict[str, Any], age: float) -> str | None:
    """Returns when the last round is expected, or for whom the run waits."""
    if not seen["activity"].startswith(("training", "local training")):
        return None
    if seen["paused_for"]:
        return f"paused, waiting for {', which waits for '.join(seen['paused_for'])}"
    if seen["seconds_left"] is None:
        return None
    left = max(0.0, seen["seconds_left"] - age)
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + left))
    return f"expected end: in {_ago(left)}, {moment}, at {seen['rounds_per_s']:.3g} rounds per second"


def _site_rows(seen: dict[str, Any], metric: str) -> list[list[str]]:
    rows = [["site", "round", "is", metric, "in round", "prior", "lambda", "waits for", "sent", "reported"]]
    shares = (seen.get("lambda") or {"sites": {}})["sites"]
    for name, reported in seen["sites"].items():
        if not reported:
            rows.append([name, "", "not heard of yet", "", "", "", "", "", "", ""])
            continue
        silent = reported["heard_s_ago"] > _SILENT_S + _SILENT_S_PER_SITE * len(seen["sites"])
        age = reported["heard_s_ago"]  # by this site's clock; a difference of the other's own moments is exact too
        ended = seen["activity"] == "finished"  # then all sites have their result
        awaited = {} if ended else reported["waiting_for"]
        waits = ", ".join(f"{who} ({_ago(max(0.0, reported['time'] - t + age))})" for who, t in awaited.items())
        rows.append(
            [
                name,
                str(reported["round"]),
                "finished" if ended else f"silent; was {reported['activity']}" if silent else reported["activity"],
                "" if reported["metric"] is None else f"{reported['metric']:.4g}",
                "" if reported["metric_round"] is None else str(reported["metric_round"]),
                f"{seen['prior'][name]:.3g}" if name in seen["prior"] else "",
                f"{shares[name]:.4g}" if name in shares else "",
                waits,
                f"{reported['bytes_out']:,} B",
                f"{_ago(age)} ago",
            ]
        )
    return rows


def _edge_rows(seen: dict[str, Any], now: float) -> list[list[str]]:
    rows = [["neighbour", "connected", "last seen", "messages out", "bytes out", "messages in", "bytes in", "overhead"]]
    for name, edge in seen["edges"].items():
        last = "never" if edge["last_seen"] is None else f"{_ago(now - edge['last_seen'])} ago"
        counts = [edge[key] for key in ("messages_out", "bytes_out", "messages_in", "bytes_in")]
        counts.append(edge["overhead_out"] + edge["overhead_in"])
        rows.append([name, "yes" if edge["connected"] else "no", last, *(f"{count:,}" for count in counts)])
    return rows


def _refusal_rows(seen: dict[str, Any], now: float) -> list[list[str]]:
    rows = [["site", "refuses messages of", "why", "since", "times"]]
    for refusal in seen["refusing"]:
        since = f"{_ago(max(0.0, now - refusal['since']))} ago"
        rows.append([refusal["by"], refusal["site"], refusal["reason"], since, str(refusal.get("times", ""))])
    return rows


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
