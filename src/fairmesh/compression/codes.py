"""What a compressor emits: codes that decode to rows."""

from typing import NamedTuple

import torch
from torch import Tensor


class Dense(NamedTuple):
    """Values as they are, or rounded to another dtype."""

    values: Tensor  # (..., nodes, dim)
    dtype: torch.dtype | None = None  # of the rows, where it is not the values' own

    def decode(self) -> Tensor:
        return self.values if self.dtype is None else self.values.to(self.dtype)


class Sparse(NamedTuple):
    """Values of which most are zero; the zeros do not travel."""

    values: Tensor  # (..., nodes, dim)
    dtype: torch.dtype | None = None  # of the rows, where it is not the values' own

    def decode(self) -> Tensor:
        return self.values if self.dtype is None else self.values.to(self.dtype)


class Levels(NamedTuple):
    """Small signed integers and the value of one level for every block of coordinates."""

    levels: Tensor  # (..., nodes, dim), whole numbers
    norms: Tensor  # (..., nodes, blocks), float32 or float16
    block: int  # coordinates that share a norm
    unit: float  # the value of one level where the norm is 1
    largest: int  # no level is beyond this, either way

    def decode(self) -> Tensor:
        scales = self.norms.to(self.levels.dtype) * self.unit
        return per_block(self.levels, self.block, scales, torch.mul)


class Signs(NamedTuple):
    """A sign for every coordinate and the mean magnitude of every block."""

    signs: Tensor  # (..., nodes, dim), 1 or -1
    means: Tensor  # (..., nodes, blocks), float32
    block: int  # coordinates that share a mean

    def decode(self) -> Tensor:
        return per_block(self.signs, self.block, self.means.to(self.signs.dtype), torch.mul)


Code = Dense | Sparse | Levels | Signs


def per_block(rows: Tensor, block: int, scales: Tensor, operation) -> Tensor:
    """operation(rows, scale of each coordinate's block); the last block may be shorter."""
    dim = rows.shape[-1]
    if block >= dim:
        return operation(rows, scales)
    whole = dim // block * block
    body = operation(rows[..., :whole].unflatten(-1, (-1, block)), scales[..., : whole // block, None]).flatten(-2)
    return body if whole == dim else torch.cat([body, operation(rows[..., whole:], scales[..., -1:])], dim=-1)
