"""Device buffers, each of which holds one block, at addresses that never change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poros.dimensions import aligned


@dataclass(frozen=True)
class Slot:
    """One device buffer.

    Attributes:
        index: Its place among the slots.
        buffer: uint8, one dimension, as long as the largest block that comes to lie in it.
    """

    index: int
    buffer: Tensor


class Arena:
    """One piece of device memory with two uses by turns: the head, or slots and what is taken out of them.

    Args:
        nbytes: Its size.
        device: Where.

    Attributes:
        buffer: All of it: uint8, one dimension.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._used = 0

    def take(self, nbytes: int) -> Tensor | None:
        """Memory that nobody else gets, beside the head; None if there isn't as much left."""
        start, self._used = self._used, self._used + aligned(nbytes)
        if start + nbytes > self.buffer.numel():
            self._used = start
            return None
        return self.buffer[start : start + nbytes]


def make_slots(
    sizes: Sequence[int], device: torch.device, arena: Arena | None = None, first: int = 0
) -> tuple[Slot, ...]:
    """Allocate slots of these numbers of bytes. They are allocated once and live as long as the model streams.

    Args:
        sizes: Of each slot.
        device: Where.
        arena: Holds them, as far as there is room in it.
        first: Index of the first one.
    """
    slots = []
    for index, size in enumerate(sizes, first):
        buffer = None if arena is None else arena.take(size)
        slots.append(Slot(index, torch.zeros(size, dtype=torch.uint8, device=device) if buffer is None else buffer))
    return tuple(slots)
