"""What rides along with a state, and what links of the gradient path may ask for."""

import copy
import pickle
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

import fairmesh as fm
from fairmesh.algorithms import plain
from fairmesh.algorithms.companions import KINDS, NOTHING, carried
from fairmesh.algorithms.dsgd import DSGDState
from fairmesh.problems import oracle
from fairmesh.problems.gradient_path import Link, gradient_path
from fairmesh.storage.state_tree import flatten_state
from tests import toys


def test_plain_run_has_no_companions_and_others_have_those_that_their_settings_bring():
    assert list(KINDS) == ["subgroups", "own", "optimizer", "trainer"]
    plain_run = fm.train(toys.problem(3), fm.Ring(), fm.algorithms.DSGD(0.1), 1, trace="no")
    assert plain_run.state.companions == NOTHING
    adam = fm.algorithms.DSGD(0.1, optimizer=fm.optimizers.AdamW())
    state = fm.train(toys.problem(3, parts=fm.Parts(local=("2.*",))), fm.Ring(), adam, 1, trace="no").state
    assert state.companions._fields == ("own", "optimizer")
    assert "state.companions.optimizer.momenta" in flatten_state(state)


def test_states_of_companions_can_be_copied_and_pickled():
    states = carried({"own": DSGDState(torch.ones(1, 2, 3))})
    for again in (copy.deepcopy(states), pickle.loads(pickle.dumps(states))):  # noqa: S301
        assert type(again) is type(states)
        assert torch.equal(again.own.models, states.own.models)


@dataclass(frozen=True)
class Noise(Link):
    """Replaces the gradients by the mean over single samples, and adds noise."""

    size: float

    def apply(self, gradients, asked):
        noise = asked.draws("noise").uniforms(gradients.shape[-1]) - 0.5
        gradients.copy_(asked.of_samples().mean(dim=-2) + self.size * noise)


def test_link_may_ask_for_random_numbers_and_for_gradients_of_single_samples():
    problem, at = toys.problem(3), torch.tensor(4)
    plain_oracle = toys.on_stack(problem, fm.Ring())[1]
    models = plain_oracle.initial_models()
    _, gradients = plain_oracle.losses_and_gradients(models, at, 0)
    found = []
    for size in (0.0, 0.1, 0.1):
        with mock.patch.object(oracle, "gradient_path", lambda problem, size=size: {"noise": Noise(size)}):
            found.append(toys.on_stack(problem, fm.Ring())[1].losses_and_gradients(models, at, 0)[1])
    assert torch.allclose(found[0], gradients, rtol=0, atol=1e-12)
    assert torch.equal(found[1], found[2])
    noise = found[1] - found[0]
    assert 0.04 < float(noise.abs().max()) <= 0.05
    assert not torch.allclose(noise[0, 0], noise[0, 1])


def test_gradient_path_has_a_link_for_each_setting_that_differs_from_its_default():
    assert gradient_path(toys.problem(3)) == {}
    assert list(gradient_path(toys.problem(3, weight_decay=0.1, clip_norm=2.0))) == ["clip_norm", "weight_decay"]


@dataclass(frozen=True)
class AsksForAll(fm.algorithms.Algorithm):
    """Uses all that a round offers of the data."""

    def init(self, oracle, network):
        return DSGDState(oracle.initial_models())

    def step(self, state, ctx):
        weights = ctx.n * ctx.sizes / ctx.all_sizes.sum(dim=-1, keepdim=True)
        gradients = ctx.sample_gradients(state.models) * ctx.sample_losses(state.models).unsqueeze(-1)
        models = state.models - ctx.step_of_weights(0.01) * weights * gradients.mean(dim=-2)
        return DSGDState(ctx.exchange(model=plain(models)).mix("model"))


@pytest.mark.slow
def test_algorithm_that_asks_for_sizes_and_single_samples_keeps_the_contract():
    fm.testing.check_algorithm(AsksForAll(), topologies=[fm.Ring()], rounds=2)
