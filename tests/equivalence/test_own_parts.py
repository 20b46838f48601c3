"""What stays at a site: the stack gives what hand-written loops over modules give, with torch's own BatchNorm."""

import copy

import pytest
import torch
from torch import Tensor, nn

import fairmesh as fm
from fairmesh.algorithms.base import Algorithm
from fairmesh.training.loop import Training, TrainingState
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests.pairwise import covering
from tests.problems.test_parts import problem

SGD = {"step": 0.1, "beta1": 0.0, "beta2": 0.0}
ROUNDS = 6


def trained(algorithm: Algorithm, made: fm.Problem, rounds: int = ROUNDS, trace: str = "no", **more):
    training = Training(
        made, fm.Ring(), replicas_of([algorithm], [0], None, made.n), Options(dtype="float64", trace=trace)
    )
    state: TrainingState = training.initial()
    for t in range(rounds):
        state = training.advance(state, t)
    return training, state


def batches(made: fm.Problem, i: int, t: int) -> tuple[Tensor, Tensor]:
    samples = made.sites[i].train
    rows = (torch.arange(made.sampling.batch) + t * made.sampling.batch) % len(samples)
    return samples.inputs[rows].double(), samples.targets[rows]


def modules(made: fm.Problem) -> list[nn.Module]:
    return [copy.deepcopy(made.initial_model(0)).double() for _ in made.sites]


def named(module: nn.Module, local: bool, is_local) -> list[nn.Parameter]:
    return [p for name, p in module.named_parameters() if is_local(name) == local]


def rows_of(made: fm.Problem, every: list[nn.Module]) -> Tensor:
    return torch.stack([made.flat_model.row_of(module) for module in every])


def fed_bn(name: str) -> bool:
    return name.startswith(("norm", "last"))


def fed_per(name: str) -> bool:
    return name.startswith("head")


@pytest.mark.parametrize("kind", ["fed-bn", "fed-per"])
def test_gossip_with_local_parts_is_the_loop_by_hand(kind: str):
    is_local = fed_bn if kind == "fed-bn" else fed_per
    parts = fm.Parts(**SGD) if kind == "fed-bn" else fm.Parts(local=("head.*",), **SGD)
    made = problem(batch_norm="local" if kind == "fed-bn" else "frozen", parts=parts)
    training, state = trained(fm.algorithms.DSGD(primal_step=0.1), made)
    every, mixing = modules(made), torch.tensor(fm.Ring().build(made.n)[0].matrix.toarray())
    for t in range(ROUNDS):
        for i, module in enumerate(every):
            inputs, targets = batches(made, i, t)
            module.zero_grad()
            nn.functional.cross_entropy(module(inputs), targets).backward()
        with torch.no_grad():
            for same in zip(*(named(module, False, is_local) for module in every)):
                mixed = [sum(mixing[i, j] * one for j, one in enumerate(same)) for i in range(made.n)]
                for one, new in zip(same, mixed):
                    one.copy_(new - 0.1 * one.grad)
            for module in every:
                for one in named(module, True, is_local):
                    one -= 0.1 * one.grad
    assert torch.allclose(training.whole_models(state)[0], rows_of(made, every), rtol=0, atol=1e-10)


def test_fed_avg_with_local_batch_norm_is_fed_bn_by_hand():
    made = problem(batch_norm="local", parts=fm.Parts(**SGD))
    algorithm = fm.algorithms.FedAvg(primal_step=0.1, local_steps=2, beta1=0.0, beta2=0.0)
    training, state = trained(algorithm, made)
    every = modules(made)
    for t in range(ROUNDS):
        for i, module in enumerate(every):
            for step in range(2):
                inputs, targets = batches(made, i, 2 * t + step)
                module.zero_grad()
                nn.functional.cross_entropy(module(inputs), targets).backward()
                with torch.no_grad():
                    for one in module.parameters():
                        one -= 0.1 * one.grad
        with torch.no_grad():
            for same in zip(*(named(module, False, fed_bn) for module in every)):
                mean = sum(same) / made.n
                for one in same:
                    one.copy_(mean)
    assert torch.allclose(training.whole_models(state)[0], rows_of(made, every), rtol=0, atol=1e-10)


def test_local_parameters_take_the_steps_of_torch_adam():
    made = problem(batch_norm="frozen", parts=fm.Parts(local=("head.*",), step=0.02, beta1=0.9, beta2=0.99))
    _, state = trained(fm.algorithms.DSGD(primal_step=0.0), made)  # what is shared stays
    every = modules(made)
    for i, module in enumerate(every):
        optimizer = torch.optim.Adam(module.head.parameters(), lr=0.02, betas=(0.9, 0.99))
        for t in range(ROUNDS):
            inputs, targets = batches(made, i, t)
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs), targets).backward()
            optimizer.step()
    assert torch.allclose(state.own.rows[0], rows_of(made, every)[:, made.flat_model.dim :], rtol=0, atol=1e-10)


def test_weight_decay_and_clipping_leave_statistics_alone():
    made = problem(batch_norm="shared", weight_decay=0.5, clip_norm=1e-3)
    _, state = trained(fm.algorithms.DSGD(primal_step=0.0), made)
    (module, *_), means = modules(made), []
    for t in range(ROUNDS):
        module(batches(made, 0, t)[0])
    for name, tensor in module.named_buffers():
        if "running" in name:
            means.append(tensor.flatten())
    assert torch.allclose(state.own.rows[0, 0], torch.cat(means), rtol=0, atol=1e-10)


@covering(policy=["local", "shared"], algorithm=["ad-gda", "tracked-ad-gda", "fed-avg"], strength=1)
@pytest.mark.quick_cases(1)
def test_models_one_by_one_some_at_a_time_and_stacked_agree(policy: str, algorithm: str):
    chosen = {
        "ad-gda": fm.ADGDA(primal_step=0.1, consensus_step=0.4),
        "tracked-ad-gda": fm.TrackedADGDA(primal_step=0.1),
        "fed-avg": fm.algorithms.FedAvg(primal_step=0.1, beta2=0.0),
    }[algorithm]
    found = []
    for at_once, trace in (("all", "auto"), ("all", "no"), (2, "no"), (1, "no")):
        made = problem(batch_norm=policy, parts=fm.Parts(local=("head.*",)), models_at_once=at_once)
        training, state = trained(chosen, made, 3, trace)
        found.append(training.whole_models(state))
    for other in found[1:]:
        assert torch.allclose(found[0], other, rtol=1e-9, atol=1e-10)
