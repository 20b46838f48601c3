"""Rows packed without loss: every bit comes back, and rows that resemble each other take less space."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairmesh.storage.packing import packed, unpacked
from tests.examples import examples

LENGTH = 4096
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _round_trip(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stored, layout = packed(tensors)
    shuffled = dict(sorted(stored.items(), reverse=True))  # files do not keep the order
    found = unpacked(shuffled, layout)
    assert found.keys() == tensors.keys()
    assert all(_same_bits(found[name], tensor) for name, tensor in tensors.items())
    return stored


@examples(10)
@given(st.sampled_from(list(DTYPES)), st.integers(0, 2**31), st.sampled_from([0.0, 1e-6, 1e-2, 10.0]))
def test_packed_rows_come_back_bit_for_bit(dtype, seed, apart):
    draw = torch.Generator().manual_seed(seed)
    model = torch.randn(1, 1, LENGTH, generator=draw)
    copies = model.unsqueeze(2) + apart * torch.randn(1, 1, 3, LENGTH, generator=draw)
    _round_trip({"b": model.to(DTYPES[dtype]), "a": copies.to(DTYPES[dtype]), "short": torch.arange(3)})


def test_packed_rows_keep_numbers_that_are_not_ordinary():
    odd = torch.tensor(
        [0.0, -0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45, 3e38, -3e38]
    )
    rows = odd.repeat(LENGTH // len(odd) + 1).reshape(1, -1)
    _round_trip({"a": rows, "b": rows.flip(-1), "c": torch.zeros_like(rows), "d": -torch.zeros_like(rows)})


@pytest.mark.parametrize(("apart", "share"), [(0.0, 0.02), (1e-3, 0.75), (1e-5, 0.55)])
def test_rows_that_resemble_each_other_take_less_space(apart, share):
    draw = torch.Generator().manual_seed(0)
    model = torch.randn(64 * LENGTH, generator=draw)
    copy = model * (1 + apart * torch.randn(64 * LENGTH, generator=draw))
    stored, _ = packed({"model": model[None], "copy": copy[None]})
    assert stored["model"].nbytes < 0.9 * model.nbytes
    assert stored["copy"].nbytes < share * copy.nbytes
