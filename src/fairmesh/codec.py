"""What travels: the codes of a message as bytes and back, losslessly, and the exact length of every message.

A message is a header (magic, version, number of parts, round, length, CRC-32) and its parts. A part begins with its
format and dimension; what else it holds follows from the format. The receiver decodes against *templates*, the codes of
a zero row under its own settings, so that nothing a stranger declares decides what is allocated.
"""

import math
import struct
import zlib
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairmesh import entropy
from fairmesh.compression import Code, Dense, Levels, Signs, Sparse
from fairmesh.entropy import Array
from fairmesh.errors import FairmeshError

VERSION = 1
_MAGIC = b"fm"
_HEADER = struct.Struct("<2sBBIII")  # magic, version, parts, round, length of the parts, CRC-32 of all before and after
_PART = struct.Struct("<BI")  # format, dimension
_PACK = struct.Struct("<iB")  # lowest level, bits of each
_TABLE = struct.Struct("<HHI")  # lowest symbol, how many from there to the highest, words of payload
_COUNT = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
CODED_HEADER_BYTES = _HEADER.size + _PART.size + _TABLE.size  # of a message with one entropy-coded part

_RAW, _PACKED, _CODED, _RUNS, _SPARSE, _SIGNS = range(6)

_GAP_BUCKETS = 128
_NUMPY = {torch.float16: "<f2", torch.float32: "<f4", torch.float64: "<f8"}


class DecodeError(FairmeshError):
    """Bytes that are not a message this receiver can take; the text says why."""


def _bucket_of(gaps: Tensor) -> tuple[Tensor, Tensor]:
    """Bucket and number of extra bits of gaps >= 1: exact up to 7, then four buckets to every doubling."""
    exponent = torch.frexp(gaps.double()).exponent.to(torch.int64) - 1  # floor(log2), exact
    extra = (exponent - 2).clamp(min=0)
    fine = 7 + (exponent - 3) * 4 + ((gaps >> extra) & 3)
    return torch.where(gaps < 8, gaps - 1, fine), torch.where(gaps < 8, 0, extra)


class _Gaps(NamedTuple):
    """What the distances between a row's entries that are not zero cost."""

    entries: Any  # (rows,)
    buckets: "_Stream"
    extra_bits: Any  # that complete the buckets, (rows,)

    def size(self) -> Any:
        """Bytes of the number of entries, their buckets and the extra bits."""
        return _COUNT.size + self.buckets.size() + _whole_bytes(self.extra_bits)


def _gaps(values: Tensor) -> _Gaps:
    """Of every row of (rows, dim); the first gap counts from just before the row."""
    # A sixteenth of the rows at a time: the whole numbers in between take ten times the room of the values.
    parts = [_gap_counts(rows) for rows in values.split(max(1, len(values) // 16))]
    counts, extra = (torch.cat(column) for column in zip(*parts))
    return _Gaps(counts.sum(dim=-1), _Stream.of(counts), extra)


def _gap_counts(values: Tensor) -> tuple[Tensor, Tensor]:
    """The histogram of the buckets and the extra bits of every row."""
    present = values != 0
    at = torch.arange(values.shape[-1], device=values.device)
    last = torch.where(present, at, -1).cummax(dim=-1).values
    before = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    buckets, extra = _bucket_of((at - before).clamp_(min=1))
    counts = entropy.histograms(torch.where(present, buckets, 0), _GAP_BUCKETS, present)
    return counts, torch.where(present, extra, 0).sum(dim=-1)


def _whole_bytes(bits: Any) -> Any:
    return (bits + 7) // 8


def _range(counts: Array) -> tuple[Any, Any]:
    """The first and the last symbol that occurs; the last lies before the first where none does."""
    xp = entropy.library(counts)
    occurs = entropy.integers(counts > 0)
    none = occurs.sum(-1) == 0
    lowest, highest = occurs.argmax(-1), counts.shape[-1] - 1 - xp.flip(occurs, (-1,)).argmax(-1)
    return xp.where(none, 1, lowest), xp.where(none, 0, highest)


class _Stream(NamedTuple):
    """An entropy-coded stream in each row: a head, a table from the first to the last symbol that occurs, and a padded
    payload. All of it follows from the histogram."""

    lowest: Any  # (rows,), torch for a stack of rows, numpy for the one row that is encoded
    highest: Any
    table: Any  # (rows, width)
    words: Any

    @staticmethod
    def of(counts: Array) -> "_Stream":
        table = entropy.weight_bytes(counts)
        return _Stream(*_range(counts), table, entropy.words(counts, table))

    def size(self) -> Any:
        """Bytes of each row's stream."""
        return _TABLE.size + (self.highest - self.lowest + 1) + 4 * self.words

    def encoded(self, symbols: np.ndarray) -> bytes:
        """The one row's stream of these symbols (int32)."""
        lowest, highest, words = int(self.lowest[0]), int(self.highest[0]), int(self.words[0])
        if highest < lowest:
            return _TABLE.pack(0, 0, 0)
        weights = self.table[0, lowest : highest + 1]
        body = entropy.coded(symbols - np.int32(lowest), weights, words)
        return _TABLE.pack(lowest, len(weights), words) + weights.astype(np.uint8).tobytes() + body


def _least(sizes: Mapping[int, Any]) -> Any:
    """The bytes of each row in its shortest format."""
    return torch.stack(list(sizes.values())).amin(dim=0)


def _shortest(sizes: Mapping[int, np.ndarray]) -> int:
    """The shortest format of the one row; of equals the first."""
    return min(sizes, key=lambda form: int(sizes[form][0]))


def _sparse_sizes(dim: int, itemsize: int, gaps: _Gaps) -> dict[int, Any]:
    return {_SPARSE: gaps.size() + gaps.entries * itemsize, _RAW: 0 * gaps.entries + dim * itemsize}


def _is_rare(nonzero: Any, dim: int) -> Any:
    """Where runs of zeros pay: almost all is zero."""
    return nonzero * 32 < dim


def _level_sizes(dim: int, levels: _Stream, runs: tuple[_Gaps, _Stream] | None) -> dict[int, Any]:
    """From the stream of all levels and, where some row's entries are rare, from gaps and the stream of the entries."""
    sizes = {_PACKED: _packed_size(dim, levels.lowest, levels.highest), _CODED: levels.size()}
    if runs is not None:
        gaps, entries = runs
        never = torch.iinfo(torch.int64).max
        either = entropy.library(gaps.entries).where
        sizes[_RUNS] = either(_is_rare(gaps.entries, dim), gaps.size() + entries.size(), never)
    return sizes


def _without_zero(counts: Array, zero: int) -> Any:
    """A histogram with the level zero left out."""
    counts = counts + 0
    counts[:, zero] = 0
    return counts


def _packed_size(dim: int, lowest: Any, highest: Any) -> Any:
    _, bits = entropy.library(lowest).frexp(entropy.doubles(highest - lowest))  # of the difference; 0 where equal
    return _PACK.size + _whole_bytes(dim * entropy.integers(bits))


def _has_table(code: Levels) -> bool:
    return 2 * code.largest + 1 <= entropy.WIDEST


def _sizes_of_rows(code: Code) -> Tensor:
    """The exact bytes of the part of each row of (rows, dim)."""
    if isinstance(code, Dense):
        rows, dim = code.values.shape
        return torch.full((rows,), _PART.size + dim * code.values.element_size(), device=code.values.device)
    if isinstance(code, Signs):
        rows, dim = code.signs.shape
        size = _PART.size + code.means.shape[-1] * code.means.element_size() + -(-dim // 8)
        return torch.full((rows,), size, device=code.signs.device)
    if isinstance(code, Sparse):
        sizes = _sparse_sizes(code.values.shape[-1], code.values.element_size(), _gaps(code.values))
        return _PART.size + _least(sizes)
    dim, head = code.levels.shape[-1], _PART.size + code.norms.shape[-1] * code.norms.element_size()
    if not _has_table(code):
        lowest, highest = code.levels.amin(dim=-1).to(torch.int64), code.levels.amax(dim=-1).to(torch.int64)
        return head + _packed_size(dim, lowest, highest)
    counts = entropy.histograms(code.levels.to(torch.int64).add_(code.largest), 2 * code.largest + 1)
    runs = None
    if bool(_is_rare(dim - counts[:, code.largest], dim).any()):
        runs = _gaps(code.levels), _Stream.of(_without_zero(counts, code.largest))
    return head + _least(_level_sizes(dim, _Stream.of(counts), runs))


def _row_code(code: Code) -> Code:
    """The same code with its leading axes flattened into rows."""
    flat = {name: t.reshape(-1, t.shape[-1]) for name, t in code._asdict().items() if isinstance(t, Tensor)}
    return code._replace(**flat)


def part_sizes(code: Code) -> Tensor:
    """The exact bytes of each row's part: (..., nodes)."""
    first = next(t for t in code if isinstance(t, Tensor))
    return _sizes_of_rows(_row_code(code)).reshape(first.shape[:-1])


def plain_size(rows: Tensor) -> int:
    """The bytes of a message that holds one row as it is."""
    return HEADER_BYTES + _PART.size + rows.shape[-1] * rows.element_size()


# --- encoding one row ---------------------------------------------------------------------------------------------


def _bits_of(values: np.ndarray, widths: np.ndarray | int) -> bytes:
    """Whole numbers as their low bits, least significant first, one after the other."""
    if np.isscalar(widths):
        widths = np.full(len(values), widths, dtype=np.int64)
    total = int(widths.sum())  # type: ignore[union-attr]
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
    """The gaps of one row, to be written."""

    buckets: np.ndarray  # int32
    distances: np.ndarray
    extra: np.ndarray  # bits of each
    cost: _Gaps

    @staticmethod
    def between(at: np.ndarray) -> "_RowGaps":
        distances = np.diff(at, prepend=-1)
        buckets, extra = (t.numpy() for t in _bucket_of(torch.from_numpy(distances)))
        stream = _Stream.of(_histogram(buckets, _GAP_BUCKETS))
        cost = _Gaps(np.array([len(at)]), stream, np.array([extra.sum()]))
        return _RowGaps(buckets.astype(np.int32), distances, extra, cost)

    def encoded(self) -> bytes:
        buckets = self.cost.buckets.encoded(self.buckets)
        return _COUNT.pack(len(self.distances)) + buckets + _bits_of(self.distances, self.extra)


def encode_part(code: Code) -> bytes:
    """One row's code, each tensor of one row, as bytes."""
    if isinstance(code, Dense):
        return _PART.pack(_RAW, code.values.shape[-1]) + _raw(_array(code.values))
    if isinstance(code, Signs):
        bits = np.packbits(_array(code.signs) > 0, bitorder="little").tobytes()
        return _PART.pack(_SIGNS, code.signs.shape[-1]) + _raw(_array(code.means)) + bits
    return _encoded_sparse(_array(code.values)) if isinstance(code, Sparse) else _encoded_levels(code)


def _encoded_sparse(values: np.ndarray) -> bytes:
    at = np.flatnonzero(values)
    gaps = _RowGaps.between(at)
    form = _shortest(_sparse_sizes(len(values), values.itemsize, gaps.cost))
    return _PART.pack(form, len(values)) + (_raw(values) if form == _RAW else gaps.encoded() + _raw(values[at]))


def _encoded_levels(code: Levels) -> bytes:
    levels = _array(code.levels).astype(np.int32)
    dim, head = len(levels), _raw(_array(code.norms))
    if not _has_table(code):
        return _PART.pack(_PACKED, dim) + head + _packed(levels)
    symbols = levels + np.int32(code.largest)
    counts = _histogram(symbols, 2 * code.largest + 1)
    stream, gaps, runs = _Stream.of(counts), None, None
    if _is_rare(dim - counts[0, code.largest], dim):
        gaps = _RowGaps.between(np.flatnonzero(levels))
        runs = gaps.cost, _Stream.of(_without_zero(counts, code.largest))
    form = _shortest(_level_sizes(dim, stream, runs))
    head = _PART.pack(form, dim) + head
    if form == _PACKED:
        return head + _packed(levels)
    if form == _CODED or gaps is None or runs is None:
        return head + stream.encoded(symbols)
    return head + gaps.encoded() + runs[1].encoded(symbols[symbols != code.largest])


def _packed(levels: np.ndarray) -> bytes:
    lowest = int(levels.min())
    bits = (int(levels.max()) - lowest).bit_length()
    planes = (((levels - lowest)[:, None] >> np.arange(bits)) & 1).astype(np.uint8)
    return _PACK.pack(lowest, bits) + np.packbits(planes.reshape(-1), bitorder="little").tobytes()


def encode(codes: Mapping[str, Code], round_index: int) -> bytes:
    """A message of one node: its parts in order, each with tensors of one row."""
    body = b"".join(encode_part(code) for code in codes.values())
    bare = _HEADER.pack(_MAGIC, VERSION, len(codes), round_index, len(body), 0)
    checksum = zlib.crc32(body, zlib.crc32(bare))
    return _HEADER.pack(_MAGIC, VERSION, len(codes), round_index, len(body), checksum) + body


# --- decoding -----------------------------------------------------------------------------------------------------


class _Reader:
    """Takes bytes from the front and never more than there are."""

    def __init__(self, data: bytes):
        self._data, self._at = memoryview(data), 0

    def take(self, count: int, what: str) -> memoryview:
        if count < 0 or self._at + count > len(self._data):
            left = len(self._data) - self._at
            raise DecodeError(f"the message ends in its {what}: {count} bytes announced, {left} there")
        piece = self._data[self._at : self._at + count]
        self._at += count
        return piece

    def unpack(self, form: struct.Struct, what: str) -> tuple:
        return form.unpack(self.take(form.size, what))

    def left(self) -> int:
        return len(self._data) - self._at


def decode(
    data: bytes, templates: Mapping[str, Code], round_index: int | None = None, on_simplex: Container[str] = ()
) -> dict[str, Code]:
    """The codes of a message, or DecodeError with the reason. `templates` are the receiver's own codes of a zero row:
    they fix every format, dimension and limit. With a round, any other is refused. Parts named in `on_simplex` must be
    weights: none below zero, their sum one."""
    reader = _Reader(data)
    magic, version, parts, round_sent, length, checksum = reader.unpack(_HEADER, "header")
    if magic != _MAGIC:
        raise DecodeError("not a fairmesh message")
    if version != VERSION:
        raise DecodeError(f"message version {version}, this side speaks {VERSION}")
    if parts != len(templates):
        raise DecodeError(f"{parts} parts where {len(templates)} were expected")
    if length != reader.left():
        raise DecodeError(f"{length} bytes announced after the header, {reader.left()} there")
    bare = _HEADER.pack(magic, version, parts, round_sent, length, 0)
    if zlib.crc32(data[_HEADER.size :], zlib.crc32(bare)) != checksum:
        raise DecodeError("the checksum is wrong")
    if round_index is not None and round_sent != round_index:
        raise DecodeError(f"a message of round {round_sent} where round {round_index} was expected")
    codes = {name: _decode_part(reader, template, name) for name, template in templates.items()}
    if reader.left():
        raise DecodeError(f"{reader.left()} bytes too many")
    for name, code in codes.items():
        if name in on_simplex:
            weights = code.decode().double()
            off = abs(float(weights.sum()) - 1.0) > 1e-3 or float(weights.min()) < -1e-6
            _refuse_if(off, f"part {name} is not on the simplex: it sums to {float(weights.sum()):.6g}")
    return codes


def _decode_part(reader: _Reader, template: Code, name: str) -> Code:
    form, dim = reader.unpack(_PART, f"part {name}")
    first = next(t for t in template if isinstance(t, Tensor))
    if dim != first.shape[-1]:
        raise DecodeError(f"part {name} has dimension {dim}, expected {first.shape[-1]}")
    allowed = {Dense: {_RAW}, Signs: {_SIGNS}, Sparse: {_SPARSE, _RAW}, Levels: {_PACKED, _CODED, _RUNS}}[
        type(template)
    ]
    if form not in allowed:
        raise DecodeError(f"part {name} has format {form}, which a {type(template).__name__} code cannot have")
    if isinstance(template, Dense):
        return template._replace(values=_floats(reader, template.values, dim, name))
    if isinstance(template, Signs):
        means = _floats(reader, template.means, template.means.shape[-1], name, least=0.0)
        bits = np.unpackbits(np.frombuffer(reader.take(-(-dim // 8), f"part {name}"), np.uint8), bitorder="little")
        _refuse_if(bool(bits[dim:].any()), f"part {name} has bits beyond its last sign")
        signs = torch.from_numpy(bits[:dim].astype(np.int8) * 2 - 1).to(template.signs.dtype).unsqueeze(0)
        return template._replace(signs=signs, means=means)
    if isinstance(template, Sparse):
        return _decode_sparse(reader, template, form, dim, name)
    return _decode_levels(reader, template, form, dim, name)


def _decode_sparse(reader: _Reader, template: Sparse, form: int, dim: int, name: str) -> Sparse:
    if form == _RAW:
        return Sparse(_floats(reader, template.values, dim, name))
    at = _decode_positions(reader, dim, name)
    kept = _floats(reader, template.values, len(at), name)
    _refuse_if(bool((kept == 0).any()), f"part {name} sends zeros as entries")
    values = torch.zeros(1, dim, dtype=template.values.dtype)
    values[0, torch.from_numpy(at)] = kept[0]
    return Sparse(values)


def _decode_levels(reader: _Reader, template: Levels, form: int, dim: int, name: str) -> Levels:
    norms = _floats(reader, template.norms, template.norms.shape[-1], name, least=0.0)
    largest, width = template.largest, 2 * template.largest + 1
    if form == _PACKED:
        lowest, bits = reader.unpack(_PACK, f"part {name}")
        _refuse_if(lowest < -largest or bits > width.bit_length(), f"part {name} has levels beyond {largest}")
        packed = np.frombuffer(reader.take(-(-dim * bits // 8), f"part {name}"), np.uint8)
        levels = _unpacked(packed, dim, bits) + np.int32(lowest)
        _refuse_if(int(levels.max()) > largest, f"part {name} has level {int(levels.max())}, beyond {largest}")
    elif form == _CODED:
        levels = _decode_stream(reader, dim, width, name) - np.int32(largest)
    else:
        at = _decode_positions(reader, dim, name)
        nonzero = _decode_stream(reader, len(at), width, name) - np.int32(largest)
        _refuse_if(not nonzero.all(), f"part {name} sends zeros as levels")
        levels = np.zeros(dim, dtype=np.int32)
        levels[at] = nonzero
    return template._replace(levels=torch.from_numpy(levels).to(template.levels.dtype).unsqueeze(0), norms=norms)


def _refuse_if(condition: bool, reason: str) -> None:
    if condition:
        raise DecodeError(reason)


def _floats(reader: _Reader, like: Tensor, count: int, name: str, least: float = -math.inf) -> Tensor:
    """`count` finite numbers of the template's dtype: (1, count)."""
    form = np.dtype(_NUMPY[like.dtype])
    values = np.frombuffer(reader.take(count * form.itemsize, f"part {name}"), form)
    _refuse_if(not np.isfinite(values).all(), f"part {name} has a number that is not finite")
    _refuse_if(bool((values < least).any()), f"part {name} has a norm below zero")
    return torch.from_numpy(values.astype(form.newbyteorder("="))).unsqueeze(0)


def _unpacked(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    if bits == 0:
        return np.zeros(count, dtype=np.int32)
    planes = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    values = np.zeros(count, dtype=np.int32)
    for k in range(bits):
        values |= planes[:, k].astype(np.int32) << k
    return values


def _decode_stream(reader: _Reader, count: int, width: int, name: str) -> np.ndarray:
    """`count` symbols below `width`, as int32."""
    lowest, span, words = reader.unpack(_TABLE, f"table of part {name}")
    _refuse_if(lowest + span > width, f"part {name} has symbols up to {lowest + span - 1} of {width}")
    _refuse_if((span == 0) != (count == 0), f"part {name} has a table of {span} symbols for {count} entries")
    if count == 0:
        _refuse_if(words > 0, f"part {name} has a payload for no entry")
        return np.zeros(0, dtype=np.int32)
    table = np.frombuffer(reader.take(span, f"table of part {name}"), np.uint8)
    _refuse_if(not (table[0] and table[-1]), f"the table of part {name} begins or ends with an absent symbol")
    symbols = entropy.decoded(bytes(reader.take(4 * words, f"payload of part {name}")), table, count)
    if symbols is None:
        raise DecodeError(f"the payload of part {name} is not of {count} entries")
    return symbols + np.int32(lowest)


def _decode_positions(reader: _Reader, dim: int, name: str) -> np.ndarray:
    """Where the entries that are not zero lie, in order."""
    (count,) = reader.unpack(_COUNT, f"part {name}")
    _refuse_if(count > dim, f"part {name} has {count} entries in {dim} places")
    buckets = _decode_stream(reader, count, _GAP_BUCKETS, name).astype(np.int64)
    extra = np.where(buckets < 7, 0, (buckets - 7) // 4 + 1)
    base = np.where(buckets < 7, buckets + 1, (4 + (buckets - 7) % 4) << extra)
    total = int(extra.sum())
    bits = np.unpackbits(
        np.frombuffer(reader.take(-(-total // 8), f"gaps of part {name}"), np.uint8), bitorder="little"
    )
    _refuse_if(bool(bits[total:].any()), f"part {name} has bits beyond its last gap")
    owner = np.repeat(np.arange(count), extra)
    position = np.arange(total) - np.repeat(np.cumsum(extra) - extra, extra)
    gaps = base + np.bincount(owner, weights=bits[:total] * np.exp2(position), minlength=count).astype(np.int64)
    at = np.cumsum(gaps) - 1
    _refuse_if(bool(count) and int(at[-1]) >= dim, f"part {name} has an entry beyond its {dim} places")
    return at
