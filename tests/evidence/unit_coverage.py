"""How often 95 % intervals by unit cover the truth, on six synthetic sites with several rows per unit.

`python -m tests.evidence.unit_coverage` prints the tables of docs/concepts/evidence.md, in some hours on one core;
names of cases as arguments print only these. Intervals are those that tables, reports and comparisons have.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.special import gammaincinv, ndtr, ndtri

from fairmesh.evidence import Outcomes
from fairmesh.evidence.outcomes import Answers
from fairmesh.evidence.verdicts import _paired, mean_difference
from fairmesh.metrics import AUROC, RMSE

SITES = 6
_APART = 1.0  # of the scores of both classes


@dataclass(frozen=True)
class Setting:
    """Sites whose rows belong to units.

    Args:
        units: How many test units a site has in a split.
        correlation: The correlation of two rows of one unit.
        sizes: "equal" for 140 rows per unit, "geometric" for a geometric distribution with mean 50.
        splits: In how many random splits a site's 4 * `units` units are divided.
    """

    units: int
    correlation: float
    sizes: str = "equal"
    splits: int = 1

    @property
    def pool(self) -> int:
        """How many units a site has."""
        return self.units if self.splits == 1 else 4 * self.units


Values = Sequence[tuple[np.ndarray, ...]]  # of each site, for each of its rows
Draw = Callable[[Callable[[], np.ndarray], int], tuple[tuple[np.ndarray, ...], float]]
# (draws a standard normal number for each row, with the unit's correlation; site) -> values of the rows, truth


@dataclass(frozen=True)
class Cell:
    """How often intervals covered the truth, how wide they were, and how often there was none."""

    covered: float
    width: float
    unknown: float

    def __str__(self) -> str:
        covered = "-" if math.isnan(self.covered) else f"{100 * self.covered:.0f}"
        return covered + (f" ({100 * self.unknown:.0f})" if 0.005 <= self.unknown < 1 else "")


def _accuracy(latent: Callable[[], np.ndarray], site: int):
    truth = 0.7 + 0.04 * site
    return (latent() < ndtri(truth),), truth


def _loss(latent: Callable[[], np.ndarray], site: int):
    return ((1 + site) * gammaincinv(2.0, ndtr(latent())),), 2.0 * (1 + site)


def _error(latent: Callable[[], np.ndarray], site: int):
    return ((1 + site) * latent(),), 1.0 + site


def _scores(latent: Callable[[], np.ndarray], site: int):
    labels = latent() < 0
    return (latent() + _APART * labels, labels), float(ndtr(_APART / math.sqrt(2)))


def _two_answers(latent: Callable[[], np.ndarray], site: int):
    first = latent()
    second = 0.5 * first + math.sqrt(0.75) * latent()
    return (first < ndtri(0.8), second < ndtri(0.75)), 0.05


def _two_losses(latent: Callable[[], np.ndarray], site: int):
    first = latent()
    second = 0.5 * first + math.sqrt(0.75) * latent()
    return tuple((1 + site) * gammaincinv(2.0, ndtr(x)) for x in (first, second)), 0.0


CASES: dict[str, tuple[Draw, str]] = {  # with the metric
    "accuracy": (_accuracy, "accuracy"),
    "loss": (_loss, "loss"),
    "RMSE": (_error, "rmse"),
    "AUROC": (_scores, "auroc"),
    "difference of accuracies": (_two_answers, "accuracy"),
    "difference of losses": (_two_losses, "loss"),
}


def drawn(case: str, setting: Setting, rng: np.random.Generator) -> tuple[Outcomes, Outcomes | None, list[float]]:
    """Returns what a model answered at all sites, what another one did for a difference, and the truth at each site."""
    draw, metric = CASES[case]
    answers: list[list[Answers]] = [[], []]
    truths = []
    for site in range(SITES):
        geometric = rng.geometric(1 / 50, size=setting.pool)
        units = np.repeat(np.arange(setting.pool), geometric if setting.sizes == "geometric" else 140)

        def latent(units: np.ndarray = units) -> np.ndarray:
            common = rng.normal(size=setting.pool)[units]
            own = rng.normal(size=len(units))
            return math.sqrt(setting.correlation) * common + math.sqrt(1 - setting.correlation) * own

        values, truth = draw(latent, site)
        truths.append(truth)
        for split in range(setting.splits):
            chosen = rng.permutation(setting.pool)[: setting.units]
            here = np.isin(units, chosen)
            for k, answer in enumerate(_answers(metric, [value[here] for value in values])):
                of_units = torch.from_numpy(units[here])
                answers[k].append(
                    replace(answer, digest=f"{site} {split}", units=of_units, rows=torch.arange(len(of_units)))
                )
    first, second = (_outcomes(metric, of_model, setting.splits) if of_model else None for of_model in answers)
    return first, second, truths  # type: ignore[return-value]


def _answers(metric: str, values: Sequence[np.ndarray]) -> list[Answers]:
    tensors = [torch.from_numpy(value[None].astype(np.float32)) for value in values]
    if metric == "accuracy":
        return [Answers("", tensor, tensor.to(torch.uint8)) for tensor in tensors]
    if metric == "loss":
        return [Answers("", tensor) for tensor in tensors]
    targets = tensors[1][0].long() if metric == "auroc" else torch.zeros_like(tensors[0][0])
    return [Answers("", tensors[0], outputs=tensors[0], targets=targets)]


def _outcomes(metric: str, answers: list[Answers], splits: int) -> Outcomes:
    of_sites = tuple(tuple(split + splits * site for site in range(SITES)) for split in range(splits))
    names, functions = tuple(f"site {i}" for i in range(SITES)), {"auroc": AUROC(), "rmse": RMSE()}
    chosen = {metric: functions[metric]} if metric in functions else {}
    return Outcomes(names, metric, metric in ("accuracy", "auroc"), tuple(answers), of_sites, functions=chosen)


def measured(case: str, setting: Setting, repetitions: int, by_row: bool = False) -> tuple[Cell, Cell]:
    """Returns how often intervals cover the truth at a site, and of the mean over sites.

    Args:
        case: One of `CASES`.
        setting: The sites.
        repetitions: How often six sites are drawn.
        by_row: Whether intervals take rows for independent, as if there were no units.
    """
    key = [setting.units, round(100 * setting.correlation), len(setting.sizes), setting.splits, *case.encode()]
    rng, at_sites, means = np.random.default_rng(key), [], []
    for _ in range(repetitions):
        one, other, truths = drawn(case, setting, rng)
        one, other = (_without_units(x) if by_row and x else x for x in (one, other))
        if other is None:
            ends, mean = [part.interval() for part in one.estimates()], one.mean().interval()
        else:
            ends = [_paired(one, other, i, one.metric).interval() for i in range(SITES)]  # those of `versus`
            mean = mean_difference(one, other).interval()
        at_sites += [(*end, truth) for end, truth in zip(ends, truths)]
        means.append((*mean, float(np.mean(truths))))
    return _cell(at_sites), _cell(means)


def _without_units(outcomes: Outcomes) -> Outcomes:
    return replace(outcomes, answers=tuple(replace(answers, units=None) for answers in outcomes.answers))


def _cell(found: list[tuple[float, float, float]]) -> Cell:
    low, high, truth = np.array(found).T
    known = ~np.isnan(low)
    if not known.any():
        return Cell(math.nan, math.nan, 1.0)
    inside = (low <= truth) & (truth <= high)
    return Cell(float(inside[known].mean()), float((high - low)[known].mean()), float(1 - known.mean()))


UNITS = (2, 3, 5, 7, 20, 50)
SHAPES = [(sizes, splits) for sizes in ("equal", "geometric") for splits in (1, 3)]
CORRELATIONS = (0.0, 0.3, 0.9)


def _measured(case: str, setting: Setting) -> tuple[Cell, Cell]:
    cells = measured(case, setting, 40 if setting.units > 10 and case not in ("accuracy", "loss") else 120)
    print(case, setting, *cells, file=sys.stderr, flush=True)
    return cells


def tables(cases: Sequence[str]) -> Iterator[str]:
    """Yields a table of intervals at a site and one of the mean over sites, measured on all cores."""
    keys = [(c, Setting(m, r, sizes, k)) for c in cases for sizes, k in SHAPES for r in CORRELATIONS for m in UNITS]
    with ProcessPoolExecutor(int(os.environ.get("CORES", os.cpu_count() or 1))) as pool:
        cells = dict(zip(keys, pool.map(_measured, *zip(*keys))))
    for k, where in enumerate(("at a site", "mean over sites")):
        yield f"| {where}: units of a split | {' | '.join(map(str, UNITS))} |"
        yield "|---|" + "---|" * len(UNITS)
        for case in cases:
            for sizes, splits in SHAPES:
                row = [
                    ", ".join(str(cells[case, Setting(m, r, sizes, splits)][k]) for r in CORRELATIONS) for m in UNITS
                ]
                yield f"| {case}; {sizes}; {splits} | {' | '.join(row)} |"
        yield ""


if __name__ == "__main__":
    print("\n".join(tables(sys.argv[1:] or list(CASES))))
