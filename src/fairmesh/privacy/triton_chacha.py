"""The key stream of ChaCha20 on a GPU, the same bits as those of the library that is used on a CPU."""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_BLOCKS = 128  # of 64 bytes, per program


@triton.jit
def _turned(x, COUNT: tl.constexpr):
    return (x << COUNT) | (x >> (32 - COUNT))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _turned(d ^ a, 16)
    c += d
    b = _turned(b ^ c, 12)
    a += b
    d = _turned(d ^ a, 8)
    c += d
    b = _turned(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _stream_kernel(keys, nonces, out, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    zero = tl.zeros([BLOCKS], dtype=tl.uint32)
    c0, c1, c2, c3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    k = keys + row * 8
    k0, k1 = zero + tl.load(k).to(tl.uint32, bitcast=True), zero + tl.load(k + 1).to(tl.uint32, bitcast=True)
    k2, k3 = zero + tl.load(k + 2).to(tl.uint32, bitcast=True), zero + tl.load(k + 3).to(tl.uint32, bitcast=True)
    k4, k5 = zero + tl.load(k + 4).to(tl.uint32, bitcast=True), zero + tl.load(k + 5).to(tl.uint32, bitcast=True)
    k6, k7 = zero + tl.load(k + 6).to(tl.uint32, bitcast=True), zero + tl.load(k + 7).to(tl.uint32, bitcast=True)
    n = nonces + row * 3
    n0 = block.to(tl.uint32)
    n1 = zero + tl.load(n).to(tl.uint32, bitcast=True)
    n2 = zero + tl.load(n + 1).to(tl.uint32, bitcast=True)
    n3 = zero + tl.load(n + 2).to(tl.uint32, bitcast=True)
    x0, x1, x2, x3, x4, x5, x6, x7 = c0, c1, c2, c3, k0, k1, k2, k3
    x8, x9, x10, x11, x12, x13, x14, x15 = k4, k5, k6, k7, n0, n1, n2, n3
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    to = out + (row * blocks + block) * 16
    here = block < blocks
    tl.store(to + 0, (x0 + c0).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 1, (x1 + c1).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 2, (x2 + c2).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 3, (x3 + c3).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 4, (x4 + k0).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 5, (x5 + k1).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 6, (x6 + k2).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 7, (x7 + k3).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 8, (x8 + k4).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 9, (x9 + k5).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 10, (x10 + k6).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 11, (x11 + k7).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 12, (x12 + n0).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 13, (x13 + n1).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 14, (x14 + n2).to(tl.int32, bitcast=True), mask=here)
    tl.store(to + 15, (x15 + n3).to(tl.int32, bitcast=True), mask=here)


# An operation of torch, so that a trace of a round holds it. A kernel that is only called would not be replayed: the
# noise would be whatever is in memory.
@torch.library.custom_op("fairmesh::key_stream", mutates_args=())
def key_stream(keys: Tensor, nonces: Tensor, count: int) -> Tensor:
    """Returns 64-bit integers (nodes, count), from keys (nodes, 8) and nonces (nodes, 3) of int32."""
    blocks = -(-count // 8)
    out = torch.empty(len(keys), blocks * 16, dtype=torch.int32, device=keys.device)
    grid = (len(keys), -(-blocks // _BLOCKS))
    _stream_kernel[grid](  # pyright: ignore[reportIndexIssue]
        keys, nonces.to(torch.int32).contiguous(), out, blocks, BLOCKS=_BLOCKS
    )
    return out.view(torch.int64)[:, :count].contiguous()


@key_stream.register_fake
def _(keys: Tensor, nonces: Tensor, count: int) -> Tensor:
    return torch.empty(len(keys), count, dtype=torch.int64, device=keys.device)
