"""What every registered compressor and regularizer promises to an algorithm."""

import pytest
import torch

import fairmesh as fm
from fairmesh.numerics import random_streams
from tests import toys

every_compressor = pytest.mark.parametrize("compressor", toys.COMPRESSORS.values(), ids=toys.COMPRESSORS)
every_regularizer = pytest.mark.parametrize("regularizer", toys.REGULARIZERS.values(), ids=toys.REGULARIZERS)
in_both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def _rows(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def _draws(identities: list[int], dtype: torch.dtype, seeds=(0, 1)):
    key = random_streams.keys(torch.tensor(seeds), "compression", 4, torch.tensor(identities))
    return random_streams.Draw(key, dtype)


def test_no_registered_member_is_left_out():
    assert toys.covers(fm.compressors.Compressor, toys.COMPRESSORS)
    assert toys.covers(fm.regularizers.Regularizer, toys.REGULARIZERS)


@every_compressor
@in_both_dtypes
def test_a_compressor_keeps_dtype_and_shape_and_changes_nothing(compressor, dtype):
    rows = _rows(2, 5, 53, dtype=dtype)
    before, draw = rows.clone(), _draws([0, 1, 2, 3, 4], dtype)
    code = compressor.compress(rows, draw)
    decoded = code.decode()
    assert (decoded.shape, decoded.dtype) == (rows.shape, dtype)
    assert torch.equal(rows, before)
    parts = [part.clone() for part in code if isinstance(part, torch.Tensor)]
    assert torch.equal(code.decode(), decoded)  # twice, as sender and receiver do
    assert all(torch.equal(a, b) for a, b in zip(parts, (p for p in code if isinstance(p, torch.Tensor))))
    assert torch.equal(compressor.compress(rows, draw).decode(), decoded)


@every_compressor
def test_the_nodes_of_a_stack_are_compressed_each_on_its_own(compressor):
    rows = _rows(2, 5, 53)
    order = [4, 2, 0, 1, 3]
    together = compressor.compress(rows, _draws([10, 11, 12, 13, 14], torch.float64)).decode()
    shuffled = compressor.compress(rows[:, order], _draws([10 + i for i in order], torch.float64)).decode()
    assert torch.equal(shuffled, together[:, order])
    for r in range(2):
        for i in range(5):
            alone = compressor.compress(rows[r : r + 1, i : i + 1], _draws([10 + i], torch.float64, seeds=(r,)))
            assert torch.equal(alone.decode()[0, 0], together[r, i])


@every_regularizer
@in_both_dtypes
def test_a_regularizer_keeps_dtype_and_shape_and_changes_nothing(regularizer, dtype):
    duals, prior = _rows(2, 8, 8).softmax(dim=-1).to(dtype), _rows(2, 1, 8).softmax(dim=-1).to(dtype)
    own, before = torch.eye(8, dtype=dtype), (duals.clone(), prior.clone())
    slope = regularizer.gradient(duals, prior, own)
    assert (slope.shape, slope.dtype) == (duals.shape, dtype)
    assert regularizer.value(duals, prior).shape == (2, 8, 1)
    best = regularizer.maximiser(duals[:, :1], prior)
    assert (best.shape, best.dtype) == ((2, 1, 8), dtype)
    allowed = regularizer.project(duals, prior)
    assert (allowed.shape, allowed.dtype) == (duals.shape, dtype)
    assert torch.equal(duals, before[0])
    assert torch.equal(prior, before[1])
    assert torch.equal(own, torch.eye(8, dtype=dtype))


@every_regularizer
@in_both_dtypes
def test_what_a_regularizer_allows_is_a_convex_set_that_holds_the_prior_and_its_maximiser(regularizer, dtype):
    rows, prior = (3 * _rows(2, 8, 8)).to(dtype), _rows(2, 1, 8).softmax(dim=-1).to(dtype)
    allowed = regularizer.project(rows, prior)
    inside = [allowed, prior, regularizer.maximiser(rows[:, :1].abs(), prior), allowed.mean(dim=-2, keepdim=True)]
    for weights in inside:  # the last as neighbours' duals are mixed
        assert float((regularizer.project(weights, prior) - weights).abs().max()) < 10 * torch.finfo(dtype).eps


@every_regularizer
def test_renaming_the_coordinates_renames_the_slope(regularizer):
    order = [3, 0, 7, 5, 1, 6, 2, 4]
    duals, prior, own = _rows(1, 8, 8).softmax(dim=-1), _rows(1, 1, 8).softmax(dim=-1), torch.eye(8).double()
    slope = regularizer.gradient(duals, prior, own)
    renamed = regularizer.gradient(duals[:, order][..., order], prior[..., order], own[order][..., order])
    assert float((renamed - slope[:, order][..., order]).abs().max()) < 1e-14
