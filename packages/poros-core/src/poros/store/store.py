"""What every tier of the HostStore offers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class HostStore(Protocol):
    """The frozen base in host memory, one slab per layer.

    Attributes:
        tier: "pageable" or "pinned".
        nbytes: Bytes of all slabs.
        num_slabs: How many there are: one for each layer, and one more for a head that travels.
    """

    tier: str
    nbytes: int
    num_slabs: int

    def slab(self, layer: int) -> Tensor:
        """The bytes of a layer: uint8, one dimension, exactly as long as the layer's packing."""

    def close(self) -> None:
        """Give the memory back; no slab may be used afterwards."""
