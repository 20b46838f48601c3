"""The states of a node, by the names that its status shows."""

import importlib

import pytest

from fairmesh.comparisons.reference_losses import FINDING
from fairmesh.mesh.node import life
from fairmesh.mesh.node.life import ANY_TIME, STATES, Life
from fairmesh.problems.local_work import LOCAL_TRAINING


def test_every_state_leads_to_states_and_can_be_reached_and_its_function_is_there():
    seen, ahead = set(), [life.STARTING]
    while ahead:
        seen.add(state := ahead.pop())
        ahead += [name for name in (*STATES[state].follow, *ANY_TIME) if name not in seen]
    assert STATES.keys() - seen == {life.NOT_RUNNING, life.SLOW_DISK}  # seen from outside
    for state in STATES.values():
        module, _, name = state.act.partition(":")
        assert not name or callable(getattr(importlib.import_module(f"fairmesh.mesh.node.{module}"), name))


def test_work_that_others_name_has_a_state():
    assert {FINDING, LOCAL_TRAINING} < STATES.keys()


def test_activity_has_the_name_of_its_state():
    for name, state in STATES.items():
        for detail in ("", "round 3 of 10", f"{name} of round 7"):
            shown = life.described(name, detail)
            assert shown.startswith(name)
            assert life.state_in(shown) == name
            assert detail in shown
        assert life.described(name).endswith(state.means)
    assert life.state_in("something that no node does") == ""


def test_node_goes_only_where_its_state_leads_and_comes_back_from_an_interruption():
    walk = Life()
    with pytest.raises(RuntimeError):
        walk.enter(life.FINISHED)
    walk.enter(life.ON_DATA)
    walk.enter(life.TRAINING)
    for done in (1, 2):
        walk.interrupt(life.REFERENCES, f"round {done}")
    assert walk.activity == f"{life.REFERENCES}: round 2"
    walk.resume()
    assert (walk.state, walk.detail) == (life.TRAINING, "")
    walk.enter(life.STOPPED)
