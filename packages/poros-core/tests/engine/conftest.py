"""A stand-in for the fused kernel."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import pytest
import torch


@pytest.fixture
def fusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused layer on a CPU, with bitsandbytes in the kernel's place."""
    from poros.engine import copies
    from poros.engine.kernels import linear

    def dequantise(codes: torch.Tensor, state: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        restored = bnb.functional.dequantize_4bit(codes, state)
        return restored if out is None else out.copy_(restored)

    monkeypatch.setattr(linear, "dequantise", dequantise)
    monkeypatch.setattr(copies, "can_fuse", lambda layer: type(layer) is bnb.nn.Linear4bit)
