"""Figures for papers and notebooks, drawn by matplotlib: curves, sites and graphs. Pages have `charts.py`."""

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fairmesh.errors import BadInput
from fairmesh.metrics.units import defined
from fairmesh.report.runs import Run, choices_in_words, chosen_of, links_of, unequal_choices
from fairmesh.report.style import COLOURS, MARKERS, loaded_matplotlib, new_figure, plain, save_figure
from fairmesh.topology.mixing import Mixing
from fairmesh.training.result import Result

_AXES = {
    "rounds": "rounds",
    "bytes_busiest_node": "sent by the busiest node, MB",
    "nominal_bits_busiest": "sent by nominal bits, MB",
}
_SOLID, _DASHED, _GREY = "worst site", "mean over sites", "#606060"


def look_of(k: int) -> dict[str, Any]:
    """Returns the colour and the marker of the k-th run of a picture. Colours repeat after the last one, and come back
    with another marker."""
    count = len(COLOURS)
    return {"color": COLOURS[k % count], "marker": MARKERS[(k + k // count) % count]}


def _draw_curve(axis: Any, run: Run, k: int, what: str, against: str, **style: Any) -> None:
    """Draws the mean over replicas as a line with its own colour and marker, and a band that spans the replicas."""
    scale = run.unit().scale
    x, mean, low, high = run.curve(what, against)
    if against != "rounds" and not any(x):  # it sends nothing
        return
    many = max(1, len(x) // 8)
    look = look_of(k) | {"ms": 3.5, "mew": 0.8, "markevery": (k % many, many), "lw": 1.3} | style
    axis.plot(x, [scale * v for v in mean], label=plain(run.label), **look)
    if len(run.alive) > 1 and "ls" not in style:
        axis.fill_between(x, [scale * v for v in low], [scale * v for v in high], color=look["color"], alpha=0.18, lw=0)


_COLUMN, _TEXT = 3.4, 7.0  # inches: the width of a column of a paper, and of its two columns
_INCHES = 0.062  # of a letter of font 8, about


def curves(runs: Sequence[Run], against: Sequence[str] = tuple(_AXES), notes: Sequence[str] = ()) -> Any:
    """Draws worst site (solid) and mean (dashed) against rounds, bytes and nominal bits; a band spans the replicas. One
    panel is as wide as a column of a paper, and several are as wide as its text.

    Args:
        runs: The runs, none of which is a sweep.
        against: What to plot against, one panel each.
        notes: Sentences below the panels. Default: ().
    """
    width = _COLUMN if len(against) == 1 else _TEXT
    lines = [line for note in notes for line in textwrap.wrap(note, int(width / _INCHES), subsequent_indent="    ")]
    entries = [run.label for run in runs if len(runs) > 1] + [_SOLID, _DASHED]
    columns = max(1, int(width / (0.45 + _INCHES * max(map(len, entries)))))
    height = 2.3 + 0.17 * (-(-len(entries) // columns) + len(lines))
    figure, axes = new_figure(width, height, columns=len(against), font=8, sharey=True)
    for axis, what in zip(axes, against):
        for k, run in enumerate(runs):
            _draw_curve(axis, run, k, "mean", what, ls="--", lw=0.9, mfc="white")
            _draw_curve(axis, run, k, "worst", what)
        axis.set_xlabel(_AXES[what])
        axis.grid(alpha=0.25)
    axes[0].set_ylabel(plain(runs[0].unit().label))
    line = loaded_matplotlib().lines.Line2D
    keys = [line([], [], ms=3.5, mew=0.8, lw=1.3, **look_of(k)) for k in range(len(runs)) if len(runs) > 1]
    keys += [line([], [], color=_GREY, lw=1.3), line([], [], color=_GREY, lw=0.9, ls="--")]
    figure.legend(keys, map(plain, entries), frameon=False, fontsize=8, loc="outside upper left", ncols=columns)
    if lines:
        figure.supxlabel(plain("\n".join(lines)), fontsize=7, x=0.01, ha="left")
    return figure


def dots(names: Sequence[str], series: Mapping[str, Mapping[str, Any]], axis_label: str) -> Any:
    """Draws a row per site with a point for each series, and its interval where it is known. It is as wide as a column
    of a paper.

    Args:
        names: The sites, from top to bottom.
        series: By their label, {"values": one number per site}. With "intervals" of [low, high] or None per site, a
            line spans each.
        axis_label: What is measured.
    """
    row = 0.16 if len(names) > 24 else max(0.2, 0.1 * len(series))  # inches
    longest = max(map(len, series))
    columns = max(1, min(len(series), int(_COLUMN / (0.35 + _INCHES * longest))))
    entries = -(-len(series) // columns) if len(series) > 1 else 0
    figure, (axis,) = new_figure(_COLUMN, 0.6 + len(names) * row + 0.17 * entries, font=8)
    for k, (label, one) in enumerate(series.items()):
        shift = 0.5 * (k / max(1, len(series) - 1) - 0.5) if len(series) > 1 else 0.0
        look = look_of(k)
        x, y = one["values"], [i + shift for i in range(len(names))]
        for value, at, interval in zip(x, y, one.get("intervals", ())):
            if interval and math.isfinite(value):
                axis.plot(interval, [at, at], color=look["color"], lw=1.3, alpha=0.7, solid_capstyle="butt")
        filled = {"color": look["color"]} if k == 0 else {"facecolors": "white", "edgecolors": look["color"]}
        axis.scatter(x, y, 17, marker=look["marker"], label=plain(label), zorder=3, linewidths=1.1, **filled)
    axis.set_yticks(range(len(names)), [_short(name, 28) for name in names])
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xlabel(plain(axis_label))
    axis.grid(alpha=0.25)
    if entries:
        figure.legend(frameon=False, fontsize=8, loc="outside upper left", ncols=columns)
    return figure


def _short(name: str, most: int) -> str:
    return plain(name if len(name) < most else name[: most - 2] + "…")


def draw_graph(mixing: Mixing, title: str, path: str | os.PathLike) -> None:
    """Draws who talks to whom, with the nodes on a circle."""
    n, edges, small, flat = mixing.n, links_of(mixing), mixing.n <= 60, mixing.n <= 24
    figure, (axis,) = new_figure(3.4, 3.4, font=8)
    angles = 2 * math.pi * np.arange(n) / n
    at = np.stack([np.sin(angles), np.cos(angles)])
    for edge in edges:
        axis.plot(*at[:, edge], color="#808080", lw=0.9 if len(edges) < 300 else 0.2, zorder=1)
    axis.scatter(*at, 90 if flat else 30 if small else 8, color=COLOURS[0], zorder=2)
    for i, (x, y) in enumerate(zip(*at)) if small else ():
        axis.annotate(str(i), (1.14 * x, 1.14 * y), ha="center", va="center", fontsize=8 if flat else 5)
    axis.set_aspect("equal")
    axis.axis("off")
    axis.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25))
    figure.suptitle(title, fontsize=8)
    save_figure(figure, path)


def plot(
    results: Result | Run | Sequence[Result | Run] | Mapping[str, Result],
    path: str | os.PathLike | None = None,
    against: Sequence[str] | None = None,
) -> Any:
    """Plots the worst site and the mean of sites against rounds and traffic, of one or several results.

    One panel is as wide as a column of a paper, and several are as wide as its text. In .pdf and .svg, lines are lines
    and text is text. Colours and markers tell runs apart, also in grey; solid is the worst site, dashed the mean, and a
    band spans the replicas.

    Of a sweep it draws the variant that tables and `fairmesh compare` put first. Below the panels it says among how
    many that one was chosen, and whether it is at an end of the values that were tried.

    Args:
        results: One result or several, from `fm.train` or `fm.run`; or results by the name that the picture gives them.
        path: The picture to write; its suffix gives the format, such as .pdf, .svg or .png. A file that is there is
            replaced, so that a script can be run again. None to write nothing. Default: None.
        against: What to plot against, one panel each: "rounds", "bytes_busiest_node", "nominal_bits_busiest"; None for
            all of them. Default: None.

    Returns:
        Without a path the figure, which a notebook shows; else None.

    Raises:
        BadInput: There is no result or no such axis, or the picture cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> import fairmesh as fm
        >>> result = fm.run(fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=5))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fm.plot(result, f"{folder}/curves.png")
        ...     pathlib.Path(folder, "curves.png").exists()
        True
    """
    several = [results] if isinstance(results, Result | Run) else results
    pairs = several.items() if isinstance(several, Mapping) else [(None, result) for result in several]
    runs = [result if isinstance(result, Run) else Run.from_result(result, name) for name, result in pairs]
    if not runs:
        raise BadInput("nothing to plot")
    against = tuple(_AXES) if against is None else against
    unknown = [one for one in against if one not in _AXES]
    if unknown or not against or isinstance(against, str):
        raise BadInput(f"against must be a list of some of {', '.join(_AXES)}, got {against!r}")
    notes = [*choices_in_words(runs), *unequal_choices(runs)]
    return save_figure(curves([chosen_of(run) for run in runs], against, notes), path)


def plot_sites(results: Mapping[str, Result], path: str | os.PathLike | None = None) -> Any:
    """Plots what several models reach at every site, each with its 95 % interval.

    Args:
        results: Results by the name that the picture gives them. Sites that train alone are judged by their own models.
        path: The picture to write; its suffix gives the format, such as .pdf, .svg or .png. A file that is there is
            replaced, so that a script can be run again. None to write nothing. Default: None.

    Returns:
        Without a path the figure, which a notebook shows; else None.

    Raises:
        BadInput: There is no result, results differ in their sites or metric, or the picture cannot be written.

    Example:
        >>> import fairmesh as fm
        >>> problem = fm.Experiment(fm.data.Digits(nodes=4), algorithm=fm.TrackedADGDA()).problem()
        >>> together = fm.train(problem, fm.Ring(), fm.TrackedADGDA(), rounds=5)
        >>> alone = fm.train(problem, fm.Ring(), fm.algorithms.Local(), rounds=5)
        >>> figure = fm.report.plot_sites({"alone": alone, "together": together})
        >>> len(figure.axes[0].get_yticks())  # a row per site
        4
    """
    tables = {name: one.evidence() for name, one in results.items()}
    names = {name: [site["name"] for site in table["sites"]] for name, table in tables.items()}
    if not results or len({(tuple(names[name]), table["metric"]) for name, table in tables.items()}) > 1:
        raise BadInput(f"plot_sites needs results with the same sites and metric, got {names or 'none'}")
    first = next(iter(results))
    unit = Run.from_result(results[first]).unit()

    series = {name: scaled_series(table["sites"], unit.scale) for name, table in tables.items()}
    return save_figure(dots(names[first], series, unit.label), path)


def scaled_series(rows: Sequence[Mapping[str, Any]], scale: float) -> dict[str, Any]:
    """Returns a series for `dots` from rows of evidence, {"value", "interval"}, of which either may not be known."""
    ends = [[end for end in row.get("interval") or () if defined(end)] for row in rows]
    return {
        "values": [scale * row["value"] if defined(row["value"]) else math.nan for row in rows],
        "intervals": [[scale * end for end in pair] if len(pair) == 2 else None for pair in ends],
    }
