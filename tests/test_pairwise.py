"""The covers that the quick run takes of products of parameters."""

from itertools import combinations, product
from math import prod

import pytest

from tests.pairwise import cover, covering, some_quick
from tests.refusals import refused

SIZES = [(3,), (2, 5), (14, 2, 2), (13, 12), (3, 2, 2, 4), (5, 5, 5, 5), (2,) * 8, (1, 4, 1)]


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_cover_holds_every_combination_of_as_many_columns_as_its_strength(sizes, strength):
    rows = cover(sizes, strength)
    assert len(set(rows)) == len(rows)
    for columns in combinations(range(len(sizes)), min(strength, len(sizes))):
        seen = {tuple(row[column] for column in columns) for row in rows}
        assert seen == set(product(*(range(sizes[column]) for column in columns)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_cover_is_the_same_each_time_and_never_larger_than_the_product(sizes):
    for strength in (1, 2):
        assert cover(sizes, strength) == cover(sizes, strength)
        assert len(cover(sizes, strength)) <= prod(sizes)
    assert len(cover(sizes, 1)) == max(sizes)


def test_cover_of_pairs_is_much_smaller_than_a_product_of_many_columns():
    assert len(cover((2,) * 8)) <= 10  # of 256
    assert len(cover((5, 5, 5, 5))) <= 40  # of 625
    assert len(cover((14, 2, 2))) <= 30  # of 56, at least 28


def _cases(decorator) -> tuple[list, list]:
    cases = decorator.mark.args[1]
    quick = [case.id for case in cases if not case.marks]
    return quick, [case.id for case in cases if case.marks]


def test_covering_marks_as_slow_what_the_cover_leaves_out_and_loses_nothing():
    quick, slow = _cases(covering(letter={"a": 1, "b": 2, "c": 3}, word=["x", "y", "z"], sign=["+", "-"], strength=1))
    assert len(quick) == 3
    assert {name for id in quick for name in id.split("-", 2)} == {"a", "b", "c", "x", "y", "z", "+", "-"}
    assert len({*quick, *slow}) == 18


def test_some_quick_marks_the_others_as_slow_and_refuses_unknown_names():
    assert _cases(some_quick("letter", ["a", "b", "c"], "b")) == (["b"], ["a", "c"])
    with refused("letter", "d", error=ValueError):
        some_quick("letter", ["a", "b", "c"], "d")
