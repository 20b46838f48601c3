"""How often the 95 % interval of the mean over sites covers the truth, and how wide it is, on synthetic sites.

`python -m tests.evidence.means_coverage` prints the tables of docs/concepts/evidence.md. Intervals are those that
tables, reports and comparisons have: `Outcomes.mean` and `versus`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr

from fairmesh.evidence import Outcomes
from fairmesh.evidence.outcomes import Answers
from fairmesh.evidence.verdicts import mean_difference

Draw = Callable[[np.random.Generator, int, int, int], tuple[tuple[float, float, float], float]]
# (random numbers, sites, rows, splits) -> estimate and both ends, truth


@dataclass(frozen=True)
class Cell:
    """What was measured for one number of sites, rows and splits.

    Args:
        covered: The share of intervals that contain the truth.
        width: Their mean width, in multiples of that of the interval of somebody who knows the error of the estimate:
            2 * 1.96 standard deviations of the estimate around the truth.
    """

    covered: float
    width: float


def outcomes(scores: Sequence[Any], ids: Any, metric: str) -> Outcomes:
    """Returns outcomes with these scores at the rows of each split and site."""
    answers, sites = [], len(scores[0])
    for k, of_split in enumerate(scores):
        for i, score in enumerate(of_split):
            row = torch.from_numpy(np.asarray(score)[None])
            right = row.to(torch.uint8) if metric == "accuracy" else None
            answers.append(Answers(f"{k} {i}", row.float(), right, rows=torch.from_numpy(ids[k][i])))
    numbers = np.arange(len(answers)).reshape(len(scores), sites).tolist()
    names = tuple(f"site {i}" for i in range(sites))
    return Outcomes(names, metric, metric == "accuracy", tuple(answers), tuple(map(tuple, numbers)))


def _test_rows(rng: np.random.Generator, rows: int, splits: int) -> np.ndarray:
    """Returns the numbers of a site's test rows in each split: a quarter of its rows (splits, rows)."""
    return np.argsort(rng.uniform(size=(splits, 4 * rows)), axis=1)[:, :rows] if splits > 1 else np.arange(rows)[None]


def _found(one: Outcomes) -> tuple[float, float, float]:
    estimate = one.mean()
    return (estimate.value, *estimate.interval())


def accuracies(
    truths_of: Callable[[np.random.Generator, int], np.ndarray], by_chance: float = 0.0, sizes: tuple[float, ...] = (1,)
) -> Draw:
    """Sites with these accuracies. At a share `by_chance` of its appearances a row is answered anew in each split; else
    all models answer it alike. Sites have `sizes` times as many rows."""

    def draw(rng: np.random.Generator, sites: int, rows: int, splits: int):
        truths = truths_of(rng, sites)
        scores: list[list[np.ndarray]] = [[] for _ in range(splits)]
        ids: list[list[np.ndarray]] = [[] for _ in range(splits)]
        for truth, count in zip(truths, np.resize([max(1, round(size * rows)) for size in sizes], sites).tolist()):
            tests = _test_rows(rng, count, splits)
            drawn = rng.uniform(size=4 * count)[tests]
            drawn = np.where(rng.uniform(size=tests.shape) < by_chance, rng.uniform(size=tests.shape), drawn)
            for k in range(splits):
                scores[k].append(drawn[k] < truth)
                ids[k].append(tests[k])
        return _found(outcomes(scores, ids, "accuracy")), float(truths.mean())

    return draw


def trained(spread: float) -> Draw:
    """Sites that train a linear classifier together on the rows that are not for testing; how well the classes can be
    told apart differs by `spread` between sites."""
    signal, cached = np.array([1.2, *[0.0] * 9]), {}

    def strengths(sites: int) -> np.ndarray:
        return np.linspace(0.9 - spread, 0.9 + spread, sites)

    def truth(sites: int, rows: int) -> float:
        if (sites, rows) not in cached:
            rng, count = np.random.default_rng([sites, rows]), 3 * rows * sites
            models = rng.normal(size=(20_000, 10)) * np.sqrt(count) + signal * strengths(sites).sum() * 3 * rows
            clear = models[:, :1] / np.linalg.norm(models, axis=1, keepdims=True) * 1.2 * strengths(sites)
            cached[sites, rows] = float(ndtr(clear).mean())
        return cached[sites, rows]

    def draw(rng: np.random.Generator, sites: int, rows: int, splits: int):
        labels = rng.choice([-1.0, 1.0], size=(sites, 4 * rows))
        inputs = rng.normal(size=(sites, 4 * rows, 10)) + labels[..., None] * signal * strengths(sites)[:, None, None]
        towards = inputs * labels[..., None]
        order = np.argsort(rng.uniform(size=(splits, sites, 4 * rows)), axis=-1)
        tests = order[..., :rows]
        place = np.arange(sites)[:, None]
        scores = [
            towards[place, test] @ towards[place, rest].sum(axis=(0, 1)) > 0
            for test, rest in zip(tests, order[..., rows:])
        ]
        return _found(outcomes(scores, tests, "accuracy")), truth(sites, rows)

    return draw


def numbers(draw_rows: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray], mean: float) -> Draw:
    """Losses of this distribution and mean, in other units at each site."""

    def draw(rng: np.random.Generator, sites: int, rows: int, splits: int):
        units = rng.uniform(0.5, 2.0, size=sites)
        tests = np.stack([_test_rows(rng, rows, splits) for _ in range(sites)], axis=1)
        every = draw_rows(rng, (sites, 4 * rows)) * units[:, None]
        scores = [every[np.arange(sites)[:, None], test] for test in tests]
        return _found(outcomes(scores, tests, "loss")), float(mean * units.mean())

    return draw


def differences(only_a: float, only_b: float) -> Draw:
    """Two models on the same rows: only the one is right at this share of them on average, only the other at that."""

    def draw(rng: np.random.Generator, sites: int, rows: int, splits: int):
        factors = rng.uniform(0.5, 1.5, size=(sites, 1))
        tests = np.stack([_test_rows(rng, rows, splits) for _ in range(sites)], axis=1)
        u = rng.uniform(size=(sites, 4 * rows))
        of_a, of_b = u < only_a * factors, (u >= only_a * factors) & (u < (only_a + only_b) * factors)
        place = np.arange(sites)[:, None]
        a, b = (outcomes([one[place, test] for test in tests], tests, "accuracy") for one in (~of_b, ~of_a))
        found = mean_difference(a, b)  # the mean of `versus`
        return (found.value, *found.interval()), float(factors.mean()) * (only_a - only_b)

    return draw


def drawn(low: float, high: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, sites: rng.uniform(low, high, size=sites)


def equal(low: float, high: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, sites: np.full(sites, rng.uniform(low, high))


CASES: dict[str, Draw] = {
    "accuracy 0.6 to 0.98": accuracies(drawn(0.6, 0.98)),
    "accuracy 0.85 to 0.99": accuracies(drawn(0.85, 0.99)),
    "equal accuracies": accuracies(equal(0.6, 0.98)),
    "4 in 10 answers differ between splits": accuracies(drawn(0.6, 0.98), by_chance=0.4),
    "linear classifier": trained(0.4),
    "exponential loss": numbers(lambda rng, shape: rng.exponential(size=shape), 1.0),
    "squared error": numbers(lambda rng, shape: rng.normal(size=shape) ** 2, 1.0),
    "difference, 25 % of rows": differences(0.15, 0.1),
}
HELD_OUT: dict[str, Draw] = {  # no method or constant was chosen by these
    "accuracy 0.5 or 0.95": accuracies(lambda rng, sites: rng.choice([0.5, 0.95], p=[0.3, 0.7], size=sites)),
    "accuracy 0.4 to 0.7, 2 in 10 answers differ": accuracies(drawn(0.4, 0.7), by_chance=0.2),
    "accuracy 0.7 to 0.95, n / 2 to 3 n rows": accuracies(drawn(0.7, 0.95), sizes=(1.0, 0.5, 3.0, 2.0)),
    "accuracy 0.7 to 0.95, every fourth site has a single row": accuracies(
        drawn(0.7, 0.95), sizes=(1.0, 1.0, 1.0, 0.0)
    ),
    "linear classifier, sites alike": trained(0.1),
    "difference, 10 % of rows": differences(0.03, 0.07),
}
SIZES = ((4, 5), (4, 50), (10, 20), (30, 5), (30, 50), (160, 5), (160, 50))
SHOWN = ((4, 5), (4, 50), (10, 20), (30, 5), (160, 5))  # in the documentation
SPLITS = (1, 10)


def measured(case: str, sites: int, rows: int, splits: int, repetitions: int = 1000) -> Cell:
    """Returns how often intervals cover the truth, and how wide they are."""
    rng, draw = np.random.default_rng([sites, rows, splits, *case.encode()]), (CASES | HELD_OUT)[case]
    found = [draw(rng, sites, rows, splits) for _ in range(repetitions)]
    values, low, high, truths = np.array([[*estimate, truth] for estimate, truth in found]).T
    covered = float(((low <= truths) & (truths <= high)).mean())
    return Cell(covered, float((high - low).mean() / (2 * 1.96 * np.sqrt(np.square(values - truths).mean()))))


def repetitions(sites: int, splits: int) -> int:
    """Returns how often the tables of the documentation repeat a cell."""
    return (800 if splits == 1 else 400) // (4 if sites > 100 else 1)


def repetitions(sites: int, splits: int) -> int:
    """Returns how often the tables of the documentation repeat a cell."""
    return (800 if splits == 1 else 400) // (4 if sites > 100 else 1)


def table(cases: Sequence[str]) -> Iterator[str]:
    yield "| sites x rows; splits | " + " | ".join(f"{s} x {n}" for s, n in SHOWN) + " |"
    yield "|---|" + "---|" * len(SHOWN)
    for case in cases:
        for splits in SPLITS:
            cells = [measured(case, sites, rows, splits, repetitions(sites, splits)) for sites, rows in SHOWN]
            yield (
                f"| {case}; {splits} | " + " | ".join(f"{100 * c.covered:.1f} % ({c.width:.2f})" for c in cells) + " |"
            )


if __name__ == "__main__":
    for every in (CASES, HELD_OUT):
        for line in table(list(every)):
            print(line, flush=True)
