"""What a compressor emits: codes that decode to rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Dense(NamedTuple):
    """A code: every value as it is, or rounded to another dtype.

    Args:
        values: The values (..., nodes, dim).
        dtype: The dtype of the rows, if it differs from that of the values. Default: None.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.compressors.Dense(torch.tensor([[1.5, 2.0]]).half(), torch.float32).decode()
        tensor([[1.5000, 2.0000]])
    """

    values: Tensor
    dtype: torch.dtype | None = None

    def decode(self) -> Tensor:
        """Returns the rows (..., nodes, dim) that the receiver reconstructs."""
        return self.values if self.dtype is None else self.values.to(self.dtype)


class Sparse(NamedTuple):
    """A code: values of which most are zero. Only the others travel, with their positions.

    Args:
        values: The values (..., nodes, dim), 0.0 where nothing is sent.
        dtype: The dtype of the rows, if it differs from that of the values. Default: None.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.compressors.Sparse(torch.tensor([[0.0, 2.0]])).decode()
        tensor([[0., 2.]])
    """

    values: Tensor
    dtype: torch.dtype | None = None

    def decode(self) -> Tensor:
        """Returns the rows (..., nodes, dim) that the receiver reconstructs."""
        return self.values if self.dtype is None else self.values.to(self.dtype)


class Levels(NamedTuple):
    """A code: small signed integers, and one norm per block of coordinates. A value is level * norm * unit.

    Args:
        levels: Whole numbers (..., nodes, dim).
        norms: The norm of each block, (..., nodes, blocks), float32 or float16.
        block: Coordinates that share a norm, >= 1.
        unit: The value of one level where the norm is 1.
        largest: The largest magnitude that a level may have.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.compressors.Levels(torch.tensor([[2.0, -1.0]]), torch.tensor([[4.0]]), 2, 0.25, 4).decode()
        tensor([[ 2., -1.]])
    """

    levels: Tensor
    norms: Tensor
    block: int
    unit: float
    largest: int

    def decode(self) -> Tensor:
        """Returns the rows (..., nodes, dim) that the receiver reconstructs."""
        scales = self.norms.to(self.levels.dtype) * self.unit
        return per_block(self.levels, self.block, scales, torch.mul)


class Signs(NamedTuple):
    """A code: one sign per coordinate, and one mean magnitude per block of coordinates.

    Args:
        signs: 1 or -1, (..., nodes, dim).
        means: The mean magnitude of each block, (..., nodes, blocks), float32.
        block: Coordinates that share a mean, >= 1.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.compressors.Signs(torch.tensor([[1.0, -1.0]]), torch.tensor([[0.5]]), 2).decode()
        tensor([[ 0.5000, -0.5000]])
    """

    signs: Tensor
    means: Tensor
    block: int

    def decode(self) -> Tensor:
        """Returns the rows (..., nodes, dim) that the receiver reconstructs."""
        return per_block(self.signs, self.block, self.means.to(self.signs.dtype), torch.mul)


Code = Dense | Sparse | Levels | Signs


def tensors_in(code: Code) -> list[Tensor]:
    """Returns the tensors of a code, in order."""
    return [value for value in code if isinstance(value, Tensor)]


def with_tensors(code: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns the code with every tensor changed by a function."""
    return type(code)(*(change(value) if isinstance(value, Tensor) else value for value in code))


def row_of(code: Any, *index: int) -> Any:
    """Returns the code of one row of a stack, with tensors of one row."""
    return with_tensors(code, lambda tensor: tensor[index].unsqueeze(0))


def per_block(rows: Tensor, block: int, scales: Tensor, operation) -> Tensor:
    """Returns operation(rows, scale of each coordinate's block); the last block may be shorter."""
    dim = rows.shape[-1]
    if block >= dim:
        return operation(rows, scales)
    whole = dim // block * block
    body = operation(rows[..., :whole].unflatten(-1, (-1, block)), scales[..., : whole // block, None]).flatten(-2)
    return body if whole == dim else torch.cat([body, operation(rows[..., whole:], scales[..., -1:])], dim=-1)
