"""Adapter gradients in host memory: they leave the device block by block, as the backward pass makes them.

All gradients together take as much memory as the adapters, and they are all there at the end of the backward pass. On
the host they wait for the update, which brings them back piece by piece (`poros.engine.optimizer`).

[Note: what overlaps with what] A gradient goes out on a stream of its own, under the computation of the block below.
It is held until its copy is over; the computation waits for that only if many more have followed. One that is added to
an earlier one (an ordinary loop over micro-batches) fetches that first, adds on the device, and goes out again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from poros.config import Tier
from poros.dimensions import aligned
from poros.errors import StreamError
from poros.store.store import HostStore
from poros.store.tiers import make_store


class HostGradients:
    """Keeps the gradients of adapters.

    Args:
        device: Where they come from.
        tier: Kind of host memory.
    """

    def __init__(self, device: torch.device, tier: Tier = "auto") -> None:
        self._device = device
        self._tier: Tier = tier
        self._stores: list[HostStore] = []
        self._places: dict[nn.Parameter, Tensor] = {}
        self._present: dict[nn.Parameter, Tensor] = {}
        self._leaving: deque[tuple[Sequence[Tensor], Any]] = deque()
        self._out: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._claimed = False

    def claim(self) -> None:
        """Say that somebody will use the gradients up. Until then none is taken: they would wait for nobody."""
        self._claimed = True

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._present

    def knows(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter has its place."""
        return parameter in self._places

    def register(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take host memory for the gradients of parameters, one after the other in this order."""
        new = [parameter for parameter in parameters if parameter not in self._places]
        if not new:
            return
        store = make_store([sum(aligned(parameter.nbytes) for parameter in new)], self._tier, self._device)
        self._stores.append(store)
        slab, start = store.slab(0), 0
        for parameter in new:
            place = slab[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            self._places[parameter] = place
            start += aligned(parameter.nbytes)

    def add(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        """Take gradients, or add them to those that are there, as autograd does.

        Args:
            parameters: Of a block.
            gradients: On the device; None for a parameter that took no part.

        Raises:
            StreamError: somebody listens to a gradient, or no optimizer knows of these gradients.
        """
        if not self._claimed:
            raise StreamError(
                "gradients go to the host, but no optimizer was made that uses them from there",
                "make it before the first backward pass: poros.HostAdamW(parameters, gradients=engine.gradients)",
            )
        there = [(p, gradient) for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        sums = []
        for parameter, gradient in there:
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise StreamError(
                    "a hook is registered on an adapter's gradient, but gradients go to the host as they are made",
                    "set stream.gradients to device, or remove the hook",
                )
            if parameter not in self._places:
                self.register([parameter])
            if parameter in self._present:
                gradient = self.fetched(parameter).add_(gradient)
            sums.append(gradient)
        self._send(sums, [self._places[parameter] for parameter, _ in there])
        for (parameter, _), norm in zip(there, _norms(sums), strict=True):
            self._present[parameter] = norm

    def fetched(self, parameter: nn.Parameter) -> Tensor:
        """A gradient, brought to the device."""
        self.arrive()
        return self._places[parameter].to(self._device, copy=True, non_blocking=True)

    def host(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """The host memory of gradients that lie next to each other, uint8; None if they don't. See `arrive`."""
        places = [self._places[parameter] for parameter in parameters]
        start, slab = places[0].data_ptr(), places[0].untyped_storage()
        for place in places:
            if place.data_ptr() != start:
                return None
            start += aligned(place.nbytes)
        first = places[0].data_ptr() - slab.data_ptr()
        whole = torch.empty(0, dtype=torch.uint8).set_(slab)
        return whole[first : first + start - places[0].data_ptr()]

    def total_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The norm of all gradients, as `torch.nn.utils.get_total_norm` works it out."""
        norms = [self._present[parameter] for parameter in parameters if parameter in self._present]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)

    def arrive(self) -> None:
        """Let the current stream wait until all gradients are in host memory."""
        if self._out is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._out)

    def synchronize(self) -> None:
        """Wait until all gradients are in host memory."""
        if self._out is not None:
            self._out.synchronize()

    def clear(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Forget the gradients of some parameters; of all by default."""
        self.arrive()  # what is still leaving may not be given up
        for parameter in list(self._present) if parameters is None else parameters:
            self._present.pop(parameter, None)
        self._leaving.clear()

    def close(self) -> None:
        """Give the host memory back."""
        self.synchronize()
        self.clear()
        self._places.clear()
        while self._stores:
            self._stores.pop().close()

    def _send(self, gradients: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        if self._out is None:
            for gradient, place in zip(gradients, places, strict=True):
                place.copy_(gradient)
            return
        compute = torch.cuda.current_stream(self._device)
        self._out.wait_stream(compute)
        with torch.cuda.stream(self._out):
            for gradient, place in zip(gradients, places, strict=True):
                place.copy_(gradient, non_blocking=True)
            gone = torch.cuda.Event()
            gone.record(self._out)
        self._leaving.append((gradients, gone))
        while len(self._leaving) > _MOST_LEAVING:
            compute.wait_event(self._leaving.popleft()[1])


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each tensor, by the operation that torch takes for gradient clipping on their device."""
    if tensors and tensors[0].device.type == "cuda":
        return list(torch._foreach_norm(list(tensors), 2.0))
    return [torch.linalg.vector_norm(tensor, 2.0) for tensor in tensors]


_MOST_LEAVING = 2
"""Blocks whose gradients may be on their way out while the computation goes on."""
