"""What the graph executor has recorded, and how a visit replays it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from poros.engine.copies import BlockCopy
from poros.engine.executor import Batch, Surroundings, Visit
from poros.engine.prologue import Call
from poros.engine.signature import IGNORED_ARGUMENTS, CannotRecordError, Signature, map_tensors, tensors_of
from poros.engine.statics import Place, Statics
from poros.engine.template import Template
from poros.stream.streamer import Lease

if TYPE_CHECKING:
    from poros.engine.chain import Link
    from poros.engine.graphs import GraphExecutor

Results = list[Tensor | None]


@dataclass(frozen=True)
class Recorded:
    """The two recorded directions of a block.

    Attributes:
        copy: Of the block's layers. It says whether the block must be taken out of its slot first; otherwise it is read
            where it lies.
        forward, backward: Start a replay.
        output: Where the forward graph leaves the block's output.
        gradients: Where the backward graph leaves the gradients of the input and of the adapters.
    """

    copy: BlockCopy
    forward: Callable[[], None]
    output: Tensor
    backward: Callable[[], None]
    gradients: Results


@dataclass(eq=False)
class Pool:
    """Memory that graphs share which never run at the same time.

    Attributes:
        handle: torch's handle, once the first graph was recorded.
    """

    handle: Any = None


@dataclass(eq=False)
class ShapeGraphs:
    """Everything recorded for one batch shape.

    Attributes:
        statics: Memory of all shapes.
        hidden, gradient: Static input and output gradient of a block, [batch, tokens, hidden].
        output: Where a block's output, or the gradient of its input, is left.
        calls: Static arguments of each layer kind.
        places: For each layer kind, where its arguments are.
        restore_once: Whether a visit restores its weights once for all their uses, where that can be done.
        chained: Whether the blocks that keep their activations do so here.
        recorded: Key of a block, in a slot or outside one -> graphs.
        chain: Block -> its graphs, for blocks that keep their activations.
        stale: Whether something was missing when it was last looked for.
        retried: Whether those of other shapes have once been dropped to make room for these.
        full: The card had no room, or a block can't be recorded; this shape runs eagerly.
    """

    statics: Statics
    hidden: Tensor
    gradient: Tensor
    output: Tensor
    calls: dict[str, Call]
    places: dict[str, list[Place]]
    restore_once: bool
    chained: bool
    recorded: dict[Signature, Recorded] = field(default_factory=dict)
    chain: dict[int, Link] = field(default_factory=dict)
    stale: bool = True
    retried: bool = False
    full: bool = False

    def __len__(self) -> int:
        """How many graphs there are."""
        return 2 * (len(self.recorded) + len(self.chain))

    def forget(self, lots: Sequence[Signature]) -> None:
        """Drop graphs of blocks as they once were. A batch under way that still wanted them goes on eagerly."""
        gone = {lot[:2] for lot in lots}
        for key in [key for key in self.recorded if key[:2] in gone]:
            del self.recorded[key]

    def place(self, kind: str, call: Call) -> None:
        """Copy the arguments of a layer of a kind to where its graphs read them, those that aren't there already."""
        static: list[Tensor] | None = None
        for number, (place, tensor) in enumerate(zip(self.places[kind], tensors_of(call), strict=True)):
            held = place.holds
            if held is None or held[0] is not tensor or held[1] != tensor._version:
                static = tensors_of(self.calls[kind]) if static is None else static
                # `data`: a graph reads memory, and autograd's count of changes means nothing to it.
                static[number].data.copy_(tensor)
                place.holds = (tensor, tensor._version)

    def leave(self, results: Sequence[Tensor | None]) -> Results:
        """Put a block's output, or the gradients of its input and of its adapters, where a replay leaves them.

        Raises:
            CannotRecordError: the output has another dtype or shape than the input.
        """
        first, *gradients = results
        if first is not None and (first.dtype, first.shape) != (self.output.dtype, self.output.shape):
            raise CannotRecordError(f"a block makes {first.dtype} of {self.output.dtype}")
        left: Results = [None if first is None else self.output]
        for index, tensor in enumerate(gradients):
            left.append(None if tensor is None else self.statics.like(("gradient", index), tensor))
        with torch.no_grad():
            for tensor, place in zip(results, left, strict=True):
                if tensor is not None and place is not None:
                    place.copy_(tensor)
        return left


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
        self._ready: BlockCopy | None = None

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
            if not self._executor.bounded:
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
        elif recorded.copy is not self._ready:
            # Once a visit: neither adapters nor weights change meanwhile.
            self._ready = recorded.copy
            if recorded.copy.outside and take_out is not None and not self._lease.held:
                # An earlier micro-batch of this visit may have run eagerly: its layers are bound to the slot.
                self._lease.hold(take_out, release=not self._bound)
            live: list[Tensor] = [parameter for template in self._templates for parameter in template.loose()]
            if live:
                with torch.no_grad():
                    torch._foreach_copy_(list[Tensor](recorded.copy.loose), live)
        return recorded

    def _place(self, hidden: Tensor, batch: GraphBatch) -> None:
        """Copy input and arguments into the static buffers."""
        batch.graphs.hidden.copy_(hidden)
        self._place_arguments(batch)

    def _place_arguments(self, batch: GraphBatch) -> None:
        """Copy those arguments into the static buffers that aren't there already."""
        self._executor.num_replays += 1
        for index in range(self._start, self._start + len(self._templates)):
            batch.graphs.place(self._executor.layer_kind(index), batch.calls[index])


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


def new_shape(
    hidden: Tensor, calls: dict[str, Call], restore_once: bool, chained: bool, statics: Statics
) -> ShapeGraphs:
    """An empty entry for batches like this one."""
    static: dict[str, Call] = {}
    places: dict[str, list[Place]] = {kind: [] for kind in calls}
    for kind, call in calls.items():

        def own(name: str | int, value: Any, kind: str = kind) -> Any:
            numbers = itertools.count()  # of the tensors in one argument

            def place(tensor: Tensor) -> Tensor:
                # Named by its argument: whether rows have a mask moves none of the others.
                places[kind].append(statics.place((kind, name, next(numbers)), tensor))
                return places[kind][-1].like(tensor)

            return map_tensors(value, place)

        args = tuple(own(index, value) for index, value in enumerate(call.args))
        kwargs = {name: value if name in IGNORED_ARGUMENTS else own(name, value) for name, value in call.kwargs.items()}
        static[kind] = Call(args, kwargs)
    like = torch.empty_like(hidden, memory_format=torch.contiguous_format, device="meta")
    of_input, of_gradient, of_output = (
        statics.place((name,), hidden).like(like) for name in ("input", "gradient", "output")
    )
    return ShapeGraphs(statics, of_input, of_gradient, of_output, static, places, restore_once, chained)
