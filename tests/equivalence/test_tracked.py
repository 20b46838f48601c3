"""Tracked AD-GDA with ingredients left out is the algorithm they were added to; what its weights add up to."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.algorithms.base import Round
from fairmesh.networks.memory import MemoryNetwork
from tests import toys
from tests.equivalence.reference import Mesh, Worker
from tests.equivalence.stack import NoData, apart, on_the_stack
from tests.examples import THOROUGH
from tests.pairwise import covering, some_quick
from tests.refusals import refused

ROUNDS = 30 if THOROUGH else 12
OFF = {"beta1": 0.0, "tracking": False, "beta2": 0.0, "gradient_at_average": 0.0, "local_steps": 1, "warm_start": False}
TRACKED = [name for name, algorithm in toys.ALGORITHMS.items() if isinstance(algorithm, fm.TrackedADGDA)]
GRAPHS = {name: toys.TOPOLOGIES[name] for name in ("ring", "star", "changing")}

over_some_graphs = pytest.mark.parametrize("topology", GRAPHS.values(), ids=GRAPHS)


@pytest.fixture(scope="module")
def problem() -> fm.Problem:
    return toys.problem()


def _models_apart(one, other) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one.models, other.models, strict=True))


# Parents -------------------------------------------------------------------------------------------------------------


@covering(
    topology=GRAPHS,
    duals={"plain duals": None, "compressed duals": fm.compressors.Threshold(1e-3)},
    regularizer={
        "chi-square": fm.ChiSquare(0.02),
        "capped kl": fm.regularizers.Capped(0.6, fm.regularizers.KullbackLeibler(0.02)),
    },
)
def test_tracked_with_all_left_out_but_the_ascent_is_ad_gda(problem, topology, duals, regularizer):
    """At m times the step and m times alpha: nodes weigh m lambda_i here, and lambda_i there."""
    same = {"consensus_step": 0.3, "compressor": fm.compressors.Quantize(bits=4), "loss_cap": 1.3}
    adgda = fm.ADGDA(
        fm.schedules.Geometric(2.4, 0.99), dual_step=0.1, regularizer=regularizer, dual_compressor=duals, **same
    )
    inner = toys.of_strength(regularizer, 8 * 0.02)
    off = fm.TrackedADGDA(
        fm.schedules.Geometric(0.3, 0.99),
        weighting=fm.weighting.ProjectedAscent(0.1, compressor=duals),
        regularizer=inner,
        **same,
        **OFF,
    )
    one, other = (on_the_stack(problem, topology, algorithm, ROUNDS) for algorithm in (adgda, off))
    assert apart(one, other) < 1e-12
    assert (one.bits_of_nodes == other.bits_of_nodes).all()


@over_some_graphs
def test_tracked_with_all_left_out_is_choco_sgd(problem, topology):
    same = {"primal_step": 0.3, "consensus_step": 0.3, "compressor": fm.compressors.TopK(0.3)}
    choco, off = fm.ChocoSGD(**same), fm.TrackedADGDA(**same, **OFF, weighting=fm.weighting.PriorWeights())
    one, other = (on_the_stack(problem, topology, algorithm, ROUNDS) for algorithm in (choco, off))
    assert apart(one, other) < 1e-12
    assert (one.bits_of_nodes == other.bits_of_nodes).all()


def test_warm_start_changes_nothing_where_differences_travel_whole(problem):
    """Without loss every copy is its model after the first message, warm or not."""
    cold, warm = (
        fm.TrackedADGDA(
            0.1,
            consensus_step=0.4,
            beta2=0.0,
            compressor=fm.compressors.Identity(),
            weighting=fm.weighting.PriorWeights(),
            warm_start=warm,
        )
        for warm in (False, True)
    )
    one, other = (on_the_stack(problem, fm.Ring(), algorithm, 10) for algorithm in (cold, warm))
    assert _models_apart(one, other) < 1e-12


def _gradients(mesh: Mesh, t: int) -> list[np.ndarray]:
    return [
        mesh.n * mesh.prior[i] * node.worker.loss_and_gradient(node.model, t)[1] for i, node in enumerate(mesh.nodes)
    ]


@over_some_graphs
def test_tracked_without_compression_and_momentum_is_gradient_tracking(problem, topology):
    """x = W x - eta y, y = W y + g(x) - g(x before): DSGT, of Pu and Nedic, with W of each round."""
    mesh = Mesh(problem, topology, 0, 1)
    everyone, eta = range(mesh.n), 0.1
    algorithm = fm.TrackedADGDA(
        eta,
        0.0,
        beta2=0.0,
        gradient_at_average=0.0,
        consensus_step=1.0,
        compressor=fm.compressors.Identity(),
        weighting=fm.weighting.PriorWeights(),
    )
    stack = on_the_stack(problem, topology, algorithm, ROUNDS)
    before = trackers = [np.zeros(mesh.dim)] * mesh.n
    for t in range(ROUNDS):
        fresh = _gradients(mesh, t)
        trackers = [mesh.average_around(i, t, trackers) + fresh[i] - before[i] for i in everyone]
        models = [node.model for node in mesh.nodes]
        for i, node in enumerate(mesh.nodes):
            node.model = mesh.average_around(i, t, models) - eta * trackers[i]
        before = fresh
        assert np.abs(stack.models[t] - np.stack([node.model for node in mesh.nodes])).max() < 1e-10


@covering(strength=1, compressor=("quantize", "top-k", "sign blocks"), momentum={"BEER": 1.0, "MoTEF": 0.3})
def test_tracked_with_prior_weights_is_beer_and_with_momentum_motef(problem, momentum, compressor):
    """Zhao et al. 2022, Algorithm 1, in its own order: x moves by the copies h and along v, then v by the copies g and
    the news of the gradient; differences to both are compressed. Islamov et al. 2024 put a momentum M into v."""
    mesh, eta, rate = Mesh(problem, fm.Ring(), 0, 1), 0.1, 0.2
    everyone, lossy = range(mesh.n), toys.COMPRESSORS[compressor]
    algorithm = fm.TrackedADGDA(
        eta,
        1.0 - momentum,
        beta2=0.0,
        gradient_at_average=0.0,
        consensus_step=rate,
        compressor=lossy,
        weighting=fm.weighting.PriorWeights(),
        warm_start=False,
    )
    stack = on_the_stack(problem, fm.Ring(), algorithm, ROUNDS)
    W = mesh.at(0)
    copies_of_models, copies_of_trackers = np.zeros((8, mesh.dim)), np.zeros((8, mesh.dim))
    models = np.stack([node.model for node in mesh.nodes])
    memory = momentum * np.stack(_gradients(mesh, 0))
    trackers = memory.copy()

    def sent(rows: np.ndarray, t: int, purpose: str) -> np.ndarray:
        held = [{j: np.zeros(mesh.dim) for j in [i, *mesh.reach[i]]} for i in everyone]
        mesh.publish(list(rows), held, t, purpose, lossy)
        return np.stack([held[i][i] for i in everyone])

    for t in range(ROUNDS):
        models = models + rate * (W - np.eye(8)) @ copies_of_models - eta * trackers
        copies_of_models = copies_of_models + sent(models - copies_of_models, t, "compression")
        copies_of_trackers = copies_of_trackers + sent(trackers - copies_of_trackers, t, "tracker compression")
        assert np.abs(stack.models[t] - models).max() < 1e-10
        for node, row in zip(mesh.nodes, models):
            node.model = row
        before, memory = memory, (1 - momentum) * memory + momentum * np.stack(_gradients(mesh, t + 1))
        trackers = trackers + rate * (W - np.eye(8)) @ copies_of_trackers + memory - before


# One node ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACKED)
@pytest.mark.quick_cases(2)
def test_tracked_at_one_node_steps_along_its_momentum_scaled_as_by_adam(name):
    """torch's Adam without a first moment of its own, given the momentum as the gradient; or torch's SGD. Adam moves
    every parameter by its step: over the root of their number, the whole moves by it."""
    problem, algorithm = (
        toys.problem(1),
        replace(toys.ALGORITHMS[name], weighting=fm.weighting.PriorWeights(), local_steps=1),
    )
    stack = on_the_stack(problem, fm.Ring(), algorithm, ROUNDS)
    worker = Worker(problem, 0, 0, 1)  # for its batches
    parameters = list(worker.module.parameters())
    optimizer = (
        torch.optim.Adam(parameters, betas=(0.0, algorithm.beta2), eps=1e-8)
        if algorithm.beta2
        else torch.optim.SGD(parameters)
    )
    momenta = [torch.zeros_like(parameter) for parameter in parameters]
    for t in range(ROUNDS):
        ((inputs, targets),) = worker.batches(t, 0)
        gradients = torch.autograd.grad(nn.functional.cross_entropy(worker.module(inputs), targets), parameters)
        momenta = [algorithm.beta1 * m + (1 - algorithm.beta1) * g for m, g in zip(momenta, gradients)]
        for parameter, momentum in zip(parameters, momenta):
            parameter.grad = momentum.clone()
        length = sum(parameter.numel() for parameter in parameters) ** 0.5 if algorithm.beta2 else 1.0
        optimizer.param_groups[0]["lr"] = float(algorithm.primal_step.at(torch.tensor(t))) / length  # type: ignore[union-attr]
        optimizer.step()
        row = nn.utils.parameters_to_vector(parameters).detach().numpy()
        assert np.abs(stack.models[t][0] - row).max() < 1e-10
    assert np.abs(stack.models[-1] - stack.models[0]).max() > 1e-2
    assert stack.bits_of_nodes.sum() == 0


@pytest.mark.parametrize("local_steps", [1, 2, 5])
def test_tracked_at_one_node_without_momentum_takes_local_steps_of_plain_sgd(local_steps):
    problem = toys.problem(1)
    prior = fm.weighting.PriorWeights()
    algorithm = fm.TrackedADGDA(0.2, 0.0, beta2=0.0, local_steps=local_steps, weighting=prior, max_drift=0)
    stack = on_the_stack(problem, fm.Ring(), algorithm, ROUNDS)
    worker = Worker(problem, 0, 0, local_steps)
    row = worker.start.copy()
    for t in range(ROUNDS):
        for call in range(local_steps):
            row = row - 0.2 * worker.loss_and_gradient(row, t, call)[1]
        assert np.abs(stack.models[t][0] - row).max() < 1e-10


# Sums ----------------------------------------------------------------------------------------------------------------


@some_quick("topology", GRAPHS, "changing")
@pytest.mark.slow
def test_trackers_agree_on_the_networks_gradient_where_nothing_moves(problem, topology):
    """Full batches at a standstill: every node's tracker becomes the average of all weighted gradients."""
    still = toys.problem(sampling=fm.Sampling(order="full"))
    algorithm = fm.TrackedADGDA(
        0.0, 0.5, beta2=0.0, compressor=fm.compressors.Quantize(8), weighting=fm.weighting.PriorWeights()
    )
    network, oracle = toys.on_stack(still, topology, count_bytes=False)
    state = algorithm.init(oracle, network)
    for t in range(400):
        state = algorithm.step(state, Round(torch.tensor(t), oracle, network))
    _, gradients = oracle.losses_and_gradients(state.models, torch.tensor(0), 0)
    weights = 8 * oracle.prior.transpose(-1, -2)
    expected = (weights * gradients).mean(dim=-2, keepdim=True)
    trackers = state.momenta + state.balances
    assert float((trackers - expected).abs().max()) < 1e-9
    assert float((weights * gradients - expected).abs().max()) > 1e-2
    assert float((state.models - oracle.initial_models()).abs().max()) < 1e-13


# Weights -------------------------------------------------------------------------------------------------------------


class Given(NoData):
    """Nodes whose losses never change, with nothing to learn."""

    def __init__(self, losses: torch.Tensor, prior: torch.Tensor):
        self.rows, self.seeds = torch.zeros_like(losses).expand(-1, -1, 3), torch.zeros(len(losses)).long()
        self.given, self.prior = losses, prior

    def losses_and_gradients(self, models, round_index, call):
        return self.given.clone(), torch.zeros_like(models)


SOFT = {
    "chi-square": fm.ChiSquare(0.3),
    "kl": fm.regularizers.KullbackLeibler(0.4),
    "capped": fm.regularizers.Capped(0.6, fm.ChiSquare(0.2)),
    "capped kl": fm.regularizers.Capped(0.4, fm.regularizers.KullbackLeibler(0.3)),
}
NINE = {"ring": fm.Ring(), "star": fm.topologies.Star(), "circulant": fm.topologies.Circulant((1, 2))}
NINE["changing"] = fm.topologies.Changing((fm.Ring(), fm.topologies.Star()))


def _weighed(
    weighting: fm.weighting.Weighting,
    regularizer: fm.regularizers.Regularizer,
    topology: fm.topologies.Topology,
    oracle,
    rounds: int,
):
    """The state of a weighting after some rounds of losses that never change."""
    network = MemoryNetwork(topology.build(oracle.prior.shape[-1]), dtype=torch.float64, count_bytes=False)
    state = weighting.init(oracle, network)
    for t in range(rounds):
        round = Round(torch.tensor(t), oracle, network)
        _, parts, settled = weighting.weigh(state, oracle.given, regularizer, round)
        state = settled(round.exchange(**parts))
    return state


@covering(strength=1, topology=NINE, regularizer=SOFT)
@pytest.mark.quick_cases(2)
def test_shadow_price_and_exact_maximum_end_at_the_inner_maximum(topology, regularizer):
    """For forty tables of losses at once, of nodes that weigh differently."""
    generator = torch.Generator().manual_seed(5)
    losses = 1.5 * torch.rand(40, 9, 1, generator=generator, dtype=torch.float64)
    losses[:4] = 0.2 + 0.1 * torch.cos(2 * torch.pi * torch.arange(9) / 9).view(9, 1)  # little between neighbours
    prior = 0.5 + 1.5 * torch.rand(40, 1, 9, generator=generator, dtype=torch.float64)
    oracle = Given(losses, prior / prior.sum(dim=-1, keepdim=True))
    expected = 9 * regularizer.maximiser(9 * losses.transpose(-1, -2), oracle.prior)
    priced = _weighed(
        fm.weighting.ShadowPrice(relative=False, strength_annealing=0.0), regularizer, topology, oracle, 500
    )
    assert float((priced.weights.transpose(-1, -2) - expected).abs().max()) < 1e-4
    relative = _weighed(fm.weighting.ShadowPrice(strength_annealing=0.0), regularizer, topology, oracle, 500)
    in_units = losses / losses.mean(dim=-2, keepdim=True)
    of_units = 9 * regularizer.maximiser(9 * in_units.transpose(-1, -2), oracle.prior)
    assert float((relative.weights.transpose(-1, -2) - of_units).abs().max()) < 1e-3
    known = _weighed(fm.weighting.ExactMaximum(), regularizer, topology, oracle, 300)
    assert float((9 * known.duals - expected).abs().max()) < 1e-4
    assert float((expected - 9 * oracle.prior).abs().max()) > 0.4


@covering(
    strength=1,
    make={
        "chi-square": fm.ChiSquare,
        "kl": fm.regularizers.KullbackLeibler,
        "capped": lambda a: fm.regularizers.Capped(0.4, fm.ChiSquare(a)),
    },
    relative={"relative": True, "as they are": False},
)
@pytest.mark.quick_cases(1)
def test_strength_annealing_multiplies_alpha_until_the_run_ends(make, relative):
    losses = torch.linspace(0.5, 1.5, 9, dtype=torch.float64).view(1, 9, 1)
    oracle = Given(losses, torch.full((1, 1, 9), 1 / 9, dtype=torch.float64))

    def weights(strength_annealing: fm.schedules.Schedule | float, alpha: float, rounds: int) -> torch.Tensor:
        return _weighed(
            fm.weighting.ShadowPrice(relative=relative, strength_annealing=strength_annealing),
            make(alpha),
            fm.Ring(),
            oracle,
            rounds,
        ).weights

    assert float((weights(3.0, 0.1, 60) - weights(0.0, 0.4, 60)).abs().max()) < 1e-12
    falling, sharp = weights(fm.schedules.Polynomial(10.0, 200), 0.4, 600), weights(0.0, 0.4, 600)
    assert float((falling - sharp).abs().max()) < 1e-6
    assert float((weights(10.0, 0.4, 600) - sharp).abs().max()) > 0.1


@pytest.mark.parametrize("strength_annealing", [-1.0, float("nan"), float("inf")])
def test_strength_annealing_that_is_negative_or_not_finite_is_refused(strength_annealing):
    with refused("strength_annealing", ">= 0", strength_annealing):
        fm.weighting.ShadowPrice(strength_annealing=strength_annealing)


def test_shadow_price_is_steady_where_one_site_has_half_of_all_data():
    losses = torch.linspace(0.5, 1.5, 50, dtype=torch.float64).view(1, 50, 1)
    prior = torch.ones(1, 1, 50, dtype=torch.float64)
    prior[..., 20] = 49.0
    oracle, regularizer = Given(losses, prior / prior.sum()), fm.ChiSquare(0.3)
    expected = 50 * regularizer.maximiser(50 * losses.transpose(-1, -2), oracle.prior)
    state = _weighed(
        fm.weighting.ShadowPrice(relative=False, strength_annealing=0.0),
        regularizer,
        fm.topologies.Exponential(),
        oracle,
        2500,
    )
    assert float((state.weights.transpose(-1, -2) - expected).abs().max()) < 1e-3
    assert float(expected.max()) > 20


def test_projected_ascent_ends_at_the_inner_maximum_too():
    losses = torch.linspace(0, 0.6, 9, dtype=torch.float64).view(1, 9, 1)
    oracle = Given(losses, torch.full((1, 1, 9), 1 / 9, dtype=torch.float64))
    regularizer = fm.ChiSquare(0.3)
    state = _weighed(fm.weighting.ProjectedAscent(0.05), regularizer, fm.topologies.Complete(), oracle, 2000)
    expected = regularizer.maximiser(9 * losses.transpose(-1, -2), oracle.prior)
    assert float((state.duals - expected).abs().max()) < 2e-2  # each node projects its own row, before they are mixed


@pytest.mark.parametrize(
    ("topology", "nodes", "least", "most"),
    [
        (fm.Ring(), 10, 2.0, 2.0),
        (fm.topologies.Circulant((1, 2)), 50, 0.2, 0.35),
        (fm.topologies.Complete(), 50, 2.0, 2.0),
    ],
)
def test_slow_networks_allow_less_drift_in_local_steps(topology, nodes, least, most):
    network, oracle = toys.on_stack(toys.problem(nodes), topology, count_bytes=False)
    limits = fm.TrackedADGDA(local_steps=5).init(oracle, network).drift_limits
    assert least <= float(limits.min()) <= float(limits.max()) <= most
