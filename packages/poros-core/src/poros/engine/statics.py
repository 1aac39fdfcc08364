"""Static memory of recorded graphs, shared by all that are never replayed at the same time.

A graph reads and writes fixed addresses. What a replay reads is copied there right before it, and what it leaves is
copied away right after it, so graphs of every batch shape can use the same memory: each the beginning of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from poros.engine.signature import Signature


@dataclass(eq=False)
class Place:
    """A piece of static memory.

    Attributes:
        memory: Its bytes.
        holds: The tensor, and autograd's count of its changes, whose values lie there now.
    """

    memory: Tensor
    holds: tuple[Tensor, int] | None = None

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, dtype and, if it leaves no holes, strides at the beginning of the place."""
        pattern = torch.empty_like(tensor, device="meta")
        start = self.memory[: pattern.numel() * pattern.element_size()].view(pattern.dtype)
        return start.as_strided(pattern.size(), pattern.stride())


class Statics:
    """Places by name, each as large as the largest tensor that has asked for it.

    A place that is too small is replaced; the graphs that use it keep the old one until they are gone themselves.

    Args:
        exact: Whether places are never larger than asked for. Otherwise one that is replaced has at least twice the
            room, so that rows that get longer and longer don't leave a place behind for every length.

    Attributes:
        outgrown: Whether a place was replaced since this was last set to False.
    """

    def __init__(self, exact: bool = False) -> None:
        self.outgrown = False
        self._exact = exact
        self._places: dict[Signature, Place] = {}

    def place(self, name: Signature, tensor: Tensor) -> Place:
        """The place of a name, with room for a tensor."""
        size = tensor.numel() * tensor.element_size()
        place = self._places.get(name)
        if place is None or place.memory.numel() < size or place.memory.device != tensor.device:
            self.outgrown |= place is not None
            if place is not None and place.memory.device == tensor.device and not self._exact:
                size = max(size, 2 * place.memory.numel())
            place = self._places[name] = Place(torch.zeros(size, dtype=torch.uint8, device=tensor.device))
        return place

    def like(self, name: Signature, tensor: Tensor) -> Tensor:
        """A tensor like another one in the place of a name."""
        return self.place(name, tensor).like(tensor)

    @property
    def nbytes(self) -> int:
        """Bytes of all places."""
        return sum(place.memory.numel() for place in self._places.values())

    def forget(self) -> None:
        """Give up the memory that no graph uses."""
        self._places.clear()
