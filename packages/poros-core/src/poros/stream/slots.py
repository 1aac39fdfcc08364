"""Device buffers, each of which holds one block, at addresses that never change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """One device buffer.

    Attributes:
        index: Its place among the slots.
        buffer: uint8, one dimension, as long as the largest block.
    """

    index: int
    buffer: Tensor


def make_slots(num_slots: int, nbytes: int, device: torch.device) -> tuple[Slot, ...]:
    """Allocate slots of `nbytes` bytes each. They are allocated once and live as long as the model streams."""
    return tuple(Slot(index, torch.zeros(nbytes, dtype=torch.uint8, device=device)) for index in range(num_slots))
