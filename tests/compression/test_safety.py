"""Decoding bytes from an attacker raises DecodeError with a reason, and nothing else."""

import random
import struct
import zlib

import pytest
import torch

import fairmesh as fm
from fairmesh import compression
from tests.compression.messages import COMPRESSORS, code_of, rows_of_every_kind, template_of
from tests.refusals import refused

DIM = 300


def resealed(message: bytes) -> bytes:
    """Returns the message with a correct length and checksum, as an attacker who knows the format would send it."""
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
    """Decodes mutated messages, most with a correct checksum; returns how many were accepted and how many refused."""
    dice, sources = random.Random(seed), seeds()
    outcome = {"taken": 0, "refused": 0}
    reasons: set[str] = set()
    for _ in range(count):
        message, templates = dice.choice(sources)
        data = mutated(message, dice)
        if len(data) >= 16 and dice.random() < 0.8:
            data = resealed(data)
        try:
            codes = compression.decode(data, templates, 9)
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


def test_decode_refuses_mutated_messages_or_they_are_harmless():
    outcome = fuzz(4_000, seed=1)
    assert outcome["refused"] > 2_000
    assert outcome["taken"] > 40, "the mutations never reach the values"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_decode_refuses_a_million_mutated_messages_or_they_are_harmless():
    outcome = fuzz(1_000_000, seed=2)
    assert outcome["refused"] > 500_000


def test_decode_refuses_random_bytes():
    dice, (_, templates) = random.Random(0), seeds()[0]
    for length in range(200):
        with pytest.raises(compression.DecodeError):
            compression.decode(dice.randbytes(length), templates)


def test_decode_notices_every_flipped_bit():
    for message, templates in seeds()[:8]:
        for at in range(0, len(message) * 8, 13):
            data = bytearray(message)
            data[at // 8] ^= 1 << at % 8
            with pytest.raises(compression.DecodeError):
                compression.decode(bytes(data), templates, 9)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m[:10], "header"),
        (lambda m: b"xx" + m[2:], "fairmesh"),
        (lambda m: m[:2] + b"\x09" + m[3:], "version 9"),
        (lambda m: m[:3] + b"\x07" + m[4:], "7 parts"),
        (lambda m: m + b"\x00", "bytes"),
        (lambda m: resealed(m + b"\x00"), "1 bytes"),
        (lambda m: m[:-1] + bytes([m[-1] ^ 1]), "checksum"),
        (lambda m: resealed(m[:17] + struct.pack("<I", 2**32 - 1) + m[21:]), "4294967295"),
        (lambda m: resealed(m[:16] + b"\x63" + m[17:]), "format 99"),
        (lambda m: resealed(m[:-4] + struct.pack("<f", float("nan"))), "finite"),
        (lambda m: resealed(m[:21] + struct.pack("<f", float("inf")) + m[25:]), "finite"),
        (lambda m: resealed(m[:21] + struct.pack("<f", -1.0) + m[25:]), "zero"),
    ],
)
def test_decode_says_what_is_wrong(change, name):
    message, templates = next((m, t) for (m, t), name in zip(seeds()[::2], COMPRESSORS) if name == "quantize")
    with refused(name, error=compression.DecodeError):
        compression.decode(change(message), templates, 9)


def test_decode_refuses_another_round():
    message, templates = seeds()[0]
    with refused("9", "8", error=compression.DecodeError):
        compression.decode(message, templates, 8)


def test_decode_allocates_nothing_for_a_declared_size_before_checking_it():
    compressor = fm.compressors.TopK(0.1)
    message = compression.encode({"m": code_of(compressor, rows_of_every_kind(DIM, torch.float32)[:1])}, 0)
    huge = resealed(message[:21] + struct.pack("<I", 2**32 - 1) + message[25:])
    with refused("4294967295", "300", error=compression.DecodeError):
        compression.decode(huge, {"m": template_of(compressor, DIM, torch.float32)})
