"""Entropy coding of whole numbers: one byte of weight per symbol, an ANS coder, and lengths known without coding.

A message carries its own histogram, with each count rounded to a byte: an 8-bit float of 4 + 4 bits, exact in integers.
The histogram and these bytes give, again in integers, a bound on what the coder emits, and every payload is padded to
that bound. So the length of a payload is a sum over its histogram. It is the same number on every device, and nothing
has to be encoded to know it.
"""

import itertools
import math
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairmesh.numerics.tracing import values_readable

Array = Tensor | np.ndarray

WIDEST = 4096  # symbols; the table of a larger alphabet costs more than it saves

_LANES = 4  # counters per symbol, used in turn
_ONE = 1 << 16  # fixed point of code lengths, in bits
_TOP = 30 << 15  # the largest weight
_PRECISION = 24  # bits of the coder's probabilities
_FINENESS = 12  # bits behind the point of log2(sum of weights), which is looked up
_MOST_OCTAVES = 33  # the sum of WIDEST weights lies below 2^33

# What a symbol may cost beyond log2(sum / weight): the coder's rounding of states, log2(1 + 2^-8), since its state is
# at least 2^8 times a weight when it divides, and of probabilities, log2(1 / (1 - WIDEST / 2^24)).
_EXCESS = math.ceil(_ONE * (math.log2(1 + 2.0**-8) - math.log2(1 - WIDEST / 2.0**_PRECISION)))
_STARTUP = 33 * _ONE  # bits that the coder may lose before its state is full


@cache
def _weights() -> tuple[int, ...]:
    """Returns the weight that each byte stands for; 0 is a symbol that does not occur."""
    return (0, *((16 + (k & 15)) << (k >> 4) for k in range(255)))


@cache
def _tables(device: torch.device | None) -> tuple[Any, ...]:
    """Returns lookup tables, as tensors on a device or as numpy arrays.

    They are the weights; their log2 rounded down, in fixed point; twice the midpoints between neighbouring weights; and
    the largest whole number whose log2 is at most k / 2^12."""
    weights = _weights()
    log_weights = [0, *(math.floor(_ONE * math.log2(w) - 1e-6) for w in weights[1:])]
    middles = [a + b for a, b in itertools.pairwise(weights[1:])]
    steps = np.arange(_MOST_OCTAVES << _FINENESS)
    totals = np.floor(np.exp2(steps / (1 << _FINENESS)) * (1 - 1e-14) + 1e-6)
    tables = [np.array(table, dtype=np.int64) for table in (weights, log_weights, middles, totals)]
    return tuple(tables if device is None else (torch.from_numpy(table).to(device) for table in tables))


@cache
def _kernels() -> Any:
    try:
        from fairmesh.compression import triton_counts
    except ImportError:  # a build of torch without Triton; torch's own operations give the same, more slowly
        return None
    return triton_counts


def gpu_kernels(values: Tensor) -> Any:
    """Returns the kernels of triton_counts if they can count these values, else None."""
    return _kernels() if values.is_cuda else None


def level_histograms(levels: Tensor, largest: int) -> Tensor:
    """Returns how often each of -largest .. largest occurs in every row of (rows, count)."""
    rows, width = levels.shape[0], 2 * largest + 1
    if (kernels := gpu_kernels(levels)) is not None:
        return kernels.level_histograms(levels, largest).long()
    if not values_readable(levels):
        return histograms(levels.to(torch.int64).add_(largest).clamp_(0, width - 1), width)
    # On a CPU this is one pass over small integers. Every row has counters of its own, and neighbours in a row use
    # different ones: most levels are zero, and incrementing one counter many times in a row would stall.
    counters = rows * width * _LANES
    kind = torch.int16 if counters < 1 << 15 else torch.int32
    first = _first_counters(rows, levels.shape[-1], largest, kind)
    symbols = levels.to(kind).add_(first)
    try:
        counts = torch.bincount(symbols.view(-1), minlength=counters).numpy()  # numpy is faster on few numbers
    except RuntimeError:  # a diverged node's levels are not numbers
        symbols = levels.nan_to_num(0.0).to(kind).add_(first)
        counts = torch.bincount(symbols.view(-1), minlength=counters).numpy()
    counts = counts[:counters]
    return torch.from_numpy(counts.reshape(rows, _LANES, width).sum(axis=1))


@lru_cache(maxsize=4)
def _first_counters(rows: int, count: int, largest: int, kind: torch.dtype) -> Tensor:
    """Returns the number of the counter of level zero, for every coordinate of every row."""
    width = 2 * largest + 1
    lanes = torch.arange(count).remainder_(_LANES).mul_(width)
    return (lanes + (torch.arange(rows) * (width * _LANES) + largest).unsqueeze(-1)).to(kind)


# What follows is the same arithmetic for a stack of rows on any device (torch) and for the one row that is encoded
# (numpy, whose calls on a few dozen numbers cost a fifth of torch's).


def library(array: Array) -> Any:
    """Returns the module, torch or numpy, that an array belongs to."""
    return torch if isinstance(array, Tensor) else np


def integers(array: Array) -> Any:
    return array.long() if isinstance(array, Tensor) else array.astype(np.int64)


def doubles(array: Array) -> Any:
    return array.double() if isinstance(array, Tensor) else array.astype(np.float64)


def _tables_for(array: Array) -> tuple[Any, ...]:
    return _tables(array.device if isinstance(array, Tensor) else None)


def histograms(symbols: Tensor, width: int, mask: Tensor | None = None) -> Tensor:
    """Returns how often each of 0 .. width - 1 occurs in every row of int64 (rows, count), where the mask is true."""
    rows = symbols.shape[0]
    one = torch.ones((), dtype=torch.int32, device=symbols.device)
    counts = torch.zeros(rows, width, dtype=torch.int32, device=symbols.device)
    return counts.scatter_add_(1, symbols, one.expand_as(symbols) if mask is None else mask.to(torch.int32)).long()


def weight_bytes(counts: Array) -> Any:
    """Returns the byte of each symbol of a histogram (rows, width): its count relative to the largest, rounded."""
    xp = library(counts)
    _, _, middles, _ = _tables_for(counts)
    largest = xp.clip(xp.amax(counts, axis=-1, keepdims=True), 1, None)
    nearest = xp.searchsorted(middles, counts * _TOP // largest * 2)
    return (nearest + 1) * (counts > 0)


def _steps(total: Any, totals: Any) -> Any:
    """Returns the first step of the table `totals` at or above each total.

    A binary search on a GPU would wait for memory 17 times. There the step is guessed by a logarithm, which may be off
    by one, and corrected by the table."""
    if not isinstance(total, Tensor) or not total.is_cuda:
        return library(total).searchsorted(totals, total)
    guess = (total.clamp(min=1).double().log2() * (1 << _FINENESS)).ceil().long()
    guess = guess + (totals[guess] < total).long()
    return guess - ((guess > 0) & (totals[(guess - 1).clamp(min=0)] >= total)).long()


def words(counts: Array, table: Array) -> Any:
    """Returns the 32-bit words that a payload with this histogram (rows, width) is padded to; 0 for a single symbol.

    With b bits of information the coder ends with k words behind a state of 32 to 64 bits, 32 k + 32 <= b, and writes
    k + 2 words: at most b / 32 + 1."""
    xp = library(counts)
    weights, log_weights, _, totals = _tables_for(counts)
    log_total = _steps(weights[table].sum(-1), totals) * (_ONE >> _FINENESS)  # rounded up
    bits = counts.sum(-1) * (log_total + _EXCESS) - (counts * log_weights[table]).sum(-1)
    alone = xp.amax(counts, axis=-1) == counts.sum(-1)
    return ((bits + _STARTUP) // (32 * _ONE) + 1) * ~alone


def _model(table: np.ndarray):
    import constriction

    weights = _tables(None)[0][table].astype(np.float64)
    return constriction.stream.model.Categorical(weights, perfect=False)  # pyright: ignore[reportAttributeAccessIssue]


def coded(symbols: np.ndarray, table: np.ndarray, length: int) -> bytes:
    """Returns symbols (int32) encoded as `length` 32-bit words, the last of them padding."""
    if length == 0:
        return b""
    import constriction

    coder = constriction.stream.stack.AnsCoder()  # pyright: ignore[reportAttributeAccessIssue]
    coder.encode_reverse(symbols, _model(table))
    found = coder.get_compressed()
    if len(found) > length:
        # The bound is proven, so this does not happen.
        raise RuntimeError(f"{len(found)} words for a bound of {length}")
    return found.astype("<u4").tobytes() + bytes(4 * (length - len(found)))


def decoded(payload: bytes, table: np.ndarray, count: int) -> np.ndarray | None:
    """Returns `count` symbols, or None if `coded` would not make this payload."""
    present = np.flatnonzero(table)
    if len(payload) == 0:
        return np.full(count, present[0], dtype=np.int32) if len(present) == 1 else None
    import constriction

    found = np.frombuffer(payload, dtype="<u4").astype(np.uint32)
    used = len(found) - int(np.argmax(found[::-1] != 0)) if found.any() else 0
    if used == 0 or len(present) < 2:
        return None
    coder = constriction.stream.stack.AnsCoder(found[:used])  # pyright: ignore[reportAttributeAccessIssue]
    symbols = coder.decode(_model(table), count)
    return symbols if coder.is_empty() else None
