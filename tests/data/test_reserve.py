"""Rows that sites keep out of the common training."""

import pytest
import torch

import fairmesh as fm
from tests.refusals import refused


def site(rows=50, classes=2, **sets):
    labels = torch.arange(rows) % classes
    return fm.Site((torch.arange(float(rows)).unsqueeze(-1), labels), **sets)


def identities(samples):
    return sorted(samples.inputs.flatten().tolist())


@pytest.mark.parametrize(("rows", "share", "away"), [(50, 0.1, 5), (50, 0.2, 10), (50, 0.5, 25), (10, 0.2, 2)])
def test_reserve_divides_the_training_rows(rows, share, away):
    (made,) = fm.data.reserve([site(rows)], share)
    assert len(made.reserved) == away
    assert sorted(identities(made.train) + identities(made.reserved)) == list(range(rows))


def test_reserve_keeps_the_proportions_of_the_classes():
    labels = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    (made,) = fm.data.reserve([fm.Site((torch.randn(100, 2), labels))], 0.2)
    assert torch.bincount(made.reserved.targets).tolist() == [12, 6, 2]


def test_reserve_takes_the_same_rows_wherever_the_site_is():
    first, second = fm.data.reserve([site(50), site(50)])
    (alone,) = fm.data.reserve([site(50)])
    assert identities(first.reserved) == identities(second.reserved) == identities(alone.reserved)


def test_reserve_knows_how_many_rows_another_process_reserves():
    here = fm.Problem(torch.nn.Linear(1, 2), [site(50), site(73)]).prepared
    there = here.keeping([0])
    taken = [fm.data.reserve(problem.sites) for problem in (here, there)]
    assert [len(one.train) for one in taken[0]] == [len(one.train) for one in taken[1]]


def test_reserve_leaves_small_sites_and_sites_with_rows_of_their_own():
    own, shared = site(12).train, site(12).train
    kept = [site(9), site(50, reserved=own), site(50, validation=own)]
    assert fm.data.reserve(kept) == kept
    made = fm.data.reserve([site(50, validation=shared), site(50, validation=shared)])
    assert [len(one.reserved) for one in made] == [10, 10]


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, float("nan")])
def test_reserve_refuses_a_share_outside_0_to_1(share):
    with refused("share", "(0, 1)", share):
        fm.data.reserve([site()], share)


def test_reserved_rows_must_fit_the_training_rows():
    with refused("reserved rows of site 0", "inputs"):
        fm.Problem(torch.nn.Linear(1, 2), [site(50, reserved=(torch.randn(5, 3), torch.zeros(5).long()))])
