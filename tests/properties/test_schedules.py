"""Schedules: their formulas, what they refuse, and one value per replica."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fairmesh as fm
from fairmesh.algorithms.schedules import as_schedule, with_run_length
from fairmesh.config.registry import registered
from fairmesh.training.replicas import stacked
from tests.refusals import refused

T = st.integers(0, 20_000)
STEP = st.floats(0, 100)
RATIO = st.floats(0.5, 1)

EXAMPLES = {  # two of each member, that differ in every number a replica may have of its own
    "constant": (fm.Constant(0.5), fm.Constant(0.1)),
    "geometric": (fm.Geometric(2.0, 0.99), fm.Geometric(1.0, 0.9)),
    "linear": (fm.Linear(2.0, 20), fm.Linear(1.0, 20)),
    "polynomial": (fm.Polynomial(2.0, 20), fm.Polynomial(1.0, 20, 3.0)),
    "staircase": (fm.Staircase(2.0, 0.5, 10), fm.Staircase(1.0, 0.1, 10)),
    "theorem-1": (fm.Theorem1(100), fm.Theorem1(100)),
    "theorem-2-dual": (fm.Theorem2Dual(2.0, 400), fm.Theorem2Dual(5.0, 400)),
    "theorem-2-primal": (fm.Theorem2Primal(2.0, 4.0, 400), fm.Theorem2Primal(3.0, 1.5, 400)),
}


def at(schedule: fm.Schedule, t: int) -> float:
    value = schedule.at(torch.tensor(t))
    assert value.dtype == torch.float64
    assert value.shape == ()
    return float(value)


def test_examples_hold_every_registered_schedule():
    assert set(registered(fm.Schedule)) == set(EXAMPLES)


@given(t=T, value=STEP)
def test_constant_is_its_value_in_every_round(t, value):
    assert at(fm.Constant(value), t) == value


@given(t=T, start=STEP, ratio=RATIO)
def test_geometric_is_start_times_ratio_to_the_t_and_never_grows(t, start, ratio):
    schedule = fm.Geometric(start, ratio)
    assert at(schedule, t) == pytest.approx(start * ratio**t, rel=1e-9, abs=1e-300)
    assert at(schedule, t + 1) <= at(schedule, t)


@given(t=T, start=STEP, rounds=st.integers(1, 20_000))
def test_linear_falls_by_the_same_in_every_round_to_zero_at_its_end_and_stays_there(t, start, rounds):
    schedule = fm.Linear(start, rounds)
    assert at(schedule, t) == pytest.approx(start * max(0, rounds - t) / rounds, rel=1e-9, abs=1e-300)
    assert at(schedule, 0) == start
    assert at(schedule, rounds) == 0


@given(t=T, start=STEP, rounds=st.integers(1, 20_000))
def test_linear_without_an_end_takes_the_run_s_wherever_it_is(t, start, rounds):
    assert at(fm.Linear(start), t) == start
    assert with_run_length(fm.Linear(start), rounds) == fm.Linear(start, rounds)
    nested = fm.TrackedADGDA(fm.Linear(start), weighting=fm.ProjectedAscent(fm.Linear(start / 2)))
    found = with_run_length(nested, rounds)
    assert found == fm.TrackedADGDA(
        fm.Linear(start, rounds), weighting=fm.ProjectedAscent(fm.Linear(start / 2, rounds))
    )
    assert with_run_length(found, rounds + 1) is found  # it has an end of its own now


@given(t=T, start=STEP, rounds=st.integers(1, 20_000), power=st.floats(0.1, 5))
def test_polynomial_is_a_power_of_what_is_left_of_the_run(t, start, rounds, power):
    schedule = fm.Polynomial(start, rounds, power)
    left = max(0, rounds - t) / rounds
    assert at(schedule, t) == pytest.approx(start * left**power, rel=1e-9, abs=1e-300)
    assert at(fm.Polynomial(start, rounds, 1.0), t) == at(fm.Linear(start, rounds), t)
    assert with_run_length(fm.Polynomial(start, power=power), rounds) == schedule


@given(t=T, start=STEP, ratio=RATIO, every=st.integers(1, 500))
def test_staircase_falls_once_every_so_many_rounds(t, start, ratio, every):
    assert at(fm.Staircase(start, ratio, every), t) == pytest.approx(
        start * ratio ** (t // every), rel=1e-9, abs=1e-300
    )


@given(t=T, rounds=st.integers(1, 10**6), smoothness=st.floats(1e-3, 1e3), condition=st.floats(1, 100))
def test_theorem_steps_are_their_formulas_in_every_round(t, rounds, smoothness, condition):
    assert at(fm.Theorem1(rounds), t) == pytest.approx(1 / math.sqrt(rounds))
    dual = 1 / (2 * smoothness * math.sqrt(rounds))
    assert at(fm.Theorem2Dual(smoothness, rounds), t) == pytest.approx(dual)
    primal = fm.Theorem2Primal(smoothness, condition, rounds)
    assert at(primal, t) == pytest.approx(dual / (16 * (condition + 1) ** 2))


def test_schedules_give_steps_known_by_hand():
    assert [at(fm.Geometric(2.0, 0.5), t) for t in range(4)] == [2.0, 1.0, 0.5, 0.25]
    assert [at(fm.Staircase(2.0, 0.5, 2), t) for t in range(5)] == [2.0, 2.0, 1.0, 1.0, 0.5]
    assert at(fm.Theorem1(100), 7) == pytest.approx(0.1)
    assert at(fm.Theorem2Dual(2.0, 100), 7) == pytest.approx(1 / 40)
    assert at(fm.Theorem2Primal(2.0, 3.0, 100), 7) == pytest.approx(1 / 40 / 256)


@pytest.mark.parametrize("name", EXAMPLES)
def test_schedule_with_one_value_per_replica_gives_each_replica_its_own_step(name):
    pair = EXAMPLES[name]
    both = stacked(pair, torch.float64, torch.device("cpu"))
    for t in (0, 1, 25):
        value = both.at(torch.tensor(t))
        assert value.dtype == torch.float64
        rows = value.expand(2, 1, 1)
        assert rows.flatten().tolist() == pytest.approx([at(schedule, t) for schedule in pair], rel=1e-14)
        if pair[0] != pair[1]:
            assert value.shape == (2, 1, 1)


def test_as_schedule_takes_a_number_as_a_constant_step():
    assert as_schedule(0.25) == fm.Constant(0.25)
    assert as_schedule(1) == fm.Constant(1.0)
    assert fm.Schedule.shorthand(3) == fm.Constant(3.0)
    assert as_schedule(fm.Theorem1(4)) == fm.Theorem1(4)


@pytest.mark.parametrize("step", [-1.0, -1e-9, math.nan, math.inf])
@pytest.mark.parametrize(
    "make", [fm.Constant, lambda s: fm.Geometric(s, 0.9), lambda s: fm.Staircase(s, 0.9, 5), as_schedule, fm.Linear]
)
def test_schedule_refuses_a_step_that_is_negative_or_not_finite(make, step):
    with refused("step size", ">= 0", step):
        make(step)


@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.001, math.nan])
@pytest.mark.parametrize("make", [lambda r: fm.Geometric(1.0, r), lambda r: fm.Staircase(1.0, r, 5)])
def test_schedule_refuses_a_ratio_outside_0_1(make, ratio):
    with refused("ratio", "(0, 1]", ratio):
        make(ratio)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: fm.Staircase(1.0, 0.5, 0), ["every", ">= 1", "0"]),
        (lambda: fm.Linear(1.0, 0), ["rounds", ">= 1", "0"]),
        (lambda: fm.Polynomial(1.0, 0), ["rounds", ">= 1", "0"]),
        (lambda: fm.Polynomial(1.0, 10, 0.0), ["power", "> 0", "0.0"]),
        (lambda: fm.Polynomial(1.0, 10, math.inf), ["power", "> 0", "inf"]),
        (lambda: fm.Theorem1(0), ["rounds", ">= 1", "0"]),
        (lambda: fm.Theorem2Dual(1.0, 0), ["rounds", ">= 1", "0"]),
        (lambda: fm.Theorem2Dual(0.0, 10), ["smoothness", "> 0", "0.0"]),
        (lambda: fm.Theorem2Dual(-1.0, 10), ["smoothness", "> 0", "-1.0"]),
        (lambda: fm.Theorem2Primal(math.nan, 2.0, 10), ["smoothness", "> 0", "nan"]),
        (lambda: fm.Theorem2Primal(1.0, 2.0, -3), ["rounds", ">= 1", "-3"]),
        (lambda: fm.Theorem2Primal(1.0, 0.5, 10), ["condition", ">= 1", "0.5"]),
    ],
)
def test_schedule_refuses_numbers_out_of_range(make, names):
    with refused(*names):
        make()


def test_schedule_allows_steps_of_zero_and_ratios_of_one():
    assert at(fm.Constant(0.0), 3) == 0.0
    assert at(fm.Geometric(0.5, 1.0), 10_000) == 0.5
