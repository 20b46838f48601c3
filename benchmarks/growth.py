"""How the time of a round grows with nodes, parameters, batch and replicas: `python benchmarks/growth.py cpu`, which
writes benchmarks/results/growth-cpu.json and docs/growth-cpu.png (or cuda)."""

import json
import statistics
import sys
import time
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


def milliseconds(device: torch.device, nodes: int, hidden: int, batch: int, replicas: int) -> float:
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


def main(name: str) -> None:
    device, found = device_of(name), {}
    with malloc.reused():
        for axis, values in GRID.items():
            found[axis] = [[value, milliseconds(device, **(BASE | {axis: value}))] for value in values]
            print(axis, found[axis], flush=True)
    results = ROOT / "benchmarks" / "results" / f"growth-{name}.json"
    results.write_text(json.dumps({"device": name, "base": BASE, "milliseconds": found}, indent=1) + "\n")
    draw(found, name)


def draw(found: dict[str, list[list[float]]], name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"nodes": "nodes", "hidden": "parameters", "batch": "samples in a batch", "replicas": "replicas"}
    figure, axes = pyplot.subplots(1, 4, figsize=(13, 3.2), sharey=True, layout="constrained")
    for panel, (axis, points) in zip(axes, found.items()):
        xs = [795 * x + 10 if axis == "hidden" else x for x, _ in points]
        ys = [y for _, y in points]
        panel.loglog(xs, ys, "o-", color="tab:blue", label="measured")
        panel.loglog(xs, [ys[-1] * x / xs[-1] for x in xs], ":", color="gray", label="in proportion")
        panel.set_xlabel(titles[axis])
        panel.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("ms a round")
    axes[0].legend()
    figure.suptitle(
        f"A round of AD-GDA on a ring, 784-25-10 network, 20 nodes, batch 50, 4 bits, on {name}; one varied"
    )
    figure.savefig(ROOT / "docs" / f"growth-{name}.png", dpi=110)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
