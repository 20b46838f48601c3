"""Sites' own models next to others on held-out rows: Student's interval by unit, and unclear below 1 % of the loss."""

import math

import pytest
import torch
from scipy.stats import t

from fairmesh.comparisons.held_out_evidence import held_out_evidence
from fairmesh.personalization.evidence import compared_by_units


def table(name, ours, theirs, units=None):
    versus = compared_by_units(ours, {"common": theirs}, units)
    return {"name": name, "held_out_versus": versus}


def evidence(*sites):
    return held_out_evidence([{"sites": list(sites)}])


def losses(count, seed):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_interval_is_student_s_over_rows():
    ours, theirs = losses(12, 0), 1.0 + losses(12, 1)
    found = evidence(table("a", ours, theirs))["sites"][0]["versus"]["common"]
    differences = ours - theirs
    half = t.ppf(1 - (1 - found["level"]) / 2, 11) * float(differences.std()) / math.sqrt(12)
    mean = float(differences.mean())
    assert found["interval"] == pytest.approx([mean - half, mean + half])
    assert found["verdict"] == "better"


def test_rows_of_a_unit_that_repeat_each_other_say_no_more_than_one_of_them():
    ours, theirs = losses(9, 2), 0.2 + losses(9, 3)
    single = compared_by_units(ours, {"common": theirs}, None)["common"]
    units = torch.arange(9).repeat(4)
    repeated = compared_by_units(ours.repeat(4), {"common": theirs.repeat(4)}, units)["common"]
    assert repeated == pytest.approx(single)
    apart = compared_by_units(ours.repeat(4), {"common": theirs.repeat(4)}, None)["common"]
    assert apart["error"] < 0.6 * single["error"]


def test_difference_below_a_hundredth_of_the_loss_is_unclear_whatever_its_interval():
    theirs = 1.0 + losses(200, 4)
    for gain, verdict in ((0.001, "unclear"), (0.1, "better"), (-0.1, "worse")):
        found = evidence(table("a", theirs - gain, theirs), table("b", theirs - gain, theirs))
        assert {site["versus"]["common"]["verdict"] for site in found["sites"]} == {verdict}
        assert found["mean"]["versus"]["common"]["verdict"] == verdict


def test_one_unit_and_losses_that_are_not_finite_give_no_verdict():
    infinite = torch.tensor([1.0, math.inf, 1.0])
    found = evidence(
        table("one unit", losses(3, 5), 9.0 + losses(3, 6), torch.zeros(3, dtype=torch.int64)),
        table("infinite", losses(3, 7), infinite),
        {"name": "kept the common model"},
    )
    assert [site["versus"].get("common", {}).get("verdict") for site in found["sites"]] == ["unclear", "unclear", None]


def test_mean_over_sites_is_at_least_as_uncertain_as_the_sites_spread():
    alike = [table(f"s{k}", torch.full((2,), gain), torch.ones(2)) for k, gain in enumerate((0.1, 0.9, 1.3))]
    found = evidence(*alike)["mean"]["versus"]["common"]
    assert found["verdict"] == "unclear"  # though the two rows of each site agree
