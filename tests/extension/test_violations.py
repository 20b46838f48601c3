"""Every check notices what it is for: classes that break one rule each."""

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

# Algorithms -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChangesState(ExactDiffusion):
    def step(self, state, ctx):
        state.adapted.add_(1.0)
        return super().step(state, ctx)


@dataclass(frozen=True)
class DrawsElsewhere(ExactDiffusion):
    def step(self, state, ctx):
        after = super().step(state, ctx)
        return after._replace(models=after.models + torch.randn_like(after.models))


@dataclass(frozen=True)
class KeepsCount(ExactDiffusion):
    counts: list[int] = field(default_factory=list, init=False)

    def step(self, state, ctx):
        self.counts.append(1)
        return super().step(state, ctx)


@dataclass(frozen=True)
class LosesPrecision(ExactDiffusion):
    def step(self, state, ctx):
        after = super().step(state, ctx)
        return after._replace(adapted=after.adapted.float())


class ListState(NamedTuple):
    models: Tensor
    history: Any


@dataclass(frozen=True)
class HoldsList(ExactDiffusion):
    def init(self, oracle, network):
        return ListState(oracle.initial_models(), [])


@dataclass(frozen=True)
class TwoBatches(ExactDiffusion):
    def step(self, state, ctx):
        ctx.losses(state.models, call=1)
        return super().step(state, ctx)


@dataclass(frozen=True)
class PeeksAtOthers(ExactDiffusion):
    """Uses what only a simulation has: the models of all nodes."""

    def step(self, state, ctx):
        after = super().step(state, ctx)
        return after._replace(models=torch.lerp(after.models, after.models.mean(dim=-2, keepdim=True), 0.1))


@dataclass(frozen=True)
class KnowsPositions(ExactDiffusion):
    def step(self, state, ctx):
        after = super().step(state, ctx)
        position = ctx.own.argmax(dim=-1).to(after.models.dtype)[:, None]
        return after._replace(models=after.models * (1.0 + 0.01 * position))


class TableState(NamedTuple):
    models: Tensor
    adapted: Tensor
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


class ZeroSumState(NamedTuple):
    models: Tensor
    adapted: fm.roles.SumsToZero


@dataclass(frozen=True)
class WrongRole(ExactDiffusion):
    def init(self, oracle, network):
        return ZeroSumState(*super().init(oracle, network))

    def step(self, state, ctx):
        return ZeroSumState(*super().step(state, ctx))


@dataclass(frozen=True)
class Shrinks(ExactDiffusion):
    def step(self, state, ctx):
        after = super().step(state, ctx)
        return after._replace(models=0.99 * after.models)


@dataclass(frozen=True)
class NeedsNumber(ExactDiffusion):
    def step(self, state, ctx):
        return super().step(state, ctx) if float(self.mixing) > 0 else state


@dataclass(frozen=True)
class ReadsRound(ExactDiffusion):
    def step(self, state, ctx):
        after = super().step(state, ctx)
        return after if int(ctx.index) % 2 else after._replace(adapted=after.adapted + 0.0)


@dataclass(frozen=True)
class TwoMessages(ExactDiffusion):
    def step(self, state, ctx):
        first = ctx.exchange(model=plain(state.models)).mix("model")
        return super().step(state._replace(models=first), ctx)


@dataclass(frozen=True)
class Hoards(ExactDiffusion):
    def step(self, state, ctx):
        copies = [state.models + k for k in range(20)]
        after = super().step(state, ctx)
        return after._replace(models=after.models + 0.0 * copies[-1])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ChangesState, r"step changes what it was given: state\.adapted differs by up to 1"),
        (DrawsElsewhere, "step gives different states from the same state and round: state.models differs by up to"),
        (KeepsCount, "step changes the algorithm from"),
        (LosesPrecision, r"step turns state\.adapted from \('float64', .* into \('float32',"),
        (HoldsList, r"the state\.history is a list"),
        (TwoBatches, r"a round asks for batches \[0, 1\], but oracle_calls\(\) says 1"),
        (PeeksAtOthers, r"state\.models of nodes .* on several hosts: differs by up to"),
        (KnowsPositions, r"state\.models with other names for the nodes: differs by up to"),
        (UndeclaredRole, r"state\.table with other names .*annotate it with fm\.roles\.OVER_NODES"),
        (WrongRole, r"state\.adapted has the role of rows that sum to zero, but their sum is \d"),
        (Shrinks, r"without gradients the average model moves in round 0 .*: differs by up to"),
        (NeedsNumber, r"a batch of replicas raised .*; numbers that differ between replicas are tensors"),
        (ReadsRound, r"a round .* GPU.* raised .*\.item\(\)"),
        (TwoMessages, "two messages in round 0"),
        (Hoards, r"a round holds 2\d\.\d copies .* but copies_at_peak is 12"),
    ],
)
def test_check_algorithm_says_what_is_violated(kind, message):
    with pytest.raises(ContractViolation, match=message):
        check_algorithm(kind(), topologies=(fm.Ring(),), rounds=3)


def test_check_algorithm_allows_a_moving_average_where_asked():
    assert issubclass(ContractViolation, AssertionError)
    check_algorithm(Shrinks(), topologies=(fm.Ring(),), rounds=2, keeps_average=False)


def test_check_algorithm_refuses_settings_that_are_not_configured():
    with pytest.raises(ContractViolation, match="not a frozen dataclass"):
        check_algorithm(type("Plain", (ExactDiffusion,), {"__annotations__": {"more": float}, "more": 1.0})())
    with pytest.raises(ContractViolation, match=r"mixing: expected a number, got 'x'"):
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
    ("fault", "message"),
    [
        ("zero", r"Q\(0\) has entries up to .*, not 0"),
        ("batch", r"row \(0, \d\) of length 1 alone and in a batch of \(2, 8\): differs by up to"),
        ("generator", "compress draws from torch's generator"),
        ("mutates", "compress changes the rows"),
        ("dtype", r"rows .*float64.* are decoded as .*float32"),
        ("delta", r"E\|\|Q\(x\) - x\|\|\^2 is .* but delta\(\d\) = 1 allows at most 0"),
        ("largest", "encoding and decoding rows of 1 raised"),
        ("negative zero", "is not the same bits after encoding and decoding|takes .* bytes, counted as"),
    ],
)
def test_check_compressor_says_what_is_violated(fault, message):
    with pytest.raises(ContractViolation, match=message):
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
    ("kind", "message"),
    [
        (WrongSlope, "the gradient, averaged over nodes, and the derivative of value: differs by up to"),
        (NotNearest, r"project is not the nearest point: .* is \d|a projected row, projected again"),
        (NotMaximal, r"the objective is .* at the maximiser, and .* at another point"),
        (NumberNeeded, "a batch of replicas raised"),
    ],
)
def test_check_regularizer_says_what_is_violated(kind, message):
    with pytest.raises(ContractViolation, match=message):
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
    ("topology", "nodes", "message"),
    [
        (mine.Barbell(0), 8, "together are in 2 pieces"),
        (Unseeded(), 8, "differs by up to .* when it is asked for again"),
        (Swapping(), 2, "have spectral gap .*, not above 0"),
        (Swapping(), 3, "graph 0 of 3 nodes has 2"),
    ],
)
def test_check_topology_says_what_is_violated(topology, nodes, message):
    with pytest.raises(ContractViolation, match=message):
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
    ("fault", "message"),
    [
        ("float32", "steps are float32, not float64"),
        ("negative", "the step of round 6 is -1"),
        ("scalar", r"300 rounds get steps of shape \(\)"),
        ("of the largest asked for", "steps of rounds one by one: differs by up to"),
    ],
)
def test_check_schedule_says_what_is_violated(fault, message):
    with pytest.raises(ContractViolation, match=message):
        check_schedule(Step(fault))
