"""What the graph executor has recorded, and how a visit replays it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from poros.engine.executor import Batch, Surroundings, Visit
from poros.engine.prologue import Call
from poros.engine.signature import Signature, map_tensors, tensors_of
from poros.engine.template import Template
from poros.stream.slots import Slot
from poros.stream.streamer import Lease

if TYPE_CHECKING:
    from poros.engine.chain import Link
    from poros.engine.graphs import GraphExecutor

Results = list[Tensor | None]


@dataclass
class LayerCopy:
    """A copy of a layer that is recorded in its place.

    Attributes:
        template: Over the copy.
        adapters: Its trainable parameters, static buffers.
        kind: The layer kind, which says with which arguments it is called.
        outside: Whether everything in its slot is taken out at the begin of a visit: 4-bit weights are restored into
            buffers, the rest is copied. It is recorded without a slot then.
    """

    template: Template
    adapters: list[nn.Parameter]
    kind: str
    outside: bool = False


@dataclass(frozen=True)
class Recorded:
    """The two recorded directions of a block.

    Attributes:
        loose: The static adapters of the block, trained or not.
        forward, backward: Start a replay.
        output: Where the forward graph leaves the block's output.
        gradients: Where the backward graph leaves the gradients of the input and of the adapters.
        outside: Whether the block must be taken out of its slot first; otherwise it is read where it lies.
    """

    loose: list[nn.Parameter]
    forward: Callable[[], None]
    output: Tensor
    backward: Callable[[], None]
    gradients: Results
    outside: bool


@dataclass(eq=False)
class Pool:
    """Memory that graphs share which never run at the same time.

    Attributes:
        handle: torch's handle, once the first graph was recorded.
    """

    handle: Any = None


_OLD_LOTS = 4
"""Sorts of blocks that were, and may come back (adapters that are switched to and fro), whose graphs are kept."""


@dataclass(eq=False)
class ShapeGraphs:
    """Everything recorded for one batch shape.

    Attributes:
        hidden, gradient: Static input and output gradient of a block, [batch, tokens, hidden].
        calls: Static arguments of each layer kind.
        loaded: For each layer kind, the tensors (and their versions) whose values its static arguments hold now.
        restore_once: Whether a visit restores its weights once for all their uses, where that can be done.
        chained: Whether the blocks that keep their activations do so here.
        copies: Key of a block outside a slot -> the copies of its layers.
        recorded: Key of a block, in a slot or outside one -> graphs.
        chain: Block -> its graphs, for blocks that keep their activations.
        stale: Whether something was missing when it was last looked for.
        full: The card had no room; this shape runs eagerly.
    """

    hidden: Tensor
    gradient: Tensor
    calls: dict[str, Call]
    loaded: dict[str, list[tuple[Tensor, int] | None]]
    restore_once: bool
    chained: bool
    copies: dict[Signature, list[LayerCopy]] = field(default_factory=dict)
    recorded: dict[Signature, Recorded] = field(default_factory=dict)
    chain: dict[int, Link] = field(default_factory=dict)
    stale: bool = True
    full: bool = False

    def forget_old(self, current: set[Signature]) -> None:
        """Drop graphs of blocks as they once were. A batch under way that still wanted them goes on eagerly.

        Args:
            current: Keys, outside a slot, of all blocks as they are.
        """
        old = [lot for lot in self.copies if lot not in current]
        for lot in old[: max(0, len(old) - _OLD_LOTS)]:
            del self.copies[lot]
            for key in [key for key in self.recorded if key[:2] == lot[:2]]:
                del self.recorded[key]


@dataclass(frozen=True, kw_only=True)
class GraphBatch(Batch):
    """A forward pass that replays graphs.

    Attributes:
        graphs: Of its shape.
        number: Of the pass.
    """

    graphs: ShapeGraphs
    number: int


@dataclass(frozen=True)
class KeptInGraph:
    """A forward pass whose activations lie in the memory of the chain's graphs, until the next pass.

    Attributes:
        number: Of the pass.
    """

    number: int


class GraphVisit(Visit):
    """A block that is run by replaying graphs.

    Args:
        templates, start, lease, bindings: As for any visit.
        block: Which block.
        executor: Whose graphs.
    """

    def __init__(
        self,
        templates: Sequence[Template],
        start: int,
        lease: Lease,
        bindings: ExitStack,
        block: int,
        executor: GraphExecutor,
    ) -> None:
        super().__init__(templates, start, lease, bindings)
        self._block = block
        self._executor = executor
        self._ready: Recorded | None = None

    def forward(self, hidden: Tensor, batch: Batch, surroundings: Surroundings) -> Tensor:
        recorded = self._recorded(batch)
        if recorded is None or not isinstance(batch, GraphBatch):
            return super().forward(hidden, batch, surroundings)
        with torch.no_grad():
            self._executor.latest_pass = batch.number
            self._place(hidden, batch)
            recorded.forward()
            return recorded.output.clone()

    def forward_keeping(
        self, hidden: Tensor, batch: Batch, surroundings: Surroundings, needs_hidden: bool
    ) -> tuple[Tensor, Any]:
        if not isinstance(batch, GraphBatch) or not self._executor.link_is_current(batch.graphs, self._block):
            if isinstance(batch, GraphBatch):
                batch.graphs.stale = True
            if self._executor.keeps_eagerly:
                return super().forward_keeping(hidden, batch, surroundings, needs_hidden)
            return self.forward(hidden, batch, surroundings), None
        link = batch.graphs.chain[self._block]
        self._lease.slot()  # the graphs read it
        with torch.no_grad():
            self._executor.latest_pass = batch.number
            self._place(hidden, batch)
            link.forward()
            assert link.output is not None
            return link.output.clone(), KeptInGraph(batch.number)

    def backward(
        self,
        hidden: Tensor,
        batch: Batch,
        surroundings: Surroundings,
        adapters: Sequence[nn.Parameter],
        gradient: Tensor,
        needs_hidden: bool,
        kept: Any = None,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        # A backward pass under autocast is not what was recorded.
        if isinstance(batch, GraphBatch) and not torch.is_autocast_enabled(hidden.device.type):
            if isinstance(kept, KeptInGraph):
                link = batch.graphs.chain.get(self._block)
                if link is not None and self._executor.latest_pass == kept.number:
                    self._lease.slot()
                    with torch.no_grad():
                        self._place_arguments(batch)  # the recompute of an older pass may have placed its own
                        batch.graphs.gradient.copy_(gradient)
                        link.backward()
                        return _taken(link.gradients, needs_hidden)
            elif kept is None and (recorded := self._recorded(batch)) is not None:
                with torch.no_grad(), surroundings.restored():
                    self._place(hidden, batch)
                    batch.graphs.gradient.copy_(gradient)
                    recorded.backward()
                    return _taken(recorded.gradients, needs_hidden)
            self._executor.num_eager += kept is None
        return super().backward(hidden, batch, surroundings, adapters, gradient, needs_hidden, kept)

    def _recorded(self, batch: Batch) -> Recorded | None:
        """The graphs to replay, everything they read but input and arguments in place; None if there are none."""
        if not isinstance(batch, GraphBatch):
            return None
        recorded = batch.graphs.recorded.get(self._executor.key(self._block))
        take_out = self._executor.takes_out(self._block)
        if recorded is None:
            slot = self._lease.slot()
            recorded = batch.graphs.recorded.get(self._executor.key(self._block, slot))
        elif take_out is None:
            recorded = None
        if recorded is None:
            batch.graphs.stale = True
        elif recorded is not self._ready:
            # Once a visit: neither adapters nor weights change meanwhile.
            self._ready = recorded
            if recorded.outside and take_out is not None and not self._lease.held:
                # An earlier micro-batch of this visit may have run eagerly: its layers are bound to the slot.
                self._lease.hold(take_out, release=not self._bound)
            live: list[Tensor] = [parameter for template in self._templates for parameter in template.loose()]
            if live:
                with torch.no_grad():
                    torch._foreach_copy_(list[Tensor](recorded.loose), live)
        return recorded

    def _place(self, hidden: Tensor, batch: GraphBatch) -> None:
        """Copy input and arguments into the static buffers."""
        batch.graphs.hidden.copy_(hidden)
        self._place_arguments(batch)

    def _place_arguments(self, batch: GraphBatch) -> None:
        """Copy those arguments into the static buffers that aren't there already."""
        self._executor.num_replays += 1
        graphs = batch.graphs
        for index in range(self._start, self._start + len(self._templates)):
            kind = self._executor.layer_kind(index)
            loaded = graphs.loaded[kind]
            static: list[Tensor] | None = None
            for number, tensor in enumerate(tensors_of(batch.calls[index])):
                held = loaded[number]
                if held is None or held[0] is not tensor or held[1] != tensor._version:
                    static = tensors_of(graphs.calls[kind]) if static is None else static
                    # `data`: a graph reads memory, and autograd's count of changes means nothing to it.
                    static[number].data.copy_(tensor)
                    loaded[number] = (tensor, tensor._version)


def _taken(static: Results, needs_hidden: bool) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients a replay has left, copied out before the next one."""
    first, *of_adapters = static
    gradients = [None if tensor is None else torch.empty_like(tensor) for tensor in of_adapters]
    if any(tensor is not None for tensor in gradients):
        torch._foreach_copy_(
            [tensor for tensor in gradients if tensor is not None],
            [tensor for tensor in of_adapters if tensor is not None],
        )
    return (first.clone() if needs_hidden and first is not None else None), gradients


def new_shape(hidden: Tensor, calls: dict[str, Call], restore_once: bool, chained: bool) -> ShapeGraphs:
    """An empty entry for batches like this one."""

    def own(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor).copy_(tensor)

    static = {kind: Call(map_tensors(call.args, own), map_tensors(call.kwargs, own)) for kind, call in calls.items()}
    return ShapeGraphs(
        hidden=torch.zeros_like(hidden, memory_format=torch.contiguous_format, requires_grad=False),
        gradient=torch.zeros_like(hidden, memory_format=torch.contiguous_format, requires_grad=False),
        calls=static,
        loaded={kind: [None] * len(tensors_of(call)) for kind, call in static.items()},
        restore_once=restore_once,
        chained=chained,
    )


def run_copies(copies: Sequence[LayerCopy], hidden: Tensor, graphs: ShapeGraphs) -> Tensor:
    """A block's output, [batch, tokens, hidden], from its copies and the static arguments."""
    for made in copies:
        hidden = made.template.run(hidden, graphs.calls[made.kind])
    return hidden


@contextmanager
def bound(copies: Sequence[LayerCopy], slot: Slot | None) -> Iterator[None]:
    """Every copy of a block bound to its place in a slot; without one, as they are."""
    with ExitStack() as bindings:
        start = 0
        for made in copies if slot is not None else ():
            assert slot is not None
            bindings.enter_context(made.template.bound(slot, start))
            start += made.template.packing.nbytes
        yield
