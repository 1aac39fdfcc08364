"""A template: a live module whose frozen tensors are views into a slot while it is bound.

The eager executor binds each layer of the model itself, so that whatever belongs to a layer and is not a frozen tensor
(its adapters of any rank, its index in a cache, its dropout, whether its adapters are switched off) is right without
being copied. Between visits the places hold placeholders again; see `poros.checkpoint.skeleton`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from poros.checkpoint.frozen import FrozenTensor
from poros.checkpoint.packing import Packing
from poros.engine.prologue import SIDE_OUTPUT, Call
from poros.engine.signature import LayerWatch
from poros.errors import StreamError
from poros.stream.slots import Slot


class Template:
    """One layer that can be bound to slots.

    Args:
        layer: The live module.
        places: Its frozen tensors.
        packing: Their layout in a slab, field by field in the order of `places`.

    Attributes:
        watch: Tells when something else about the layer has changed.
    """

    def __init__(self, layer: nn.Module, places: Sequence[FrozenTensor], packing: Packing) -> None:
        self.layer = layer
        self.packing = packing
        self.watch = LayerWatch(layer)
        self.places = tuple(places)
        self._placeholders = tuple(place.get() for place in places)
        self._parameters = [
            (place, place.owner._parameters[place.attribute])
            for place in places
            if not place.part and place.owner._parameters.get(place.attribute) is not None
        ]
        self._base = {id(parameter) for _, parameter in self._parameters}
        # Slots never move, so the views of a layer that begins at a given byte of a given slot can be made once.
        self._views: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    @contextmanager
    def bound(self, slot: Slot, start: int) -> Iterator[None]:
        """Point the frozen tensors into a slot, from byte `start` on, and back to placeholders afterwards.

        Raises:
            StreamError: somebody has replaced a frozen parameter, by merging adapters into it for instance.
        """
        for place, parameter in self._parameters:
            if place.owner._parameters.get(place.attribute) is not parameter:
                raise StreamError(
                    f"the base weight {place.name} of a layer was replaced by another one",
                    "adapters can't be merged into a base that streams; load it on a resident model to merge it",
                )
        key = (slot.index, start)
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = tuple(self.packing.views(slot.buffer, start))
        for place, view in zip(self.places, views, strict=True):
            place.set(view)
        try:
            yield
        finally:
            for place, empty in zip(self.places, self._placeholders, strict=True):
                place.set(empty)

    def run(self, hidden: Tensor, call: Call, shared: dict[str, Any] | None = None) -> Tensor:
        """The layer's output, [batch, tokens, hidden], for an input of the same shape.

        Args:
            hidden: The layer's input.
            call: Its other arguments.
            shared: What earlier layers have left for it, and where it leaves what later ones will need; by default a
                dict that nobody looks at.
        """
        kwargs = call.kwargs
        if any(value is SIDE_OUTPUT for value in kwargs.values()):
            given = {} if shared is None else shared
            kwargs = {name: given if value is SIDE_OUTPUT else value for name, value in kwargs.items()}
        output: Any = self.layer(hidden, *call.args, **kwargs)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def loose(self) -> list[nn.Parameter]:
        """Every parameter that is not a frozen tensor of the base: adapters, whether they are trained or not."""
        return [parameter for parameter in self.watch.parameters() if id(parameter) not in self._base]

    def adapters(self) -> list[nn.Parameter]:
        """The layer's trainable parameters."""
        return [parameter for parameter in self.watch.parameters() if parameter.requires_grad]
