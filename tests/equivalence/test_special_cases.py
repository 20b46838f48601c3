"""Where two algorithms must be one and the same: limits of AD-GDA and CHOCO-SGD, one node, a schedule that stays."""

import numpy as np
import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.algorithms.base import Round
from fairmesh.networks.memory import MemoryNetwork
from tests import toys
from tests.equivalence.reference import Worker
from tests.equivalence.stack import NoData, apart, on_the_stack
from tests.examples import THOROUGH
from tests.pairwise import some_quick

ROUNDS = 30 if THOROUGH else 12
SOME = {name: toys.COMPRESSORS[name] for name in ("none", "quantize", "top-k", "sign")}


@pytest.fixture(scope="module")
def problem() -> fm.Problem:
    return toys.problem()


@pytest.fixture(scope="module")
def equal_sites() -> fm.Problem:
    return toys.problem(sites=toys.sites(sizes=(20,) * 8))


def _models_apart(one, other) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one.models, other.models, strict=True))


@pytest.mark.parametrize(
    "topology", [fm.Ring(), fm.topologies.Star(), toys.TOPOLOGIES["changing"]], ids=["ring", "star", "changing"]
)
def test_choco_sgd_without_compression_at_rate_one_is_decentralized_sgd_that_mixes_after_the_step(problem, topology):
    """CHOCO gossips what was published, so x^(t+1) = W x^t - eta g(x^t) from round 1 on; in round 0 nothing has been
    published and all models agree, so mixing would change nothing: DSGD in every round."""
    choco = on_the_stack(problem, topology, fm.ChocoSGD(primal_step=0.3, consensus_step=1.0), 15)
    dsgd = on_the_stack(problem, topology, fm.algorithms.DSGD(primal_step=0.3), 15)
    assert _models_apart(choco, dsgd) < 1e-12


@pytest.mark.parametrize("compressor", SOME.values(), ids=SOME)
@pytest.mark.parametrize("sizes", ["equal", "unequal"])
def test_ad_gda_with_dual_step_zero_is_choco_sgd_at_a_primal_step_m_times_smaller(
    problem, equal_sites, sizes, compressor
):
    """Lambda stays at the prior, so AD-GDA weighs node i by p_i where CHOCO-SGD weighs it by m p_i."""
    chosen = equal_sites if sizes == "equal" else problem
    prior = chosen.prior_of_sites.numpy()
    assert (prior.max() > 1.9 * prior.min()) == (sizes == "unequal")
    adgda = fm.ADGDA(2.4, dual_step=0.0, consensus_step=0.2, compressor=compressor)
    choco = fm.ChocoSGD(2.4 / 8, consensus_step=0.2, compressor=compressor)
    one, other = (on_the_stack(chosen, fm.Ring(), algorithm, ROUNDS) for algorithm in (adgda, choco))
    assert _models_apart(one, other) < 1e-12
    assert max(abs(duals - prior).max() for duals in one.duals) < 1e-14


def test_ad_gda_with_a_dual_step_is_not_choco_sgd(equal_sites):
    one = on_the_stack(equal_sites, fm.Ring(), fm.ADGDA(2.4, dual_step=0.1, consensus_step=0.4), ROUNDS)
    other = on_the_stack(equal_sites, fm.Ring(), fm.ChocoSGD(2.4 / 8, consensus_step=0.4), ROUNDS)
    assert _models_apart(one, other) > 1e-2


def test_dual_orders_differ_only_in_when_a_weight_acts(problem):
    """With the dual step at zero there is nothing to feel."""
    runs = {}
    for order in ("simultaneous", "dual-first"):
        for step in (0.0, 0.1):
            algorithm = fm.ADGDA(2.0, dual_step=step, consensus_step=0.4, dual_order=order)
            runs[order, step] = on_the_stack(problem, fm.Ring(), algorithm, 5)
    assert _models_apart(runs["simultaneous", 0.0], runs["dual-first", 0.0]) < 1e-12
    assert _models_apart(runs["simultaneous", 0.1], runs["dual-first", 0.1]) > 1e-3


SGD_STEPS = {  # each algorithm at one node: how large its step is for a loss f, and how many it takes in a round
    "ad-gda": (lambda a, t, f: 2.0 * 0.99**t, 1),
    "ad-gda published": (lambda a, t, f: 1.0, 1),
    "ad-gda compressed duals": (lambda a, t, f: 1.0, 1),
    "ad-gda capped": (lambda a, t, f: 2.0, 1),
    "choco-sgd": (lambda a, t, f: 0.3, 1),
    "dsgd": (lambda a, t, f: 0.3, 1),
    "dr-dsgd": (lambda a, t, f: 0.5 * np.exp(f / 2.0) / 2.0, 1),
    "drfa": (lambda a, t, f: 0.1, 3),
    "afl": (lambda a, t, f: 0.2, 1),
    "fedavg": (lambda a, t, f: 0.1, 3),
}


def test_sgd_steps_are_known_for_every_algorithm():
    """Those of Tracked AD-GDA, Local and others are Adam's (test_tracked.py, test_per_node_loop.py); q-FFL's are
    shortened by the norm of a round's gradients."""
    others = (
        fm.TrackedADGDA,
        fm.algorithms.Local,
        fm.algorithms.FedProx,
        fm.algorithms.QFFL,
        fm.algorithms.TERM,
        fm.algorithms.Pooled,
    )
    assert {*SGD_STEPS} == {name for name, a in toys.ALGORITHMS.items() if not isinstance(a, others)}


@pytest.mark.parametrize("name", SGD_STEPS)
@pytest.mark.quick_cases(4)
def test_algorithm_at_one_node_takes_the_steps_of_plain_sgd(name):
    problem, algorithm = toys.problem(1), toys.ALGORITHMS[name]
    stack = on_the_stack(problem, fm.Ring(), algorithm, ROUNDS)
    step_of, steps = SGD_STEPS[name]
    worker = Worker(problem, 0, 0, algorithm.oracle_calls())  # for its batches
    model = worker.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for t in range(ROUNDS):
        for call in range(steps):
            ((inputs, targets),) = worker.batches(t, call)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = step_of(algorithm, t, loss.item())
            optimizer.step()
        row = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
        assert np.abs(stack.models[t][0] - row).max() < 1e-10
    assert np.abs(stack.models[-1] - stack.models[0]).max() > 1e-2
    if stack.duals:
        assert all(dual == 1.0 for dual in stack.duals)
    assert stack.bits_of_nodes.sum() == 0 or algorithm.needs_server


UNCHANGING = {name: fm.ADGDA(2.0, dual_step=0.1, consensus_step=0.2, compressor=SOME[name]) for name in SOME}
UNCHANGING |= {name: toys.ALGORITHMS[name] for name in ("dsgd", "dr-dsgd")}


@pytest.mark.parametrize("algorithm", UNCHANGING.values(), ids=UNCHANGING)
def test_changing_graph_that_never_changes_is_the_fixed_graph(problem, algorithm):
    """Though it keeps every neighbour's copy where the fixed graph keeps one mixed row."""
    fixed = on_the_stack(problem, fm.Ring(), algorithm, ROUNDS)
    schedule = on_the_stack(problem, fm.topologies.Changing((fm.Ring(), fm.Ring())), algorithm, ROUNDS)
    assert apart(fixed, schedule) < 1e-10
    assert (fixed.bits_of_nodes == schedule.bits_of_nodes).all()


# Algorithms with a server ---------------------------------------------------------------------------------------------

PLAIN = {"beta1": 0.0, "beta2": 0.0}
SCALED = {"beta1": 0.9, "beta2": 0.9}


def _same(problem, one, other) -> bool:
    runs = [on_the_stack(problem, fm.topologies.Star(), algorithm, ROUNDS) for algorithm in (one, other)]
    assert np.abs(runs[0].models[-1] - runs[0].models[0]).max() > 1e-2
    return _models_apart(*runs) < 1e-10


@pytest.mark.parametrize(
    "steps", [pytest.param(PLAIN, id="plain", marks=pytest.mark.slow), pytest.param(SCALED, id="scaled")]
)
def test_fedprox_qffl_and_term_have_fedavg_as_their_limit(problem, steps):
    fedavg = fm.algorithms.FedAvg(0.1, local_steps=3, **steps)
    assert _same(problem, fm.algorithms.FedProx(0.1, proximal=0.0, local_steps=3, **steps), fedavg)
    assert _same(problem, fm.algorithms.QFFL(0.1, q=0.0, local_steps=3, **steps), fedavg)
    assert _same(problem, fm.algorithms.TERM(0.1, tilt=0.0, local_steps=3, **steps), fedavg)
    assert not _same(problem, fm.algorithms.FedProx(0.1, proximal=1.0, local_steps=3, **steps), fedavg)
    assert not _same(problem, fm.algorithms.QFFL(0.1, q=1.0, local_steps=3, **steps), fedavg)
    assert not _same(problem, fm.algorithms.TERM(0.1, tilt=1.0, local_steps=3, **steps), fedavg)


def test_fedavg_with_one_local_step_of_all_clients_is_sgd_on_the_weighted_loss(problem):
    """AFL whose weights stay at the prior takes these steps too, and so does one place that has all data."""
    fedavg = fm.algorithms.FedAvg(0.2, local_steps=1, **PLAIN)
    assert _same(problem, fm.algorithms.AFL(0.2, dual_step=0.0), fedavg)
    assert _same(problem, fm.algorithms.Pooled(0.2, **PLAIN), fedavg)
    assert _same(problem, fm.algorithms.Pooled(0.2, **SCALED), fm.algorithms.FedAvg(0.2, local_steps=1, **SCALED))


def test_fedavg_with_unscaled_steps_averages_the_clients_models(problem):
    stack = on_the_stack(problem, fm.topologies.Star(), fm.algorithms.FedAvg(0.1, local_steps=4, **PLAIN), 1)
    average = 0.0
    for i, p in enumerate(problem.prior_of_sites.tolist()):
        worker = Worker(problem, i, 0, 4)
        model = worker.start
        for call in range(4):
            model = model - 0.1 * worker.loss_and_gradient(model, 0, call)[1]
        average = average + p * model
    assert np.abs(stack.models[0][0] - average).max() < 1e-12


def test_pooled_on_full_batches_descends_the_mean_loss_over_all_rows():
    problem = toys.problem(sampling=fm.Sampling(order="full"))
    stack = on_the_stack(problem, fm.Ring(), fm.algorithms.Pooled(0.5, **PLAIN), 3)
    rows = [torch.cat([getattr(site.train, what) for site in problem.sites]) for what in ("inputs", "targets")]
    worker = Worker(toys.problem(1, sites=[fm.Site(tuple(rows))], sampling=fm.Sampling(order="full")), 0, 0, 1)
    model = worker.start
    for t in range(3):
        model = model - 0.5 * worker.loss_and_gradient(model, t)[1]
        assert np.abs(stack.models[t][0] - model).max() < 1e-12


def test_term_has_the_worst_weights_under_kl_and_descends_as_dr_dsgd_does(problem):
    """DR-DSGD on a complete graph solves the same maximum at the temperature 1 / t, but does not normalise its step."""
    term = on_the_stack(problem, fm.Ring(), fm.algorithms.TERM(0.1, tilt=2.0, local_steps=1, **PLAIN), 1)
    workers = [Worker(problem, i, 0, 1) for i in range(8)]
    losses = np.array([worker.loss_and_gradient(worker.start, 0)[0] for worker in workers])
    tilted = problem.prior_of_sites.numpy() * np.exp(losses / 0.5)
    wanted = tilted / tilted.sum()
    assert np.abs(term.duals[0][0] - wanted).max() < 1e-10
    mesh = on_the_stack(problem, fm.topologies.Complete(), fm.algorithms.DRDSGD(0.1, temperature=0.5), 1)
    one, other = term.models[0][0] - workers[0].start, mesh.models[0].mean(axis=0) - workers[0].start
    assert float(one @ other) == pytest.approx(np.linalg.norm(one) * np.linalg.norm(other), rel=1e-10)


# Consensus over a changing graph -------------------------------------------------------------------------------------


def _spread(rows: torch.Tensor) -> float:
    """How far the nodes are from their average, in the mean square."""
    return float((rows - rows.mean(dim=-2, keepdim=True)).square().sum(dim=-1).mean())


CHANGING = fm.topologies.Changing(
    (fm.topologies.Edges(((0, 1), (2, 3), (4, 5), (6, 7))), fm.Ring(), fm.topologies.Star())
)
LOSSY = {name: toys.COMPRESSORS[name] for name in ("quantize", "top-k", "random-k")}
RATE, LONG = 0.5, 500


@pytest.fixture(scope="module")
def unequal() -> torch.Tensor:
    return torch.randn(1, 8, 30, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@some_quick("compressor", LOSSY, "top-k")
@pytest.mark.slow
def test_gossip_over_a_changing_graph_ends_in_consensus_at_the_average(unequal, compressor):
    network, oracle = MemoryNetwork(CHANGING.build(8), dtype=torch.float64), NoData(unequal)
    algorithm = fm.ChocoSGD(primal_step=0.0, consensus_step=RATE, compressor=compressor)
    state = algorithm.init(oracle, network)
    for t in range(LONG):
        state = algorithm.step(state, Round(torch.tensor(t), oracle, network))
    assert _spread(state.models) < 1e-26 * _spread(unequal)
    assert float((state.models.mean(dim=-2) - unequal.mean(dim=-2)).abs().max()) < 1e-12


@some_quick("compressor", LOSSY, "top-k")
def test_gossip_with_one_mixed_buffer_would_lose_consensus_when_the_graph_changes(unequal, compressor):
    """Why every neighbour's copy is kept: the same gossip with s += W_t q keeps the average and never agrees."""
    weights = [torch.as_tensor(mixing.matrix.toarray()) for mixing in CHANGING.build(8)]
    network, oracle = MemoryNetwork(CHANGING.build(8), dtype=torch.float64), NoData(unequal)
    models, own, mixed = unequal.clone(), torch.zeros_like(unequal), torch.zeros_like(unequal)
    for t in range(LONG):
        models = models + RATE * (mixed - own)
        message = compressor.compress(models - own, Round(torch.tensor(t), oracle, network).draws("compression"))
        own = own + message.decode()
        mixed = mixed + weights[t % 3] @ message.decode()
    assert float((models.mean(dim=-2) - unequal.mean(dim=-2)).abs().max()) < 1e-10
    assert _spread(models) > 0.1 * _spread(unequal)


@pytest.mark.slow
def test_ad_gda_duals_agree_over_a_changing_graph(unequal):
    network, oracle = MemoryNetwork(CHANGING.build(8), dtype=torch.float64), NoData(unequal)
    algorithm = fm.ADGDA(0.0, dual_step=0.0, consensus_step=RATE, compressor=fm.compressors.TopK(0.3))
    start = algorithm.init(oracle, network)
    duals = fm.regularizers.project_onto_simplex(
        torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(4)).double()
    )
    state = start._replace(duals=duals)
    for t in range(300):
        state = algorithm.step(state, Round(torch.tensor(t), oracle, network))
    assert _spread(duals) > 1e-2
    assert _spread(state.duals) < 1e-20
    assert float((state.duals - duals.mean(dim=-2)).abs().max()) < 1e-12
