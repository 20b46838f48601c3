"""Small problems, members of every family and a stack of nodes to put them on, shared by all tests."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import fairmesh as fm
from fairmesh.config.registry import FAMILIES, registered
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.numerics.random_streams import DITHER
from fairmesh.problems.oracle import Oracle
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.problem import prepare

FEATURES, CLASSES = 6, 3


class Given:
    """Draws that were chosen: uniforms xi in [0, 1)."""

    def __init__(self, uniforms: torch.Tensor):
        self._uniforms = uniforms

    def uniforms(self, count: int) -> torch.Tensor:
        return self._uniforms[..., :count].clone()

    def dither(self, count: int) -> torch.Tensor:
        """The numbers from which a quantizer makes the same xi."""
        return (self._uniforms[..., :count] - 0.5 - DITHER / 2) / DITHER


def _user_entropy(weights: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    return -(weights - prior).pow(2).sum()


COMPRESSORS: dict[str, fm.compressors.Compressor] = {
    **{name: kind() for name, kind in FAMILIES[fm.compressors.Compressor].items()},  # a new one with its defaults
    "none": fm.compressors.Identity(),
    "half": fm.compressors.Half(),
    "threshold": fm.compressors.Threshold(0.01),
    "quantize": fm.compressors.Quantize(bits=4),
    "quantize half norms": fm.compressors.Quantize(bits=4, block=6, norms="float16"),
    "quantize blocks": fm.compressors.Quantize(bits=3, block=4),
    "quantize ceil": fm.compressors.Quantize(bits=4, rounding="ceil"),
    "top-k": fm.compressors.TopK(0.3),
    "top-k half": fm.compressors.TopK(0.3, values="float16"),
    "random-k": fm.compressors.RandomK(0.3),
    "sign": fm.compressors.Sign(),
    "sign blocks": fm.compressors.Sign(block=5),
    "top-k-quantize": fm.compressors.TopKQuantize(0.4, bits=4),
}

TOPOLOGIES = {  # all for 8 nodes
    "ring": fm.Ring(),
    "torus": fm.topologies.Torus(2, 4),
    "circulant": fm.topologies.Circulant((1, 2)),
    "complete": fm.topologies.Complete(),
    "star": fm.topologies.Star(),
    "hypercube": fm.topologies.Hypercube(),
    "exponential": fm.topologies.Exponential(),
    "erdos-renyi": fm.topologies.ErdosRenyi(0.5, seed=3),
    "random-regular": fm.topologies.RandomRegular(3, seed=1),
    "edges": fm.topologies.Edges(((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (0, 4)), mixing="max-degree"),
    "matrix": fm.topologies.Matrix(((torch.eye(8) + torch.ones(8, 8)).double() / 9).tolist()),
    "changing": fm.topologies.Changing(
        (fm.Ring(), fm.topologies.Edges(((0, 4), (1, 5), (2, 6), (3, 7))), fm.topologies.Star())
    ),
}

REGULARIZERS = {
    "chi-square": fm.ChiSquare(0.02),
    "kl": fm.regularizers.KullbackLeibler(0.02),
    "none": fm.regularizers.NoRegularizer(),
    "own-coordinate": fm.regularizers.OwnCoordinate(0.5),
    "capped": fm.regularizers.Capped(0.6, fm.ChiSquare(0.02)),
    "capped kl": fm.regularizers.Capped(0.4, fm.regularizers.KullbackLeibler(0.02)),
    "capped none": fm.regularizers.Capped(0.5, fm.regularizers.NoRegularizer()),
    "capped own-coordinate": fm.regularizers.Capped(0.7, fm.regularizers.OwnCoordinate(0.5)),
    "custom": fm.regularizers.Custom(_user_entropy, 0.3),
}


WEIGHINGS = {
    "ascent": fm.weighting.ProjectedAscent(0.1),
    "ascent, duals compressed": fm.weighting.ProjectedAscent(
        fm.schedules.Geometric(0.1, 0.99), compressor=fm.compressors.Threshold(1e-3)
    ),
    "maximum": fm.weighting.ExactMaximum(0.7),
    "maximum, losses compressed": fm.weighting.ExactMaximum(0.7, compressor=fm.compressors.Quantize(bits=8)),
    "price": fm.weighting.ShadowPrice(0.7, step=0.2, strength_annealing=fm.schedules.Linear(3.0, 20)),
    "price, losses as they are": fm.weighting.ShadowPrice(0.7, step=0.2, relative=False, strength_annealing=0.0),
    "fixed": fm.weighting.PriorWeights(),
}


OPTIMIZERS = {
    "sgd": fm.optimizers.SGD(decay=0.1, no_decay=("0.bias",)),
    "momentum": fm.optimizers.Momentum(0.8),
    "nesterov": fm.optimizers.Momentum(0.8, nesterov=True, decay=0.1, decay_vectors=False),
    "adamw": fm.optimizers.AdamW(beta2=0.99),
    "adamw, decay": fm.optimizers.AdamW(0.8, 0.95, epsilon=1e-3, decay=0.1, no_decay=("2.*",)),
}


def of_strength(regularizer: fm.regularizers.Regularizer, strength: float) -> fm.regularizers.Regularizer:
    """The same regularizer with another strength, where it has one."""
    if isinstance(regularizer, fm.regularizers.Capped):
        return dataclasses.replace(regularizer, inner=of_strength(regularizer.inner, strength))
    if isinstance(regularizer, fm.regularizers.NoRegularizer):
        return regularizer
    return dataclasses.replace(regularizer, strength=strength)


ALGORITHMS = {
    "ad-gda": fm.ADGDA(
        primal_step=fm.schedules.Geometric(2.0, 0.99),
        dual_step=0.1,
        consensus_step=0.3,
        compressor=fm.compressors.Quantize(bits=4),
    ),
    "ad-gda published": fm.ADGDA(
        primal_step=1.0,
        dual_step=0.1,
        consensus_step=0.2,
        compressor=fm.compressors.Quantize(bits=4, rounding="ceil"),
        regularizer=fm.regularizers.OwnCoordinate(1.0),
        dual_order="dual-first",
    ),
    "ad-gda compressed duals": fm.ADGDA(
        primal_step=1.0,
        dual_step=0.1,
        consensus_step=0.3,
        compressor=fm.compressors.Quantize(bits=6),
        dual_compressor=fm.compressors.Threshold(1e-3),
    ),
    "ad-gda capped": fm.ADGDA(
        primal_step=2.0,
        dual_step=0.5,
        consensus_step=0.3,
        regularizer=fm.regularizers.Capped(0.6, fm.ChiSquare(0.02)),
        loss_cap=1.1,
    ),
    "choco-sgd": fm.ChocoSGD(primal_step=0.3, consensus_step=0.3, compressor=fm.compressors.TopK(0.3)),
    "dsgd": fm.algorithms.DSGD(primal_step=0.3),
    "dr-dsgd": fm.algorithms.DRDSGD(primal_step=0.5, temperature=2.0),
    "tracked": fm.TrackedADGDA(
        fm.schedules.Polynomial(0.3, 60),
        compressor=fm.compressors.Sign(block=5),
        weighting=fm.weighting.ShadowPrice(strength_annealing=fm.schedules.Polynomial(10.0, 60)),
    ),
    "tracked ascent": fm.TrackedADGDA(
        primal_step=0.2,
        beta1=0.5,
        beta2=0.0,
        gradient_at_average=0.5,
        consensus_step=0.3,
        compressor=fm.compressors.Quantize(bits=6),
        weighting=fm.weighting.ProjectedAscent(0.1, compressor=fm.compressors.Threshold(1e-3)),
    ),
    "tracked maximum": fm.TrackedADGDA(
        primal_step=0.2,
        beta1=0.7,
        beta2=0.9,
        gradient_at_average=0.0,
        compressor=fm.compressors.Quantize(bits=4, block=16),
        weighting=fm.weighting.ExactMaximum(0.7),
        regularizer=fm.regularizers.Capped(0.6, fm.ChiSquare(0.2)),
        loss_cap=1.5,
    ),
    "tracked local": fm.TrackedADGDA(
        primal_step=0.1,
        beta1=0.3,
        beta2=0.0,
        local_steps=3,
        compressor=fm.compressors.TopK(0.3),
        weighting=fm.weighting.PriorWeights(),
        warm_start=False,
        max_drift=2.0,
    ),
    "tracked nothing": fm.TrackedADGDA(
        primal_step=0.25,
        tracking=False,
        beta2=0.9,
        compressor=fm.compressors.Sign(),
        regularizer=fm.regularizers.KullbackLeibler(0.5),
        weighting=fm.weighting.ShadowPrice(relative=False, strength_annealing=0.0),
    ),
    "drfa": fm.algorithms.DRFA(primal_step=0.1, dual_step=0.01, local_steps=3),
    "afl": fm.algorithms.AFL(primal_step=0.2, dual_step=0.02),
    "fedavg": fm.algorithms.FedAvg(0.1, local_steps=3, participation=0.5, beta1=0.0, beta2=0.0),
    "fedprox": fm.algorithms.FedProx(0.3, proximal=0.5, local_steps=2, beta2=0.9),
    "q-ffl": fm.algorithms.QFFL(0.2, q=2.0, local_steps=2, beta1=0.0, beta2=0.0),
    "term": fm.algorithms.TERM(0.3, tilt=2.0, local_steps=2, beta2=0.9),
    "local": fm.algorithms.Local(0.3),
    "pooled": fm.algorithms.Pooled(0.3),
}


def covers(role: type, table: dict) -> bool:
    """Whether a table has an object of every registered member of a role."""
    return set(registered(role).values()) == {type(thing) for thing in table.values()}


def sites(n: int = 8, sizes: tuple[int, ...] | None = None, seed: int = 0, dtype=torch.float64) -> list[fm.Site]:
    """n sites of slightly different linear problems, of unequal sizes."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(FEATURES, CLASSES, generator=generator, dtype=torch.float64)
    made = []
    for i in range(n):
        size = sizes[i] if sizes else 20 + 3 * i
        inputs = torch.randn(size + 10, FEATURES, generator=generator, dtype=torch.float64)
        shifted = truth + 0.7 * torch.randn(FEATURES, CLASSES, generator=generator, dtype=torch.float64)
        labels = (inputs @ shifted).argmax(dim=1)
        inputs = inputs.to(dtype)
        group = "odd" if i % 2 else "even"
        made.append(fm.Site((inputs[:size], labels[:size]), test=(inputs[size:], labels[size:]), group=group))
    return made


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def module(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module with these layers and attributes. Its forward pass is the function, which gets the module first."""
    made = type("Made", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


class Items(Dataset):
    """A dataset of as many items, each computed from its number."""

    def __init__(self, count: int, item: Callable[[int], Any]):
        self.count, self.item = count, item

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return self.item(i)


def problem(n: int = 8, **fields) -> Prepared:
    fields.setdefault("sampling", fm.Sampling(batch=7))
    model, of_sites = fields.pop("model", small_model), fields.pop("sites", None) or sites(n)
    return prepare(fm.Problem(model, of_sites, **fields))


def on_stack(
    problem: fm.Problem | Prepared, topology: fm.topologies.Topology, *, seeds=(0,), dtype=torch.float64, calls=1,
    trace=True, **network,
):  # fmt: skip
    """A memory network over a topology and the oracle of its nodes."""
    problem = prepare(problem)
    net = MemoryNetwork(topology.build(problem.n), dtype=dtype, **network)
    oracle = Oracle(problem, net.hosted, net.identities, seeds=seeds, calls_per_round=calls, dtype=dtype, trace=trace)
    return net, oracle
