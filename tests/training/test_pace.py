"""What a round costs one node, and how fast rounds follow each other over a network."""

import pytest

import fairmesh as fm
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.training.pace import NODE_S, Echo, Pace, RoundCost, duration, pace_of, round_cost
from fairmesh.training.plan import Plan
from tests import toys


def test_round_with_an_echo_sends_each_neighbour_what_a_simulation_counts():
    problem, algorithm = toys.problem(4), fm.ADGDA(primal_step=0.1, dual_step=0.1)
    plan, echo = Plan.of(problem, fm.Ring(), algorithm, 10), Echo()
    cost = round_cost(plan.training(RemoteNetwork(plan.cycle, [1], echo, each_copy=True)), echo)
    (record,) = fm.train(problem, fm.Ring(), algorithm, 10).final
    assert cost.message_bytes == record["bytes_busiest_node"] / 10 / 2  # to each of two neighbours
    assert 0 < cost.seconds < 1


def test_pace_is_half_a_round_trip_the_message_and_the_processor():
    pace = pace_of(RoundCost(0.01, 5000), rtt_s=0.1, bytes_per_s=100_000)
    assert pace == pytest.approx(Pace(0.01 + NODE_S, 0.05 + 0.05))
    assert pace.mostly_waits
    assert not pace_of(RoundCost(0.05, 5000), rtt_s=0.1).mostly_waits
    assert "8.8 rounds per second" in pace.in_words(600)
    assert "600 rounds" in pace.in_words(600)


@pytest.mark.parametrize(
    ("seconds", "words"), [(9.6, "10 s"), (125, "2.1 minutes"), (4e4, "11 hours"), (1e6, "12 days")]
)
def test_duration_has_the_unit_that_people_would_use(seconds, words):
    assert duration(seconds) == words
