"""The Euclidean projection onto the simplex, by its definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairmesh.regularizers import simplex
from fairmesh.regularizers.simplex import project_onto_simplex

DTYPES = [torch.float32, torch.float64]


@st.composite
def rows(draw, dtype: torch.dtype, most: int = 12) -> torch.Tensor:
    """Rows whose entries have magnitudes from 1e-30 to 1e30, often mixed within a row, often tied."""
    n = draw(st.integers(1, most))
    exponents = st.one_of(st.just(0), st.integers(-30, 30))
    shared = draw(st.one_of(st.none(), exponents))
    entry = st.tuples(st.floats(-8, 8, width=32), st.just(shared) if shared is not None else exponents)
    values = draw(st.lists(st.one_of(entry, st.just((1.0, shared or 0))), min_size=n, max_size=n))
    offset = draw(st.sampled_from([0.0, 0.0, 1.0, -1e3, 1e5]))
    return torch.tensor([[offset + mantissa * 10.0**exponent for mantissa, exponent in values]], dtype=dtype)


def tolerance(dtype: torch.dtype) -> float:
    return 64 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_projection_is_feasible_and_no_vertex_is_closer(dtype, data):
    x = data.draw(rows(dtype))
    p = project_onto_simplex(x)
    assert p.dtype == dtype
    assert p.shape == x.shape
    assert (p >= 0).all()
    assert abs(float(p.double().sum()) - 1) <= tolerance(dtype)
    # <x - p, e_k - p> <= 0 for every vertex e_k, in float64, relative to the size of what is summed. A common shift of
    # x changes nothing (the entries of e_k - p sum to zero) and keeps the sum from drowning.
    x, p = x.double() - x.double().amax(), p.double()
    terms = (x - p)[..., None, :] * (torch.eye(x.shape[-1], dtype=torch.float64) - p)
    assert (terms.sum(dim=-1) <= tolerance(dtype) * (1 + terms.abs().sum(dim=-1))).all()


@given(data=st.data())
def test_projection_is_optimal_to_rounding_in_float64(data):
    n = data.draw(st.integers(2, 30))
    x = torch.tensor([data.draw(st.lists(st.floats(-3, 3), min_size=n, max_size=n))], dtype=torch.float64)
    p = project_onto_simplex(x)
    assert (((x - p)[..., None, :] * (torch.eye(n) - p)).sum(dim=-1) <= 1e-13).all()
    assert abs(float(p.sum()) - 1) <= 1e-14


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exponent", [-30, -20, 0, 10, 20, 30])
def test_projection_of_every_magnitude_is_the_exact_one(dtype, exponent):
    scale = 10.0**exponent
    x = torch.tensor([[3.0, 1.0, -2.0, 2.5]], dtype=torch.float64) * scale
    if scale < 1e-16:  # so small that only the shape of the simplex matters
        expected = torch.full((1, 4), 0.25, dtype=torch.float64)
    elif scale > 1e9:  # so large that the largest takes all
        expected = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    else:
        expected = torch.tensor([[0.75, 0.0, 0.0, 0.25]], dtype=torch.float64)
    assert (project_onto_simplex(x.to(dtype)).double() - expected).abs().max() < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_projection_of_the_extreme_numbers_of_a_dtype_is_a_vertex(dtype):
    info = torch.finfo(dtype)
    x = torch.tensor([[info.max, -info.max, info.tiny, 0.0]], dtype=dtype)
    assert project_onto_simplex(x).tolist() == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_projection_of_a_batch_is_row_by_row(dtype, data):
    n = data.draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    x = torch.randn(2, 3, n, generator=generator, dtype=dtype) * 10.0 ** data.draw(st.integers(-6, 6))
    alone = torch.stack([torch.stack([project_onto_simplex(row) for row in replica]) for replica in x])
    assert torch.equal(project_onto_simplex(x), alone)


LONG = 700  # entries: more than are sorted
SHAPES_OF_LONG_ROWS = {
    "alike": lambda u: 1e-3 * u,
    "far apart": lambda u: 1e3 * u,
    "one large": lambda u: u * 1e-4 + (torch.arange(LONG) == 3),
    "geometric": lambda u: -(0.5 ** (torch.arange(LONG) % 60)) * u,
    "tied": lambda u: (4 * u).round() / 4,
    "slow for tangents": lambda u: -1.0 / (1.0 + torch.arange(LONG)) ** 0.05 * u,
}


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("values_readable", [True, False], ids=["by tangents", "by halving"])
@pytest.mark.parametrize("shape", SHAPES_OF_LONG_ROWS)
def test_projection_of_long_rows_is_that_by_sorting(shape, values_readable, dtype, monkeypatch):
    monkeypatch.setattr(simplex, "values_readable", lambda rows: values_readable)
    uniform = torch.rand(100, LONG, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = SHAPES_OF_LONG_ROWS[shape](uniform).to(dtype)
    found = project_onto_simplex(rows)
    monkeypatch.setattr(simplex, "_SORTED_UP_TO", LONG)
    assert (found - project_onto_simplex(rows.double())).abs().max() < 8 * torch.finfo(dtype).eps


def test_projection_of_long_rows_that_need_more_steps_than_tangents_have_is_found_by_halving(monkeypatch):
    rows = torch.randn(20, LONG, generator=torch.Generator().manual_seed(0))
    expected = project_onto_simplex(rows)
    monkeypatch.setattr(simplex, "_NEWTON_STEPS", 2)
    assert (project_onto_simplex(rows) - expected).abs().max() < 1e-6


def test_projection_of_a_batch_of_long_rows_is_row_by_row():
    uniform = torch.rand(3, 50, LONG, generator=torch.Generator().manual_seed(1))
    rows = torch.cat([of(uniform[0]) for of in SHAPES_OF_LONG_ROWS.values()]).reshape(2, 3, 50, LONG).float()
    alone = torch.stack([project_onto_simplex(row) for row in rows.reshape(-1, LONG)]).reshape(rows.shape)
    assert torch.equal(project_onto_simplex(rows), alone)
    assert torch.equal(project_onto_simplex(rows.transpose(0, 1)), alone.transpose(0, 1))  # not contiguous
