"""Draws the pictures of docs/concepts: python docs/pictures/concepts.py

Everything in them is computed here, by fairmesh's mixing matrices and compressors on problems that fit on a page.
"""

import html
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fairmesh as fm
from fairmesh.numerics.random_streams import Draw, keys
from fairmesh.report.style import COLOURS, MARKERS, loaded_matplotlib, new_figure

HERE = Path(__file__).parent
NODES = 16
_FRAME = "#808080"  # lines that are visible on white and on black


def line(axis: Any, k: int, x: Any, y: Any, label: str, **style: Any) -> None:
    """Draws the k-th line of a picture, with a colour and a marker of its own."""
    every = max(1, len(x) // 8)
    look = {"color": COLOURS[k], "marker": MARKERS[k], "markevery": (every // 2, every), "markersize": 5, **style}
    axis.plot(x, y, label=label, **look)


def robust() -> tuple[Any, str]:
    """Returns the losses of two sites, and the models that are best for their average and for their worst mixture."""
    x = np.linspace(-1.2, 2.2, 171)
    large, small = 0.25 + 0.45 * x**2, 0.2 + 0.7 * (x - 1.25) ** 2
    average, worst = 0.8 * large + 0.2 * small, np.maximum(large, small)
    figure, (axis,) = new_figure(5.6, 3.9, font=10)
    line(axis, 0, x, large, "large site, 80 % of the rows")
    line(axis, 1, x, small, "small site, 20 %")
    line(axis, 6, x, average, "average over rows", linestyle="--", marker=None)
    line(axis, 7, x, worst, "worst mixture", linewidth=3, alpha=0.4, marker=None)
    for values, name, side in ((average, "best for the average", "right"), (worst, "best for the worst", "left")):
        best = x[values.argmin()]
        axis.axvline(best, color="#808080", linestyle=":")
        axis.annotate(name, (best, 0.06), ha=side, xytext=(-4 if side == "right" else 4, 0), textcoords="offset points")
        axis.plot([best, best], [large[values.argmin()], small[values.argmin()]], "o", color="black", markersize=4)
    axis.set(xlabel="model", ylabel="loss", ylim=(0, 2), xlim=(-1.2, 2.2))
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure, "Loss of two sites against the model. The best model for the average is bad for the small site."


def gossip() -> tuple[Any, str]:
    """Returns how fast nodes on four graphs agree on their average."""
    start = np.random.default_rng(0).standard_normal((NODES, 500))
    start -= start.mean(axis=0)
    graphs = {"ring": fm.Ring(), "torus": fm.topologies.Torus(4, 4), "exponential": fm.topologies.Exponential(),
              "complete": fm.topologies.Complete()}  # fmt: skip
    figure, (axis,) = new_figure(5.6, 3.7, font=10)
    for k, (name, graph) in enumerate(graphs.items()):
        (mixing,) = graph.build(NODES)
        values, errors = start, []
        for _ in range(61):
            errors.append(max(np.linalg.norm(values) / np.linalg.norm(start), 1e-9))
            values = mixing.matrix @ values
        degree = int((mixing.matrix.toarray()[0] > 0).sum()) - 1
        line(axis, k, range(61), errors, f"{name}: degree {degree}, gap {mixing.gap:.2f}")
    axis.set(xlabel="rounds", ylabel="disagreement, relative", yscale="log", ylim=(1e-6, 1.5))
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure, "Disagreement of 16 nodes against rounds of gossip, on four graphs. More neighbours agree faster."


def compression() -> tuple[Any, str]:
    """Returns how nodes agree by the bits that they send: of everything, of rounded values, of rounded differences."""
    figure, (axis,) = new_figure(5.6, 3.7, font=10)
    four_bits = fm.compressors.Quantize(4, block=50)
    for k, (label, compressor, differences, gamma, bits) in enumerate([
        ("float32", fm.compressors.Identity(), True, 1.0, 32),
        ("values in 4 bits", four_bits, False, 0.6, 4),
        ("differences in 4 bits", four_bits, True, 0.6, 4),
    ]):  # fmt: skip
        errors = _compressed_gossip(compressor, differences, gamma, 2400 // bits)
        line(axis, k, bits * np.arange(len(errors)), errors, label)
    axis.set(xlabel="nominal bits sent per parameter and neighbour", ylabel="disagreement, relative", yscale="log")
    axis.set(ylim=(1e-6, 1.5))
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure, "Disagreement of 16 nodes on a ring by bits sent. Rounded values stop, rounded differences go on."


def _compressed_gossip(compressor: Any, differences: bool, gamma: float, rounds: int) -> list[float]:
    """Returns the disagreement of nodes in each round, relative to the first."""
    (mixing,) = fm.Ring().build(NODES)
    weights = torch.from_numpy(mixing.matrix.toarray())
    x = torch.randn(NODES, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    average, copies, errors = x.mean(dim=0), torch.zeros_like(x), []
    for t in range(rounds):
        errors.append(float((x - average).norm()))
        draw = Draw(keys(torch.tensor(0), "picture", t, torch.arange(NODES)), x.dtype)
        sent = compressor.compress(x - copies if differences else x, draw).decode()
        copies = copies + sent if differences else sent
        x = x + gamma * (weights @ copies - copies)
    return [max(error / errors[0], 1e-9) for error in errors]


def tracking() -> tuple[Any, str]:
    """Returns how far nodes with different data end from the best common model, with and without tracking."""
    nodes = 8
    (mixing,) = fm.Ring().build(nodes)
    weights = mixing.matrix
    curvatures, centres = np.random.default_rng(1).uniform(0.3, 1.0, (2, nodes, 20))
    centres = 4 * centres - 2
    best = (curvatures * centres).sum(axis=0) / curvatures.sum(axis=0)
    figure, (axis,) = new_figure(5.6, 3.7, font=10)
    rounds, k = 300, 0
    for tracked in (False, True):
        for step in (0.3, 0.1):
            x, before, direction, errors = np.zeros((nodes, 20)), 0.0, 0.0, []
            for _ in range(rounds):
                errors.append(max(np.linalg.norm(x - best) / np.linalg.norm(np.zeros_like(x) - best), 1e-9))
                gradient = curvatures * (x - centres)
                direction = weights @ direction + gradient - before if tracked and errors[1:] else gradient
                before = gradient
                x = weights @ (x - step * direction)
            line(axis, k, range(rounds), errors, f"{'tracked' if tracked else 'own'} gradient, step {step}")
            k += 1
    axis.set(xlabel="rounds", ylabel="distance to the best model, relative", yscale="log", ylim=(1e-6, 1.5))
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure, "Distance of 8 nodes to the best common model. With their own gradients they stop at a distance."


DRAWINGS: dict[str, Callable[[], tuple[Any, str]]] = {
    "robust": robust,
    "gossip": gossip,
    "compression": compression,
    "tracking": tracking,
}


def svg(figure: Any, description: str) -> str:
    """Returns a figure as an <svg> element for a page: its text is text, so that the page can set its colour and a
    screen reader can read it, and its background is the page's.

    Args:
        figure: The figure.
        description: What the picture shows, for readers who do not see it. It also keeps the ids of several figures
            on one page apart.
    """
    matplotlib = loaded_matplotlib()
    for axis in figure.axes:
        axis.tick_params(color=_FRAME)
        for spine in axis.spines.values():
            spine.set_color(_FRAME)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": description, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r'(<g) id="[^"]*"', r"\1", text)  # nothing refers to groups, and their ids repeat on the page
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(description)}" ', 1)


def drawn(name: str) -> str:
    """Returns a picture as SVG."""
    return svg(*DRAWINGS[name]()) + "\n"


if __name__ == "__main__":
    for name in DRAWINGS:
        (HERE / f"{name}.svg").write_text(drawn(name), encoding="utf-8")
