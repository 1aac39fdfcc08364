"""Boundary activations: the inputs of the blocks, kept from the forward pass to the backward pass.

A block is run again for its backward pass, so its input is all that must be kept. At long rows even that is much: one
[batch, tokens, hidden] in bf16 for each block. In host memory it takes none of the device's.

[Note: what overlaps with what] On a CUDA device the way out has a stream of its own, and so has the way back. A tensor
that is on its way out is held until its copy is over; the computation waits for that only if two more have followed.
The way back begins one block ahead, under the computation of the block above. Ways out and back use the other direction
of the link, and a small part of the one that the blocks use.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

from poros.config import Tier
from poros.store.store import HostStore
from poros.store.tiers import make_store


class Boundary(Protocol):
    """One kept activation."""

    def start(self) -> None:
        """Begin to bring it back, if it is away."""

    def take(self) -> Tensor:
        """The activation, on the device."""


class Boundaries(Protocol):
    """Keeps activations.

    Attributes:
        away: Whether they leave the device.
    """

    away: bool

    def put(self, hidden: Tensor) -> Boundary:
        """Keep a block's input, [batch, tokens, hidden]."""

    def close(self) -> None:
        """Give back what was taken."""


class _Here:
    def __init__(self, hidden: Tensor) -> None:
        self._hidden = hidden

    def start(self) -> None:
        """It is here."""

    def take(self) -> Tensor:
        return self._hidden


class DeviceBoundaries:
    """Leaves activations where they are."""

    away = False

    def put(self, hidden: Tensor) -> Boundary:
        return _Here(hidden.detach())

    def close(self) -> None:
        """Nothing was taken."""


class HostBoundaries:
    """Keeps activations in host memory.

    Args:
        device: Where they come from.
        tier: Kind of host memory.

    Attributes:
        nbytes: Host memory taken so far.
        copied_bytes: Bytes brought back so far.
    """

    away = True

    def __init__(self, device: torch.device, tier: Tier = "auto") -> None:
        self.nbytes = 0
        self.copied_bytes = 0
        self._device = device
        self._tier: Tier = tier
        self._stores: list[HostStore] = []
        self._free: list[Tensor] = []
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        on_gpu = device.type == "cuda"
        self._out: Any = torch.cuda.Stream(device) if on_gpu else None
        self._back: Any = torch.cuda.Stream(device) if on_gpu else None

    def put(self, hidden: Tensor) -> Boundary:
        hidden = hidden.detach()
        room = self._room(hidden.nbytes)
        host = room[: hidden.nbytes].view(hidden.dtype).view(hidden.shape)
        if self._out is None:
            host.copy_(hidden)
            return _Away(self, room, host, None)
        compute = torch.cuda.current_stream(self._device)
        self._out.wait_stream(compute)
        with torch.cuda.stream(self._out):
            host.copy_(hidden, non_blocking=True)
            gone = torch.cuda.Event()
            gone.record(self._out)
        self._leaving.append((hidden, gone))
        while len(self._leaving) > _MOST_LEAVING:
            compute.wait_event(self._leaving.popleft()[1])
        return _Away(self, room, host, gone)

    def bring(self, host: Tensor, gone: Any) -> tuple[Tensor, Any]:
        """Start copying an activation back.

        Returns:
            Where it will be, and the event of its arrival.
        """
        self.copied_bytes += host.nbytes
        if self._back is None:
            return host.clone(), None
        # The new tensor's memory may still be in use by what has been issued so far.
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        self._back.wait_event(gone)
        target = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        with torch.cuda.stream(self._back):
            target.copy_(host, non_blocking=True)
            arrival = torch.cuda.Event()
            arrival.record(self._back)
        return target, arrival

    def wait(self, arrival: Any) -> None:
        """Let the computation wait for an arrival."""
        if arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(arrival)

    def free(self, room: Tensor, arrival: Any) -> None:
        """Take host memory back; it is written again only after the arrival."""
        if arrival is not None and self._out is not None:
            self._out.wait_event(arrival)
        self._free.append(room)

    def close(self) -> None:
        """Give all host memory back; nothing is on its way afterwards."""
        for stream in (self._out, self._back):
            if stream is not None:
                stream.synchronize()
        self._leaving.clear()
        self._free.clear()
        while self._stores:
            self._stores.pop().close()

    def _room(self, nbytes: int) -> Tensor:
        """Host memory of at least so many bytes: the smallest that is free. Shorter rows need none of their own."""
        fitting = [number for number, room in enumerate(self._free) if room.numel() >= nbytes]
        if not fitting:
            store = make_store([nbytes] * _AT_A_TIME, self._tier, self._device)
            self._stores.append(store)
            self.nbytes += nbytes * _AT_A_TIME
            fitting = list(range(len(self._free), len(self._free) + _AT_A_TIME))
            self._free += [store.slab(index) for index in range(_AT_A_TIME)]
        return self._free.pop(min(fitting, key=lambda number: self._free[number].numel()))


_MOST_LEAVING = 2
"""Activations that may be on their way out while the computation goes on."""

_AT_A_TIME = 8
"""Activations for which host memory is taken at a time."""


class _Away:
    def __init__(self, boundaries: HostBoundaries, room: Tensor, host: Tensor, gone: Any) -> None:
        self._boundaries = boundaries
        self._room = room
        self._host = host
        self._gone = gone
        self._back: tuple[Tensor, Any] | None = None

    def start(self) -> None:
        if self._back is None:
            self._back = self._boundaries.bring(self._host, self._gone)

    def take(self) -> Tensor:
        self.start()
        assert self._back is not None
        hidden, arrival = self._back
        self._boundaries.wait(arrival)
        # Not held here: autograd keeps this object until the whole graph is dropped, which is after the backward pass.
        self._back = None
        return hidden

    def __del__(self) -> None:
        # Nobody wants it any more: after its backward pass, or because there was none.
        arrival = self._back[1] if self._back is not None else None
        self._boundaries.wait(arrival)
        self._boundaries.free(self._room, arrival)
