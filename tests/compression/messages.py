"""Codes of all compressors, with the formats that their receivers expect."""

import torch
from torch import Tensor

from fairmesh.compression.codes import Code, row_of
from fairmesh.compression.compressors import Compressor
from tests import toys

COMPRESSORS = toys.COMPRESSORS


def code_of(compressor: Compressor, rows: Tensor, seed: int = 0) -> Code:
    generator = torch.Generator().manual_seed(seed)
    return compressor.compress(rows, toys.Given(torch.rand(rows.shape, generator=generator).to(rows.dtype)))


def template_of(compressor: Compressor, dim: int, dtype: torch.dtype) -> Code:
    return code_of(compressor, torch.zeros(1, dim, dtype=dtype))


row = row_of


def bits(code: Code) -> list:
    """Returns everything in a code, for comparison to the bit."""
    as_bytes = [t.contiguous().flatten().view(torch.uint8).tolist() for t in code if isinstance(t, Tensor)]
    return [type(code), [(t.dtype, tuple(t.shape)) for t in code if isinstance(t, Tensor)], as_bytes] + [
        item for item in code if not isinstance(item, Tensor)
    ]


def rows_of_every_kind(dim: int, dtype: torch.dtype) -> Tensor:
    """Ordinary rows, zeros, one spike, tiny and subnormal numbers, huge ones, both zeros, all equal."""
    generator = torch.Generator().manual_seed(dim)
    normal = torch.randn(8, dim, generator=generator, dtype=torch.float64)
    normal[1] = 0.0
    normal[2] *= 1e-3
    normal[2, dim // 2] = 1.0
    normal[3] *= 1e-42
    normal[4] *= 1e18
    normal[5] = torch.where(normal[5] > 0, 0.0, -0.0)
    normal[6] = 0.25
    normal[7] *= torch.rand(dim, generator=generator, dtype=torch.float64).pow(40)
    return normal.to(dtype)
