"""The paper's experiments: one short function for each table and figure.

A row is an ordinary experiment plus the numbers to tune. `formula` follows the paper's text: the algorithm as printed,
with open settings tuned on held-out training data. `published` follows the published runs, as far as they are known;
for Tables 2 and 3 it is inferred from the other runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from fairmesh.algorithms import ADGDA, DRDSGD, DRFA, Algorithm, ChocoSGD
from fairmesh.algorithms.schedules import Constant, Geometric
from fairmesh.compression.compressors import (
    Compressor,
    Identity,
    Quantize,
    TopK,
)
from fairmesh.data.datasets import (
    CIFAR10,
    COOS7,
    Data,
    FashionMNIST,
    Fewer,
)
from fairmesh.data.partitions import Contrast, Instrument, OneClass
from fairmesh.experiment import Experiment
from fairmesh.problems.batches import Sampling
from fairmesh.problems.models import FullyConnected, Logistic, Model, PaperCNN
from fairmesh.regularizers.builtin import ChiSquare, OwnCoordinate
from fairmesh.topology.graphs import (
    Circulant,
    Complete,
    Ring,
    Topology,
    Torus,
)
from fairmesh.training.options import Options
from reproduction.paper import COMPRESSIONS, NETWORKS, PROTOCOLS

Protocol = Literal["formula", "published", "frontier"]  # the last: beyond the paper, in reproduction/frontier
Search = Mapping[str, tuple[float, ...]]  # a dotted field of the algorithm -> the values tried

CONSENSUS_STEPS = {  # gamma; the quantizer that rounds up allows larger ones
    "formula": (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01),
    "published": (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1),
}


@dataclass(frozen=True)
class Row:
    """One line of the results."""

    recipe: str
    name: str
    protocol: Protocol
    experiment: Experiment
    search: Search = field(default_factory=dict)
    search_rounds: int | None = None  # by default those of the experiment
    search_seeds: int = 1  # each with its own placement
    as_row: str | None = None  # 'recipe: name' of the row whose search is used instead of an own one

    @property
    def label(self) -> str:
        return f"{self.recipe}: {self.name}"


def _published(protocol: Protocol) -> bool:
    return protocol == "published"


def _adgda(
    protocol: Protocol, step: float, ratio: float, compressor: Compressor, alpha: float = 0.01, dual_step: float = 0.01
) -> ADGDA:
    """Returns AD-GDA. As published, the new lambda weights the step, and node i regularizes its own coordinate only."""
    if _published(protocol):
        schedule = Geometric(step, ratio)
        return ADGDA(schedule, dual_step, 1.0, compressor, OwnCoordinate(alpha), dual_order="dual-first")
    return ADGDA(Geometric(step, ratio), dual_step, 1.0, compressor, ChiSquare(alpha))


def _choco(protocol: Protocol, step: float, ratio: float, compressor: Compressor, nodes: int) -> Algorithm:
    """Returns CHOCO-SGD. As published, it is AD-GDA with a dual step of zero, so that every lambda_i stays 1 / m."""
    if _published(protocol):
        return _adgda(protocol, step, ratio, compressor, dual_step=0.0)
    return ChocoSGD(Geometric(step / nodes, ratio), 1.0, compressor)


def _compressor(name: str, protocol: Protocol) -> Compressor:
    """Returns a compressor. The quantizer rounds down at random; as published, it rounds up."""
    if name.startswith("quantization"):
        return Quantize(int(name.split()[1]), rounding="ceil" if _published(protocol) else "floor")
    return TopK(int(name.split()[1]) / 100)


def _sampling(protocol: Protocol, batch: int) -> Sampling:
    return Sampling(batch, "cyclic" if _published(protocol) else "random")


# Ten nodes, one class each (Tables 2 and 3, Figures 2 and 3)

_SMALL_MODELS: dict[str, Model] = {"logistic": Logistic(), "fc": FullyConnected()}
_OPEN: dict[str, Search] = {  # settings that the text leaves open; as published: around those of the larger runs
    "formula": {"dual_step.value": (0.01, 0.03, 0.1, 0.3, 1.0)},
    "published": {"dual_step.value": (0.01, 0.03), "regularizer.strength": (0.01, 1.0)},
}


def _small(protocol: Protocol, model: str, topology: Topology, algorithm: Algorithm, placements: int) -> Experiment:
    return Experiment(
        data=FashionMNIST(OneClass(10)),
        topology=topology,
        algorithm=algorithm,
        rounds=2000,
        model=_SMALL_MODELS[model],
        sampling=_sampling(protocol, 50),
        seeds=tuple(range(placements)),
        placements="by-seed",
        options=Options(measure_every=100, count_bytes=False),
    )


def _small_row(
    recipe: str, protocol: Protocol, model: str, which: str, compression: str, topology: Topology, column: str
) -> Row:
    compressor = _compressor(compression, protocol)
    search: Search = {"consensus_step": CONSENSUS_STEPS[protocol]}
    if which == "AD-GDA":
        algorithm: Algorithm = _adgda(protocol, 1.0, 0.995, compressor)
        search = {**search, **_OPEN[protocol]}
    else:
        algorithm = _choco(protocol, 1.0, 0.995, compressor, 10)
    experiment = _small(protocol, model, topology, algorithm, placements=20)
    return Row(recipe, f"{model}, {which}, {column}", protocol, experiment, search, search_seeds=3)


def table2(protocol: Protocol) -> list[Row]:
    """Returns the rows on compression, on a ring of ten nodes."""
    return [
        _small_row("table2", protocol, model, which, compression, Ring(), compression)
        for model in _SMALL_MODELS
        for compression in COMPRESSIONS
        for which in ("AD-GDA", "CHOCO-SGD")
    ]


def _network(name: str) -> Topology:
    """Returns a graph. No torus of degree 4 has ten nodes, so both protocols use the lattice i ± 1, i ± 2."""
    return Circulant((1, 2)) if name == "2D torus" else Complete()


def table3(protocol: Protocol) -> list[Row]:
    """Returns the rows on networks of ten nodes."""
    return [
        _small_row("table3", protocol, model, which, compression, _network(network), f"{compression}, {network}")
        for model in _SMALL_MODELS
        for compression, network in (column.rsplit(", ", 1) for column in NETWORKS)
        for which in ("AD-GDA", "CHOCO-SGD")
    ]


def _at_fixed_step(recipe: str, protocol: Protocol, name: str, compression: str, topology: Topology, like: str) -> Row:
    compressor = _compressor(compression, protocol) if compression != "none" else Identity()
    algorithm = replace(_adgda(protocol, 1.0, 0.995, compressor), primal_step=Constant(0.1))
    experiment = _small(protocol, "logistic", topology, algorithm, placements=5)
    options = Options(measure_every=20, count_bytes=False)
    return Row(recipe, name, protocol, replace(experiment, options=options), as_row=like)


def figure2(protocol: Protocol) -> list[Row]:
    """Returns the curves at a fixed step of 0.1 under compression, with the consensus steps found for Table 2."""
    like = "table2: logistic, AD-GDA"
    plain = _at_fixed_step("figure2", protocol, "no compression", "none", Ring(), f"{like}, {COMPRESSIONS[0]}")
    return [plain] + [
        _at_fixed_step("figure2", protocol, name, name, Ring(), f"{like}, {name}") for name in COMPRESSIONS
    ]


def figure3(protocol: Protocol) -> list[Row]:
    """Returns the curves at a fixed step of 0.1 on three networks, with 4-bit messages."""
    four = "quantization 4 bit"
    like = f"logistic, AD-GDA, {four}"
    return [_at_fixed_step("figure3", protocol, "ring", four, Ring(), f"table2: {like}")] + [
        _at_fixed_step("figure3", protocol, name, four, _network(name), f"table3: {like}, {name}")
        for name in ("2D torus", "mesh")
    ]


# The larger setups (Tables 4 and 5, Figures 1 and 4)


@dataclass(frozen=True)
class _Setup:
    """A larger experiment: its data, model and graph, and the steps of the published runs."""

    data: Callable[[Protocol], Data]
    model: Model
    nodes: int
    torus: tuple[int, int]  # rows and columns, in `formula`
    batch: int
    published_batches: dict[str, int]  # for each algorithm
    steps: dict[str, float]  # published eta_theta of each algorithm
    consensus_step: float  # published gamma with 4-bit messages
    published_alphas: dict[float, float]  # a table's alpha -> the strength that the run had


def _cifar(protocol: Protocol) -> Data:
    published = _published(protocol)
    tests, transform = ("share", "published") if published else ("kind", "formula")
    return CIFAR10(Contrast(20, (0.5, 0.5, 1.5, 1.5), tests, transform))


def _camera(protocol: Protocol) -> Data:
    return CIFAR10(Instrument(10, 2, "camera"))


SETUPS = {
    "Fashion-MNIST": _Setup(
        lambda protocol: FashionMNIST(OneClass(50)), FullyConnected(), 50, (5, 10), 50,
        {}, {"AD-GDA": 1.0, "CHOCO-SGD": 1.0, "DRFA": 0.02, "DR-DSGD": 1.0}, 0.7, {},
    ),
    "CIFAR-10": _Setup(
        _cifar, PaperCNN(), 20, (4, 5), 50,
        {"AD-GDA": 32, "CHOCO-SGD": 32, "DRFA": 32},
        {"AD-GDA": 1.0, "CHOCO-SGD": 2.0, "DRFA": 0.1, "DR-DSGD": 0.5}, 0.8, {0.1: 1.0},
    ),
    "COOS7": _Setup(
        lambda protocol: COOS7(), PaperCNN(), 10, (2, 5), 32,
        {"AD-GDA": 50, "CHOCO-SGD": 50, "DRFA": 50, "DR-DSGD": 50},
        {"AD-GDA": 0.5, "CHOCO-SGD": 0.5, "DRFA": 0.06, "DR-DSGD": 0.25}, 0.8, {},
    ),
    "two cameras": _Setup(
        _camera, PaperCNN(), 10, (2, 5), 50,
        {"AD-GDA": 32, "CHOCO-SGD": 32}, {"AD-GDA": 1.0, "CHOCO-SGD": 1.0}, 0.8, {},
    ),
}  # fmt: skip

_LONG, _RATIO, _LOCAL = 5000, 0.998, 10
_PLACEMENTS = {"Fashion-MNIST": 5}  # otherwise 3, as in the published runs, and 5 for DRFA
_SEARCHED = 2500  # rounds of a search; steps have shrunk to 0.7 % by then
_DRFA_STEPS = (2.5, 5.0, 10.0, 20.0)  # times 1 / m, because each client drawn has weight one
_TWELVE_STEPS = (0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.8, 1.1, 1.5, 2.0, 3.0, 4.0)  # of DR-DSGD


class _Grid(NamedTuple):
    """The values that `formula` tries. A first search ended at the end of a range; these surround its result."""

    steps: tuple[float, ...]  # eta_theta of AD-GDA; times 1 / m for CHOCO-SGD, whose nodes have weight one
    dual_steps: tuple[float, ...]
    consensus_steps: tuple[float, ...]  # gamma with 4 bits


_GRIDS: dict[type[Model], _Grid] = {
    FullyConnected: _Grid((2.0, 4.0, 8.0, 16.0, 32.0, 64.0), (1e-4, 0.001, 0.01, 0.1, 1.0), (0.3, 0.15, 0.08, 0.04)),
    PaperCNN: _Grid((1.0, 2.0, 4.0, 8.0, 16.0), (0.001, 0.01, 0.1, 1.0), (0.15, 0.08, 0.04)),
}
_IN_FOUR_BITS: Search = {"primal_step.start": (1.0, 2.0, 4.0, 8.0), "dual_step.value": (0.03, 0.1, 0.3)}  # AD-GDA


def _large(protocol: Protocol, setup: str, which: str, algorithm: Algorithm) -> Experiment:
    """Returns a larger experiment. `which` names the algorithm; a round of DRFA has ten iterations."""
    s = SETUPS[setup]
    batch = s.published_batches.get(which, s.batch) if _published(protocol) else s.batch
    small = s.nodes == 10  # no torus of degree 4 exists
    rounds = _LONG // _LOCAL if which == "DRFA" else _LONG
    return Experiment(
        data=s.data(protocol),
        topology=Circulant((1, 2)) if _published(protocol) or small else Torus(*s.torus),
        algorithm=algorithm,
        rounds=rounds,
        model=s.model,
        sampling=_sampling(protocol, batch),
        seeds=tuple(range(_PLACEMENTS.get(setup, 5 if which == "DRFA" else 3))),
        placements="by-seed",
        options=Options(measure_every=rounds // 100),
    )


def _dual_steps(setup: _Setup, alpha: float) -> tuple[float, ...]:
    """Returns the dual steps within the stable range p / alpha of chi-square, or its end if all are above it."""
    bound = 1.0 / (setup.nodes * alpha)
    return tuple(step for step in _GRIDS[type(setup.model)].dual_steps if step <= bound) or (bound,)


def _regularized(recipe: str, protocol: Protocol, setup: str, alpha: float) -> Row:
    s = SETUPS[setup]
    published = _published(protocol)
    strength = s.published_alphas.get(alpha, alpha) if published else alpha
    algorithm = _adgda(protocol, s.steps["AD-GDA"], _RATIO, Identity(), strength, 0.01 if published else 1e-3 / s.nodes)
    search: Search = {
        "primal_step.start": _GRIDS[type(s.model)].steps, "dual_step.value": _dual_steps(s, alpha),
    }  # fmt: skip
    experiment = _large(protocol, setup, "AD-GDA", algorithm)
    return Row(recipe, f"alpha = {alpha:g}", protocol, experiment, {} if published else search, _SEARCHED)


def table4a(protocol: Protocol) -> list[Row]:
    """Returns the rows on regularization, Fashion-MNIST on 50 nodes."""
    return [_regularized("table4a", protocol, "Fashion-MNIST", alpha) for alpha in (10.0, 1.0, 0.01)]


def table4b(protocol: Protocol) -> list[Row]:
    """Returns the rows on regularization, COOS7 on 10 nodes."""
    return [_regularized("table4b", protocol, "COOS7", alpha) for alpha in (10.0, 1.0, 0.01)]


def table4c(protocol: Protocol) -> list[Row]:
    """Returns the rows on regularization, CIFAR-10 on 20 nodes."""
    return [_regularized("table4c", protocol, "CIFAR-10", alpha) for alpha in (10.0, 0.1, 0.01)]


def _drfa(protocol: Protocol, setup: str) -> Row:
    s = SETUPS[setup]
    schedule = Geometric(s.steps["DRFA"], _RATIO**_LOCAL)
    if _published(protocol):
        algorithm = DRFA(
            schedule, 8e-3, local_steps=_LOCAL, ascends="error", probed="everyone", floor=1e-5, repeats=False
        )
    else:
        algorithm = DRFA(schedule, 1e-3, local_steps=_LOCAL)
    steps = tuple(step / s.nodes for step in _DRFA_STEPS)
    search: Search = {"primal_step.start": steps, "dual_step.value": (1e-4, 1e-3, 1e-2)}
    experiment, rounds = _large(protocol, setup, "DRFA", algorithm), _SEARCHED // _LOCAL
    return Row("table5", f"{setup}, DRFA", protocol, experiment, {} if _published(protocol) else search, rounds)


def _dr_dsgd(protocol: Protocol, setup: str) -> Row:
    algorithm = DRDSGD(Geometric(SETUPS[setup].steps["DR-DSGD"], _RATIO), 6.0)
    search: Search = {"primal_step.start": _TWELVE_STEPS}
    experiment = _large(protocol, setup, "DR-DSGD", algorithm)
    return Row("table5", f"{setup}, DR-DSGD", protocol, experiment, {} if _published(protocol) else search, _SEARCHED)


def table5(protocol: Protocol) -> list[Row]:
    """Returns the robust rivals. AD-GDA's numbers are those of Table 4 at alpha = 0.01."""
    return [rival(protocol, setup) for setup in ("Fashion-MNIST", "CIFAR-10", "COOS7") for rival in (_drfa, _dr_dsgd)]


def _in_four_bits(recipe: str, protocol: Protocol, setup: str, which: str) -> Row:
    s = SETUPS[setup]
    compressor, step = _compressor("quantization 4 bit", protocol), s.steps[which]
    search: Search = {}
    grid = _GRIDS[type(s.model)]
    if which == "AD-GDA":
        algorithm: Algorithm = _adgda(protocol, step, _RATIO, compressor)
        if not _published(protocol):
            search = {**_IN_FOUR_BITS, "consensus_step": grid.consensus_steps}
    else:
        algorithm = _choco(protocol, step, _RATIO, compressor, s.nodes)
        if not _published(protocol):
            search = {
                "primal_step.start": tuple(step / s.nodes for step in grid.steps),
                "consensus_step": grid.consensus_steps,
            }
    if _published(protocol):
        algorithm = replace(algorithm, consensus_step=s.consensus_step)  # type: ignore[type-var]
    return Row(recipe, f"{setup}, {which}", protocol, _large(protocol, setup, which, algorithm), search, _SEARCHED)


def figure4(protocol: Protocol) -> list[Row]:
    """Returns AD-GDA and CHOCO-SGD with 4 bits. The rivals' curves are those of Table 5."""
    setups, names = ("Fashion-MNIST", "CIFAR-10", "COOS7"), ("AD-GDA", "CHOCO-SGD")
    return [_in_four_bits("figure4", protocol, setup, which) for setup in setups for which in names]


def figure1(protocol: Protocol) -> list[Row]:
    """Returns our own replacement of COOS7's microscopes: CIFAR-10 with a second camera at two of ten nodes.

    The curves of COOS7 itself are those of Figure 4."""
    return [_in_four_bits("figure1", protocol, "two cameras", which) for which in ("AD-GDA", "CHOCO-SGD")]


RECIPES: dict[str, Callable[[Protocol], list[Row]]] = {
    "table2": table2,
    "table3": table3,
    "table4a": table4a,
    "table4b": table4b,
    "table4c": table4c,
    "table5": table5,
    "figure1": figure1,
    "figure2": figure2,
    "figure3": figure3,
    "figure4": figure4,
}


def rows_of(recipe: str) -> list[Row]:
    """Returns all rows of a recipe, in both protocols for recipes of the paper."""
    if recipe not in RECIPES:
        from reproduction.frontier.recipes import FRONTIER  # which imports this module

        return FRONTIER[recipe]()
    return [row for protocol in PROTOCOLS for row in RECIPES[recipe](protocol)]  # type: ignore[arg-type]


def miniature(row: Row) -> Row:
    """Returns a row with few samples, small batches, few rounds, one placement and two candidates."""
    e = row.experiment
    rounds = 2 if isinstance(e.model, PaperCNN) else 10
    search = {name: (values[0], values[-1]) for name, values in list(row.search.items())[:1]}
    small = replace(
        e,
        data=Fewer(e.data),
        rounds=rounds,
        seeds=(0,),
        sampling=replace(e.sampling, batch=8),
        options=replace(e.options, measure_every=rounds // 2),
    )
    return replace(row, experiment=small, search=search, search_rounds=rounds, search_seeds=1)
