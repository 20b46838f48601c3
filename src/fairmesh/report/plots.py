"""Curves, bars and graphs, drawn by matplotlib."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.report.runs import Run
from fairmesh.report.style import new_figure, save_figure
from fairmesh.topology.mixing import Mixing
from fairmesh.training.result import Result

_AXES = {
    "rounds": "rounds",
    "bytes_busiest_node": "sent by the busiest node, MB",
    "nominal_bits_busiest": "sent by the busiest node, MB by nominal bits",
}


_COLOURS = ("#9a3b3b", "#1f6f8b", "#7a8b1f", "#6b4c9a", "#c77c2b", "#3b3b3b", "#2b8a5f", "#a0527f")


def curves(runs: Sequence[Run]) -> Any:
    """Draws worst site (solid) and mean (dashed) against rounds, bytes and nominal bits; a band spans the replicas."""
    figure, axes = new_figure(12, 3.4, columns=3)
    metric = runs[0].metric
    scale = 100 if metric == "accuracy" else 1
    for axis, against in zip(axes, _AXES):
        for k, run in enumerate(runs):
            colour = _COLOURS[k % len(_COLOURS)]
            x, mean, low, high = run.curve("worst", against)
            if against != "rounds" and not any(x):  # it sends nothing
                continue
            axis.plot(x, [scale * v for v in mean], color=colour, label=f"{run.label}: worst site")
            axis.fill_between(x, [scale * v for v in low], [scale * v for v in high], color=colour, alpha=0.15, lw=0)
            x, mean, _, _ = run.curve("mean", against)
            axis.plot(x, [scale * v for v in mean], color=colour, ls="--", lw=1, label=f"{run.label}: mean of sites")
        axis.set_xlabel(_AXES[against])
        axis.set_ylabel(f"{metric}, %" if metric == "accuracy" else metric)
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def bars(runs: Sequence[Run], values: str = "metric") -> Any:
    """Draws every site's final metric, or its weight lambda, side by side."""
    sites = [str(name) for name in runs[0].summary["sites"]]
    shown = [(run, run.by_site() if values == "metric" else run.weights()) for run in runs]
    shown = [(run, numbers) for run, numbers in shown if numbers]
    figure, (axis,) = new_figure(max(6.0, min(14.0, 0.55 * len(sites) + 3)), 3.2)
    metric = runs[0].metric
    scale = 100 if values == "metric" and metric == "accuracy" else 1
    width = 0.8 / max(1, len(shown))
    for k, (run, numbers) in enumerate(shown):
        at = [i + (k - (len(shown) - 1) / 2) * width for i in range(len(sites))]
        colour = _COLOURS[[r.label for r in runs].index(run.label) % len(_COLOURS)]
        axis.bar(at, [scale * v for v in numbers], width, color=colour, label=run.label)
    step = max(1, len(sites) // 40)
    axis.set_xticks(
        range(0, len(sites), step), [s if len(s) < 24 else s[:22] + "…" for s in sites[::step]], rotation=35, ha="right"
    )
    if values == "metric":
        axis.set_ylabel(f"{metric}, %" if metric == "accuracy" else metric)
    else:
        axis.axhline(1 / len(sites), color="0.5", lw=0.8, ls=":")
        axis.set_ylabel("weight λ of the site")
    axis.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0)
    return figure


def whiskers(
    labels: Sequence[str], kinds: Mapping[str, Sequence[Mapping[str, float]]], axis_label: str, scale: float = 1
) -> Any:
    """Draws one row per label with a point and its interval for each kind.

    Args:
        labels: The names of the rows, from top to bottom.
        kinds: By the name of each kind, one {"mean", "interval"} per row.
        axis_label: What is measured.
        scale: What numbers are multiplied by.
    """
    figure, (axis,) = new_figure(6.4, 0.6 * len(labels) + 1.0, font=10)
    rows = range(len(labels))
    for k, (name, numbers) in enumerate(kinds.items()):
        colour, shift = _COLOURS[k % len(_COLOURS)], 0.22 * (k - (len(kinds) - 1) / 2)
        means, intervals = ([scale * number[key] for number in numbers] for key in ("mean", "interval"))
        at = [row + shift for row in rows]
        style: dict[str, Any] = {"ms": 5, "capsize": 3, "lw": 1.4, "color": colour, "label": name}
        axis.errorbar(means, at, xerr=intervals, fmt="osD^"[k % 4], **style)
        for x, y in zip(means, at):  # the first kind has its numbers above, the others below
            above = {"xytext": (0, 5), "va": "bottom"} if k == 0 else {"xytext": (0, -5), "va": "top"}
            axis.annotate(
                f"{x:.1f}", (x, y), textcoords="offset points", ha="center", fontsize=9, color=colour, **above
            )
    axis.set_yticks(rows, labels)
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
        node_color="#cfe3ea", edge_color="#1f6f8b", width=1.0 if small else 0.3, font_size=8,
    )  # fmt: skip
    axis.set_title(title, fontsize=10)
    axis.axis("off")
    save_figure(figure, path)


def plot(results: Result | Sequence[Result | Run] | Run, path: str | os.PathLike) -> None:
    """Plots the worst site and the mean of sites against rounds and traffic, of one or several results.

    Args:
        results: One result or several, from `fm.train` or `fm.run`.
        path: The picture to write; its suffix gives the format, such as .png, .svg or .pdf.

    Raises:
        BadInput: There is no result, or the picture cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> import fairmesh as fm
        >>> result = fm.run(fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=5))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fm.plot(result, f"{folder}/curves.png")
        ...     pathlib.Path(folder, "curves.png").exists()
        True
    """
    several = [results] if isinstance(results, Result | Run) else list(results)
    runs = [r if isinstance(r, Run) else Run.from_result(r) for r in several]
    if not runs:
        raise BadInput("nothing to plot")
    save_figure(curves(runs), path)
