"""examples/research: each algorithm keeps the contract, and does what its paper promises."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fairmesh as fm
from fairmesh.algorithms.base import Round
from fairmesh.config.imports import imported
from fairmesh.mesh.node import states
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.problems.oracle import Oracle
from fairmesh.storage.state_tree import flatten_state, unflatten_state
from fairmesh.testing import check_algorithm, small_problem
from tests import toys
from tests.refusals import refused

FOLDER = Path(__file__).parents[2] / "examples" / "research"


def of(file: str, name: str):
    return imported(f"{FOLDER / file}.py:{name}", "the test")


EXTRA, BEER, DMHSGD = of("extra", "EXTRA"), of("beer", "BEER"), of("dm_hsgd", "DMHSGD")
GraphQFFL, LowRankGossip = of("q_ffl_graph", "GraphQFFL"), of("low_rank", "LowRankGossip")
FGDROKL, DAdaST, AAggFFS = of("fgdro_kl", "FGDROKL"), of("d_adast", "DAdaST"), of("aaggff", "AAggFFS")
ALGORITHMS = {
    "extra": EXTRA(),
    "beer": BEER(),
    "dm-hsgd": DMHSGD(),
    "q-ffl": GraphQFFL(q=2.0),
    "low-rank": LowRankGossip(),
    "low-rank, two columns": LowRankGossip(rank=2),
    "fgdro-kl": FGDROKL(),
    "fgdro-kl, by prior": FGDROKL(by_prior=True),
    "d-adast": DAdaST(),
    "d-adast, without tracking": DAdaST(tracking=False),
    "aaggff": AAggFFS(),
    "aaggff, unscaled": AAggFFS(0.1, beta1=0.0, beta2=0.0, response="normal"),
}
RIVALS = ("fgdro_kl", "d_adast", "aaggff")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_example_keeps_the_contract(name):
    check_algorithm(ALGORITHMS[name])


def test_every_file_is_tested():
    here = {Path(sys.modules[type(a).__module__].__file__ or "").stem for a in ALGORITHMS.values()}
    assert here == {path.stem for path in FOLDER.glob("*.py")}


def convex(sites: list[fm.Site]) -> fm.Problem:
    model, full = (lambda: torch.nn.Linear(toys.FEATURES, toys.CLASSES)), fm.Sampling(order="full")
    return toys.problem(len(sites), sites=sites, model=model, sampling=full, weight_decay=0.5)


def apart(models: torch.Tensor) -> float:
    return float((models - models.mean(dim=-2, keepdim=True)).norm() / models.norm())


def test_extra_reaches_exact_consensus_where_dsgd_does_not():
    problem = convex(toys.sites(8))
    ends = [
        fm.train(
            problem, fm.Ring(), algorithm, 200, dtype="float64", measure_every=200, trace="no"
        ).state.algorithm.models
        for algorithm in (fm.algorithms.DSGD(0.3), EXTRA(0.3))
    ]
    assert apart(ends[0]) > 0.05
    assert apart(ends[1]) < 1e-8


@pytest.mark.slow
def test_beer_is_tracked_ad_gda_without_momentum_scaling_and_weights():
    problem, compressor = toys.problem(), fm.compressors.TopK(0.3)
    tracked = fm.TrackedADGDA(
        0.1, beta1=0.0, beta2=0.0, gradient_at_average=0.0, consensus_step=0.3, compressor=compressor,
        weighting=fm.weighting.PriorWeights(), warm_start=False,
    )  # fmt: skip
    one, other = (
        fm.train(problem, fm.Ring(), algorithm, 20, dtype="float64", measure_every=20, trace="no")
        for algorithm in (tracked, BEER(0.1, 0.3, compressor))
    )
    assert float((one.state.algorithm.models - other.state.algorithm.models).abs().max()) < 1e-12
    assert float(one.final[0]["bytes_total"]) == float(other.final[0]["bytes_total"])


@pytest.mark.slow
def test_dm_hsgd_has_less_noise_than_stochastic_gradients():
    noise = of("dm_hsgd", "noise")
    assert noise(0.1, rounds=60, seeds=6) < 0.4 * noise(1.0, rounds=60, seeds=6)


@pytest.mark.slow
def test_q_ffl_over_a_graph_helps_the_worst_site():
    worst = of("q_ffl_graph", "worst")
    assert worst(5.0, rounds=200) > worst(0.0, rounds=200) + 0.05


def test_q_ffl_over_a_graph_gives_large_losses_the_weights_of_the_formula():
    problem = convex(toys.sites(8))
    run = fm.train(problem, fm.Ring(), GraphQFFL(0.0, q=2.0), 80, dtype="float64", measure_every=80, trace="no")
    network, oracle = toys.on_stack(problem, fm.Ring())
    losses = Round(torch.tensor(0), oracle, network).losses(run.state.algorithm.models)[0, :, 0]
    expected = problem.prior_of_sites * losses**2
    found = run.state.algorithm.weights[0, :, 0] / problem.n
    assert torch.allclose(found, expected / expected.sum(), rtol=1e-6, atol=0)


def test_low_rank_gossip_sends_the_bytes_of_its_products():
    problem, rank = of("low_rank", "digits")(), 2
    sent = [
        fm.train(problem, fm.Ring(), algorithm, 2, measure_every=2, trace="no").final[0]["bytes_total"]
        for algorithm in (fm.ChocoSGD(0.1), LowRankGossip(0.1, rank=rank))
    ]
    numbers = rank * 64 + 64 + rank * 10 + 10
    whole = 64 * 64 + 64 + 64 * 10 + 10
    assert sent[1] / sent[0] == pytest.approx(numbers / whole, rel=0.03)


@pytest.mark.parametrize("file", RIVALS)
def test_candidates_of_a_rival_differ_only_in_numbers(file):
    candidates = of(file, "CANDIDATES")
    assert len(set(candidates)) == 6
    fm.train(small_problem(), fm.Ring(), candidates, 1, trace="no")  # as one batch


def test_fgdro_kl_weighs_clients_by_the_formula_while_the_model_stays():
    problem, strength = convex(toys.sites(8)), 0.3
    run = fm.train(
        problem, fm.Ring(), FGDROKL(0.0, strength, by_prior=True), 30, dtype="float64", measure_every=30, trace="no"
    )
    state = run.state.algorithm
    network, oracle = toys.on_stack(problem, fm.Ring())
    losses = Round(torch.tensor(0), oracle, network).losses(state.models.expand(-1, 8, -1))[0, :, 0]
    scores = losses / strength + problem.prior_of_sites.log()
    assert torch.allclose(state.losses[0, 0], losses, rtol=1e-6)
    assert torch.allclose(state.duals[0, 0], scores.softmax(dim=-1), rtol=1e-6)
    assert float(state.logs) == pytest.approx(float(scores.logsumexp(dim=-1)), rel=1e-6)


def test_d_adast_refuses_an_ascent_that_is_slower_than_the_descent():
    with refused("alpha", "beta", 0.4, 0.6):
        fm.train(small_problem(), fm.Ring(), DAdaST(alpha=0.4, beta=0.6), 1, trace="no")


def test_d_adast_makes_the_steps_of_nodes_agree():
    ends = [
        fm.train(convex(toys.sites(8)), fm.Ring(), DAdaST(tracking=tracking), 100, measure_every=100, trace="no")
        for tracking in (False, True)
    ]
    without, with_tracking = (
        float(scales.amax() / scales.amin()) - 1
        for scales in (end.state.algorithm.accumulators.amax(dim=-1) for end in ends)
    )
    assert with_tracking < 0.2 * without


def test_aaggff_decides_by_a_minimum_over_the_simplex():
    generator = torch.Generator().manual_seed(0)
    gradients = -torch.rand(200, 6, generator=generator, dtype=torch.float64)
    slopes, curvatures = 0.05 * gradients.sum(dim=0)[None, None], 0.02 * (gradients.T @ gradients)[None]
    found = of("aaggff", "minimiser")(slopes, 2.0, curvatures, torch.full_like(slopes, 1 / 6))
    slope = slopes + 2.0 * found + found @ curvatures
    least = slope.min()
    assert float(found.sum()) == pytest.approx(1.0)
    assert float((found * (slope - least)).abs().max()) < 1e-6  # only entries of the least slope are positive


@pytest.mark.parametrize("response", ["weibull", "exponential", "frechet", "normal", "gumbel", "logistic"])
def test_aaggff_responses_grow_from_0_to_1(response):
    values = of("aaggff", "responded")(torch.linspace(0.0, 50.0, 100), response)
    assert bool((values.diff() >= 0).all())
    assert 0 <= float(values[0]) < 0.5 < 0.97 < float(values[-1]) <= 1


@pytest.mark.slow
def test_fgdro_kl_helps_the_worst_site():
    worst = of("fgdro_kl", "worst")
    assert worst(0.2) > worst(100.0) + 0.03


@pytest.mark.slow
def test_aaggff_helps_the_worst_site():
    worst = of("aaggff", "worst")
    assert worst(AAggFFS()) > worst(fm.algorithms.FedAvg()) + 0.05


@pytest.mark.slow
def test_extra_stays_exact_after_a_site_has_left():
    """Without the role of its corrections, a bias would stay for ever."""
    sites, algorithm, kept = toys.sites(6, sizes=(20,) * 6), EXTRA(0.3), [0, 1, 2, 3, 4]

    def trained(state, nodes, rounds):
        problem = convex([sites[i] for i in nodes])
        network = MemoryNetwork(fm.Ring().build(len(nodes)), dtype=torch.float64, identities=nodes)
        oracle = Oracle(problem, network.hosted, network.streams, seeds=[0], dtype=torch.float64, trace=False)
        state = algorithm.init(oracle, network) if state is None else state
        for t in range(rounds):
            state = algorithm.step(state, Round(torch.tensor(t), oracle, network))
        return state

    state = trained(None, range(6), 30)
    fresh = trained(None, kept, 120).models.mean(dim=-2)

    def off_from(before) -> float:
        rows = {path: tensor[:, kept] for path, tensor in flatten_state(before).items()}
        return float((trained(unflatten_state(state, rows), kept, 120).models.mean(dim=-2) - fresh).norm())

    reduced = states.without(state, [5], [], torch.ones(5) / 5)
    assert off_from(reduced) < 1e-5 * float(fresh.norm())
    assert off_from(state) > 1e-2 * float(fresh.norm())


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_example_runs_as_a_script(path):
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 1


def test_own_parts_stay_at_their_site_with_an_algorithm_from_outside():
    problem = small_problem(local=("2.*",))
    run = fm.train(problem, fm.Ring(), dataclasses.replace(BEER(), optimizer=fm.optimizers.AdamW()), 4, trace="no")
    assert run.state.own.rows.std(dim=1).max() > 0
    assert run.state.algorithm.models.shape[-1] == problem.flat_model.dim < 53
