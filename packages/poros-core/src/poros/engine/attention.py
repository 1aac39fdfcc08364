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
    """Set torch up for an attention path and put everything back afterwards.

    cuBLAS reads its workspace setting when it is first used, so on a GPU enter this before any computation.
    """
    if path == "default":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    backends = torch.backends.cuda
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    fused = (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.cudnn_sdp_enabled())
    try:
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory with NaN is a debugging aid that costs time and changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if path == "math":
            _allow_fused((False, False, False))
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        _allow_fused(fused)


def _allow_fused(flags: tuple[bool, bool, bool]) -> None:
    flash, efficient, cudnn = flags
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
