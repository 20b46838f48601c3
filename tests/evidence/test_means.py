"""The mean over sites: how often its interval covers the truth, how wide it is, and what it does at the edges."""

import math

import numpy as np
import pytest

from fairmesh.evidence import Number, Share
from fairmesh.evidence.means import Stratum, mean_number, mean_of, mean_paired_share, mean_share
from tests.evidence.means_coverage import CASES, HELD_OUT, SIZES, SPLITS, measured, outcomes
from tests.pairwise import cover


@pytest.mark.parametrize(
    ("case", "sites", "rows", "splits"),
    [
        ("accuracy 0.6 to 0.98", 10, 50, 1),
        ("accuracy 0.6 to 0.98", 20, 5, 1),
        ("4 in 10 answers differ between splits", 4, 5, 10),
        ("difference, 25 % of rows", 4, 20, 1),
    ],
)
def test_mean_over_sites_covers_the_truth(case, sites, rows, splits):
    found = measured(case, sites, rows, splits, 150)  # whose random error is 1.8 points
    assert 0.9 <= found.covered <= 0.994
    assert found.width <= 1.35


EVERY_CASE = [*CASES, *HELD_OUT]
CELLS = [  # every case with every size, each with one or the other number of splits; the page's table has all
    (EVERY_CASE[case], *SIZES[size], SPLITS[split])
    for case, size, split in cover([len(EVERY_CASE), len(SIZES), len(SPLITS)])
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "sites", "rows", "splits"), CELLS)
def test_mean_over_sites_covers_the_truth_in_every_cell(case, sites, rows, splits):
    times = (800 if splits == 1 else 400) // (4 if sites > 100 else 1)
    found = measured(case, sites, rows, splits, times)
    error = 2.6 * math.sqrt(0.95 * 0.05 / times)  # of so many cells, a few are off by that
    least, most = OTHERWISE.get((case, sites), (0.93, 0.97))
    assert least - error / 2 <= found.covered <= most + error
    assert found.width <= WIDER.get((case, rows), 1.3) + 2 / math.sqrt(2 * times)  # the error of the best possible one


OTHERWISE = {  # docs/concepts/evidence.md says why
    ("accuracy 0.7 to 0.95, every fourth site has a single row", 4): (0.87, 0.97),
    ("difference, 10 % of rows", 4): (0.93, 0.99),
}
WIDER = {("squared error", 5): 1.6, ("exponential loss", 5): 1.45}  # so few rows of a skewed number


def strata_of_ones(*sizes: int) -> list[Stratum]:
    return [Stratum([np.ones((1, n))], 1 / len(sizes)) for n in sizes]


def test_mean_of_one_site_has_the_interval_of_the_site():
    right = np.repeat([[1.0, 0.0]], [17, 3], axis=1)
    assert mean_share([Stratum([right], 1.0)]).interval() == pytest.approx(Share(0.85, 20).interval())
    assert mean_share(strata_of_ones(20)).interval() == pytest.approx(Share(1.0, 20).interval())


def test_mean_of_sites_that_are_all_right_has_the_interval_of_all_their_rows():
    assert mean_share(strata_of_ones(10, 10)).interval() == pytest.approx(Share(1.0, 20).interval())


def test_mean_of_sites_all_right_and_all_wrong_has_an_interval():
    sites = [Stratum([np.full((1, 5), end)], 0.25) for end in (1.0, 1.0, 0.0, 0.0)]
    low, high = mean_share(sites).interval()
    assert 0.3 < low < 0.42
    assert high == pytest.approx(1 - low)
    agreed = mean_paired_share([Stratum([np.full((1, 5), end)], 0.5) for end in (1.0, 0.0)]).interval()
    assert agreed[1] - agreed[0] > 0.2


def test_site_with_a_single_row_leaves_the_mean_its_interval():
    rng = np.random.default_rng(0)
    scores = [rng.exponential(size=20), rng.exponential(size=20), np.array([0.7])]
    found = outcomes([scores], [[np.arange(len(one)) for one in scores]], "loss").mean()
    low, high = found.interval()
    assert low < found.value < high
    parts = [Number(1.0, 20, 0.1), Number(2.0, 1, math.nan)]
    assert mean_of(parts).interval()[0] < 1.5
    assert math.isnan(mean_of(parts[1:]).interval()[0])
    alone = mean_share([Stratum([np.array([[float(k % 2)]])], 1 / 6) for k in range(6)]).interval()
    assert 0.1 < alone[0] < 0.5 < alone[1] < 0.9


def test_mean_of_numbers_follows_the_skewness_of_the_rows():
    rows = np.random.default_rng(0).exponential(size=(2, 1, 30))
    found = mean_number([Stratum([one], 0.5) for one in rows])
    low, high = found.interval()
    assert high - found.value > 1.1 * (found.value - low)
    assert mean_number([]).rows == 0


def test_mean_of_models_that_answer_rows_alike_gains_less_by_splits():
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(40)[:10] for _ in range(8)])

    def width(by_chance: bool) -> float:
        of_row = rng.uniform(size=(30, 40)) < 0.7
        strata = []
        for right in of_row:
            scores = [(rng.uniform(size=10) < 0.7 if by_chance else right[test])[None].astype(float) for test in ids]
            strata.append(Stratum(scores, 1 / 30, list(ids)))
        low, high = mean_share(strata).interval()
        return high - low

    assert width(False) > 1.3 * width(True)
