"""Local optimizers: they are those of torch.optim, every algorithm takes them, and their memory is part of a run."""

import dataclasses
import runpy
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.algorithms.base import Round
from fairmesh.algorithms.companions import NOTHING, CompanionInputs, carried_at_start
from fairmesh.config.tables import from_table
from fairmesh.mesh.node import states
from fairmesh.testing.stacks import after, stack
from fairmesh.training.loop import Training
from fairmesh.training.memory_estimate import footprint
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests import toys
from tests.equivalence.reference import Worker
from tests.refusals import refused

ROUNDS = 25
EXAMPLE = Path(__file__).parents[2] / "examples" / "optimizers.py"
WITH_OPTIMIZER = {
    name: algorithm
    for name, algorithm in toys.ALGORITHMS.items()
    if "optimizer" in {field.name for field in dataclasses.fields(algorithm)}
}


def with_optimizer(name: str, optimizer: str) -> fm.algorithms.Algorithm:
    return dataclasses.replace(toys.ALGORITHMS[name], optimizer=toys.OPTIMIZERS[optimizer])


def torch_optimizer(optimizer: fm.optimizers.Optimizer, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """What a user of torch.optim would write for the same."""
    spared = []
    for name, parameter in model.named_parameters():
        by_name = any(fnmatchcase(name, pattern) for pattern in optimizer.no_decay)
        spared.append(by_name or (parameter.ndim < 2 and not optimizer.decay_vectors))
    groups = [
        {"params": [p for p, free in zip(model.parameters(), spared) if free is which], "weight_decay": decay}
        for which, decay in ((False, optimizer.decay), (True, 0.0))
    ]
    groups = [group for group in groups if group["params"]]
    if isinstance(optimizer, fm.optimizers.AdamW):
        return torch.optim.AdamW(groups, lr, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.epsilon)
    momentum = getattr(optimizer, "momentum", 0.0)
    return torch.optim.SGD(groups, lr, momentum=momentum, nesterov=getattr(optimizer, "nesterov", False))


@pytest.mark.parametrize(("name", "clip_norm"), [*((name, None) for name in toys.OPTIMIZERS), ("adamw, decay", 0.2)])
def test_optimizer_at_one_node_is_that_of_torch(name, clip_norm):
    optimizer, problem = toys.OPTIMIZERS[name], toys.problem(1, clip_norm=clip_norm)
    result = fm.train(
        problem, fm.Ring(), fm.algorithms.DSGD(0.05, optimizer=optimizer), ROUNDS, dtype="float64", trace="no"
    )
    worker = Worker(problem, 0, 0, 1)  # for its batches
    theirs = torch_optimizer(optimizer, worker.module, 0.05)
    for t in range(ROUNDS):
        ((inputs, targets),) = worker.batches(t, 0)
        theirs.zero_grad()
        nn.functional.cross_entropy(worker.module(inputs), targets).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(worker.module.parameters(), clip_norm)
        theirs.step()
    row = nn.utils.parameters_to_vector(worker.module.parameters()).detach()
    off = float((result.state.algorithm.models[0, 0] - row).abs().max())
    assert off < (1e-10 if clip_norm is None else 1e-4)  # torch divides by the norm plus 1e-6
    assert float((row - problem.initial_row(0)).abs().max()) > 1e-2


def test_every_optimizer_moves_the_model_elsewhere():
    """Otherwise the test above would prove little."""
    ends = [
        fm.train(
            toys.problem(1), fm.Ring(), fm.algorithms.DSGD(0.05, optimizer=optimizer), 3, dtype="float64", trace="no"
        )
        for optimizer in (None, *toys.OPTIMIZERS.values())
    ]
    models = [end.state.algorithm.models for end in ends]
    assert all(float((a - b).abs().max()) > 1e-4 for i, a in enumerate(models) for b in models[:i])


def test_plain_sgd_is_the_run_without_an_optimizer():
    runs = [
        fm.train(toys.problem(), fm.Ring(), fm.ADGDA(2.0, optimizer=optimizer), 4, trace="no")
        for optimizer in (None, fm.optimizers.SGD())
    ]
    assert torch.equal(runs[0].state.algorithm.models, runs[1].state.algorithm.models)
    assert runs[0].state.companions == NOTHING


# Where it enters an algorithm -----------------------------------------------------------------------------------------


def test_ad_gda_weighs_the_direction_of_adamw_and_not_its_gradient():
    problem, optimizer = toys.problem(), fm.optimizers.AdamW(epsilon=1e-12)
    algorithm = fm.ADGDA(primal_step=0.8, dual_step=0.1, optimizer=optimizer)
    net, oracle = toys.on_stack(problem, fm.Ring())
    state, carried = algorithm.init(oracle, net), carried_at_start(CompanionInputs(oracle, optimizer))
    duals = torch.softmax(torch.arange(8.0, dtype=torch.float64), dim=0).expand(1, 8, 8)  # node 7 counts most
    ctx = Round(torch.tensor(0), oracle, net, carried=carried, optimizer=optimizer)
    stepped = algorithm.step(state._replace(duals=duals), ctx)
    moves = (stepped.models - state.models).abs()  # the first direction of Adam is the sign; copies are still equal
    sizes = moves.amax(dim=-1)[0]
    assert torch.allclose(sizes, 0.8 * duals[0, 0], rtol=1e-4, atol=0)


@pytest.mark.slow
def test_robust_weights_help_the_worst_site_with_adamw_if_they_follow_it():
    found = runpy.run_path(str(EXAMPLE))["main"](rounds=200, seeds=2)
    worst = {name: value for name, (value, _) in found.items()}
    followed = worst["AdamW, robust weights on directions"]
    assert followed > worst["AdamW, robust weights on gradients"] + 0.05
    assert followed > worst["AdamW, fixed weights"] + 0.05


def test_local_steps_advance_the_memory_and_clients_that_sit_out_keep_theirs():
    problem = toys.problem()
    algorithm = fm.algorithms.DRFA(0.05, participation=0.25, local_steps=3, optimizer=fm.optimizers.AdamW())
    training = Training(problem, fm.Ring(), replicas_of([algorithm], [0], None, 8), Options(trace="no"))
    state, moved = training.initial(), []
    for t in range(6):
        before, state = state, training.advance(state, t)
        advanced = (state.companions.optimizer.steps - before.companions.optimizer.steps)[0, :, 0]
        assert set(advanced.tolist()) <= {0.0, 3.0}
        still = advanced == 0
        assert torch.equal(state.companions.optimizer.momenta[0, still], before.companions.optimizer.momenta[0, still])
        moved.append(int((~still).sum()))
    assert 0 < max(moved) <= 2


def test_same_batch_at_two_models_gives_directions_from_the_same_memory():
    optimizer = fm.optimizers.Momentum(0.9)
    net, oracle = toys.on_stack(toys.problem(), fm.Ring())
    models, carried = oracle.initial_models(), carried_at_start(CompanionInputs(oracle, optimizer))
    ctx = Round(torch.tensor(0), oracle, net, carried=carried, optimizer=optimizer)
    first, again = (ctx.losses_and_gradients(models)[1] for _ in range(2))
    elsewhere = ctx.losses_and_gradients(models + 0.1)[1]
    assert torch.equal(first, again)
    assert torch.equal(ctx.carried_after().optimizer.momenta, first)
    plain = Round(torch.tensor(0), oracle, net)
    difference = plain.losses_and_gradients(models + 0.1)[1] - plain.losses_and_gradients(models)[1]
    assert torch.allclose(elsewhere - first, difference, rtol=0, atol=1e-14)
    first.add_(1.0)  # an algorithm may use what it got as it likes
    assert torch.equal(ctx.carried_after().optimizer.momenta, again)


# Contracts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("ad-gda", "sgd"),
        ("choco-sgd", "momentum"),
        ("dr-dsgd", "nesterov"),
        ("drfa", "adamw"),
        ("tracked", "adamw, decay"),
    ],
)
def test_optimizers_memory_is_the_same_on_several_hosts(name, optimizer):
    problem, algorithm, blocks = toys.problem(), with_optimizer(name, optimizer), [[0, 3, 4], [1, 2, 5, 6, 7]]
    alone = after(algorithm, *stack(problem, fm.Ring().build(8), algorithm), 2)
    run = fm.testing.on_hosts(problem, fm.Ring(), algorithm, 2, blocks)
    for state, carried, block in zip(run.states, run.carried, blocks):
        rows = alone.state.models if algorithm.needs_server else alone.state.models[:, block]
        assert torch.allclose(state.models, rows, rtol=0, atol=1e-12)
        for tensor, there in zip(alone.carried.optimizer or (), carried.optimizer or ()):
            assert torch.allclose(there, tensor[:, block], rtol=0, atol=1e-12)


def test_every_algorithm_takes_an_optimizer_but_pooled_which_has_its_own_adam():
    without = {type(algorithm) for name, algorithm in toys.ALGORITHMS.items() if name not in WITH_OPTIMIZER}
    assert without == {fm.algorithms.Pooled}


def test_fed_avg_with_adamw_averages_what_torchs_adamw_does_at_each_client():
    """In its first round, and in its second, for which clients have kept their memory."""
    problem, optimizer = toys.problem(3), toys.OPTIMIZERS["adamw, decay"]
    algorithm = fm.algorithms.FedAvg(0.05, beta1=0.0, beta2=0.0, local_steps=4, optimizer=optimizer)
    result = fm.train(problem, fm.Ring(), algorithm, 2, dtype="float64", trace="no")
    workers = [Worker(problem, i, 0, 4) for i in range(3)]
    theirs = [torch_optimizer(optimizer, worker.module, 0.05) for worker in workers]
    for t in range(2):
        for worker, local in zip(workers, theirs):
            for call in range(4):
                ((inputs, targets),) = worker.batches(t, call)
                local.zero_grad()
                nn.functional.cross_entropy(worker.module(inputs), targets).backward()
                local.step()
        rows = [nn.utils.parameters_to_vector(worker.module.parameters()).detach() for worker in workers]
        common = (problem.prior_of_sites.unsqueeze(-1) * torch.stack(rows)).sum(dim=0)
        for worker in workers:
            nn.utils.vector_to_parameters(common.clone(), worker.module.parameters())
    assert float((result.state.algorithm.models[0, 0] - common).abs().max()) < 1e-10


def test_optimizers_memory_outlives_sites_that_leave_and_starts_again_where_it_was_lost():
    algorithm = fm.algorithms.DSGD(0.01, optimizer=fm.optimizers.AdamW())
    training = Training(toys.problem(), fm.Ring(), replicas_of([algorithm], [0], None, 8), Options(trace="no"))
    state = training.advance(training.initial(), 0)
    stayed = states.without(state, [3], [0], torch.full((7,), 1 / 7))
    assert torch.equal(stayed.companions.optimizer.momenta, state.companions.optimizer.momenta)
    initial = training.initial()
    told = {"neighbour": states.read_shared(states.shared(state, 0), initial)}
    lost = states.restored(initial, told)
    assert torch.equal(lost.algorithm.models, state.algorithm.models)
    assert not any(tensor.any() for tensor in lost.companions.optimizer)  # so that its first direction is Adam's first


def test_another_optimizer_does_not_resume_a_run(tmp_path):
    problem = toys.problem()
    algorithm = fm.algorithms.DSGD(0.1, optimizer=fm.optimizers.AdamW())
    fm.train(problem, fm.Ring(), algorithm, 2, out=tmp_path, checkpoint_every=2, trace="no")
    other = dataclasses.replace(algorithm, optimizer=fm.optimizers.AdamW(beta1=0.5))
    with pytest.raises(fm.errors.CheckpointError, match="beta1"):
        fm.train(problem, fm.Ring(), other, 4, out=tmp_path, resume=True, trace="no")


def test_memory_estimate_counts_the_optimizers_memory():
    problem = toys.problem(model=lambda: nn.Linear(toys.FEATURES, 3000))
    plain, adam = (
        footprint(problem, fm.algorithms.DSGD(0.1, optimizer=optimizer)).per_replica
        for optimizer in (None, fm.optimizers.AdamW())
    )
    assert adam - plain >= 4 * problem.n * problem.flat_model.dim * 4


# Files and refusals ---------------------------------------------------------------------------------------------------


def test_file_names_an_optimizer_and_sweeps_its_numbers():
    table = {"name": "dsgd", "optimizer": {"name": "adamw", "decay": 0.1, "no_decay": ["*.bias"]}}
    algorithm = from_table(fm.algorithms.Algorithm, table)
    assert algorithm.optimizer == fm.optimizers.AdamW(decay=0.1, no_decay=("*.bias",))
    experiment = fm.Experiment(
        fm.data.Digits(nodes=4), fm.Ring(), algorithm=fm.algorithms.DSGD(0.01, optimizer=fm.optimizers.AdamW()),
        sweep={"optimizer.beta1": (0.5, 0.9)}, rounds=2,
    )  # fmt: skip
    assert len(fm.run(experiment).replicas) == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fm.optimizers.SGD(decay=-0.1), ["decay", ">= 0", "-0.1"]),
        (lambda: fm.optimizers.Momentum(1.0), ["momentum", "[0, 1)", "1.0"]),
        (lambda: fm.optimizers.AdamW(beta1=-0.5), ["beta1", "[0, 1)", "-0.5"]),
        (lambda: fm.optimizers.AdamW(beta2=1.5), ["beta2", "[0, 1)", "1.5"]),
        (lambda: fm.optimizers.AdamW(epsilon=0.0), ["epsilon", "> 0", "0.0"]),
    ],
)
def test_optimizer_refuses_numbers_out_of_range(make, words):
    with refused(*words):
        make()


@pytest.mark.parametrize("kind", [fm.optimizers.SGD, fm.optimizers.Momentum, fm.optimizers.AdamW])
def test_pattern_that_matches_no_parameter_is_refused_before_round_0(kind):
    with refused("no_decay", "'0.biass'", "0.bias"):
        fm.train(
            toys.problem(), fm.Ring(), fm.algorithms.DSGD(0.1, optimizer=kind(decay=0.1, no_decay=("0.biass",))), 2
        )
