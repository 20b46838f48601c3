"""Curves, bars and graphs, drawn by matplotlib."""

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fairmesh.errors import BadInput
from fairmesh.metrics.units import defined
from fairmesh.report.runs import Run, choices_in_words, chosen_of, links_of, unequal_choices
from fairmesh.report.style import COLOURS, MARKERS, new_figure, plain, save_figure
from fairmesh.topology.mixing import Mixing
from fairmesh.training.result import Result

_AXES = {
    "rounds": "rounds",
    "bytes_busiest_node": "sent by the busiest node, MB",
    "nominal_bits_busiest": "sent by the busiest node, MB by nominal bits",
}


def _draw_curve(axis: Any, run: Run, k: int, what: str, against: str, label: str, **style: Any) -> None:
    """Draws the mean over replicas as a line with its own colour and marker, and a band that spans the replicas."""
    scale = run.unit().scale
    x, mean, low, high = run.curve(what, against)
    if against != "rounds" and not any(x):  # it sends nothing
        return
    colour, many = COLOURS[k % len(COLOURS)], max(1, len(x) // 8)
    look = {"marker": MARKERS[k % len(MARKERS)], "ms": 4, "markevery": (k % many, many), "lw": 1.5} | style
    axis.plot(x, [scale * v for v in mean], color=colour, label=plain(label), **look)
    if len(run.alive) > 1 and "ls" not in style:
        axis.fill_between(x, [scale * v for v in low], [scale * v for v in high], color=colour, alpha=0.18, lw=0)


def _finish(axis: Any, run: Run, against: str) -> None:
    axis.set_xlabel(_AXES[against])
    axis.set_ylabel(plain(run.unit().label))
    axis.grid(alpha=0.25)


def curves(runs: Sequence[Run], against: Sequence[str] = tuple(_AXES), notes: Sequence[str] = ()) -> Any:
    """Draws worst site (solid) and mean (dashed) against rounds, bytes and nominal bits; a band spans the replicas.

    Args:
        runs: The runs, none of which is a sweep.
        against: What to plot against, one panel each.
        notes: Sentences below the panels. Default: ().
    """
    label_width = 0.6 + 0.063 * max(len(f"{run.label}: mean of sites") for run in runs)  # inches, with its line
    width = max(4.8, 4 * len(against), label_width)
    columns = 2 if 2 * label_width < width else 1
    lines = [line for note in notes for line in textwrap.wrap(note, int(16 * width), subsequent_indent="    ")]
    height = 3.2 + 0.18 * (2 / columns * len(runs) + len(lines))
    figure, axes = new_figure(width, height, columns=len(against))
    for axis, what in zip(axes, against):
        for k, run in enumerate(runs):
            _draw_curve(axis, run, k, "worst", what, f"{run.label}: worst site")
        for k, run in enumerate(runs):
            _draw_curve(axis, run, k, "mean", what, f"{run.label}: mean of sites", ls="--", lw=1, marker="")
        _finish(axis, runs[0], what)
    drawn = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(drawn.values(), drawn.keys(), frameon=False, fontsize=8, loc="outside upper left", ncols=columns)
    if lines:
        figure.supxlabel(plain("\n".join(lines)), fontsize=8, x=0.01, ha="left")
    return figure


def curve(runs: Sequence[Run], what: str, against: str) -> Any:
    """Draws "worst" or "mean" over sites of several runs against rounds or traffic, in one panel."""
    figure, (axis,) = new_figure(4.8, 2.9 + 0.19 * (len(runs) if len(runs) > 1 else 0), font=10)
    for k, run in enumerate(runs):
        _draw_curve(axis, run, k, what, against, run.label)
    _finish(axis, runs[0], against)
    if len(runs) > 1:
        figure.legend(frameon=False, fontsize=9, loc="outside upper left")
    return figure


def dots(names: Sequence[str], series: Mapping[str, Mapping[str, Any]], axis_label: str) -> Any:
    """Draws a row per site with a point for each series, and its interval where it is known.

    Args:
        names: The sites, from top to bottom.
        series: By their label, {"values": one number per site}. With "intervals" of [low, high] or None per site, a
            line spans each. With "origins", one number per site, an arrow leads from it to the point. "style" is the
            number of its colour and marker.
        axis_label: What is measured.
    """
    figure, (axis,) = new_figure(
        4.8,
        0.9 + len(names) * (0.19 if len(names) > 24 else 0.4 if len(series) > 3 else 0.27) + 0.19 * len(series),
        font=10,
    )
    for k, (label, one) in enumerate(series.items()):
        shift = 0.5 * (k / max(1, len(series) - 1) - 0.5) if len(series) > 1 else 0.0
        style = one.get("style", k)
        colour, marker = COLOURS[style % len(COLOURS)], MARKERS[style % len(MARKERS)]
        x, y = one["values"], [i + shift for i in range(len(names))]
        for value, at, interval in zip(x, y, one.get("intervals", ())):
            if interval and math.isfinite(value):
                axis.plot(interval, [at, at], color=colour, lw=1.6, alpha=0.7, solid_capstyle="butt")
        if origins := one.get("origins"):
            axis.scatter(origins, y, 40, marker="|", color="#808080", zorder=2)
            reach = max([*origins, *x]) - min([*origins, *x])
            for start, end, at in zip(origins, x, y):
                if abs(end - start) < 0.02 * reach:  # shorter than an arrow's head
                    continue
                axis.annotate(
                    "", (end, at), (start, at), annotation_clip=False,
                    arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.1, "shrinkA": 0, "shrinkB": 2.5},
                )  # fmt: skip
        filled = {"color": colour} if style == 0 else {"facecolors": "none", "edgecolors": colour}
        axis.scatter(x, y, 26, marker=marker, label=plain(label), zorder=3, linewidths=1.4, **filled)
    axis.set_yticks(range(len(names)), [_short(name, 28) for name in names])
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xlabel(plain(axis_label))
    axis.grid(alpha=0.25)
    if len(series) > 1:
        figure.legend(frameon=False, fontsize=9, loc="outside upper left", ncols=1 if len(series) > 4 else 2)
    return figure


def distributions(series: Mapping[str, Sequence[float]], axis_label: str) -> Any:
    """Draws the share of sites with at most each value, a line for each series.

    Args:
        series: The values of all sites, by label.
        axis_label: What is measured.
    """
    figure, (axis,) = new_figure(4.8, 3.0 + 0.19 * len(series), font=10)
    for k, (label, values) in enumerate(series.items()):
        known = sorted(value for value in values if math.isfinite(value))
        shares = [100 * (i + 1) / len(known) for i in range(len(known))]
        axis.step(
            known, shares, where="post", color=COLOURS[k % len(COLOURS)], lw=2 if k == 0 else 1.2, label=plain(label)
        )
    axis.set_xlabel(plain(axis_label))
    axis.set_ylabel("sites, %")
    axis.set_ylim(0, 101)
    axis.grid(alpha=0.25)
    if len(series) > 1:
        figure.legend(frameon=False, fontsize=9, loc="outside upper left", ncols=1 if len(series) > 4 else 2)
    return figure


def _short(name: str, most: int) -> str:
    return plain(name if len(name) < most else name[: most - 2] + "…")


def network(
    names: Sequence[str],
    edges: Sequence[Sequence[int]],
    values: Sequence[float] | None = None,
    label: str = "",
    worst: int | None = None,
) -> Any:
    """Draws who talks to whom, with the sites on a circle, darker for lower values, and a square for the worst site.

    Args:
        names: The sites.
        edges: Pairs of their numbers.
        values: What colours the sites; None for no colour. Default: None.
        label: What the values are. Default: "".
        worst: The number of the worst site. Default: None.
    """
    n, small, flat = len(names), len(names) <= 60, len(names) <= 24
    figure, (axis,) = new_figure(4.8, 3.4 if flat else 4.6, font=10)
    angles = 2 * math.pi * np.arange(n) / n
    at = np.stack([np.sin(angles), np.cos(angles)])
    for edge in edges:
        axis.plot(*at[:, list(edge)], color="#808080", lw=0.9 if len(edges) < 300 else 0.2, zorder=1)
    size = 170 if n <= 30 else 60 if small else 12
    shown = np.full(n, math.nan) if values is None else np.asarray(values, dtype=float)
    known, look = np.isfinite(shown), {"edgecolors": "#808080", "zorder": 2}
    axis.scatter(*at[:, ~known], size, facecolors="none", **look)
    if known.any():
        lowest = np.arange(n) == worst
        look |= {"vmin": shown[known].min(), "vmax": shown[known].max(), "cmap": "cividis"}
        axis.scatter(*at[:, known & lowest], 1.6 * size, shown[known & lowest], marker="s", **look)
        drawn = axis.scatter(*at[:, known & ~lowest], size, shown[known & ~lowest], marker="o", **look)
        figure.colorbar(drawn, ax=axis, shrink=0.7, label=plain(label))
    for name, x, y in zip(names, *at) if small else ():
        side = "center" if flat and abs(x) < 0.2 else "left" if x > -1e-9 else "right"
        away = 1.14 + 0.06 * abs(y) if flat else 1.12
        axis.annotate(
            _short(name, 18), (away * x, away * y), ha=side, va="center", fontsize=9 if flat else 6,
            rotation=0 if flat else math.degrees(math.atan2(y, x)) - (180 if x < -1e-9 else 0), rotation_mode="anchor",
        )  # fmt: skip
    axis.set_aspect("equal")
    axis.axis("off")
    reach = 1.25 if flat else 1.6 if small else 1.05
    axis.set(xlim=(-max(reach, 1.7 * small), max(reach, 1.7 * small)), ylim=(-reach, reach))
    return figure


def reliability(bins: Sequence[Mapping[str, float]]) -> Any:
    """Draws how often predictions were right against how probable the model said they were.

    Args:
        bins: For each range of probabilities {"confidence", "accuracy", "n"}, its mean probability, the share of its
            predictions that were right, and their number.
    """
    figure, (axis, below) = new_figure(4.4, 4.6, rows=2, height_ratios=(3, 1), sharex=True)
    axis.plot([0, 100], [0, 100], color="#808080", ls="--", lw=1, label="perfectly calibrated")
    x, y = ([100 * one[key] for one in bins] for key in ("confidence", "accuracy"))
    axis.plot(x, y, color=COLOURS[0], marker="o", ms=5, label="the model")
    axis.set_ylabel("predictions that are right, %")
    axis.grid(alpha=0.25)
    figure.legend(frameon=False, fontsize=8, loc="outside upper left", ncols=2)
    below.bar(x, [one["n"] for one in bins], 4, color=COLOURS[0])
    below.set_ylabel("samples")
    below.set_xlabel("probability that the model gives its prediction, %")
    return figure


def draw_graph(mixing: Mixing, title: str, path: str | os.PathLike) -> None:
    """Draws who talks to whom, with the nodes on a circle."""
    figure = network([str(i) for i in range(mixing.n)], links_of(mixing))
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def plot(
    results: Result | Run | Sequence[Result | Run] | Mapping[str, Result],
    path: str | os.PathLike | None = None,
    against: Sequence[str] | None = None,
) -> Any:
    """Plots the worst site and the mean of sites against rounds and traffic, of one or several results.

    Of a sweep it draws the variant that tables and `fairmesh compare` put first. Below the panels it says among how
    many that one was chosen, and whether it is at an end of the values that were tried.

    Args:
        results: One result or several, from `fm.train` or `fm.run`; or results by the name that the picture gives them.
        path: The picture to write; its suffix gives the format, such as .png, .svg or .pdf. None to write nothing.
            Default: None.
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
        path: The picture to write; its suffix gives the format, such as .png, .svg or .pdf. None to write nothing.
            Default: None.

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
