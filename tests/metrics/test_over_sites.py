"""What is said about all sites, from values by site."""

import math

import pytest

import fairmesh as fm
from fairmesh.metrics import over_sites, share_better
from tests.refusals import refused

NAN = math.nan


def test_worst_and_best_follow_the_direction():
    accuracy, error = over_sites([0.2, 0.9, 0.5], True), over_sites([0.2, 0.9, 0.5], False)
    assert (accuracy["worst"], accuracy["best"]) == (0.2, 0.9)
    assert (error["worst"], error["best"]) == (0.9, 0.2)
    assert accuracy["gap"] == error["gap"] == pytest.approx(0.7)


def test_worst_share_takes_whole_sites_and_cvar_a_fraction_of_the_last():
    values = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    table = over_sites(values, True)  # 20 % of 7 sites are 1.4
    assert table["worst_share"] == pytest.approx((0.1 + 0.2) / 2)
    assert table["cvar"] == pytest.approx((0.1 + 0.4 * 0.2) / 1.4)
    assert over_sites(values, False)["cvar"] == pytest.approx((0.7 + 0.4 * 0.6) / 1.4)
    assert over_sites(values, True, level=1.0)["cvar"] == pytest.approx(table["mean"])
    assert over_sites(values[:3], True)["cvar"] == pytest.approx(0.1)
    ten = over_sites([k / 10 for k in range(10)], True)
    assert ten["cvar"] == pytest.approx(0.05)
    assert ten["worst_share"] == pytest.approx(0.05)


def test_std_and_jains_index_say_how_even_sites_are():
    table = over_sites([1.0, 3.0], True)
    assert table["std"] == pytest.approx(1.0)
    assert table["jain"] == pytest.approx(16 / 20)
    assert over_sites([0.5] * 4, True)["jain"] == pytest.approx(1.0)
    assert math.isnan(over_sites([-1.0, 1.0], True)["jain"])


def test_sites_without_a_value_are_left_out_and_counted():
    table = over_sites([NAN, 0.5, 0.7, NAN], True)
    assert (table["worst"], table["best"], table["defined"], table["undefined"]) == (0.5, 0.7, 2, 2)
    nothing = over_sites([NAN, NAN], True)
    assert math.isnan(nothing["worst"])
    assert math.isnan(nothing["cvar"])
    assert nothing["defined"] == 0


def test_share_better_counts_sites_where_both_are_defined():
    assert share_better([0.9, 0.5, NAN, 0.4], [0.8, 0.6, 0.1, 0.4], True) == pytest.approx(1 / 3)
    assert share_better([0.9, 0.5], [0.8, 0.6], False) == 0.5
    assert math.isnan(share_better([NAN], [0.1], True))


def test_level_outside_its_range_is_refused():
    with refused("level", "(0, 1]", 0):
        fm.metrics.over_sites([0.5], True, level=0.0)
