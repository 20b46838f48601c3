"""The exact length of every message of a stack, without encoding any."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairmesh.codec.sizes import HEADER_BYTES, PART, has_table, sizes_of_rows
from fairmesh.compression import Code, Levels, Sparse

_CAPTURES_KEPT = 16
_captures: dict[Any, "_Capture"] = {}


def part_sizes(code: Code) -> Tensor:
    """The exact bytes of each row's part: (..., nodes)."""
    first = _first(code)
    flat = {name: t.reshape(-1, t.shape[-1]) for name, t in code._asdict().items() if isinstance(t, Tensor)}
    return _counter(first)(code._replace(**flat)).reshape(first.shape[:-1])


def plain_size(rows: Tensor) -> int:
    """The bytes of a message that holds one row as it is."""
    return HEADER_BYTES + PART.size + rows.shape[-1] * rows.element_size()


def _first(code: Code) -> Tensor:
    """The tensor that decides a code's length; of the others only the shape matters."""
    return next(t for t in code if isinstance(t, Tensor))


def _counter(first: Tensor) -> Callable[[Code], Tensor]:
    """On a GPU, where launching the few dozen small operations costs more than running them, a capture of them."""
    return _replayed if first.is_cuda and not torch.cuda.is_current_stream_capturing() else sizes_of_rows


def _replayed(code: Code) -> Tensor:
    if not (isinstance(code, Sparse) or (isinstance(code, Levels) and has_table(code))):
        return sizes_of_rows(code)  # nothing but shapes decides
    key = type(code), *((t.shape, t.dtype, t.device) if isinstance(t, Tensor) else t for t in code)
    if key not in _captures:
        while len(_captures) >= _CAPTURES_KEPT:
            del _captures[next(iter(_captures))]
        _captures[key] = _Capture(code)
    return _captures[key](code)


class _Capture:
    """sizes_of_rows for codes of one shape as a CUDA graph."""

    def __init__(self, code: Code):
        self._code = code._replace(**{name: t.clone() for name, t in code._asdict().items() if isinstance(t, Tensor)})
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            sizes_of_rows(self._code)  # once outside, so that tables are made before the capture
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._sizes = sizes_of_rows(self._code)

    def __call__(self, code: Code) -> Tensor:
        _first(self._code).copy_(_first(code))
        self._graph.replay()
        return self._sizes.clone()
