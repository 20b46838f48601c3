"""Codes made of other codes, and the compressors that send them: natural compression and low rank."""

import operator

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh import compression
from fairmesh.compression.compressors import Composite, Dense, Layout, Levels, Signs, with_layout
from fairmesh.testing.compressors import draws
from tests import toys
from tests.compression.messages import row
from tests.refusals import refused

LAYOUT = Layout(("a.weight", "a.bias", "filters", "thin"), ((30, 20), (30,), (8, 4, 3, 3), (2, 2)))


def low_rank_row(rank: int) -> torch.Tensor:
    """A row of LAYOUT whose large matrices have a rank, and whose other numbers are any."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(1, 1, LAYOUT.dim, generator=generator, dtype=torch.float64)
    for _, shape, place in LAYOUT:
        if len(shape) > 1 and shape[0] > 2:
            width = (place.stop - place.start) // shape[0]
            left, right = (torch.randn(k, rank, generator=generator).double() for k in (shape[0], width))
            values[..., place] = (left @ right.T).flatten()
    return values


def test_composite_is_as_long_as_its_parts_and_refuses_what_they_refuse():
    parts = (Signs(torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0]]), 2), Dense(torch.tensor([[0.5, 3.0]])))
    code, other = Composite(parts, operator.mul), Dense(torch.tensor([[0.25]]))
    sizes = [compression.part_sizes(one) for one in (*parts, other)]
    message = compression.encode({"model": code, "more": other}, 1)
    assert len(message) == compression.HEADER_BYTES + sum(map(int, sizes))
    received = compression.decode(message, {"model": code, "more": other}, 1)
    assert received["model"].decode().tolist() == [[1.0, -6.0]]
    shorter = Composite((parts[0], Dense(torch.zeros(1, 3))), operator.mul)
    with refused("model", "piece 1", "dimension 2", "3", error=compression.DecodeError):
        compression.decode(message, {"model": shorter, "more": other}, 1)


def test_composite_of_finite_parts_that_overflow_is_refused():
    code = Composite((Dense(torch.full((1, 2), 1e30)), Dense(torch.full((1, 2), 1e30))), operator.mul)
    with pytest.raises(compression.DecodeError, match="not finite"):
        compression.decode(compression.encode({"model": code}, 0), {"model": code}, 0)


def test_assembly_is_the_receivers_own():
    parts = (Dense(torch.tensor([[2.0]])), Dense(torch.tensor([[3.0]])))
    message = compression.encode({"model": Composite(parts, operator.mul)}, 0)
    received = compression.decode(message, {"model": Composite(parts, operator.add)}, 0)["model"]
    assert received.decode().item() == 5.0


def test_natural_rounds_to_neighbouring_powers_of_two_without_bias():
    rows = torch.tensor([0.75, -3.0, 4.0, 0.0, 1e-30, -5.5, 1.0], dtype=torch.float64)
    draw = draws(range(4000), torch.float64)
    found = fm.compressors.Natural().compress(rows.expand(1, 4000, -1).clone(), draw).decode()[0]
    assert [sorted(set(column.tolist())) for column in found.T[:4]] == [[0.5, 1.0], [-4.0, -2.0], [4.0], [0.0]]
    assert set(found[:, 5].tolist()) == {-8.0, -4.0}
    assert float(found[:, 4].max()) < 1e-18
    assert torch.allclose(found.mean(dim=0), rows, atol=0.1)


def test_natural_sends_far_less_than_its_nominal_bits():
    rows = torch.randn(1, 1, 50_000, generator=torch.Generator().manual_seed(0))
    code = fm.compressors.Natural().compress(rows, draws([0], torch.float32))
    assert isinstance(code, Composite)
    assert [type(part) for part in code.parts] == [Levels, Signs]
    message = compression.encode({"model": row(code, 0, 0)}, 0)
    assert 3.0 < 8 * len(message) / rows.numel() < 4.0  # a sign, and 2.6 bits of an exponent; nominally nine


@pytest.mark.parametrize("rank", [1, 2])
def test_low_rank_sends_matrices_of_its_rank_and_everything_else_exactly(rank):
    rows = low_rank_row(rank)
    compressor = fm.compressors.LowRank(rank).bound(LAYOUT)
    code = compressor.compress(rows, draws([0], torch.float64))
    assert torch.allclose(code.decode(), rows, rtol=1e-10, atol=1e-10)
    numbers = rank * (30 + 20 + 8 + 36) + 30 + 4
    assert compressor.nominal_bits(LAYOUT.dim) == 32 * numbers
    assert int(compression.part_sizes(code)) == 8 * numbers + 2 * 5  # and the heads of two parts


@pytest.mark.parametrize("iterations", [0, 2])
def test_low_rank_keeps_its_share_of_each_matrix_in_expectation(iterations):
    compressor = fm.compressors.LowRank(2, iterations).bound(LAYOUT)
    assert compressor.delta(LAYOUT.dim) == 2 / 20
    flat = torch.zeros(LAYOUT.dim, dtype=torch.float64)
    for _, shape, place in LAYOUT:
        if shape == (30, 20):
            flat[place] = torch.eye(30, 20, dtype=torch.float64).flatten()  # the hardest: all singular values are equal
    found = compressor.compress(flat.expand(1, 200, -1).clone(), draws(range(200), torch.float64)).decode()
    lost = (found - flat).square().sum(dim=-1).mean() / flat.square().sum()
    assert float(lost) == pytest.approx(1 - 2 / 20, abs=1e-9)


def test_low_rank_keeps_more_with_power_iterations():
    rows = torch.randn(1, 50, LAYOUT.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def lost(iterations: int) -> float:
        compressor = fm.compressors.LowRank(2, iterations).bound(LAYOUT)
        return float((compressor.compress(rows, draws(range(50), torch.float64)).decode() - rows).square().sum())

    assert lost(2) < lost(1) < lost(0)


def test_low_rank_refuses_settings_without_meaning():
    with refused("rank", ">= 1", 0):
        fm.compressors.LowRank(rank=0)
    with refused("iterations", ">= 0", -1):
        fm.compressors.LowRank(iterations=-1)


def test_run_binds_every_compressor_to_the_layout_of_its_models():
    problem = toys.problem(3, model=lambda: nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)))
    layout = problem.flat_model.layout
    assert layout.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    algorithm = fm.ADGDA(compressor=fm.compressors.LowRank(1), dual_compressor=fm.compressors.LowRank(1))
    bound = with_layout(algorithm, layout)
    assert bound.compressor == bound.dual_compressor == fm.compressors.LowRank(1).bound(layout)
    assert bound.dual_compressor.compress(torch.eye(3)[None], draws(range(3), torch.float32)).decode().shape == (
        1,
        3,
        3,
    )
    assert with_layout(fm.ADGDA(), layout) == fm.ADGDA()
    result = fm.train(problem, fm.Ring(), fm.ChocoSGD(0.1, 0.2, fm.compressors.LowRank(1)), 2, trace="no")
    numbers = (40 + 6) + (3 + 40) + 40 + 3
    assert result.records[-1]["nominal_bits_busiest"] == 2 * 2 * 32 * numbers  # two rounds, two neighbours
    assert result.records[-1]["bytes_busiest_node"] == 2 * 2 * (compression.HEADER_BYTES + 2 * 5 + 4 * numbers)


@pytest.mark.slow
@pytest.mark.parametrize("compressor", [fm.compressors.LowRank(1), fm.compressors.Natural()], ids=str)
def test_composite_codes_run_everywhere_as_in_memory(compressor):
    fm.testing.check_algorithm(fm.ChocoSGD(0.2, 0.3, compressor))
