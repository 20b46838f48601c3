"""A corrupted site: its training labels or inputs are random, and all other data are unchanged."""

import pytest
import torch

import fairmesh as fm
from tests import toys
from tests.data.test_sources import write_mnist
from tests.refusals import refused

PLAIN = fm.data.ImportedData("tests.toys:sites", {"n": 5, "sizes": [400] * 5})


def vectors() -> list[fm.Site]:
    return [fm.Site((torch.randn(4, 2), torch.randn(4)))] * 2


def several_labels() -> list[fm.Site]:
    return [fm.Site((torch.randn(4, 2), torch.ones(4, 3, dtype=torch.long)))] * 2


@pytest.mark.parametrize("how", ["labels", "inputs"])
def test_corrupted_draws_only_what_is_named_of_the_named_sites(how):
    plain, made, again = PLAIN.sites(), *(fm.data.Corrupted(PLAIN, (3, 1), how).sites() for _ in range(2))
    for i, (was, site, same) in enumerate(zip(plain, made, again)):
        inputs, targets = (torch.equal(a, b) for a, b in zip(was.train, site.train))
        assert (inputs, targets) == (not (i in (1, 3) and how == "inputs"), not (i in (1, 3) and how == "labels"))
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(site.train, same.train))
        assert [part.dtype for part in site.train] == [part.dtype for part in was.train]
        assert all(torch.equal(a, b) for a, b in zip(was.test, site.test))
        assert site.group == ("corrupted" if i in (1, 3) else was.group)
    part = ("inputs", "labels").index(how)
    assert not torch.equal(made[1].train[part], made[3].train[part])  # each has draws of its own
    assert not torch.equal(made[1].train[part], fm.data.Corrupted(PLAIN, (1,), how, seed=1).sites()[1].train[part])
    assert torch.equal(made[1].train[part], fm.data.Corrupted(PLAIN, (1,), how).sites()[1].train[part])


def test_corrupted_labels_are_uniform_over_all_classes(tmp_path):
    write_mnist(tmp_path, train=2000)
    plain = fm.data.MNIST(fm.data.OneClass(10), folder=str(tmp_path))
    was, site = plain.sites()[4], fm.data.Corrupted(plain, (4,)).sites()[4]
    assert was.train[1].unique().tolist() == [4]
    counts = site.train[1].bincount(minlength=10)
    assert len(counts) == 10  # also of the classes that the site itself has none of
    share = counts / counts.sum()
    assert (share - 0.1).abs().max() < 5 * (0.09 / float(counts.sum())) ** 0.5


def test_corrupted_inputs_have_the_range_and_the_kind_of_the_true_ones(tmp_path):
    write_mnist(tmp_path, train=200)
    plain = fm.data.MNIST(fm.data.OneClass(10), folder=str(tmp_path))
    for data in (plain, PLAIN):
        (was, _), (noise, _) = data.sites()[2].train, fm.data.Corrupted(data, (2,), "inputs").sites()[2].train
        assert (noise.shape, noise.dtype) == (was.shape, was.dtype)
        assert was.min() <= noise.min() < noise.max() <= was.max()
        middle = (float(was.min()) + float(was.max())) / 2
        assert float(noise.double().mean()) == pytest.approx(middle, abs=0.05 * float(was.max() - was.min()))


def test_corrupted_sites_are_a_group_in_the_records():
    problem = toys.problem(sites=fm.data.Corrupted(PLAIN, (2,)).sites())
    (record,) = fm.train(problem, fm.Ring(), toys.ALGORITHMS["ad-gda"], 2, measure_every=2).final
    assert record["accuracy"]["groups"]["corrupted"] == pytest.approx(record["accuracy"]["sites"][2])
    assert set(record["accuracy"]["groups"]) == {"corrupted", "odd", "even"}


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"corrupted": ()}, ["corrupted", "[]"]),
        ({"corrupted": (1, 1)}, ["corrupted", "[1, 1]"]),
        ({"corrupted": (-1,)}, ["corrupted", "[-1]"]),
        ({"corrupted": (0, 5)}, ["corrupted", "site 5"]),
        ({"seed": -1}, ["seed", ">= 0", -1]),
    ],
)
def test_corrupted_refuses_sites_that_are_not_there_or_named_twice(settings, names):
    with refused(*names):
        fm.data.Corrupted(PLAIN, **settings).sites()


@pytest.mark.parametrize("name", ["vectors", "several_labels"])
def test_corrupted_refuses_targets_that_are_not_classes(name):
    data = fm.data.ImportedData(f"tests.data.test_corrupted:{name}")
    with refused("site 0", 'how = "inputs"'):
        fm.data.Corrupted(data).sites()
    assert len(fm.data.Corrupted(data, how="inputs").sites()) == 2
