"""Encodes the codes of one node's message as bytes."""

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairmesh.compression.codes import (
    Code,
    Dense,
    Levels,
    Signs,
    Sparse,
)
from fairmesh.compression.formats import (
    CODED,
    COUNT,
    GAP_BUCKETS,
    HEADER,
    MAGIC,
    PACK,
    PACKED,
    PART,
    RAW,
    SIGNS,
    VERSION,
    Gaps,
    Stream,
    bucket_of,
    has_table,
    is_rare,
    level_sizes,
    shortest,
    sparse_sizes,
    without_zero,
)


def _bits_of(values: np.ndarray, widths: np.ndarray) -> bytes:
    """Returns the low bits of whole numbers, as many as each one's width, least significant first, concatenated."""
    total = int(widths.sum())
    owner = np.repeat(np.arange(len(values)), widths)
    position = np.arange(total) - np.repeat(np.cumsum(widths) - widths, widths)
    return np.packbits(((values[owner] >> position) & 1).astype(np.uint8), bitorder="little").tobytes()


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().reshape(-1).cpu().numpy()


def _raw(values: np.ndarray) -> bytes:
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def _histogram(symbols: np.ndarray, width: int) -> np.ndarray:
    return np.bincount(symbols, minlength=width)[None]


class _RowGaps(NamedTuple):
    """The gaps between the nonzero entries of one row, to be written."""

    buckets: np.ndarray  # int32
    distances: np.ndarray
    extra: np.ndarray  # bits of each
    cost: Gaps

    @staticmethod
    def between(at: np.ndarray) -> "_RowGaps":
        distances = np.diff(at, prepend=-1)
        buckets, extra = (t.numpy() for t in bucket_of(torch.from_numpy(distances)))
        stream = Stream.of(_histogram(buckets, GAP_BUCKETS))
        cost = Gaps(np.array([len(at)]), stream, np.array([extra.sum()]))
        return _RowGaps(buckets.astype(np.int32), distances, extra, cost)

    def encoded(self) -> bytes:
        buckets = self.cost.buckets.encoded(self.buckets)
        return COUNT.pack(len(self.distances)) + buckets + _bits_of(self.distances, self.extra)


def encode_part(code: Code) -> bytes:
    """Returns the bytes of one row's code, whose tensors have one row each."""
    if isinstance(code, Dense):
        return PART.pack(RAW, code.values.shape[-1]) + _raw(_array(code.values))
    if isinstance(code, Signs):
        bits = np.packbits(_array(code.signs) > 0, bitorder="little").tobytes()
        return PART.pack(SIGNS, code.signs.shape[-1]) + _raw(_array(code.means)) + bits
    return _encoded_sparse(_array(code.values)) if isinstance(code, Sparse) else _encoded_levels(code)


def _encoded_sparse(values: np.ndarray) -> bytes:
    at = np.flatnonzero(values)
    gaps = _RowGaps.between(at)
    form = shortest(sparse_sizes(len(values), values.itemsize, gaps.cost))
    return PART.pack(form, len(values)) + (_raw(values) if form == RAW else gaps.encoded() + _raw(values[at]))


def _encoded_levels(code: Levels) -> bytes:
    levels = _array(code.levels).astype(np.int32)
    dim, head = len(levels), _raw(_array(code.norms))
    if not has_table(code):
        return PART.pack(PACKED, dim) + head + _packed(levels)
    symbols = levels + np.int32(code.largest)
    counts = _histogram(symbols, 2 * code.largest + 1)
    stream, gaps, runs = Stream.of(counts), None, None
    if is_rare(dim - counts[0, code.largest], dim):
        gaps = _RowGaps.between(np.flatnonzero(levels))
        runs = gaps.cost, Stream.of(without_zero(counts, code.largest))
    form = shortest(level_sizes(dim, stream, runs))
    head = PART.pack(form, dim) + head
    if form == PACKED:
        return head + _packed(levels)
    if form == CODED or gaps is None or runs is None:
        return head + stream.encoded(symbols)
    return head + gaps.encoded() + runs[1].encoded(symbols[symbols != code.largest])


def _packed(levels: np.ndarray) -> bytes:
    lowest = int(levels.min())
    bits = (int(levels.max()) - lowest).bit_length()
    planes = (((levels - lowest)[:, None] >> np.arange(bits)) & 1).astype(np.uint8)
    return PACK.pack(lowest, bits) + np.packbits(planes.reshape(-1), bitorder="little").tobytes()


def encode(codes: Mapping[str, Code], round_index: int) -> bytes:
    """Returns the bytes of one node's message.

    Args:
        codes: The parts in order; the tensors of each have one row.
        round_index: The round that the message belongs to.
    """
    body = b"".join(encode_part(code) for code in codes.values())
    bare = HEADER.pack(MAGIC, VERSION, len(codes), round_index, len(body), 0)
    checksum = zlib.crc32(body, zlib.crc32(bare))
    return HEADER.pack(MAGIC, VERSION, len(codes), round_index, len(body), checksum) + body
