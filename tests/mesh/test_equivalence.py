"""Nodes that talk over mutual TLS end where the simulator ends."""

import functools

import pytest
import torch

from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests import toys
from tests.mesh.peer import CASES, NAMES, ONE_OF_EACH_KIND, ROUNDS
from tests.mesh.scenarios import played

SETS = {"a few": ONE_OF_EACH_KIND, "others": tuple(case for case in CASES if case not in ONE_OF_EACH_KIND)}


@pytest.fixture(scope="module")
def ends_of(tmp_path_factory):
    """Returns how the cases of a set ended at every node, which run together."""

    @functools.cache
    def ends(name: str) -> list[dict]:
        folder = tmp_path_factory.mktemp("peers")
        played("tests.mesh.peer", str(folder), *SETS[name], seconds=400)
        return [torch.load(folder / f"{name}.pt") for name in NAMES]

    return ends


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_peers_are_the_simulator_message_by_message(ends_of, case):
    peers = ends_of("a few" if case in ONE_OF_EACH_KIND else "others")
    topology, algorithm = CASES[case]
    training = Training(toys.problem(), topology, replicas_of([algorithm], [0, 4], None, 8), Options(dtype="float64"))
    expected = training.initial()
    for t in range(ROUNDS):
        expected = training.advance(expected, t)
    for node, ends in enumerate(peers):
        for name in ("models", "duals"):
            there, alone = ends[case][name], getattr(training.view, name)(expected.algorithm)
            assert (there is None) == (alone is None)
            if alone is not None:
                assert float((there - alone[:, [node]]).abs().max()) < 1e-10
        assert torch.equal(ends[case]["bytes"], expected.sent.node_bytes[:, [node]])
