"""Charts as SVG text, with their legend: curves, rows of dots, weights and networks, for pages.

They need no package and take a millisecond, so that a live page can draw them again with every news. Whoever wrote a
name, it is escaped here. Numbers that are no numbers, infinite or beyond any axis are not drawn. Colours come from the
custom properties of page.css; shapes and dashes tell the same without colours. There are no ids, no style attributes
and no scripts, so charts can be repeated on a page and shown under the strictest policy.
"""

import html
import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fairmesh.errors import printable
from fairmesh.report.style import COLOURS

_WIDTH, _FONT, _SMALL = 420.0, 12.0, 9.0  # of a drawing, which is stretched to the width of its place
_LARGEST = 1e100  # of a number that is drawn; the difference of any two is finite
_POINTS, _FAINT_POINTS = 300, 80  # of a curve; more than that many are thinned
_ROWS = 24  # of a chart that has room for everything
_NAMED = 60  # sites of a network, all with their names

# Of a size from -1 to 1, in the order of `style.MARKERS`.
_SHAPES = (
    "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0-2 0z",
    "M-.9-.9H.9V.9H-.9z",
    "M0-1.3L1.2 0L0 1.3L-1.2 0z",
    "M0-1.1L1.2 1H-1.2z",
    "M0 1.1L1.2-1H-1.2z",
    "M-.4-1.2H.4V-.4H1.2V.4H.4V1.2H-.4V.4H-1.2V-.4H-.4z",
    "M0-1.4L.4-.4L1.4-.4L.6.3L.9 1.3L0 .7L-.9 1.3L-.6.3L-1.4-.4L-.4-.4z",
    "M-1.1-.6L-.6-1.1L0-.5L.6-1.1L1.1-.6L.5 0L1.1.6L.6 1.1L0 .5L-.6 1.1L-1.1.6L-.5 0z",
)


@dataclass(frozen=True)
class Line:
    """A curve.

    Args:
        label: Its entry in the legend; the same label twice is one entry.
        x, y: Its points. Where a number is not defined, the line has a gap.
        low, high: The ends of its band at each point. Default: no band.
        style: The number of its colour and marker. Default: 0.
        dashed: Whether it is dashed. Default: False.
        faint: Whether it is thin and grey, as one of many. Its name then is no entry of the legend. Default: False.
        step: Whether it keeps a value until the next one. Default: False.
    """

    label: str
    x: Sequence[Any]
    y: Sequence[Any]
    low: Sequence[Any] = ()
    high: Sequence[Any] = ()
    style: int = 0
    dashed: bool = False
    faint: bool = False
    step: bool = False


@dataclass(frozen=True)
class Dots:
    """A point in each row of a chart.

    Args:
        label: Its entry in the legend.
        values: One number per row, or None.
        intervals: The two ends of each, or None. Default: none is known.
        origins: From where an arrow leads to each point. Default: no arrows.
        style: The number of its colour and marker. Default: 0.
    """

    label: str
    values: Sequence[Any]
    intervals: Sequence[Any] = ()
    origins: Sequence[Any] = ()
    style: int = 0


@dataclass(frozen=True)
class Node:
    """A site of a network.

    Args:
        name: Its name.
        remark: What is said of it, for those who point at it. Default: "".
        own: Whether the reader is there. Default: False.
        worst: Whether its value is the worst one. Default: False.
        away: Whether it cannot be reached, or is not heard of. Default: False.
        shade: How dark it is, from 0 to 1; None for the plain colour. Default: None.
    """

    name: str
    remark: str = ""
    own: bool = False
    worst: bool = False
    away: bool = False
    shade: float | None = None


@dataclass(frozen=True)
class Wait:
    """Who waits for whom, by their numbers, and how long, in words."""

    who: int
    whom: int
    since: str = ""


_Point = tuple[float, float | None, float | None, float | None]  # x, y, and the ends of the band


def curves(lines: Sequence[Line], x_label: str, y_label: str, title: str, faint: str = "") -> str:
    """Returns a chart of curves with their bands.

    Args:
        lines: The curves; those at the end are drawn on top.
        x_label, y_label: What the axes measure, with their units.
        title: What the chart shows, for those who do not see it.
        faint: What all faint lines are, in the legend. Default: no entry.
    """
    known = [(line, _thinned(_points(line), _FAINT_POINTS if line.faint else _POINTS)) for line in lines]
    across = _span(p[0] for _, points in known for p in points if p[1] is not None)
    upwards = _span(number for _, points in known for p in points for number in p[1:])
    if not across or not upwards:
        return _nothing(title, y_label)
    plane = _Plane(_padded(*across, 0.0), _padded(*upwards, 0.06))
    bands = [band for line, points in known if not line.faint for band in _bands(line, points, plane)]
    drawn = [part for line, points in known for part in _curve(line, points, plane)]
    parts = [*plane.frame(x_label, y_label), *bands, *drawn]
    return _chart(title, plane.height, parts, _curve_entries(lines, faint))


def _curve_entries(lines: Sequence[Line], faint: str) -> list[tuple[str, str]]:
    entries = [(_line_key(line), line.label) for line in lines if not line.faint]
    if faint and any(line.faint for line in lines):
        entries.append((_path("faint", [(1, 6), (27, 6)]), faint))
    return entries if len(entries) > 1 else []


def _curve(line: Line, points: Sequence[_Point], plane: "_Plane") -> list[str]:
    look = "faint" if line.faint else f"line {_colour(line.style)}{' dashed' if line.dashed else ''}"
    drawn = [f"<g><title>{escaped(line.label)}</title>"]
    for run in _unbroken(points, 1):
        at = [plane.place(p[0], p[1]) for p in run]
        if line.step:
            at = [corner for a, b in zip(at, [*at[1:], at[-1]]) for corner in (a, (b[0], a[1]))]
        drawn.append(_path(look, at if len(at) > 1 else [at[0], (at[0][0] + 1, at[0][1])]))
        if len(run) == 1 and not line.faint:
            drawn.append(_mark(line.style, *at[0]))
    if not line.faint and not line.dashed and not line.step:
        seen = [(x, y) for x, y, *_ in points if y is not None]
        many = max(1, len(seen) // 6)
        drawn += [_mark(line.style, *plane.place(x, y)) for x, y in seen[line.style % many :: many]]
    return [*drawn, "</g>"]


def _bands(line: Line, points: Sequence[_Point], plane: "_Plane") -> Iterator[str]:
    for run in _unbroken(_unbroken_only(points, 2), 3):
        edge = [plane.place(p[0], p[2]) for p in run] + [plane.place(p[0], p[3]) for p in reversed(run)]
        yield _path(f"band {_colour(line.style)}", edge, closed=True)


def dots(names: Sequence[str], series: Sequence[Dots], axis_label: str, title: str) -> str:
    """Returns a chart with a row per name, and a point with its interval in it for each series.

    Args:
        names: What the rows are, from top to bottom.
        series: The points.
        axis_label: What is measured, with its unit.
        title: What the chart shows, for those who do not see it.
    """
    numbers = [_number(value) for one in series for value in (*one.values, *one.origins)]
    span = _span([*numbers, *(end for one in series for ends in one.intervals for end in _interval(ends) or ())])
    if not names or not span:
        return _nothing(title, axis_label)
    low, high = _padded(*span, 0.04)
    rows = _Rows(names, 8.0 + max(16.0 if len(names) <= _ROWS else 12.0, 9.0 * len(series)), low, high)
    parts = rows.frame(axis_label)
    for k, one in enumerate(series):
        shift = rows.row * 0.62 * ((k + 0.5) / len(series) - 0.5)
        colour = _colour(one.style)
        for i, value in enumerate(map(_number, one.values[: len(names)])):
            y = rows.middle(i) + shift
            if ends := _interval(_at(one.intervals, i)):
                parts.append(_path(f"span {colour}", [(rows.to_x(end), y) for end in ends]))
            if value is None:
                continue
            x, origin = rows.to_x(value), _number(_at(one.origins, i))
            if origin is not None:
                start = rows.to_x(origin)
                parts.append(_path("tick", [(start, y - 5), (start, y + 5)]))
                if abs(x - start) > 8:  # longer than its head
                    parts.append(_arrow(f"arrow {colour}", (start, y), (x - math.copysign(4, x - start), y)))
            parts.append(_mark(one.style, x, y, hollow=one.style > 0))
    entries = [(_mark(one.style, 14, 6, hollow=one.style > 0), one.label) for one in series]
    return _chart(title, rows.height, parts, entries if len(entries) > 1 else [])


def weights(names: Sequence[str], shares: Sequence[Any], priors: Sequence[Any], title: str) -> str:
    """Returns a chart with two bars per site: how much it counts, and the share that it would have anyway.

    Args:
        names: The sites, from top to bottom.
        shares: The weight of each, from 0 to 1, or None.
        priors: What each is compared with, from 0 to 1, or None.
        title: What the chart shows, for those who do not see it.
    """
    values, origins = ([_number(_at(of, i)) for i in range(len(names))] for of in (shares, priors))
    span = _span(value for value in (*values, *origins))
    if not names or not span:
        return _nothing(title, "weight")
    rows = _Rows(names, 27.0 if len(names) <= _ROWS else 17.0, 0.0, 100 * max(span[1], 1e-3) * 1.02, 84.0)
    parts, thick = rows.frame("share, %"), rows.row * 0.33
    for i, (value, origin) in enumerate(zip(values, origins)):
        y = rows.middle(i)
        for bar, at, look in ((origin, y - thick, "bar prior"), (value, y, "bar c0")):
            if bar is not None:
                end = max(rows.left, rows.to_x(100 * bar))
                parts.append(
                    _path(look, [(rows.left, at), (end, at), (end, at + thick), (rows.left, at + thick)], True)
                )
        said = " → ".join(_percent(one) for one in (origin, value) if one is not None)
        parts.append(_text(_WIDTH, y + 4, said, "end", "number"))
    entries = [
        (_path("bar prior", [(3, 1), (25, 1), (25, 11), (3, 11)], closed=True), "prior"),
        (_path("bar c0", [(3, 1), (25, 1), (25, 11), (3, 11)], closed=True), "weight λ"),
    ]
    return _chart(title, rows.height, parts, entries)


def network(
    nodes: Sequence[Node],
    edges: Iterable[Sequence[int]],
    title: str,
    waits: Sequence[Wait] = (),
    broken: Iterable[Sequence[int]] = (),
    shades: str = "",
    unseen: Iterable[Sequence[int]] = (),
) -> str:
    """Returns a chart of who talks to whom, with the sites on a circle, and of who waits for whom.

    Args:
        nodes: The sites.
        edges: Pairs of their numbers.
        title: What the chart shows, for those who do not see it.
        waits: Who waits for whom. Default: ().
        broken: Those of the edges that have no connection now. Default: ().
        shades: What the shades of the sites are, in the legend. Default: no entry.
        unseen: Those of the edges of which nobody here sees whether they have a connection. Default: ().
    """
    count = len(nodes)
    if not count:
        return _nothing(title, "sites")
    radius, size, height, flat = _circle(count)
    turns, middle = [2 * math.pi * i / count for i in range(count)], height / 2
    at = [(_WIDTH / 2 + radius * math.sin(a), middle - radius * math.cos(a)) for a in turns]
    drawn, without, unknown = (_pairs(those, count) for those in (edges, broken, unseen))
    sparse = " many" if len(drawn) > 300 else ""
    parts = [_path(f"edge{sparse}", [at[i], at[j]]) for i, j in sorted(drawn - without - unknown)]
    parts += [_path(f"edge unseen{sparse}", [at[i], at[j]]) for i, j in sorted(unknown)]
    parts += [_path("edge broken", [at[i], at[j]]) for i, j in sorted(without)]
    arrows = [wait for wait in waits if _pairs([(wait.who, wait.whom)], count)]
    parts += [_waiting(wait, nodes, at, size + 1) for wait in arrows]
    parts += [_node(node, *place, size) for node, place in zip(nodes, at)]
    parts += [_name(nodes[i].name, turns[i], at[i], size, flat and count > 1) for i in _named(nodes, arrows)]
    if flat and len(arrows) <= 6:
        parts += [_since(wait.since, at[wait.who], at[wait.whom]) for wait in arrows if wait.since]
    return _chart(title, height, parts, _network_entries(nodes, bool(arrows), bool(without), bool(unknown), shades))


def _circle(count: int) -> tuple[float, float, float, bool]:
    """Returns the radius of a circle of so many sites, their size, the chart's height, and whether names lie flat."""
    if count <= _ROWS:
        return 112.0 if count > 1 else 0.0, 9.0, 320.0, True
    return (120.0, 4.0, 420.0, False) if count <= _NAMED else (160.0, 2.4, 420.0, False)


def _named(nodes: Sequence[Node], waits: Sequence[Wait]) -> list[int]:
    """Returns the sites whose names are shown: all, or of many those that a reader looks for."""
    every = len(nodes) <= _NAMED
    concerned = {i for i, node in enumerate(nodes) if every or node.own or node.worst or node.away}
    return sorted(concerned.union(*((wait.who, wait.whom) for wait in waits)))


def _pairs(edges: Iterable[Sequence[int]], count: int) -> set[tuple[int, int]]:
    """Returns each edge between two of so many sites once, in either direction."""
    return {(min(e), max(e)) for e in edges if len(e) == 2 and e[0] != e[1] and all(0 <= i < count for i in e)}


def _waiting(wait: Wait, nodes: Sequence[Node], at: Sequence[tuple[float, float]], gap: float) -> str:
    who, whom = nodes[wait.who].name, nodes[wait.whom].name
    text = f"{who} has waited for {whom} for {wait.since}" if wait.since else f"{who} waits for {whom}"
    return f"<g><title>{escaped(text)}</title>{_bent(at[wait.who], at[wait.whom], gap)}</g>"


def _network_entries(
    nodes: Sequence[Node], waiting: bool, broken: bool, unseen: bool, shades: str
) -> list[tuple[str, str]]:
    kinds = {
        "this site": Node("", own=True),
        "worst site": Node("", worst=True),
        "cannot be reached": Node("", away=True),
    }
    found = [any(node.own for node in nodes), any(node.worst for node in nodes), any(node.away for node in nodes)]
    entries = [(_node(node, 14, 6, 4.5), text) for (text, node), has in zip(kinds.items(), found) if has]
    if waiting:
        entries.append((_arrow("wait", (1, 6), (26, 6)), "waits for"))
    if broken:
        entries.append((_path("edge broken", [(1, 6), (27, 6)]), "not connected"))
    if unseen:
        entries.append((_path("edge unseen", [(1, 6), (27, 6)]), "not seen from here"))
    if shades and any(node.shade is not None for node in nodes):
        ramp = "".join(_node(Node("", shade=k / 4), 4 + 5 * k, 6, 2.5) for k in range(5))
        entries.append((ramp, shades))
    return entries


def _node(node: Node, x: float, y: float, size: float) -> str:
    shade = _number(node.shade)
    look = "away" if node.away else "site" if shade is None else f"site s{round(4 * min(1, max(0, shade)))}"
    shape = 1 if node.worst else 0
    ring = _shape("ring", 0, x, y, size + 4) if node.own else ""
    cross = _path("cross", [(x - size / 2, y - size / 2), (x + size / 2, y + size / 2)]) if node.away else ""
    cross += _path("cross", [(x - size / 2, y + size / 2), (x + size / 2, y - size / 2)]) if node.away else ""
    said = f"<title>{escaped(node.name)}{f': {escaped(node.remark)}' if node.remark else ''}</title>"
    return f"<g>{said if node.name else ''}{ring}{_shape(look, shape, x, y, size)}{cross}</g>"


def _name(name: str, turn: float, place: tuple[float, float], size: float, flat: bool) -> str:
    x, y, away = *place, size + 9
    sine, cosine = math.sin(turn), -math.cos(turn)
    x, y = x + away * sine, y + away * cosine
    if flat:
        side = "middle" if abs(sine) < 0.25 else "start" if sine > 0 else "end"
        y += 4 + (4 * cosine if side == "middle" else 0)
        room = 2 * min(x, _WIDTH - x) if side == "middle" else _WIDTH - x if side == "start" else x
        return _text(x, y, _short(name, room), side)
    degrees = math.degrees(math.atan2(cosine, sine))
    back = sine < -1e-9
    turned = f' transform="translate({x:.1f} {y:.1f}) rotate({degrees + 180 * back:.1f})"'
    text = escaped(_short(name, 77, _SMALL))
    return f'<text class="small" text-anchor="{"end" if back else "start"}" dy="3"{turned}>{text}</text>'


def _bent(start: tuple[float, float], end: tuple[float, float], gap: float) -> str:
    """Returns an arrow, bent to its left so that two sites that wait for each other have two."""
    cx, cy = _middle(start, end)
    away = max(1e-9, math.dist((cx, cy), end))
    tip = (end[0] + (cx - end[0]) / away * gap, end[1] + (cy - end[1]) / away * gap)
    curve = f"M{start[0]:.1f} {start[1]:.1f}Q{cx:.1f} {cy:.1f} {tip[0]:.1f} {tip[1]:.1f}"
    return f'<path class="wait" d="{curve}"/>{_head("wait", (cx, cy), tip)}'


def _middle(start: tuple[float, float], end: tuple[float, float], part: float = 1.0, room: float = 0.0) -> Any:
    """Returns the point that a bent arrow bends to, or a part of the way there, and further where it needs room."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    size = max(1e-9, math.hypot(dx, dy))
    bend = part * max(14.0, 0.16 * size)
    return (start[0] + end[0]) / 2 + (bend + room) * dy / size, (start[1] + end[1]) / 2 - bend * dx / size


def _since(since: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    half = _width(since) / 2
    x, y = _middle(start, end, 0.6, half)
    return _text(min(max(x, half), _WIDTH - half), y + 4, since, "middle", "since")


class _Plane:
    """The frame of a chart of curves: an axis below, one at the left."""

    height = 236.0

    def __init__(self, across: tuple[float, float], upwards: tuple[float, float]):
        self._x_ticks, self._y_ticks = _ticks(*across, 5), _ticks(*upwards)
        self._left = 10 + max(_width(text) for _, text in self._y_ticks)
        self._right = _WIDTH - max(14.0, _beyond(self._x_ticks))
        self._bottom = self.height - 40
        self._to_x, self._to_y = _scale(*across, self._left, self._right), _scale(*upwards, self._bottom, 26.0)

    def place(self, x: float, y: float) -> tuple[float, float]:
        return self._to_x(x), self._to_y(y)

    def frame(self, x_label: str, y_label: str) -> list[str]:
        left, right, bottom, parts = self._left, self._right, self._bottom, [_text(0, 12, y_label)]
        for value, text in self._y_ticks:
            y = self._to_y(value)
            parts += [_path("grid", [(left, y), (right, y)]), _text(left - 6, y + 4, text, "end")]
        for value, text in self._x_ticks:
            x = self._to_x(value)
            parts += [_path("tick", [(x, bottom), (x, bottom + 4)]), _text(x, bottom + 17, text, "middle")]
        return [*parts, _path("axis", [(left, bottom), (right, bottom)]), _text(right, self.height - 6, x_label, "end")]


class _Rows:
    """The frame of a chart with a row per name: names at the left, an axis below."""

    def __init__(self, names: Sequence[str], row: float, low: float, high: float, beside: float = 12.0):
        self.names, self.row = names, row
        self._font = _FONT if row > 20 else _SMALL
        self.left = 8 + min(150.0, max(_width(name, self._font) for name in names))
        self.bottom = 6 + row * len(names)
        self.height = self.bottom + 40
        self._ticks = _ticks(low, high, 4)
        self._ends = low, high, self.left, _WIDTH - max(beside, _beyond(self._ticks))
        self.to_x = _scale(*self._ends)

    def middle(self, i: int) -> float:
        return 6 + self.row * (i + 0.5)

    def frame(self, label: str) -> list[str]:
        _, _, left, right = self._ends
        parts, look = [], "" if self._font == _FONT else "small"
        for value, text in self._ticks:
            x = self.to_x(value)
            parts += [_path("grid", [(x, 6), (x, self.bottom)]), _text(x, self.bottom + 15, text, "middle")]
        for i, name in enumerate(self.names):
            parts.append(_text(left - 8, self.middle(i) + 4, _short(name, left - 8, self._font), "end", look))
        parts += [_path("axis", [(left, self.bottom), (right, self.bottom)])]
        return [*parts, _text(right, self.height - 4, label, "end")]


# Numbers


def _number(value: Any) -> float | None:
    """Returns a number that can be drawn, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if abs(value) <= _LARGEST else None


def _at(values: Sequence[Any], i: int) -> Any:
    return values[i] if i < len(values) else None


def _interval(ends: Any) -> tuple[float, float] | None:
    low, high = map(_number, ends or (None, None))
    return None if low is None or high is None else (low, high)


def _points(line: Line) -> list[_Point]:
    """Returns the points of a line, from left to right as given, with the ends of its band."""
    found = []
    for i, x in enumerate(map(_number, line.x)):
        y, low, high = (_number(_at(of, i)) for of in (line.y, line.low, line.high))
        if x is not None:
            found.append((x, y, *((low, high) if low is not None and high is not None else (None, None))))
    return found


def _thinned(points: list[Any], most: int) -> list[Any]:
    """Returns at most so many points: of each stretch its lowest and its highest."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / (most - 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        known = [i for i in stretch if points[i][1] is not None]
        kept |= {min(known, key=lambda i: points[i][1]), max(known, key=lambda i: points[i][1])} if known else {start}
    return [points[i] for i in sorted(kept)]


def _unbroken(points: Iterable[Any], last: int) -> list[list[Any]]:
    """Returns the stretches of points in which no number up to the last one is missing."""
    found: list[list[Any]] = [[]]
    for point in points:
        if point is None or point[last] is None:
            found.append([])
        else:
            found[-1].append(point)
    return [stretch for stretch in found if stretch]


def _unbroken_only(points: Iterable[Any], which: int) -> list[Any]:
    return [point if point[which] is not None else None for point in points]


def _span(values: Iterable[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None


def _padded(low: float, high: float, by: float) -> tuple[float, float]:
    """Returns an axis that is longer than nothing."""
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size or high == low:
        half = 0.05 * size or 0.5
        return low - half, high + half
    return low - by * (high - low), high + by * (high - low)


def _ticks(low: float, high: float, most: int = 5) -> list[tuple[float, str]]:
    """Returns round numbers between the ends of an axis, and how they are written."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 1e-300 else 1.0
    step, digits = next((k * power, k == 2.5) for k in (1, 2, 2.5, 5, 10, 20) if k * power >= 0.999 * raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if last - first > 4 * most:  # numbers so large that they do not differ
        return [(low, f"{low:.3g}")]
    digits = max(0, digits - math.floor(math.log10(step) + 1e-9))
    plain = step >= 1e-4 and max(abs(low), abs(high)) < 1e7
    values = [k * step for k in range(first, last + 1)]
    return [(v, (f"{v + 0.0:,.{digits}f}" if plain else f"{v:.3g}").replace("-", "−")) for v in values]


def _beyond(ticks: Sequence[tuple[float, str]]) -> float:
    """Returns how far the last label of an axis may reach beyond its end."""
    return _width(ticks[-1][1]) / 2 if ticks else 0.0


def _scale(low: float, high: float, start: float, end: float) -> Any:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 0.0995 or value == 0 else f"{100 * value:.2g} %"


# Text and shapes


def _line_of(text: object) -> str:
    return printable(" ".join(str(text).split()))


def escaped(text: object) -> str:
    return html.escape(_line_of(text))


def _width(text: object, font: float = _FONT) -> float:
    """Returns about how wide a text is in DejaVu Sans, the widest font that a system is likely to have."""
    return font * sum(map(_width_of, _line_of(text)))


def _width_of(letter: str) -> float:
    """Returns how wide a letter is, in heights of its font."""
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.0
    if letter in "mwMW":
        return 0.95
    if letter in "ijlI .,:;'|!":
        return 0.33
    return 0.41 if letter in "ftr()[]-/" else 0.7 if letter.isupper() else 0.62


def _short(text: object, room: float, font: float = _FONT) -> str:
    """Returns as much of a text as there is room for."""
    line = _line_of(text)[:200]
    if _width(line, font) <= room:
        return line
    while line and _width(f"{line}…", font) > room:
        line = line[:-1]
    return f"{line}…"


def _text(x: float, y: float, text: object, side: str = "start", kind: str = "") -> str:
    look = f' class="{kind}"' if kind else ""
    return f'<text{look} x="{x:.1f}" y="{y:.1f}" text-anchor="{side}">{escaped(text)}</text>'


def _path(kind: str, points: Sequence[tuple[float, float]], closed: bool = False) -> str:
    inside = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="{kind}" d="M{inside}{"z" if closed else ""}"/>'


def _shape(kind: str, shape: int, x: float, y: float, size: float) -> str:
    return f'<path class="{kind}" transform="translate({x:.1f} {y:.1f}) scale({size:.1f})" d="{_SHAPES[shape]}"/>'


def _mark(style: int, x: float, y: float, hollow: bool = False) -> str:
    return _shape(f"mark {_colour(style)}{' hollow' if hollow else ''}", style % len(_SHAPES), x, y, 3.6)


def _arrow(kind: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    return _path(kind, [start, end]) + _head(kind, start, end)


def _head(kind: str, start: tuple[float, float], end: tuple[float, float], size: float = 7.0) -> str:
    turn = math.atan2(end[1] - start[1], end[0] - start[0])
    back = [(end[0] - size * math.cos(turn + s), end[1] - size * math.sin(turn + s)) for s in (-0.4, 0.4)]
    return _path(f"head {kind}", [back[0], end, back[1]], closed=True)


def _colour(style: int) -> str:
    return f"c{style % len(COLOURS)}"


def _line_key(line: Line) -> str:
    look = f"line {_colour(line.style)}{' dashed' if line.dashed else ''}"
    band = _path(f"band {_colour(line.style)}", [(1, 1), (27, 1), (27, 11), (1, 11)], closed=True) if line.low else ""
    mark = "" if line.dashed or line.step else _mark(line.style, 14, 6)
    return band + _path(look, [(1, 6), (27, 6)]) + mark


def _chart(title: str, height: float, parts: Iterable[str], entries: Iterable[tuple[str, str]] = ()) -> str:
    keys: dict[str, str] = {}
    for key, label in entries:
        keys.setdefault(label, key)
    legend = "".join(
        f'<li><svg class="key" viewBox="0 0 28 12" aria-hidden="true">{key}</svg>{escaped(label)}</li>'
        for label, key in keys.items()
    )
    box = f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}"'
    drawn = f'<svg class="chart" role="img" {box}><title>{escaped(title)}</title>{"".join(parts)}</svg>'
    return (f'<ul class="legend">{legend}</ul>' if legend else "") + drawn


def _nothing(title: str, label: str) -> str:
    text = f"{label}: nothing to show yet"
    return _chart(title, 60, [_text(_WIDTH / 2, 34, text, "middle", "nothing")])
