"""The paper's experiments, one short function for each row of its tables and each curve of its figures.

A row is an ordinary experiment and what of it is searched for. `formula` follows the paper's text: the algorithm as
printed, what it leaves open tuned on held-out training data. `published` follows what the published runs did, as far as
it is known; for Tables 2 and 3 it is inferred from the other runs."""

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
from fairmesh.problems.models import FullyConnected, Logistic, Model, PaperCNN
from fairmesh.problems.problem import Sampling
from fairmesh.regularizers.members import ChiSquare, OwnCoordinate
from fairmesh.topology.graphs import (
    Circulant,
    Complete,
    Ring,
    Topology,
    Torus,
)
from fairmesh.training.options import Options
from reproduction.paper import COMPRESSIONS, NETWORKS, PROTOCOLS

Protocol = Literal["formula", "published", "frontier"]  # the last: past the paper, in reproduce/frontier
Search = Mapping[str, tuple[float, ...]]  # a dotted name of the algorithm -> the values tried

CONSENSUS_STEPS = {  # gamma; what rounds up bears more than what rounds down
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
    search_rounds: int | None = None  # as many as the experiment's where not given
    search_seeds: int = 1  # each with its placement
    as_row: str | None = None  # takes what was found for this row, 'recipe: name', and searches nothing itself

    @property
    def label(self) -> str:
        return f"{self.recipe}: {self.name}"


def _published(protocol: Protocol) -> bool:
    return protocol == "published"


def _adgda(
    protocol: Protocol, step: float, ratio: float, compressor: Compressor, alpha: float = 0.01, dual_step: float = 0.01
) -> ADGDA:
    """AD-GDA; as published: the lambda just projected weighs the step, node i holds back its own coordinate only."""
    if _published(protocol):
        schedule = Geometric(step, ratio)
        return ADGDA(schedule, dual_step, 1.0, compressor, OwnCoordinate(alpha), dual_order="dual-first")
    return ADGDA(Geometric(step, ratio), dual_step, 1.0, compressor, ChiSquare(alpha))


def _choco(protocol: Protocol, step: float, ratio: float, compressor: Compressor, nodes: int) -> Algorithm:
    """CHOCO-SGD; as published: AD-GDA's code with a dual step of zero, every lambda_i staying 1 / m."""
    if _published(protocol):
        return _adgda(protocol, step, ratio, compressor, dual_step=0.0)
    return ChocoSGD(Geometric(step / nodes, ratio), 1.0, compressor)


def _compressor(name: str, protocol: Protocol) -> Compressor:
    """The quantizer rounds down at random; as published it rounds up."""
    if name.startswith("quantization"):
        return Quantize(int(name.split()[1]), rounding="ceil" if _published(protocol) else "floor")
    return TopK(int(name.split()[1]) / 100)


def _sampling(protocol: Protocol, batch: int) -> Sampling:
    return Sampling(batch, "cyclic" if _published(protocol) else "random")


# Ten nodes, one class each (Tables 2 and 3, Figures 2 and 3)

_SMALL_MODELS: dict[str, Model] = {"logistic": Logistic(), "fc": FullyConnected()}
_OPEN: dict[str, Search] = {  # what the text leaves open; as published: around the values of the larger runs
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
    """Compression on a ring of ten."""
    return [
        _small_row("table2", protocol, model, which, compression, Ring(), compression)
        for model in _SMALL_MODELS
        for compression in COMPRESSIONS
        for which in ("AD-GDA", "CHOCO-SGD")
    ]


def _network(name: str) -> Topology:
    """Ten nodes make no two-dimensional torus of degree 4: the lattice i ± 1, i ± 2 stands for it in both protocols."""
    return Circulant((1, 2)) if name == "2D torus" else Complete()


def table3(protocol: Protocol) -> list[Row]:
    """Networks of ten nodes."""
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
    """Convergence at a fixed step of 0.1 under compression, at the rates found for Table 2."""
    like = "table2: logistic, AD-GDA"
    plain = _at_fixed_step("figure2", protocol, "no compression", "none", Ring(), f"{like}, {COMPRESSIONS[0]}")
    return [plain] + [
        _at_fixed_step("figure2", protocol, name, name, Ring(), f"{like}, {name}") for name in COMPRESSIONS
    ]


def figure3(protocol: Protocol) -> list[Row]:
    """Convergence at a fixed step of 0.1 over three networks, 4-bit messages."""
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
    torus: tuple[int, int]  # as the paper's text has it; published: the lattice i ± 1, i ± 2
    batch: int
    published_batches: dict[str, int]  # by algorithm
    steps: dict[str, float]  # published eta_theta by algorithm
    consensus_step: float  # published gamma with 4-bit messages
    published_alphas: dict[float, float]  # the strength that stands behind a table's alpha


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
_PLACEMENTS = {"Fashion-MNIST": 5}  # else 3, as many as the published runs had; 5 for DRFA
_SEARCHED = 2500  # rounds of a search: by then steps have shrunk to 0.7 %
_DRFA_STEPS = (2.5, 5.0, 10.0, 20.0)  # times 1 / m: each of the clients drawn counts as one
_TWELVE_STEPS = (0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.8, 1.1, 1.5, 2.0, 3.0, 4.0)  # of DR-DSGD


class _Grid(NamedTuple):
    """What `formula` tries: around what a first search, with its best at the end of a range, had found."""

    steps: tuple[float, ...]  # eta_theta of AD-GDA; the same times 1 / m for CHOCO-SGD, which weighs nodes by 1
    dual_steps: tuple[float, ...]
    consensus_steps: tuple[float, ...]  # gamma in 4 bits


_GRIDS: dict[type[Model], _Grid] = {
    FullyConnected: _Grid((2.0, 4.0, 8.0, 16.0, 32.0, 64.0), (1e-4, 0.001, 0.01, 0.1, 1.0), (0.3, 0.15, 0.08, 0.04)),
    PaperCNN: _Grid((1.0, 2.0, 4.0, 8.0, 16.0), (0.001, 0.01, 0.1, 1.0), (0.15, 0.08, 0.04)),
}
_IN_FOUR_BITS: Search = {"primal_step.start": (1.0, 2.0, 4.0, 8.0), "dual_step.value": (0.03, 0.1, 0.3)}  # AD-GDA


def _large(protocol: Protocol, setup: str, which: str, algorithm: Algorithm) -> Experiment:
    """`which` names the algorithm; DRFA's rounds are ten iterations each."""
    s = SETUPS[setup]
    batch = s.published_batches.get(which, s.batch) if _published(protocol) else s.batch
    small = s.nodes == 10  # where there is no torus of degree 4
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
    """Those within the stable range p / alpha of chi-square; its end where that is below them all."""
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
    """Regularization, Fashion-MNIST over 50 nodes."""
    return [_regularized("table4a", protocol, "Fashion-MNIST", alpha) for alpha in (10.0, 1.0, 0.01)]


def table4b(protocol: Protocol) -> list[Row]:
    """Regularization, COOS7 over 10 nodes."""
    return [_regularized("table4b", protocol, "COOS7", alpha) for alpha in (10.0, 1.0, 0.01)]


def table4c(protocol: Protocol) -> list[Row]:
    """Regularization, CIFAR-10 over 20 nodes."""
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
    """The robust rivals; AD-GDA's own numbers are Table 4's at alpha = 0.01."""
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
    """Worst-node accuracy against traffic: AD-GDA and CHOCO-SGD in 4 bits; the rivals' curves are Table 5's."""
    setups, names = ("Fashion-MNIST", "CIFAR-10", "COOS7"), ("AD-GDA", "CHOCO-SGD")
    return [_in_four_bits("figure4", protocol, setup, which) for setup in setups for which in names]


def figure1(protocol: Protocol) -> list[Row]:
    """Two of ten nodes with another instrument. COOS7's microscopes, whose curves are Figure 4's; and our own stand-in,
    CIFAR-10 with two nodes' images passed through a second camera."""
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
    """All rows of a recipe: of the paper's in both protocols."""
    if recipe not in RECIPES:
        from reproduction.frontier.recipes import FRONTIER  # whose rows are made of what is here

        return FRONTIER[recipe]()
    return [row for protocol in PROTOCOLS for row in RECIPES[recipe](protocol)]  # type: ignore[arg-type]


def miniature(row: Row) -> Row:
    """The row over few samples and small batches, for a few rounds and one placement, with two candidates searched."""
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
