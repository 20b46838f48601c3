"""Which samples make a batch, and what an algorithm sees of them."""

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.algorithms import Round
from fairmesh.algorithms.companions import CompanionInputs, carried_at_start
from fairmesh.numerics import random_streams
from tests import toys
from tests.refusals import refused


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_permutation_takes_every_number_once_and_differs_by_key(size):
    key = random_streams.keys(torch.arange(20), "test", 0, torch.tensor([5]))  # (20, 1)
    found = random_streams.permuted(key, torch.arange(size), torch.tensor(size))
    assert torch.equal(found.sort(dim=-1).values, torch.arange(size).expand(20, -1))
    if size >= 64:
        assert len({tuple(row.tolist()) for row in found}) == 20
        fixed = (found == torch.arange(size)).sum(dim=-1).double().mean()  # one on average
        assert fixed < 2.5


@pytest.mark.parametrize("calls", [1, 3])
def test_shuffled_sampling_takes_every_row_once_per_epoch(calls):
    sizes, batch = (5, 12, 7), 4
    problem = toys.problem(3, sites=toys.sites(3, sizes), sampling=fm.Sampling(batch=batch, order="shuffled"))
    _, oracle = toys.on_stack(problem, fm.Ring(), seeds=(0, 9), calls=calls)
    rounds = torch.arange(60)
    taken = torch.stack([oracle.batches.indices(rounds, k, calls) for k in range(calls)], dim=1)
    taken = taken.permute(2, 3, 0, 1, 4).flatten(2)  # replicas, nodes, samples in the order of their use
    first = 0
    for i, size in enumerate(sizes):
        epochs = (taken[:, i] - first)[:, : 20 * size].unflatten(-1, (20, size))
        assert torch.equal(epochs.sort(dim=-1).values, torch.arange(size).expand(2, 20, -1))
        assert len({tuple(epoch.tolist()) for epoch in epochs.flatten(0, 1)}) > 20  # another order in each
        first += size


@pytest.mark.slow
def test_shuffled_run_resumes_and_replicas_and_hosts_agree():
    problem = toys.problem(4, sampling=fm.Sampling(batch=5, order="shuffled"))
    fm.testing.check_algorithm(fm.algorithms.DSGD(0.1), problem=problem, topologies=[fm.Ring()], rounds=2)


def seen(problem: fm.Problem, calls: int = 1) -> tuple[Round, torch.Tensor]:
    network, oracle = toys.on_stack(problem, fm.Ring(), seeds=(0, 1), calls=calls)
    carried = carried_at_start(CompanionInputs(oracle))
    return Round(torch.tensor(2), oracle, network, carried=carried), oracle.initial_models()


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 3))


def test_round_tells_sizes_and_layout():
    ctx, models = seen(toys.problem(3, sites=toys.sites(3, (5, 12, 7))))
    assert ctx.sizes.squeeze(-1).tolist() == [[5, 12, 7]] * 2
    assert ctx.all_sizes.tolist() == [[[5, 12, 7]]] * 2
    assert ctx.layout.dim == models.shape[-1]


@pytest.mark.parametrize("at_once", ["all", 1])
def test_means_over_samples_are_those_of_the_batch_with_dropout_too(at_once):
    sampling = fm.Sampling(batch=7, batches_per_step=2)
    ctx, models = seen(toys.problem(3, model=with_dropout(), sampling=sampling, models_at_once=at_once))
    losses, gradients = ctx.losses_and_gradients(models)
    assert ctx.sample_losses(models).shape == (2, 3, 14)
    assert torch.allclose(ctx.sample_losses(models).mean(dim=-1, keepdim=True), losses)
    assert torch.allclose(ctx.sample_gradients(models).mean(dim=-2), gradients)


def test_one_call_asked_for_twice_gives_the_same_batch():
    ctx, models = seen(toys.problem(3, model=with_dropout()), calls=2)
    first, again, other = (ctx.losses_and_gradients(models, call)[1] for call in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def recurrent(self, inputs):
    return self.lstm(inputs.unsqueeze(1))[0][:, -1]


NORMED = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": toys.module(recurrent, lstm=nn.LSTM(6, 3, batch_first=True))}, ("vmap",)),
        ({"sampling": fm.Sampling(order="full")}, ("full", "Sampling")),
        ({"model": NORMED, "batch_norm": "local"}, ("BatchNorm", "convert")),
    ],
    ids=["vmap fails", "padded batches", "BatchNorm"],
)
def test_single_samples_are_refused_where_there_are_none(fields, words):
    ctx, models = seen(toys.problem(3, **fields))
    for ask in (ctx.sample_gradients, ctx.sample_losses):
        with refused("single samples", *words):
            ask(models)


def test_parts_that_stay_at_a_node_take_the_same_step_by_gradients_of_single_samples():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    problem = toys.problem(3, model=model, parts=fm.Parts(local=("2.*",)))
    network, oracle = toys.on_stack(problem, fm.Ring())
    models, carried, after = oracle.initial_models(), carried_at_start(CompanionInputs(oracle)), []
    for ask in ("losses_and_gradients", "sample_gradients"):
        ctx = Round(torch.tensor(3), oracle, network, carried=carried)
        found = getattr(ctx, ask)(models)
        shared = found[1] if isinstance(found, tuple) else found.mean(dim=-2)
        after.append((shared, ctx.carried_after().own.rows))
    for one, other in zip(*after):
        torch.testing.assert_close(one, other)
    assert not torch.equal(after[1][1], carried.own.rows)
