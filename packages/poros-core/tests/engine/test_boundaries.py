"""Boundary activations on the host: brought back once, held by nobody, their memory used again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.config import LoraPart
from poros.engine.adapters import lora_config
from poros.engine.boundaries import HostBoundaries
from poros.engine.engine import engine_of
from poros.plugins import Plugins

CPU = torch.device("cpu")


def test_host_memory_of_boundaries_is_used_again() -> None:
    boundaries = HostBoundaries(CPU)
    for _ in range(5):
        kept = [boundaries.put(torch.full((1, 4, 8), float(n))) for n in range(8)]
        for n, boundary in reversed(list(enumerate(kept))):
            assert boundary.take().unique().tolist() == [n]
        del kept, boundary
    assert boundaries.nbytes == 8 * 4 * 8 * 4
    abandoned = boundaries.put(torch.zeros(1, 4, 8))
    del abandoned  # a forward pass without a backward pass
    assert boundaries.nbytes == 8 * 4 * 8 * 4
    boundaries.close()


def test_nothing_is_held_on_the_device_once_it_was_used(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    """Autograd's graph lives as long as the loss does, and with it whatever a block's function holds."""
    model = poros.load(
        checkpoint("qwen2", {}), lora=lora_config(LoraPart(rank=4)), device="cpu", plugins=plugins, boundaries="host"
    )
    brought: list[weakref.ref[torch.Tensor]] = []
    boundaries = engine_of(model).boundaries
    assert boundaries is not None
    bring = boundaries.bring

    def seen(host: torch.Tensor, gone: Any) -> tuple[torch.Tensor, Any]:
        found = bring(host, gone)
        brought.append(weakref.ref(found[0]))
        return found

    boundaries.bring = seen  # type: ignore[method-assign]
    ids = torch.arange(24).view(1, -1)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert len(brought) == 5
    assert [tensor() for tensor in brought] == [None] * 5
    assert loss.grad_fn is not None


@pytest.mark.parametrize("lengths", [(8, 24, 16, 24), (24, 8, 16)])
def test_shorter_rows_take_no_host_memory_of_their_own(lengths: tuple[int, ...]) -> None:
    boundaries = HostBoundaries(CPU)
    for length in lengths:
        kept = [boundaries.put(torch.full((1, length, 8), float(n))) for n in range(5)]
        for n, boundary in reversed(list(enumerate(kept))):
            hidden = boundary.take()
            assert hidden.shape == (1, length, 8)
            assert hidden.unique().tolist() == [n]
        del kept, boundary
    assert boundaries.nbytes <= 8 * (24 + (8 if lengths[0] == 8 else 0)) * 8 * 4
