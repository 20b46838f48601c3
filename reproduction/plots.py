"""Draws the paper's Figures 1 to 4 from the recorded results, with both protocols side by side."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import cos, pi, sin
from pathlib import Path
from typing import Any

import numpy

from fairmesh.topology.graphs import Circulant
from reproduction.lines import Line
from reproduction.paper import COMPRESSIONS, FACTORS, PROTOCOLS
from reproduction.verdicts import RECORDED, Lines

COLOURS = {
    "AD-GDA": "#9a3b3b", "CHOCO-SGD": "#1f6f8b", "DRFA": "#7a8b1f", "DR-DSGD": "#6b4c9a",
    "first instrument": "#1f6f8b", "second instrument": "#9a3b3b", "both, half and half": "#7a8b1f",
    "no compression": "#3b3b3b",
    "quantization 16 bit": "#1f6f8b", "quantization 8 bit": "#7a8b1f", "quantization 4 bit": "#9a3b3b",
    "top 50 %": "#1f6f8b", "top 25 %": "#7a8b1f", "top 10 %": "#9a3b3b",
    "ring": "#9a3b3b", "2D torus": "#7a8b1f", "mesh": "#1f6f8b",
}  # fmt: skip
_STYLE = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
_ABSENT = {"COOS7": "not run: the data has\nto be supplied by hand"}


@dataclass(frozen=True)
class Fit:
    """loss(t) = floor + scale t^-rate."""

    floor: float
    scale: float
    rate: float


def fitted(rounds: Sequence[float], losses: Sequence[float]) -> Fit | None:
    """Fits a curve by least squares, with floor >= 0 and a rate among 0.01, 0.02, ..., 3.

    The fit starts at the round with the highest loss. Returns None if fewer than four points are left or the best curve
    does not fall."""
    start = max(1, int(numpy.argmax(losses)))
    t, y = numpy.asarray(rounds[start:], float), numpy.asarray(losses[start:], float)
    if len(t) < 4:
        return None
    best: tuple[float, Fit] | None = None
    for rate in numpy.arange(1, 301) / 100:
        powers = t**-rate
        (scale, floor), *_ = numpy.linalg.lstsq(numpy.stack([powers, numpy.ones_like(t)], 1), y, rcond=None)
        if floor < 0:
            floor, scale = 0.0, (powers @ y) / (powers @ powers)
        error = float(((floor + scale * powers - y) ** 2).sum())
        if best is None or error < best[0]:
            best = error, Fit(float(floor), float(scale), float(rate))
    return best[1] if best and best[1].scale > 0 else None


def canvas(width: float, height: float, rows: int, columns: int, ratios: Sequence[float] | None = None) -> Any:
    """Returns an empty figure and its axes."""
    """Returns an empty figure and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        figure, axes = pyplot.subplots(
            rows, columns, figsize=(width, height), layout="constrained", squeeze=False, width_ratios=ratios
        )
    pyplot.close(figure)
    return figure, axes


def svg(figure: Any, name: str) -> str:
    """Returns a figure as SVG text that is the same every time."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _no_data(axis: Any, text: str = "not run") -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes, color="0.4")
    axis.axis("off")


def _finished(axis: Any, x: str, y: str, **legend: Any) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8, **legend)


def _alike(axes: Sequence[Any]) -> None:
    """Gives panels that are compared the same vertical scale."""
    filled = [axis for axis in axes if axis.has_data()]
    if filled:
        low, high = (pick(axis.get_ylim()[k] for axis in filled) for k, pick in enumerate((min, max)))
        for axis in filled:
            axis.set_ylim(low, high)


# Figure 1


def _network(axis: Any, nodes: int, odd: int) -> None:
    """Draws the lattice i ± 1, i ± 2 with its last `odd` nodes marked."""
    at = [(sin(2 * pi * k / nodes), cos(2 * pi * k / nodes)) for k in range(nodes)]
    graph = Circulant((1, 2)).graphs(nodes)[0].matrix.tocoo()
    for i, j in zip(graph.row, graph.col):
        if i < j:
            axis.plot(*zip(at[i], at[j]), color="0.75", lw=0.8, zorder=1)
    for name, those in (("first instrument", at[:-odd]), ("second instrument", at[-odd:])):
        axis.scatter(*zip(*those), s=110, color=COLOURS[name], zorder=2, label=name)
    axis.set_aspect("equal")
    axis.margins(0.15)
    axis.axis("off")
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.02))


def figure1(lines: Lines) -> Any:
    """Draws the accuracy for each instrument and for both: AD-GDA solid, CHOCO-SGD dashed."""
    figure, axes = canvas(10.5, 3.6, 1, 3, (0.75, 1, 1))
    _network(axes[0, 0], 10, 2)
    for axis, protocol in zip(axes[0, 1:], PROTOCOLS):
        axis.set_title(f"{protocol} protocol", fontsize=9)
        drawn = 0
        for which, style in (("AD-GDA", "-"), ("CHOCO-SGD", "--")):
            line = lines.line("figure1", f"two cameras, {which}", protocol)
            if line is None:
                continue
            drawn += 1
            groups = line["curve"]["groups"]
            both = [sum(values) / len(values) for values in zip(*groups.values())]
            for name, values in {**groups, "both, half and half": both}.items():
                axis.plot(line["curve"]["round"], values, style, color=COLOURS[name], lw=1.3)
        if not drawn:
            _no_data(axis)
            continue
        for name in ("first instrument", "second instrument", "both, half and half"):
            axis.plot([], [], color=COLOURS[name], label=name)
        for which, style in (("AD-GDA", "-"), ("CHOCO-SGD", "--")):
            axis.plot([], [], style, color="0.3", label=which)
        _finished(axis, "rounds", "accuracy, %", loc="lower right")
    _alike(axes[0, 1:])
    return figure


# Figures 2 and 3


def _convergence(recipe: str, rows: Sequence[str]) -> Callable[[Lines], Any]:
    """Returns a function that draws the worst node's loss against rounds, with fitted rates."""

    def drawn(lines: Lines) -> Any:
        figure, axes = canvas(9.5, 3.6, 1, 2)
        for axis, protocol in zip(axes[0], PROTOCOLS):
            axis.set_title(f"{protocol} protocol", fontsize=9)
            found = [(row, line) for row in rows if (line := lines.line(recipe, row, protocol)) is not None]
            if not found:
                _no_data(axis)
                continue
            for row, line in found:
                x, y = line["curve"]["round"][1:], line["curve"]["worst_loss"][1:]
                fit = fitted(line["curve"]["round"], line["curve"]["worst_loss"])
                label = f"{row}: $t^{{-{fit.rate:.2f}}}$" if fit else row
                axis.plot(x, y, color=COLOURS[row], lw=1.3, label=label)
            axis.set_xscale("log")
            axis.set_yscale("log")
            _finished(axis, "rounds", "loss of the worst node", loc="upper right")
        _alike(axes[0])
        for axis in axes[0]:
            _in_plain_numbers(axis)
        return figure

    return drawn


def _in_plain_numbers(axis: Any) -> None:
    """Labels the logarithmic axis with plain numbers, because losses span less than a decade."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    if not axis.has_data():
        return
    low, high = axis.get_ylim()
    fine = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0, 2.2, 2.5, 3.0)
    coarse = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)
    axis.yaxis.set_major_locator(FixedLocator([m for m in (fine if high < 3 * low else coarse) if low <= m <= high]))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_locator(NullLocator())


# Figure 4


def figure4(lines: Lines) -> Any:
    """Draws the worst-node accuracy against the nominal bits sent by the busiest node."""
    from matplotlib.ticker import NullLocator

    ratios = [1 if any(_compared(lines, setup, protocol) for protocol in PROTOCOLS) else 0.5 for setup in FACTORS]
    figure, axes = canvas(10.5, 6.2, 2, len(FACTORS), ratios)
    for row, protocol in zip(axes, PROTOCOLS):
        for axis, setup in zip(row, FACTORS):
            axis.set_title(f"{setup}, {protocol} protocol", fontsize=9)
            found = _compared(lines, setup, protocol)
            if not found:
                _no_data(axis, _ABSENT.get(setup, "not run"))
                continue
            for which, line in found.items():
                sent, worst = line["curve"]["nominal_bits_busiest"][1:], line["curve"]["worst"][1:]
                style = "--" if which == "CHOCO-SGD" else "-"
                axis.plot(sent, worst, style, color=COLOURS[which], lw=1.3, label=which)
            axis.set_xscale("log")
            axis.xaxis.set_minor_locator(NullLocator())
            x = "nominal bits sent by the busiest node" if protocol == PROTOCOLS[-1] else ""
            _finished(axis, x, "accuracy of the worst node, %" if axis is row[0] else "", loc="upper left")
    for column in axes.T:
        _alike(column)
    return figure


def _compared(lines: Lines, setup: str, protocol: str) -> dict[str, Line]:
    """Returns the runs that Figure 4 compares in a setup."""
    recipes = {"AD-GDA": "figure4", "CHOCO-SGD": "figure4", "DRFA": "table5", "DR-DSGD": "table5"}
    found = {which: lines.line(recipe, f"{setup}, {which}", protocol) for which, recipe in recipes.items()}
    return {which: line for which, line in found.items() if line is not None}


_PLAIN = "no compression"
_DRAWING: dict[str, Callable[[Lines], Any]] = {
    "figure1": figure1,
    "figure2a": _convergence("figure2", (_PLAIN, *COMPRESSIONS[:3])),
    "figure2b": _convergence("figure2", (_PLAIN, *COMPRESSIONS[3:])),
    "figure3": _convergence("figure3", ("ring", "2D torus", "mesh")),
    "figure4": figure4,
}


def drawable(lines: Lines) -> list[str]:
    """Returns the names of the figures for which any row is recorded."""
    return [name for name in _DRAWING if lines.of(name.rstrip("ab"))]


def figures(results: Path = RECORDED, names: Sequence[str] | None = None) -> dict[str, str]:
    """Draws figures, by default all that are recorded. Returns the texts of their SVG files by name."""
    lines = Lines(results)
    return {name: svg(_DRAWING[name](lines), name) for name in names or drawable(lines)}
