"""The checks that fairmesh offers to others hold for a user's members."""

import importlib
import re
from pathlib import Path

import pytest

import fairmesh as fm
from fairmesh.testing import check_algorithm, check_compressor, check_regularizer, check_schedule, check_topology
from tests.extension import mine
from tests.pairwise import some_quick

ALGORITHMS = {
    "mine": mine.ExactDiffusion(),
    "mine from a built-in one": mine.Compressed(0.1, 0.3, mine.Ternary(), 0.9),
    "with a weighting, a schedule and a regularizer of mine": fm.TrackedADGDA(
        mine.Cosine(0.05, 40), weighting=mine.LossPower(), regularizer=mine.SquaredDistance()
    ),
}


@some_quick("name", ALGORITHMS.keys(), "mine")
def test_check_algorithm_passes(name):
    check_algorithm(ALGORITHMS[name])


def test_checks_of_other_members_pass():
    check_compressor(mine.Ternary())
    check_topology(mine.Barbell())
    check_regularizer(mine.SquaredDistance())
    check_schedule(mine.Cosine(0.1, 40))


@pytest.mark.parametrize("path", sorted(Path("examples").glob("**/*.py")), ids=str)
def test_examples_import_nothing_but_what_is_reachable_under_fm(path):
    for module in re.findall(r"^from (fairmesh\S*) import", path.read_text(), re.MULTILINE):
        reached = importlib.import_module(module)
        assert any(reached is getattr(fm, name) for name in fm.__all__), f"{path} imports from {module}"


def test_what_authors_of_algorithms_need_is_reachable_under_fm():
    for name in (
        "Delivery", "GossipSettings", "Part", "PublicCopies", "compressed_difference", "gossip_step", "plain",
        "prior_rows", "prior_weights", "updated_copies", "zero_copies",
    ):  # fmt: skip
        assert getattr(fm.algorithms, name).__doc__
