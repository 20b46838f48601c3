"""The check of the theorems: its references are correct, a small version holds, the record follows from its numbers."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import fairmesh as fm
from reproduction import theory
from reproduction.theory_problems import NODES, Sites, known_saddle, robust_regression

RECORD = Path(theory.__file__).parent / "results" / "theory.jsonl"
FULL = fm.Sampling(order="full")
DIM = 20


@pytest.fixture(scope="module")
def recorded() -> list[dict]:
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]


def _data(saddle) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    inputs, targets = (
        np.stack([getattr(site.train, what).numpy() for site in saddle.problem.sites]) for what in ("inputs", "targets")
    )
    return inputs, targets[..., 0], saddle.model.numpy(), saddle.weights.numpy()


def test_known_saddle_meets_the_conditions_of_a_saddle_point():
    saddle = known_saddle(FULL)
    inputs, targets, model, weights = _data(saddle)
    residuals = inputs @ model - targets
    losses = (residuals**2).mean(axis=1) / 2
    gradients = np.einsum("ns,nsd->nd", residuals, inputs) / inputs.shape[1]
    assert abs(weights @ gradients).max() < 1e-12
    assert abs(gradients).max() > 0.1  # each site pulls; their weighted sum does not
    prices = losses / NODES - 2 * saddle.regularizer.strength * (NODES * weights - 1)
    held = weights > 0
    assert np.ptp(prices[held]) < 1e-12
    assert prices[~held].max() < prices[held].min() - 1e-3
    assert weights.sum() == pytest.approx(1, abs=1e-15)
    assert weights.min() == 0


def test_known_saddle_has_no_duality_gap():
    saddle = known_saddle(FULL)
    inputs, targets, model, weights = _data(saddle)
    rows = (inputs * np.sqrt(weights)[:, None, None]).reshape(-1, DIM)
    best = np.linalg.lstsq(rows, (targets * np.sqrt(weights)[:, None]).ravel(), rcond=None)[0]
    losses = ((inputs @ best - targets) ** 2).mean(axis=1) / 2
    distance = ((weights - 1 / NODES) ** 2 * NODES).sum()
    least = losses @ weights / NODES - saddle.regularizer.strength * distance
    largest = float(saddle.sites().worst_case(saddle.model.unsqueeze(0)))
    assert largest == pytest.approx(least, abs=1e-13)
    assert largest < float(saddle.sites().worst_case(saddle.model.unsqueeze(0) + 1e-3)) - 1e-9
    assert saddle.best_response(saddle.weights.unsqueeze(0))[0].numpy() == pytest.approx(model, abs=1e-9)


@pytest.mark.slow
def test_smoothness_is_the_largest_spectral_norm_of_the_hessians():
    problem, regularizer = robust_regression(FULL)
    sites, dim = Sites(problem, regularizer), problem.flat_model.dim
    generator = torch.Generator().manual_seed(0)
    models = 0.2 * torch.randn(2, NODES, dim, generator=generator, dtype=torch.float64)
    duals = torch.rand(2, NODES, NODES, generator=generator, dtype=torch.float64)
    norms = []
    for r in range(2):
        for i, site in enumerate(problem.sites):

            def own(both, i=i, held=site.train):  # g_i = lambda_i f_i + alpha r(lambda)
                row, dual = both[:dim], both[dim:]
                loss = problem.loss(held.inputs @ row[:, None], held.targets)
                return dual[i] * loss + regularizer.value(dual[None], sites.prior)[0, 0]

            hessian = torch.autograd.functional.hessian(own, torch.cat([models[r, i], duals[r, i]]))
            norms.append(float(torch.linalg.matrix_norm(hessian, 2)))  # type: ignore[arg-type]
    found = sites.smoothness(models, duals.diagonal(dim1=-2, dim2=-1))
    assert found == pytest.approx(max(norms), rel=1e-10)


def _curvature_of_worst_case(sites: Sites, row: torch.Tensor) -> torch.Tensor:
    """Returns the Hessian of Phi by differences of its gradient."""
    steps = 1e-5 * torch.eye(len(row), dtype=torch.float64)
    differences = sites.gradient_of_worst_case(row + steps) - sites.gradient_of_worst_case(row - steps)
    return (differences + differences.T) / 4e-5


def test_gradient_of_worst_case_agrees_with_finite_differences():
    sites = Sites(*robust_regression(FULL))
    row, steps = torch.full((6,), 0.03, dtype=torch.float64), 1e-5 * torch.eye(6, dtype=torch.float64)
    differences = (sites.worst_case(row + steps) - sites.worst_case(row - steps)) / 2e-5
    assert sites.gradient_of_worst_case(row[None])[0].tolist() == pytest.approx(differences.tolist(), abs=1e-8)


@pytest.mark.slow
def test_robust_regression_is_not_convex_at_the_start_and_convex_where_descent_ends():
    sites = Sites(*robust_regression(FULL))
    _, end = theory.descent_of(sites, 6)
    assert torch.linalg.eigvalsh(_curvature_of_worst_case(sites, torch.zeros(6, dtype=torch.float64))).min() < -0.01
    assert torch.linalg.eigvalsh(_curvature_of_worst_case(sites, end[0])).min() > 0.01
    assert float(sites.gradient_of_worst_case(end).norm()) < 1e-9


def test_compressors_of_the_check_guarantee_a_delta():
    """The theorems assume one. Compressors added to the library later need not join."""
    assert all(compressor.delta(DIM) is not None for compressor in theory.COMPRESSORS.values())


@pytest.mark.slow
def test_gaps_are_those_of_the_time_averages_of_separate_runs():
    saddle, compressor, rounds = known_saddle(fm.Sampling(batch=4)), fm.compressors.Quantize(bits=4), (40, 90)
    found = theory.gaps(saddle, compressor, fm.topologies.Hypercube(), (0.5, 0.2), rounds)
    for k, T in enumerate(rounds):
        algorithm = fm.ADGDA(fm.schedules.Theorem1(T), fm.schedules.Theorem1(T), 0.2, compressor, saddle.regularizer)
        result = fm.train(saddle.problem, fm.topologies.Hypercube(), algorithm, T, seeds=range(2), dtype="float64")
        sites = saddle.sites()
        alone = sites.worst_case(result.row("time-average")).mean() - sites.worst_case(saddle.model[None])[0]
        assert float(found[1, k]) == pytest.approx(float(alone), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "4-bit quantization", "top 10 %", "sign"])
def test_convex_gap_falls_as_theorem_1_says_over_a_decade(name):
    (line, *_) = theory.convex_lines(name, fm.topologies.Hypercube(), (100, 316, 1000))
    assert line["holds"]
    assert line["slope"] <= theory.REQUIRED_SLOPE
    assert all(b < a for a, b in pairwise(line["gap"]))
    assert min(line["gap"]) > 0


@pytest.mark.slow
def test_convex_gap_falls_more_slowly_without_gossip():
    saddle = known_saddle(fm.Sampling(batch=4))
    rounds = (100, 316, 1000)
    (alone,) = theory.gaps(saddle, fm.compressors.Identity(), fm.topologies.Hypercube(), (1e-9,), rounds).tolist()
    assert theory.slope(rounds, alone) > -0.3


@pytest.mark.slow
def test_convex_lines_do_not_choose_a_consensus_step_that_diverges():
    (line,) = theory.convex_lines("random 25 %", fm.topologies.Hypercube(), (100, 1000))
    assert line["mean_of_gammas"][0] is None
    assert line["gamma"] < 1
    assert line["mean_of_gammas"][line["gammas_tried"].index(line["gamma"])] == min(
        mean for mean in line["mean_of_gammas"] if mean is not None
    )


@pytest.mark.slow
def test_non_convex_lines_average_over_all_rounds_and_stay_below_the_bound():
    line, own, bound = theory.non_convex_lines("none", fm.topologies.Hypercube(), (250, 500))
    problem, regularizer = robust_regression(FULL)
    sites, (L, kappa) = Sites(problem, regularizer), (own["settings"]["L"], own["settings"]["kappa"])
    assert kappa == pytest.approx(L / (2 * NODES * regularizer.strength))
    algorithm = fm.ADGDA(
        fm.schedules.Theorem2Primal(L, kappa, 250),
        fm.schedules.Theorem2Dual(L, 250),
        own["gamma"],
        fm.compressors.Identity(),
        regularizer,
    )
    states = theory._states(problem, fm.topologies.Hypercube(), [algorithm], 249, 1)
    squares = [float(sites.gradient_of_worst_case(s.algorithm.models.mean(dim=-2)).square().sum()) for _, s in states]
    assert len(squares) == 250
    assert own["squared_gradient"][0] == pytest.approx(np.mean(squares), rel=1e-9)
    assert line["required"] is None
    assert line["squared_gradient"][1] < own["squared_gradient"][1]  # longer steps have come further
    assert bound["holds"]
    assert bound["measured"] == own["squared_gradient"][-1]


@pytest.mark.slow
def test_bound_lines_exceed_the_consensus_errors_which_vanish_for_duals_on_a_complete_graph():
    models, duals, gap = theory.bound_lines("4-bit quantization", fm.Ring(), 100)
    for line in (models, duals, gap):
        assert 0 < line["measured"] < line["bound"]
    assert duals["bound_over_measured"] < 1e4 < models["bound_over_measured"]
    (_, duals, _) = theory.bound_lines("none", fm.topologies.Complete(), 100)
    assert duals["measured"] < 1e-25
    assert duals["bound_over_measured"] is None


def test_record_covers_every_compressor_on_both_graphs_over_two_decades(recorded):
    places = [(line["compressor"], line["topology"]) for line in recorded if line["check"] == "convex"]
    assert sorted(places) == sorted((name, g) for name in theory.COMPRESSORS for g in ("complete", "hypercube"))
    for line in recorded:
        if "slope" in line:
            assert max(line["rounds"]) == 100 * min(line["rounds"])
    required = [line for line in recorded if line.get("required") is not None]
    assert {line["check"] for line in required} == {"convex", "non-convex"}
    assert all(line["required"] == -0.45 for line in required)


def test_record_follows_from_its_numbers(recorded):
    for line in recorded:
        if "slope" in line:
            values = np.array(line.get("gap") or line["squared_gradient"])
            fitted = np.polyfit(np.log(line["rounds"]), np.log(values), 1)[0]
            assert line["slope"] == pytest.approx(fitted, abs=2e-5)
            assert line["holds"] == (None if line["required"] is None else bool(fitted <= line["required"]))
        else:
            assert line["bound_over_measured"] == pytest.approx(line["bound"] / line["measured"], rel=1e-5)
            assert line["holds"] == (line["measured"] <= line["bound"])
        assert line["holds"] is not False


def test_record_of_the_lemmas_bounds_follows_their_formulas(recorded):
    for line in recorded:
        if line["check"].startswith("consensus"):
            k = line["settings"]
            scale, norm = (k["c"], k["gradient"]) if "models" in line["check"] else (k["rho"], k["dual_gradient"])
            factor = 12 if "models" in line["check"] else 4
            assert line["bound"] == pytest.approx(factor / line["rounds"] * k["nodes"] * (norm / scale) ** 2, rel=1e-4)
            assert k["c"] == pytest.approx(k["rho"] ** 2 * k["delta"] / 82, rel=1e-5)
            (mixing,) = {"hypercube": fm.topologies.Hypercube(), "ring": fm.Ring()}[line["topology"]].build(k["nodes"])
            assert line["gamma"] == pytest.approx(mixing.consensus_step_of_theorem(k["delta"]), rel=1e-5)


def test_record_has_no_function_less_smooth_than_the_steps_assume(recorded):
    (line,) = [line for line in recorded if line["check"] == "non-convex"]
    settings = line["settings"]
    assert settings["mu"] < settings["L_along_the_runs"] <= settings["L"]
    assert settings["kappa"] == pytest.approx(settings["L"] / settings["mu"], rel=1e-5)
    assert settings["longer_steps"] / (2 * settings["L"] * min(line["rounds"]) ** 0.5) <= (1 + 1e-4) / (
        2 * settings["L"]
    )  # the longest dual step is one that the proof allows


def test_theory_sentences_show_every_slope_and_mark_those_that_fall_short(recorded):
    text = theory.theory_sentences(recorded)
    for line in recorded:
        if line["check"] == "convex":
            assert f"| {line['gamma']:g} | {line['slope']:.3f} |" in text
    assert "(!)" not in text
    assert "(!)" in theory.theory_sentences([line | {"holds": False} for line in recorded])
