"""The exact length of every message of a stack, without encoding any."""

from torch import Tensor

from fairmesh.codec.sizes import HEADER_BYTES, PART, SizedByShape, size_by_shape, sizes_of_rows
from fairmesh.compression import Code


def part_sizes(code: Code) -> Tensor | int:
    """The exact bytes of each row's part, (..., nodes); one number where it follows from the shape."""
    if isinstance(code, SizedByShape):
        return size_by_shape(code)
    tensors = {name: t for name, t in code._asdict().items() if isinstance(t, Tensor)}
    flat = {name: t.reshape(-1, t.shape[-1]) for name, t in tensors.items()}
    return sizes_of_rows(code._replace(**flat)).reshape(next(iter(tensors.values())).shape[:-1])


def plain_size(rows: Tensor) -> int:
    """The bytes of a message that holds one row as it is."""
    return HEADER_BYTES + PART.size + rows.shape[-1] * rows.element_size()
