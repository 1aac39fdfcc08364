"""The tiers of the HostStore that hold the base in memory, and the choice between them."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

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
        self.num_slabs = len(sizes)
        self._slabs = [torch.empty(size, dtype=torch.uint8) for size in sizes]

    def slab(self, layer: int) -> Tensor:
        return self._slabs[layer]

    def close(self) -> None:
        self._slabs = []


class PinnedStore(PageableStore):
    """Page-locked host memory of exactly the size that is needed.

    The slabs are ordinary memory that is registered with the driver. torch's own pinned allocator would round each of
    them up to a power of two, which can nearly double the host memory of a large base. Registering is what first
    touches the pages; several threads do it, on processors next to the GPU, so that the pages lie there too.

    Args:
        sizes: Bytes of each layer's slab.
        device: The GPU to which they will be copied.

    Raises:
        StreamError: the driver refused to lock that much memory; nothing stays registered.
    """

    tier = "pinned"

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        super().__init__(sizes)
        registered: list[Tensor] = []
        # Runs at `close`, or when the store is dropped; it holds the slabs, so they are unpinned before they are freed.
        self._unpin = weakref.finalize(self, _unpin, registered, device)

        def pin(slab: Tensor) -> int:
            code = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0))
            if code == 0:
                registered.append(slab)
            else:
                _clear_error(device)
            return code

        with ThreadPoolExecutor(PINNING_THREADS, "poros-pin", _work_near, (device,)) as threads:
            refusals = [code for code in threads.map(pin, self._slabs) if code != 0]
        if refusals:
            locked = sum(slab.numel() for slab in registered)
            self.close()
            raise StreamError(
                f"the driver refused to pin host memory (error {refusals[0]}) after {locked / 1e9:.1f} of "
                f"{self.nbytes / 1e9:.1f} GB",
                "raise the limit on locked memory (ulimit -l), free host memory, or set stream.tier to pageable",
            )

    def close(self) -> None:
        self._unpin()
        super().close()


PINNING_THREADS = 4


def _work_near(device: torch.device) -> None:
    """Let the calling thread work for a GPU, on the processors next to it."""
    torch.cuda.set_device(device)
    near = processors_near(device)
    if near:
        with suppress(OSError):  # a sandbox may forbid it; the pages then lie where the kernel puts them
            os.sched_setaffinity(0, near)


def processors_near(device: torch.device) -> set[int]:
    """Those of this process's processors that are on the GPU's NUMA node; empty where that isn't known."""
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        text = (PCI_DEVICES / address / "local_cpulist").read_text()
        return parse_processors(text) & os.sched_getaffinity(0)
    except (AttributeError, OSError, ValueError):
        return set()


PCI_DEVICES = Path("/sys/bus/pci/devices")


def parse_processors(text: str) -> set[int]:
    """The numbers in a list as Linux writes it.

    >>> sorted(parse_processors("0-2,8"))
    [0, 1, 2, 8]
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _unpin(slabs: list[Tensor], device: torch.device) -> None:
    if slabs:
        torch.cuda.synchronize(device)  # a copy from or to them may still be under way, on whatever stream
    while slabs:
        torch.cuda.cudart().cudaHostUnregister(slabs.pop().data_ptr())


def _clear_error(device: torch.device) -> None:
    """Take back the driver's error, which this thread's next kernel launch would otherwise report as its own."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


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
        return PinnedStore(sizes, device)
    except StreamError as error:
        if tier == "pinned":
            raise
        log.warning("%s; going on with pageable memory, which copies several times slower", error.message)
        return PageableStore(sizes)
