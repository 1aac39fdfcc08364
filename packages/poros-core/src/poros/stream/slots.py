"""Device buffers, each of which holds one block, at addresses that never change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """One device buffer.

    Attributes:
        index: Its place among the slots.
        buffer: uint8, one dimension, as long as the largest block that comes to lie in it.
    """

    index: int
    buffer: Tensor


def make_slots(sizes: Sequence[int], device: torch.device) -> tuple[Slot, ...]:
    """Allocate slots of these numbers of bytes. They are allocated once and live as long as the model streams."""
    return tuple(Slot(index, torch.zeros(size, dtype=torch.uint8, device=device)) for index, size in enumerate(sizes))
