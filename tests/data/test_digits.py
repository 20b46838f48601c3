"""The bundled digits are scikit-learn's, to the bit."""

import hashlib

import numpy as np
import pytest
import torch

from fairmesh.data.datasets import Digits
from fairmesh.data.datasets.digits import load_digits
from tests.refusals import refused


def test_digits_have_the_recorded_checksum():
    images, labels = load_digits()
    assert (images.shape, images.dtype, labels.shape, labels.dtype) == ((1797, 8, 8), np.float64, (1797,), np.int64)
    content = np.ascontiguousarray(images, "<f8").tobytes() + np.ascontiguousarray(labels, "<i8").tobytes()
    assert hashlib.sha256(content).hexdigest() == "f6d9e39f37dc45d327f6db33428ee58970ccceabb2535a5c179de35886b70443"


def test_digits_equal_those_of_scikit_learn():
    theirs = pytest.importorskip("sklearn.datasets").load_digits()
    images, labels = load_digits()
    assert np.array_equal(images, theirs.images)
    assert np.array_equal(labels, theirs.target)


def test_digits_of_given_sizes_share_no_row_with_each_other_or_with_those_held_out():
    sites = Digits(nodes=3, odd=1, sizes=(300, 200, 20), validation_share=0.1).sites()
    assert [len(site.train[1]) for site in sites] == [300, 200, 20]
    upright = [site.train[0] for site in sites[:2]] + [sites[2].train[0].flip(-1)]
    sets = [*upright, sites[0].test[0], sites[0].validation[0]]
    kept = [{image.numpy().tobytes() for image in images} for images in sets]
    every = load_digits()[0]
    alike = len(every) - len({image.astype("<f4").tobytes() for image in every})
    assert sum(map(len, kept)) - len(set().union(*kept)) <= alike
    assert len(sites[0].validation[1]) == 180
    assert torch.equal(sites[2].validation[0], sites[0].validation[0].flip(-1))


def test_digits_of_a_shifting_scanner_lose_their_last_row_and_column():
    upright, shifted = (Digits(nodes=2, odd=1, instrument=kind).sites() for kind in ("mirrored", "shifted"))
    before, after = upright[0].test[0], shifted[1].test[0]
    assert torch.equal(after[:, 1:, 1:], before[:, :-1, :-1])
    assert not after[:, 0].any()
    assert not after[:, :, 0].any()
    assert shifted[1].group == "shifted"


def test_digits_refuse_sizes_that_do_not_fit():
    with refused("sizes", "3 nodes"):
        Digits(nodes=3, odd=1, sizes=(10, 10))
    with refused("sizes", "1400", "1348"):
        Digits(nodes=2, odd=1, sizes=(1000, 400)).sites()
    with refused("validation_share", "0.8"):
        Digits(validation_share=0.8)
    with refused("sizes", "class"):
        Digits(nodes=2, odd=0, split="class", sizes=(10, 10))
