"""Curves, bars and graphs, drawn by matplotlib."""

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.report.runs import Run, choices_in_words, chosen_of, unequal_choices
from fairmesh.report.style import COLOURS, MARKERS, new_figure, plain, save_figure, saved_or_shown
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
        series: By their label, {"values": one number per site, "intervals": [low, high] or None per site, "style": the
            number of its colour and marker}. With "origins", one number per site, an arrow leads from it to the point.
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
        rows = [
            (value, i + shift, interval) for i, (value, interval) in enumerate(zip(one["values"], one["intervals"]))
        ]
        for value, at, interval in rows:
            if interval and math.isfinite(value):
                axis.plot(interval, [at, at], color=colour, lw=1.6, alpha=0.7, solid_capstyle="butt")
        x, y = [value for value, _, _ in rows], [at for _, at, _ in rows]
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
    axis.set_yticks(range(len(names)), [plain(name if len(name) < 28 else name[:26] + "…") for name in names])
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xlabel(plain(axis_label))
    axis.grid(alpha=0.25)
    if len(series) > 1:
        figure.legend(frameon=False, fontsize=9, loc="outside upper left", ncols=1 if len(series) > 4 else 2)
    return figure


def network(
    names: Sequence[str], edges: Sequence[Sequence[int]], values: Sequence[float] | None, label: str, worst: int | None
) -> Any:
    """Draws who talks to whom, with the sites on a circle, darker for lower values, and a square for the worst site.

    Args:
        names: The sites.
        edges: Pairs of their numbers.
        values: What colours the sites; None for no colour.
        label: What the values are.
        worst: The number of the worst site. Default: None.
    """
    n, small = len(names), len(names) <= 60
    figure, (axis,) = new_figure(4.8, 3.4 if n <= 24 else 4.6, font=10)
    at = [(math.sin(2 * math.pi * i / n), math.cos(2 * math.pi * i / n)) for i in range(n)]
    for i, j in edges:
        axis.plot(*zip(at[i], at[j]), color="#808080", lw=0.9 if len(edges) < 300 else 0.2, zorder=1)
    size = 170 if n <= 30 else 60 if small else 12
    known = [i for i in range(n) if values is not None and math.isfinite(values[i])]
    for marker, chosen in (("o", [i for i in known if i != worst]), ("s", [i for i in known if i == worst])):
        if chosen and values is not None:
            drawn = axis.scatter(
                *zip(*(at[i] for i in chosen)), size * (1.6 if marker == "s" else 1), [values[i] for i in chosen],
                marker=marker, cmap="cividis", vmin=min(values[i] for i in known), vmax=max(values[i] for i in known),
                edgecolors="#808080", zorder=2,
            )  # fmt: skip
            if marker == "o":
                figure.colorbar(drawn, ax=axis, shrink=0.7, label=plain(label))
    rest = [at[i] for i in range(n) if i not in known]
    if rest:
        axis.scatter(*zip(*rest), size, facecolors="none", edgecolors="#808080", hatch=None, zorder=2)
    for i, (x, y) in enumerate(at if small else []):
        flat = n <= 24
        side = "center" if flat and abs(x) < 0.2 else "left" if x > -1e-9 else "right"
        away = 1.12 if not flat else 1.14 + 0.06 * abs(y)
        text = names[i] if len(names[i]) < 18 else names[i][:16] + "…"
        axis.annotate(
            plain(text), (away * x, away * y), ha=side, va="center", fontsize=9 if flat else 6, rotation_mode="anchor",
            rotation=0 if flat else math.degrees(math.atan2(y, x)) - (180 if x < -1e-9 else 0),
        )  # fmt: skip
    axis.set_aspect("equal")
    axis.axis("off")
    reach = 1.25 if n <= 24 else 1.6 if small else 1.05
    axis.set_ylim(-reach, reach)
    axis.set_xlim(-max(reach, 1.7 if small else 0), max(reach, 1.7 if small else 0))
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


def whiskers(
    labels: Sequence[str], kinds: Mapping[str, Sequence[Mapping[str, Any]]], axis_label: str, scale: float = 1
) -> Any:
    """Draws one row per label with a point and its interval for each kind.

    Args:
        labels: The names of the rows, from top to bottom.
        kinds: By the name of each kind, one {"value", "interval": [low, high]} per row.
        axis_label: What is measured.
        scale: What numbers are multiplied by.
    """
    figure, (axis,) = new_figure(6.4, 0.6 * len(labels) + 1.0, font=10)
    rows = range(len(labels))
    for k, (name, numbers) in enumerate(kinds.items()):
        colour, shift = COLOURS[k % len(COLOURS)], 0.22 * (k - (len(kinds) - 1) / 2)
        means = [scale * number["value"] for number in numbers]
        ends = [[scale * end for end in number["interval"]] for number in numbers]
        intervals = [[x - low for x, (low, _) in zip(means, ends)], [high - x for x, (_, high) in zip(means, ends)]]
        at = [row + shift for row in rows]
        style: dict[str, Any] = {"ms": 5, "capsize": 3, "lw": 1.4, "color": colour, "label": name}
        axis.errorbar(means, at, xerr=intervals, fmt=MARKERS[k % len(MARKERS)], **style)
        for x, y in zip(means, at):  # the first kind has its numbers above, the others below
            above = {"xytext": (0, 5), "va": "bottom"} if k == 0 else {"xytext": (0, -5), "va": "top"}
            axis.annotate(f"{x:.1f}", (x, y), textcoords="offset points", ha="center", fontsize=9, **above)
    axis.set_yticks(rows, [plain(label) for label in labels])
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.set_xlabel(axis_label)
    axis.grid(axis="x", alpha=0.25)
    axis.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0)
    return figure


def draw_graph(mixing: Mixing, title: str, path: str | os.PathLike) -> None:
    """Draws who talks to whom, with the nodes on a circle."""
    import networkx

    figure, (axis,) = new_figure(5, 5)
    graph = networkx.from_scipy_sparse_array(mixing.matrix)
    graph.remove_edges_from(list(networkx.selfloop_edges(graph)))
    small = mixing.n <= 60
    networkx.draw_networkx(
        graph, networkx.circular_layout(graph), ax=axis, with_labels=small, node_size=260 if small else 8,
        node_color="#e3ecf8", edge_color=COLOURS[0], width=1.0 if small else 0.3, font_size=8,
    )  # fmt: skip
    axis.set_title(title, fontsize=10)
    axis.axis("off")
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
    if isinstance(results, Mapping):
        runs = [Run.from_result(one, name) for name, one in results.items()]
    else:
        several = [results] if isinstance(results, Result | Run) else results
        runs = [one if isinstance(one, Run) else Run.from_result(one) for one in several]
    if not runs:
        raise BadInput("nothing to plot")
    against = tuple(_AXES) if against is None else against
    unknown = [one for one in against if one not in _AXES]
    if unknown or not against or isinstance(against, str):
        raise BadInput(f"against must be a list of some of {', '.join(_AXES)}, got {against!r}")
    notes = [*choices_in_words(runs), *unequal_choices(runs)]
    return saved_or_shown(curves([chosen_of(run) for run in runs], against, notes), path)


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
        >>> alone = fm.train(problem, fm.Ring(), fm.Local(), rounds=5)
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

    def row(site: Mapping[str, Any]) -> tuple[float, list[float] | None]:
        known = all(map(math.isfinite, site["interval"]))
        return unit.scale * site["value"], [unit.scale * end for end in site["interval"]] if known else None

    rows = {name: [row(site) for site in table["sites"]] for name, table in tables.items()}
    series = {
        name: {"values": [value for value, _ in sites], "intervals": [ends for _, ends in sites]}
        for name, sites in rows.items()
    }
    return saved_or_shown(dots(names[first], series, unit.label), path)
