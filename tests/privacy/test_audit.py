"""The audit in short form, and its record: `python -m reproduction.privacy.audit` makes it."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from reproduction.privacy import audit
from reproduction.privacy.audit import DELTA, EPSILONS, RESULTS, SETTINGS, VARIANTS, audited, caught

TRIALS = 20_000
BY_NAME = {setting.name: setting for setting in SETTINGS}
OF_VARIANTS = {variant.name: variant for variant in VARIANTS}
QUICK = [
    ("gradients", 2.0),
    ("gradients and losses", 1.0),
    ("gradients and losses, unit of 20 rows, 3 rounds", 2.0),
    ("gradients, a fourth drawn", 1.0),
]
SLOW = [(name, epsilon) for name in BY_NAME for epsilon in EPSILONS if (name, epsilon) not in QUICK]


def _sees_releases(name: str) -> bool:
    return BY_NAME[name].sees != "model"


# What is proved


def test_lower_bound_of_two_normal_distributions_is_below_their_epsilon_and_near_it():
    """For a known mechanism: N(1, sigma) against N(0, sigma), of epsilon 1 at this delta."""
    generator = np.random.default_rng(0)
    shift = 1 / audit.noise_of(BY_NAME["gradients"], 1.0)
    inside, outside = generator.normal(shift, size=400_000), generator.normal(size=400_000)
    assert 0.85 <= audit.lower_bound(inside, outside, DELTA) <= 1.0
    assert 0.85 <= audit.gaussian_bound(inside, outside, DELTA) <= 1.0


@pytest.mark.parametrize("confidence", [0.8, 0.99])
def test_lower_bound_exceeds_the_true_epsilon_no_more_often_than_it_says(confidence):
    """Randomized response, whose epsilon is reached at its only threshold: the bound errs as often as it may."""
    generator, epsilon, wrong = np.random.default_rng(1), 1.0, 0
    right, times = math.exp(epsilon) / (1 + math.exp(epsilon)), 400
    for _ in range(times):
        inside, outside = generator.random(400) < right, generator.random(400) >= right
        wrong += audit.lower_bound(inside.astype(float), outside.astype(float), 0.0, confidence) > epsilon
    assert stats.binomtest(wrong, times, 1 - confidence, alternative="greater").pvalue > 1e-3


def test_lower_bound_of_equal_distributions_is_zero():
    generator = np.random.default_rng(2)
    assert audit.lower_bound(generator.normal(size=4000), generator.normal(size=4000), DELTA) == 0


# The mechanism


@pytest.mark.parametrize(("name", "epsilon"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
@pytest.mark.quick_cases("all")
def test_audit_proves_no_more_than_the_claim(name, epsilon):
    found = audited(BY_NAME[name], epsilon, TRIALS)
    assert found.bound <= epsilon
    if epsilon == 2 and BY_NAME[name].rate == 1 and _sees_releases(name):
        assert found.share > 0.55  # with so few trials; 60 % are in the record
        assert found.gaussian is not None
        assert 0.7 * epsilon < found.gaussian <= epsilon


@pytest.mark.parametrize("name", [name for name in OF_VARIANTS if "two samples" not in name])
@pytest.mark.quick_cases("all")
def test_audit_finds_out(name):
    for epsilon in EPSILONS[-1:]:
        found = caught(OF_VARIANTS[name], epsilon, TRIALS // 4)
        assert found.bound > epsilon >= found.right


@pytest.mark.parametrize(("epsilon", "noise"), [(1.0, 0.527), (2.0, 0.407)])
def test_gradient_and_loss_of_one_draw_spend_more_than_two_samples_would(epsilon, noise):
    """The noise, of both together, is the least for which two sampled events would spend no more than the claim."""
    setting = OF_VARIANTS["gradient and loss as from two samples"].setting
    apart = [setting.releases(part) for part in audit.shared_noise(noise, setting.loss_share)]
    assert 0.98 * epsilon <= audit.epsilon_of(apart, DELTA) <= epsilon
    assert audit.epsilon_of([setting.releases(noise)], DELTA) > 1.5 * epsilon


# The record


def _record(part: str) -> list[dict]:
    return json.loads(RESULTS.read_text())[part]


def test_record_proves_no_claim_wrong_and_is_tight_where_releases_are_seen():
    rows = _record("right")
    assert {(row["name"], row["epsilon"]) for row in rows} == {
        (name, epsilon) for name in BY_NAME for epsilon in EPSILONS
    }
    for row in [*rows, *_record("small delta")]:
        assert row["trials"] >= 20_000
        assert row["bound"] <= row["epsilon"]
        assert (row["gaussian"] or 0) <= row["epsilon"]
    for row in rows:
        assert row["share"] >= 0.6 or not _sees_releases(row["name"])


def test_record_has_every_broken_variant_caught():
    rows = _record("broken")
    assert {(row["name"], row["epsilon"]) for row in rows} == {(name, e) for name in OF_VARIANTS for e in EPSILONS}
    for row in rows:
        assert row["right"] <= row["epsilon"] < row["bound"]


def test_record_of_the_attack_on_rows_and_labels_finds_no_more_than_chance_at_epsilon_8():
    """Runs of one round spend all on it. Even then no rows are found; how often each label is in a batch is guessed a
    little better than by chance, which epsilon 8 does not rule out."""
    rows = {(row["attack"], row["epsilon"], row["batch"]): row for row in _record("reconstruction")}
    assert len(rows) == 8
    for (attack, epsilon, _), row in rows.items():
        for what in ("rows", "labels"):
            mean, half = row[f"{what} above chance"]
            if epsilon is None:
                assert mean > half
            elif what == "rows" or "one round" not in attack:
                assert mean <= half
            else:
                assert mean < 0.15


@pytest.mark.slow
def test_record_is_made_again_up_to_chance():
    """A change of the last digit of the noise draws other numbers."""
    (row,) = [row for row in _record("right") if (row["name"], row["epsilon"]) == ("gradients", 2.0)]
    assert audited(BY_NAME["gradients"], 2.0, row["trials"]).bound == pytest.approx(row["bound"], abs=0.1)
