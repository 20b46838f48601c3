"""Which model a run hands out, by what its options and its algorithm say."""

from dataclasses import replace

import pytest
import torch

import fairmesh as fm
from fairmesh.comparisons.without_folds import without_fold
from fairmesh.personalization.personalize import usual_choice
from fairmesh.training.aside import trained_aside
from tests.refusals import refused

SHORT = fm.personalization.Choice(steps=2, local_steps=2)


def problem() -> fm.Problem:
    """Five sites; in the last two, which are small, the second column speaks for the other class."""
    generator = torch.Generator().manual_seed(0)

    def site(i: int) -> fm.Site:
        rows = 120 if i < 3 else 25
        x = torch.randn(rows + 20, 3, generator=generator)
        y = (x[:, 0] + (1.0 if i < 3 else -1.0) * x[:, 1] > 0).long()
        return fm.Site((x[:rows], y[:rows]), test=(x[rows:], y[rows:]), name=f"site {i}")

    return fm.Problem(lambda: torch.nn.Linear(3, 2), [site(i) for i in range(5)])


@pytest.mark.parametrize(
    ("algorithm", "compare", "choose", "decides", "has_twin"),
    [
        (None, None, None, True, "if robust"),
        (None, True, None, True, "if robust"),
        (None, None, True, True, "if robust"),
        (None, False, None, False, False),
        (None, False, True, True, False),
        (None, None, False, False, True),
        (None, False, False, False, False),
        (fm.TrackedADGDA(), None, None, False, False),
        (fm.TrackedADGDA(), True, None, False, True),
        (fm.TrackedADGDA(), None, True, True, False),
        (fm.TrackedADGDA(), True, True, True, "if robust"),
        (fm.algorithms.DSGD(), None, None, False, False),
    ],
)
@pytest.mark.quick_cases("all")
def test_run_decides_compares_and_personalizes_as_options_and_algorithm_say(
    algorithm, compare, choose, decides, has_twin, monkeypatch
):
    monkeypatch.setattr("fairmesh.personalization.personalize.Choice", lambda: SHORT)
    result = fm.train(problem(), None, algorithm, 5, compare_weights=compare, choose_weights=choose)
    assert (result.handed_out is not None) == decides
    assert bool(result.personal) == decides
    if decides:
        robust = result.handed_out.weights == "robust" and result.handed_out.compared
        assert (result.fixed is not None) == (robust if has_twin == "if robust" else has_twin)
        assert str(result.weights_verdict())
    else:
        assert (result.fixed is not None) == has_twin
        if algorithm:  # it returns its own model, whatever its weights brought
            assert type(result.replicas[0].algorithm) is type(algorithm)
    if not has_twin and not decides:
        with refused("compare_weights"):
            result.weights_verdict()
    assert isinstance(result.model_for("site 4"), torch.nn.Module)


@pytest.mark.parametrize("name", ["compare_weights", "choose_weights"])
def test_algorithm_without_weights_refuses_to_compare_or_choose_them(name):
    with refused(name, "weights of its own"):
        fm.train(problem(), None, fm.algorithms.DSGD(), 5, **{name: True})


def test_named_personalization_is_that_of_a_run_without_an_algorithm():
    way = fm.personalization.Mixture(steps=2, local_steps=2)
    result = fm.train(problem(), rounds=5, personalization=way)
    assert result.personal[0].method == "mixture"
    assert result.handed_out is not None
    assert all(site.unseen for site in result.personal[0].sites)  # by its reserved rows


def test_weights_near_the_prior_train_one_kind_of_models_without_folds_and_hand_out_fixed_ones(monkeypatch):
    asides: list[str] = []

    def counting(ready, around, name, what):
        asides.append(name)
        return trained_aside(ready, around, name, what)

    monkeypatch.setattr("fairmesh.personalization.personalize.Choice", lambda: SHORT)
    monkeypatch.setattr("fairmesh.training.selection.near_prior", lambda result: True)
    monkeypatch.setattr("fairmesh.training.selection.trained_aside", counting)
    result = fm.train(problem(), rounds=5)
    verdict = result.weights_verdict()
    assert (asides, result.handed_out.weights, result.fixed) == (["robust"], "fixed", None)
    assert result.handed_out.why in str(verdict)
    assert (verdict.sites, verdict.warning, verdict.as_json()["sites"]) == ((), None, {})


def test_weights_are_fixed_where_no_site_has_rows_to_hold_out(monkeypatch):
    """Every site has one unit, so that no fold can be left out. Training rows decide nothing."""
    monkeypatch.setattr("fairmesh.personalization.personalize.Choice", lambda: SHORT)
    monkeypatch.setattr("fairmesh.training.selection.near_prior", lambda result: False)
    sites = [replace(site, test=None, units=["one"] * len(site.train[1])) for site in problem().sites]
    result = fm.train(fm.Problem(lambda: torch.nn.Linear(3, 2), sites), rounds=5)
    assert result.handed_out.weights == "fixed"
    assert "no site has rows to hold out" in result.handed_out.why
    assert not result.handed_out.compared


def test_default_run_with_a_streamed_site_decides_nothing_and_trains():
    sites = problem().sites
    streamed = fm.data.Streamed(torch.utils.data.TensorDataset(*sites[0].train))
    mixed = [replace(sites[0], train=streamed), *sites[1:]]
    result = fm.train(fm.Problem(lambda: torch.nn.Linear(3, 2), mixed), rounds=3, compare_weights=False)
    assert (result.handed_out, result.personal) == (None, [])
    with refused("choose_weights", "memory"):
        fm.train(fm.Problem(lambda: torch.nn.Linear(3, 2), mixed), rounds=3, choose_weights=True)


def test_sweep_refuses_to_choose_weights_if_it_is_asked_to():
    several = [fm.TrackedADGDA(), fm.TrackedADGDA(beta1=0.8)]
    assert fm.train(problem(), None, several, 2).handed_out is None
    with refused("choose_weights", "sweep"):
        fm.train(problem(), None, several, 2, choose_weights=True)


def test_trial_of_few_rounds_takes_few_steps_to_choose():
    short, long = (usual_choice(problem().prepared, rounds) for rounds in (3, 600))
    assert short == fm.personalization.Choice(steps=3, local_steps=3)
    assert long == fm.personalization.Choice()


def test_sites_do_not_choose_among_large_models_unless_they_are_asked_to(monkeypatch):
    monkeypatch.setattr("fairmesh.personalization.personalize._CHOSEN_BY_DEFAULT", 7)  # the model has 8 parameters
    told: list[str] = []
    result = fm.train(problem(), rounds=1, measure_every=1, announce=told.append)
    assert not result.personal
    assert any('name = "choice"' in text for text in told)


def test_processes_with_different_sites_train_models_without_folds_with_one_prior():
    whole = problem().prepared
    parts = [whole, whole.keeping([0, 1]), whole.keeping([2, 3, 4])]
    priors = [without_fold(part, 0, 5).prior_of_sites for part in parts]
    assert all(torch.equal(prior, whole.prior_of_sites) for prior in priors)
