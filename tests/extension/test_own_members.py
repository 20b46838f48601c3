"""The checks that fairmesh offers to others hold for its own members, and for a user's."""

import pytest

import fairmesh as fm
from fairmesh.testing import check_algorithm, check_compressor, check_regularizer, check_schedule, check_topology
from tests import toys
from tests.extension import mine
from tests.pairwise import some_quick
from tests.properties.test_config import FAMILIES

ALGORITHMS = {
    **toys.ALGORITHMS,
    "mine": mine.ExactDiffusion(),
    "mine from a built-in one": mine.Compressed(0.1, 0.3, mine.Ternary(), 0.9),
    "with a weighting, a schedule and a regularizer of mine": fm.TrackedADGDA(
        mine.Cosine(0.05, 40), weighting=mine.LossPower(), regularizer=mine.SquaredDistance()
    ),
}
COMPRESSORS = {**toys.COMPRESSORS, "mine": mine.Ternary()}
TOPOLOGIES = {**toys.TOPOLOGIES, "mine": mine.Barbell()}
REGULARIZERS = {**toys.REGULARIZERS, "mine": mine.SquaredDistance()}
SCHEDULES = {**FAMILIES[fm.schedules.Schedule], "mine": mine.Cosine(0.1, 40)}


def test_tables_hold_every_registered_member():
    for role, table in FAMILIES.items():
        assert toys.covers(role, table)


@some_quick("name", ALGORITHMS.keys(), "mine")
def test_check_algorithm_passes(name):
    check_algorithm(ALGORITHMS[name])


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.quick_cases(4)
def test_check_compressor_passes(name):
    check_compressor(COMPRESSORS[name])


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_check_topology_passes(name):
    check_topology(TOPOLOGIES[name])


@pytest.mark.parametrize("name", REGULARIZERS)
@pytest.mark.quick_cases(3)
def test_check_regularizer_passes(name):
    check_regularizer(REGULARIZERS[name])


@pytest.mark.parametrize("name", SCHEDULES)
def test_check_schedule_passes(name):
    check_schedule(SCHEDULES[name])
