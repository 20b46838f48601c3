"""Draws what fairmesh does, from two real runs: `python docs/pictures/two_sites.py` writes two-sites.gif and .png.

Two sites hold points of two classes. Most points are at the first site, and the second one needs another line. One
model, a straight line, is trained for both: once with weights by the number of points, and once for the worst mixture.
"""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import fairmesh as fm
from fairmesh.report.style import COLOURS, MARKERS, new_figure

HERE = Path(__file__).parent
ROUNDS, EVERY = 320, 10
FRAME_MS, LAST_MS = 100, 1900  # five seconds in all
NAMES, SIZES, ANGLES = ("large site", "small site"), (360, 40), (30.0, -45.0)
METHODS = {
    "for the average": fm.TrackedADGDA().with_fixed_weights(),
    "for the worst mixture": fm.TrackedADGDA(),
}


def sites() -> list[fm.Site]:
    """Returns the two sites. Their classes lie on the two sides of a line, which has another angle at each site."""
    generator, found = torch.Generator().manual_seed(4), []
    for name, size, angle in zip(NAMES, SIZES, ANGLES):
        across = torch.tensor([math.cos(math.radians(angle)), math.sin(math.radians(angle))])
        along = torch.stack([-across[1], across[0]])
        clouds = []
        for count in (size, 2000):
            labels, noise = torch.arange(count) % 2, torch.randn(count, 2, generator=generator)
            inputs = (2 * labels[:, None] - 1 + 0.4 * noise[:, :1]) * across + 0.85 * noise[:, 1:] * along
            clouds.append((inputs, labels))
        found.append(fm.Site(clouds[0], test=clouds[1], name=name))
    return found


def run(problem: fm.Problem, algorithm: fm.algorithms.Algorithm) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Returns the network's average model and what was measured, after every tenth round."""
    models = []

    def keep(done: int, state: Any) -> None:
        if done % EVERY == 0:
            models.append(state.algorithm.models[0].mean(dim=0).clone())

    result = fm.train(
        problem, fm.topologies.Complete(), algorithm, ROUNDS, measure_every=EVERY, observers=[keep], seeds=(1,)
    )
    return models, result.records


def drawn(problem: fm.Problem, runs: dict[str, tuple[list[torch.Tensor], list[dict[str, Any]]]], frame: int) -> Any:
    """Returns the picture after some rounds: both runs with their points and their line, and both sites' accuracy."""
    figure, axes = new_figure(7.2, 4.3, rows=2, columns=2, font=10, height_ratios=(3.2, 1))
    for column, (name, (models, records)) in enumerate(runs.items()):
        points, bars = axes[column], axes[2 + column]
        draw_points(points, problem)
        draw_line(points, models[frame])
        points.set_title(name, fontsize=12, weight="bold")
        draw_bars(bars, [100 * value for value in records[frame]["accuracy"]["sites"]], records[frame].get("lambda"))
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False, fontsize=10,
        title=f"Two sites train one model, a straight line: round {frame * EVERY} of {ROUNDS}", title_fontsize=10,
    )  # fmt: skip
    return figure


def draw_points(axis: Any, problem: fm.Problem) -> None:
    """Draws a share of each site's points. The site is the colour and the marker, the class is full or empty."""
    for k, site in enumerate(problem.sites):
        inputs, labels = site.train.inputs[:160], site.train.targets[:160]
        for label in (0, 1):
            chosen, colour = inputs[labels == label], COLOURS[k]
            face = {"facecolors": colour} if label else {"facecolors": "white"}
            name = {"label": f"{site.name}, {len(site.train)} points"} if label else {}
            axis.scatter(
                *chosen.T.tolist(), 22 + 22 * k, marker=MARKERS[3 * k], edgecolors=colour, linewidths=1.0, zorder=2 + k,
                **face, **name,
            )  # fmt: skip
    axis.set(xlim=(-3.0, 3.2), ylim=(-2.5, 2.5), xticks=[], yticks=[])
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)


def draw_line(axis: Any, model: torch.Tensor) -> None:
    """Draws where the model gives both classes the same probability."""
    weight, bias = model[:4].view(2, 2), model[4:]
    (a, b), c = (weight[1] - weight[0]).tolist(), float(bias[1] - bias[0])
    norm = math.hypot(a, b)
    x, y = -c * a / norm**2, -c * b / norm**2
    ends = [(x + side * 9 * b / norm, y - side * 9 * a / norm) for side in (-1, 1)]
    axis.plot(*zip(*ends), color="white", lw=4, zorder=4)
    axis.plot(*zip(*ends), color="black", lw=2.6, zorder=5)


def draw_bars(axis: Any, values: Sequence[float], weights: Sequence[float] | None) -> None:
    """Draws the accuracy at both sites, and the weight of each in training: its share of the points, or lambda."""
    shares = [size / sum(SIZES) for size in SIZES] if weights is None else weights
    for k, value in enumerate(values):
        axis.barh(k, value - 50, 0.6, left=50, color=COLOURS[k], hatch="/////" * k, edgecolor="white", lw=0)
        axis.text(max(value, 50) + 1, k, f"{value:.0f} %", va="center", fontsize=12, weight="bold")
    axis.set_yticks(range(2), [f"{name}\nweight {share:.2f}" for name, share in zip(NAMES, shares)])
    axis.set(xlim=(50, 112), ylim=(1.5, -0.5), xticks=(50, 60, 70, 80, 90, 100))
    axis.set_xlabel("accuracy on test points, % (50: guessing)", fontsize=9)


def image(figure: Any, dpi: int) -> Image.Image:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return Image.open(buffer).convert("RGB")


def main() -> None:
    torch.manual_seed(0)  # of the model to start from
    problem = fm.Problem(torch.nn.Linear(2, 2), sites())
    runs = {name: run(problem, algorithm) for name, algorithm in METHODS.items()}
    frames = [image(drawn(problem, runs, k), 100) for k in range(1 + ROUNDS // EVERY)]
    palette = frames[-1].quantize(48)
    pictures = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [FRAME_MS] * (len(frames) - 1) + [LAST_MS]
    pictures[0].save(
        HERE / "two-sites.gif", save_all=True, append_images=pictures[1:], duration=times, loop=0, optimize=True
    )
    image(drawn(problem, runs, ROUNDS // EVERY), 200).quantize(96).save(HERE / "two-sites.png", optimize=True)
    for name, (_, records) in runs.items():
        shown = ", ".join(f"{site} {100 * v:.1f} %" for site, v in zip(NAMES, records[-1]["accuracy"]["sites"]))
        print(f"{name}: {shown}")


if __name__ == "__main__":
    main()
