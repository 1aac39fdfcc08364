"""A 4-bit linear layer that restores its weight with our kernel and multiplies as bitsandbytes does.

Used only inside the templates of the graph executor, which are copies; the layers of the user's model stay what they
are. Whether the layer gives the same bits as bitsandbytes on this GPU, with this version, at this size, is not
assumed: it is tried with the weights at hand before the layer is used (`matches`), and where it doesn't,
bitsandbytes' layer stays."""

from __future__ import annotations

import math
from typing import Any, Literal

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCK = 64
"""Weights that share a scale."""

NESTED_BLOCK = 256
"""Scales that share a nested scale."""


def dequantise(codes: Tensor, state: Any, out: Tensor | None = None) -> Tensor:
    """Restore a weight; see `poros.engine.kernels.nf4`, which needs Triton and is therefore imported late."""
    from poros.engine.kernels import nf4

    return nf4.dequantise(codes, state, out)


class _Product(torch.autograd.Function):
    """x @ W.T + bias with a frozen W, restored again for the backward pass as in bitsandbytes' `MatMul4Bit`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: FusedLinear4bit) -> Tensor:
        ctx.layer = layer
        if layer.skip:
            shape = (*x.shape[:-1], layer.out_features)
            return x.new_full(shape, math.nan) if layer.skip == "nan" else x.new_empty(shape)
        return functional.linear(x, layer.full_weight(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.matmul(gradient, ctx.layer.full_weight()), None, None


class FusedLinear4bit(bnb.nn.Linear4bit):  # type: ignore[misc]
    """`bitsandbytes.nn.Linear4bit` with another way to restore the weight.

    Attributes:
        restored: Where `restore` leaves the weight, bf16 [out, in]; None to restore it at each use.
        skip: What to give instead of the product where nobody uses its value: "nan", "empty" for what lies in memory,
            or "" for the product itself. The backward pass is the same for all.
    """

    restored: Tensor | None = None
    skip: Literal["", "nan", "empty"] = ""

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        output: Tensor = _Product.apply(x, bias, self)  # type: ignore[no-untyped-call]
        return output.to(given)

    def full_weight(self) -> Tensor:
        """The weight in bf16, [out, in]."""
        return dequantise(self.weight.data, self.weight.quant_state) if self.restored is None else self.restored

    def restore(self) -> None:
        """Restore the weight for uses to come."""
        dequantise(self.weight.data, self.weight.quant_state, self.restored)


def fused_layers(module: nn.Module) -> list[FusedLinear4bit]:
    """The fused layers inside a module."""
    return [layer for layer in module.modules() if isinstance(layer, FusedLinear4bit)]


def can_fuse(layer: nn.Module) -> bool:
    """Whether a layer is of the kind that the kernel understands."""
    if type(layer) is not bnb.nn.Linear4bit:
        return False
    weight: Any = layer.weight
    state = weight.quant_state
    return bool(
        weight.is_cuda
        and weight.dtype == torch.uint8
        and layer.compute_dtype == torch.bfloat16
        and state.dtype == torch.bfloat16
        and state.nested
        and state.blocksize == BLOCK
        and state.state2.blocksize == NESTED_BLOCK
    )


def matches(layer: Any, rows: int, dtype: torch.dtype) -> bool:
    """Whether the fused layer gives the same bits as bitsandbytes, forward and backward.

    Args:
        layer: A `Linear4bit` with real weights.
        rows: Rows of its input: batch x tokens.
        dtype: Of its input.
    """
    x = torch.randn(1, rows, layer.in_features, device=layer.weight.device, dtype=dtype)
    gradient = torch.randn(1, rows, layer.out_features, device=x.device, dtype=dtype)
    found = []
    for kind in (bnb.nn.Linear4bit, FusedLinear4bit):
        before, layer.__class__ = layer.__class__, kind
        try:
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                output = layer(leaf)
            found.append((output.detach(), torch.autograd.grad(output, leaf, gradient)[0]))
        finally:
            layer.__class__ = before
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))
