"""The page: one sentence large enough for a wall, five answers, and what they rest on, as HTML.

`rendered` makes every section by itself, so that a server can send those that have changed. The whole page works
without its script, and a snapshot is the page without it."""

import base64
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from fairmesh.errors import counted, duration, in_bytes, listed
from fairmesh.mesh.node.life import FINISHED
from fairmesh.metrics.units import Unit, defined
from fairmesh.report import charts
from fairmesh.report.charts import Dots, Line, Node, escaped
from fairmesh.report.elements import ROWS, UNFOLDED, figure, labelled, note, pictures
from fairmesh.report.style import STYLES
from fairmesh.training.rounds_per_second import rate_in_words
from fairmesh.watch.answers import answers, long_waits, wait_in_words
from fairmesh.watch.view import Curve, Site, SiteState, View
from fairmesh.watch.view import Line as LogLine

STYLE = "\n".join(
    files(package).joinpath("page.css").read_text(encoding="utf-8") for package in ("fairmesh.report", "fairmesh.watch")
)
SCRIPT = files("fairmesh.watch").joinpath("page.js").read_text(encoding="utf-8")
_COLOURED = 6  # sites whose curves have a colour each; of more, only those that matter have
_LINES = 40  # of the log, of refusals and of votes
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'%3E"
    "%3Ccircle cx='4' cy='4' r='3.5' fill='%231961c4'/%3E%3C/svg%3E"
)
_MARKS: dict[SiteState, str] = {
    "at work": "●",
    "waits": "◐",
    "silent": "○",
    "unreachable": "✕",
    "unknown": "?",
    "ended": "✓",
    "diverged": "✕",
    "stopped": "–",
    "died": "✕",
}
_KINDS = {"run": "Simulation", "sweep": "Sweep", "node": "Node"}


def rendered(view: View) -> dict[str, str]:
    """Returns the sections of the page by their ids, from top to bottom. One that has nothing to show is empty."""
    made = {name: section(view) for name, section in _SECTIONS.items()}
    named = [(name, _HEADINGS[name]) for name, body in made.items() if body and name in _HEADINGS]
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading in named)
    return made | {"contents": f"<ul>{links}</ul>"}


def live_page(view: View, sections: Mapping[str, str], trouble: str = "", read_s_ago: float = 0.0) -> str:
    """Returns the page as a server shows it, which loads `page.css` and `page.js`. Without the script, the browser
    loads it again every ten seconds.

    Args:
        view: What was known by the last reading that has not failed.
        sections: Its sections, as `rendered` returns them.
        trouble: Why the readings after it have failed. Default: "", they have not.
        read_s_ago: How many seconds ago it was read. Default: 0.
    """
    head = '<link rel="stylesheet" href="page.css"><script type="module" src="page.js"></script>'
    head += '<noscript><meta http-equiv="refresh" content="10"></noscript>'
    age = f"{age_of(view)}, {duration(read_s_ago)} ago" if trouble else age_of(view)
    return _page(view, sections, head, age, trouble)


def failed_reading(trouble: str) -> str:
    """Returns in words that what is watched could not be read, and why."""
    return f"Reading the files fails, so this page shows what was known before. The reason: {trouble}"


def snapshot(view: View) -> str:
    """Returns the page as one file that does not change, has no script and loads nothing."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{STYLE}</style>'
    moment = time.strftime("%Y-%m-%d at %H:%M:%S UTC", time.gmtime(view.seen_at))
    return _page(view, rendered(view), head, f"As of {moment}; {age_of(view)} then. This page does not change.")


def age_of(view: View) -> str:
    """Returns how old the news is, in words."""
    return "no news yet" if view.age_s is None else f"the news was {duration(view.age_s)} old"


def _page(view: View, sections: Mapping[str, str], head: str, age: str, trouble: str = "") -> str:
    kind = _KINDS[view.kind] + (f" of {view.seen_from}" if view.seen_from else "")
    age_s = "" if view.age_s is None else f"{view.age_s:.1f}"
    alert = f">{escaped(failed_reading(trouble))}" if trouble else " hidden>"
    made = {name: f'<section id="{name}">{sections[name]}</section>' for name in _SECTIONS if name not in _TOP}
    made["sites"] = f'<div class="pair">{made["sites"]}{made.pop("network")}</div>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f'<link rel="icon" href="{_ICON}"><title>{escaped(view.title)}</title>{head}</head><body>'
        f'<div id="lost" role="alert"{alert}</div><header>'
        f'<p class="what"><span>{escaped(kind)}</span> <b>{escaped(view.title)}</b> '
        f'<span id="age" data-age="{age_s}" data-live="{int(view.live)}">{escaped(age)}</span></p>'
        f'<h1 id="now" aria-live="polite">{sections["now"]}</h1></header>'
        f'<main><section id="answers" aria-label="Answers">{sections["answers"]}</section>'
        f'<nav id="contents" aria-label="On this page">{sections["contents"]}</nav>{"".join(made.values())}</main>'
        "</body></html>\n"
    )


# The sections


def _now(view: View) -> str:
    mark = {"fine": "", "look": "▲", "act": "■"}[view.urgency]
    shown = f'<span class="urgency" aria-hidden="true">{mark}</span>' if mark else ""
    return f'<span class="now {view.urgency}">{shown}{_sentence(view, view.sentence)}</span>'


def _answers(view: View) -> str:
    found = []
    for question, answer, detail, tone in answers(view):
        more = f"<small>{_sentence(view, detail)}</small>" if detail else ""
        bar = _progress(view) if question == "Is it running?" else ""
        found.append(f'<div class="{tone}"><dt>{question}</dt><dd>{escaped(answer)}{bar}{more}</dd></div>')
    return f"<dl>{''.join(found)}</dl>"


def _progress(view: View) -> str:
    if not view.rounds:
        return ""
    done = min(view.round, view.rounds)
    return f'<progress max="{view.rounds}" value="{done}" aria-label="rounds done">{done} of {view.rounds}</progress>'


def _says(view: View) -> str:
    said = [*view.says, *(f"{site.name}: {remark}" for site in view.sites for remark in site.remarks)]
    said += [f"voted out: {listed(view.removed)}"] if view.removed else []
    return _list(view, said)


def _sites(view: View) -> str:
    order = view.order or range(len(view.sites))
    columns = [(name, [cell(view, i) for i in order]) for name, cell in _COLUMNS.items()]
    columns = [(name.replace("METRIC", view.metric.metric if view.metric else "metric"), of) for name, of in columns]
    columns = [(name, of) for name, of in columns if any(of)]
    if not view.sites:
        return ""
    rows = []
    for k, i in enumerate(order):
        look = " ".join(filter(None, ("own" if view.sites[i].own else "", "low" if i == view.worst_site else "")))
        cells = "".join(f"<td{_side(name)}{labelled(name)}>{of[k]}</td>" for name, of in columns[1:])
        rows.append(f'<tr data-key="{i}" class="{look}"><th scope="row">{columns[0][1][k]}</th>{cells}</tr>')
    header = "".join(f'<th scope="col"{_side(name)}>{escaped(name)}</th>' for name, _ in columns)
    said = []
    if view.worst_site is not None:
        said.append(f"Marked is the worst site{f' on the {view.judged_on} rows' if view.judged_on else ''}.")
    if any(site.claimed for site in view.sites):
        said.append("What is dotted below, only the site itself says.")
    return (
        _heading("sites")
        + _folded(header, rows, cards=True)
        + note(" ".join(f"{text.rstrip('.')}." for text in (*said, *view.notes)))
    )


def _network(view: View) -> str:
    if not view.sites or (view.pending and not view.edges):
        return ""
    count, waits = len(view.sites), long_waits(view)
    if view.server:
        return _heading("network") + note(f"All {count} sites talk to a server, and not to each other.")
    nodes = [
        Node(
            site.name,
            ", ".join(filter(None, (site.state, site.doing))),
            site.own,
            i == view.worst_site,
            site.state in ("silent", "unreachable", "stopped", "died"),
        )
        for i, site in enumerate(view.sites)
    ]
    if view.kind != "node":  # in a simulation no site is away from the others, also if all have stopped
        nodes = [replace(node, away=False) for node in nodes]
    arrows = [charts.Wait(wait.site, wait.awaited, duration(wait.seconds)) for wait in waits]
    broken = [edge.ends for edge in view.edges if edge.connected is False]
    edges, alive = [edge.ends for edge in view.edges], view.kind == "node" and view.state != FINISHED
    unseen = [edge.ends for edge in view.edges if alive and edge.connected is None]
    drawn = charts.network(nodes, edges, "the network of the sites", arrows, broken, unseen=unseen)
    caption = f"Who talks to whom: {counted(count, 'site')}, {counted(len(edges), 'connection')}."
    if alive and len(edges) > len(unseen):
        caption += f" Open at this site: {len(edges) - len(unseen) - len(broken)} of {len(edges) - len(unseen)}."
    return _heading("network") + figure(drawn, caption) + _list(view, [wait_in_words(view, wait) for wait in waits])


def _pictures(view: View) -> str:
    found = [*_curves(view), *_values(view), *_weights(view)]
    return _heading("pictures") + pictures(found) if found else ""


def _variants(view: View) -> str:
    if not view.variants or view.metric is None:
        return ""
    unit, rows = view.metric, []
    for variant in view.variants:
        cells = [_estimate(unit, variant.worst), _estimate(unit, variant.mean), str(variant.replicas), ""]
        if variant.diverged:
            cells[-1] = f'<span class="worse">{variant.diverged} of {variant.replicas}</span>'
        inside = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(
            f'<tr class="{"own" if variant.shown else ""}"><th scope="row">{escaped(variant.name)}</th>{inside}</tr>'
        )
    names = ("variant", f"worst {unit.metric}", "mean", "replicas", "diverged")
    header = "".join(f'<th scope="col">{escaped(name)}</th>' for name in names)
    return _heading("variants") + _folded(header, rows) + note("All else on this page is about the bold one.")


def _traffic(view: View) -> str:
    traffic, rows = view.traffic, []
    if traffic is not None:
        sizes = {
            "sent on the wire, with all overhead": traffic.on_the_wire,
            f"model messages sent by {traffic.whose}": traffic.sent,
            "model messages received": traffic.received,
            "sent by all sites together": traffic.total,
        }
        rows = [(name, in_bytes(size)) for name, size in sizes.items() if size is not None]
        rows += [("model messages per second, recently", in_bytes(traffic.per_s))] if traffic.per_s is not None else []
    rows += [("speed", rate_in_words(view.rounds_per_s))] if view.rounds_per_s else []
    made = (
        f"<dl>{''.join(f'<dt>{escaped(name)}</dt><dd>{escaped(text)}</dd>' for name, text in rows)}</dl>"
        if rows
        else ""
    )
    edges = []
    for edge in view.edges:
        if edge.connected is None and edge.bytes_out is None:
            continue
        ends = " – ".join(escaped(view.sites[i].name) for i in edge.ends)
        is_open = "" if edge.connected is None else "yes" if edge.connected else '<span class="worse">no</span>'
        out, back = ("" if size is None else in_bytes(size) for size in (edge.bytes_out, edge.bytes_in))
        edges.append(f'<tr><th scope="row">{ends}</th><td>{is_open}</td><td>{out}</td><td>{back}</td></tr>')
    header = "".join(f'<th scope="col">{name}</th>' for name in ("connection", "connected", "sent", "received"))
    made += _folded(header, edges) if edges else ""
    return _heading("traffic") + made if made else ""


def _privacy(view: View) -> str:
    privacy = view.privacy
    if privacy is None:
        return ""
    meter = spent = ""
    if privacy.epsilon is not None and defined(privacy.epsilon) and privacy.budget > 0:
        spent = f"{privacy.epsilon:.3g} of {privacy.budget:g}"
        share = min(1.0, max(0.0, privacy.epsilon / privacy.budget))
        meter = f'<meter min="0" max="1" high="0.9" value="{share:.3f}" aria-label="epsilon {spent}"></meter>'
    said = f"epsilon {spent or 'not known yet'} is spent, at delta {privacy.delta:g}"
    said += f", per {privacy.unit}" if privacy.unit else ""
    return _heading("privacy") + f"<p>{meter} {_sentence(view, said)}.</p>" + _list(view, privacy.sentences)


def _refusals(view: View) -> str:
    made = ""
    if view.refusals:
        rows = []
        for refusal in view.refusals:
            by, whose = (escaped(view.sites[i].name) for i in (refusal.by, refusal.site))
            times = "" if refusal.times is None else f"{refusal.times:,}"
            words = (
                f'<td class="words">“{escaped(refusal.reason)}”</td><td class="words">{escaped(refusal.other_end)}</td>'
            )
            rows.append(
                f'<tr><th scope="row">{by}</th><td class="text">{whose}</td>{words}<td>{duration(refusal.seconds)}</td>'
                f"<td>{times}</td></tr>"
            )
        names = ("site", "refuses messages of", "why, in its words", "the other end", "for", "times")
        header = "".join(f'<th scope="col"{_side(name)}>{name}</th>' for name in names)
        made += _folded(header, rows)
    if view.votes:
        votes = [f"{vote.decision}: {listed(vote.voters, 10)}" for vote in view.votes[:_LINES]]
        made += "<h3>Votes</h3>" + _list(view, votes)
    if view.refused:
        made += f"<h3>What this node's log says of refusals, newest first</h3>{_lines(view.refused)}"
    return _heading("refusals") + made if made else ""


def _log(view: View) -> str:
    return _heading("log") + _lines(view.log) if view.log else ""


def _lines(lines: Sequence[LogLine]) -> str:
    shown = [
        f'<li class="{escaped(line.level)}"><time>{escaped(line.time.replace("T", " ").removesuffix("Z"))}</time> '
        f"<b>{escaped(line.level)}</b> {escaped(line.text)}</li>"
        for line in lines[-_LINES:]
    ]
    return f'<ol class="log">{"".join(reversed(shown))}</ol>'


_SECTIONS: dict[str, Callable[[View], str]] = {
    "now": _now,
    "answers": _answers,
    "says": _says,
    "sites": _sites,
    "network": _network,
    "pictures": _pictures,
    "variants": _variants,
    "traffic": _traffic,
    "privacy": _privacy,
    "refusals": _refusals,
    "log": _log,
}
_TOP = ("now", "answers")
_HEADINGS = {
    "sites": "Sites",
    "network": "Network",
    "pictures": "Curves and weights",
    "variants": "Variants",
    "traffic": "Bytes and speed",
    "privacy": "Privacy",
    "refusals": "Refusals and votes",
    "log": "Log, newest first",
}


# Columns of the table of sites


def _name_of(view: View, i: int) -> str:
    site = view.sites[i]
    said = ", ".join(["this site"] * site.own + ["worst"] * (i == view.worst_site))
    return escaped(site.name) + (f" <small>{said}</small>" if said else "")


def _state_of(view: View, i: int) -> str:
    site = view.sites[i]
    waits = [
        f"for {view.sites[wait.awaited].name} ({duration(wait.seconds)})" for wait in long_waits(view) if wait.site == i
    ]
    doing = site.doing if site.doing != site.state else ""
    more = "; ".join(filter(None, [doing, f"waits {', '.join(waits[:3])}" if waits else ""]))
    mark = f'<span aria-hidden="true">{_MARKS[site.state]}</span>'
    small = f"<small>{_claim(view, i, 'doing', escaped(more))}</small>" if more else ""
    return f'<span class="state {site.state.replace(" ", "-")}">{mark} {escaped(site.state)}</span>{small}'


def _round_of(view: View, i: int) -> str:
    site = view.sites[i]
    return "" if site.round is None else _claim(view, i, "round", f"{site.round:,}")


def _heard_of(view: View, i: int) -> str:
    heard = view.sites[i].heard_s_ago
    return "" if heard is None or view.sites[i].own else f"{duration(heard)} ago"


def _value_of(view: View, i: int) -> str:
    site = view.sites[i]
    if site.value is None or view.metric is None:
        return ""
    return _claim(view, i, "value", _estimate(view.metric, site.value))


def _compared(name: str, against: str) -> Callable[[View, int], str]:
    def cell(view: View, i: int) -> str:
        site: Site = view.sites[i]
        value = getattr(site, name)
        shown = "" if value is None or view.metric is None else view.metric.shown(value.value)
        verdicts = [verdict for verdict in site.verdicts if verdict.against == against]
        for verdict in verdicts[:1]:
            mark = {"better": "▲", "worse": "▼", "unclear": "≈"}[verdict.verdict]
            shown += f'<small class="{verdict.verdict}">{mark} {escaped(verdict.text)}</small>'
        return _claim(view, i, name, shown)

    return cell


def _share(name: str) -> Callable[[View, int], str]:
    def cell(view: View, i: int) -> str:
        value = getattr(view.sites[i], name)
        return _claim(view, i, name, f"{100 * value:.3g} %") if defined(value) else ""

    return cell


def _sent_of(view: View, i: int) -> str:
    sent = view.sites[i].bytes_sent
    return "" if sent is None else _claim(view, i, "bytes_sent", in_bytes(sent))


def _epsilon_of(view: View, i: int) -> str:
    epsilon = view.sites[i].epsilon
    return _claim(view, i, "epsilon", f"{epsilon:.3g}") if defined(epsilon) else ""


def _uses_of(view: View, i: int) -> str:
    return escaped(view.sites[i].uses)


_COLUMNS: dict[str, Callable[[View, int], str]] = {
    "site": _name_of,
    "state": _state_of,
    "heard": _heard_of,
    "round": _round_of,
    "METRIC": _value_of,
    "alone": _compared("alone", "alone"),
    "fixed weights": _compared("fixed", "fixed weights"),
    "should use": _uses_of,
    "weight λ": _share("weight"),
    "prior": _share("prior"),
    "sent": _sent_of,
    "epsilon": _epsilon_of,
}
_WORDS = ("site", "state", "should use", "refuses messages of", "why, in its words", "the other end")


def _side(name: str) -> str:
    return ' class="text"' if name in _WORDS else ""


def _claim(view: View, i: int, field: str, shown: str) -> str:
    if not shown or field not in view.sites[i].claimed:
        return shown
    return f'<span class="claim">{shown}</span>'


def _estimate(unit: Unit, estimate: Any) -> str:
    if estimate is None:
        return ""
    interval = unit.interval(estimate.interval).removesuffix(" %")
    return escaped(unit.shown(estimate.value)) + (f"<small>{escaped(interval)}</small>" if interval else "")


# The pictures


def _curves(view: View) -> Iterator[str]:
    unit, curves = view.metric, view.curves
    if unit is None:
        return
    x, bands = curves.rounds, ""
    if view.replicas > 1:
        bands = f"Lines are means over {view.replicas} replicas, and bands span them."

    def line(label: str, curve: Curve, style: int, **look: bool) -> Line:
        values, low, high = (_scaled(unit, of) for of in (curve.values, curve.low, curve.high))
        return Line(label, x, values, low, high, style, **look)

    if view.variants:
        some = view.variants[: len(charts.COLOURS)]
        lines = [
            Line(variant.name, variant.curves.rounds, _scaled(unit, variant.curves.worst.values), style=k)
            for k, variant in enumerate(some)
        ]
        more = f", the first {len(some)} of {len(view.variants)} variants" if len(some) < len(view.variants) else ""
        yield figure(charts.curves(lines, "rounds", unit.label, "variants"), f"Worst site of each variant{more}.")
    if not x:
        return
    both = [line("mean over sites", curves.mean, 1), line("worst site", curves.worst, 0)]
    another = " In each replica, another site may be the worst." if bands else ""
    caption = f"Worst site and mean over sites. {bands}{another}"
    yield figure(charts.curves(both, "rounds", unit.label, "worst site and mean over rounds"), caption)
    if not curves.sites:
        return
    chosen = _coloured(view)
    lines = [
        line(site.name, curve, chosen.index(i) if i in chosen else 0, faint=i not in chosen)
        for i, (site, curve) in enumerate(zip(view.sites, curves.sites))
    ]
    lines.sort(key=lambda line: not line.faint)
    drawn = charts.curves(lines, "rounds", unit.label, "every site over rounds", "each other site")
    said = "" if len(chosen) == len(view.sites) else f" Coloured: {listed(view.sites[i].name for i in chosen)}."
    yield figure(drawn, f"Every site. {said}{f' {bands}' if any(curve.low for curve in curves.sites) else ''}")


def _coloured(view: View) -> list[int]:
    """Returns the sites that matter most: all if they are few, else the worst, this one, and the first in the order."""
    order = list(view.order or range(len(view.sites)))
    if len(order) <= _COLOURED:
        return sorted(order)
    own = [i for i, site in enumerate(view.sites) if site.own]
    worst = [] if view.worst_site is None else [view.worst_site]
    return list(dict.fromkeys([*worst, *own, *order]))[:4]


def _scaled(unit: Unit, values: Sequence[float | None]) -> list[float | None]:
    return [unit.scale * value if defined(value) else None for value in values]  # type: ignore[operator]


def _values(view: View) -> Iterator[str]:
    unit = view.metric
    if unit is None or not any(site.alone or site.fixed or (site.value and site.value.interval) for site in view.sites):
        return
    order = list(view.order or range(len(view.sites)))[:ROWS]
    series = []
    this = "its model" if any(site.uses for site in view.sites) else "this run"
    for label, name in ((this, "value"), ("alone", "alone"), ("fixed weights", "fixed")):
        found = [getattr(view.sites[i], name) for i in order]
        if any(found):
            values = _scaled(unit, [one and one.value for one in found])
            intervals = [one and one.interval and _scaled(unit, one.interval) for one in found]
            series.append(Dots(label, values, intervals, style=STYLES[label]))
    drawn = charts.dots([view.sites[i].name for i in order], series, unit.label, "every site, next to other models")
    some = f" The first {len(order)} sites of the table." if len(order) < len(view.sites) else ""
    yield figure(drawn, f"Each site's {unit.metric}; lines are 95 % intervals.{some}")


def _weights(view: View) -> Iterator[str]:
    order = list(view.order or range(len(view.sites)))
    known = [i for i in order if defined(view.sites[i].weight)]
    if not known or not any(defined(view.sites[i].prior) for i in known):
        return

    def moved(i: int) -> float:
        weight, prior = view.sites[i].weight, view.sites[i].prior
        return abs(weight - prior) if weight is not None and prior is not None else 0.0

    shown = known if len(known) <= ROWS else sorted(sorted(known, key=moved, reverse=True)[:ROWS], key=order.index)
    names, weights, priors = zip(*((site.name, site.weight, site.prior) for site in (view.sites[i] for i in shown)))
    drawn = charts.weights(names, weights, priors, "weight of every site next to its prior")
    some = f" The {len(shown)} sites whose weights differ most." if len(shown) < len(known) else ""
    said = "How much each site counts in training (weight λ). Outlined is its prior, by which it counts with fixed"
    said += " weights: its share of all training rows, unless the experiment names another."
    yield figure(drawn, said + some)


# Elements


def _sentence(view: View, text: str) -> str:
    """Returns a text that begins with a capital, unless with a site's name."""
    if not text[1:2].isupper() and not any(text.startswith(site.name) for site in view.sites):
        text = text[:1].upper() + text[1:]
    return escaped(text)


def _heading(name: str) -> str:
    return f"<h2>{_HEADINGS[name]}</h2>"


def _list(view: View, said: Iterable[str]) -> str:
    texts = list(said)
    some = [*texts[:_LINES], f"... and {len(texts) - _LINES} more"] if len(texts) > _LINES else texts
    return f'<ul class="sites">{"".join(f"<li>{_sentence(view, text)}</li>" for text in some)}</ul>' if some else ""


def _folded(header: str, rows: Sequence[str], cards: bool = False) -> str:
    kind = ' class="cards"' if cards else ""

    def part(some: Sequence[str]) -> str:
        inside = f"<table{kind}><thead><tr>{header}</tr></thead><tbody>{''.join(some)}</tbody></table>"
        return f'<div class="scroll" role="region" aria-label="table" tabindex="0">{inside}</div>'

    if len(rows) <= ROWS:
        return part(rows)
    more = f"<details><summary>{len(rows) - UNFOLDED} more rows</summary>{part(rows[UNFOLDED:])}</details>"
    return part(rows[:UNFOLDED]) + more
