"""Verdicts on many sites: how many are false, how many are found, and what their intervals cover."""

import math

import numpy as np
import pytest

from fairmesh.evidence import Number, PairedShare, versus_counts
from fairmesh.evidence.many import chance_in_words, clear_among, excludes_zero
from fairmesh.evidence.verdicts import differences_of
from fairmesh.metrics.units import Unit
from tests.evidence.many_sites import SAMPLERS, simulated

EQUAL = Number(0.0, rows=100, error=1.0)


def test_sites_without_a_difference_seldom_get_any_verdict():
    found = simulated("errors known", 160, repetitions=150)
    assert 6.5 < found.by_themselves < 9.5, "which is what chance gives"
    assert found.any_ <= 0.1  # 0.05 and two of its random errors


def test_sites_with_a_difference_are_found_and_their_intervals_cover():
    found = simulated("errors known", 160, effect=0.5, repetitions=60)
    assert found.found > 0.4
    assert found.false <= 0.05
    assert found.cover >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("many", [False, True])
def test_verdicts_on_many_sites_hold_for_every_kind_of_number(name, many):
    sites = 10 if not many else 60 if name == "accuracy" else 160  # intervals of counts take a while
    none = simulated(name, sites, repetitions=200)
    assert none.any_ <= 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / 200)
    some = simulated(name, sites, effect=0.2 if name == "accuracy" else 0.5, repetitions=100)
    assert some.found > 0.3
    assert some.false <= 0.06
    assert some.cover >= 0.93


def test_one_estimate_is_judged_by_its_own_interval():
    apart, near = Number(2.1, rows=100, error=1.0), Number(1.8, rows=100, error=1.0)
    assert clear_among([apart]) == ({0}, 0.95)
    assert clear_among([near]).which == set()
    assert clear_among([apart, Number(math.nan, 0, math.nan)]).which == {0}, "one that was not made does not count"


def test_clear_estimates_are_those_of_benjamini_and_hochberg():
    rng = np.random.default_rng(3)
    for _ in range(20):
        scores = rng.normal(size=30) * rng.choice([1.0, 3.0], 30)
        found = clear_among([Number(float(score), 10_000, 1.0) for score in scores])
        p = np.array([math.erfc(abs(score) / math.sqrt(2)) for score in scores])
        passed = [k for k in range(1, 31) if np.sort(p)[k - 1] <= 0.05 * k / 30]
        count = max(passed, default=0)
        assert found.which == set(np.argsort(p)[:count].tolist())
        if count:
            assert found.level == pytest.approx(1 - 0.05 * count / 30)


def test_difference_keeps_its_own_interval_unless_it_is_clear_among_all():
    apart, clear = Number(2.5, rows=100, error=1.0), Number(9.0, rows=100, error=1.0)
    *_, looks, is_ = differences_of([*28 * [EQUAL], apart, clear], True, [True] * 30)
    assert (looks.verdict, looks.level, looks.stands_out) == ("unclear", 0.95, True)
    assert looks.interval == apart.interval()
    assert (is_.verdict, is_.level) == ("better", pytest.approx(1 - 0.05 / 30))
    assert is_.interval == clear.interval(is_.level)
    assert "with several sites compared, this may be chance" in looks.sentence("alone", Unit("loss", share=False))


def test_mean_of_a_handful_of_rows_is_not_clear_among_many():
    few, many = (Number(9.0, rows, 1.0, freedom=rows - 1) for rows in (6, 60))
    assert clear_among([few]).which == {0}
    assert clear_among([few, many, *30 * [EQUAL]]).which == {1}
    counts = PairedShare(0.9, 0.0, rows=20)
    assert clear_among([counts, *30 * [EQUAL]]).which == {0}, "counts have exact tails"


def test_a_site_that_knows_only_its_own_numbers_is_judged_among_all():
    assert [versus_counts(60, 9, 1, among=n).verdict for n in (1, 100)] == ["better", "unclear"]
    found = versus_counts(60, 25, 1, among=100)
    assert (found.verdict, found.level) == ("better", pytest.approx(0.9995))
    assert excludes_zero(found.interval)


def test_chance_is_told_where_more_sites_look_different_than_remain():
    assert chance_in_words(3, 3, 160) == ""
    said = chance_in_words(6, 0, 160)
    assert all(word in said for word in ("6 of 160", "about 8", "none remains"))
    assert "1 remains" in chance_in_words(6, 1, 160)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("clear", "sites"), [(7, 25), (29, 35)])
def test_judging_ends_whatever_the_number_of_clear_sites_is(clear, sites):
    """As shares of 1 these counts are rounded up, so that 7 of 25 looked like fewer than 7 of 25, for ever."""
    apart, equal = Number(100.0, rows=1000, error=1.0), Number(0.0, rows=1000, error=1.0)
    assert len(clear_among([*clear * [apart], *(sites - clear) * [equal]]).which) == clear
