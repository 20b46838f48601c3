"""The runs behind reproduction/frontier.md.

They add and remove each ingredient of Tracked AD-GDA, run its rivals, look for its best results, and choose and judge
its defaults. All tuning uses held-out training data. Every row of the ablation tries twelve candidates."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fairmesh.algorithms import (
    ADGDA,
    DRDSGD,
    DRFA,
    Algorithm,
    ChocoSGD,
    TrackedADGDA,
)
from fairmesh.algorithms.schedules import Linear, Polynomial
from fairmesh.algorithms.weighting import ExactMaximum, PriorWeights, ProjectedAscent, ShadowPrice
from fairmesh.compression.compressors import (
    Identity,
    Quantize,
    Sign,
    TopK,
)
from fairmesh.data.datasets import (
    CIFAR10,
    MNIST,
    Data,
    Digits,
    FashionMNIST,
    ImportedData,
)
from fairmesh.data.partitions import (
    Contrast,
    Instrument,
    OneClass,
    Shards,
)
from fairmesh.experiment import Experiment
from fairmesh.problems.batches import Sampling
from fairmesh.problems.models import FullyConnected, Logistic, Model, PaperCNN
from fairmesh.regularizers.builtin import ChiSquare
from fairmesh.topology.graphs import Circulant, Ring, Topology
from fairmesh.training.options import Options
from reproduction.recipes import Row, Search

FASHION, CIFAR = "Fashion-MNIST-50", "CIFAR-10-20"
SEEDS = (0, 1, 2, 3, 4)  # each with its own placement
LATTICE = Circulant((1, 2))
FOUR_BITS = Quantize(4, block=512)
_CONTRASTS = Contrast(20, (0.5, 0.5, 1.5, 1.5), "kind", "published")
_SCALED = (0.125, 0.25, 0.5, 1.0)  # primal steps with scaling
_LOCAL = 10  # DRFA's local steps


@dataclass(frozen=True)
class _Setup:
    """One of the paper's problems, with the ranges of its searches."""

    data: Data
    model: Model
    nodes: int
    rounds: int  # of a row of the ablation
    searched: int  # rounds of a candidate
    plain: tuple[float, ...]  # primal steps without scaling, for weights of one on average
    alphas: tuple[float, ...]  # strengths in the units of Tracked AD-GDA
    tempered: tuple[float, ...]  # DR-DSGD's primal steps
    temperatures: tuple[float, ...]
    served: tuple[float, ...]  # DRFA's primal steps

    @property
    def alpha(self) -> float:
        return self.alphas[len(self.alphas) // 2]


SETUPS = {
    FASHION: _Setup(
        data=FashionMNIST(OneClass(50)),
        model=FullyConnected(),
        nodes=50,
        rounds=1000,
        searched=500,
        plain=(0.01, 0.03, 0.1, 0.3),
        alphas=(0.03, 0.1, 0.3),
        tempered=(1.0, 3.0, 10.0, 30.0),
        temperatures=(6.0, 18.0, 54.0),
        served=(0.05, 0.1, 0.2, 0.4),
    ),
    CIFAR: _Setup(
        data=CIFAR10(_CONTRASTS),
        model=PaperCNN(),
        nodes=20,
        rounds=400,
        searched=150,
        plain=(0.05, 0.1, 0.2, 0.4),
        alphas=(0.03, 0.1, 0.3),
        tempered=(0.03, 0.1, 0.3, 1.0),
        temperatures=(0.7, 2.0, 6.0),
        served=(0.2, 0.4, 0.8, 1.6),
    ),
}


def _experiment(
    data: Data, model: Model, topology: Topology, algorithm: Algorithm, rounds: int, looks: int
) -> Experiment:
    return Experiment(
        data=data,
        topology=topology,
        algorithm=algorithm,
        rounds=rounds,
        model=model,
        sampling=Sampling(50),
        seeds=SEEDS,
        placements="by-seed",
        options=Options(measure_every=max(1, rounds // looks)),
    )


# What each ingredient contributes

_PARENT = TrackedADGDA(  # AD-GDA itself (tests/equivalence/test_tracked.py)
    primal_step=Linear(1.0),
    beta1=0.0,
    tracking=False,
    beta2=0.0,
    gradient_at_average=0.0,
    compressor=Sign(block=64),
    weighting=ProjectedAscent(0.01),
    warm_start=False,
)
_ANNEALING = Linear(3.0)
_WHOLE = TrackedADGDA(
    primal_step=Linear(0.35), beta1=0.95, gradient_at_average=0.0, weighting=ShadowPrice(strength_annealing=_ANNEALING)
)
ADDED: dict[str, dict] = {
    "warm start": {"warm_start": True},
    "momentum": {"beta1": 0.9},
    "tracking": {"tracking": True},
    "scaled steps": {"beta2": 0.99},
    "shadow price": {"weighting": ShadowPrice(relative=False, strength_annealing=0.0)},
    "gradients at the average": {"gradient_at_average": 1.0},
    "2 local steps": {"local_steps": 2},
    "tracking, 2 local steps": {"tracking": True, "local_steps": 2},
    "tracking, momentum": {"tracking": True, "beta1": 0.9},
}
LEFT_OUT: dict[str, dict] = {
    "warm start": {"warm_start": False},
    "momentum": {"beta1": 0.0},
    "tracking": {"tracking": False},
    "scaled steps": {"beta2": 0.0},
    "strength annealing": {"weighting": ShadowPrice(strength_annealing=0.0)},
    "relative losses": {"weighting": ShadowPrice(relative=False, strength_annealing=_ANNEALING)},
}
INSTEAD: dict[str, dict] = {
    "weights by projected ascent": {"weighting": ProjectedAscent(0.01)},
    "weights by the exact maximum": {"weighting": ExactMaximum()},
    "weights of the prior (not robust)": {"weighting": PriorWeights()},
    "steps that fall as a square": {
        "primal_step": Polynomial(0.5),
        "weighting": ShadowPrice(strength_annealing=Polynomial(3.0)),
    },
    "2 local steps": {"local_steps": 2},
    "uncompressed": {"compressor": Identity()},
    "4 bits in blocks": {"compressor": FOUR_BITS},
    "signs in blocks of 256": {"compressor": Sign(block=256)},
    "a tenth of the coordinates": {"compressor": TopK(0.1)},
}


def _twelve(steps: tuple[float, ...]) -> tuple[float, ...]:
    """Returns twelve steps with a constant ratio, from half of the first to twice the last."""
    first, ratio = steps[0] / 2, (4 * steps[-1] / steps[0]) ** (1 / 11)
    return tuple(float(f"{first * ratio**k:.3g}") for k in range(12))


def _search(algorithm: TrackedADGDA, setup: _Setup) -> Search:
    """Returns four primal steps times three numbers of the weighting, or twelve steps if the weighting has none."""
    steps = setup.plain if not algorithm.beta2 else _SCALED
    if isinstance(algorithm.weighting, PriorWeights):
        return {"primal_step.start": _twelve(steps)}
    if isinstance(algorithm.weighting, ProjectedAscent):
        return {"primal_step.start": steps, "weighting.step.value": (0.001, 0.005, 0.025)}
    return {"primal_step.start": steps, "regularizer.strength": setup.alphas}


def _tracked(name: str, algorithm: TrackedADGDA, label: str) -> Row:
    setup = SETUPS[name]
    algorithm = replace(algorithm, regularizer=ChiSquare(setup.alpha))
    experiment = _experiment(setup.data, setup.model, LATTICE, algorithm, setup.rounds, 60)
    return Row(
        "frontier_ablation", f"{name}: {label}", "frontier", experiment, _search(algorithm, setup), setup.searched
    )


def _rivals(name: str) -> list[Row]:
    """Returns the rivals with twelve candidates each; AD-GDA and CHOCO-SGD use four bits with a norm per block."""
    setup = SETUPS[name]
    m = setup.nodes
    rivals: dict[str, tuple[Algorithm, Search]] = {
        "AD-GDA, 4 bits in blocks": (
            ADGDA(Linear(1.0), 0.01, 0.7, FOUR_BITS, ChiSquare(setup.alpha / m)),
            {
                "primal_step.start": tuple(m * step for step in setup.plain),
                "dual_step.value": (0.0003, 0.002, 0.012),
            },
        ),
        "CHOCO-SGD, 4 bits in blocks": (
            ChocoSGD(Linear(0.1), 0.7, FOUR_BITS),
            {"primal_step.start": _twelve(setup.plain)},
        ),
        "DR-DSGD": (
            DRDSGD(Linear(0.5), 6.0),
            {"primal_step.start": setup.tempered, "temperature": setup.temperatures},
        ),
        "DRFA": (
            DRFA(Linear(0.1), 1e-3, local_steps=_LOCAL),
            {"primal_step.start": setup.served, "dual_step.value": (1e-5, 1e-4, 1e-3)},
        ),
    }
    rows = []
    for label, (algorithm, search) in rivals.items():
        local = _LOCAL if label == "DRFA" else 1
        experiment = _experiment(setup.data, setup.model, LATTICE, algorithm, setup.rounds // local, 60)
        rows.append(
            Row("frontier_ablation", f"{name}: {label}", "frontier", experiment, search, setup.searched // local)
        )
    return rows


def ablation() -> list[Row]:
    """Returns AD-GDA plus one ingredient each, the whole method plus, minus or with another ingredient, and the rivals.

    The whole method lacks gradients at the average, which were found later."""
    rows = []
    for name in SETUPS:
        rows += [_tracked(name, _PARENT, "AD-GDA"), *_rivals(name)]
        rows += [_tracked(name, replace(_PARENT, **change), f"AD-GDA + {what}") for what, change in ADDED.items()]
        rows += [
            _tracked(name, _WHOLE, "all"),
            _tracked(name, replace(_WHOLE, gradient_at_average=1.0), "all and gradients at the average"),
        ]
        rows += [_tracked(name, replace(_WHOLE, **change), f"all but {what}") for what, change in LEFT_OUT.items()]
        rows += [_tracked(name, replace(_WHOLE, **change), f"all, {what}") for what, change in INSTEAD.items()]
    return rows


# Best results


def _best(
    name: str, label: str, algorithm: TrackedADGDA, rounds: int, searched: int, search: Search, seeds: int = 2
) -> Row:
    setup = SETUPS[name]
    algorithm = replace(algorithm, regularizer=ChiSquare(setup.alpha))
    experiment = _experiment(setup.data, setup.model, LATTICE, algorithm, rounds, 50)
    return Row("frontier_best", f"{name}: {label}", "frontier", experiment, search, searched, search_seeds=seeds)


def best() -> list[Row]:
    """Returns long runs for accuracy and short ones for bytes."""
    start, beta1, alpha = "primal_step.start", "beta1", "regularizer.strength"
    uncompressed = replace(_WHOLE, compressor=Identity())
    brief = replace(
        _WHOLE, primal_step=Polynomial(0.4), weighting=ShadowPrice(strength_annealing=0.0), compressor=Sign(block=256)
    )
    long = {start: (0.1, 0.2), "weighting.strength_annealing.start": (0.0, 5.0), alpha: (0.01, 0.02, 0.04)}
    short = {start: (0.4, 0.6), beta1: (0.8, 0.6), alpha: (0.03, 0.05)}
    steps = (0.5, 0.75, 1.0, 1.5)
    return [
        _best(FASHION, "uncompressed, long", uncompressed, 5000, 5000, long),
        _best(FASHION, "compressed, long", _WHOLE, 5000, 5000, long),
        _best(FASHION, "compressed, short", brief, 420, 420, short, seeds=5),
        _best(CIFAR, "compressed, long", _WHOLE, 2000, 1000, {start: steps, alpha: (0.1, 0.3, 1.0)}),
        _best(CIFAR, "compressed, short", _WHOLE, 250, 250, {start: steps, beta1: (0.95, 0.9, 0.8)}),
    ]


# Defaults: chosen on seven problems and judged on five others

CHOSEN = {
    "primal_step.start": (0.5, 0.7, 1.0),
    "beta1": (0.95, 0.9, 0.8),
    "weighting.strength_annealing.start": (10.0, 30.0),
    "regularizer.strength": (0.03, 0.05, 0.1),
}
WIDER = {
    "primal_step.start": (0.5, 0.7, 1.0, 1.4),
    "beta1": (0.95, 0.9, 0.8),
    "weighting.strength_annealing.start": (0.0, 10.0, 30.0),
    "regularizer.strength": (0.03, 0.05, 0.1, 0.3),
}
_TO_CHOOSE = TrackedADGDA(
    primal_step=Polynomial(0.7, power=3.0),
    beta1=0.9,
    gradient_at_average=1.0,
    weighting=ShadowPrice(strength_annealing=Polynomial(10.0, power=3.0)),
    regularizer=ChiSquare(0.1),
)


def _elsewhere(name: str, data: Data, model: Model) -> Row:
    experiment = _experiment(data, model, LATTICE, _TO_CHOOSE, 1000, 10)
    return Row("frontier_choice", name, "frontier", experiment, CHOSEN, search_seeds=3)


def choice() -> list[Row]:
    """Returns the seven problems on which the defaults are chosen."""
    coarse = ImportedData("reproduction.frontier.coarse:sites", {"nodes": 20, "pixels": 7})
    cameras = CIFAR10(Instrument(10, 2, "camera"))
    layers = FullyConnected()
    return [
        _elsewhere("MNIST, 30 nodes with two shards each", MNIST(Shards(30, 2)), layers),
        _elsewhere("Fashion-MNIST, 40 nodes with two shards each", FashionMNIST(Shards(40, 2)), layers),
        _elsewhere("Fashion-MNIST, 20 nodes at three contrasts", FashionMNIST(_CONTRASTS), Logistic()),
        _elsewhere("CIFAR-10, 10 nodes with two cameras", cameras, PaperCNN()),
        _elsewhere("CIFAR-10, 10 nodes of one class", CIFAR10(OneClass(10)), layers),
        _elsewhere("CIFAR-10, 40 nodes of one class", CIFAR10(OneClass(40)), layers),
        _elsewhere("Fashion-MNIST in 7 x 7 pixels, 20 nodes with two shards each", coarse, Logistic()),
    ]


JUDGED: dict[str, tuple[Data, Model, Topology, int]] = {
    "digits": (Digits(split="class"), Logistic(), Ring(), 1000),
    "Fashion-MNIST-10": (FashionMNIST(OneClass(10)), FullyConnected(), Ring(), 1000),
    FASHION: (SETUPS[FASHION].data, FullyConnected(), LATTICE, 1000),
    CIFAR: (SETUPS[CIFAR].data, PaperCNN(), LATTICE, 1000),
    "MNIST by class": (MNIST(OneClass(10)), FullyConnected(), Ring(), 1000),
}


def defaults() -> list[Row]:
    """Returns the five problems on which the defaults are judged, each with defaults and tuned."""
    rows = []
    for name, (data, model, topology, rounds) in JUDGED.items():
        default = _experiment(data, model, topology, TrackedADGDA(), rounds, 20)
        tuned = replace(default, algorithm=_TO_CHOOSE)
        rows += [
            Row("frontier_defaults", f"{name}: default", "frontier", default),
            Row("frontier_defaults", f"{name}: tuned", "frontier", tuned, WIDER, rounds // 2, search_seeds=2),
        ]
    return rows


FRONTIER: dict[str, Callable[[], list[Row]]] = {
    "frontier_choice": choice,
    "frontier_ablation": ablation,
    "frontier_best": best,
    "frontier_defaults": defaults,
}
