"""AdamW whose moments live in host memory, updated on the device.

The two moments of an adapter take twice its memory and are needed once a step. Here they come to the device piece by
piece, are updated there by torch's own AdamW, and go back. An update on the CPU would save the copies, but not give the
same bits.

[Note: what overlaps with what] On a CUDA device one stream brings the moments of the next piece while this one is
updated, and another takes those of the last one away. There is room for two pieces. The host waits for nothing: whoever
reads the moments (`state_dict` does) must synchronise first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from poros.config import Tier
from poros.dimensions import aligned
from poros.engine.engine import Engine
from poros.engine.gradients import HostGradients
from poros.errors import UnsupportedError
from poros.plan.memory import PIECE_BYTES
from poros.store.store import HostStore
from poros.store.tiers import make_store

MOMENTS = ("exp_avg", "exp_avg_sq")
VARIANTS = ("amsgrad", "maximize", "capturable", "differentiable")


class HostAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with its moments in host memory; the numbers are the same.

    Args:
        params, lr, betas, eps, weight_decay, foreach, fused: As torch's.
        tier: Kind of host memory.
        piece_bytes: Bytes of parameters that are updated at a time; twice as much is taken on the device, two times.
        gradients: Where a streamed model's gradients are, if they are on the host as well. The parameters' `grad` is
            None then: `clip_grad_norm_` of this class takes the place of torch's, and a step uses the gradients up.
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
        piece_bytes: int = PIECE_BYTES,
        gradients: HostGradients | None = None,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=foreach, fused=fused)
        self._tier: Tier = tier
        self._piece_bytes = piece_bytes
        self._stores: list[HostStore] = []
        self._moments: dict[nn.Parameter, _Moments] = {}
        self._devices: dict[torch.device, _Bench] = {}
        self._gradients = gradients
        self._coefficient: Tensor | None = None
        if gradients is not None:
            gradients.claim()
            gradients.register([parameter for group in self.param_groups for parameter in group["params"]])

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """A parameter's gradient, wherever it is."""
        if self._gradients is None:
            return parameter.grad
        return self._gradients.fetched(parameter) if parameter in self._gradients else None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients down to a norm, as `torch.nn.utils.clip_grad_norm_` does; gives the norm they had.

        Gradients on the host are scaled when the next step uses them.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self._gradients is None:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        norm = self._gradients.total_norm(parameters)
        self._coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients on the host are forgotten too."""
        super().zero_grad(set_to_none)
        self._forget()

    def _forget(self) -> None:
        self._coefficient = None
        if self._gradients is not None:  # another optimizer may have others
            self._gradients.clear(parameter for group in self.param_groups for parameter in group["params"])

    def _learns(self, parameter: nn.Parameter) -> bool:
        return parameter.grad is not None if self._gradients is None else parameter in self._gradients

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            learning = [parameter for parameter in group["params"] if self._learns(parameter)]
            self._take_up(learning, bool(group["fused"]))
            for device in dict.fromkeys(parameter.device for parameter in learning):
                pieces = list(self._pieces([parameter for parameter in learning if parameter.device == device]))
                if device not in self._devices:
                    self._devices[device] = _Bench(device)
                self._devices[device].run(pieces, self._moments, partial(self._update, group), self._gradients)
        self._forget()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch's; the moments are on the CPU."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, of this class or of torch's AdamW. Nothing of it goes to the device.

        Raises:
            UnsupportedError: it is of a variant of AdamW that this class doesn't have.
        """
        variants = [name for name in VARIANTS for group in state_dict["param_groups"] if group.get(name)]
        if variants:
            raise UnsupportedError(
                f"the state is of AdamW with {variants[0]}, which moments on the host don't have",
                "set stream.optimizer to device",
            )
        self.synchronize()
        # Copies: what `state_dict` gave are the very tensors that are filled below.
        saved_states = copy.deepcopy(state_dict["state"])
        super().load_state_dict({**state_dict, "state": {}})
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        pairs = [(parameter, bool(group["fused"])) for group in self.param_groups for parameter in group["params"]]
        known = [(name, *pair) for name, pair in zip(names, pairs, strict=True) if name in state_dict["state"]]
        for fused in (False, True):
            self._take_up([parameter for _, parameter, own in known if own == fused], fused)
        for name, parameter, _ in known:
            saved = saved_states[name]
            self.state[parameter]["step"].copy_(torch.as_tensor(saved["step"]))
            for moment in MOMENTS:
                self.state[parameter][moment].copy_(saved[moment])

    def synchronize(self) -> None:
        """Wait until the moments in host memory are those of the last step."""
        for bench in self._devices.values():
            bench.synchronize()

    def _take_up(self, parameters: Sequence[nn.Parameter], fused: bool) -> None:
        """Give parameters that have no state yet their moments: zeros."""
        if any(not self.state[parameter] and parameter in self._moments for parameter in parameters):
            self.synchronize()
        new = [parameter for parameter in parameters if parameter not in self._moments]
        if new:
            nbytes = [2 * aligned(parameter.nbytes) for parameter in new]
            store = make_store([sum(nbytes)], self._tier, new[0].device)
            self._stores.append(store)
            slab, start = store.slab(0), 0
            for parameter, size in zip(new, nbytes, strict=True):
                self._moments[parameter] = _Moments(slab, start, start + size)
                start += size
        for parameter in parameters:
            if not self.state[parameter]:
                place = self._moments[parameter]
                first, second = _views(parameter, place.slab, place.start)
                for moment in (first, second):
                    moment.zero_()  # it may hold those of a state that was dropped
                step = torch.zeros((), device=parameter.device if fused else "cpu")  # where torch keeps it too
                self.state[parameter].update(step=step, exp_avg=first, exp_avg_sq=second)

    def _pieces(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Parameters in lots whose moments lie next to each other, so that one copy brings them."""
        piece: list[nn.Parameter] = []
        size = 0
        for parameter in parameters:
            place = self._moments[parameter]
            follows = bool(piece) and self._moments[piece[-1]].is_followed_by(place)
            if follows and self._gradients is not None:
                follows = self._gradients.host([piece[-1], parameter]) is not None
            if piece and (size + parameter.nbytes > self._piece_bytes or not follows):
                yield piece
                piece, size = [], 0
            piece.append(parameter)
            size += parameter.nbytes
        if piece:
            yield piece

    def _update(
        self,
        group: dict[str, Any],
        piece: Sequence[nn.Parameter],
        moments: Sequence[Sequence[Tensor]],
        gradients: Sequence[Tensor],
    ) -> None:
        if self._coefficient is not None:
            torch._foreach_mul_(list(gradients), self._coefficient.to(gradients[0].device))
        adamw(
            list[Tensor](piece),
            list(gradients),
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


Update = Callable[[Sequence[nn.Parameter], Sequence[Sequence[Tensor]], Sequence[Tensor]], None]
"""Updates parameters, given their moments and gradients."""


def adamw_class(engine: Engine) -> tuple[type[torch.optim.AdamW], dict[str, Any]]:
    """The AdamW that a streamed model's settings ask for, and what it must be given beside torch's arguments."""
    if engine.config.optimizer == "device":
        return torch.optim.AdamW, {}
    return HostAdamW, {"tier": engine.config.tier, "gradients": engine.gradients}


def adamw_for(engine: Engine) -> Callable[..., torch.optim.AdamW]:
    """The same, to be called with parameters and torch's arguments."""
    made, options = adamw_class(engine)
    return partial(made, **options)


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
        self,
        pieces: Sequence[Sequence[nn.Parameter]],
        moments: dict[nn.Parameter, _Moments],
        update: Update,
        gradients: HostGradients | None = None,
    ) -> None:
        """Update all pieces, each with its moments beside it, and its gradients if those are on the host."""
        if self._device.type != "cuda":
            for piece in pieces:
                places = [moments[parameter] for parameter in piece]
                lists = _lists([(p, m.slab, m.start) for p, m in zip(piece, places, strict=True)])
                here = [parameter.grad for parameter in piece] if gradients is None else map(gradients.fetched, piece)
                update(piece, lists, [gradient for gradient in here if gradient is not None])
            return
        compute = torch.cuda.current_stream(self._device)
        sizes = [moments[piece[-1]].end - moments[piece[0]].start for piece in pieces]
        self._make_room(max(sizes) if gradients is None else 3 * max(sizes) // 2, compute)
        self._coming.wait_stream(self._going)  # the last step's moments must have arrived in host memory
        if gradients is not None:
            gradients.arrive()
            self._coming.wait_stream(compute)
        for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
            room, done = self._room[number % 2], self._done[number % 2]
            first, last = moments[piece[0]], moments[piece[-1]]
            host, here_moments = first.slab[first.start : last.end], room[:size]
            from_host = None if gradients is None else gradients.host(piece)
            self._coming.wait_event(done)
            with torch.cuda.stream(self._coming):
                here_moments.copy_(host, non_blocking=True)
                if from_host is not None:
                    room[size : size + from_host.numel()].copy_(from_host, non_blocking=True)
            compute.wait_stream(self._coming)
            lists = _lists([(parameter, room, moments[parameter].start - first.start) for parameter in piece])
            update(piece, lists, _gradients_of(piece, None if from_host is None else room[size:]))
            self._going.wait_stream(compute)
            with torch.cuda.stream(self._going):
                host.copy_(here_moments, non_blocking=True)
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


def _gradients_of(piece: Sequence[nn.Parameter], memory: Tensor | None) -> list[Tensor]:
    """The gradients of parameters: their own, or those in memory that holds them one after the other."""
    if memory is None:
        return [parameter.grad for parameter in piece if parameter.grad is not None]
    gradients, start = [], 0
    for parameter in piece:
        gradients.append(memory[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape))
        start += aligned(parameter.nbytes)
    return gradients


def _lists(places: Sequence[tuple[nn.Parameter, Tensor, int]]) -> list[list[Tensor]]:
    """First moments and second moments."""
    views = [_views(*place) for place in places]
    return [[first for first, _ in views], [second for _, second in views]]
