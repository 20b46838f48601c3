"""What privacy costs, in accuracy: `python -m reproduction.privacy.cost --data FOLDER` runs it, `--show` prints it.

CHOCO-SGD, AD-GDA and Tracked AD-GDA, with eight candidates each, over epsilons and five splits. The candidate of a
split is the one that is best at the worst site on the four other splits, so no split chooses for itself. A real
consortium would have to pay for such a search, too; here it is free, for all methods alike.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from fairmesh.algorithms import ADGDA, ChocoSGD, TrackedADGDA
from fairmesh.algorithms.base import Algorithm
from fairmesh.algorithms.schedules import Polynomial
from fairmesh.algorithms.weighting import PriorWeights
from fairmesh.compression.compressors import Quantize
from fairmesh.data.site import Site
from fairmesh.privacy.settings import Privacy
from fairmesh.problems.batches import Sampling
from fairmesh.problems.models import FullyConnected, Logistic, Model
from fairmesh.problems.problem import Problem
from fairmesh.regularizers.builtin import ChiSquare
from fairmesh.topology.graphs import Ring
from fairmesh.training.train import train
from reproduction.sites.instruments import shifted, then, thick, thin
from reproduction.sites.problems import Part, _usual, dealt
from reproduction.sites.sources import Pool

RESULTS, SHARES = (Path(__file__).parent / name for name in ("cost.json", "shares.json"))
EPSILONS = (1.0, 2.0, 4.0, 8.0, math.inf)
SPLITS, ROUNDS, BATCH, DELTA = 5, 400, 200, 1e-4
STEPS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


@dataclass(frozen=True)
class Case:
    """Sites with at least 1,000 units each."""

    name: str
    told: str
    pool: str  # the file of images or features
    model: Model
    parts: tuple[Part, ...]
    scale: int = 2  # by which images are reduced; 1 for features


CASES = (
    Case(
        "covariate-mnist",
        "MNIST, 10 sites of 1,000 to 2,000 digits; four write thin, thick, very thick, and thick and shifted strokes",
        "mnist.npz",
        FullyConnected(25),
        (
            *_usual(2000, 1800, 1500, 1300, 1100, 1000),
            Part(1000, "thin", change=thin),
            Part(1000, "thick", change=thick()),
            Part(1000, "very thick", change=thick(2)),
            Part(1000, "thick, shifted", change=then(thick(), shifted(3, 3))),
        ),
    ),
    Case(
        "label-shift-fashion",
        "Fashion-MNIST, 10 sites of 1,000 to 2,000; one holds mostly shirts and coats, one pullovers, one shoes",
        "fashion.npz",
        FullyConnected(25),
        (
            *_usual(2000, 1700, 1400, 1200, 1100, 1000, 1000),
            Part(1000, "shirts and coats", {4: 0.3, 6: 0.5}),
            Part(1000, "pullovers", {2: 0.7}),
            Part(1000, "shoes", {5: 0.25, 7: 0.35, 9: 0.25}),
        ),
    ),
    Case(
        "label-shift-cifar-features",
        "CIFAR-10 as 372 frozen features (histograms of gradients, and colours), 10 sites; one holds mostly cats and "
        "dogs, one birds and deer, one cars and lorries",
        "cifar.npz",
        Logistic(),
        (
            *_usual(2000, 1700, 1400, 1200, 1100, 1000, 1000),
            Part(1000, "cats and dogs", {3: 0.45, 5: 0.35}),
            Part(1000, "birds and deer", {2: 0.4, 4: 0.4}),
            Part(1000, "cars and lorries", {1: 0.4, 9: 0.4}),
        ),
        1,
    ),
)


def _methods() -> dict[str, list[Algorithm]]:
    """Returns the candidates of each method: eight steps, which fall to zero at the end."""

    def falling(step: float) -> Polynomial:
        return Polynomial(step, power=1.0)

    coded: dict[str, Any] = {"compressor": Quantize(bits=4), "consensus_step": 0.3}
    fixed, tracked = TrackedADGDA(weighting=PriorWeights()), TrackedADGDA()
    start = tracked.primal_step
    assert isinstance(start, Polynomial)  # noqa: S101
    shorter = [replace(start, start=start.start * factor / 4) for factor in STEPS]
    return {
        "CHOCO-SGD": [ChocoSGD(falling(step), **coded) for step in STEPS],
        "AD-GDA": [ADGDA(falling(step), 0.01, regularizer=ChiSquare(0.01), **coded) for step in STEPS],
        "Tracked, fixed weights": [replace(fixed, primal_step=step) for step in shorter],
        "Tracked AD-GDA": [replace(tracked, primal_step=step) for step in shorter],
    }


def _pool(folder: Path, case: Case) -> Callable[[Any], Pool]:
    held = np.load(folder / case.pool)
    train, test = ((_inputs(held[f"x_{k}"]), torch.from_numpy(held[f"y_{k}"]).long()) for k in ("train", "test"))
    return lambda rng: Pool(train, test, case.scale)


def _inputs(stored: np.ndarray) -> Tensor:
    inputs = torch.from_numpy(stored)
    return inputs.float() if inputs.is_floating_point() else inputs


def _sites(case: Case, folder: Path) -> list[list[Site]]:
    deal = dealt(_pool(folder, case), case.parts, 1000)
    return [deal(split) for split in range(SPLITS)]


def run(
    folder: Path, device: str, cases: Sequence[str], epsilons: Sequence[float], shares: Sequence[float] = ()
) -> Iterator[dict[str, Any]]:
    """Yields a row per case, method and epsilon: the accuracy of every candidate at every site of every split. With
    shares of the budget for the losses, of Tracked AD-GDA a row for each of them."""
    for case in CASES:
        if cases and case.name not in cases:
            continue
        every = _sites(case, folder)
        shape = every[0][0].train[0].shape[1:]
        methods = {name: found for name, found in _methods().items() if not shares or name == "Tracked AD-GDA"}
        for epsilon, share in itertools.product(epsilons, shares or [None]):
            settings = {} if share is None else {"loss_share": share}
            privacy = None if epsilon == math.inf else Privacy(epsilon, DELTA, repeatable=True, **settings)
            torch.manual_seed(0)
            module = case.model.build(torch.Size(shape), 10)
            problems = [Problem(module, sites, sampling=Sampling(batch=BATCH), privacy=privacy) for sites in every]
            for method, candidates in methods.items():
                began = time.perf_counter()
                result = train(
                    problems, Ring(), candidates, ROUNDS, device=device, measure_every=ROUNDS, on_divergence="mark",
                    count_bytes=False,
                )  # fmt: skip
                tables: list[list[list[float]]] = [[[] for _ in range(SPLITS)] for _ in candidates]
                for record in result.final:
                    replica = result.replicas[record["replica"]]
                    k = candidates.index(
                        _unfitted(candidates, replica.algorithm, record["replica"], len(result.replicas))
                    )
                    tables[k][replica.split] = [round(value, 4) for value in record["accuracy"]["sites"]]
                yield {
                    "case": case.name,
                    "method": method,
                    "epsilon": None if epsilon == math.inf else epsilon,
                    **({} if share is None else {"share": share}),
                    "spent": result.privacy.get("epsilon"),
                    "accuracy": tables,
                    "seconds": round(time.perf_counter() - began, 1),
                }


def _unfitted(candidates: Sequence[Algorithm], algorithm: Algorithm, number: int, replicas: int) -> Algorithm:
    """Returns the candidate that a replica was made of: replicas come candidate by candidate."""
    return candidates[number * len(candidates) // replicas]


def chosen(row: dict[str, Any], score: Callable[[Sequence[float]], float] = min) -> list[list[float]]:
    """Returns the sites' accuracy in each split, with the candidate that is best on the other splits."""
    tables = row["accuracy"]
    found = []
    for split in range(SPLITS):
        others = [k for k in range(SPLITS) if k != split]
        scores = [
            statistics.fmean(score(of_splits[k]) if of_splits[k] else 0.0 for k in others) for of_splits in tables
        ]
        found.append(tables[int(np.argmax(scores))][split])
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns mean and half width of a 95 % interval over splits, by Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), float(half)


def _show(rows: Sequence[dict[str, Any]]) -> None:
    for case in CASES:
        here = [row for row in rows if row["case"] == case.name]
        if not here:
            continue
        methods = list(dict.fromkeys(row["method"] for row in here))
        print(f"\n### {case.name}\n\n{case.told}.\n")
        for title, score in (("worst site", min), ("mean over sites", statistics.fmean)):
            print(f"| {title}, % | {' | '.join(methods)} |\n|---|{'---|' * len(methods)}")
            for epsilon in EPSILONS:
                cells = []
                for method in methods:
                    row = _row(here, method, epsilon)
                    mean, half = interval([100 * score(sites) for sites in chosen(row)]) if row else (math.nan, 0)
                    cells.append(f"{mean:.1f} ±{half:.1f}")
                print(f"| epsilon {epsilon:g} | {' | '.join(cells)} |")
            print()
        for first, second in (("AD-GDA", "CHOCO-SGD"), ("Tracked AD-GDA", "Tracked, fixed weights")):
            print(f"- {first} minus {second}, at the worst site: {', '.join(_gains(here, first, second))}")


def _show_shares(rows: Sequence[dict[str, Any]]) -> None:
    shares = sorted({row["share"] for row in rows})
    for title, score in (("worst site", min), ("mean over sites", statistics.fmean)):
        print(f"| {title}, % | {' | '.join(f'{share:g}' for share in shares)} |\n|---|{'---|' * len(shares)}")
        for case, epsilon in dict.fromkeys((row["case"], row["epsilon"]) for row in rows):
            here = {row["share"]: row for row in rows if (row["case"], row["epsilon"]) == (case, epsilon)}
            found = [interval([100 * score(sites) for sites in chosen(here[share])]) for share in shares]
            cells = [f"{mean:.1f} ±{half:.1f}" for mean, half in found]
            print(f"| {case}, epsilon {epsilon:g} | {' | '.join(cells)} |")
        print()


def _row(rows: Sequence[dict[str, Any]], method: str, epsilon: float) -> dict[str, Any] | None:
    wanted = None if epsilon == math.inf else epsilon
    return next((row for row in rows if row["method"] == method and row["epsilon"] == wanted), None)


def _gains(rows: Sequence[dict[str, Any]], first: str, second: str) -> Iterator[str]:
    """Yields the paired difference at the worst site, for each epsilon."""
    for epsilon in EPSILONS:
        a, b = (_row(rows, method, epsilon) for method in (first, second))
        if a and b:
            pairs = [100 * (min(x) - min(y)) for x, y in zip(chosen(a), chosen(b))]
            mean, half = interval(pairs)
            yield f"{mean:+.1f} ±{half:.1f} (epsilon {epsilon:g})"


def features(images: Tensor) -> Tensor:
    """Returns 372 features of images (n, 3, 32, 32) of bytes: histograms of gradients over cells of 8 x 8 pixels, nine
    orientations, normalised over blocks of 2 x 2 cells; and the mean colours of a grid of 4 x 4. No data is needed."""
    x = images.float() / 255
    grey = torch.nn.functional.pad(x.mean(dim=1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    right, down = (grey[:, :, 1:-1, 2:] - grey[:, :, 1:-1, :-2]), (grey[:, :, 2:, 1:-1] - grey[:, :, :-2, 1:-1])
    length, angle = (right**2 + down**2).sqrt(), torch.atan2(down, right) % math.pi
    centres = (torch.arange(9) + 0.5) * math.pi / 9
    apart = (angle - centres[:, None, None]).abs()
    near = (1 - torch.minimum(apart, math.pi - apart) * 9 / math.pi).clamp(min=0)
    cells = torch.nn.functional.avg_pool2d(length * near, 8)  # (n, 9, 4, 4)
    blocks = torch.nn.functional.unfold(cells, 2)  # (n, 36, 9)
    blocks = blocks / (blocks.norm(dim=1, keepdim=True) + 0.01)
    colours = torch.nn.functional.avg_pool2d(x, 8) - 0.5
    return torch.cat([blocks.flatten(1) * 3, colours.flatten(1) * 3], dim=1)


def make_pools(out: Path) -> None:
    """Writes 20,000 training and 5,000 test rows of each dataset, as the runs use them."""
    from reproduction.sites.sources import pool_of

    out.mkdir(parents=True, exist_ok=True)
    for name, file in (("mnist", "mnist.npz"), ("fashion-mnist", "fashion.npz"), ("cifar-10", "cifar.npz")):
        pool = pool_of(name)
        train, test = ((x[:count], y[:count]) for (x, y), count in ((pool.train, 20_000), (pool.test, 5_000)))
        held = {}
        for k, (x, y) in (("train", train), ("test", test)):
            inputs = features(x.view(-1, 3, 32, 32)).half() if name == "cifar-10" else x
            held |= {f"x_{k}": inputs.numpy(), f"y_{k}": y.numpy().astype("uint8")}
        np.savez_compressed(out / file, **held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of mnist.npz, fashion.npz and cifar.npz")
    parser.add_argument("--pools", type=Path, help="write these files here, from the datasets in FAIRMESH_DATA")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--epsilon", action="append", type=float, default=[])
    parser.add_argument("--share", action="append", type=float, default=[], help="of the budget, for the losses")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    given.out = given.out or (SHARES if given.share else RESULTS)
    if given.pools:
        make_pools(given.pools)
    if given.data:
        rows = json.loads(given.out.read_text()) if given.out.exists() else []
        key = ("case", "method", "epsilon", "share")
        for row in run(given.data, given.device, given.case, given.epsilon or EPSILONS, given.share):
            rows = [r for r in rows if any(r.get(name) != row.get(name) for name in key)] + [row]
            given.out.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")
            print(row["case"], row["method"], row["epsilon"], row["seconds"], "s", flush=True)
    if given.show:
        _show(json.loads(RESULTS.read_text()))
        print("### Share of the budget for the losses that weights follow\n")
        _show_shares(json.loads(SHARES.read_text()))


if __name__ == "__main__":
    main()
