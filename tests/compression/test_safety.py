"""Bytes from a stranger: only DecodeError, with a reason, ever comes out."""

import random
import struct
import zlib

import pytest
import torch

import fairmesh as fm
from fairmesh import compression
from tests.compression.messages import COMPRESSORS, code_of, rows_of_every_kind, template_of

DIM = 300


def resealed(message: bytes) -> bytes:
    """The message with length and checksum made right again, as a stranger who knows the format would."""
    magic, version, parts, round_index, _, _ = struct.unpack("<2sBBIII", message[:16])
    body = message[16:]
    bare = struct.pack("<2sBBIII", magic, version, parts, round_index, len(body), 0)
    return bare[:-4] + struct.pack("<I", zlib.crc32(body, zlib.crc32(bare))) + body


def seeds() -> list[tuple[bytes, dict]]:
    """A real message of every compressor, with a dual beside it, and what its receiver expects."""
    found = []
    for compressor in COMPRESSORS.values():
        for rows in (rows_of_every_kind(DIM, torch.float32)[:1], rows_of_every_kind(DIM, torch.float32)[7:]):
            codes = {
                "model": code_of(compressor, rows),
                "dual": code_of(fm.compressors.Identity(), torch.full((1, 4), 0.25)),
            }
            templates = {"model": template_of(compressor, DIM, torch.float32), "dual": codes["dual"]}
            found.append((compression.encode(codes, 9), templates))
    return found


def mutated(message: bytes, dice: random.Random) -> bytes:
    data = bytearray(message)
    for _ in range(dice.choice([1, 1, 2, 5])):
        kind = dice.randrange(6)
        at = dice.randrange(len(data)) if data else 0
        if kind == 0 and data:
            data[at] ^= 1 << dice.randrange(8)
        elif kind == 1 and data:
            data[at] = dice.choice([0, 1, 127, 128, 255])
        elif kind == 2:
            del data[at : at + dice.randrange(1, 9)]
        elif kind == 3:
            data[at:at] = dice.randbytes(dice.randrange(1, 9))
        elif kind == 4:
            data[at : at + 4] = struct.pack("<I", dice.choice([0, 1, 2**16, 2**31, 2**32 - 1]))
        else:
            other = dice.randrange(len(data) + 1)
            data[at : at + 8] = data[other : other + 8]
    return bytes(data)


def fuzz(count: int, seed: int) -> dict[str, int]:
    """Decodes mutated messages, most of them sealed again; how many came through and how many were refused."""
    dice, sources = random.Random(seed), seeds()
    outcome = {"taken": 0, "refused": 0}
    reasons: set[str] = set()
    for _ in range(count):
        message, templates = dice.choice(sources)
        data = mutated(message, dice)
        if len(data) >= 16 and dice.random() < 0.8:
            data = resealed(data)
        try:
            codes = compression.decode(data, templates, 9, on_simplex={"dual"})
        except compression.DecodeError as error:
            reasons.add(str(error))
            outcome["refused"] += 1
            continue
        outcome["taken"] += 1
        for name, code in codes.items():
            values = code.decode()
            assert values.shape == templates[name].decode().shape
            assert bool(torch.isfinite(values).all())
    assert all(reasons), "every refusal says why"
    return outcome


def test_ten_thousand_mutated_messages_are_refused_or_harmless():
    outcome = fuzz(10_000, seed=1)
    assert outcome["refused"] > 5_000
    assert outcome["taken"] > 100, "the mutations never reach the values"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_mutated_messages_are_refused_or_harmless():
    outcome = fuzz(1_000_000, seed=2)
    assert outcome["refused"] > 500_000


def test_random_bytes_are_refused():
    dice, (_, templates) = random.Random(0), seeds()[0]
    for length in range(200):
        with pytest.raises(compression.DecodeError):
            compression.decode(dice.randbytes(length), templates)


def test_every_single_flipped_bit_of_a_message_is_noticed():
    for message, templates in seeds()[:8]:
        for at in range(0, len(message) * 8, 13):
            data = bytearray(message)
            data[at // 8] ^= 1 << at % 8
            with pytest.raises(compression.DecodeError):
                compression.decode(bytes(data), templates, 9)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m[:10], "ends in its header"),
        (lambda m: b"xx" + m[2:], "not a fairmesh message"),
        (lambda m: m[:2] + b"\x09" + m[3:], "version 9"),
        (lambda m: m[:3] + b"\x07" + m[4:], "7 parts"),
        (lambda m: m + b"\x00", "bytes announced"),
        (lambda m: resealed(m + b"\x00"), "1 bytes too many"),
        (lambda m: m[:-1] + bytes([m[-1] ^ 1]), "checksum"),
        (lambda m: resealed(m[:17] + struct.pack("<I", 2**32 - 1) + m[21:]), "dimension 4294967295"),
        (lambda m: resealed(m[:16] + b"\x63" + m[17:]), "format 99"),
        (lambda m: resealed(m[:-16] + struct.pack("<4f", 0.5, 0.5, 0.5, 0.5)), "not on the simplex"),
        (lambda m: resealed(m[:-16] + struct.pack("<4f", 1.5, -0.5, 0.0, 0.0)), "not on the simplex"),
        (lambda m: resealed(m[:-4] + struct.pack("<f", float("nan"))), "not finite"),
        (lambda m: resealed(m[:21] + struct.pack("<f", float("inf")) + m[25:]), "not finite"),
        (lambda m: resealed(m[:21] + struct.pack("<f", -1.0) + m[25:]), "below zero"),
    ],
)
def test_what_is_wrong_is_said(change, reason):
    message, templates = next((m, t) for (m, t), name in zip(seeds()[::2], COMPRESSORS) if name == "quantize")
    with pytest.raises(compression.DecodeError, match=reason):
        compression.decode(change(message), templates, 9, on_simplex={"dual"})


def test_another_round_is_refused():
    message, templates = seeds()[0]
    with pytest.raises(compression.DecodeError, match="round 9 where round 8"):
        compression.decode(message, templates, 8)


def test_a_declared_size_allocates_nothing_before_it_is_checked():
    compressor = fm.TopK(0.1)
    message = compression.encode({"m": code_of(compressor, rows_of_every_kind(DIM, torch.float32)[:1])}, 0)
    huge = resealed(message[:21] + struct.pack("<I", 2**32 - 1) + message[25:])
    with pytest.raises(compression.DecodeError, match="4294967295 entries in 300 places"):
        compression.decode(huge, {"m": template_of(compressor, DIM, torch.float32)})
