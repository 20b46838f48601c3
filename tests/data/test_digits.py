"""The bundled digits are scikit-learn's, to the bit."""

import hashlib

import numpy as np
import pytest

from fairmesh.data.datasets.digits import load_digits


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
