"""Every registered member keeps the contract of its role, by the checks that `fm.testing` offers to others.

One case of each registered class is quick: the first of its class in the tables of `tests/toys.py`, so a new member is
in `make test` as soon as it is in a table, and a test fails while it is in none. Other settings of a class are slow.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import fairmesh as fm
from fairmesh.numerics.tracing import Traced
from fairmesh.storage.state_tree import flatten_state
from tests import toys
from tests.pairwise import case
from tests.properties.test_compressors import COMPRESSORS
from tests.properties.test_config import FAMILIES
from tests.properties.test_regularizers import REGULARIZERS

pytestmark = pytest.mark.recorded

SCHEDULES = FAMILIES[fm.schedules.Schedule]
# A function that tells nodes apart by their place changes with their names.
SYMMETRIC = {name: member for name, member in REGULARIZERS.items() if name != "custom quartic"}


def first_of_each_class(table: Mapping[str, Any]) -> set[str]:
    """Returns the names of the first entry of each class in a table."""
    names: dict[type, str] = {}
    for name, member in table.items():
        names.setdefault(type(member), name)
    return set(names.values())


def every(table: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with the members of a table. The first of each class is quick."""
    quick = first_of_each_class(table)
    return pytest.mark.parametrize("member", [case(m, id=name, quick=name in quick) for name, m in table.items()])


def test_tables_hold_every_registered_member():
    for role, table in FAMILIES.items():
        assert toys.covers(role, table), role


@pytest.mark.quick_cases("all")
@every(toys.ALGORITHMS)
def test_algorithm_keeps_its_contract(member):
    fm.testing.check_algorithm(member, topologies=[fm.Ring()], rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize("member", toys.ALGORITHMS.values(), ids=toys.ALGORITHMS)
def test_algorithm_keeps_its_contract_for_longer_and_over_a_changing_graph(member):
    fm.testing.check_algorithm(member)


@pytest.mark.slow
@pytest.mark.parametrize("topology", toys.TOPOLOGIES.values(), ids=toys.TOPOLOGIES)
def test_ad_gda_keeps_its_contract_over_every_topology(problem, topology):
    fm.testing.check_algorithm(toys.ALGORITHMS["ad-gda"], problem=problem, topologies=[topology], rounds=4)


@pytest.mark.quick_cases("all")
@every(COMPRESSORS)
def test_compressor_keeps_its_contract(member):
    fm.testing.check_compressor(member)


@pytest.mark.quick_cases("all")
@every(SYMMETRIC)
def test_regularizer_keeps_its_contract(member):
    fm.testing.check_regularizer(member)


@pytest.mark.quick_cases("all")
@every(toys.TOPOLOGIES)
def test_topology_keeps_its_contract(member):
    fm.testing.check_topology(member)


# A random compressor draws by the place of a coordinate, and these rows have one for each node: new names change it.
NAMED = {name: weighting for name, weighting in toys.WEIGHINGS.items() if name != "maximum, losses compressed"}


@pytest.mark.quick_cases("all")
@every(NAMED)
def test_tracked_ad_gda_keeps_its_contract_with_any_weighting(member):
    algorithm = fm.TrackedADGDA(0.05, weighting=member)
    fm.testing.check_algorithm(algorithm, topologies=[fm.Ring()], rounds=2, may_leave=False)


@pytest.mark.quick_cases("all")
@every(toys.OPTIMIZERS)
def test_choco_sgd_keeps_its_contract_with_any_optimizer(problem, member):
    optimizer = dataclasses.replace(member, no_decay=())  # patterns of names are those of one model
    algorithm = fm.ChocoSGD(0.1, consensus_step=0.3, optimizer=optimizer)
    settings = {"topologies": [fm.Ring()], "rounds": 2, "may_leave": False, "keeps_average": not member.decay}
    fm.testing.check_algorithm(algorithm, problem=problem, **settings)


@pytest.mark.quick_cases("all")
@every(SCHEDULES)
def test_schedule_keeps_its_contract(member):
    fm.testing.check_schedule(member)


@pytest.fixture(scope="module")
def problem() -> fm.Problem:
    return toys.problem()


@pytest.mark.quick_cases("all")
@every(toys.ALGORITHMS)
def test_algorithm_with_all_defaults_computes_what_it_does_without_recorded_gradients(problem, member, monkeypatch):
    """The path of users: gradients are recorded once and replayed."""
    replays: list[int] = []
    replayed = Traced.__call__

    def counted(self: Traced, *arguments: Any) -> Any:
        replays.append(1)
        return replayed(self, *arguments)

    monkeypatch.setattr(Traced, "__call__", counted)
    as_users_do = fm.train(problem, fm.Ring(), member, 3)
    assert replays, "no gradient was recorded"
    replays.clear()
    as_written = fm.train(problem, fm.Ring(), member, 3, trace="no")
    assert not replays
    for name, tensor in flatten_state(as_written.state).items():
        assert torch.allclose(flatten_state(as_users_do.state)[name], tensor, rtol=1e-4, atol=1e-6), name
