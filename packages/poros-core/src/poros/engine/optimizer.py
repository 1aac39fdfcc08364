"""AdamW whose moments live in host memory, updated on the device.

The two moments of an adapter take twice its memory and are needed once a step. Here they come to the device piece by
piece, are updated there by torch's own AdamW, and go back. An update on the CPU would save the copies, but not give the
same bits.

[Note: what overlaps with what] On a CUDA device one stream brings the moments of the next piece while this one is
updated, and another takes those of the last one away. There is room for two pieces. The host waits for nothing: whoever
reads the moments (`state_dict` does) must synchronise first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from poros.config import StreamConfig, Tier
from poros.dimensions import aligned
from poros.store.store import HostStore
from poros.store.tiers import make_store

MOMENTS = ("exp_avg", "exp_avg_sq")


class HostAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with its moments in host memory; the numbers are the same.

    Args:
        params, lr, betas, eps, weight_decay, foreach, fused: As torch's.
        tier: Kind of host memory.
        piece_bytes: Bytes of parameters that are updated at a time; twice as much is taken on the device, two times.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
        tier: Tier = "auto",
        piece_bytes: int = 16_000_000,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=foreach, fused=fused)
        self._tier: Tier = tier
        self._piece_bytes = piece_bytes
        self._stores: list[HostStore] = []
        self._moments: dict[nn.Parameter, _Moments] = {}
        self._devices: dict[torch.device, _Bench] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            learning = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._take_up(learning, bool(group["fused"]))
            for device in dict.fromkeys(parameter.device for parameter in learning):
                pieces = list(self._pieces([parameter for parameter in learning if parameter.device == device]))
                if device not in self._devices:
                    self._devices[device] = _Bench(device)
                self._devices[device].run(pieces, self._moments, partial(self._update, group))
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch's; the moments are on the CPU."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, of this class or of torch's AdamW. Nothing of it goes to the device."""
        self.synchronize()
        super().load_state_dict({**state_dict, "state": {}})
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        pairs = [(parameter, bool(group["fused"])) for group in self.param_groups for parameter in group["params"]]
        known = [(name, *pair) for name, pair in zip(names, pairs, strict=True) if name in state_dict["state"]]
        for fused in (False, True):
            self._take_up([parameter for _, parameter, own in known if own == fused], fused)
        for name, parameter, _ in known:
            saved = state_dict["state"][name]
            self.state[parameter]["step"].copy_(torch.as_tensor(saved["step"]))
            for moment in MOMENTS:
                self.state[parameter][moment].copy_(saved[moment])

    def synchronize(self) -> None:
        """Wait until the moments in host memory are those of the last step."""
        for bench in self._devices.values():
            bench.synchronize()

    def _take_up(self, parameters: Sequence[nn.Parameter], fused: bool) -> None:
        """Give parameters that haven't been seen yet their moments."""
        new = [parameter for parameter in parameters if parameter not in self._moments]
        if new:
            nbytes = [2 * aligned(parameter.nbytes) for parameter in new]
            store = make_store([sum(nbytes)], self._tier, new[0].device)
            self._stores.append(store)
            slab, start = store.slab(0).zero_(), 0
            for parameter, size in zip(new, nbytes, strict=True):
                self._moments[parameter] = _Moments(slab, start, start + size)
                start += size
        for parameter in parameters:
            if not self.state[parameter]:
                place = self._moments[parameter]
                first, second = _views(parameter, place.slab, place.start)
                step = torch.zeros((), device=parameter.device if fused else "cpu")  # where torch keeps it too
                self.state[parameter].update(step=step, exp_avg=first, exp_avg_sq=second)

    def _pieces(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Parameters in lots whose moments lie next to each other, so that one copy brings them."""
        piece: list[nn.Parameter] = []
        size = 0
        for parameter in parameters:
            place = self._moments[parameter]
            follows = bool(piece) and self._moments[piece[-1]].is_followed_by(place)
            if piece and (size + parameter.nbytes > self._piece_bytes or not follows):
                yield piece
                piece, size = [], 0
            piece.append(parameter)
            size += parameter.nbytes
        if piece:
            yield piece

    def _update(
        self, group: dict[str, Any], piece: Sequence[nn.Parameter], moments: Sequence[Sequence[Tensor]]
    ) -> None:
        adamw(
            list[Tensor](piece),
            [parameter.grad for parameter in piece if parameter.grad is not None],
            list(moments[0]),
            list(moments[1]),
            [],
            [self.state[parameter]["step"] for parameter in piece],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


Update = Callable[[Sequence[nn.Parameter], Sequence[Sequence[Tensor]]], None]


def adamw_for(config: StreamConfig) -> type[torch.optim.AdamW]:
    """The AdamW that a stream's settings ask for."""
    return HostAdamW if config.optimizer == "host" else torch.optim.AdamW


@dataclass(frozen=True)
class _Moments:
    """Where the two moments of a parameter lie: one after the other, each aligned.

    Attributes:
        slab: Host memory.
        start, end: First byte, and the one after the last.
    """

    slab: Tensor
    start: int
    end: int

    def is_followed_by(self, other: _Moments) -> bool:
        """Whether the other ones begin where these end."""
        return other.slab is self.slab and other.start == self.end


class _Bench:
    """Where pieces are updated: room for two on a CUDA device; on a CPU the moments are at hand as they are.

    Args:
        device: Of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room: list[Tensor] = []
        self._done: list[Any] = []
        if device.type == "cuda":
            self._coming, self._going = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def run(
        self, pieces: Sequence[Sequence[nn.Parameter]], moments: dict[nn.Parameter, _Moments], update: Update
    ) -> None:
        """Update all pieces, each with its moments beside it."""
        if self._device.type != "cuda":
            for piece in pieces:
                places = [moments[parameter] for parameter in piece]
                update(piece, _lists([(p, m.slab, m.start) for p, m in zip(piece, places, strict=True)]))
            return
        compute = torch.cuda.current_stream(self._device)
        self._make_room(max(moments[piece[-1]].end - moments[piece[0]].start for piece in pieces), compute)
        self._coming.wait_stream(self._going)  # the last step's moments must have arrived in host memory
        for number, piece in enumerate(pieces):
            room, done = self._room[number % 2], self._done[number % 2]
            first, last = moments[piece[0]], moments[piece[-1]]
            host = first.slab[first.start : last.end]
            here = room[: host.numel()]
            self._coming.wait_event(done)
            with torch.cuda.stream(self._coming):
                here.copy_(host, non_blocking=True)
            compute.wait_stream(self._coming)
            update(piece, _lists([(parameter, room, moments[parameter].start - first.start) for parameter in piece]))
            self._going.wait_stream(compute)
            with torch.cuda.stream(self._going):
                host.copy_(here, non_blocking=True)
                done.record(self._going)

    def synchronize(self) -> None:
        """Wait until nothing is on its way."""
        if self._device.type == "cuda":
            self._going.synchronize()

    def _make_room(self, nbytes: int, compute: Any) -> None:
        if self._room and self._room[0].numel() >= nbytes:
            return
        compute.wait_stream(self._going)  # before the old room's memory is used for something else
        self._room = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._done = [torch.cuda.Event() for _ in range(2)]
        for event in self._done:
            event.record(compute)


def _views(parameter: nn.Parameter, memory: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The two moments of a parameter in memory that holds them from byte `start` on."""
    first, second = (
        memory[at : at + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        for at in (start, start + aligned(parameter.nbytes))
    )
    return first, second


def _lists(places: Sequence[tuple[nn.Parameter, Tensor, int]]) -> list[list[Tensor]]:
    """First moments and second moments."""
    views = [_views(*place) for place in places]
    return [[first for first, _ in views], [second for _, second in views]]
