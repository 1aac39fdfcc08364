"""The tiers of the HostStore that hold the base in memory, and the choice between them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from poros.config import Tier
from poros.errors import StreamError
from poros.store.store import HostStore

log = logging.getLogger(__name__)


class PageableStore:
    """Ordinary host memory. Right for a CPU; on a GPU, copies from it are several times slower than from pinned memory.

    Args:
        sizes: Bytes of each layer's slab.
    """

    tier = "pageable"

    def __init__(self, sizes: Sequence[int]) -> None:
        self.nbytes = sum(sizes)
        self._slabs = [torch.empty(size, dtype=torch.uint8) for size in sizes]

    def slab(self, layer: int) -> Tensor:
        return self._slabs[layer]

    def close(self) -> None:
        self._slabs = []


class PinnedStore(PageableStore):
    """Page-locked host memory of exactly the size that is needed.

    The slabs are ordinary memory that is registered with the driver. torch's own pinned allocator would round each of
    them up to a power of two, which can nearly double the host memory of a large base.

    Raises:
        StreamError: the driver refused to lock that much memory; nothing stays registered.
    """

    tier = "pinned"

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        registered: list[Tensor] = []
        # Runs at `close`, or when the store is dropped; it holds the slabs, so they are unpinned before they are freed.
        self._unpin = weakref.finalize(self, _unpin, registered)
        for slab in self._slabs:
            code = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0)
            if int(code) != 0:
                locked = sum(done.numel() for done in registered)
                self.close()
                _clear_error()
                raise StreamError(
                    f"the driver refused to pin host memory (error {int(code)}) after {locked / 1e9:.1f} of "
                    f"{self.nbytes / 1e9:.1f} GB",
                    "raise the limit on locked memory (ulimit -l), free host memory, or set stream.tier to pageable",
                )
            registered.append(slab)

    def close(self) -> None:
        self._unpin()
        super().close()


def _unpin(slabs: list[Tensor]) -> None:
    while slabs:
        torch.cuda.cudart().cudaHostUnregister(slabs.pop().data_ptr())


def _clear_error() -> None:
    """Take back the driver's error, which the next kernel launch would otherwise report as its own."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def make_store(sizes: Sequence[int], tier: Tier, device: torch.device) -> HostStore:
    """Allocate a store.

    Args:
        sizes: Bytes of each layer's slab.
        tier: "auto" pins when the device is a GPU and falls back to pageable memory with one warning.
        device: Where the blocks will go.

    Raises:
        StreamError: "pinned" was asked for and can't be had.
    """
    if tier == "pageable" or (tier == "auto" and device.type != "cuda"):
        return PageableStore(sizes)
    if device.type != "cuda":
        raise StreamError("pinned memory needs a CUDA device", "set stream.tier to pageable or auto")
    try:
        return PinnedStore(sizes)
    except StreamError as error:
        if tier == "pinned":
            raise
        log.warning("%s; going on with pageable memory, which copies several times slower", error.message)
        return PageableStore(sizes)
