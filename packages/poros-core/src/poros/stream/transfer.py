"""Moving bytes from the store into a slot, and knowing when they have arrived.

[Note: what overlaps with what] On a CUDA device all copies run on one copy stream, the model runs on the compute
stream, and two kinds of events tie them together:

- *arrival*: recorded on the copy stream after a block's copy. The compute stream waits for it before the block's visit;
  the host never waits.
- *departure*: recorded on the compute stream when a visit ends. The copy stream waits for it before the slot is written
  again. It is recorded after the *last* use of the slot in the visit (forward, or recompute and backward), never after
  the launch of the first.

So the copy of the next block runs under the computation of this one, and nothing is written that is still being read.
On a CPU the copy happens at once and the same code needs no events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

Piece = tuple[Tensor, Tensor]
"""(source in the store, target in a slot): uint8 tensors of equal length."""


class Arrival(Protocol):
    """The moment at which a copied block may be read."""

    def wait(self) -> None:
        """Make the computation wait for the copy."""


class Transfer(Protocol):
    """How blocks travel."""

    def copy(self, slot: int, pieces: Sequence[Piece]) -> Arrival:
        """Start copying a block into a slot whose last visit has been reported with `leave`."""

    def leave(self, slot: int) -> None:
        """The visit that used the slot has been issued completely."""

    def times(self) -> tuple[float | None, float | None]:
        """Seconds for which copies were under way, and for which the computation waited for them; None if not taken."""

    def close(self) -> None:
        """Wait until no copy is under way."""


class _Here:
    def wait(self) -> None:
        """The bytes are there already."""


class HostTransfer:
    """Copies within host memory, done when `copy` returns."""

    def copy(self, slot: int, pieces: Sequence[Piece]) -> Arrival:
        for source, target in pieces:
            target.copy_(source)
        return _Here()

    def leave(self, slot: int) -> None:
        """Nothing outlives the visit on a CPU."""

    def times(self) -> tuple[float | None, float | None]:
        return None, None

    def close(self) -> None:
        """No copy is ever under way."""


class Spans:
    """Adds up the time between pairs of events, without ever waiting for one.

    Args:
        make_event: Makes an event that can be timed.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event
        self._open: deque[tuple[Any, Any]] = deque()
        self._spare: list[Any] = []
        self._seconds = 0.0

    @contextmanager
    def measured(self, stream: Any) -> Iterator[None]:
        """Measure how long a stream takes for what is put on it inside."""
        if len(self._open) >= _MOST_OPEN:
            self.seconds()
        start, end = (self._spare.pop() if self._spare else self._make_event() for _ in range(2))
        start.record(stream)
        try:
            yield
        finally:
            end.record(stream)
            self._open.append((start, end))

    def seconds(self) -> float:
        """The sum of all spans that are over by now."""
        while self._open and self._open[0][1].query():
            start, end = self._open.popleft()
            self._seconds += start.elapsed_time(end) / 1e3
            self._spare += (start, end)
        return self._seconds


_MOST_OPEN = 256


class _CudaArrival:
    def __init__(self, event: torch.cuda.Event, device: torch.device, stalls: Spans) -> None:
        self._event = event
        self._device = device
        self._stalls = stalls

    def wait(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        with self._stalls.measured(stream):
            stream.wait_event(self._event)


class CudaTransfer:
    """Copies on a stream of their own; see [Note: what overlaps with what].

    Args:
        device: The CUDA device of the slots.
        num_slots: How many slots there are, homes of resident blocks included; each gets an arrival and a departure
            event, made once.
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._arrivals = [torch.cuda.Event() for _ in range(num_slots)]
        self._departures = [torch.cuda.Event() for _ in range(num_slots)]
        self._copies, self._stalls = (Spans(partial(torch.cuda.Event, enable_timing=True)) for _ in range(2))
        # The slots were just allocated on the compute stream; the first copies come after that.
        for departure in self._departures:
            departure.record(torch.cuda.current_stream(device))

    def copy(self, slot: int, pieces: Sequence[Piece]) -> Arrival:
        self._stream.wait_event(self._departures[slot])
        with torch.cuda.stream(self._stream):
            with self._copies.measured(self._stream):
                for source, target in pieces:
                    target.copy_(source, non_blocking=True)
            self._arrivals[slot].record(self._stream)
        return _CudaArrival(self._arrivals[slot], self._device, self._stalls)

    def leave(self, slot: int) -> None:
        self._departures[slot].record(torch.cuda.current_stream(self._device))

    def times(self) -> tuple[float | None, float | None]:
        return self._copies.seconds(), self._stalls.seconds()

    def close(self) -> None:
        self._stream.synchronize()


def make_transfer(device: torch.device, num_slots: int) -> Transfer:
    """The transfer for a device.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA device.
    """
    if device.type == "cpu":
        return HostTransfer()
    if device.type == "cuda":
        return CudaTransfer(device, num_slots)
    raise ValueError(f"no transfer for device type {device.type!r}")
