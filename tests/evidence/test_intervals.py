"""Intervals: how often they cover the truth, and what they do at the edges."""

import math

import numpy as np
import pytest

from fairmesh.evidence import Number, Share, Worst, bootstrapped, mean, paired, paired_counts, share
from tests.evidence.coverage import CASES, SIZES, coverage


def covered(draws, truth, level=0.95) -> float:
    """Returns the share of estimates whose interval contains the truth."""
    ends = [one.interval(level) for one in draws]
    return float(np.mean([low <= truth <= high for low, high in ends]))


USUAL = (0.93, 0.97)
COVERED = {  # by case and rows; a site has 21 values at n = 20, so coverage jumps, and is too high rather than too low
    "one site, accuracy 0.6 to 0.98": {},
    "one site, exponential loss": {},
    "worst of ten, equal, 0.7 to 0.9": {},
    "worst of ten, all 0.7": {},
    "worst of ten, all 0.8": {500: (0.925, 0.97)},  # 94.0 % over 10,000 repetitions; the error of 1,000 is 0.8 points
    "worst of ten, all 0.9": {20: (0.93, 0.98)},
    "worst of ten, all 0.95": {20: (0.93, 0.98)},
    "worst of ten, one 0.5, others 0.95": {},
    "worst of ten, one 0.6, others 0.9": {20: (0.93, 0.98)},
    "worst of ten, one 0.7, others 0.9": {20: (0.93, 0.99)},
    "worst of ten, from 0.7 to 0.95": {20: (0.93, 0.985), 50: (0.93, 0.975), 500: (0.93, 0.975)},
    "worst of ten, each drawn from 0.6 to 0.95": {20: (0.93, 0.985), 50: (0.93, 0.98)},
    "difference, 2 to 40 % of rows, drawn": {},
    "difference, 40 % of rows": {},
    "difference of losses": {20: (0.92, 0.97)},  # docs/concepts/evidence.md says why
    "difference of the worst of ten, one clearly worst": dict.fromkeys(SIZES, (0.93, 1.0)),  # or too wide
    "difference of the worst of ten, sites equal": dict.fromkeys(SIZES, (0.93, 1.0)),
    "one site, RMSE of normal errors": {},
    "difference of RMSEs, none": {},
    "difference of RMSEs, 15 %": {20: (0.9, 0.97)},
    "one site, AUROC, 6 % positive": {20: (0.93, 1.0), 50: (0.93, 1.0)},  # by one to three positives
    "difference of AUROCs, 6 % positive, none": {20: (0.93, 1.0), 50: (0.93, 1.0)},
    **{case: {100: (0.91, 0.985)} for case in CASES if "that differ" in case},  # seeds and splits
    **{case: {50: (0.93, 0.998)} for case in CASES if "pool" in case},  # differences on so few rows are covered often
}
QUICK = {
    *(("one site, accuracy 0.6 to 0.98", rows) for rows in SIZES),
    ("one site, exponential loss", 20),
    ("one site, RMSE of normal errors", 20),
    ("worst of ten, equal, 0.7 to 0.9", 50),
}
CELLS = [
    pytest.param(case, rows, marks=[] if (case, rows) in QUICK else pytest.mark.slow)
    for case, bounds in COVERED.items()
    for rows in (bounds if "split" in case or "seeds" in case else SIZES)
]


@pytest.mark.parametrize(("case", "rows"), CELLS)
def test_interval_covers_the_truth(case, rows):
    least, most = COVERED[case].get(rows, USUAL)
    assert least <= coverage(case, rows) <= most


def test_worst_of_metrics_where_less_is_better_mirrors_it():
    shares = [0.3, 0.25, 0.2]
    low, high = Worst(tuple(Share(1 - one, 40) for one in shares)).interval()
    found = Worst(tuple(Share(one, 40) for one in shares), higher_is_better=False)
    assert found.which == 0
    assert found.interval() == pytest.approx((1 - high, 1 - low))


def exact_coverage(rows: int, only_a: float, only_b: float) -> float:
    """Returns how often the paired interval covers the truth, summed over all counts."""
    total = 0.0
    for a in range(rows + 1):
        for b in range(rows + 1 - a):
            log = math.lgamma(rows + 1) - math.lgamma(a + 1) - math.lgamma(b + 1) - math.lgamma(rows - a - b + 1)
            log += a * math.log(only_a) + b * math.log(only_b) + (rows - a - b) * math.log(1 - only_a - only_b)
            if log > math.log(1e-6):
                low, high = paired_counts(rows, a, b).interval()
                total += math.exp(log) * (low <= only_a - only_b <= high)
    return total


@pytest.mark.parametrize(
    ("rows", "only_a", "only_b", "most"),
    [
        (20, 0.15, 0.1, 0.97),
        (20, 0.24, 0.14, 0.97),
        (20, 0.1, 0.02, 0.99),
        (20, 0.11, 0.01, 0.99),  # no row that tells the models apart is not rare here
        (20, 0.05, 0.05, 0.99),  # four rows against none tell the models apart, and 4 are rare if 2 are usual
        pytest.param(50, 0.15, 0.1, 0.97, marks=pytest.mark.slow),
        pytest.param(50, 0.05, 0.05, 0.97, marks=pytest.mark.slow),
        pytest.param(50, 0.02, 0.02, 0.99, marks=pytest.mark.slow),
    ],
)
def test_paired_difference_of_shares_covers_the_truth(rows, only_a, only_b, most):
    assert 0.93 <= exact_coverage(rows, only_a, only_b) <= most


def test_paired_intervals_are_narrower_than_those_of_two_models_suggest():
    rng = np.random.default_rng(0)
    a = (rng.uniform(size=(1, 200)) < 0.8).astype(float)
    b = a.copy()
    b[0, :6] = 1 - b[0, :6]
    low, high = paired([a], [b]).interval()
    alone = share([a]).interval()
    assert high - low < 0.5 * (alone[1] - alone[0])


def test_more_spread_over_seeds_or_splits_widens_an_interval():
    rng = np.random.default_rng(0)
    rows = (rng.uniform(size=(1, 100)) < 0.8).astype(float)
    apart = [
        np.concatenate([rows[:, :0], np.repeat([[1.0, 0.0]], [k, 100 - k], axis=1)], axis=1) for k in (60, 80, 100)
    ]
    alike = [np.repeat([[1.0, 0.0]], [80, 20], axis=1)] * 3

    def width(estimate):
        low, high = estimate.interval()
        return high - low

    assert width(share(apart)) > 2 * width(share(alike))
    assert width(share(alike, overlap=1.0)) == pytest.approx(width(share(alike[:1])), rel=0.02)
    assert width(share(apart, overlap=0.3, training=0.01)) < 0.9 * width(share(apart, overlap=0.3))
    assert width(share(apart, overlap=0.3, training=0.9)) == width(share(apart, overlap=0.3))
    seeds = np.concatenate(apart)
    assert width(share([seeds])) > 1.3 * width(share([alike[0]]))


@pytest.mark.parametrize("right", [0, 20])
def test_share_of_all_or_none_has_an_interval(right):
    low, high = share([np.repeat([[1.0, 0.0]], [right, 20 - right], axis=1)]).interval()
    assert high - low == pytest.approx(0.161, abs=0.001)
    assert (low if right == 0 else high) == right / 20


def test_paired_without_a_row_that_tells_the_models_apart_has_an_interval():
    low, high = paired_counts(20, 0, 0).interval()
    assert low == pytest.approx(-high)
    assert 0.05 < high < 0.15


def test_estimates_of_one_row_or_none_do_not_fail():
    assert share([np.ones((1, 1))]).interval() == pytest.approx((0.2065, 1.0), abs=1e-3)
    assert all(math.isnan(end) for end in mean([np.ones((1, 1))]).interval())
    assert math.isnan(share([]).value)
    assert all(math.isnan(end) for end in share([]).interval())
    assert all(math.isnan(end) for end in Worst((Share(math.nan, 0),)).interval())
    assert Worst((Share(math.nan, 0), Share(0.5, 10))).which == 1
    low, high = paired_counts(1, 1, 0).interval()
    assert -1 <= low < high <= 1


def test_worst_contains_its_value_and_reaches_below_every_site():
    sites = tuple(Share(one, 30) for one in (0.8, 0.7, 0.75))
    low, high = Worst(sites).interval()
    assert low == min(site.interval()[0] for site in sites)
    assert 0.7 < Share(0.7, 30).interval()[1] - 0.02 < high


def test_resampled_covers_a_metric_of_all_rows_and_leaves_out_undefined_resamples():
    draws = np.random.default_rng(0).normal(size=(300, 60))

    def root_mean_square(values):
        return lambda k, s, counts: np.sqrt(counts @ values**2 / counts.sum(axis=1))

    assert 0.9 <= covered([bootstrapped(root_mean_square(one), [60], [1]) for one in draws], 1.0) <= 0.98
    some = bootstrapped(lambda k, s, counts: np.where(counts[:, 0] == 1, 0.5, math.nan), [10], [1], bounded=True)
    assert some.interval()[1] > some.interval()[0]
    same = bootstrapped(lambda k, s, counts: np.zeros(len(counts)), [10], [1], bounded=True, difference=True)
    assert same.interval()[0] < 0 < same.interval()[1]
    nowhere = bootstrapped(lambda k, s, counts: np.full(len(counts), math.nan), [10], [1])
    assert math.isnan(nowhere.interval()[0])


def test_number_follows_students_t():
    low, high = Number(2.5, 4, 1.2909944 / 2, freedom=3).interval()
    assert (high - low) / 2 == pytest.approx(3.1824463 * 1.2909944 / 2)
