"""The formats of a message's parts: their lengths, which are known without encoding, and their bytes."""

import functools
import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairmesh.compression import entropy
from fairmesh.compression.codes import Code, Dense, Levels, Signs, Sparse, tensors_in, with_tensors
from fairmesh.compression.entropy import Array
from fairmesh.numerics.tracing import values_readable

VERSION = 1
MAGIC = b"fm"
HEADER = struct.Struct("<2sBBIII")  # magic, version, parts, round, length of the parts, CRC-32 of all before and after
PART = struct.Struct("<BI")  # format, dimension
PACK = struct.Struct("<iB")  # lowest level, bits per level
TABLE = struct.Struct("<HHI")  # lowest symbol, number of symbols up to the highest, words of payload
COUNT = struct.Struct("<I")
HEADER_BYTES = HEADER.size
CODED_HEADER_BYTES = HEADER.size + PART.size + TABLE.size  # of a message with one entropy-coded part

RAW, PACKED, CODED, RUNS, SPARSE, SIGNS = range(6)

GAP_BUCKETS = 128
RARE = 32  # entries are rare if fewer than one in this many is not zero
_GAPS_AT_ONCE = 1 << 24  # coordinates, on a GPU
NUMPY = {torch.float16: "<f2", torch.float32: "<f4", torch.float64: "<f8"}


def bucket_of(gaps: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bucket and the number of extra bits of gaps >= 1: exact up to 7, then four buckets per doubling."""
    exponent = torch.frexp(gaps.double()).exponent.to(torch.int64) - 1  # floor(log2), exact
    extra = (exponent - 2).clamp(min=0)
    fine = 7 + (exponent - 3) * 4 + ((gaps >> extra) & 3)
    return torch.where(gaps < 8, gaps - 1, fine), torch.where(gaps < 8, 0, extra)


class Gaps(NamedTuple):
    """The cost of the distances between a row's nonzero entries."""

    entries: Any  # (rows,)
    buckets: "Stream"
    extra_bits: Any  # that complete the buckets, (rows,)

    def size(self) -> Any:
        """Returns the bytes of the number of entries, their buckets and the extra bits."""
        return COUNT.size + self.buckets.size() + whole_bytes(self.extra_bits)


def gaps(values: Tensor, nonzero: Tensor | None = None) -> Gaps:
    """Returns the gaps of every row of (rows, dim); the first gap counts from just before the row.

    If the number of nonzero entries per row is given, only rows in which they are rare matter, and a GPU skips the
    others."""
    if (kernels := entropy.gpu_kernels(values)) is not None:
        known = values.new_empty(0, dtype=torch.int64) if nonzero is None else nonzero
        counts, extra = kernels.gap_histograms(values, known, 0 if nonzero is None else RARE, GAP_BUCKETS)
        return Gaps(counts.sum(dim=-1) if nonzero is None else nonzero, Stream.of(counts.long()), extra)
    # Some rows at a time, since the intermediate integers take ten times the memory of the values.
    at_once = _GAPS_AT_ONCE // values.shape[-1] if values.is_cuda else len(values) // 16
    parts = [gap_counts(rows) for rows in values.split(max(1, at_once))]
    counts, extra = (torch.cat(column) for column in zip(*parts))
    return Gaps(counts.sum(dim=-1), Stream.of(counts), extra)


def gap_counts(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the histogram of the buckets and the extra bits of every row."""
    present = values != 0
    at = torch.arange(values.shape[-1], device=values.device)
    last = torch.where(present, at, -1).cummax(dim=-1).values
    before = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    buckets, extra = bucket_of((at - before).clamp_(min=1))
    counts = entropy.histograms(torch.where(present, buckets, 0), GAP_BUCKETS, present)
    return counts, torch.where(present, extra, 0).sum(dim=-1)


def whole_bytes(bits: Any) -> Any:
    return (bits + 7) // 8


def symbols_of(counts: Array) -> Any:
    """Returns the symbols 0 .. width - 1 of a histogram."""
    width = counts.shape[-1]
    return torch.arange(width, device=counts.device) if isinstance(counts, Tensor) else np.arange(width)


def symbol_range(counts: Array) -> tuple[Any, Any]:
    """Returns the first and the last symbol that occurs; if none does, the last is the first minus one."""
    width = counts.shape[-1]
    if isinstance(counts, np.ndarray):  # its argmax returns the first of equal entries
        last = width - 1 - np.argmax(counts[:, ::-1] > 0, axis=-1)
        return np.argmax(counts > 0, axis=-1), np.where(np.any(counts > 0, axis=-1), last, -1)
    at, occurs = symbols_of(counts), counts > 0
    highest = (occurs * (at + 1)).amax(dim=-1) - 1
    lowest = width - (occurs * (width - at)).amax(dim=-1)
    return torch.minimum(lowest, highest + 1), highest


class Stream(NamedTuple):
    """The entropy-coded stream of each row: a head, a table from the first to the last symbol that occurs, and a padded
    payload. All of it follows from the histogram."""

    lowest: Any  # (rows,), torch for a stack of rows, numpy for the row that is encoded
    highest: Any
    table: Any  # (rows, width)
    words: Any

    @staticmethod
    def of(counts: Array) -> "Stream":
        table = entropy.weight_bytes(counts)
        return Stream(*symbol_range(counts), table, entropy.words(counts, table))

    def size(self) -> Any:
        """Returns the bytes of each row's stream."""
        return TABLE.size + (self.highest - self.lowest + 1) + 4 * self.words

    def encoded(self, symbols: np.ndarray) -> bytes:
        """Returns the stream of these symbols (int32) of a single row."""
        lowest, highest, words = int(self.lowest[0]), int(self.highest[0]), int(self.words[0])
        if highest < lowest:
            return TABLE.pack(0, 0, 0)
        weights = self.table[0, lowest : highest + 1]
        body = entropy.coded(symbols - np.int32(lowest), weights, words)
        return TABLE.pack(lowest, len(weights), words) + weights.astype(np.uint8).tobytes() + body


def least(sizes: Mapping[int, Any]) -> Any:
    """Returns the bytes of each row in its shortest format."""
    first, *others = sizes.values()
    return functools.reduce(entropy.library(first).minimum, others, first)


def shortest(sizes: Mapping[int, np.ndarray]) -> int:
    """Returns the shortest format of a single row, the first of equally short ones."""
    return min(sizes, key=lambda form: int(sizes[form][0]))


def sparse_sizes(dim: int, itemsize: int, gaps: Gaps) -> dict[int, Any]:
    return {SPARSE: gaps.size() + gaps.entries * itemsize, RAW: 0 * gaps.entries + dim * itemsize}


def is_rare(nonzero: Any, dim: int) -> Any:
    """Returns whether almost all entries are zero, so that coding runs of zeros may be shorter."""
    return nonzero * RARE < dim


def level_sizes(dim: int, levels: Stream, runs: tuple[Gaps, Stream] | None) -> dict[int, Any]:
    """Returns the bytes of each row by format, from the stream of all levels.

    `runs` are the gaps and the stream of the nonzero entries, given if they are rare in some row."""
    sizes = {PACKED: packed_size(dim, levels.lowest, levels.highest), CODED: levels.size()}
    if runs is not None:
        gaps, entries = runs
        never = torch.iinfo(torch.int64).max
        either = entropy.library(gaps.entries).where
        sizes[RUNS] = either(is_rare(gaps.entries, dim), gaps.size() + entries.size(), never)
    return sizes


def without_zero(counts: Array, zero: int) -> Any:
    """Returns a histogram without the level zero."""
    return counts * (symbols_of(counts) != zero)


def packed_size(dim: int, lowest: Any, highest: Any) -> Any:
    _, bits = entropy.library(lowest).frexp(entropy.doubles(highest - lowest))  # of the difference; 0 where equal
    return PACK.size + whole_bytes(dim * entropy.integers(bits))


def has_table(code: Levels) -> bool:
    return 2 * code.largest + 1 <= entropy.WIDEST


def sizes_of_rows(code: Sparse | Levels) -> Tensor:
    """Returns the exact bytes of the part of each row of (rows, dim)."""
    if isinstance(code, Sparse):
        sizes = sparse_sizes(code.values.shape[-1], code.values.element_size(), gaps(code.values))
        return PART.size + least(sizes)
    dim, head = code.levels.shape[-1], PART.size + code.norms.shape[-1] * code.norms.element_size()
    if not has_table(code):
        lowest, highest = code.levels.amin(dim=-1).to(torch.int64), code.levels.amax(dim=-1).to(torch.int64)
        return head + packed_size(dim, lowest, highest)
    counts = entropy.level_histograms(code.levels, code.largest)
    if values_readable(counts) and not is_rare(dim - counts.numpy()[:, code.largest], dim).any():
        return torch.from_numpy(head + least(level_sizes(dim, Stream.of(counts.numpy()), None)))
    nonzero = dim - counts[:, code.largest]
    runs = gaps(code.levels, nonzero), Stream.of(without_zero(counts, code.largest))
    return head + least(level_sizes(dim, Stream.of(counts), runs))


def part_sizes(code: Code) -> Tensor | int:
    """Returns the exact bytes of each row's part, (..., nodes), or one number if it follows from the shape."""
    if isinstance(code, Dense):
        return PART.size + code.values.shape[-1] * code.values.element_size()
    if isinstance(code, Signs):
        return PART.size + code.means.shape[-1] * code.means.element_size() + whole_bytes(code.signs.shape[-1])
    flat = with_tensors(code, lambda tensor: tensor.reshape(-1, tensor.shape[-1]))
    return sizes_of_rows(flat).reshape(tensors_in(code)[0].shape[:-1])


def plain_size(rows: Tensor) -> int:
    """Returns the bytes of a message that holds one uncompressed row."""
    return HEADER_BYTES + PART.size + rows.shape[-1] * rows.element_size()


# The bytes of one node's message --------------------------------------------------------------------------------------


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
    row_gaps = _RowGaps.between(at)
    form = shortest(sparse_sizes(len(values), values.itemsize, row_gaps.cost))
    return PART.pack(form, len(values)) + (_raw(values) if form == RAW else row_gaps.encoded() + _raw(values[at]))


def _encoded_levels(code: Levels) -> bytes:
    levels = _array(code.levels).astype(np.int32)
    dim, head = len(levels), _raw(_array(code.norms))
    if not has_table(code):
        return PART.pack(PACKED, dim) + head + _packed(levels)
    symbols = levels + np.int32(code.largest)
    counts = _histogram(symbols, 2 * code.largest + 1)
    stream, row_gaps, runs = Stream.of(counts), None, None
    if is_rare(dim - counts[0, code.largest], dim):
        row_gaps = _RowGaps.between(np.flatnonzero(levels))
        runs = row_gaps.cost, Stream.of(without_zero(counts, code.largest))
    form = shortest(level_sizes(dim, stream, runs))
    head = PART.pack(form, dim) + head
    if form == PACKED:
        return head + _packed(levels)
    if form == CODED or row_gaps is None or runs is None:
        return head + stream.encoded(symbols)
    return head + row_gaps.encoded() + runs[1].encoded(symbols[symbols != code.largest])


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
