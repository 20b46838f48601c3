"""Every check finds the violation it is for; each class here breaks one rule."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fairmesh as fm
from fairmesh.algorithms.base import plain
from fairmesh.compression.codes import Dense, Levels, Sparse
from fairmesh.testing import (
    ContractViolation,
    check_algorithm,
    check_compressor,
    check_regularizer,
    check_schedule,
    check_topology,
)
from tests.extension import mine
from tests.extension.mine import ExactDiffusion
from tests.refusals import refused

# Algorithms -----------------------------------------------------------------------------------------------------------


def positions(ctx) -> Tensor:
    return ctx.own.argmax(dim=-1).to(ctx.own.dtype)[:, None]


FAULTS: dict[str, Any] = {  # (algorithm, its faultless step, state, ctx) -> state
    "changes the state": lambda _, step, state, ctx: step(state._replace(models=state.models.add_(1.0)), ctx),
    "two batches": lambda _, step, state, ctx: (ctx.losses(state.models, call=1), step(state, ctx))[1],
    "needs a number": lambda of, step, state, ctx: step(state, ctx) if float(of.mixing) > 0 else state,
    "two messages": lambda _, step, state, ctx: step(
        state._replace(models=ctx.exchange(model=plain(state.models)).mix("model")), ctx
    ),
}
CHANGES: dict[str, Any] = {  # (state after a faultless step, ctx) -> fields that are changed
    "draws elsewhere": lambda end, ctx: {"models": end.models + torch.randn_like(end.models)},
    "loses precision": lambda end, ctx: {"corrections": end.corrections.float()},
    # Uses what only a simulation has: the models of all nodes.
    "peeks at others": lambda end, ctx: {"models": torch.lerp(end.models, end.models.mean(dim=-2, keepdim=True), 0.1)},
    "knows positions": lambda end, ctx: {"models": end.models * (1.0 + 0.01 * positions(ctx))},
    "wrong role": lambda end, ctx: {"corrections": end.corrections + 1.0},
    "shrinks": lambda end, ctx: {"models": 0.99 * end.models},
    "reads the round": lambda end, ctx: {} if int(ctx.index) % 2 else {"corrections": end.corrections + 0.0},
    "hoards": lambda end, ctx: {"models": end.models + 0.0 * [end.models + k for k in range(20)][-1]},
}


@dataclass(frozen=True)
class Faulty(ExactDiffusion):
    """Exact diffusion with one thing changed."""

    fault: str = ""

    def step(self, state, ctx):
        if self.fault in FAULTS:
            return FAULTS[self.fault](self, super().step, state, ctx)
        end = super().step(state, ctx)
        return end._replace(**CHANGES[self.fault](end, ctx))


@dataclass(frozen=True)
class KeepsCount(ExactDiffusion):
    counts: list[int] = field(default_factory=list, init=False)

    def step(self, state, ctx):
        self.counts.append(1)
        return super().step(state, ctx)


class ListState(NamedTuple):
    models: Tensor
    history: Any


@dataclass(frozen=True)
class HoldsList(ExactDiffusion):
    def init(self, oracle, network):
        return ListState(oracle.initial_models(), [])


class TableState(NamedTuple):
    models: Tensor
    corrections: fm.roles.SumsToZero
    table: Tensor  # a number for each node, which it does not say


@dataclass(frozen=True)
class UndeclaredRole(ExactDiffusion):
    def init(self, oracle, network):
        table = oracle.prior.expand(-1, len(network.hosted), -1).clone()
        return TableState(*super().init(oracle, network), table)

    def step(self, state, ctx):
        ctx.losses(state.models)
        table = ctx.exchange(table=plain(state.table + ctx.own)).mix("table")
        return state._replace(table=table)


class AdaptedState(NamedTuple):
    models: Tensor
    adapted: Tensor  # of the round before: models - adapted sums to zero, which it does not say


@dataclass(frozen=True)
class BiasedWhenOneLeaves(ExactDiffusion):
    """Exact diffusion as its paper writes it."""

    def init(self, oracle, network):
        models = oracle.initial_models()
        return AdaptedState(models, models.clone())

    def step(self, state, ctx):
        _, gradients = ctx.losses_and_gradients(state.models)
        adapted = state.models - ctx.step_size(self.primal_step) * gradients
        corrected = adapted + state.models - state.adapted
        return AdaptedState(torch.lerp(corrected, ctx.exchange(model=plain(corrected)).mix("model"), 0.5), adapted)


class TrackerState(NamedTuple):
    models: Tensor
    trackers: Tensor  # whose average is that of the gradients
    gradients: Tensor


@dataclass(frozen=True)
class TracksGradients(ExactDiffusion):
    """Gradient tracking as its papers write it."""

    def init(self, oracle, network):
        models = oracle.initial_models()
        return TrackerState(models, torch.zeros_like(models), torch.zeros_like(models))

    def step(self, state, ctx):
        _, gradients = ctx.losses_and_gradients(state.models)
        trackers = state.trackers + gradients - state.gradients
        delivery = ctx.exchange(tracker=plain(trackers), model=plain(state.models))
        trackers = delivery.mix("tracker")
        return TrackerState(delivery.mix("model") - ctx.step_size(self.primal_step) * trackers, trackers, gradients)


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        (Faulty(fault="changes the state"), ["step", "changes", "state.models", 1]),
        (Faulty(fault="draws elsewhere"), ["step", "different", "state.models"]),
        (KeepsCount(), ["step", "changes", "KeepsCount"]),
        (Faulty(fault="loses precision"), ["step", "state.corrections", "'float64'", "'float32'"]),
        (HoldsList(), ["state.history", "list"]),
        (Faulty(fault="two batches"), ["[0, 1]", "oracle_calls()", 1]),
        (Faulty(fault="peeks at others"), ["state.models", "nodes", "hosts"]),
        (Faulty(fault="knows positions"), ["state.models", "nodes", "names"]),
        (UndeclaredRole(), ["state.table", "names", "fm.roles.OVER_NODES"]),
        (Faulty(fault="wrong role"), ["state.corrections", "role", "sum"]),
        (BiasedWhenOneLeaves(), ["state.adapted", "left", "SumsToZero"]),
        (TracksGradients(), ["state.trackers", "left", "SumsToZero"]),
        (Faulty(fault="shrinks"), ["gradients", "average", "round 0"]),
        (Faulty(fault="needs a number"), ["replicas", "tensors"]),
        (Faulty(fault="reads the round"), ["GPU", ".item()"]),
        (Faulty(fault="two messages"), ["ctx.exchange", "twice", "one message per round"]),
        (Faulty(fault="hoards"), ["copies_at_peak", 12]),
    ],
)
@pytest.mark.quick_cases(6)
def test_check_algorithm_says_what_is_violated(algorithm, names):
    with refused(*names, error=ContractViolation):
        check_algorithm(algorithm, topologies=(fm.Ring(),), rounds=3)


@pytest.mark.slow
def test_check_algorithm_allows_a_moving_average_where_asked():
    assert issubclass(ContractViolation, AssertionError)
    check_algorithm(Faulty(fault="shrinks"), topologies=(fm.Ring(),), rounds=2, keeps_average=False)


def test_check_algorithm_refuses_settings_that_are_not_configured():
    with refused("Plain", "frozen", error=ContractViolation):
        check_algorithm(type("Plain", (ExactDiffusion,), {"__annotations__": {"more": float}, "more": 1.0})())
    with refused("mixing", "'x'", error=ContractViolation):
        check_algorithm(ExactDiffusion(mixing="x"))  # type: ignore[arg-type]


# Compressors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Other(mine.Ternary):
    """Ternary with one thing changed."""

    fault: str = ""

    def compress(self, rows, draw):
        code = super().compress(rows, draw)
        if self.fault == "zero":
            return code._replace(levels=torch.where(code.levels == 0, 1.0, code.levels), norms=code.norms + 1e-3)
        if self.fault == "batch":
            return code._replace(norms=code.norms.amax().expand_as(code.norms).clone())
        if self.fault == "generator":
            return code._replace(levels=code.levels * (torch.rand(code.levels.shape) < 0.5))
        if self.fault == "mutates":
            rows.mul_(0.5)
        if self.fault == "dtype":
            return Dense(rows.float())
        if self.fault == "largest":
            return Levels(3.0 * code.levels, code.norms, code.block, code.unit / 3, 1)
        if self.fault == "negative zero":
            return Sparse(torch.where(code.levels == 0, -0.0, code.decode()))
        return code

    def delta(self, dim):
        return 1.0 if self.fault == "delta" and dim > 1 else super().delta(dim)


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("zero", ["Q(0)"]),
        ("batch", ["row (0, ", "batch", "(2, 8)"]),
        ("generator", ["compress", "generator"]),
        ("mutates", ["compress", "changes"]),
        ("dtype", ["decoded", "float64", "float32"]),
        ("delta", ["||Q(x) - x||^2", "delta("]),
        ("largest", ["encoding", "raised"]),
        ("negative zero", ["values", "bits", "encoding", "-0.0"]),
    ],
)
def test_check_compressor_says_what_is_violated(fault, names):
    with refused(*names, error=ContractViolation):
        check_compressor(Other(fault))


# Regularizers, topologies, schedules ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrongSlope(mine.SquaredDistance):
    def gradient(self, duals, prior, own):
        return -super().gradient(duals, prior, own)


@dataclass(frozen=True)
class NotNearest(mine.SquaredDistance):
    def project(self, rows, prior):
        kept = rows.clamp(min=0.0) + 1e-9
        return kept / kept.sum(dim=-1, keepdim=True)


@dataclass(frozen=True)
class NotMaximal(mine.SquaredDistance):
    def maximiser(self, losses, prior):
        return prior.expand_as(losses).clone()


@dataclass(frozen=True)
class NumberNeeded(mine.SquaredDistance):
    def gradient(self, duals, prior, own):
        return super().gradient(duals, prior, own) * (1.0 if self.strength > 0 else 0.0)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (WrongSlope, ["gradient", "derivative", "value"]),
        (NotNearest, ["project"]),
        (NotMaximal, ["objective", "maximiser"]),
        (NumberNeeded, ["replicas", "raised"]),
    ],
)
def test_check_regularizer_says_what_is_violated(kind, names):
    with refused(*names, error=ContractViolation):
        check_regularizer(kind())


@dataclass(frozen=True)
class Unseeded(fm.topologies.Topology):
    def graphs(self, n):
        return fm.topologies.ErdosRenyi(0.7, seed=int(torch.randint(2**31, ()))).graphs(n)


@dataclass(frozen=True)
class Swapping(fm.topologies.Topology):
    def graphs(self, n):
        return fm.topologies.Matrix(torch.eye(2).flip(0).tolist()).graphs(n)


@pytest.mark.parametrize(
    ("topology", "nodes", "names"),
    [
        (mine.Barbell(0), 8, ["2 pieces"]),
        (Unseeded(), 8, ["differs", "again"]),
        (Swapping(), 2, ["spectral gap"]),
        (Swapping(), 3, ["graph 0", "3 nodes", 2]),
    ],
)
def test_check_topology_says_what_is_violated(topology, nodes, names):
    with refused(*names, error=ContractViolation):
        check_topology(topology, nodes)


@dataclass(frozen=True)
class Step(fm.schedules.Schedule):
    fault: str

    def at(self, round_index):
        if self.fault == "float32":
            return round_index.float()
        if self.fault == "negative":
            return 5.0 - round_index.double()
        if self.fault == "scalar":
            return torch.tensor(0.5, dtype=torch.float64)
        return round_index.double() / round_index.double().max().clamp(min=1.0)


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("float32", ["float32", "float64"]),
        ("negative", ["round 6", -1]),
        ("scalar", ["300 rounds", "()"]),
        ("of the largest asked for", ["steps", "differs"]),
    ],
)
def test_check_schedule_says_what_is_violated(fault, names):
    with refused(*names, error=ContractViolation):
        check_schedule(Step(fault))
