"""What `fairmesh mesh show` says about what leaves a site is what algorithms send."""

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

import fairmesh as fm
from fairmesh.algorithms import Part, plain
from fairmesh.config.registry import registered_name
from fairmesh.mesh.overview import sent
from fairmesh.mesh.revealing import bits_per_parameter, revealing
from fairmesh.networks.memory import MemoryNetwork
from tests import toys
from tests.refusals import missing_from

WORDS = {  # of each part of a message
    "model": "model",
    "tracker": "tracker",
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
    assert missing_from(tracker, "tracker", "gradients", "in every round", "gradient of one batch") == []
    assert not any("tracker" in words for words in sent(fm.TrackedADGDA(tracking=False), "tracked-ad-gda"))


class OwnState(NamedTuple):
    models: fm.roles.Models


@dataclass(frozen=True)
class Own(fm.algorithms.Algorithm):
    """An algorithm of a user that says nothing about its messages."""

    compressor: fm.compressors.Compressor = field(default_factory=fm.Sign)

    def init(self, oracle, network):
        return OwnState(oracle.initial_models())

    def step(self, state, ctx):
        losses, gradients = ctx.losses_and_gradients(state.models)
        gist = self.compressor.compress(gradients, ctx.draws("gist"))
        bits = self.compressor.nominal_bits(gradients.shape[-1])
        delivery = ctx.exchange(model=plain(state.models), gist=Part(gist, bits), loss=plain(losses, "losses"))
        return OwnState(delivery.mix("model") - 0.1 * delivery.mix("gist"))


def test_own_algorithm_has_a_correct_leaflet_without_more_code(monkeypatch):
    model, gist, loss = sent(Own(), "own")
    assert missing_from(model, "whole model", "uncompressed", "gradient of one batch") == []
    assert missing_from(gist, "gist", ", compressed", "gradient of one batch") == []
    assert missing_from(loss, "loss", "uncompressed", "its own loss") == []
    monkeypatch.setattr("fairmesh.mesh.revealing.algorithm_of", lambda table: Own())
    assert bits_per_parameter({}) == 32 + 1
    assert bits_per_parameter({"options": {"dtype": "float64"}}) == 64 + 1
    [reason] = revealing({"sampling": {"batch": 64}})
    assert missing_from(reason, "gradient of one batch", "uncompressed") == []


def test_algorithm_that_needs_its_own_data_is_said_to_be_unknown(monkeypatch):
    @dataclass(frozen=True)
    class Picky(Own):
        def init(self, oracle, network):
            return OwnState(oracle.what_only_its_experiment_has())

    assert missing_from(sent(Picky(), "picky")[0], "picky", "own code") == []
    monkeypatch.setattr("fairmesh.mesh.revealing.algorithm_of", lambda table: Picky())
    assert bits_per_parameter({}) is None


@pytest.mark.parametrize("name", ["drfa", "afl"])
def test_algorithms_with_a_server_are_said_to_be_refused(name):
    assert missing_from(sent(toys.ALGORITHMS[name], name)[0], "server", "refuses") == []


def test_algorithm_of_the_experiments_own_code_is_said_to_be_unknown():
    assert missing_from(sent(None, "own.py:Mine")[0], "own.py:Mine", "own code") == []
