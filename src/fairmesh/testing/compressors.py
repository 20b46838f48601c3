"""The contract of a compressor."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fairmesh import compression
from fairmesh.compression.codes import Code, row_of
from fairmesh.compression.compressors import Compressor
from fairmesh.numerics import random_streams
from fairmesh.numerics.random_streams import Draw
from fairmesh.testing.violations import checked_settings, require, require_close, running

_DRAWS = 400  # of a random compressor, for an expected error
_SIGMAS = 5.0  # standard errors that a mean over draws may be off by
_ROUNDING = 2.0**-22  # of a norm that travels in float32, in a squared error
_DTYPES = (torch.float32, torch.float64)


def check_compressor(compressor: Compressor, *, dims: Sequence[int] = (1, 2, 3, 8, 31, 200)) -> None:
    """Checks that a compressor keeps the contract that gossip and the codec count on. Takes about a second.

    1. It is a frozen dataclass that survives being written to TOML and read again.
    2. Q(0) = 0.
    3. It keeps dtype and shape, and changes nothing that it is given.
    4. It draws from the streams it is given and nowhere else: the same streams give the same code.
    5. One row of a batch is compressed as that row alone.
    6. E ||Q(x) - x||^2 <= (1 - delta) ||x||^2 with the delta it states, for spikes, equal and heavy-tailed rows; the
       mean over 400 draws may exceed that by five standard errors.
    7. Its codes are encoded and decoded without loss, into as many bytes as a simulation counts.

    Args:
        compressor: The object to check.
        dims: The lengths of the rows to compress. Default: (1, 2, 3, 8, 31, 200).

    Raises:
        ContractViolation: An AssertionError that says what was violated, with numbers.

    Example:
        >>> import fairmesh as fm
        >>> fm.testing.check_compressor(fm.compressors.Sign(block=4), dims=(1, 7))
    """
    compressor = checked_settings(compressor, Compressor)
    for dim in dims:
        with running(f"compressing rows of {dim}"):
            for dtype in _DTYPES:
                _check_zero(compressor, dim, dtype)
                _check_purity(compressor, dim, dtype)
                _check_rows(compressor, dim, dtype)
            _check_contraction(compressor, dim)
            bits = compressor.nominal_bits(dim)
            require(math.isfinite(bits) and bits >= 0, f"nominal_bits({dim}) is {bits}, not a finite number >= 0")
        with running(f"encoding and decoding rows of {dim}"):
            for dtype in _DTYPES:
                _check_codec(compressor, dim, dtype)


def draws(identities: Sequence[int], dtype: torch.dtype, seeds: Sequence[int] = (0,), round_index: int = 4) -> Draw:
    """Returns the random streams of some nodes in one round, one row of nodes per seed."""
    key = random_streams.keys(torch.tensor(seeds), "compression", round_index, torch.tensor(identities))
    return Draw(key, dtype)


def rows_of_every_kind(dim: int, dtype: torch.dtype) -> Tensor:
    """Returns ordinary rows, zeros, a spike, subnormal and huge numbers, both zeros, equal ones, and a heavy tail."""
    generator = torch.Generator().manual_seed(dim)
    rows = torch.randn(8, dim, generator=generator, dtype=torch.float64)
    rows[1] = 0.0
    rows[2] *= 1e-3
    rows[2, dim // 2] = 1.0
    rows[3] *= 1e-42
    rows[4] *= 1e18
    rows[5] = torch.where(rows[5] > 0, 0.0, -0.0)
    rows[6] = 0.25
    rows[7] *= torch.rand(dim, generator=generator, dtype=torch.float64).pow(40)
    return rows.to(dtype)


def _check_zero(compressor: Compressor, dim: int, dtype: torch.dtype) -> None:
    for zero in (0.0, -0.0):
        rows = torch.full((2, 3, dim), zero, dtype=dtype)
        decoded = compressor.compress(rows, draws(range(3), dtype, (0, 1))).decode()
        largest = float(decoded.abs().max())
        require(largest == 0, f"Q(0) has entries up to {largest:.3g}, not 0")


def _check_purity(compressor: Compressor, dim: int, dtype: torch.dtype) -> None:
    rows, draw = rows_of_every_kind(dim, dtype).unsqueeze(0), draws(range(8), dtype)
    before, state = rows.clone(), torch.get_rng_state()
    code = compressor.compress(rows, draw)
    decoded = code.decode()
    require(torch.equal(rows, before), "compress changes the rows that it is given")
    require(torch.equal(torch.get_rng_state(), state), "compress draws from torch's generator; use draw.uniforms(...)")
    require(isinstance(code, Code), f"compress gives a {type(code).__name__}, none of Dense, Sparse, Levels, Signs")
    found, wanted = ((tuple(t.shape), str(t.dtype)[6:]) for t in (decoded, rows))
    require(found == wanted, f"rows {wanted} are decoded as {found}")
    require(
        decoded.isfinite().all(), f"rows between {float(rows.min()):.3g} and {float(rows.max()):.3g} give infinities"
    )
    require(torch.equal(code.decode(), decoded), "decoding a code twice gives different rows")
    again = compressor.compress(rows, draws(range(8), dtype)).decode()
    require_close(again, decoded, 0.0, "the same rows compressed with the same streams")


def _check_rows(compressor: Compressor, dim: int, dtype: torch.dtype) -> None:
    rows = torch.stack([rows_of_every_kind(dim, dtype), rows_of_every_kind(dim, dtype).flip(0)])
    whole = compressor.compress(rows, draws(range(10, 18), dtype, (0, 1))).decode()
    for r, i in itertools.product(range(2), range(0, 8, 3)):
        alone = compressor.compress(rows[r : r + 1, i : i + 1].clone(), draws([10 + i], dtype, (r,))).decode()
        require_close(alone[0, 0], whole[r, i], 0.0, f"row ({r}, {i}) of length {dim} alone and in a batch of (2, 8)")


def _check_contraction(compressor: Compressor, dim: int) -> None:
    delta = compressor.delta(dim)
    if delta is None:
        return
    require(0 < delta <= 1, f"delta({dim}) is {delta}, not in (0, 1]; give None where none is guaranteed")
    generator = torch.Generator().manual_seed(dim)
    normal = torch.randn(dim, generator=generator, dtype=torch.float64)
    spike = torch.zeros(dim, dtype=torch.float64)
    spike[dim // 2] = 1.0
    kinds = {"a spike": spike, "a spike in dust": spike + 1e-3, "equal entries": torch.ones_like(spike)}
    kinds |= {"normal entries": normal, "a heavy tail": normal**5, "a root's spread": spike + (1 - spike) / dim**0.5}
    draw = draws(range(_DRAWS), torch.float64)
    for kind, row in kinds.items():
        errors = (compressor.compress(row.expand(1, _DRAWS, dim).clone(), draw).decode() - row).square().sum(dim=-1)[0]
        norm = float(row.square().sum())
        error, bound = float(errors.mean()), (1 - delta) * norm
        margin = _SIGMAS * float(errors.std()) / _DRAWS**0.5 + _ROUNDING * norm
        require(
            error <= bound + margin,
            f"for rows of {dim} with {kind}, E||Q(x) - x||^2 is {error / norm:.4g} ||x||^2 (+- {margin / norm:.2g}), "
            f"but delta({dim}) = {delta:.4g} allows at most {1 - delta:.4g}",
        )


def _check_codec(compressor: Compressor, dim: int, dtype: torch.dtype) -> None:
    rows = rows_of_every_kind(dim, dtype)
    code = compressor.compress(rows.unsqueeze(0), draws(range(8), dtype))
    sizes = torch.as_tensor(compression.part_sizes(code)).expand(1, 8)
    zero = torch.zeros(1, 1, dim, dtype=dtype)
    template = {"model": row_of(compressor.compress(zero, draws([0], dtype)), 0, 0)}
    for i in range(8):
        sent = row_of(code, 0, i)
        message = compression.encode({"model": sent}, 3)
        counted = compression.HEADER_BYTES + int(sizes[0, i])
        require(len(message) == counted, f"row {i} of length {dim} takes {len(message)} bytes, counted as {counted}")
        received = compression.decode(message, template, 3)["model"]
        _require_same_code(received, sent, f"row {i} of length {dim}")


def _require_same_code(received: Code, sent: Code, whose: str) -> None:
    for name, value in sent._asdict().items():
        there = getattr(received, name)
        if not isinstance(value, Tensor):
            require(there == value, f"{name} of {whose} is {there} after decoding, {value} before")
            continue
        alike = there.shape == value.shape and there.dtype == value.dtype and _bits(there) == _bits(value)
        negative_zero = bool(((value == 0) & value.signbit()).any())
        hint = "; add 0.0 to the values, which turns -0.0 into 0.0" if negative_zero else ""
        require(alike, f"{name} of {whose} is not the same bits after encoding and decoding{hint}")


def _bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist()
