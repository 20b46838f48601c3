"""Ranks of torch.distributed end where the simulator ends."""

import functools
from pathlib import Path

import pytest

from fairmesh.networks.cluster import ClusterTransport, _packed, _unpacked, blocks_of
from tests.cluster.rank import CASES, check_case
from tests.cluster.runs import start_ranks
from tests.refusals import refused


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Returns the folder in which this number of ranks wrote how all cases ended."""

    @functools.cache
    def folder_of(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("cluster")
        start_ranks("rank", ranks, folder, seconds=300)
        return folder

    return folder_of


@pytest.mark.slow  # test_runs.py has one case of each kind
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [1, 2, 4], ids=["one rank", "two ranks", "four ranks"])
def test_cluster_ends_where_the_simulator_ends(ended, ranks, case):
    check_case(ended(ranks), ranks, 30, case)


def test_blocks_of_nodes_are_even_and_in_order():
    assert [list(block) for block in blocks_of(7, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [len(block) for block in blocks_of(50, 8)] == [7, 7, 6, 6, 6, 6, 6, 6]
    with refused("4 ranks", "3 nodes"):
        blocks_of(3, 4)


def test_packed_text_for_several_receivers_of_a_rank_travels_once():
    texts = [b"first", b"first", b"second", b"second", b"second", b"first"]
    assert _unpacked(_packed(texts)) == texts
    assert len(_packed(texts)) == 8 * 6 + 2 * len(b"first") + len(b"second")


def test_cluster_transport_without_a_process_group_is_refused():
    with refused("torchrun"):
        ClusterTransport([[0]])
