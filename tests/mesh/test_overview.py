"""What `fairmesh mesh show` says about what leaves a site is what algorithms send."""

import pytest

import fairmesh as fm
from fairmesh.config.registry import registered_name
from fairmesh.mesh.overview import sent
from fairmesh.networks.memory import MemoryNetwork
from tests import toys
from tests.refusals import missing_from

WORDS = {  # of each part of a message
    "model": "model",
    "tracker": "gradient tracker",
    "dual": "of all sites",
    "price": "price",
}


@pytest.fixture
def parts(monkeypatch):
    """The parts of the messages of a run."""
    found: dict = {}
    honest = MemoryNetwork.exchange

    def exchange(self, parts, round_index):
        found.update(parts)
        return honest(self, parts, round_index)

    monkeypatch.setattr(MemoryNetwork, "exchange", exchange)
    return found


@pytest.mark.parametrize("name", [name for name, one in toys.ALGORITHMS.items() if not one.needs_server])
@pytest.mark.quick_cases(4)
def test_every_part_of_a_message_is_named_and_no_other(name, parts):
    algorithm = toys.ALGORITHMS[name]
    fm.train(toys.problem(4), fm.Ring(), algorithm, 1)
    told = sent(algorithm, registered_name(algorithm))
    assert len(told) == max(1, len(parts)), (told, list(parts))
    for part, words in zip(parts, told):
        assert WORDS[part] in words
    compressed = [type(one.code).__name__ != "Dense" for one in parts.values()]
    assert [", compressed" in words for words in told] == (compressed or [False])
    if not parts:
        assert "nothing" in told[0]


def test_gradients_are_said_to_leave():
    for algorithm in (fm.ADGDA(), fm.ChocoSGD(), fm.TrackedADGDA(), fm.DSGD(), fm.DRDSGD()):
        first = sent(algorithm, registered_name(algorithm))[0]
        assert missing_from(first, "in every round", "gradient of one batch at a model that it knows") == []
    tracker = sent(fm.TrackedADGDA(), "tracked-ad-gda")[2]
    assert (
        missing_from(tracker, "tracker", "moving average of gradients", "in every round", "gradient of one batch") == []
    )
    assert not any("tracker" in words for words in sent(fm.TrackedADGDA(tracking=False), "tracked-ad-gda"))


@pytest.mark.parametrize("name", ["drfa", "afl"])
def test_algorithms_with_a_server_are_said_to_be_refused(name):
    assert missing_from(sent(toys.ALGORITHMS[name], name)[0], "server", "refuses") == []


def test_algorithm_of_the_experiments_own_code_is_said_to_be_unknown():
    assert missing_from(sent(None, "own.py:Mine")[0], "own.py:Mine", "own code") == []
