"""Intervals and verdicts of sites whose rows belong to units, such as patients."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fairmesh as fm
from fairmesh.data.samples import Samples
from fairmesh.evidence import Outcomes, bootstrapped, evidence_table, mean, paired, share, versus
from fairmesh.evidence.outcome_files import packed, unpacked
from fairmesh.evidence.outcomes import Answers
from fairmesh.evidence.units import additions_to_mean, additions_to_metric
from tests.evidence.unit_coverage import Setting, drawn, measured


def _scores(units: int, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers of units with so many rows each, and the unit of each row. Rows of one unit hardly differ."""
    rng = np.random.default_rng(seed)
    of_rows = np.repeat(np.arange(units), rows)
    return (rng.normal(size=units)[of_rows] + 0.1 * rng.normal(size=units * rows))[None], of_rows


def _outcomes(*sites: tuple[np.ndarray, np.ndarray | None], metric: str = "loss") -> Outcomes:
    """Returns outcomes with these scores and units at each site."""
    answers = []
    for i, (scores, units) in enumerate(sites):
        tensor = torch.from_numpy(scores).float()
        right = tensor.to(torch.uint8) if metric == "accuracy" else None
        answers.append(Answers(str(i), tensor, right, units=None if units is None else torch.from_numpy(units)))
    names = tuple(f"site {i}" for i in range(len(sites)))
    return Outcomes(names, metric, metric == "accuracy", tuple(answers), (tuple(range(len(sites))),))


@pytest.mark.parametrize(
    "case", ["accuracy", *(pytest.param(case, marks=pytest.mark.slow) for case in ("loss", "difference of accuracies"))]
)
def test_intervals_by_unit_cover_the_truth_where_those_by_row_do_not(case):
    setting = Setting(units=7, correlation=0.3)
    by_unit, by_row = (measured(case, setting, 20, by_row=rows)[0].covered for rows in (False, True))
    assert by_unit > 0.88
    assert by_row < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("case", ["accuracy", "loss", "RMSE", "AUROC", "difference of accuracies"])
@pytest.mark.parametrize("sizes", ["equal", "geometric"])
def test_intervals_by_unit_cover_the_truth(case, sizes):
    for correlation in (0.0, 0.3):
        at_site, mean_over_sites = measured(case, Setting(7, correlation, sizes), 60)
        assert 0.895 <= at_site.covered <= 0.995
        assert mean_over_sites.covered >= 0.86


def test_units_of_one_row_each_have_the_intervals_of_rows():
    scores, _ = _scores(30, 1)
    alone = [np.arange(30)]
    assert mean([scores], units=alone).interval() == pytest.approx(mean([scores]).interval())
    right = (scores > 0).astype(float)
    assert share([right], units=alone).interval() == pytest.approx(share([right]).interval(), abs=0.02)
    assert paired([right], [1 - right], units=alone).interval() == pytest.approx(
        paired([right], [1 - right]).interval(), abs=0.03
    )


def test_more_rows_of_the_same_units_do_not_narrow_an_interval():
    few, many = (mean([scores], units=[units]).interval() for scores, units in (_scores(6, 10), _scores(6, 1000)))
    assert many[1] - many[0] == pytest.approx(few[1] - few[0], rel=0.15)
    scores, _ = _scores(6, 1000)
    low, high = mean([scores]).interval()
    assert high - low < 0.1 * (many[1] - many[0])


def test_mean_over_rows_stays_the_metric_if_units_have_unequal_sizes():
    rng = np.random.default_rng(0)
    units = np.repeat(np.arange(4), (1, 5, 50, 200))
    scores = rng.normal(size=(2, len(units))) + units
    for estimate in (mean([scores], units=[units]), paired([scores], [0 * scores], shares=False, units=[units])):
        assert estimate.value == pytest.approx(scores.mean())
    assert additions_to_mean(scores, units).freedom < 2.5, "one unit has most of the rows"


def test_leaving_out_units_gives_what_they_add_to_a_mean():
    rng = np.random.default_rng(0)
    units = np.repeat([3, 1, 8], (10, 30, 20))
    scores = rng.normal(size=(1, 60))
    by_leaving_out = additions_to_metric(lambda counts: (counts @ scores.T) / counts.sum(axis=1, keepdims=True), units)
    by_totals = additions_to_mean(scores, units)
    np.testing.assert_allclose(by_leaving_out.scores, by_totals.scores)
    assert by_leaving_out.numbers.tolist() == [1, 3, 8]


def test_metrics_of_thousands_of_units_leave_out_groups_of_them():
    rng = np.random.default_rng(0)
    units, values = np.repeat(np.arange(5000), 2), rng.normal(size=10_000)
    sizes = []

    def root_mean_square(split, seed, counts):
        sizes.append(len(counts))
        return np.sqrt(counts @ values**2 / counts.sum(axis=1))

    found = bootstrapped(root_mean_square, [10_000], [1], units=[units], limits=(0.0, math.inf))
    low, high = found.interval()
    assert max(sizes) == 100
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(2 * 10_000), rel=0.3)


def test_one_unit_has_no_interval_and_its_verdict_is_unclear():
    scores, units = _scores(1, 200)
    ours, theirs = _outcomes((scores, units), _scores(6, 30)), _outcomes((scores - 5, units), _scores(6, 30, seed=1))
    (alone, several), (verdict, _) = ours.estimates(), versus(ours, theirs).at_sites
    assert math.isnan(alone.interval()[0])
    assert several.interval()[0] < several.value < several.interval()[1]
    assert verdict.verdict == "unclear"
    assert verdict.difference == pytest.approx(5)
    first, *_ = ours.notes()
    assert "site 0" in first
    assert "site 1" not in first
    low, high = ours.mean().interval()
    assert low < ours.mean().value < high, "the mean over sites takes its unit to vary as those of the other site"


def test_auroc_that_one_unit_decides_keeps_its_value_and_has_no_interval():
    outcomes, _, _ = drawn("AUROC", Setting(3, 0.3), np.random.default_rng(0))
    first = outcomes.answers[0]
    labels = (first.units == first.units[0]).long()  # all positive rows are of one unit
    changed = replace(outcomes, answers=(replace(first, targets=labels), *outcomes.answers[1:]))
    estimate, *others = changed.estimates()
    assert 0 <= estimate.value <= 1
    assert math.isnan(estimate.interval()[0])
    assert not any(math.isnan(other.interval()[0]) for other in others)
    assert "site 0" in changed.notes()[0]


def test_worst_site_needs_units_and_not_rows():
    large, small = _scores(6, 5), _scores(2, 200)
    outcomes = _outcomes((large[0] - 9, large[1]), (small[0] + 9, small[1]))
    assert outcomes.worst_site() == 0
    assert outcomes.few_rows == ["site 1"]
    assert any("units" in note for note in outcomes.notes())
    table = evidence_table(outcomes)
    assert [(site["n"], site["units"], site["few_rows"]) for site in table["sites"]] == [(30, 6, False), (400, 2, True)]
    assert table["covers"] == "units"


def test_site_with_one_unit_is_the_worst_only_if_all_have_one():
    one, two = _scores(1, 50), _scores(2, 50)
    assert _outcomes((one[0] + 9, one[1]), two).worst_site() == 1
    assert _outcomes((one[0] + 9, one[1]), _scores(1, 50, seed=1)).worst_site() == 0


def test_splits_have_units_in_common_and_not_rows():
    answers = []
    for k, units in enumerate(([0, 1, 2], [2, 3, 4])):
        of_rows = torch.tensor(units).repeat_interleave(10)
        answers.append(Answers(str(k), torch.rand(1, 30), rows=torch.arange(30) + 100 * k, units=of_rows))
    outcomes = Outcomes(("a",), "loss", False, tuple(answers), ((0,), (1,)))
    assert outcomes.overlaps == [pytest.approx(1 / 3)]
    assert outcomes.covers == "units and splits"


def test_splits_with_one_unit_each_judge_by_the_units_of_all():
    rng = np.random.default_rng(0)
    answers = [
        Answers(str(k), torch.from_numpy(value + 0.1 * rng.normal(size=(1, 40))).float(), units=torch.full((40,), k))
        for k, value in enumerate((1.0, 2.0, 4.0))
    ]
    outcomes = Outcomes(("a",), "loss", False, tuple(answers), ((0,), (1,), (2,)))
    for estimate in (*outcomes.estimates(), outcomes.mean()):
        low, high = estimate.interval()
        assert low < 1.0 < 4.0 < high
        assert estimate.value == pytest.approx(7 / 3, abs=0.1)
    assert outcomes.unit_count(0) == 3
    same = replace(outcomes, answers=tuple(replace(one, units=torch.zeros(40).long()) for one in answers))
    assert math.isnan(same.estimates()[0].interval()[0]), "all splits test on one and the same unit"


def test_run_counts_the_units_of_its_test_rows_and_keeps_no_identifier(tmp_path):
    rng = torch.Generator().manual_seed(0)

    def samples(units: int, first: int) -> Samples:
        of_rows = torch.arange(units).repeat_interleave(12)
        inputs = torch.randn(len(of_rows), 2, generator=rng) + torch.randn(units, 2, generator=rng)[of_rows]
        return Samples(inputs, (inputs[:, 0] > 0).long(), units=of_rows + first)

    identifiers = 10**15
    sites = [fm.Site(samples(6, identifiers * (i + 1)), test=samples(3 + i, identifiers * (i + 7))) for i in range(3)]
    result = fm.train(fm.Problem(torch.nn.Linear(2, 2), sites), algorithm=fm.algorithms.DSGD(), rounds=3)
    outcomes = result.outcomes()
    assert [outcomes.unit_count(i) for i in range(3)] == [3, 4, 5]
    kept = unpacked(packed({"final": outcomes}))["final"]
    assert [kept.unit_count(i) for i in range(3)] == [3, 4, 5]
    assert max(int(answers.units.max()) for answers in kept.answers) < 12
    assert kept.estimates() == outcomes.estimates()
    assert "4 units" in str(result)
