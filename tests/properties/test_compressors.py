"""Compressors: the contraction they promise, what they keep, and the paper's formulas by hand."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fairmesh as fm
from fairmesh.compression.codes import Levels, Signs
from fairmesh.numerics import random_streams
from tests import toys
from tests.examples import examples
from tests.refusals import refused

COMPRESSORS = {
    **toys.COMPRESSORS,
    "quantize 1 bit": fm.compressors.Quantize(bits=1),
    "quantize 8 bits": fm.compressors.Quantize(bits=8),
    "quantize one by one": fm.compressors.Quantize(bits=2, block=1),
    "top-1": fm.compressors.TopK(1e-6),
    "random all": fm.compressors.RandomK(1.0),
    "sign pairs": fm.compressors.Sign(block=2),
    "top-k-quantize 1 bit": fm.compressors.TopKQuantize(0.7, bits=1),
}
EVERY = pytest.mark.parametrize("name", COMPRESSORS)
NO_DELTA = {"quantize ceil", "half", "threshold", "top-k half"}  # ceil rounding, and those that know an absolute size


def uniforms(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    key = random_streams.keys(torch.tensor(seed), "test", 0, torch.arange(math.prod(shape[:-1])))
    return random_streams.uniform(key, shape[-1], dtype).view(shape)


def compressed(
    compressor: fm.compressors.Compressor, rows: torch.Tensor, draws: torch.Tensor | None = None
) -> torch.Tensor:
    draws = uniforms(tuple(rows.shape), dtype=rows.dtype) if draws is None else draws
    return compressor.compress(rows, toys.Given(draws)).decode()


@st.composite
def rows(draw, least: int = 1, most: int = 40) -> torch.Tensor:
    """One row (1, dim): spikes, ties, zeros and heavy tails."""
    dim = draw(st.integers(least, most))
    ordinary = st.floats(-4, 4).map(lambda v: v if abs(v) > 1e-30 else 0.0)  # float32 norms know nothing below 1e-45
    entry = st.one_of(ordinary, st.sampled_from([0.0, 1.0, -1.0, 1e-6, 100.0]))
    shape = draw(st.sampled_from(["any", "spike", "spike and dust", "flat"]))
    if shape == "any":
        values = draw(st.lists(entry, min_size=dim, max_size=dim))
    else:
        values = [{"spike": 0.0, "spike and dust": 1e-3, "flat": 1.0}[shape]] * dim
        values[draw(st.integers(0, dim - 1))] = 1.0
    return torch.tensor([values], dtype=torch.float64)


def expected_error(compressor: fm.compressors.Compressor, row: torch.Tensor) -> tuple[float, float]:
    """E ||Q(x) - x||^2 and how far from exact that number can be."""
    dim = row.shape[-1]
    if isinstance(compressor, fm.compressors.RandomK):  # only the order of the uniforms matters: all orders
        draws = torch.tensor(list(itertools.permutations(range(dim))), dtype=torch.float64) / dim
        error = (compressed(compressor, row.expand(len(draws), dim), draws) - row).square().sum(dim=-1).mean()
        return float(error), 1e-12 * float(row.square().sum())
    # The error is a sum over coordinates, each with one jump in its own uniform: an even grid of uniforms integrates
    # each to within one cell of its jump.
    cells = 512
    draws = ((torch.arange(cells, dtype=torch.float64) + 0.5) / cells)[:, None].expand(cells, dim)
    errors = (compressed(compressor, row.expand(cells, dim), draws) - row).square()
    margin = (errors.amax(dim=0) - errors.amin(dim=0)).sum() / cells
    # Norms travel in float32: relative rounding 2^-24 of a value against an error of up to the same size.
    return float(errors.sum(dim=-1).mean()), float(margin + 2.0**-22 * row.square().sum())


@EVERY
@given(data=st.data())
@examples(10)
def test_compressor_error_is_at_most_1_minus_delta_of_the_squared_norm(name, data):
    compressor = COMPRESSORS[name]
    row = data.draw(rows(most=6 if isinstance(compressor, fm.compressors.RandomK) else 40))
    delta = compressor.delta(row.shape[-1])
    assert (delta is None) == (name in NO_DELTA)
    if delta is None:
        return
    assert 0 < delta <= 1
    error, margin = expected_error(compressor, row)
    assert error <= (1 - delta) * float(row.square().sum()) + margin


@given(row=rows(most=6), fraction=st.floats(0.05, 1))
@examples(10)
def test_random_k_loses_exactly_1_minus_k_over_d_in_expectation(row, fraction):
    compressor = fm.compressors.RandomK(fraction)
    error, margin = expected_error(compressor, row)
    kept = max(1, round(fraction * row.shape[-1])) / row.shape[-1]
    assert compressor.delta(row.shape[-1]) == kept
    assert error == pytest.approx((1 - kept) * float(row.square().sum()), abs=margin)


@pytest.mark.parametrize(
    ("compressor", "row"), [(fm.compressors.Sign(), [1.0, 0, 0, 0]), (fm.compressors.TopK(0.5), [1.0, -1, 1, 1])]
)
def test_delta_of_sign_and_top_k_is_reached(compressor, row):
    row = torch.tensor([row], dtype=torch.float64)
    error = (compressed(compressor, row) - row).square().sum()
    assert float(error) == pytest.approx((1 - compressor.delta(4)) * float(row.square().sum()))


def test_quantize_ceil_has_no_delta():
    compressor = fm.compressors.Quantize(bits=4, rounding="ceil")
    row = torch.full((1, 10_000), 1e-6, dtype=torch.float64)
    row[0, 0] = 1.0
    assert compressor.delta(10_000) is None
    assert (compressed(compressor, row) - row).square().sum() > 1.3 * row.square().sum()
    error, margin = expected_error(fm.compressors.Quantize(bits=4), row)
    assert error < (1 - fm.compressors.Quantize(bits=4).delta(10_000)) + margin


@pytest.mark.parametrize(
    ("block", "compressor"),
    [
        (4, fm.compressors.Quantize(bits=3, block=4)),
        (5, fm.compressors.Sign(block=5)),
        (1, fm.compressors.Quantize(2, block=1)),
    ],
)
@given(dim=st.integers(1, 23), seed=st.integers(0, 10**6))
@examples(8)
def test_blocks_are_compressed_as_rows_of_their_own_and_the_last_may_be_shorter(block, compressor, dim, seed):
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    draws = uniforms((3, dim), seed)
    code = compressor.compress(x, toys.Given(draws))
    norms = code.means if isinstance(code, Signs) else code.norms
    assert norms.dtype == torch.float32
    assert norms.shape == (3, -(-dim // block))
    for at in range(0, dim, block):
        piece = slice(at, min(at + block, dim))
        alone = compressed(compressor, x[:, piece], draws[:, piece])
        if isinstance(compressor, fm.compressors.Quantize):  # tau is that of a whole block in all of them
            length = piece.stop - piece.start
            alone = alone * compressor.delta(dim) / compressor.delta(length)
        torch.testing.assert_close(code.decode()[:, piece], alone, rtol=1e-6, atol=0)


@given(data=st.data())
def test_top_k_keeps_the_k_largest_unchanged_and_breaks_ties_by_lowest_index(data):
    dim = data.draw(st.integers(1, 15))
    values = data.draw(st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, -2.0, 0.5]), min_size=dim, max_size=dim))
    fraction = data.draw(st.floats(0.01, 1))
    kept = min(dim, max(1, round(fraction * dim)))
    order = sorted(range(dim), key=lambda i: (-abs(values[i]), i))  # Python's sort, by magnitude and then index
    expected = [values[i] if i in order[:kept] else 0.0 for i in range(dim)]
    assert compressed(fm.compressors.TopK(fraction), torch.tensor([values])).tolist() == [expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@given(dim=st.integers(1, 60), fraction=st.floats(0.01, 1), seed=st.integers(0, 10**6))
def test_random_k_keeps_exactly_k_coordinates_unchanged(dtype, dim, fraction, seed):
    x = torch.randn(4, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype) + 10
    kept = compressed(fm.compressors.RandomK(fraction), x, uniforms((4, dim), seed, dtype))
    assert ((kept != 0).sum(dim=-1) == min(dim, max(1, round(fraction * dim)))).all()
    assert torch.equal(kept, torch.where(kept != 0, x, 0.0))


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2.0**-24])
def test_random_k_keeps_exactly_k_even_when_all_uniforms_agree(draw):
    x = torch.ones(1, 10)
    assert compressed(fm.compressors.RandomK(0.3), x, torch.full((1, 10), draw)).tolist() == [[1.0] * 3 + [0.0] * 7]


def test_random_k_takes_every_coordinate_equally_often():
    dim, count, trials = 10, 3, 20_000
    kept = compressed(fm.compressors.RandomK(0.3), torch.ones(trials, dim), uniforms((trials, dim), 7, torch.float32))
    spread = math.sqrt(trials * 0.3 * 0.7)
    assert ((kept.sum(dim=0) - trials * count / dim).abs() < 5 * spread).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("rounding", ["floor", "ceil"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_quantize_gives_few_whole_levels_of_one_unit(bits, rounding, dtype):
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(bits), dtype=dtype) ** 3
    code = fm.compressors.Quantize(bits, rounding=rounding).compress(x, toys.Given(uniforms((3, 200), dtype=dtype)))
    assert isinstance(code, Levels)
    assert torch.equal(code.levels, code.levels.round())
    assert code.levels.abs().max() <= 2**bits + (rounding == "ceil") <= code.largest
    assert code.norms.dtype == torch.float32
    expected = code.levels * (code.norms.to(dtype) * code.unit)
    assert torch.equal(code.decode(), expected)
    for row in code.decode():
        assert len(row.unique()) <= 2 * (2**bits + 1) + 1


@pytest.mark.parametrize("magnitude", [2e-45, 1e-30, 1.0, 1e30])  # a float32 holds 2e-45 as 1.4e-45
@pytest.mark.parametrize("rounding", ["floor", "ceil"])
def test_quantize_gives_no_level_beyond_the_largest_that_its_code_states(magnitude, rounding):
    x = torch.tensor([[0.0, -magnitude, 0.0, 0.0]], dtype=torch.float64)
    draws = torch.full((1, 4), 1 - 2.0**-24, dtype=torch.float64)
    for bits in (1, 4, 16):
        code = fm.compressors.Quantize(bits, rounding=rounding).compress(x, toys.Given(draws))
        assert code.levels.abs().max() <= code.largest


def test_sign_codes_hold_a_sign_for_every_coordinate():
    code = fm.compressors.Sign(block=4).compress(
        torch.tensor([[1.0, -2.0, 0.0, -0.0, 5.0, -6.0]]), toys.Given(torch.zeros(1, 6))
    )
    assert isinstance(code, Signs)
    assert code.signs.tolist() == [[1, -1, 1, 1, 1, -1]]
    assert code.means.tolist() == [[0.75, 5.5]]


# The paper's formulas, by hand.


@pytest.mark.parametrize(
    ("compressor", "row", "draws", "expected"),
    [
        # norm 5, 2^b = 4, tau = 1 + min(2/16, sqrt 2/4) = 1.125; floor(2.4 + 0.5) = 2, floor(-3.2 + 0.9) = -3, which is
        # -floor(3.2 + xi) for xi = 1 - 0.9: uniform as well
        (fm.compressors.Quantize(2), [3, -4], [0.5, 0.9], [5 / 4.5 * 2, -5 / 4.5 * 3]),
        (fm.compressors.Quantize(2), [3, -4], [0.625, 0.125], [5 / 4.5 * 3, -5 / 4.5 * 4]),
        (fm.compressors.Quantize(2, rounding="ceil"), [3, -4], [0.5, 0.9], [5 / 4.5 * 3, -5 / 4.5 * 5]),
        # d = 16, b = 1: tau = 1 + min(16/4, 4/2) = 3; a row of ones has norm 4, 2 * 1/4 + 0.5 = 1
        (fm.compressors.Quantize(1), [1.0] * 16, [0.5] * 16, [4 / (2 * 3)] * 16),
        # blocks (3, -4), (0, 2), (-1): norms 5, 2, 1; b = 1, tau = 1.5, in the short block too
        (
            fm.compressors.Quantize(1, block=2),
            [3, -4, 0, 2, -1],
            [0.25, 0.5, 0.9, 0.5, 0.25],
            [5 / 3 * 1, -5 / 3 * 2, 0.0, 2 / 3 * 2, -1 / 3 * 2],
        ),
        # keeps (3, -4): norm 5; K = 2, b = 1: tau = 1.5; floor(1.2 + 0.9), floor(-1.6 + 0.7)
        (fm.compressors.TopKQuantize(0.5, 1), [3, -4, 1, 0.5], [0.9, 0.7, 0.99, 0.99], [5 / 3 * 2, -5 / 3, 0, 0]),
        (fm.compressors.Sign(), [1, -2, 0.0, 3], [0] * 4, [1.5, -1.5, 1.5, 1.5]),
        (fm.compressors.Sign(), [1, -2, -0.0, 3], [0] * 4, [1.5, -1.5, 1.5, 1.5]),
        (fm.compressors.Sign(block=3), [1, -2, 0, 3], [0] * 4, [1, -1, 1, 3]),
    ],
    ids=str,
)
def test_compressor_is_the_papers_formula(compressor, row, draws, expected):
    decoded = compressed(compressor, *(torch.tensor([part], dtype=torch.float64) for part in (row, draws)))
    assert decoded.tolist() == [pytest.approx(expected, rel=1e-14, abs=0)]


@given(value=st.floats(-1, 1), bits=st.integers(1, 6))
def test_quantize_floor_has_the_law_of_the_papers_formula_for_either_sign(value, bits):
    other = math.sqrt(1 - value**2)
    xi = (torch.arange(1024, dtype=torch.float64) + 0.5) / 1024
    code = fm.compressors.Quantize(bits).compress(
        torch.tensor([[value, other]]).double().expand(1024, 2), toys.Given(xi[:, None].expand(-1, 2))
    )
    levels = code.levels[:, 0].sort().values
    paper = (math.copysign(1.0, value) * torch.floor(2**bits * abs(value) / float(code.norms[0, 0]) + xi)).sort().values
    assert (levels != paper).sum() <= 1  # a value on the edge of a cell may fall to either side


@pytest.mark.parametrize(
    ("compressor", "dim", "delta"),
    [
        (fm.compressors.Identity(), 7, 1.0),
        (fm.compressors.Quantize(4), 256, 1 / 2),  # min(256/256, 16/16)
        (fm.compressors.Quantize(4), 64, 1 / 1.25),  # min(64/256, 8/16)
        (fm.compressors.Quantize(4), 1024, 1 / 3),  # min(1024/256, 32/16)
        (fm.compressors.Quantize(4, block=64), 10_000, 1 / 1.25),
        (fm.compressors.Quantize(4, block=64), 16, 1 / (1 + 1 / 16)),
        (fm.compressors.Quantize(4, rounding="ceil"), 256, None),
        (fm.compressors.TopK(0.25), 8, 0.25),
        (fm.compressors.RandomK(0.25), 8, 0.25),
        (fm.compressors.TopK(0.01), 8, 1 / 8),
        (fm.compressors.Sign(), 10, 0.1),
        (fm.compressors.Sign(block=4), 10, 0.25),
        (fm.compressors.TopKQuantize(0.25, 4), 256, 0.25 / 1.25),
    ],
    ids=str,
)
def test_delta_is_the_papers(compressor, dim, delta):
    assert compressor.delta(dim) == delta


# Numbers of extreme size.


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("magnitude", [1e-45, 1e-42, 1e-39, 1e-30, 1e-20, 1e20, 1e30, 3e37])
def test_compressor_gives_finite_codes_for_every_norm_a_float32_can_hold(name, dtype, magnitude):
    x = torch.tensor([[1.0, -0.5, 0.25, 0.0, 1.0, 0.75, -1.0]], dtype=torch.float64).mul(magnitude).to(dtype)
    assert compressed(COMPRESSORS[name], x).isfinite().all()


@pytest.mark.parametrize("name", [name for name in COMPRESSORS if "half" not in name and name != "threshold"])
@pytest.mark.parametrize("exponent", [-100, -60, 60, 110])
def test_compressor_scales_with_powers_of_two_up_to_the_norms_rounding(name, exponent):
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(1)).round(decimals=3)
    scaled = compressed(COMPRESSORS[name], x * 2.0**exponent)
    torch.testing.assert_close(scaled, compressed(COMPRESSORS[name], x) * 2.0**exponent, rtol=2.0**-22, atol=0)


# What is refused.


@pytest.mark.parametrize(
    ("make", "values", "names"),
    [
        (lambda bits: fm.compressors.Quantize(bits), (0, -1, 17), ["bits", "[1, 16]"]),
        (lambda bits: fm.compressors.TopKQuantize(0.5, bits), (0, -1, 17), ["bits", "[1, 16]"]),
        *(
            (kind, (0.0, -0.1, 1.01, math.nan), ["fraction", "(0, 1]"])
            for kind in (fm.compressors.TopK, fm.compressors.RandomK, fm.compressors.TopKQuantize)
        ),
        (lambda block: fm.compressors.Quantize(4, block=block), (0, -3), ["block", ">= 1"]),
        (lambda block: fm.compressors.Sign(block=block), (0, -3), ["block", ">= 1"]),
        (lambda rounding: fm.compressors.Quantize(4, rounding=rounding), ("nearest",), ["rounding", "'floor'"]),
    ],
)
def test_compressor_refuses_settings_out_of_range(make, values, names):
    for value in values:
        with refused(*names, value):
            make(value)
