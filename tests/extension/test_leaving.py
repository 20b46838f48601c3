"""check_algorithm tells a memory that would bias the others for ever from one that is private or fades slowly."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import fairmesh as fm
from fairmesh.algorithms import plain
from fairmesh.testing.algorithms import _check_leaving
from tests.refusals import refused


class Remembering(NamedTuple):
    models: torch.Tensor
    memory: torch.Tensor


@dataclass(frozen=True)
class Remembers(fm.algorithms.Algorithm):
    """Moves along a memory of gradients, which nodes may gossip."""

    kept: float
    shared: bool = False

    def init(self, oracle, network):
        models = oracle.initial_models()
        return Remembering(models, torch.zeros_like(models))

    def step(self, state, ctx):
        _, gradients = ctx.losses_and_gradients(state.models)
        memory = self.kept * state.memory + (1 - self.kept) * gradients
        delivery = ctx.exchange(model=plain(state.models - 0.05 * memory), memory=plain(memory))
        return Remembering(delivery.mix("model"), delivery.mix("memory") if self.shared else memory)


class Tracking(NamedTuple):
    models: torch.Tensor
    trackers: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True)
class Tracks(fm.algorithms.Algorithm):
    """Gradient tracking, whose average holds a share of every node for ever."""

    size: float = 0.05

    def init(self, oracle, network):
        models = oracle.initial_models()
        return Tracking(models, torch.zeros_like(models), torch.zeros_like(models))

    def step(self, state, ctx):
        _, gradients = ctx.losses_and_gradients(state.models)
        trackers = state.trackers + gradients - state.last
        delivery = ctx.exchange(model=plain(state.models - self.size * trackers), tracker=plain(trackers))
        return Tracking(delivery.mix("model"), delivery.mix("tracker"), gradients)


@pytest.mark.parametrize(
    "algorithm",
    [Remembers(1.0), Remembers(0.999), Remembers(0.999, shared=True)],
    ids=["private for ever", "private and slow", "shared and slow"],
)
def test_memory_that_is_private_or_fades_slowly_keeps_the_contract(algorithm):
    _check_leaving(algorithm, 5)


@pytest.mark.parametrize("algorithm", [Tracks(), Remembers(1.0, shared=True)], ids=["tracker", "shared for ever"])
def test_memory_that_others_keep_for_ever_is_a_violation(algorithm):
    with refused("state.", "for ever", "SumsToZero", error=fm.testing.ContractViolation):
        _check_leaving(algorithm, 5)
