"""Nested NF4 de-quantisation in one pass, bit-equal to bitsandbytes'.

bitsandbytes takes three kernels and two trips through device memory: it restores the scales (code of the scale x
nested scale), adds the offset, then restores the weights (NF4 code x scale). Here one kernel does all of it. The
arithmetic is the same, operation by operation: each product and the sum are rounded to float32 by themselves. A
compiler would contract `a * b + c` into one fused operation that rounds once and gives other bits, hence the inline
PTX.

    scale[j]  = fl32(fl32(table2[absmax[j]] * absmax2[j // 256]) + offset)
    weight[i] = bf16(fl32(table[code[i]] * scale[i // 64]))
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _mul(a, b):
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _add(a, b):
    return tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.autotune(
    configs=[triton.Config({"BYTES": size}, num_warps=warps) for size in (1024, 2048, 4096) for warps in (4, 8)],
    key=["num_weights"],
)
@triton.jit
def _dequantise(codes, absmax, absmax2, table2, offset, table, out, num_weights, BYTES: tl.constexpr):
    """Each program restores 2 * BYTES weights: two codes a byte, the first in the high half."""
    program = tl.program_id(0).to(tl.int64)
    byte = program * BYTES + tl.arange(0, BYTES)
    packed = tl.load(codes + byte, mask=byte < (num_weights + 1) // 2, other=0)
    SCALES: tl.constexpr = BYTES // 32
    block = program * SCALES + tl.arange(0, SCALES)
    inside = block < (num_weights + 63) // 64
    code = tl.load(absmax + block, mask=inside, other=0).to(tl.int32)
    nested = tl.load(absmax2 + block // 256, mask=inside, other=0.0)
    scale = _add(_mul(tl.load(table2 + code), nested), tl.load(offset) + tl.zeros((SCALES,), tl.float32))
    scales = tl.reshape(tl.broadcast_to(scale[:, None], (SCALES, 32)), (BYTES,))
    high = _mul(tl.load(table + (packed >> 4).to(tl.int32)), scales)
    low = _mul(tl.load(table + (packed & 15).to(tl.int32)), scales)
    weights = tl.reshape(tl.join(high, low), (2 * BYTES,)).to(tl.bfloat16)
    index = program * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(out + index, weights, mask=index < num_weights)


def dequantise(codes: Tensor, state: Any, out: Tensor | None = None) -> Tensor:
    """Restore a weight.

    Args:
        codes: Packed NF4 codes, uint8, two a byte, contiguous.
        state: The nested bitsandbytes `QuantState` beside them.
        out: Where to: bf16, contiguous, of the state's shape; a new tensor by default.

    Returns:
        The weight in bf16, of the state's shape (out, in).
    """
    if out is None:
        out = torch.empty(state.shape, dtype=torch.bfloat16, device=codes.device)
    count = out.numel()
    with torch.cuda.device(codes.device):  # Triton launches on the current device, whatever its arguments are on
        _launch(codes, state, out, count)
    return out


def _launch(codes: Tensor, state: Any, out: Tensor, count: int) -> None:
    _dequantise[lambda meta: (triton.cdiv(count, 2 * meta["BYTES"]),)](
        codes, state.absmax, state.state2.absmax, state.state2.code, state.offset, state.code, out, count
    )
