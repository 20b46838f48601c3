"""A user's file: one class of every role, none of them registered."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fairmesh as fm
from fairmesh.algorithms import Round, plain, prior_weights
from tests import toys


class DiffusionState(NamedTuple):
    models: fm.roles.Models
    corrections: fm.roles.SumsToZero


@dataclass(frozen=True)
class ExactDiffusion(fm.algorithms.Algorithm):
    """Yuan, Ying, Zhao, Sayed: Exact Diffusion for Distributed Optimization and Learning, IEEE TSP 2019."""

    primal_step: fm.schedules.Schedule | float = 0.1
    mixing: float = 0.5
    optimizer: fm.optimizers.Optimizer | None = None

    def init(self, oracle, network):
        models = oracle.initial_models()
        return DiffusionState(models, torch.zeros_like(models))

    def step(self, state: DiffusionState, ctx: Round) -> DiffusionState:
        _, gradients = ctx.losses_and_gradients(state.models)
        adapted = state.models - ctx.step_size(self.primal_step) * prior_weights(ctx) * gradients
        corrected = adapted + state.corrections
        mixed = ctx.exchange(model=plain(corrected)).mix("model")
        models = corrected + self.mixing * (mixed - corrected)
        return DiffusionState(models, models - adapted)


@dataclass(frozen=True)
class LocalSteps(fm.algorithms.Algorithm):
    """An algorithm with the fields of ExactDiffusion: only the class differs."""

    primal_step: fm.schedules.Schedule | float = 0.1
    mixing: float = 0.5

    def init(self, oracle, network):
        models = oracle.initial_models()
        return DiffusionState(models, torch.zeros_like(models))

    def step(self, state: DiffusionState, ctx: Round) -> DiffusionState:
        _, gradients = ctx.losses_and_gradients(state.models)
        return DiffusionState(state.models - ctx.step_size(self.primal_step) * gradients, state.corrections)


@dataclass(frozen=True)
class Compressed(fm.ChocoSGD):
    """A built-in algorithm with one more field."""

    damping: float = 1.0

    def step(self, state, ctx):
        after = super().step(state, ctx)
        return after._replace(models=torch.lerp(state.models, after.models, self.damping))


@dataclass(frozen=True)
class Ternary(fm.compressors.Compressor):
    """Wen et al.: TernGrad, NIPS 2017, scaled to a contraction."""

    def compress(self, rows: Tensor, draw):
        norms = rows.abs().amax(dim=-1, keepdim=True).float()
        chance = rows.abs() / norms.to(rows.dtype).clamp(min=torch.finfo(torch.float32).tiny)
        levels = torch.where(draw.uniforms(rows.shape[-1]) < chance, rows.sign(), 0.0)
        return fm.compressors.Levels(levels, norms, rows.shape[-1], self.delta(rows.shape[-1]), 1)

    def delta(self, dim: int) -> float:
        return 2.0 / (1.0 + dim**0.5)

    def nominal_bits(self, dim: int) -> float:
        return 2 * dim


@dataclass(frozen=True)
class Barbell(fm.topologies.Topology):
    """Two cliques and some edges between them."""

    bridges: int = 1

    def graphs(self, n: int):
        half = n // 2
        cliques = [(i, j) for group in (range(half), range(half, n)) for i in group for j in group if i < j]
        return fm.topologies.Edges(tuple(cliques + [(k, half + k) for k in range(self.bridges)])).graphs(n)


@dataclass(frozen=True)
class SquaredDistance(fm.regularizers.Regularizer):
    """r = -||lambda - p||^2."""

    strength: float = 0.1

    def value(self, duals, prior):
        return -self.strength * (duals - prior).square().sum(dim=-1, keepdim=True)

    def gradient(self, duals, prior, own):
        return -2.0 * self.strength * (duals - prior)

    def project(self, rows, prior):
        return fm.regularizers.project_onto_simplex(rows)

    def maximiser(self, losses, prior):
        return fm.regularizers.project_onto_simplex(prior + losses / (2.0 * self.strength * losses.shape[-1]))

    def max_stable_dual_step(self, prior):
        return 1.0 / self.strength


@dataclass(frozen=True)
class Cosine(fm.schedules.Schedule):
    start: float
    rounds: int

    def at(self, round_index: Tensor) -> Tensor:
        done = (round_index.double() / self.rounds).clamp(max=1.0)
        return self.start * (1.0 + torch.cos(torch.pi * done)) / 2.0


class Powers(NamedTuple):
    balances: fm.roles.SumsToZero
    weights: fm.roles.OwnWeights


@dataclass(frozen=True)
class LossPower(fm.weighting.Weighting):
    """q-FFL's: a node weighs as much as its loss to the power q, over the network's mean of that."""

    q: float = 1.0
    keeps_rows = False

    def check(self, regularizer, prior):
        pass

    def init(self, oracle, network):
        models = oracle.initial_models()
        return Powers(*(torch.zeros_like(models[..., :1]) for _ in Powers._fields))

    def weigh(self, state, losses, regularizer, ctx):
        powers = losses.clamp(min=1e-6) ** self.q
        means = powers + state.balances
        weights = powers / means.clamp(min=1e-6)
        return fm.weighting.Weighed(weights, {"mean": plain(means)}, lambda d: Powers(d.mix("mean") - powers, weights))


@dataclass(frozen=True)
class ToySites(fm.data.Data):
    nodes: int = 5

    def sites(self):
        return toys.sites(self.nodes)


@dataclass(frozen=True)
class Wide(fm.models.Model):
    """A model whose width is a field."""

    width: int = 3

    def build(self, shape, classes):
        return nn.Sequential(nn.Linear(shape.numel(), self.width), nn.Tanh(), nn.Linear(self.width, classes))


@dataclass
class StopAt(fm.observers.Observer):
    """Ends a run after a number of rounds."""

    last: int = 2

    def after_round(self, round, state):
        if round == self.last:
            self.run.stop("far enough")


class NoSettings(fm.observers.Observer):
    """A plain class: it has nothing to set."""


# What cannot be used, each for one reason -----------------------------------------------------------------------------


class NotADataclass(fm.compressors.Compressor):
    pass


@dataclass
class NotFrozen(fm.topologies.Topology):
    def graphs(self, n: int):
        return fm.Ring().graphs(n)


class FieldsUndeclared(fm.Ring):
    hops: int = 2


@dataclass(frozen=True)
class Abstract(fm.schedules.Schedule):
    start: float = 1.0


@dataclass(frozen=True)
class FieldCalledPath(fm.topologies.Topology):
    path: str = "x"

    def graphs(self, n: int):
        return fm.Ring().graphs(n)


@dataclass(frozen=True)
class Picky(fm.topologies.Topology):
    hops: int = 2
    sizes: set[int] = field(default_factory=set)

    def __post_init__(self):
        if self.hops > 3:
            raise KeyError("too many hops")

    def graphs(self, n: int):
        return fm.Ring().graphs(n)


class HiddenSettings(fm.observers.Observer):
    def __init__(self, last: int):
        self.last = last


def function() -> None:
    """Not a class."""
