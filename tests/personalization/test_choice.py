"""The choice of a model for each site, with a prior from all sites: on problems whose answers are known."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, mse_loss

import fairmesh as fm
from fairmesh.personalization.candidates import Grouped, calibrated
from fairmesh.personalization.personalize import personalized
from fairmesh.personalization.pooled_prior import CommonLosses, SomeSites, evidence, learned_prior, responsibilities
from reproduction.choice import FEATURES, common_models, problem_of, sites_of

QUICK = fm.personalization.Choice(steps=80, local_steps=120)


def chosen(sites, numbers=True, rounds=120, folds=True) -> fm.personalization.Personalized:
    problem = problem_of(sites if folds else fm.data.reserve(sites), numbers).prepared
    common, without = common_models(problem, rounds, QUICK.folds if folds else 0)
    return personalized(problem, common, QUICK, seed=0, without_folds=without)


def losses(found, model) -> torch.Tensor:
    return torch.tensor(found.values(model, "loss"), dtype=torch.float64)


@pytest.mark.parametrize("numbers", [True, False], ids=["numbers", "labels"])
def test_alike_sites_of_2_to_500_rows_get_what_the_common_model_gives(numbers):
    found = chosen(sites_of((500, 200, 80, 30, 12, 6, 4, 2), spread=0.0, numbers=numbers), numbers)
    common, own = losses(found, "common"), losses(found, "personal")
    assert own.mean() <= 1.05 * common.mean()
    assert bool((own <= 1.2 * common).all())


@pytest.mark.parametrize("numbers", [True, False], ids=["numbers", "labels"])
def test_contradicting_sites_keep_nine_tenths_of_what_their_own_model_gains(numbers):
    found = chosen(sites_of((300, 300, 300, 300, 200, 120), 0.0, numbers, contradicting=2), numbers)
    common, alone, own = (losses(found, model)[-2:] for model in ("common", "local", "personal"))
    assert bool((alone < 0.8 * common).all())  # or there is nothing to keep
    assert bool((common - own >= 0.9 * (common - alone)).all())


def test_tiny_sites_learn_from_the_others_that_sites_differ():
    """Sites of 8 rows cannot tell by themselves that their truths differ from the common one. All of them together can,
    and what is between the common model and their own is best."""
    found = chosen(sites_of((8,) * 40, spread=1.0, seed=1))
    common, alone, own = (losses(found, model).mean() for model in ("common", "local", "personal"))
    assert own < 0.9 * common
    assert own < 0.9 * alone
    assert {site.uses for site in found.sites} != {"common"}


def test_sites_of_all_kinds_are_nowhere_much_worse_than_the_better_of_common_and_own():
    sites = [*sites_of((2000, 200, 20, 5), 0.0), *sites_of((200, 60, 20, 8), 0.5)]
    sites = [fm.Site(site.train, test=site.test, name=f"{k}: {site.name}") for k, site in enumerate(sites)]
    found = chosen(sites)
    better = torch.minimum(losses(found, "common"), losses(found, "local"))
    assert bool((losses(found, "personal") <= 1.15 * better).all())


def test_site_of_a_single_row_keeps_the_common_model_and_says_why():
    found = chosen(sites_of((60, 60, 1), 0.0))
    last = found.sites[-1]
    assert (last.weights, last.uses) == ({"common": 1.0}, "common")
    assert "1 row is too few" in last.note


def test_sites_with_reserved_rows_choose_without_models_of_folds():
    found = chosen(sites_of((120, 120, 120, 6), 0.0, contradicting=0), folds=False)
    assert [site.unseen for site in found.sites] == [True, True, True, False]
    assert losses(found, "personal").mean() <= 1.05 * losses(found, "common").mean()


def test_module_answers_what_was_measured_also_with_recalibrated_models(tmp_path):
    sites = [
        fm.Site((x, y + 1.5 * (-1) ** i), test=(site.test[0], site.test[1] + 1.5 * (-1) ** i))
        for i, site in enumerate(sites_of((6,) * 20, spread=0.0, seed=3))
        for x, y in (site.train,)
    ]
    found = chosen(sites)
    assert any(site.calibrations for site in found.sites)
    for site, data in zip(found.sites, sites):
        model = site.module(torch.nn.Linear(FEATURES, 1))
        loss = float(mse_loss(model(data.test[0]), data.test[1]).detach())
        assert loss == pytest.approx(site.test["personal"]["loss"], rel=1e-4)


def test_one_site_with_much_larger_numbers_takes_the_choice_from_no_other():
    """Sites add up logarithms of their losses. With their losses, those of one site were the noise of all."""
    generator = torch.Generator().manual_seed(0)

    def site(shift, size=1.0):
        x = torch.randn(320, FEATURES, generator=generator)
        y = size * (x.sum(dim=1, keepdim=True) + shift + 0.1 * torch.randn(len(x), 1, generator=generator))
        return fm.Site((x[:20], y[:20]), test=(x[20:], y[20:]))

    shifts = [3.0 * (-1) ** i * (1 + i / 4) for i in range(8)]
    usual = [site(shift) for shift in shifts]
    alone, among = chosen(usual), chosen([*usual, site(0.0, size=30.0)])
    assert losses(alone, "personal").mean() < 0.1 * losses(alone, "common").mean()
    assert losses(among, "personal")[:8].mean() < 0.1 * losses(among, "common")[:8].mean()


# The prior.


@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(1, 12))
def test_prior_and_probabilities_lie_on_the_simplex(seed, candidates, sites):
    found = torch.randn(sites, candidates, generator=torch.Generator().manual_seed(seed)).double() * 10
    prior = learned_prior(found)
    made = responsibilities(found, prior)
    for rows in (prior[None], made):
        assert bool((rows >= 0).all())
        assert torch.allclose(rows.sum(dim=-1), torch.ones(len(rows)).double())


def test_prior_raises_the_likelihood_of_all_sites_over_an_even_one():
    found = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).double()
    prior, even = learned_prior(found), torch.full((4,), 0.25).double()
    likelihood = lambda p: float((found + p.log()).logsumexp(dim=-1).sum() + 2 * p[0].log())  # noqa: E731
    assert likelihood(prior) > likelihood(even)


def test_prior_of_sites_in_two_places_is_that_of_all_in_one():
    found = torch.randn(9, 4, generator=torch.Generator().manual_seed(2)).double()
    parts = found[:4], found[4:]
    steps: list[torch.Tensor] = []

    def with_others(total, wrong):  # what the second place adds, given the prior of the step
        prior = torch.full((4,), 0.25).double() if not steps else steps[-1]
        whole = total + responsibilities(parts[1], prior).sum(dim=0)
        before = torch.tensor([2.0, 0, 0, 0]).double() + whole
        steps.append(before / before.sum())
        return whole

    assert torch.allclose(learned_prior(parts[0], with_others), learned_prior(found), atol=1e-12)


def test_site_without_finite_losses_has_the_common_model():
    totals = torch.tensor([[math.nan, math.inf, math.nan], [1.0, 2.0, 3.0]]).double()
    found = evidence(totals, torch.tensor([5.0, 5.0]).double(), 1.0, labels=True)
    made = responsibilities(found, learned_prior(found))
    assert made[0].tolist() == [1.0, 0.0, 0.0]


def test_seen_rows_count_less_the_better_the_common_model_knows_them():
    fair, known = CommonLosses(10.0, 10.0, 40.0, 40.0), CommonLosses(10.0, 10.0, 4.0, 40.0)
    assert fair.weight_of_seen == pytest.approx(0.25)
    assert known.weight_of_seen == pytest.approx(0.25 * 0.01)
    assert CommonLosses(0.0, 0.0, 4.0, 40.0).weight_of_seen == 1.0  # no others are there


@pytest.mark.parametrize(
    ("logarithms", "count", "told"),
    [(-59.0, 3.0, ""), (61.0, 3.0, "logarithms"), (math.nan, 3.0, "log"), (0.0, 4.0, "sites")],
)
@pytest.mark.quick_cases("all")
def test_sums_of_logarithms_that_three_sites_cannot_have_are_named(logarithms, count, told):
    total = torch.tensor([1.0, 1.0, 1.0, 1.0, logarithms, count]).double()
    found = CommonLosses.wrong(total, SomeSites(3, 100, 100))
    assert told in found
    assert bool(found) == bool(told)


# Recalibrated outputs.


def test_shift_of_numbers_is_the_penalised_mean_of_what_is_left():
    outputs, targets = torch.zeros(6, 1), torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0, 5.0])[:, None]
    rows = Grouped(outputs, targets, torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    shift = calibrated(rows, mse_loss, labels=False, strength=2.0, scaled=False).shift.flatten()
    assert shift.tolist() == pytest.approx([2 * 6 / (2 * 3 + 2), 2 * 15 / (2 * 3 + 2)], rel=1e-3)


def test_labels_that_are_noise_make_logits_smaller():
    generator = torch.Generator().manual_seed(0)
    outputs, labels = 6.0 * torch.randn(200, 3, generator=generator), torch.randint(3, (200,), generator=generator)
    rows = Grouped(outputs, labels, torch.zeros(200, dtype=torch.int64), 1)
    found = calibrated(rows, cross_entropy, labels=True, strength=1.0, scaled=True)
    before, after = (float(cross_entropy(made, labels)) for made in (outputs, found.of(outputs, rows.group)))
    assert float(found.scale) < 0.3
    assert after < 0.5 * before


def test_group_of_no_rows_and_losses_that_are_not_finite_change_nothing():
    outputs, targets = torch.tensor([[math.inf], [0.0]]), torch.tensor([[1.0], [1.0]])
    found = calibrated(Grouped(outputs, targets, torch.tensor([0, 2]), 3), mse_loss, False, 1.0, scaled=True)
    assert found.scale[:2].tolist() == [1.0, 1.0]
    assert found.shift[:2].flatten().tolist() == [0.0, 0.0]
