"""Schedules: their formulas, what they refuse, and one value per replica."""

import math
from dataclasses import dataclass

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
    "constant": (fm.schedules.Constant(0.5), fm.schedules.Constant(0.1)),
    "geometric": (fm.schedules.Geometric(2.0, 0.99), fm.schedules.Geometric(1.0, 0.9)),
    "limited": (fm.schedules.Limited(2.0, 20), fm.schedules.Limited(1.0, 20, 3.0)),
    "measured": (fm.schedules.Measured(2.0, 20), fm.schedules.Measured(1.0, 20, power=3.0)),
    "linear": (fm.schedules.Linear(2.0, 20), fm.schedules.Linear(1.0, 20)),
    "polynomial": (fm.schedules.Polynomial(2.0, 20), fm.schedules.Polynomial(1.0, 20, 3.0)),
    "staircase": (fm.schedules.Staircase(2.0, 0.5, 10), fm.schedules.Staircase(1.0, 0.1, 10)),
    "theorem-1": (fm.schedules.Theorem1(100), fm.schedules.Theorem1(100)),
    "theorem-2-dual": (fm.schedules.Theorem2Dual(2.0, 400), fm.schedules.Theorem2Dual(5.0, 400)),
    "theorem-2-primal": (fm.schedules.Theorem2Primal(2.0, 4.0, 400), fm.schedules.Theorem2Primal(3.0, 1.5, 400)),
}


def at(schedule: fm.schedules.Schedule, t: int) -> float:
    value = schedule.at(torch.tensor(t))
    assert value.dtype == torch.float64
    assert value.shape == ()
    return float(value)


def test_examples_hold_every_registered_schedule():
    assert set(registered(fm.schedules.Schedule)) == set(EXAMPLES)


@given(t=T, value=STEP)
def test_constant_is_its_value_in_every_round(t, value):
    assert at(fm.schedules.Constant(value), t) == value


@given(t=T, start=STEP, ratio=RATIO)
def test_geometric_is_start_times_ratio_to_the_t_and_never_grows(t, start, ratio):
    schedule = fm.schedules.Geometric(start, ratio)
    assert at(schedule, t) == pytest.approx(start * ratio**t, rel=1e-9, abs=1e-300)
    assert at(schedule, t + 1) <= at(schedule, t)


@given(t=T, start=STEP, rounds=st.integers(1, 20_000))
def test_linear_falls_by_the_same_in_every_round_to_zero_at_its_end_and_stays_there(t, start, rounds):
    schedule = fm.schedules.Linear(start, rounds)
    assert at(schedule, t) == pytest.approx(start * max(0, rounds - t) / rounds, rel=1e-9, abs=1e-300)
    assert at(schedule, 0) == start
    assert at(schedule, rounds) == 0


@given(t=T, start=STEP, rounds=st.integers(1, 20_000))
def test_linear_without_an_end_takes_the_run_s_wherever_it_is(t, start, rounds):
    assert at(fm.schedules.Linear(start), t) == start
    assert with_run_length(fm.schedules.Linear(start), rounds) == fm.schedules.Linear(start, rounds)
    nested = fm.TrackedADGDA(
        fm.schedules.Linear(start), weighting=fm.weighting.ProjectedAscent(fm.schedules.Linear(start / 2))
    )
    found = with_run_length(nested, rounds)
    assert found == fm.TrackedADGDA(
        fm.schedules.Linear(start, rounds),
        weighting=fm.weighting.ProjectedAscent(fm.schedules.Linear(start / 2, rounds)),
    )
    assert with_run_length(found, rounds + 1) is found  # it has an end of its own now


@dataclass(frozen=True)
class _Halving(fm.schedules.Schedule):
    """A user's own schedule, which ends with the run."""

    half: int | None = None

    def at(self, round_index):
        return 0.5 ** (round_index // (self.half or 1)).double()

    def with_run_length(self, rounds):
        return _Halving(rounds // 2) if self.half is None else self


def test_schedule_of_a_user_learns_the_length_of_the_run():
    assert with_run_length(fm.algorithms.DSGD(primal_step=_Halving()), 10) == fm.algorithms.DSGD(
        primal_step=_Halving(5)
    )
    constant = fm.schedules.Constant(0.1)
    assert constant.with_run_length(10) is constant


@given(t=T, start=STEP, rounds=st.integers(1, 20_000), power=st.floats(0.1, 5))
def test_polynomial_is_a_power_of_what_is_left_of_the_run(t, start, rounds, power):
    schedule = fm.schedules.Polynomial(start, rounds, power)
    left = max(0, rounds - t) / rounds
    assert at(schedule, t) == pytest.approx(start * left**power, rel=1e-9, abs=1e-300)
    assert at(fm.schedules.Polynomial(start, rounds, 1.0), t) == at(fm.schedules.Linear(start, rounds), t)
    assert with_run_length(fm.schedules.Polynomial(start, power=power), rounds) == schedule


@given(t=T, start=STEP, ratio=RATIO, every=st.integers(1, 500))
def test_staircase_falls_once_every_so_many_rounds(t, start, ratio, every):
    assert at(fm.schedules.Staircase(start, ratio, every), t) == pytest.approx(
        start * ratio ** (t // every), rel=1e-9, abs=1e-300
    )


@given(t=T, rounds=st.integers(1, 10**6), smoothness=st.floats(1e-3, 1e3), condition=st.floats(1, 100))
def test_theorem_steps_are_their_formulas_in_every_round(t, rounds, smoothness, condition):
    assert at(fm.schedules.Theorem1(rounds), t) == pytest.approx(1 / math.sqrt(rounds))
    dual = 1 / (2 * smoothness * math.sqrt(rounds))
    assert at(fm.schedules.Theorem2Dual(smoothness, rounds), t) == pytest.approx(dual)
    primal = fm.schedules.Theorem2Primal(smoothness, condition, rounds)
    assert at(primal, t) == pytest.approx(dual / (16 * (condition + 1) ** 2))


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
    assert as_schedule(0.25) == fm.schedules.Constant(0.25)
    assert as_schedule(1) == fm.schedules.Constant(1.0)
    assert fm.schedules.Schedule.shorthand(3) == fm.schedules.Constant(3.0)
    assert as_schedule(fm.schedules.Theorem1(4)) == fm.schedules.Theorem1(4)


S = fm.schedules
OUT_OF_RANGE = [  # a schedule of one number, values of it, and what the refusal names
    *(
        (make, (-1.0, -1e-9, math.nan, math.inf), [">= 0"])
        for make in (S.Constant, S.Linear, as_schedule, lambda s: S.Geometric(s, 0.9), lambda s: S.Staircase(s, 0.9, 5))
    ),
    (lambda r: S.Geometric(1.0, r), (0.0, -0.5, 1.001, math.nan), ["ratio", "(0, 1]"]),
    (lambda r: S.Staircase(1.0, r, 5), (0.0, -0.5, 1.001, math.nan), ["ratio", "(0, 1]"]),
    (lambda every: S.Staircase(1.0, 0.5, every), (0,), ["every", ">= 1"]),
    *(
        (make, (0, -3), ["rounds", ">= 1"])
        for make in (
            lambda rounds: S.Linear(1.0, rounds),
            lambda rounds: S.Polynomial(1.0, rounds),
            S.Theorem1,
            lambda rounds: S.Theorem2Dual(1.0, rounds),
            lambda rounds: S.Theorem2Primal(1.0, 2.0, rounds),
        )
    ),
    (lambda power: S.Polynomial(1.0, 10, power), (0.0, math.inf), ["power", "> 0"]),
    (lambda smoothness: S.Theorem2Dual(smoothness, 10), (0.0, -1.0), ["smoothness", "> 0"]),
    (lambda smoothness: S.Theorem2Primal(smoothness, 2.0, 10), (math.nan,), ["smoothness", "> 0"]),
    (lambda condition: S.Theorem2Primal(1.0, condition, 10), (0.5,), ["condition", ">= 1"]),
]


@pytest.mark.parametrize(("make", "values", "names"), OUT_OF_RANGE)
def test_schedule_refuses_numbers_out_of_range(make, values, names):
    for value in values:
        with refused(*names, value):
            make(value)
