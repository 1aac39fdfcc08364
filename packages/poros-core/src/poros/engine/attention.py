"""The three attention paths: what torch may use, and whether a run repeats itself bit for bit.

`math`: deterministic algorithms and plain math attention. `fused`: deterministic algorithms, with the fused flash and
memory-efficient kernels left on; reproducible and fast. `default`: torch as it comes; on a GPU a stock run may then
differ from itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from poros.config import AttentionPath


@contextmanager
def attention_path(path: AttentionPath) -> Iterator[None]:
    """Set torch up for an attention path and put its switches back afterwards.

    cuBLAS reads its workspace setting when it is first used, so on a GPU enter this before any computation;
    that setting stays.
    """
    if path == "default":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    backends = attention_backends()
    try:
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory with NaN is a debugging aid that costs time and changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if path == "math":
            allow_attention_backends((False, False, True, False))
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        allow_attention_backends(backends)


def attention_backends() -> tuple[bool, bool, bool, bool]:
    """Which backends `scaled_dot_product_attention` may use: flash, memory-efficient, math, cuDNN."""
    backends = torch.backends.cuda
    return (
        bool(backends.flash_sdp_enabled()),
        bool(backends.mem_efficient_sdp_enabled()),
        bool(backends.math_sdp_enabled()),
        bool(backends.cudnn_sdp_enabled()),
    )


def allow_attention_backends(allowed: tuple[bool, bool, bool, bool]) -> None:
    """Allow flash, memory-efficient, math and cuDNN attention, or not."""
    backends = torch.backends.cuda
    flash, efficient, math, cudnn = allowed
    backends.enable_flash_sdp(flash)
    backends.enable_mem_efficient_sdp(efficient)
    backends.enable_math_sdp(math)
    backends.enable_cudnn_sdp(cudnn)
