"""What the graph executor has recorded, and how a visit replays it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from poros.engine.executor import Batch, Surroundings, Visit
from poros.engine.prologue import Call
from poros.engine.signature import Signature, map_tensors, tensors_of
from poros.engine.template import Template
from poros.stream.slots import Slot

Results = list[Tensor | None]


@dataclass
class LayerCopy:
    """A copy of a layer that is recorded in its place.

    Attributes:
        template: Over the copy.
        adapters: Its trainable parameters, static buffers.
        kind: The layer kind, which says with which arguments it is called.
    """

    template: Template
    adapters: list[nn.Parameter]
    kind: str


@dataclass(frozen=True)
class Recorded:
    """The two recorded directions of a block in a slot.

    Attributes:
        loose: The static adapters of the block, trained or not.
        forward, backward: Start a replay.
        output: Where the forward graph leaves the block's output.
        gradients: Where the backward graph leaves the gradients of the input and of the adapters.
        restore: Restores the block's 4-bit weights for all replays of a visit; None if each replay does so itself.
    """

    loose: list[nn.Parameter]
    forward: Callable[[], None]
    output: Tensor
    backward: Callable[[], None]
    gradients: Results
    restore: Callable[[], None] | None


@dataclass
class ShapeGraphs:
    """Everything recorded for one batch shape.

    Attributes:
        hidden, gradient: Static input and output gradient of a block, [batch, tokens, hidden].
        calls: Static arguments of each layer kind.
        loaded: For each layer kind, the tensors (and their versions) whose values its static arguments hold now.
        copies: (position in the block, layer signature) -> the copy.
        recorded: (block signature, slot) -> graphs.
        pool: Memory that all graphs of this shape share; they never run at the same time.
        repeated: Whether a visit runs a block several times, and its weights are restored once for all of them.
        full: The card had no room; this shape runs eagerly.
    """

    hidden: Tensor
    gradient: Tensor
    calls: dict[str, Call]
    loaded: dict[str, list[tuple[Tensor, int] | None]]
    copies: dict[tuple[int, Signature], LayerCopy] = field(default_factory=dict)
    recorded: dict[tuple[Signature, int], Recorded] = field(default_factory=dict)
    pool: Any = None
    repeated: bool = False
    full: bool = False


@dataclass(frozen=True, kw_only=True)
class GraphBatch(Batch):
    """A forward pass that replays graphs.

    Attributes:
        graphs: Of its shape.
        signatures: Of each block.
    """

    graphs: ShapeGraphs
    signatures: tuple[Signature, ...]


class GraphVisit(Visit):
    """A block in its slot that is run by replaying graphs.

    Args:
        templates, start, slot, bindings: As for any visit.
        block: Which block.
        kinds: The layer kind of each layer of the model.
        count: Called at each replay.
    """

    def __init__(
        self,
        templates: Sequence[Template],
        start: int,
        slot: Slot,
        bindings: ExitStack,
        block: int,
        kinds: Sequence[str],
        count: Callable[[], None],
    ) -> None:
        super().__init__(templates, start, slot, bindings)
        self._block = block
        self._kinds = kinds
        self._count = count
        self._ready: Recorded | None = None

    def forward(self, hidden: Tensor, batch: Batch, surroundings: Surroundings) -> Tensor:
        if not isinstance(batch, GraphBatch):
            return super().forward(hidden, batch, surroundings)
        with torch.no_grad():
            recorded = self._place(hidden, batch)
            recorded.forward()
            return recorded.output.clone()

    def backward(
        self,
        hidden: Tensor,
        batch: Batch,
        surroundings: Surroundings,
        adapters: Sequence[nn.Parameter],
        gradient: Tensor,
        needs_hidden: bool,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        if not isinstance(batch, GraphBatch) or torch.is_autocast_enabled(hidden.device.type):
            # A backward pass under autocast is not what was recorded.
            return super().backward(hidden, batch, surroundings, adapters, gradient, needs_hidden)
        with torch.no_grad(), surroundings.restored():
            recorded = self._place(hidden, batch)
            batch.graphs.gradient.copy_(gradient)
            recorded.backward()
            first, *static = recorded.gradients
            gradients = [None if tensor is None else torch.empty_like(tensor) for tensor in static]
            torch._foreach_copy_(
                [tensor for tensor in gradients if tensor is not None],
                [tensor for tensor in static if tensor is not None],
            )
            return (first.clone() if needs_hidden and first is not None else None), gradients

    def _place(self, hidden: Tensor, batch: GraphBatch) -> Recorded:
        """Copy what differs between blocks into the static buffers; the graphs to replay."""
        self._count()
        graphs = batch.graphs
        recorded = graphs.recorded[batch.signatures[self._block], self._slot.index]
        graphs.hidden.copy_(hidden)
        if recorded is not self._ready:
            # Once a visit: neither adapters nor weights change while a block is in its slot.
            self._ready = recorded
            live: list[Tensor] = [parameter for template in self._templates for parameter in template.loose()]
            if live:
                torch._foreach_copy_(list[Tensor](recorded.loose), live)
            if recorded.restore is not None:
                recorded.restore()
        for index in range(self._start, self._start + len(self._templates)):
            kind = self._kinds[index]
            loaded = graphs.loaded[kind]
            static: list[Tensor] | None = None
            for number, tensor in enumerate(tensors_of(batch.calls[index])):
                held = loaded[number]
                if held is None or held[0] is not tensor or held[1] != tensor._version:
                    static = tensors_of(graphs.calls[kind]) if static is None else static
                    static[number].copy_(tensor)
                    loaded[number] = (tensor, tensor._version)
        return recorded


def new_shape(hidden: Tensor, calls: dict[str, Call], repeated: bool) -> ShapeGraphs:
    def own(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor).copy_(tensor)

    static = {kind: Call(map_tensors(call.args, own), map_tensors(call.kwargs, own)) for kind, call in calls.items()}
    return ShapeGraphs(
        hidden=torch.zeros_like(hidden, memory_format=torch.contiguous_format, requires_grad=False),
        gradient=torch.zeros_like(hidden, memory_format=torch.contiguous_format, requires_grad=False),
        calls=static,
        loaded={kind: [None] * len(tensors_of(call)) for kind, call in static.items()},
        repeated=repeated,
    )


@contextmanager
def bound(copies: Sequence[LayerCopy], slot: Slot) -> Iterator[None]:
    """Every copy of a block bound to its place in a slot."""
    with ExitStack() as bindings:
        start = 0
        for made in copies:
            bindings.enter_context(made.template.bound(slot, start))
            start += made.template.packing.nbytes
        yield
