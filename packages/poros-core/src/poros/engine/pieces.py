"""Pieces of an update: moments, and gradients, that come to the device, are used, and go back.

[Note: what overlaps with what] On a CUDA device one stream brings the moments of the next piece while this one is
updated, and another takes those of the last one away. There is room for two pieces. The host waits for nothing: whoever
reads the moments (`state_dict` does) must synchronise first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from poros.dimensions import aligned
from poros.engine.gradients import HostGradients

Update = Callable[[Sequence[nn.Parameter], Sequence[Sequence[Tensor]], Sequence[Tensor]], None]
"""Updates parameters, given their moments and gradients."""


@dataclass(frozen=True)
class Moments:
    """Where the two moments of a parameter lie: one after the other, each aligned.

    Attributes:
        slab: Host memory.
        start, end: First byte, and the one after the last.
    """

    slab: Tensor
    start: int
    end: int

    def is_followed_by(self, other: Moments) -> bool:
        """Whether the other ones begin where these end."""
        return other.slab is self.slab and other.start == self.end


class Piece:
    """Parameters that are updated together.

    Args:
        parameters: Their moments lie next to each other in host memory, and their gradients too, if those are there.
        moments: Of all parameters.
        gradients: Those on the host, if they are.

    Attributes:
        host: The moments' host memory, uint8.
        host_gradients: That of the gradients, if they are on the host.
    """

    def __init__(
        self, parameters: list[nn.Parameter], moments: dict[nn.Parameter, Moments], gradients: HostGradients | None
    ) -> None:
        self.parameters = parameters
        places = [moments[parameter] for parameter in parameters]
        start = places[0].start
        self.host = places[0].slab[start : places[-1].end]
        self.host_gradients = None if gradients is None else gradients.host(parameters)
        self.in_host = _lists([(p, place.slab, place.start) for p, place in zip(parameters, places, strict=True)])
        self._offsets = [place.start - start for place in places]

    @property
    def nbytes(self) -> int:
        """Of the room that it takes."""
        return self.host.numel() + (0 if self.host_gradients is None else self.host_gradients.numel())

    def views(self, room: Tensor) -> Views:
        """First and second moments in a room on the device, and the gradients, if they come there as well."""
        lists = _lists([(p, room, offset) for p, offset in zip(self.parameters, self._offsets, strict=True)])
        if self.host_gradients is None:
            return lists, None
        gradients, start = [], self.host.numel()
        for parameter in self.parameters:
            gradients.append(room[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape))
            start += aligned(parameter.nbytes)
        return lists, gradients


Views = tuple[list[list[Tensor]], list[Tensor] | None]


class Bench:
    """Where pieces are updated: room for two on a CUDA device; on a CPU the moments are at hand as they are.

    Args:
        device: Of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room: list[Tensor] = []
        self._done: list[Any] = []
        self._views: dict[tuple[Piece, int], Views] = {}
        if device.type == "cuda":
            self._coming, self._going = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def run(self, pieces: Sequence[Piece], update: Update, gradients: HostGradients | None = None) -> None:
        """Update all pieces, each with its moments beside it, and its gradients if those are on the host."""
        if self._device.type != "cuda":
            for piece in pieces:
                members = piece.parameters
                here = [member.grad for member in members] if gradients is None else map(gradients.fetched, members)
                update(members, piece.in_host, [gradient for gradient in here if gradient is not None])
            return
        compute = torch.cuda.current_stream(self._device)
        self._make_room(max(piece.nbytes for piece in pieces), compute)
        self._coming.wait_stream(self._going)  # the last step's moments must have arrived in host memory
        if gradients is not None:
            gradients.arrive()
            self._coming.wait_stream(compute)
        for number, piece in enumerate(pieces):
            room, done = self._room[number % 2], self._done[number % 2]
            size = piece.host.numel()
            self._coming.wait_event(done)
            with torch.cuda.stream(self._coming):
                room[:size].copy_(piece.host, non_blocking=True)
                if piece.host_gradients is not None:
                    room[size : piece.nbytes].copy_(piece.host_gradients, non_blocking=True)
            compute.wait_stream(self._coming)
            if (piece, number % 2) not in self._views:
                self._views[piece, number % 2] = piece.views(room)
            moments, found = self._views[piece, number % 2]
            own = [parameter.grad for parameter in piece.parameters if parameter.grad is not None]
            update(piece.parameters, moments, own if found is None else found)
            self._going.wait_stream(compute)
            with torch.cuda.stream(self._going):
                piece.host.copy_(room[:size], non_blocking=True)
                done.record(self._going)

    def synchronize(self) -> None:
        """Wait until nothing is on its way."""
        if self._device.type == "cuda":
            self._going.synchronize()

    def forget(self) -> None:
        """Give up what is remembered of pieces."""
        self._views.clear()

    def _make_room(self, nbytes: int, compute: Any) -> None:
        if self._room and self._room[0].numel() >= nbytes:
            return
        self.forget()
        compute.wait_stream(self._going)  # before the old room's memory is used for something else
        self._room = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._done = [torch.cuda.Event() for _ in range(2)]
        for event in self._done:
            event.record(compute)


def views_in(parameter: nn.Parameter, memory: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The two moments of a parameter in memory that holds them from byte `start` on."""
    first, second = (
        memory[at : at + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        for at in (start, start + aligned(parameter.nbytes))
    )
    return first, second


def _lists(places: Sequence[tuple[nn.Parameter, Tensor, int]]) -> list[list[Tensor]]:
    """First moments and second moments."""
    views = [views_in(*place) for place in places]
    return [[first for first, _ in views], [second for _, second in views]]
