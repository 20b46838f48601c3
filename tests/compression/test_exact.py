"""Encoding is lossless, and messages have as many bytes as counted."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fairmesh as fm
from benchmarks.codec import entropy_bytes, packed_bytes
from fairmesh import compression
from fairmesh.compression import entropy
from tests import toys
from tests.compression.messages import COMPRESSORS, bits, code_of, row, rows_of_every_kind, template_of
from tests.examples import examples

DIMS = (1, 2, 3, 8, 31, 100, 1000, 20_011)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_message_decodes_to_the_same_bits_and_is_as_long_as_counted(name, dtype):
    compressor = COMPRESSORS[name]
    for dim in DIMS:
        rows = rows_of_every_kind(dim, dtype)
        code = code_of(compressor, rows)
        sizes = torch.as_tensor(compression.part_sizes(code)).expand(len(rows))
        template = {"model": template_of(compressor, dim, dtype)}
        for i in range(len(sizes)):
            one = row(code, i)
            message = compression.encode({"model": one}, 3)
            assert len(message) == compression.HEADER_BYTES + int(sizes[i]), (dim, i)
            assert bits(compression.decode(message, template, 3)["model"]) == bits(one), (dim, i)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPRESSORS)
def test_message_of_ten_million_parameters_survives(name):
    rows = torch.randn(1, 10_000_000, generator=torch.Generator().manual_seed(0))
    code = code_of(COMPRESSORS[name], rows)
    message = compression.encode({"model": code}, 0)
    assert len(message) == compression.HEADER_BYTES + int(compression.part_sizes(code))
    template = {"model": template_of(COMPRESSORS[name], rows.shape[-1], rows.dtype)}
    assert torch.equal(compression.decode(message, template, 0)["model"].decode(), code.decode())


@examples(50)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=400),
    st.sampled_from([1, 1, 7, 200]),
    st.integers(0, 60),
)
def test_entropy_coder_returns_any_sequence_within_its_bound(symbols, repeats, margin):
    symbols = np.tile(np.array(symbols, dtype=np.int32), repeats)
    counts = np.bincount(symbols, minlength=int(symbols.max()) + 1 + margin)[None]
    table = entropy.weight_bytes(counts)
    length = int(entropy.words(counts, table)[0])
    lowest, highest = int(symbols.min()), int(symbols.max())
    weights = table[0, lowest : highest + 1]
    payload = entropy.coded(symbols - np.int32(lowest), weights, length)
    assert len(payload) == 4 * length
    assert np.array_equal(entropy.decoded(payload, weights, len(symbols)), symbols - lowest)


@examples(40)
@given(st.lists(st.lists(st.integers(0, 10**6), min_size=6, max_size=6), min_size=1, max_size=5))
def test_entropy_tables_and_lengths_are_the_same_in_torch_and_numpy(counts):
    stack = torch.tensor(counts)
    table = entropy.weight_bytes(stack)
    assert np.array_equal(table.numpy(), entropy.weight_bytes(stack.numpy()))
    assert np.array_equal(entropy.words(stack, table).numpy(), entropy.words(stack.numpy(), table.numpy()))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("others", [1, 5, 200])
def test_entropy_coder_stays_within_its_bound_for_skewed_messages(share, others):
    generator = np.random.default_rng(0)
    symbols = np.where(generator.random(200_000) < share, 0, generator.integers(1, others + 1, 200_000))
    symbols = symbols.astype(np.int32)
    counts = np.bincount(symbols, minlength=others + 1)[None]
    table = entropy.weight_bytes(counts)
    entropy.coded(symbols, table[0], int(entropy.words(counts, table)[0]))  # refuses to exceed its bound


@pytest.mark.parametrize(
    "name", ["quantize", "quantize blocks", "quantize ceil", "quantize half norms", "top-k-quantize"]
)
def test_entropy_coder_is_within_five_percent_of_the_entropy(name):
    compressor = COMPRESSORS[name] if "blocks" not in name else fm.compressors.Quantize(bits=3, block=512)
    for spread in (1.0, 3.0):
        rows = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(1)).abs().pow(spread)
        code = code_of(compressor, rows)
        message = compression.encode({"model": code}, 0)
        assert len(message) <= 1.05 * entropy_bytes(code)
        assert len(message) <= packed_bytes(code)


def test_bytes_over_a_changing_graph_count_the_neighbours_of_every_round():
    topology = fm.topologies.Changing((fm.topologies.Edges(((0, 1), (2, 3))), fm.topologies.Edges(((1, 2), (0, 3)))))
    problem = toys.problem(4)
    result = fm.train(problem, topology, fm.ADGDA(0.1, 0.01, compressor=fm.compressors.Sign()), 1)
    dim = problem.flat_model.dim
    model, dual = 5 + 4 + -(-dim // 8), 5 + 4 * 4
    assert result.final[0]["bytes_busiest_node"] == (16 + model + dual) + (16 + model)


def test_bytes_are_in_the_records_and_can_be_left_uncounted():
    problem, algorithm = toys.problem(), toys.ALGORITHMS["ad-gda"]
    counted, plain = (fm.train(problem, fm.Ring(), algorithm, 4, count_bytes=count) for count in (True, False))
    assert counted.final[0]["bytes_busiest_node"] > 0
    assert counted.final[0]["bytes_total"] >= 8 * counted.final[0]["bytes_busiest_node"] / 2
    assert plain.final[0]["bytes_total"] == 0
    assert torch.equal(counted.row(), plain.row())


def test_bytes_of_a_server_and_its_clients_are_those_of_their_messages():
    problem = toys.problem()
    dim, message = problem.flat_model.dim, 16 + 5
    result = fm.train(problem, fm.Ring(), fm.algorithms.AFL(0.1), 3)
    record = result.final[0]
    assert record["bytes_busiest_node"] == 3 * 8 * (message + 4 * dim)
    assert record["bytes_total"] == 3 * 8 * (2 * (message + 4 * dim) + message + 4)
