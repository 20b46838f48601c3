"""Compressors: the lossy arithmetic on what a node sends. Public as `fm.compressors`.

Every cast, rounding and tie-break happens here, never in the codec.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fairmesh.compression.codes import Code, Composite, Dense, Levels, Signs, Sparse, per_block
from fairmesh.config.tables import register
from fairmesh.errors import BadInput
from fairmesh.numerics.layout import Layout
from fairmesh.numerics.random_streams import DITHER, Draw
from fairmesh.numerics.tracing import values_readable

__all__ = [
    "Composite",
    "Compressor",
    "Dense",
    "Half",
    "Identity",
    "Layout",
    "Levels",
    "LowRank",
    "Natural",
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
        >>> isinstance(fm.Quantize(bits=4), fm.compressors.Compressor)
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

    def bound(self, layout: Layout) -> "Compressor":
        """Returns the compressor for rows of this layout. A run calls it once, before its first round, for compressors
        that need the names or shapes of parameters. The returned one must take rows of other lengths too, such as the
        sites' weights. Default: the compressor itself.

        Args:
            layout: The parameters in a row of the run's models.
        """
        return self


def with_layout(thing: Any, layout: Layout) -> Any:
    """Returns the same settings, with every compressor in them bound to a layout."""
    if isinstance(thing, Compressor):
        return thing.bound(layout)
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        return thing
    inner = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing) if field.init}
    changed = {name: new for name, old in inner.items() if (new := with_layout(old, layout)) is not old}
    return dataclasses.replace(thing, **changed) if changed else thing


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

    level: float = 1e-3

    def __post_init__(self):
        if not (math.isfinite(self.level) and self.level >= 0):
            raise BadInput(f"level must be a finite number >= 0, got {self.level}")

    def compress(self, rows: Tensor, draw: Draw) -> Code:
        return Sparse(_only(rows.abs() > self.level, rows))

    def delta(self, dim: int) -> None:
        return None

    def stable_gossip_multiple(self) -> float:
        return 2.0

    def nominal_bits(self, dim: int) -> float:
        return FLOAT_BITS * dim  # what is sent depends on the data; counted as if everything were sent


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 16:
        raise BadInput(f"bits must lie in 1..16, got {bits}")


def _check_block(block: int | None) -> None:
    if block is not None and block < 1:
        raise BadInput(f"block must be a number of coordinates >= 1, got {block}")


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
        >>> round(fm.Quantize(bits=4).delta(dim=100), 3)
        0.719

    References:
        Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD, NIPS 2017. Koloskova, Stich, Jaggi: Decentralized Stochastic
        Optimization and Gossip Algorithms with Compressed Communication, ICML 2019.
    """

    bits: int = 4
    block: int | None = None
    rounding: Literal["floor", "ceil"] = "floor"
    norms: Literal["float32", "float16"] = "float32"

    def __post_init__(self):
        _check_bits(self.bits)
        _check_block(self.block)

    def _length(self, dim: int) -> int:
        return min(self.block or dim, dim)

    def compress(self, rows: Tensor, draw: Draw) -> Code:
        dim = rows.shape[-1]
        length = self._length(dim)
        norms = _block_norms(rows, length, 2)
        norms = norms if self.norms == "float32" else _as_half(norms)
        return _quantized(rows, draw, norms, self.bits, length, length, self.rounding)

    def delta(self, dim: int) -> float | None:
        return None if self.rounding == "ceil" else 1.0 / _variance_factor(self._length(dim), self.bits)

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


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise BadInput(f"fraction, K / d, must lie in (0, 1], got {fraction}")


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
        >>> fm.TopK(0.5).compress(torch.tensor([[3.0, -1.0, 0.5, -4.0]]), draw=None).decode()
        tensor([[ 3.,  0.,  0., -4.]])
    """

    fraction: float = 0.1
    values: Literal["full", "float16"] = "full"

    def __post_init__(self):
        _check_fraction(self.fraction)

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

    fraction: float = 0.1

    def __post_init__(self):
        _check_fraction(self.fraction)

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
        >>> fm.Sign().compress(torch.tensor([[3.0, -1.0]]), draw=None).decode()
        tensor([[ 2., -2.]])

    References:
        Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML
        2019.
    """

    block: int | None = None

    def __post_init__(self):
        _check_block(self.block)

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

    fraction: float = 0.25
    bits: int = 4

    def __post_init__(self):
        _check_fraction(self.fraction)
        _check_bits(self.bits)

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


_OCTAVES = 64  # powers of two below the largest; a smaller number is rounded to zero or to the least of them


@dataclass(frozen=True)
class Natural(Compressor):
    """Natural compression: rounds every value at random to one of the two nearest powers of two, without bias.

    delta = 7/8. Nine nominal bits per parameter, a sign and an exponent. The exponents are entropy-coded, which takes
    about 2.6 bits for normal numbers. Values below 2^-63 times the largest of a row are rounded to zero or to that.

    Example:
        >>> import fairmesh as fm
        >>> natural = fm.compressors.Natural()
        >>> natural.nominal_bits(dim=1000), natural.delta(dim=1000)
        (9000, 0.875)

    References:
        Horvath, Ho, Horvath, Sahu, Canini, Richtarik: Natural Compression for Distributed Deep Learning, MSML 2022.
    """

    def compress(self, rows: Tensor, draw: Draw) -> Code:
        dim = rows.shape[-1]
        uniforms = draw.uniforms(dim)  # first, since drawing takes the most memory
        sizes = rows.abs()
        largest = sizes.amax(dim=-1, keepdim=True)
        mantissa, top = torch.frexp(largest)  # largest = mantissa * 2^top, mantissa in [1/2, 1)
        scales = (largest / torch.where(mantissa > 0, mantissa, 1.0)).float().clamp_(max=2.0**127)  # 2^top, exactly
        least = scales.to(rows.dtype) * 2.0 ** (1 - _OCTAVES)
        up = uniforms * least < sizes  # how a number below the least is rounded
        ordinary = (sizes >= least) & (sizes > 0)
        mantissas, exponents = torch.frexp(sizes)
        del sizes
        levels = exponents.neg_().add_(top)  # octaves between the power of two above and the top one
        down = uniforms >= mantissas.mul_(2.0).sub_(1.0)
        del uniforms, mantissas, exponents
        levels = torch.where(ordinary, levels.add_(down), _OCTAVES - up.to(levels.dtype)).clamp_(max=_OCTAVES)
        del ordinary, up, down
        levels = levels.to(rows.dtype)
        exponent_code = Levels(levels, torch.ones_like(scales), dim, 1.0, _OCTAVES)
        signs = torch.ones_like(rows).copysign_(rows + 0.0)  # -0.0 + 0.0 is 0.0
        return Composite((exponent_code, Signs(signs, scales, dim)), _natural)

    def delta(self, dim: int) -> float:
        return 7.0 / 8.0

    def stable_gossip_multiple(self) -> float:
        return 2.0

    def nominal_bits(self, dim: int) -> float:
        return 9 * dim


def _power_of_two(octaves: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns 2^-octaves of whole numbers in 0 .. 126, from the bits of a float32: the same on every device."""
    return octaves.to(torch.int32).neg_().add_(127).bitwise_left_shift_(23).view(torch.float32).to(dtype)


def _natural(levels: Tensor, signed: Tensor) -> Tensor:
    """Returns the rows of a natural compression, from octaves below the top power and that power with signs."""
    powers = _power_of_two(levels.clamp(0, _OCTAVES), levels.dtype)
    return powers.mul_(signed).masked_fill_(levels == _OCTAVES, 0.0)


class _Matrix(NamedTuple):
    """A matrix in a row: where it begins, and its numbers of rows and columns."""

    first: int
    height: int
    width: int


@dataclass(frozen=True)
class _Factors:
    """Which parts of a row travel as factors of low rank, and how rows are put together from these and the rest."""

    dim: int
    rank: int
    matrices: tuple[_Matrix, ...]

    @cached_property
    def rest(self) -> tuple[slice, ...]:
        """The parts of a row between the matrices."""
        ends = [0, *(m.first + m.height * m.width for m in self.matrices)]
        firsts = [*(m.first for m in self.matrices), self.dim]
        return tuple(slice(end, first) for end, first in zip(ends, firsts) if first > end)

    @cached_property
    def numbers(self) -> int:
        """How many numbers travel per row."""
        return self.dim + sum(self.rank * (m.height + m.width) - m.height * m.width for m in self.matrices)

    @cached_property
    def share(self) -> float:
        """The share of a row's energy that is kept at least, in expectation."""
        return min((self.rank / min(m.height, m.width) for m in self.matrices), default=1.0)

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns the rows (..., dim) of factors and the rest, by sums in a fixed order."""
        pieces: dict[int, Tensor] = {}
        at, beside = 0, 0
        for first, height, width in self.matrices:
            u = left[..., at : at + self.rank * height].unflatten(-1, (self.rank, height))
            v = right[..., beside : beside + self.rank * width].unflatten(-1, (self.rank, width))
            at, beside = at + self.rank * height, beside + self.rank * width
            total = u[..., 0, :, None] * v[..., 0, None, :]
            for k in range(1, self.rank):
                total = total + u[..., k, :, None] * v[..., k, None, :]
            pieces[first] = total.flatten(-2)
        for part in self.rest:
            length = part.stop - part.start
            pieces[part.start] = right[..., beside : beside + length]
            beside += length
        return torch.cat([pieces[first] for first in sorted(pieces)], dim=-1)


@dataclass(frozen=True)
class LowRank(Compressor):
    """Sends each matrix of the model as two thin factors, as PowerSGD does.

    A matrix M (a x b, a convolution's filters as a rows) is projected onto the range of M (M^T M)^k Z, where Z has
    `rank` columns drawn at random in every round: the receiver gets P P^T M as P and M^T P. Vectors, and matrices that
    the factors would not shorten, travel as they are. delta = rank / min(a, b) of the matrix with the least. The
    algorithms compress differences to public copies, so that what a low rank leaves out is sent later. PowerSGD starts
    from the factor of the round before instead of a random Z. That made no difference where it was measured: ten sites
    of digits, rank 1 and 4, three seeds, mean accuracies within 0.1 points (`python examples/research/power_sgd.py`).

    Rows of another length than the model's, or outside a run, are taken as one matrix that is nearly square.

    Args:
        rank: Columns of a factor, >= 1. Default: 2.
        iterations: k, the power iterations: more keep more of the energy, and cost two products with M each, >= 0.
            Default: 1.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> layout = fm.compressors.Layout(("weight", "bias"), ((100, 50), (100,)))
        >>> compressor = fm.compressors.LowRank(rank=2).bound(layout)
        >>> compressor.nominal_bits(dim=5100) / 5100, compressor.delta(dim=5100)
        (2.5098039215686274, 0.04)

    References:
        Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
        NeurIPS 2019; the same: Practical Low-Rank Communication Compression in Decentralized Deep Learning, NeurIPS
        2020.
    """

    rank: int = 2
    iterations: int = 1

    def __post_init__(self):
        if self.rank < 1:
            raise BadInput(f"rank must be a whole number >= 1, got {self.rank}")
        if self.iterations < 0:
            raise BadInput(f"iterations must be a whole number >= 0, got {self.iterations}")

    def bound(self, layout: Layout) -> Compressor:
        return _LowRankOf(self, layout)

    def compress(self, rows: Tensor, draw: Draw) -> Code:
        return _factored(rows, draw, self._factors(rows.shape[-1]), self.iterations)

    def delta(self, dim: int) -> float:
        return self._factors(dim).share

    def nominal_bits(self, dim: int) -> float:
        return FLOAT_BITS * self._factors(dim).numbers

    def _factors(self, dim: int) -> _Factors:
        side = math.isqrt(dim)
        return _factors_of((_Matrix(0, side, dim // side),), dim, self.rank)


@dataclass(frozen=True)
class _LowRankOf(Compressor):
    """LowRank for rows of a layout."""

    settings: LowRank
    layout: Layout

    @cached_property
    def _of_models(self) -> _Factors:
        found = (_Matrix(place.start, shape[0], math.prod(shape[1:])) for _, shape, place in self.layout if shape)
        return _factors_of(tuple(found), self.layout.dim, self.settings.rank)

    def _factors(self, dim: int) -> _Factors:
        return self._of_models if dim == self.layout.dim else self.settings._factors(dim)

    def compress(self, rows: Tensor, draw: Draw) -> Code:
        return _factored(rows, draw, self._factors(rows.shape[-1]), self.settings.iterations)

    def delta(self, dim: int) -> float:
        return self._factors(dim).share

    def nominal_bits(self, dim: int) -> float:
        return FLOAT_BITS * self._factors(dim).numbers


def _factors_of(matrices: tuple[_Matrix, ...], dim: int, rank: int) -> _Factors:
    """Returns the factors of those matrices that they shorten."""
    return _Factors(dim, rank, tuple(m for m in matrices if rank * (m.height + m.width) < m.height * m.width))


def _factored(rows: Tensor, draw: Draw, factors: _Factors, iterations: int) -> Composite:
    """Returns the factors of every matrix, and the rest of the row behind the second ones."""
    lefts, rights, at = [], [], 0
    count = sum(factors.rank * min(m.height, m.width) for m in factors.matrices)
    uniforms = draw.uniforms(count).sub_(0.5 - 2.0**-25) if count else rows  # symmetric: on a grid of 2^-24
    for first, height, width in factors.matrices:
        matrix = rows[..., first : first + height * width].unflatten(-1, (height, width))
        largest = matrix.abs().amax(dim=(-2, -1), keepdim=True)
        scaled = matrix / largest.clamp(min=torch.finfo(torch.float32).tiny)  # so that no square overflows
        tall = height >= width
        side = min(height, width)
        start = uniforms[..., at : at + factors.rank * side].unflatten(-1, (factors.rank, side))
        at += factors.rank * side
        long = scaled if tall else scaled.mT
        found = _orthonormal(_times(long, start))
        for _ in range(iterations):
            found = _orthonormal(_times(long, _orthonormal(_times(long.mT, found))))
        other = _times(matrix.mT if tall else matrix, found)
        left, right = (found, other) if tall else (other, found)
        lefts.append(left.flatten(-2))
        rights.append(right.flatten(-2))
    rights += [rows[..., part] for part in factors.rest]
    empty = rows[..., :0]
    return Composite((Dense(torch.cat([empty, *lefts], -1)), Dense(torch.cat([empty, *rights], -1))), factors)


def _times(matrix: Tensor, columns: Tensor) -> Tensor:
    """Returns M v of each of the vectors (..., rank, width): (..., rank, height). A sum per entry, since products of
    matrices add in an order that depends on how many there are."""
    return torch.stack([(matrix * v.unsqueeze(-2)).sum(dim=-1) for v in columns.unbind(dim=-2)], dim=-2)


def _orthonormal(columns: Tensor) -> Tensor:
    """Returns orthonormal vectors (..., rank, height) with the same span; zero where they depend on each other."""
    found: list[Tensor] = []
    for column in columns.unbind(dim=-2):
        before = torch.linalg.vector_norm(column, dim=-1, keepdim=True)
        for _ in range(2):  # once is not enough in floating point
            for other in found:
                column = column - (column * other).sum(dim=-1, keepdim=True) * other
        norm = torch.linalg.vector_norm(column, dim=-1, keepdim=True)
        independent = norm > 100 * torch.finfo(column.dtype).eps * before
        found.append(torch.where(independent, column / torch.where(independent, norm, 1.0), 0.0))
    return torch.stack(found, dim=-2)


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
        "natural": Natural,
        "low-rank": LowRank,
    },
)
