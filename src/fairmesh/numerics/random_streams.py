"""Counter-based random streams: (seed, purpose, round, identity, coordinate) -> bits, without any state.

A 64-bit key is mixed from seed, purpose, round and identity. A 32-bit hash of key and coordinate gives the bits. Only
wrapping integer arithmetic is used, so every device, thread count and placement of nodes draws the same integers.
The random generators of the whole process, torch's, Python's and numpy's, stand at the end: fairmesh draws from none.
"""

import hashlib
import random
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairmesh.numerics import SECRET_BYTES

SERVER = -1  # the identity under which a server draws


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_MIX_A, _MIX_B = _signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64)
_GOLDEN_64 = _signed(0x9E3779B97F4A7C15, 64)
_GOLDEN_32 = _signed(0x9E3779B9, 32)
_HASH_A, _HASH_B = _signed(0x7FEB352D, 32), _signed(0x846CA68B, 32)


def _mix64(x: Tensor) -> Tensor:
    """Returns a bijection of 64-bit integers in which every input bit affects every output bit."""
    x = x + _GOLDEN_64
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_A
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_B
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _low32(x: Tensor) -> Tensor:
    """Returns the low 32 bits as a signed 32-bit integer."""
    return (((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


@lru_cache(maxsize=16)
def _counters(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device).mul_(_GOLDEN_32)


def _high_bits(first: Tensor, second: Tensor, counters: Tensor) -> Tensor:
    """Returns 32-bit integers (..., count) from the halves (..., 1) of a key. Their high bits are fully mixed, the low
    ones not yet. For a fixed key this is a bijection of the coordinate, so no two coordinates share their bits."""
    x = counters + first
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_HASH_A).bitwise_xor_(second)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_HASH_B)


class SecretIdentities:
    """Identities that only their nodes know: another 64-bit number for every purpose and round.

    The numbers are keyed hashes, so that who finds out one of them, or all numbers drawn with it, learns nothing about
    the others.

    Args:
        secrets: One secret per hosted node, 32 bytes each.
        device: Where keys are computed."""

    def __init__(self, secrets: Sequence[bytes], device: torch.device | str = "cpu"):
        if any(len(secret) != SECRET_BYTES for secret in secrets):
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {[len(secret) for secret in secrets]}")
        self._secrets, self._device = tuple(secrets), device

    def at(self, purpose: str, round_index: Tensor | int) -> Tensor:
        """Returns the identities (..., nodes) in rounds (...)."""
        rounds = torch.as_tensor(round_index)
        found = [self._number(secret, purpose, t) for t in rounds.flatten().tolist() for secret in self._secrets]
        return torch.tensor(found, dtype=torch.int64, device=self._device).view(*rounds.shape, len(self._secrets))

    @staticmethod
    def _number(secret: bytes, purpose: str, t: int) -> int:
        hashed = hashlib.blake2b(f"{purpose} {t}".encode(), digest_size=8, key=secret, person=b"fairmesh draws")
        return int.from_bytes(hashed.digest(), "little", signed=True)

    def digest(self) -> str:
        """Returns a fingerprint, from which the secrets cannot be found."""
        return hashlib.blake2b(b"".join(self._secrets), digest_size=8, person=b"fairmesh print").hexdigest()


def keys(seeds: Tensor, purpose: str, round_index: Tensor | int, identities: Tensor | SecretIdentities) -> Tensor:
    """Returns 64-bit keys (..., nodes) of the streams of `identities` (nodes,), one row per seed in `seeds` (...)."""
    key = _mix64(_mix64(seeds) ^ zlib.crc32(purpose.encode()))
    key = _mix64(key + round_index)
    own = identities.at(purpose, round_index) if isinstance(identities, SecretIdentities) else identities
    return _mix64(key.unsqueeze(-1) ^ _mix64(own))


def halves(key: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the low and the high 32 bits of keys (...): (..., 1) each."""
    return _low32(key).unsqueeze(-1), _low32(key >> 32).unsqueeze(-1)


def sixteen_bits(key: Tensor, count: int) -> Tensor:
    """Returns 16-bit integers (..., count or one more), two from each 32-bit integer. The lowest bits of the second are
    not fully mixed."""
    return _high_bits(*halves(key), _counters((count + 1) // 2, key.device)).view(torch.int16)


def bits(key: Tensor, count: int) -> Tensor:
    """Returns the first `count` 32-bit integers of each stream, as int32: (..., count)."""
    x = _high_bits(*halves(key), _counters(count, key.device))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def uniform(key: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Returns uniform numbers on the grid of 2^-24 in [0, 1), the same in every dtype."""
    return (bits(key, count) >> 8).bitwise_and_(0xFFFFFF).to(dtype).mul_(2.0**-24)


def integers(key: Tensor, count: int, below: Tensor) -> Tensor:
    """Returns integers in [0, below) as int64; `below` is a tensor (..., 1) or a number under 2^31."""
    return ((bits(key, count).to(torch.int64) & 0xFFFFFFFF) * below) >> 32


_SWAPS = 24  # rounds of a permutation


def permuted(key: Tensor, at: Tensor, size: Tensor) -> Tensor:
    """Returns the images of `at` in [0, size) under a random permutation of that range, one per key; int64.

    In each of 24 rounds a number swaps places with its mirror image about a random point, or does not (Hoang, Morris,
    Rogaway: An Enciphering Scheme Based on a Card Shuffle, CRYPTO 2012). It is a permutation for every size, nothing is
    stored, and only integers are computed. `key`, `at` and `size` broadcast; sizes are below 2^31."""
    for swap in range(1, _SWAPS + 1):
        of_round = _mix64(key ^ swap)
        mirror = (((of_round & 0xFFFFFFFF) * size) >> 32) - at
        mirror = torch.where(mirror < 0, mirror + size, mirror)
        chance = _mix64(of_round + torch.maximum(at, mirror))
        at = torch.where(chance < 0, mirror, at)
    return at


def epoch_keys(key: Tensor, epochs: Tensor) -> Tensor:
    """Returns a key for each epoch (..., count), from the keys (...) of streams."""
    return _mix64(key.unsqueeze(-1) + epochs)


class Draw:
    """What each hosted node draws for one purpose in one round, from keys (..., nodes). `ahead` gives its sixteen_bits
    if they are computed for many rounds at once."""

    def __init__(self, key: Tensor, dtype: torch.dtype, ahead: Callable[[int], Tensor] | None = None):
        self._key, self._dtype = key, dtype
        self._sixteen_bits = ahead or partial(sixteen_bits, key)

    def uniforms(self, count: int) -> Tensor:
        """Returns uniform numbers in [0, 1): (..., nodes, count)."""
        return uniform(self._key, count, self._dtype)

    def dither(self, count: int) -> Tensor:
        """Returns integers, uniform over 16 bits; times DITHER they lie in [-1/2, 1/2)."""
        return self._sixteen_bits(count)[..., :count].to(self._dtype)


DITHER = 2.0**-16


def seed_generators(key: int) -> None:
    """Seeds torch's generator of the CPU, Python's and numpy's, with a number >= 0."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002


class GeneratorStates(NamedTuple):
    """The states of the process's generators at one moment."""

    torch: Any
    python: Any
    numpy: Any

    @staticmethod
    def now() -> "GeneratorStates":
        return GeneratorStates(torch.get_rng_state(), random.getstate(), np.random.get_state())  # noqa: NPY002

    def restore(self) -> None:
        """Sets the generators back to these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002

    def moved(self) -> list[str]:
        """Returns the names of the generators that were used since then."""
        after = GeneratorStates.now()
        found = {
            "torch": not torch.equal(self.torch, after.torch),
            "Python's random": self.python != after.python,
            "numpy": any(np.any(a != b) for a, b in zip(self.numpy, after.numpy)),
        }
        return [name for name, used in found.items() if used]
