"""The price of privacy before round 0: noise against signal, and how well anybody can guess who took part."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from fairmesh.errors import BadInput
from fairmesh.privacy import accounting
from fairmesh.privacy.price import Terms, averaged, price_of, risk_by_noise, risk_of, site_price

pytest.importorskip("dp_accounting")

TERMS = Terms(delta=1e-4, batch=50, releases=400, parameters=650)
BY_HAND = {143: (1e-3, 3.3, 1.0), 1_000: (1e-4, 0.67, 0.21), 5_000: (1e-4, 0.34, 0.11)}  # units: delta, site, of ten


@pytest.mark.parametrize("units", BY_HAND)
@pytest.mark.quick_cases("all")
def test_noise_is_that_of_rough_figures_less_what_a_tighter_accountant_saves(units):
    """The figures are those of Renyi accounting, which the test below has. Privacy loss distributions are tighter."""
    delta, at_site, of_ten = BY_HAND[units]
    terms = TERMS._replace(delta=delta)
    assert 0.88 * at_site < site_price(terms, 4.0, units).at_site < 0.95 * at_site
    assert averaged(terms, 4.0, [units] * 10) == pytest.approx(site_price(terms, 4.0, units).at_site / math.sqrt(10))
    assert 0.88 * of_ten < averaged(terms, 4.0, [units] * 10) < 0.96 * of_ten


@pytest.mark.parametrize("units", BY_HAND)
@pytest.mark.quick_cases(1)
def test_rough_figures_are_those_of_renyi_accounting(units):
    import dp_accounting
    from dp_accounting import rdp

    delta, at_site, _ = BY_HAND[units]
    noise = at_site * 50 / math.sqrt(650)
    event = dp_accounting.PoissonSampledDpEvent(50 / units, dp_accounting.GaussianDpEvent(noise))
    accountant = rdp.RdpAccountant(orders=np.linspace(2, 40, 77).tolist())
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 400))
    assert accountant.get_epsilon(delta) == pytest.approx(4.0, rel=0.03)


def test_losses_take_their_share_of_the_budget():
    plain, shared = (site_price(TERMS._replace(loss_share=share), 4.0, 500) for share in (0.0, 0.19))
    assert shared.noise == pytest.approx(plain.noise / 0.9)
    assert shared.at_site == pytest.approx(shared.noise * math.sqrt(650) / 50)


def test_average_of_unequal_sites_weighs_the_noise_of_each_by_its_prior():
    sizes, prior = [100, 300, 2_000], [0.5, 0.3, 0.2]
    noises = [site_price(TERMS, 2.0, size).at_site for size in sizes]
    for given, weights in ((prior, prior), (None, [size / 2_400 for size in sizes])):
        whole = math.sqrt(sum((weight * noise) ** 2 for weight, noise in zip(weights, noises)))
        assert averaged(TERMS, 2.0, sizes, given) == pytest.approx(whole)


def test_noise_of_sixty_sizes_is_interpolated_and_close():
    terms, sizes = TERMS._replace(releases=60), list(range(100, 1_300, 20))
    accounting._noise.cache_clear()
    found = averaged(terms, 4.0, sizes)
    assert accounting._noise.cache_info().misses <= 5
    exact = [site_price(terms, 4.0, size).at_site * size / sum(sizes) for size in sizes[::6] for _ in range(6)]
    assert found == pytest.approx(math.sqrt(sum(noise**2 for noise in exact)), rel=0.05)


def test_risk_of_epsilon_and_delta_is_the_best_test_between_two_that_are_as_different_as_allowed():
    """Of the mechanism with four outcomes that every (epsilon, delta) mechanism can be made from, by brute force."""
    epsilon, delta = 1.3, 0.05
    likely = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    took_part = np.array([delta, likely, 1 - delta - likely, 0.0])
    absent = took_part[::-1]
    assert risk_of(epsilon, delta).right == pytest.approx(np.maximum(took_part, absent).sum() / 2)
    alarms = np.array([0.0, *np.cumsum(absent)])
    assert risk_of(epsilon, delta).found == pytest.approx(np.interp(0.01, alarms, [0.0, *np.cumsum(took_part)]))
    assert risk_of(50.0, 1e-5).right == 1.0 == risk_of(50.0, 1e-5).found


def test_risk_by_noise_is_that_of_a_gaussian_where_all_units_are_drawn():
    terms = Terms(delta=1e-5, batch=100, releases=9, parameters=10)
    mu = 3 / site_price(terms, 2.0, 100).noise  # nine releases of all units
    risk = risk_by_noise(terms, 2.0, 100)
    assert norm.cdf(mu / 2) <= risk.right < norm.cdf(mu / 2) + 0.005
    found = norm.cdf(norm.ppf(0.01) + mu)
    assert found <= risk.found < 1.05 * found
    assert risk.right < risk_of(2.0, 1e-5).right - 0.1


@pytest.fixture(scope="module")
def price():
    terms = Terms(delta=1e-4, batch=50, releases=60, parameters=650, loss_share=0.1)
    return price_of(terms, 3.0, [143, 143, 600, 800], unit="unit")


def test_price_shows_the_asked_epsilon_among_usual_ones_and_three_sizes(price):
    assert [row.epsilon for row in price.rows] == [1.0, 2.0, 3.0, 4.0, 8.0]
    assert price.sizes == (143, 800)  # of the median, which is the smallest here, once
    head, *lines = price.table()
    assert [line[0] for line in lines] == ["1", "2", "3 (asked)", "4", "8"]
    assert {len(line) for line in lines} == {len(head)} == {6}
    for before, after in zip(price.rows, price.rows[1:]):
        assert before.sites[0].at_site > after.sites[0].at_site
        assert before.by_noise.right < after.by_noise.right <= after.promised.right
    assert price.as_json()["rows"][2]["sites"][0]["at_site"] == price.rows[2].sites[0].at_site


def test_small_sites_are_told_what_helps_in_numbers_of_their_own(price):
    advice = price.sentences()[-1]
    small, terms = price.rows[2].sites[0], price.terms
    for changed in (terms._replace(releases=30), terms._replace(parameters=65)):
        helped = site_price(changed, 3.0, 143).at_site
        assert helped < 0.8 * small.at_site
        assert f"{helped:.3g}" in advice
    assert "143 units" in advice
    large = price_of(Terms(1e-4, 1_000, 2, 650), 8.0, [1_000] * 4)
    assert not any("frozen features" in sentence for sentence in large.sentences())


def test_price_without_known_sizes_is_of_three_usual_ones_and_of_no_average():
    price = price_of(TERMS._replace(releases=3, batch=300), 4.0)
    assert price.sizes == (1_000, 5_000)  # one of 200 could not draw 300
    assert all(row.averaged is None for row in price.rows)
    with pytest.raises(BadInput, match=r"5,000.*9,000"):
        price_of(TERMS._replace(batch=9_000), 4.0)
