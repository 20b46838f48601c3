"""Long rows of numbers as fewer bytes, without loss. Rows of a state resemble each other: public copies are near the
model, and the sites' copies near each other. So a row is stored as its difference to a similar row before it, as
integers that count the representable numbers in between. These are stored by bytes of equal significance, and the
significant ones, which are mostly zero, are deflated."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SHORT_ROW = 4096  # bytes; shorter rows stay as they are
_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_COMPARED = 4096  # numbers of two rows, to see how similar they are
_SAMPLE = 1 << 14  # bytes, to see whether deflating pays
_EXPONENT_BITS = 4  # that deflating saves of each number of a row by itself, about
_PAYS = 0.95  # of the size

Place = tuple[str, int]  # of a row: in which tensor, and which row of it


def packed(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns tensors with their long rows packed, and for each packed tensor what `unpacked` needs to know."""
    found: dict[str, Tensor] = {}
    layout: dict[str, Any] = {}
    known: dict[tuple[int, int], list[tuple[Place, np.ndarray]]] = {}  # by bytes of a number and length
    for name, given in tensors.items():
        tensor = given.detach().cpu().contiguous()
        size = tensor.element_size()
        long = tensor.ndim > 0 and tensor.shape[-1] * size >= _SHORT_ROW
        if not (long and tensor.is_floating_point() and size in _UNSIGNED):
            found[name] = tensor
            continue
        numbers = _ordered(tensor.reshape(-1, tensor.shape[-1]))
        rows, content = [], []
        alike = known.setdefault((size, tensor.shape[-1]), [])
        for k, row in enumerate(numbers):
            place, near = _nearest(row, alike)
            planes = [_deflated(plane) for plane in _planes(row if near is None else _difference(row, near))]
            rows.append({"near": place, "planes": [len(plane) for plane in planes]})
            content += planes
            alike.append(((name, k), row))
        dtype = str(tensor.dtype).removeprefix("torch.")
        layout[name] = {"dtype": dtype, "shape": list(tensor.shape), "rows": rows}
        found[name] = torch.frombuffer(bytearray(b"".join(content)), dtype=torch.uint8)
    return found, layout


def unpacked(stored: Mapping[str, Tensor], layout: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of which `packed` made these."""
    found = {name: tensor for name, tensor in stored.items() if name not in layout}
    numbers: dict[Place, np.ndarray] = {}
    for name, entry in layout.items():  # in the order in which they were packed
        length = entry["shape"][-1]
        content, rows = stored[name].numpy().data, []
        for k, one in enumerate(entry["rows"]):
            planes = []
            for size in one["planes"]:
                plane, content = content[:size], content[size:]
                planes.append(plane if size == length else zlib.decompress(plane))
            row = _joined(planes)
            row = row if one["near"] is None else _added(row, numbers[tuple(one["near"])])
            numbers[name, k] = row
            rows.append(row)
        found[name] = _as_floats(np.stack(rows), getattr(torch, entry["dtype"])).reshape(entry["shape"])
    return found


def _nearest(row: np.ndarray, others: list[tuple[Place, np.ndarray]]) -> tuple[Place | None, np.ndarray | None]:
    """Returns the most similar of some rows, and its place, or None if none is similar."""
    step = max(1, len(row) // _COMPARED)
    least, best = 8.0 * row.itemsize - _EXPONENT_BITS, None
    for other in others:
        bits = float(np.log2(_difference(row[::step], other[1][::step]).astype(np.float64) + 1.0).mean())
        if bits < least:
            least, best = bits, other
    return best or (None, None)


def _ordered(rows: Tensor) -> np.ndarray:
    """Returns floating-point numbers as integers in the same order, so that near numbers have near integers."""
    kind = _UNSIGNED[rows.element_size()]
    bits = rows.view(torch.uint8).numpy().view(kind)
    sign = kind(1 << (8 * bits.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def _as_floats(ordered: np.ndarray, dtype: torch.dtype) -> Tensor:
    sign = ordered.dtype.type(1 << (8 * ordered.itemsize - 1))
    bits = np.where(ordered & sign, ordered ^ sign, ~ordered)
    return torch.from_numpy(bits.view(np.uint8)).view(dtype).clone()  # aligned as tensors of torch are


def _difference(row: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Returns row - near, with the sign in the lowest bit, so that small differences are small numbers."""
    apart = row - near
    negative = apart >> apart.dtype.type(8 * apart.itemsize - 1)
    return (apart << apart.dtype.type(1)) ^ (apart.dtype.type(0) - negative)


def _added(difference: np.ndarray, near: np.ndarray) -> np.ndarray:
    one = difference.dtype.type(1)
    return near + ((difference >> one) ^ (difference.dtype.type(0) - (difference & one)))


def _planes(row: np.ndarray) -> list[bytes]:
    """Returns the bytes of equal significance of all numbers, one after the other."""
    return [plane.tobytes() for plane in row.view(np.uint8).reshape(len(row), row.itemsize).T]


def _joined(planes: list[Any]) -> np.ndarray:
    stacked = np.stack([np.frombuffer(plane, dtype=np.uint8) for plane in planes], axis=-1)
    return np.ascontiguousarray(stacked).view(_UNSIGNED[len(planes)]).reshape(-1)


def _deflated(plane: bytes) -> bytes:
    """Returns the bytes deflated, or as they are if that does not pay. The two differ in length."""
    middle = len(plane) // 2
    sample = plane[middle : middle + _SAMPLE]
    if len(zlib.compress(sample, 1)) > _PAYS * len(sample):
        return plane
    found = zlib.compress(plane, 1)
    return found if len(found) < _PAYS * len(plane) else plane
