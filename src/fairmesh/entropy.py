"""Entropy coding of whole numbers: a byte of weight per symbol, an ANS coder, and lengths known without coding.

A message carries its own histogram, each count rounded to a byte: an 8-bit float of 4 + 4 bits, exact in integers. From
histogram and bytes follows, again in integers, a bound on what the coder emits; every payload is padded to that bound.
So the length of a payload is a sum over its histogram, the same number on every device, whether or not anyone encodes.
"""

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

WIDEST = 4096  # symbols; a wider alphabet is not worth its table

_ONE = 1 << 16  # fixed point of code lengths, in bits
_TOP = 30 << 15  # the largest weight
_PRECISION = 24  # bits of the coder's probabilities
_MANTISSA = 12  # bits of log2(sum of weights) looked up

# What a symbol may cost beyond log2(sum / weight): the coder's rounding of states, log2(1 + 2^-8), since its state is
# at least 2^8 times a weight when it divides, and of probabilities, log2(1 / (1 - WIDEST / 2^24)).
_EXCESS = math.ceil(_ONE * (math.log2(1 + 2.0**-8) - math.log2(1 - WIDEST / 2.0**_PRECISION)))
_STATE_BITS = 64  # what is left in the coder at the end


@cache
def _weights() -> tuple[int, ...]:
    """The weight that each byte stands for; 0 is a symbol that does not occur."""
    return (0, *((16 + (k & 15)) << (k >> 4) for k in range(255)))


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, their log2 rounded down, and log2(1 + k / 2^12) rounded up, the logs in fixed point."""
    weights = _weights()
    log_weights = [0, *(math.floor(_ONE * math.log2(w) - 1e-6) for w in weights[1:])]
    steps = 1 << _MANTISSA
    log_mantissas = [math.ceil(_ONE * math.log2(1 + k / steps) + 1e-6) for k in range(steps + 1)]
    return tuple(torch.tensor(t, dtype=torch.int64, device=device) for t in (weights, log_weights, log_mantissas))  # type: ignore[return-value]


def histograms(symbols: Tensor, width: int, mask: Tensor | None = None) -> Tensor:
    """How often each of 0 .. width - 1 occurs in every row of int64 (rows, count), where the mask is true."""
    rows = symbols.shape[0]
    if symbols.device.type == "cpu":
        flat = symbols + width * torch.arange(rows).unsqueeze(-1)
        return torch.bincount(flat.flatten() if mask is None else flat[mask], minlength=rows * width).view(rows, width)
    ones = torch.ones_like(symbols, dtype=torch.int32) if mask is None else mask.to(torch.int32)
    counts = torch.zeros(rows, width, dtype=torch.int32, device=symbols.device)
    return counts.scatter_add_(1, symbols, ones).to(torch.int64)


def weight_bytes(counts: Tensor) -> Tensor:
    """The byte of each symbol of a histogram (..., width): its count relative to the largest, rounded to nearest."""
    weights, _, _ = _tables(counts.device)
    largest = counts.amax(dim=-1, keepdim=True).clamp(min=1)
    wanted = counts * _TOP // largest
    above = torch.searchsorted(weights, wanted).clamp(max=255)  # the first weight that is not smaller
    below = (above - 1).clamp(min=1)
    nearest = torch.where(weights[above] - wanted < wanted - weights[below], above, below)
    return torch.where(counts > 0, nearest.clamp(min=1), 0)


def words(counts: Tensor, table: Tensor) -> Tensor:
    """How many 32-bit words a payload with this histogram (..., width) is padded to; none where one symbol is alone."""
    weights, log_weights, log_mantissas = _tables(counts.device)
    total = weights[table].sum(dim=-1)
    mantissa, exponent = torch.frexp(total.double())  # exact: the sum is far below 2^53; mantissa in [1/2, 1)
    step = ((mantissa * 2 - 1) * (1 << _MANTISSA)).ceil().to(torch.int64)
    log_total = (exponent.to(torch.int64) - 1) * _ONE + log_mantissas[step]
    bits = counts * (log_total.unsqueeze(-1) - log_weights[table] + _EXCESS)
    needed = (bits.sum(dim=-1) + (_STATE_BITS + 32) * _ONE - 1) // (32 * _ONE)
    return torch.where((counts > 0).sum(dim=-1) > 1, needed, 0)


def _model(table: np.ndarray):
    import constriction

    weights = np.array(_weights(), dtype=np.float64)[table]
    return constriction.stream.model.Categorical(weights, perfect=False)  # pyright: ignore[reportAttributeAccessIssue]


def coded(symbols: np.ndarray, table: np.ndarray, length: int) -> bytes:
    """Symbols (int32) as `length` 32-bit words, the last of them padding."""
    if length == 0:
        return b""
    import constriction

    coder = constriction.stream.stack.AnsCoder()  # pyright: ignore[reportAttributeAccessIssue]
    coder.encode_reverse(symbols, _model(table))
    found = coder.get_compressed()
    if len(found) > length:
        raise AssertionError(f"{len(found)} words for a bound of {length}")
    return found.astype("<u4").tobytes() + bytes(4 * (length - len(found)))


def decoded(payload: bytes, table: np.ndarray, count: int) -> np.ndarray | None:
    """`count` symbols, or None where the payload is not one that `coded` makes."""
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
