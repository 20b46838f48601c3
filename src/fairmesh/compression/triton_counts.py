"""GPU kernels for the lengths of messages, one pass each: histograms of levels, and of the gaps between entries that
are not zero. They give the same integers as the torch operations in formats.py and entropy.py."""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_AT_ONCE = 2048  # coordinates
_PROGRAMS = 1024  # about as many keep a large GPU busy; with more rows each does more steps
_GAP_STEPS = 8


@triton.jit
def _level_kernel(levels, counts, dim, largest, width, STEPS: tl.constexpr, BINS: tl.constexpr, AT_ONCE: tl.constexpr):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * (AT_ONCE * STEPS)
    found = tl.zeros([BINS], dtype=tl.int32)
    for step in range(STEPS):
        at = first + step * AT_ONCE + tl.arange(0, AT_ONCE)
        symbol = tl.load(levels + row * dim + at, mask=at < dim, other=0.0).to(tl.int32) + largest
        known = (at < dim) & (symbol >= 0) & (symbol < width)  # a diverged node's levels are not numbers
        found += tl.histogram(tl.where(known, symbol, BINS - 1), BINS)  # the last bin is spare
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + row * width + bins, found, mask=(bins < width) & (found > 0))


@triton.jit
def _gap_kernel(
    values, nonzero, counts, extras, dim, RARE: tl.constexpr, STEPS: tl.constexpr, BINS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * (AT_ONCE * STEPS)
    if RARE > 0:  # only rows in which entries are rare
        if tl.load(nonzero + row) * RARE >= dim:
            return
    lane, last, back = tl.arange(0, AT_ONCE), -1, first
    while (back > 0) & (last < 0):  # the last entry before this piece of the row
        back -= AT_ONCE
        last = tl.max(tl.where(tl.load(values + row * dim + back + lane) != 0, back + lane, -1))
    found, extra_bits = tl.zeros([BINS], dtype=tl.int32), tl.zeros([], dtype=tl.int64)
    for step in range(STEPS):
        start = first + step * AT_ONCE
        at = start + lane
        present = tl.load(values + row * dim + at, mask=at < dim, other=0.0) != 0
        before = tl.load(values + row * dim + at - 1, mask=(at > start) & (at <= dim), other=0.0) != 0
        latest = tl.associative_scan(tl.where(before, at - 1, last), 0, _larger)
        gap = (at - latest).to(tl.int64)
        exponent = (gap.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023  # floor(log2), exact
        extra = tl.maximum(exponent - 2, 0)
        bucket = tl.where(gap < 8, gap - 1, 7 + (exponent - 3) * 4 + ((gap >> extra) & 3))
        found += tl.histogram(tl.where(present, bucket, BINS - 1).to(tl.int32), BINS)  # no gap reaches the last bucket
        extra_bits += tl.sum(tl.where(present & (gap >= 8), extra, 0))
        last = tl.maximum(last, tl.max(tl.where(present, at, -1)))
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + row * BINS + bins, found, mask=(bins < BINS - 1) & (found > 0))
    tl.atomic_add(extras + row, extra_bits)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@torch.library.custom_op("fairmesh::level_histograms", mutates_args=())
def level_histograms(levels: Tensor, largest: int) -> Tensor:
    """Returns how often each of -largest .. largest occurs in every row of (rows, dim): int32 (rows, 2 largest + 1)."""
    levels = levels.contiguous()
    (rows, dim), width = levels.shape, 2 * largest + 1
    counts = torch.zeros(rows, width, dtype=torch.int32, device=levels.device)
    bins = max(16, triton.next_power_of_2(width + 1))
    steps = min(8, triton.next_power_of_2(triton.cdiv(rows * triton.cdiv(dim, _AT_ONCE), _PROGRAMS)))
    grid = (rows, triton.cdiv(dim, _AT_ONCE * steps))
    _level_kernel[grid](levels, counts, dim, largest, width, steps, bins, _AT_ONCE)  # pyright: ignore[reportIndexIssue]
    return counts


@level_histograms.register_fake
def _(levels: Tensor, largest: int) -> Tensor:
    return levels.new_empty(levels.shape[0], 2 * largest + 1, dtype=torch.int32)


@torch.library.custom_op("fairmesh::gap_histograms", mutates_args=())
def gap_histograms(values: Tensor, nonzero: Tensor, rare: int, buckets: int) -> tuple[Tensor, Tensor]:
    """Returns the histogram of gaps (rows, buckets) and the extra bits (rows,) of every row.

    With rare > 0 they are zero for rows in which one coordinate in `rare` or more is not zero."""
    values = values.contiguous()
    rows, dim = values.shape
    counts = torch.zeros(rows, buckets, dtype=torch.int32, device=values.device)
    extras = torch.zeros(rows, dtype=torch.int64, device=values.device)
    grid = (rows, triton.cdiv(dim, _AT_ONCE * _GAP_STEPS))
    _gap_kernel[grid](  # pyright: ignore[reportIndexIssue]
        values, nonzero, counts, extras, dim, rare, _GAP_STEPS, buckets, _AT_ONCE
    )
    return counts, extras


@gap_histograms.register_fake
def _(values: Tensor, nonzero: Tensor, rare: int, buckets: int) -> tuple[Tensor, Tensor]:
    rows = values.shape[0]
    return values.new_empty(rows, buckets, dtype=torch.int32), values.new_empty(rows, dtype=torch.int64)
