"""Partitions: which samples each site gets, in which order, and which test samples it is measured on."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fairmesh as fm
from fairmesh.config.tables import from_table
from fairmesh.data.shifts import contrast_table, through_second_camera
from tests.refusals import refused

COUNTS = st.integers(1, 12)
SEEDS = st.integers(0, 1000)


def pool(train: int = 240, test: int = 120, classes: int = 4, sites: int = 0, seed: int = 0) -> fm.data.Pool:
    """Images whose first pixels are the sample's number; labels in no order."""
    generator = np.random.default_rng(seed)

    def made(count: int):
        labels = generator.permutation(np.arange(count) % classes)
        images = torch.zeros(count, 4, 4, dtype=torch.uint8)
        images[:, 0, 0], images[:, 0, 1] = torch.arange(count) // 256, torch.arange(count) % 256
        return images, torch.from_numpy(labels)

    if not sites:
        return fm.data.Pool(made(train), made(test))
    names = tuple(f"ward {k}" for k in range(sites))
    return fm.data.Pool(made(train), made(test), torch.arange(train) % sites, torch.arange(test) % sites, names)


def numbers(samples) -> list[int]:
    """Returns which samples of the pool these are."""
    return (samples[0][:, 0, 0].long() * 256 + samples[0][:, 0, 1]).tolist()


def held(sites: list[fm.Site]) -> list[int]:
    return [number for site in sites for number in numbers(site.train)]


PARTITIONS = {
    "one-class": st.builds(fm.data.OneClass, COUNTS),
    "dirichlet": st.builds(fm.data.Dirichlet, COUNTS, st.floats(0.001, 100), SEEDS),
    "shards": st.builds(fm.data.Shards, COUNTS, st.integers(1, 4), SEEDS),
    "quantity": st.builds(fm.data.Quantity, COUNTS, st.floats(0.001, 100), SEEDS),
    "even": st.builds(fm.data.Even, COUNTS, SEEDS),
    "instrument": st.builds(lambda n: fm.data.Instrument(n, 0), COUNTS),
    "contrast": st.builds(lambda n: fm.data.Contrast(n, ()), COUNTS),
    "by-site": st.builds(lambda a, b: fm.data.BySite((a, b)), COUNTS, COUNTS),
}


@pytest.mark.parametrize("name", PARTITIONS)
@given(data=st.data())
def test_partition_deals_no_training_sample_twice(name, data):
    partition = data.draw(PARTITIONS[name])
    given_pool = pool(sites=2)
    made = partition.sites(given_pool)
    nodes = partition.nodes
    assert len(made) == (sum(nodes) if isinstance(nodes, tuple) else nodes)
    dealt = held(made)
    assert len(dealt) == len(set(dealt))
    assert set(dealt) <= set(range(240))
    assert all(len(site.train[0]) >= 2 and len(site.test[0]) >= 1 for site in made)
    for site in made:
        assert torch.equal(site.train[1], given_pool.train[1][numbers(site.train)])
        assert torch.equal(site.test[1], given_pool.test[1][numbers(site.test)])
    assert len({site.name for site in made}) == len(made)


@pytest.mark.parametrize("name", ["dirichlet", "quantity"])
@given(data=st.data())
def test_partitions_that_skew_leave_no_sample_over(name, data):
    made = data.draw(PARTITIONS[name]).sites(pool())
    assert sorted(held(made)) == list(range(240))
    if name == "dirichlet":  # which also gives every test sample to one node
        assert sorted(number for site in made for number in numbers(site.test)) == list(range(120))


@pytest.mark.parametrize("name", ["one-class", "shards", "even", "instrument", "contrast"])
@given(data=st.data())
def test_partition_shares_are_equal_where_that_is_promised(name, data):
    made = data.draw(PARTITIONS[name]).sites(pool())
    sizes = [len(site.train[0]) for site in made]
    if name == "one-class":  # equal among the nodes of a class
        assert all(len({sizes[i] for i in range(c, len(sizes), 4)}) == 1 for c in range(min(4, len(sizes))))
    else:
        assert len(set(sizes)) == 1


@given(nodes=st.integers(1, 30))
def test_one_class_deals_class_i_modulo_the_classes_in_file_order_and_judges_by_all_of_it(nodes):
    given_pool = pool()
    made = fm.data.OneClass(nodes).sites(given_pool)
    for i, site in enumerate(made):
        c = i % 4
        in_file = (given_pool.train[1] == c).nonzero().flatten().tolist()
        each = len(in_file) // len(range(c, nodes, 4))
        assert numbers(site.train) == in_file[i // 4 * each : (i // 4 + 1) * each]
        assert numbers(site.test) == (given_pool.test[1] == c).nonzero().flatten().tolist()
        assert (site.group, site.name) == (f"class {c}", f"site {i} (class {c})")
        assert site.test is made[c].test


@pytest.mark.parametrize(
    ("transform", "half", "same", "high"),
    [  # (128 + c(P - 128))^1.1 by hand: 64^1.1 = 97.006, 128^1.1 = 207.94, 1^1.1 = 1; (128 - 192) < 0 counts as 0
        ("formula", [97, 208, 255], [0, 1, 158, 208, 255], [0, 0, 2, 208, 255]),
        ("published", [97, 207, 255], [0, 1, 100, 128, 255], [0, 0, 2, 207, 255]),  # truncated; c = 1 changes nothing
    ],
)
def test_contrast_is_the_formula_as_printed_or_as_published(transform, half, same, high):
    found = [contrast_table(c, transform) for c in (0.5, 1.0, 1.5)]
    assert found[0][[0, 128, 255]].tolist() == half
    assert found[1][[0, 1, 100, 128, 255]].tolist() == same
    assert found[2][[0, 42, 44, 128, 255]].tolist() == high
    assert transform == "formula" or found[1].tolist() == list(range(256))


def test_contrast_in_both_readings_is_monotone_and_within_a_byte():
    for c in (0.1, 0.5, 0.9, 1.1, 1.5, 3.0):
        formula, published = (contrast_table(c, kind).astype(int) for kind in ("formula", "published"))
        assert np.abs(formula - published).max() <= 1
        assert (np.diff(formula) >= 0).all()
        assert (np.diff(published) >= 0).all()


def test_contrast_deals_in_file_order_and_shares_one_test_set_for_each_contrast():
    given_pool = pool()
    made = fm.data.Contrast(8, (0.5, 0.5, 1.5)).sites(given_pool)
    assert [site.group for site in made] == ["low contrast"] * 2 + ["high contrast"] + ["original contrast"] * 5
    assert len({id(site.test) for site in made}) == 3
    assert made[0].test is made[1].test
    assert made[7].test is given_pool.test
    for i, (site, c) in enumerate(zip(made, (0.5, 0.5, 1.5, 1, 1, 1, 1, 1))):
        expected = contrast_table(c, "published")[given_pool.train[0][30 * i : 30 * (i + 1)].numpy()]
        assert np.array_equal(site.train[0].numpy(), expected)
        assert torch.equal(site.train[1], given_pool.train[1][30 * i : 30 * (i + 1)])
    assert np.array_equal(made[2].test[0].numpy(), contrast_table(1.5, "published")[given_pool.test[0].numpy()])


def test_contrast_by_the_formula_also_changes_the_nodes_of_factor_one():
    made = fm.data.Contrast(4, (0.5,), transform="formula").sites(pool())
    images = pool().train[0][60:120].numpy()
    assert np.array_equal(made[1].train[0].numpy(), contrast_table(1.0, "formula")[images])
    assert made[1].test is made[3].test


def test_contrast_can_judge_each_node_by_its_own_share_of_the_test_images():
    given_pool = pool()
    made = fm.data.Contrast(8, (0.5,), tests="share").sites(given_pool)
    assert [len(site.test[0]) for site in made] == [15] * 8
    assert numbers(made[3].test) == list(range(45, 60))
    assert np.array_equal(made[0].test[0].numpy(), contrast_table(0.5, "published")[given_pool.test[0][:15].numpy()])


def test_instrument_gives_the_last_nodes_the_second_instrument():
    given_pool = pool()
    made = fm.data.Instrument(6, odd=2).sites(given_pool)
    assert [site.group for site in made] == ["first instrument"] * 4 + ["second instrument"] * 2
    assert torch.equal(made[5].train[0], given_pool.train[0][200:240].flip(-1))
    assert torch.equal(made[4].test[0], given_pool.test[0].flip(-1))
    assert made[4].test is made[5].test
    assert made[0].test is given_pool.test


@pytest.mark.parametrize("shape", [(5, 8, 9), (5, 1, 8, 9), (5, 3, 8, 9)])
def test_instrument_camera_keeps_shape_kind_and_range(shape):
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = through_second_camera(images)
    assert (seen.shape, seen.dtype) == (images.shape, torch.uint8)
    as_floats = through_second_camera(images.float() / 255)
    assert 0 <= float(as_floats.min()) <= float(as_floats.max()) <= 1
    assert torch.allclose(as_floats * 255, seen.float(), atol=0.51)
    assert (seen.float() - images.float()).abs().mean() > 30
    assert torch.equal(seen[2:3], through_second_camera(images[2:3]))  # an image does not depend on the others


def test_by_site_makes_one_node_per_site_or_as_many_as_asked_for():
    given_pool = pool(sites=2)
    plain = fm.data.BySite().sites(given_pool)
    assert [(site.name, site.group, len(site.train[0]), len(site.test[0])) for site in plain] == [
        ("ward 0", "ward 0", 120, 60),
        ("ward 1", "ward 1", 120, 60),
    ]
    assert numbers(plain[1].train) == list(range(1, 240, 2))
    several = fm.data.BySite((8, 2)).sites(given_pool)
    assert [len(site.train[0]) for site in several] == [15] * 8 + [60] * 2
    assert several[0].test is several[7].test
    assert several[9].name == "site 9 (ward 1)"
    assert [site.group for site in several] == ["ward 0"] * 8 + ["ward 1"] * 2


def test_dirichlet_concentration_gathers_or_spreads_a_class():
    def largest_share(concentration: float) -> float:
        made = fm.data.Dirichlet(10, concentration).sites(pool(2000, 400))
        table = np.array([np.bincount(site.train[1], minlength=4) for site in made])
        return float((table.max(axis=0) / table.sum(axis=0)).mean())

    assert largest_share(0.05) > 0.6
    assert largest_share(1000.0) < 0.13


def shares(samples) -> np.ndarray:
    return np.bincount(samples[1], minlength=4) / len(samples[1])


def test_dirichlet_node_is_tested_on_the_labels_it_trains_on():
    for site in fm.data.Dirichlet(8, 0.1).sites(pool(4000, 800)):
        assert np.abs(shares(site.train) - shares(site.test)).max() < 0.1


def test_shards_hold_few_labels_and_their_test_samples_the_same():
    made = fm.data.Shards(10, per_node=2).sites(pool(2000, 401))
    for site in made:
        assert len(set(site.train[1].tolist())) <= 4
        assert set(site.test[1].tolist()) <= set(site.train[1].tolist())


def test_quantity_skews_sizes_but_not_labels():
    given_pool = pool(4000, 100)
    made = fm.data.Quantity(6, 0.5).sites(given_pool)
    sizes = [len(site.train[0]) for site in made]
    assert max(sizes) > 5 * min(sizes)
    assert np.abs(shares(made[int(np.argmax(sizes))].train) - 0.25).max() < 0.05
    assert all(site.test is given_pool.test for site in made)


@pytest.mark.parametrize("name", ["dirichlet", "shards", "quantity", "even"])
def test_partition_is_decided_by_its_seed(name):
    first, again, other = (
        held(from_table(fm.data.Partition, {"name": name, "nodes": 5, "seed": seed}).sites(pool()))
        for seed in (1, 1, 2)
    )
    assert first == again != other


def twice(inputs: torch.Tensor) -> fm.data.Pool:
    return fm.data.Pool(*[(inputs, torch.rand(9))] * 2)


REFUSED = {
    "no site column": (lambda: fm.data.BySite().sites(pool()), ["by-site"]),
    "more sites": (lambda: fm.data.BySite((1, 2, 3)).sites(pool(sites=2)), ["3 counts", "2 sites", "ward 0"]),
    "too many nodes": (lambda: fm.data.OneClass(1000).sites(pool()), ["60 samples", "250 sites"]),
    "too many for dirichlet": (lambda: fm.data.Dirichlet(121).sites(pool()), ["240 samples", "121 sites"]),
    "too many for quantity": (lambda: fm.data.Quantity(121).sites(pool()), ["240 samples", "121 sites"]),
    "too many shards": (lambda: fm.data.Shards(200).sites(pool()), ["400"]),
    "factors": (lambda: fm.data.Contrast(2, (1.0, 2.0, 3.0)), ["3 contrast factors", "2 nodes"]),
    "factor": (lambda: fm.data.Contrast(2, (-1.0,)), ["> 0", "-1.0"]),
    "odd": (lambda: fm.data.Instrument(2, 3), ["odd", "nodes"]),
    "concentration": (lambda: fm.data.Dirichlet(2, 0.0), ["concentration"]),
    "nodes": (lambda: fm.data.Even(0), ["nodes", ">= 1"]),
    "floats": (lambda: fm.data.Contrast(2, (0.5,)).sites(twice(torch.rand(9, 4, 4))), ["uint8"]),
    "numbers as targets": (lambda: fm.data.OneClass(2).sites(twice(torch.rand(9, 4))), ["targets"]),
    "rows as images": (lambda: fm.data.Instrument(2, 1).sites(twice(torch.rand(9, 4))), ["images"]),
    "lengths": (lambda: twice(torch.rand(8, 4)), ["9", "8"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_partition_that_cannot_be_dealt_is_refused_with_the_numbers(case):
    call, names = REFUSED[case]
    with refused(*names):
        call()
