"""AdamW whose moments live in host memory, updated on the device.

The two moments of an adapter take twice its memory and are needed once a step. Here they come to the device piece by
piece, are updated there by torch's own AdamW, and go back. An update on the CPU would save the copies, but not give the
same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from poros.config import Tier
from poros.dimensions import aligned
from poros.engine.engine import Engine
from poros.engine.gradients import HostGradients
from poros.engine.pieces import Bench, Moments, Piece, views_in
from poros.errors import UnsupportedError
from poros.plan.memory import PIECE_BYTES
from poros.store.store import HostStore
from poros.store.tiers import make_store

_MOST_CUTS = 16
"""Sets of parameters (one for each group and device, as a rule) whose pieces are remembered."""

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
        self._moments: dict[nn.Parameter, Moments] = {}
        self._devices: dict[torch.device, Bench] = {}
        self._cut: dict[tuple[int, ...], list[Piece]] = {}
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
                pieces = self._pieces([parameter for parameter in learning if parameter.device == device])
                if device not in self._devices:
                    self._devices[device] = Bench(device)
                self._devices[device].run(pieces, partial(self._update, group), self._gradients)
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
                self._moments[parameter] = Moments(slab, start, start + size)
                start += size
        for parameter in parameters:
            if not self.state[parameter]:
                place = self._moments[parameter]
                first, second = views_in(parameter, place.slab, place.start)
                for moment in (first, second):
                    moment.zero_()  # it may hold those of a state that was dropped
                step = torch.zeros((), device=parameter.device if fused else "cpu")  # where torch keeps it too
                self.state[parameter].update(step=step, exp_avg=first, exp_avg_sq=second)

    def _pieces(self, parameters: Sequence[nn.Parameter]) -> list[Piece]:
        """Parameters in lots whose moments lie next to each other, so that one copy brings them.

        They are the same step after step, and with many small adapters cutting them takes longer than updating them.
        """
        key = tuple(map(id, parameters))  # the moments keep the parameters alive
        if key not in self._cut:
            if len(self._cut) == _MOST_CUTS:
                self._cut.clear()
                for bench in self._devices.values():
                    bench.forget()
            self._cut[key] = [Piece(lot, self._moments, self._gradients) for lot in self._lots(parameters)]
        return self._cut[key]

    def _lots(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        lot: list[nn.Parameter] = []
        size = 0
        for parameter in parameters:
            place = self._moments[parameter]
            follows = bool(lot) and self._moments[lot[-1]].is_followed_by(place)
            if follows and self._gradients is not None:
                follows = self._gradients.host([lot[-1], parameter]) is not None
            if lot and (size + parameter.nbytes > self._piece_bytes or not follows):
                yield lot
                lot, size = [], 0
            lot.append(parameter)
            size += parameter.nbytes
        if lot:
            yield lot

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


def adamw_class(engine: Engine) -> tuple[type[torch.optim.AdamW], dict[str, Any]]:
    """The AdamW that a streamed model's settings ask for, and what it must be given beside torch's arguments."""
    if engine.config.optimizer == "device":
        return torch.optim.AdamW, {}
    return HostAdamW, {"tier": engine.config.tier, "gradients": engine.gradients}


def adamw_for(engine: Engine) -> Callable[..., torch.optim.AdamW]:
    """The same, to be called with parameters and torch's arguments."""
    made, options = adamw_class(engine)
    return partial(made, **options)
