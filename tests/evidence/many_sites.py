"""How often verdicts on many sites are right: `python -m tests.evidence.many_sites` prints the table of
docs/concepts/evidence.md."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fairmesh.evidence import Number, mean, paired_counts
from fairmesh.evidence.intervals import Estimate
from fairmesh.evidence.many import clear_among, excludes_zero
from fairmesh.evidence.outcomes import skewness_of

Sampler = Callable[[np.random.Generator, np.ndarray, np.ndarray], list[Estimate]]
"""(random numbers, rows of each site, true difference of each site) -> estimates."""


def _shares(rng: np.random.Generator, rows: np.ndarray, truth: np.ndarray) -> list[Estimate]:
    """A fifth to two fifths of the rows tell the models apart."""
    found: list[Estimate] = []
    for n, t in zip(rows.tolist(), truth):
        apart = max(abs(t), rng.uniform(0.2, 0.4))
        only_a, only_b, _ = rng.multinomial(n, [(apart + t) / 2, (apart - t) / 2, 1 - apart])
        found.append(paired_counts(n, int(only_a), int(only_b)))
    return found


def _means(draw: Callable[[np.random.Generator, int], np.ndarray]) -> Sampler:
    def sample(rng: np.random.Generator, rows: np.ndarray, truth: np.ndarray) -> list[Estimate]:
        scores = [[t + draw(rng, n)[None]] for n, t in zip(rows.tolist(), truth)]
        skewness = skewness_of(scores)
        return [mean(of_site, skewness=skewness) for of_site in scores]

    return sample


def _numbers(rng: np.random.Generator, rows: np.ndarray, truth: np.ndarray) -> list[Estimate]:
    """Normal estimates with a known error: what the procedure itself does."""
    errors = 1 / np.sqrt(rows)
    return [
        Number(float(v), n, float(e))
        for v, n, e in zip(truth + errors * rng.normal(size=len(rows)), rows.tolist(), errors)
    ]


SAMPLERS: dict[str, Sampler] = {
    "errors known": _numbers,
    "accuracy": _shares,
    "loss, two-sided exponential": _means(lambda rng, n: rng.exponential(size=n) - rng.exponential(size=n)),
    "loss, one-sided exponential": _means(lambda rng, n: rng.exponential(size=n) - 1.0),
    "loss, squares of normal numbers": _means(lambda rng, n: rng.normal(size=n) ** 2 - 1.0),
}


@dataclass(frozen=True)
class Verdicts:
    """What repetitions of a comparison of many sites found.

    Args:
        any_: The share of repetitions in which some site has a verdict.
        false: The mean share of verdicts at sites without a difference, or in the wrong direction.
        found: The share of the sites with a difference that have a verdict.
        cover: The mean share of the intervals of verdicts that hold the truth.
        by_themselves: The mean number of sites whose own 95 % interval excludes 0.
    """

    any_: float
    false: float
    found: float
    cover: float
    by_themselves: float


def simulated(name: str, sites: int, effect: float = 0.0, share: float = 0.2, repetitions: int = 200) -> Verdicts:
    """Returns what verdicts on sites with 5 to 400 test rows are worth.

    Args:
        name: One of `SAMPLERS`.
        sites: How many are compared.
        effect: The difference at those sites that have one, half of them better and half worse. Default: 0.0.
        share: The share of these sites. Default: 0.2.
        repetitions: How often it is drawn. Default: 200.
    """
    rng = np.random.default_rng(sites)
    numbers = []
    for _ in range(repetitions):
        rows = rng.permutation(np.geomspace(5, 400, sites).round().astype(int))
        truth = np.where(rng.random(sites) < share, effect, 0.0) * rng.choice([-1.0, 1.0], sites)
        estimates = SAMPLERS[name](rng, rows, truth)
        clear = clear_among(estimates)
        intervals = {i: estimates[i].interval(clear.level) for i in clear.which}
        wrong = sum((1 if low > 0 else -1) * truth[i] <= 0 for i, (low, _) in intervals.items())
        missed = sum(not low <= truth[i] <= high for i, (low, high) in intervals.items())
        verdicts, planted = max(1, len(intervals)), max(1, int((truth != 0).sum()))
        right = len(intervals) - wrong
        alone = sum(excludes_zero(estimate.interval()) for estimate in estimates)
        numbers.append((bool(intervals), wrong / verdicts, right / planted, 1 - missed / verdicts, alone))
    return Verdicts(*np.mean(numbers, axis=0).tolist())


def main(repetitions: int) -> None:
    """Prints the table."""
    print("| sites x rows | by themselves | any verdict | with a fifth apart: found | false | intervals hold |")
    print("|---|---|---|---|---|---|")
    for name in SAMPLERS:
        for sites in (10, 60, 160):
            none = simulated(name, sites, repetitions=repetitions)
            some = simulated(name, sites, 0.2 if name == "accuracy" else 0.5, repetitions=repetitions)
            print(
                f"| {name}, {sites} sites | {none.by_themselves:.1f} | {none.any_:.1%} | {some.found:.0%} | "
                f"{some.false:.1%} | {some.cover:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
