"""Decodes the bytes of a message. Everything is checked before it is allocated, and refused with the reason."""

import math
import struct
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fairmesh.compression import entropy, formats
from fairmesh.compression.codes import Code, Dense, Levels, Signs, Sparse
from fairmesh.errors import FairmeshError


class DecodeError(FairmeshError):
    """The bytes are not a message that this receiver can decode; the text says why."""


class _Reader:
    """Reads bytes from the front, and never more than there are."""

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


def decode(data: bytes, templates: Mapping[str, Code], round_index: int | None = None) -> dict[str, Code]:
    """Returns the codes of a message.

    Args:
        data: The bytes of the message.
        templates: The receiver's own codes of a zero row, by part. They fix every format, dimension and limit.
        round_index: The round that the message must be of; None for any.

    Raises:
        DecodeError: The message is damaged, or not one that this receiver expects.
    """
    reader = _Reader(data)
    magic, version, parts, round_sent, length, checksum = reader.unpack(formats.HEADER, "header")
    _refuse_if(magic != formats.MAGIC, "not a fairmesh message")
    _refuse_if(version != formats.VERSION, f"message version {version}, this side speaks {formats.VERSION}")
    _refuse_if(parts != len(templates), f"{parts} parts where {len(templates)} were expected")
    _refuse_if(length != reader.left(), f"{length} bytes announced after the header, {reader.left()} there")
    bare = formats.HEADER.pack(magic, version, parts, round_sent, length, 0)
    _refuse_if(zlib.crc32(data[formats.HEADER.size :], zlib.crc32(bare)) != checksum, "the checksum is wrong")
    other_round = round_index is not None and round_sent != round_index
    _refuse_if(other_round, f"a message of round {round_sent} where round {round_index} was expected")
    codes = {name: _decode_part(reader, template, name) for name, template in templates.items()}
    _refuse_if(reader.left() > 0, f"{reader.left()} bytes too many")
    return codes


def _decode_part(reader: _Reader, template: Code, name: str) -> Code:
    form, dim = reader.unpack(formats.PART, f"part {name}")
    first = next(t for t in template if isinstance(t, Tensor))
    _refuse_if(dim != first.shape[-1], f"part {name} has dimension {dim}, expected {first.shape[-1]}")
    allowed = {
        Dense: {formats.RAW},
        Signs: {formats.SIGNS},
        Sparse: {formats.SPARSE, formats.RAW},
        Levels: {formats.PACKED, formats.CODED, formats.RUNS},
    }[type(template)]
    kind = type(template).__name__
    _refuse_if(form not in allowed, f"part {name} has format {form}, which a {kind} code cannot have")
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
    if form == formats.RAW:
        return template._replace(values=_floats(reader, template.values, dim, name))
    at = _decode_positions(reader, dim, name)
    kept = _floats(reader, template.values, len(at), name)
    _refuse_if(bool((kept == 0).any()), f"part {name} sends zeros as entries")
    values = torch.zeros(1, dim, dtype=template.values.dtype)
    values[0, torch.from_numpy(at)] = kept[0]
    return template._replace(values=values)


def _decode_levels(reader: _Reader, template: Levels, form: int, dim: int, name: str) -> Levels:
    norms = _floats(reader, template.norms, template.norms.shape[-1], name, least=0.0)
    largest, width = template.largest, 2 * template.largest + 1
    if form == formats.PACKED:
        lowest, bits = reader.unpack(formats.PACK, f"part {name}")
        _refuse_if(lowest < -largest or bits > width.bit_length(), f"part {name} has levels beyond {largest}")
        packed = np.frombuffer(reader.take(-(-dim * bits // 8), f"part {name}"), np.uint8)
        levels = _unpacked(packed, dim, bits) + np.int32(lowest)
        _refuse_if(int(levels.max()) > largest, f"part {name} has level {int(levels.max())}, beyond {largest}")
    elif form == formats.CODED:
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
    """Reads `count` finite numbers of the template's dtype: (1, count)."""
    form = np.dtype(formats.NUMPY[like.dtype])
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
    """Reads `count` symbols below `width`, as int32."""
    lowest, span, words = reader.unpack(formats.TABLE, f"table of part {name}")
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
    """Reads the positions of the entries that are not zero, in order."""
    (count,) = reader.unpack(formats.COUNT, f"part {name}")
    _refuse_if(count > dim, f"part {name} has {count} entries in {dim} places")
    buckets = _decode_stream(reader, count, formats.GAP_BUCKETS, name).astype(np.int64)
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
