"""How often 95 % intervals cover the truth, on synthetic sites: `python -m tests.evidence.coverage` prints the table
of docs/concepts/evidence.md."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from scipy.special import ndtr

from fairmesh.evidence import Comparison, Difference, Outcomes, Share, Worst, mean, paired, share, versus
from fairmesh.evidence.intervals import Combined, Estimate
from fairmesh.evidence.outcomes import Answers
from fairmesh.metrics import AUROC, RMSE, NamedMetric

SIZES = (20, 50, 500)
Draw = Callable[
    [np.random.Generator, int], tuple[Estimate | Difference, float]
]  # (random numbers, rows) -> estimate and truth


def _one(low: float, high: float) -> Draw:
    def draw(rng: np.random.Generator, rows: int):
        truth = rng.uniform(low, high)
        return Share(rng.binomial(rows, truth) / rows, rows), truth

    return draw


def _worst(*truths: float) -> Draw:
    return _worst_drawn(lambda rng: np.array(truths))


def _worst_drawn(truths_of: Callable[[np.random.Generator], np.ndarray], sizes: tuple[float, ...] = (1.0,)) -> Draw:
    """The worst of sites whose truths are drawn in each repetition, with `sizes` times as many rows."""

    def draw(rng: np.random.Generator, rows: int):
        truths = truths_of(rng)
        every = np.resize([round(size * rows) for size in sizes], len(truths))
        right = rng.binomial(every, truths)
        return Worst(tuple(Share(k / n, int(n)) for k, n in zip(right.tolist(), every.tolist()))), float(truths.min())

    return draw


def _answers(rng: np.random.Generator, rows: int, only_a: float, only_b: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns right (1) and wrong (0) of two models (1, rows); wrong by both at a tenth of the rows."""
    kinds = rng.choice(4, size=rows, p=[0.9 - only_a - only_b, only_a, only_b, 0.1])
    return np.isin(kinds, (0, 1))[None].astype(float), np.isin(kinds, (0, 2))[None].astype(float)


def _difference(only_a: float, only_b: float) -> Draw:
    def draw(rng: np.random.Generator, rows: int):
        a, b = _answers(rng, rows, only_a, only_b)
        return paired([a], [b]), only_a - only_b

    return draw


def _difference_drawn(rng: np.random.Generator, rows: int):
    only_a, only_b = rng.uniform(0.01, 0.2, size=2)
    a, b = _answers(rng, rows, only_a, only_b)
    return paired([a], [b]), only_a - only_b


def _of_worst(only_a: float, only_b: float, worst: float) -> Draw:
    """The difference of the worst of ten sites. At the others the models differ as much, and err less by `worst`."""

    def draw(rng: np.random.Generator, rows: int):
        mine, theirs, rows_of = [], [], []
        for site in range(10):
            a, b = _answers(rng, rows, only_a, only_b)
            if site == 0:
                hit = rng.uniform(size=(1, rows)) < worst
                a, b = np.where(hit, 0.0, a), np.where(hit, 0.0, b)
            rows_of.append((a[0], b[0]))
            mine.append(share([a]))
            theirs.append(share([b]))
        one, other = Worst(tuple(mine)), Worst(tuple(theirs))
        first, second = rows_of[one.which or 0]
        same = one.which == other.which and first.std() * second.std() > 0
        correlation = max(0.0, float(np.corrcoef(first, second)[0, 1])) if same else 0.0
        debiased = one.which != other.which
        return Combined((one, other), (1.0, -1.0), correlation, debiased), (only_a - only_b) * (1 - worst)

    return draw


def _loss(rng: np.random.Generator, rows: int):
    return mean([rng.exponential(size=(1, rows))]), 1.0


def _loss_difference(rng: np.random.Generator, rows: int):
    first = rng.exponential(size=(1, rows))
    second = 0.8 * first + 0.3 * rng.exponential(size=(1, rows))
    return paired([first], [second], shares=False), 1.0 - 1.1


def _replicas(splits: int, seeds: int, of_splits: float, of_seeds: float) -> Draw:
    def draw(rng: np.random.Generator, rows: int):
        scores = []
        for _ in range(splits):
            rates = 0.8 + rng.normal(0, of_splits) + rng.normal(0, of_seeds, size=(seeds, 1))
            scores.append((rng.uniform(size=(1, rows)) < np.clip(rates, 0.02, 0.98)).astype(float))
        return share(scores), 0.8

    return draw


def _pool(*trained: int) -> Draw:
    """Eight random splits of one pool of 4 * `rows` samples into a quarter for testing and the rest, of which a linear
    classifier trains on the first few: its accuracy, or the difference of two that train on different numbers."""
    signal, cached = np.array([1.2, *[0.0] * 9]), {}

    def samples(rng: np.random.Generator, count: int):
        labels = rng.choice([-1.0, 1.0], size=count)
        return rng.normal(size=(count, 10)) + labels[:, None] * signal, labels

    def classifier(inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return (inputs * labels[:, None]).mean(axis=0)

    def truth(count: int) -> float:
        if count not in cached:
            rng = np.random.default_rng(count)
            models = np.array([classifier(*samples(rng, count)) for _ in range(20_000 if count < 100 else 2000)])
            cached[count] = float(ndtr(models @ signal / np.linalg.norm(models, axis=1)).mean())
        return cached[count]

    def draw(rng: np.random.Generator, rows: int):
        inputs, labels = samples(rng, 4 * rows)
        scores: list[list[np.ndarray]] = [[] for _ in trained]
        for _ in range(8):
            order = rng.permutation(4 * rows)
            test = order[:rows]
            for found, count in zip(scores, trained):
                rest = order[rows : rows + count]
                right = inputs[test] @ classifier(inputs[rest], labels[rest]) * labels[test] > 0
                found.append(right[None].astype(float))
        common = [min(0.25, count / (4 * rows)) for count in trained]
        if len(trained) == 1:
            return share(scores[0], 0.25, common[0]), truth(trained[0])
        variances = [np.var([one.mean() for one in found], ddof=1) for found in scores]
        both = float(np.average(common, weights=variances)) if sum(variances) else 0.25
        return paired(*scores, overlap=0.25, training=both), truth(trained[0]) - truth(trained[1])

    return draw


def _judged(metric: NamedMetric, targets: np.ndarray, *outputs: np.ndarray) -> Outcomes | Comparison:
    """What a site says of one model, or of two, as a run does."""
    truths, higher = torch.from_numpy(targets), metric.higher_is_better
    answers = [
        Answers("rows", torch.zeros(1, len(targets)), None, torch.from_numpy(one)[None], truths) for one in outputs
    ]
    a, *b = (Outcomes(("site",), "it", higher, (one,), ((0,),), functions={"it": metric}) for one in answers)
    return versus(a, b[0]) if b else a


def _rmse(rng: np.random.Generator, rows: int):
    return _judged(RMSE(), np.zeros(rows), rng.normal(size=rows)).estimates()[0], 1.0


def _difference_of_rmses(less: float) -> Draw:
    """Two models whose errors correlate by 0.64; those of the second are smaller by a share."""

    def draw(rng: np.random.Generator, rows: int):
        common, own, theirs = rng.normal(size=(3, rows))
        a, b = 0.8 * common + 0.6 * own, (1 - less) * (0.8 * common + 0.6 * theirs)
        return _judged(RMSE(), np.zeros(rows), a, b).at_sites[0], less

    return draw


def _labels(rng: np.random.Generator, rows: int, rate: float) -> np.ndarray:
    """Labels with at least two positives, so that an AUROC is defined."""
    while (labels := (rng.random(rows) < rate).astype(int)).sum() < 2:
        pass
    return labels


def _auroc(rate: float) -> Draw:
    def draw(rng: np.random.Generator, rows: int):
        labels = _labels(rng, rows, rate)
        return _judged(AUROC(), labels, 1.5 * labels + rng.normal(size=rows)).estimates()[0], ndtr(1.5 / 2**0.5)

    return draw


def _difference_of_aurocs(rate: float, further: float) -> Draw:
    def draw(rng: np.random.Generator, rows: int):
        labels, (common, own, theirs) = _labels(rng, rows, rate), rng.normal(size=(3, rows))
        a, b = further * labels + 0.8 * common + 0.6 * own, labels + 0.8 * common + 0.6 * theirs
        return _judged(AUROC(), labels, a, b).at_sites[0], ndtr(further / 2**0.5) - ndtr(1 / 2**0.5)

    return draw


OF_METRICS: dict[str, Draw] = {  # of the metrics that decide, as a run has them
    "one site, RMSE of normal errors": _rmse,
    "difference of RMSEs, none": _difference_of_rmses(0.0),
    "difference of RMSEs, 15 %": _difference_of_rmses(0.15),
    "one site, AUROC, 6 % positive": _auroc(0.06),
    "one site, AUROC, 30 % positive": _auroc(0.3),
    "difference of AUROCs, 6 % positive, none": _difference_of_aurocs(0.06, 1.0),
    "difference of AUROCs, 6 % positive, 0.1": _difference_of_aurocs(0.06, 1.5),
    "difference of AUROCs, 30 % positive, 0.1": _difference_of_aurocs(0.3, 1.5),
}
CASES: dict[str, Draw] = {
    "one site, accuracy 0.6 to 0.98": _one(0.6, 0.98),
    "one site, accuracy 0.7": _one(0.7, 0.7),
    "one site, accuracy 0.8": _one(0.8, 0.8),
    "one site, accuracy 0.9": _one(0.9, 0.9),
    "one site, accuracy 0.95": _one(0.95, 0.95),
    "one site, exponential loss": _loss,
    "worst of ten, all 0.7": _worst(*[0.7] * 10),
    "worst of ten, all 0.8": _worst(*[0.8] * 10),
    "worst of ten, all 0.9": _worst(*[0.9] * 10),
    "worst of ten, all 0.95": _worst(*[0.95] * 10),
    "worst of ten, equal, 0.7 to 0.9": _worst_drawn(lambda rng: np.full(10, rng.uniform(0.7, 0.9))),
    "worst of ten, one 0.5, others 0.95": _worst(0.5, *[0.95] * 9),
    "worst of ten, one 0.6, others 0.9": _worst(0.6, *[0.9] * 9),
    "worst of ten, one 0.7, others 0.9": _worst(0.7, *[0.9] * 9),
    "worst of ten, from 0.7 to 0.95": _worst(*np.linspace(0.7, 0.95, 10).tolist()),
    "worst of ten, equal and drawn from 0.6 to 0.95": _worst_drawn(lambda rng: np.full(10, rng.uniform(0.6, 0.95))),
    "worst of ten, each drawn from 0.6 to 0.95": _worst_drawn(lambda rng: rng.uniform(0.6, 0.95, size=10)),
    "worst of ten, three at 0.75, others 0.88": _worst(*[0.75] * 3, *[0.88] * 7),
    "worst of five, drawn, n / 2 to 2 n rows": _worst_drawn(
        lambda rng: rng.uniform(0.6, 0.95, size=5), (0.5, 2.0, 1.0, 1.5, 0.7)
    ),
    "difference, 25 % of rows tell the models apart": _difference(0.15, 0.1),
    "difference, 40 % of rows": _difference(0.25, 0.15),
    "difference, 10 % of rows": _difference(0.05, 0.05),
    "difference, 4 % of rows": _difference(0.02, 0.02),
    "difference, 12 % of rows, one sided": _difference(0.11, 0.01),
    "difference of losses": _loss_difference,
    "difference of the worst of ten, one clearly worst": _of_worst(0.15, 0.1, 0.5),
    "difference of the worst of ten, sites equal": _of_worst(0.15, 0.1, 0.0),
    "4 splits that differ": _replicas(4, 1, 0.05, 0.0),
    "4 splits that differ only by their rows": _replicas(4, 1, 0.0, 0.0),
    "10 splits that differ, 2 seeds": _replicas(10, 2, 0.05, 0.03),
    "4 seeds that differ": _replicas(1, 4, 0.0, 0.05),
    "8 splits of one pool, trained on 6 rows": _pool(6),
    "8 splits of one pool, trained on 55 rows": _pool(55),
    "8 splits of one pool, 6 rows against 55": _pool(6, 55),
}


HELD_OUT: dict[str, Draw] = {  # no method or constant was chosen by these
    "one site, accuracy drawn from 0.5 to 0.97": _one(0.5, 0.97),
    "one site, loss of a gamma distribution": lambda rng, rows: (mean([rng.gamma(0.7, size=(1, rows))]), 0.7),
    "worst of ten, equal and drawn from 0.5 to 0.6": _worst_drawn(lambda rng: np.full(10, rng.uniform(0.5, 0.6))),
    "worst of seven, two at 0.65, others drawn, n / 2 to 3 n rows": _worst_drawn(
        lambda rng: np.append([0.65, 0.65], rng.uniform(0.7, 0.95, size=5)), (1.0, 0.5, 3.0, 2.0)
    ),
    "difference, 2 to 40 % of rows, drawn": _difference_drawn,
    "difference, 9 % of rows, one sided": _difference(0.085, 0.005),
    "difference of the worst of ten, one worse by 0.2": _of_worst(0.12, 0.07, 0.2),
}


def coverage(case: str, rows: int, repetitions: int = 1000, level: float = 0.95) -> float:
    """Returns the share of repetitions whose interval contains the truth."""
    rng, hits = np.random.default_rng([rows, *case.encode()]), 0
    draw = (CASES | HELD_OUT | OF_METRICS)[case]
    for _ in range(repetitions):
        estimate, truth = draw(rng, rows)
        low, high = estimate.interval if isinstance(estimate, Difference) else estimate.interval(level)
        hits += low <= truth <= high
    return hits / repetitions


def table() -> Iterator[str]:
    """Yields the table, measured on all cores."""
    keys = [(case, rows) for case in CASES | HELD_OUT | OF_METRICS for rows in SIZES]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rates = dict(zip(keys, pool.map(coverage, *zip(*keys))))
    yield f"| 1,000 repetitions | {' | '.join(f'n = {rows}' for rows in SIZES)} |"
    yield "|---|" + "---|" * len(SIZES)
    for case in CASES | HELD_OUT | OF_METRICS:
        yield f"| {case} | {' | '.join(f'{100 * rates[case, rows]:.1f} %' for rows in SIZES)} |"


if __name__ == "__main__":
    print("\n".join(table()))
