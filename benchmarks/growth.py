"""`python -m benchmarks growth`: how the time of a round grows with nodes, parameters, batch size and replicas."""

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.rounds import Setting, stack
from fairmesh.numerics import malloc
from fairmesh.problems.models import FullyConnected
from fairmesh.training.options import device_of

ROOT = Path(__file__).parents[1]
BASE = {"nodes": 20, "hidden": 25, "batch": 50, "replicas": 1}  # a 784-25-10 network, 19,885 parameters
GRID = {
    "nodes": [5, 10, 20, 50, 100, 200, 500],
    "hidden": [3, 6, 12, 25, 50, 100, 200, 400],
    "batch": [1, 5, 10, 20, 50, 100, 200],
    "replicas": [1, 2, 4, 8, 16],
}
Curve = list[tuple[int, float]]  # the value varied, and milliseconds per round


def milliseconds(device: torch.device, nodes: int, hidden: int, batch: int, replicas: int) -> float:
    """Returns the median time of a round, over at least three rounds and at most two seconds."""
    setting = Setting(nodes, 200, (1, 28, 28), 10, FullyConnected(hidden), batch, dual_step=min(0.01, 0.5 / nodes))
    step = stack(setting.problem(), setting, replicas, device)
    times, started = [], time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - started < 2.0 and len(times) < 100):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def curves(device: str) -> Iterator[tuple[str, Curve]]:
    """Yields each varied quantity with its curve; the other quantities stay as in BASE."""
    where = device_of(device)
    with malloc.reused():
        for axis, values in GRID.items():
            yield axis, [(value, milliseconds(where, **(BASE | {axis: value}))) for value in values]


def record(found: dict[str, Curve], device: str) -> list[Path]:
    """Writes benchmarks/results/growth-DEVICE.json and docs/pictures/growth-DEVICE.png. Returns their paths."""
    results = ROOT / "benchmarks" / "results" / f"growth-{device}.json"
    results.write_text(json.dumps({"device": device, "base": BASE, "milliseconds": found}, indent=1) + "\n")
    picture = ROOT / "docs" / "pictures" / f"growth-{device}.png"
    _drawn(found, device).savefig(picture, dpi=110)
    return [results, picture]


def _drawn(found: dict[str, Curve], device: str):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"nodes": "nodes", "hidden": "parameters", "batch": "samples per batch", "replicas": "replicas"}
    figure, axes = pyplot.subplots(1, 4, figsize=(13, 3.2), sharey=True, layout="constrained")
    pyplot.close(figure)
    for panel, (axis, points) in zip(axes, found.items()):
        xs = [795 * x + 10 if axis == "hidden" else x for x, _ in points]
        ys = [y for _, y in points]
        panel.loglog(xs, ys, "o-", color="tab:blue", label="measured")
        panel.loglog(xs, [ys[-1] * x / xs[-1] for x in xs], ":", color="gray", label="proportional")
        panel.set_xlabel(titles[axis])
        panel.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("ms per round")
    axes[0].legend()
    figure.suptitle(
        f"A round of AD-GDA on {device}: ring of 20 nodes, 784-25-10 network, batch 50, 4 bits; one quantity varied"
    )
    return figure
