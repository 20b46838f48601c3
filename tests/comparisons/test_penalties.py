"""Penalties on a model's size that held-out rows support: of a site alone, and of the default."""

import json
from dataclasses import replace

import pytest
import torch

import fairmesh as fm
from fairmesh.comparisons import penalties
from fairmesh.comparisons.alone import AloneRun, regularised
from fairmesh.errors import Interrupted
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.personalization.cross_fit import CrossFit
from fairmesh.problems.oracle import Oracle
from fairmesh.training.options import Options
from tests import toys
from tests.comparisons.test_alone import _Stop, _watched

pytestmark = [pytest.mark.recorded, pytest.mark.filterwarnings("ignore:clearly worse")]


def _site(noise: float, rows: int = 25, columns: int = 12, seed: int = 0) -> fm.Site:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows + 300, columns, generator=generator)
    y = 2.0 + x[:, :3].sum(dim=1, keepdim=True) + noise * torch.randn(rows + 300, 1, generator=generator)
    return fm.Site((x[:rows], y[:rows]), test=(x[rows:], y[rows:]))


def _problem(*sites: fm.Site, **settings) -> fm.Problem:
    columns = sites[0].train[0].shape[1]
    return fm.Problem(torch.nn.Linear(columns, 1), list(sites), loss=fm.losses.SquaredError(), **settings)


def _fit(problem) -> tuple[CrossFit, torch.Tensor]:
    prepared = problem.prepared
    fit = CrossFit(prepared, range(prepared.n), 5, 0, torch.device("cpu"), torch.float32)
    return fit, prepared.initial_row(0).float().expand(prepared.n, -1)


def _ridge(site: fm.Site) -> float:
    """Returns the test error of ridge regression with the penalty that test rows like best."""
    (x, y), (test, targets) = site.train, site.test
    mean, errors = x.mean(dim=0), []
    for penalty in torch.logspace(-2, 3, 11):
        inner = (x - mean).T @ (x - mean) + penalty * torch.eye(x.shape[1])
        rule = torch.linalg.solve(inner, (x - mean).T @ (y - y.mean()))
        errors.append(float(((test - mean) @ rule + y.mean() - targets).square().mean()))
    return min(errors)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("noise", "rows", "columns"), [(2.0, 25, 12), (3.0, 20, 30), (0.1, 60, 5)])
def test_site_alone_is_about_as_good_as_ridge_regression_with_the_best_penalty(noise, rows, columns):
    sites = [_site(noise, rows, columns, seed) for seed in range(4)]
    problem = _problem(*sites)
    fit, start = _fit(problem)
    models = regularised(fit, start, 200).models[:, -1]
    prepared = problem.prepared
    errors = [
        float(prepared.loss(prepared.flat_model(row, site.test[0]), site.test[1])) for row, site in zip(models, sites)
    ]
    assert sum(errors) < 1.15 * sum(map(_ridge, sites))


def test_penalty_is_found_where_held_out_rows_support_it_and_is_none_elsewhere():
    fit, start = _fit(_problem(_site(8.0, seed=1), _site(0.0)))
    noisy, clean = fit.least_penalties(fit.same(start), 200, 0.7, penalties.PENALTIES).tolist()
    assert noisy >= 1.0
    assert clean <= 0.1


def test_penalties_that_are_not_finite_are_not_chosen():
    fit, start = _fit(_problem(_site(1.0)))
    ended = fit.penalised(fit.same(start), 5, 0.7, (0.0, 1.0))
    ended.losses[0] = torch.nan
    fit.penalised = lambda *_: ended
    assert fit.least_penalties(fit.same(start), 5, 0.7, (0.0, 1.0)).tolist() == [1.0]


def test_validated_decay_adds_each_sites_share_of_the_weights_but_not_of_biases():
    sites = [_site(1.0, rows=20), _site(1.0, rows=60, seed=1)]
    names = ["node 0", "node 1"]
    decayed = fm.Objective(validated_decay=True, penalties={"node 0": 4.0, "node 1": 0.0})
    gradients, models = [], torch.ones(1, 2, 13)
    for objective in (decayed, fm.Objective()):
        problem = _problem(*sites, objective=objective).prepared
        assert [str(site.name) for site in problem.sites] == names
        oracle = Oracle(problem, torch.arange(2), torch.arange(2), seeds=[0])
        gradients.append(oracle.losses_and_gradients(models, torch.tensor(0), 0)[1])
    added = (gradients[0] - gradients[1])[0]
    assert added[0, :12].tolist() == pytest.approx([4.0 / 80] * 12, rel=1e-4)
    assert added[0, 12] == 0
    assert not added[1].any()


def test_default_finds_its_decay_and_the_summary_tells_it(tmp_path):
    torch.manual_seed(0)
    problem = _problem(_site(5.0, 20), _site(5.0, 20, seed=1), _site(3.0, 9, seed=2))
    result = fm.train(problem, rounds=60, measure_every=60, out=tmp_path / "run")
    found = result.problem.objective.penalties
    assert any(found.values())
    assert list(found) == ["node 0", "node 1", "node 2"]
    assert found["node 2"] == 0  # too few rows to hold any out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["penalties"] == [found]


def test_run_that_names_its_algorithm_or_its_decay_has_no_other():
    problem = _problem(_site(3.0, 12), _site(3.0, 12, seed=1))
    named = fm.train(problem, None, fm.TrackedADGDA(), 2, measure_every=2)
    decayed = fm.train(replace(problem, weight_decay=0.01), rounds=2, measure_every=2)
    for result in (named, decayed):
        assert not result.problem.objective.validated_decay
        assert result.problem.objective.penalties is None


def test_search_for_the_decay_that_was_stopped_continues_there(tmp_path, monkeypatch):
    problem = replace(_problem(_site(3.0, 12), _site(3.0, 12, seed=1)), objective=fm.Objective(validated_decay=True))

    def run(**options) -> fm.Result:
        return fm.train(problem, fm.Ring(), fm.TrackedADGDA(), 20, measure_every=20, **options)

    whole = run()
    _watched(monkeypatch, _Stop(after=13))
    with pytest.raises(Interrupted):
        run(out=tmp_path / "run")
    _watched(monkeypatch, again := _Stop())
    continued = run(out=tmp_path / "run", resume=True)
    assert again.seen[0] == 13
    assert continued.problem.objective == whole.problem.objective
    assert torch.equal(continued.row(), whole.row())


def test_large_models_have_no_penalty(monkeypatch):
    problem = toys.problem()
    monkeypatch.setattr(penalties, "_LARGEST_MODEL", problem.flat_model.dim - 1)
    run = AloneRun(fm.Ring(), 5, 0, Options(), MemoryNetwork(fm.Ring().build(problem.n)))
    assert not penalties.validated_penalties(problem, range(problem.n), run, "name", {}).any()


def test_site_finds_the_penalty_alone_that_it_finds_next_to_others():
    problem = _problem(*(_site(3.0, 10 + 5 * k, seed=k) for k in range(4))).prepared
    run = AloneRun(fm.Ring(), 30, 0, Options(), MemoryNetwork(fm.Ring().build(4)))
    together = penalties.validated_penalties(problem, range(4), run, "name", {}).tolist()
    assert len(set(together)) > 1
    for i in range(4):
        here = problem.keeping([i])  # as at a node, which knows only the sizes of the other sites
        assert penalties.validated_penalties(here, [i], run, "name", {}).tolist() == [together[i]]


def test_rows_of_one_unit_count_once_where_penalties_are_compared():
    single = _site(2.0, rows=20)
    x, y = (part.repeat_interleave(10, dim=0) for part in single.train)
    repeated = fm.Site((x, y), units=torch.arange(20).repeat_interleave(10))
    fit, _ = _fit(_problem(replace(single, test=None), repeated))
    deviations = torch.randn(20, generator=torch.Generator().manual_seed(0)).double()
    of_sites = fit._error(torch.cat([deviations, deviations.repeat_interleave(10)]))
    assert of_sites[0] == pytest.approx(float(of_sites[1]))
    assert (fit.sizes * fit.independent).tolist() == [20, 20]
    losses = torch.rand(2, 220, generator=torch.Generator().manual_seed(1)).double()
    losses[:, 20:] = losses[:, :20].repeat_interleave(10, dim=1)
    models = torch.stack([torch.zeros(2, 6, 13), torch.ones(2, 6, 13)])
    fit.penalised = lambda *_: type("Ended", (), {"models": models, "losses": losses})()
    averaged = fit.regularised(torch.zeros(2, 6, 13), 5, 0.7).models
    assert averaged[0, 0, 0] == pytest.approx(float(averaged[1, 0, 0]))
