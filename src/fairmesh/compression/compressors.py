"""Compressors: the lossy arithmetic on what a node sends. Public as `fm.compressors`.

Every cast, rounding and tie-break happens here, never in the codec.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from fairmesh.compression.codes import Code, Dense, Levels, Signs, Sparse, per_block
from fairmesh.config.ranges import Count, NotNegative, UpToOne, Within
from fairmesh.config.tables import register
from fairmesh.numerics.random_streams import DITHER, Draw
from fairmesh.numerics.tracing import values_readable

__all__ = [
    "Compressor",
    "Dense",
    "Half",
    "Identity",
    "Levels",
    "Quantize",
    "RandomK",
    "Sign",
    "Signs",
    "Sparse",
    "Threshold",
    "TopK",
    "TopKQuantize",
]

_SMALL, _LARGE = 1e-15, 1e15  # norms between which squares of float32 neither underflow nor overflow noticeably
_Bits = Annotated[int, Within("[1, 16]")]
FLOAT_BITS = 32  # what the paper counts for a number sent as it is


def _block_norms(rows: Tensor, block: int, order: float) -> Tensor:
    """Returns the norm of each block as float32: (..., blocks)."""

    def in_doubles(blocks: Tensor) -> Tensor:  # in which the square of no float32 overflows or underflows
        return torch.linalg.vector_norm(blocks, ord=order, dim=-1, dtype=torch.float64).float()

    def norms_of(blocks: Tensor) -> Tensor:
        if values_readable(blocks) and blocks.dtype == torch.float32:  # checking is cheap, casting everything is not
            # on a CPU, vector_norm of order 1 takes 7 to 12 times as long as this sum
            norms = blocks.abs().sum(dim=-1) if order == 1 else torch.linalg.vector_norm(blocks, ord=order, dim=-1)
            if _ordinary(norms):
                return norms
            return torch.where((norms > _SMALL) & (norms < _LARGE), norms, in_doubles(blocks))  # each row on its own
        return in_doubles(blocks)

    dim = rows.shape[-1]
    whole = dim // block * block
    if block >= dim:
        return norms_of(rows).unsqueeze(-1)
    norms = norms_of(rows[..., :whole].unflatten(-1, (-1, block)))
    return norms if whole == dim else torch.cat([norms, norms_of(rows[..., whole:]).unsqueeze(-1)], dim=-1)


class Compressor(ABC):
    """Base class of compressors: a map Q with Q(0) = 0 that keeps part of the energy of each row.

        E ||Q(x) - x||^2 <= (1 - delta) ||x||^2,   0 < delta <= 1

    The algorithms compress differences to public copies, so what a message leaves out is sent later.

    Example:
        >>> import fairmesh as fm
        >>> isinstance(fm.compressors.Quantize(bits=4), fm.compressors.Compressor)
        True
    """

    @abstractmethod
    def compress(self, rows: Tensor, draw: Draw) -> Code:
        """Returns the code of rows (..., nodes, dim), each row compressed by itself.

        Args:
            rows: What is to be sent, one row per node.
            draw: The random numbers of each node: `draw.uniforms(count)` gives uniforms in [0, 1).
        """

    @abstractmethod
    def delta(self, dim: int) -> float | None:
        """Returns the guaranteed delta, or None if there is no guarantee.

        Args:
            dim: The length of a row.
        """

    def stable_gossip_multiple(self) -> float:
        """Returns the c for which gossip at consensus step c delta / ||I - W|| is stable. Default: 0.8, for compressors
        that leave whole coordinates out: the error of these grows until they are sent (c = 2 / (2 - delta) for random-K
        on a complete graph). Compressors that send every coordinate, rounded without a bias away from zero, allow 2."""
        return 0.8

    @abstractmethod
    def nominal_bits(self, dim: int) -> float:
        """Returns the nominal size of one row in bits, as papers count it: without signs, norms, indices and header.

        The real bytes of every message are counted separately.

        Args:
            dim: The length of a row.
        """


@dataclass(frozen=True)
class Identity(Compressor):
    """No compression: every value travels as it is. delta = 1; 32 nominal bits per parameter.

    Example:
        >>> import fairmesh as fm
        >>> fm.compressors.Identity().nominal_bits(dim=1000)
        32000
    """

    def compress(self, rows: Tensor, draw: Draw) -> Code:
        return Dense(rows)

    def delta(self, dim: int) -> float:
        return 1.0

    def stable_gossip_multiple(self) -> float:
        return 2.0

    def nominal_bits(self, dim: int) -> float:
        return FLOAT_BITS * dim


@dataclass(frozen=True)
class Half(Compressor):
    """Rounds every value to float16, and values beyond 65,504 to that. 16 nominal bits per parameter.

    No delta is guaranteed, since float16 rounds the smallest values to zero.

    Example:
        >>> import fairmesh as fm
        >>> fm.compressors.Half().nominal_bits(dim=1000)
        16000
    """

    def compress(self, rows: Tensor, draw: Draw) -> Code:
        return Dense(_as_half(rows), rows.dtype)

    def delta(self, dim: int) -> None:
        return None

    def stable_gossip_multiple(self) -> float:
        return 2.0

    def nominal_bits(self, dim: int) -> float:
        return 16 * dim


def _as_half(values: Tensor) -> Tensor:
    largest = torch.finfo(torch.float16).max
    return values.clamp(-largest, largest).half()


@dataclass(frozen=True)
class Threshold(Compressor):
    """Sends the entries whose magnitude is above a level.

    Smaller differences accumulate and are sent once they exceed the level. It is meant for the sites' weights, of which
    only few change in a round. No delta is guaranteed.

    Args:
        level: The largest magnitude that is not sent, >= 0, in the units of the entries. Default: 0.001.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.compressors.Threshold(0.5).compress(torch.tensor([[0.2, -0.7, 0.5]]), draw=None).decode()
        tensor([[ 0.0000, -0.7000,  0.0000]])
    """

    level: NotNegative = 1e-3

    def compress(self, rows: Tensor, draw: Draw) -> Code:
        return Sparse(_only(rows.abs() > self.level, rows))

    def delta(self, dim: int) -> None:
        return None

    def stable_gossip_multiple(self) -> float:
        return 2.0

    def nominal_bits(self, dim: int) -> float:
        return FLOAT_BITS * dim  # what is sent depends on the data; counted as if everything were sent


def _variance_factor(length: int, bits: int) -> float:
    """Returns tau = 1 + min(d / 2^(2b), sqrt(d) / 2^b), as in the paper."""
    return 1.0 + min(length / 4.0**bits, math.sqrt(length) / 2.0**bits)


@dataclass(frozen=True)
class Quantize(Compressor):
    """Random quantization to about 2^b levels per sign.

        Q(x) = sign(x) ||x|| / (2^b tau) * floor(2^b |x| / ||x|| + xi),   xi uniform in [0, 1)
        tau = 1 + min(d / 2^(2b), sqrt(d) / 2^b),   delta = 1 / tau

    where d is the number of coordinates that share a norm. The dither xi has 16 bits, so less than 2^-17 of a level is
    never sent. The levels are entropy-coded, which takes far less than b bits per parameter when most are zero.

    Args:
        bits: b, the nominal bits per parameter, 1 to 16. Default: 4.
        block: Coordinates that share a norm, >= 1; None for one norm per row. Smaller blocks are more accurate at the
            cost of one norm each. Default: None.
        rounding: "floor" as above, or "ceil" as in the published runs of AD-GDA. Ceiling sends at least one level for
            every coordinate, which makes it a sign compressor in effect; no delta is guaranteed. Default: "floor".
        norms: How the norms travel: "float32" or "float16". Default: "float32".

    Example:
        >>> import fairmesh as fm
        >>> round(fm.compressors.Quantize(bits=4).delta(dim=100), 3)
        0.719

    References:
        Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD, NIPS 2017. Koloskova, Stich, Jaggi: Decentralized Stochastic
        Optimization and Gossip Algorithms with Compressed Communication, ICML 2019.
    """

    bits: _Bits = 4
    block: Count | None = None
    rounding: Literal["floor", "ceil"] = "floor"
    norms: Literal["float32", "float16"] = "float32"

    def compress(self, rows: Tensor, draw: Draw) -> Code:
        dim = rows.shape[-1]
        length = min(self.block or dim, dim)
        norms = _block_norms(rows, length, 2)
        norms = norms if self.norms == "float32" else _as_half(norms)
        return _quantized(rows, draw, norms, self.bits, length, length, self.rounding)

    def delta(self, dim: int) -> float | None:
        return None if self.rounding == "ceil" else 1.0 / _variance_factor(min(self.block or dim, dim), self.bits)

    def stable_gossip_multiple(self) -> float:
        return 0.8 if self.rounding == "ceil" else 2.0

    def nominal_bits(self, dim: int) -> float:
        return self.bits * dim


def _ordinary(norms: Tensor) -> bool:
    """Returns whether all norms are known to be float32 of ordinary size; |x| exceeds those only by rounding."""
    known = values_readable(norms) and norms.dtype == torch.float32
    return known and norms.numpy().min() > _SMALL and norms.numpy().max() < _LARGE


def _factors(norms: Tensor, levels: float, dtype: torch.dtype) -> Tensor:
    """Returns levels / norm: zero where the norm is zero, and finite even where it is subnormal."""
    divisors = torch.where(norms > 0, norms, torch.inf).to(dtype)
    return (levels / divisors).clamp_(max=torch.finfo(dtype).max)


def _quantized(rows: Tensor, draw: Draw, norms: Tensor, bits: int, block: int, nonzeros: int, rounding: str) -> Levels:
    """Returns the levels of each block, of which at most `nonzeros` coordinates are not zero."""
    dim = rows.shape[-1]
    ordinary = _ordinary(norms)
    factors = 2.0**bits / norms.to(rows.dtype) if ordinary else _factors(norms, 2.0**bits, rows.dtype)
    largest = 2**bits + 2  # a norm rounded down lets |x| / norm exceed 1; a subnormal one by much
    if rounding == "floor":  # of 2^b x / norm + xi, xi in the middles of the 2^16 parts of [0, 1): never -0.0
        middle = torch.full((), 0.5 + DITHER / 2, dtype=rows.dtype, device=rows.device)
        levels = per_block(rows, block, factors, lambda x, factor: torch.addcmul(middle, x, factor))
        levels = levels.add_(draw.dither(dim), alpha=DITHER).floor_()
        levels = levels if ordinary else levels.clamp_(-largest, largest)
    else:
        scaled = per_block(rows, block, factors, torch.mul)
        levels = scaled.abs().add_(draw.uniforms(dim)).ceil_().clamp_(max=largest)
        levels = levels.mul_(scaled.sign_()).add_(0.0)  # no -0.0: a code has one form
    return Levels(levels, norms, block, 1.0 / (2.0**bits * _variance_factor(nonzeros, bits)), largest)


def _kept(fraction: float, dim: int) -> int:
    """Returns K, at least one coordinate."""
    return min(dim, max(1, round(fraction * dim)))


def _largest(rows: Tensor, count: int) -> Tensor:
    """Returns the `count` entries of largest magnitude of each row, zero elsewhere. Ties go to the lowest index."""
    magnitudes = rows.abs()
    smallest_kept = magnitudes.topk(count, dim=-1, sorted=True).values[..., -1:].clone()  # not a view: frees the rest
    above = magnitudes > smallest_kept
    ties = magnitudes == smallest_kept
    room = count - above.sum(dim=-1, keepdim=True, dtype=torch.int32)
    return _only(above | (ties & (ties.cumsum(dim=-1, dtype=torch.int32) <= room)), rows)


def _only(kept: Tensor, rows: Tensor) -> Tensor:
    """Returns the entries that are kept, and 0.0 elsewhere. -0.0 becomes 0.0, so that a code has one form."""
    return torch.where(kept, rows, 0.0).add_(0.0)


@dataclass(frozen=True)
class TopK(Compressor):
    """Sends the K = fraction * d coordinates of largest magnitude. delta = K / d.

    Args:
        fraction: K / d, the share of the coordinates that is sent, in (0, 1]; at least one is. Default: 0.1.
        values: How the values travel: "full", in the dtype of the run, or "float16", for which no delta is guaranteed.
            Default: "full".

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.compressors.TopK(0.5).compress(torch.tensor([[3.0, -1.0, 0.5, -4.0]]), draw=None).decode()
        tensor([[ 3.,  0.,  0., -4.]])
    """

    fraction: UpToOne = 0.1
    values: Literal["full", "float16"] = "full"

    def compress(self, rows: Tensor, draw: Draw) -> Code:
        kept = _largest(rows, _kept(self.fraction, rows.shape[-1]))
        return Sparse(kept) if self.values == "full" else Sparse(_as_half(kept).add_(0.0), rows.dtype)

    def delta(self, dim: int) -> float | None:
        return _kept(self.fraction, dim) / dim if self.values == "full" else None

    def nominal_bits(self, dim: int) -> float:
        return (FLOAT_BITS if self.values == "full" else 16) * _kept(self.fraction, dim)


@dataclass(frozen=True)
class RandomK(Compressor):
    """Sends K = fraction * d coordinates drawn uniformly at random, unscaled. delta = K / d, with equality.

    Args:
        fraction: K / d, the share of the coordinates that is sent, in (0, 1]; at least one is. Default: 0.1.

    Example:
        >>> import fairmesh as fm
        >>> fm.compressors.RandomK(0.25).delta(dim=100)
        0.25
    """

    fraction: UpToOne = 0.1

    def compress(self, rows: Tensor, draw: Draw) -> Code:
        count = _kept(self.fraction, rows.shape[-1])
        # Uniforms lie on a grid of 2^-24, so two may agree; _largest then takes the lower index.
        chosen = _largest(1.0 - draw.uniforms(rows.shape[-1]), count) > 0
        return Sparse(_only(chosen, rows))

    def delta(self, dim: int) -> float:
        return _kept(self.fraction, dim) / dim

    def nominal_bits(self, dim: int) -> float:
        return FLOAT_BITS * _kept(self.fraction, dim)


@dataclass(frozen=True)
class Sign(Compressor):
    """Sends one sign per coordinate and one mean magnitude per block: Q(x) = mean|x| * sign(x), with sign(0) = 1.

    delta = 1 / d, where d is the number of coordinates per block; one nominal bit per parameter.

    Args:
        block: Coordinates that share a mean, >= 1; None for one mean per row. Smaller blocks are more accurate at the
            cost of one float32 each. Default: None.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.compressors.Sign().compress(torch.tensor([[3.0, -1.0]]), draw=None).decode()
        tensor([[ 2., -2.]])

    References:
        Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML
        2019.
    """

    block: Count | None = None

    def compress(self, rows: Tensor, draw: Draw) -> Code:
        dim = rows.shape[-1]
        block = min(self.block or dim, dim)
        starts = torch.arange(0, dim, block, dtype=torch.float32, device=rows.device)
        lengths = (dim - starts).clamp_(max=block)
        signs = torch.ones_like(rows).copysign_(rows + 0.0)  # -0.0 + 0.0 is 0.0
        return Signs(signs, _block_norms(rows, block, 1) / lengths, block)

    def delta(self, dim: int) -> float:
        return 1.0 / min(self.block or dim, dim)

    def stable_gossip_multiple(self) -> float:
        return 2.0

    def nominal_bits(self, dim: int) -> float:
        return dim


@dataclass(frozen=True)
class TopKQuantize(Compressor):
    """Keeps the K coordinates of largest magnitude and quantizes them at random. delta = K / (d tau), tau that of K.

    Args:
        fraction: K / d, the share of the coordinates that is sent, in (0, 1]; at least one is. Default: 0.25.
        bits: Nominal bits per sent coordinate, 1 to 16, as in `Quantize`. Default: 4.

    Example:
        >>> import fairmesh as fm
        >>> fm.compressors.TopKQuantize(0.25, bits=4).nominal_bits(dim=1000)
        1000
    """

    fraction: UpToOne = 0.25
    bits: _Bits = 4

    def compress(self, rows: Tensor, draw: Draw) -> Code:
        dim = rows.shape[-1]
        count = _kept(self.fraction, dim)
        kept = _largest(rows, count)
        return _quantized(kept, draw, _block_norms(kept, dim, 2), self.bits, dim, count, "floor")

    def delta(self, dim: int) -> float:
        count = _kept(self.fraction, dim)
        return count / (dim * _variance_factor(count, self.bits))

    def nominal_bits(self, dim: int) -> float:
        return self.bits * _kept(self.fraction, dim)


register(
    Compressor,
    {
        "none": Identity,
        "half": Half,
        "threshold": Threshold,
        "quantize": Quantize,
        "top-k": TopK,
        "random-k": RandomK,
        "sign": Sign,
        "top-k-quantize": TopKQuantize,
    },
)
