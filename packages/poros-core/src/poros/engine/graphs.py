"""The graph executor: one CUDA graph per (block signature, slot, direction, batch shape), replayed for every block.

A layer of a large model is hundreds of kernels forward and backward, and launching them from Python can take longer
than running them. Slots lie at fixed addresses, so one recorded graph serves every block that passes through a slot.
Only what differs between blocks is copied before a replay: the block's input, its adapters, and those arguments of
its layers that aren't in place already.

What is recorded is not the model's own layers but *copies* of them, one per position in a block, whose adapters are
static buffers. A block's signature holds everything that changes the recorded kernels: layouts, classes, layer kinds,
adapters, scaling, dropout. A forward pass with a new shape or signature is recorded before its first block runs; an
evaluation, a call that can't be recorded, and a card without room for the graphs run eagerly, with the same numbers.

Dropout: a replay draws from the generator's offset as eager kernels do, so a replay at a saved offset draws the same
masks."""

from __future__ import annotations

import copy
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from poros.checkpoint.frozen import frozen_tensors
from poros.engine.executor import Batch, EagerExecutor, Surroundings, set_rng_state
from poros.engine.prologue import Call
from poros.engine.signature import (
    CannotRecordError,
    Signature,
    call_signature,
    layer_signature,
    map_tensors,
    switches_signature,
    tensors_of,
    value_signature,
)
from poros.engine.template import Template
from poros.stream.schedule import Phase
from poros.stream.slots import Slot
from poros.stream.streamer import Streamer

log = logging.getLogger(__name__)

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
        adapters: The static adapters of the block.
        forward, backward: Start a replay.
        output: Where the forward graph leaves the block's output.
        gradients: Where the backward graph leaves the gradients of the input and of the adapters.
    """

    adapters: list[nn.Parameter]
    forward: Callable[[], None]
    output: Tensor
    backward: Callable[[], None]
    gradients: Results


@dataclass
class ShapeGraphs:
    """Everything recorded for one batch shape.

    Attributes:
        hidden, gradient: Static input and output gradient of a block, [batch, tokens, hidden].
        calls: Static arguments of each layer kind.
        loaded: For each layer kind, the tensors whose values its static arguments hold now.
        copies: (position in the block, layer signature) -> the copy.
        recorded: (block signature, slot) -> graphs.
        pool: Memory that all graphs of this shape share; they never run at the same time.
        full: The card had no room; this shape runs eagerly.
    """

    hidden: Tensor
    gradient: Tensor
    calls: dict[str, Call]
    loaded: dict[str, list[Tensor | None]]
    copies: dict[tuple[int, Signature], LayerCopy] = field(default_factory=dict)
    recorded: dict[tuple[Signature, int], Recorded] = field(default_factory=dict)
    pool: Any = None
    full: bool = False


@dataclass(frozen=True)
class GraphBatch(Batch):
    """A forward pass that replays graphs.

    Attributes:
        graphs: Of its shape.
        signatures: Of each block.
    """

    graphs: ShapeGraphs
    signatures: tuple[Signature, ...]


class GraphExecutor(EagerExecutor):
    """Replays recorded blocks.

    Args:
        streamer: Brings a block's bytes.
        blocks: The templates of each block's layers.
        kinds: The layer kind of each layer.
        slots: Every slot.
        max_shapes: Batch shapes whose graphs are kept; the least recently used go first.
        fuse: Whether to restore weights with Poros's own kernel where it gives the same bits.

    Attributes:
        num_recorded: Graphs recorded so far.
        record_seconds: Time that took.
    """

    def __init__(
        self,
        streamer: Streamer,
        blocks: Sequence[Sequence[Template]],
        kinds: Sequence[str],
        slots: Sequence[Slot],
        max_shapes: int = 4,
        fuse: bool = True,
    ) -> None:
        super().__init__(streamer, blocks)
        self.num_recorded = 0
        self.record_seconds = 0.0
        self._kinds = tuple(kinds)
        self._slots = tuple(slots)
        self._max_shapes = max_shapes
        self._fuse = fuse
        self._shapes: OrderedDict[Signature, ShapeGraphs] = OrderedDict()
        self._stream: Any = None

    # -- before a forward pass ----------------------------------------------------------------------------------------

    def prepare(self, hidden: Tensor, calls: Sequence[Call], training: bool) -> Batch:
        if not training:
            return Batch(tuple(calls))
        try:
            graphs = self._graphs_for(hidden, calls)
            signatures = self._signatures()
        except CannotRecordError as error:
            log.warning("running eagerly: %s", error)
            return Batch(tuple(calls))
        if not self._record_missing(graphs, signatures):
            return Batch(tuple(calls))
        return GraphBatch(tuple(calls), graphs, signatures)

    def _graphs_for(self, hidden: Tensor, calls: Sequence[Call]) -> ShapeGraphs:
        """The graphs of a batch shape; empty ones for a new shape."""
        by_kind: dict[str, tuple[Call, Signature]] = {}
        for kind, call in zip(self._kinds, calls, strict=True):
            signature = call_signature(call)
            if by_kind.setdefault(kind, (call, signature))[1] != signature:
                raise CannotRecordError(f"layers of kind {kind!r} are called in different ways")
        key = (
            value_signature(hidden),
            switches_signature(hidden.device),
            tuple((kind, signature) for kind, (_, signature) in by_kind.items()),
        )
        if key not in self._shapes:
            self._shapes[key] = _new_shape(hidden, {kind: call for kind, (call, _) in by_kind.items()})
            while len(self._shapes) > self._max_shapes:
                self._shapes.popitem(last=False)
        self._shapes.move_to_end(key)
        return self._shapes[key]

    def _signatures(self) -> tuple[Signature, ...]:
        """The signature of each block, now: adapters may have been switched or retyped since the last step."""
        found = []
        index = 0
        for block in self._blocks:
            layers = []
            for template in block:
                layers.append((id(template.packing), self._kinds[index], layer_signature(template.layer)))
                index += 1
            found.append(tuple(layers))
        return tuple(found)

    def _record_missing(self, graphs: ShapeGraphs, signatures: Sequence[Signature]) -> bool:
        """Record what isn't there yet; False if the card has no room for it."""
        examples: dict[Signature, int] = {}
        for block, signature in enumerate(signatures):
            examples.setdefault(signature, block)
        wanted = [
            (signature, block, slot)
            for signature, block in examples.items()
            for slot in self._slots
            if (signature, slot.index) not in graphs.recorded
        ]
        if not wanted or graphs.full:
            return not graphs.full
        began = time.perf_counter()
        device = graphs.hidden.device
        surroundings = Surroundings.now(device)
        try:
            for signature, block, slot in wanted:
                copies = self._copies(graphs, signature, block, surroundings)
                graphs.recorded[signature, slot.index] = self._record_block(graphs, copies, slot, surroundings)
        except torch.OutOfMemoryError:
            graphs.full = True
            graphs.recorded.clear()
            log.warning(
                "no room to record graphs for %s; such batches run eagerly, which is slower and gives the same numbers",
                " x ".join(map(str, graphs.hidden.shape)),
            )
            return False
        finally:
            set_rng_state(surroundings.rng, device)
            self.record_seconds += time.perf_counter() - began
        log.info("recorded %d graphs for %s", 2 * len(wanted), tuple(graphs.hidden.shape))
        return True

    def _copies(
        self, graphs: ShapeGraphs, signature: Signature, block: int, surroundings: Surroundings
    ) -> list[LayerCopy]:
        """Copies of a block's layers, made when they are first wanted."""
        found, fresh = [], []
        for position, (template, of_layer) in enumerate(zip(self._blocks[block], signature, strict=True)):
            made = graphs.copies.get((position, of_layer))
            if made is None:
                layer = copy.deepcopy(template.layer)
                adapters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
                made = LayerCopy(Template(layer, frozen_tensors(layer), template.packing), adapters, of_layer[1])
                graphs.copies[position, of_layer] = made
                fresh.append(made)
            found.append(made)
        if fresh and self._fuse and graphs.hidden.is_cuda:
            self._fuse_linears(graphs, found, fresh, block, surroundings)
        return found

    def _fuse_linears(
        self,
        graphs: ShapeGraphs,
        copies: Sequence[LayerCopy],
        fresh: Sequence[LayerCopy],
        block: int,
        surroundings: Surroundings,
    ) -> None:
        """Use fused linear layers in the copies where, with this block's weights, they give the same bits."""
        from poros.engine.kernels.linear import FusedLinear4bit, can_fuse, matches

        rows = graphs.hidden.numel() // graphs.hidden.shape[-1]
        tried: dict[Signature, bool] = {}
        with self._streamer.visit(block, Phase.FORWARD) as slot, _bound(copies, slot), surroundings.autocasting():
            for made in fresh:
                for layer in made.template.layer.modules():
                    if not can_fuse(layer):
                        continue
                    key = (layer.out_features, layer.in_features, layer.bias is not None)
                    if key not in tried:
                        tried[key] = matches(layer, rows, graphs.hidden.dtype)
                        if not tried[key]:
                            log.warning("the fused kernel differs from bitsandbytes at %s; not used there", key)
                    if tried[key]:
                        layer.__class__ = FusedLinear4bit

    # -- recording ----------------------------------------------------------------------------------------------------

    def _record_block(
        self, graphs: ShapeGraphs, copies: Sequence[LayerCopy], slot: Slot, surroundings: Surroundings
    ) -> Recorded:
        adapters = [parameter for made in copies for parameter in made.adapters]

        def run(hidden: Tensor) -> Tensor:
            for made in copies:
                hidden = made.template.run(hidden, graphs.calls[made.kind])
            return hidden

        def forward() -> Results:
            with _bound(copies, slot), torch.no_grad(), surroundings.autocasting():
                return [run(graphs.hidden)]

        def backward() -> Results:
            leaf = graphs.hidden.detach().requires_grad_()
            with _bound(copies, slot):
                with torch.enable_grad(), surroundings.autocasting():
                    output = run(leaf)
                return list(torch.autograd.grad(output, [leaf, *adapters], graphs.gradient, allow_unused=True))

        replay_forward, (output,) = self._record(forward, graphs)
        replay_backward, gradients = self._record(backward, graphs)
        assert output is not None
        self.num_recorded += 2
        return Recorded(adapters, replay_forward, output, replay_backward, gradients)

    def _record(self, run: Callable[[], Results], graphs: ShapeGraphs) -> tuple[Callable[[], None], Results]:
        """Record a function's kernels; returns what replays them, and the tensors in which the results will lie."""
        device = graphs.hidden.device
        if self._stream is None:
            # One stream for every warm-up and recording: each new one costs a cuBLAS workspace.
            self._stream = torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graphs.pool, stream=self._stream):
            results = run()
        graphs.pool = graph.pool()
        return graph.replay, results

    # -- replaying ----------------------------------------------------------------------------------------------------

    def forward(self, block: int, hidden: Tensor, batch: Batch, surroundings: Surroundings) -> Tensor:
        if not isinstance(batch, GraphBatch):
            return super().forward(block, hidden, batch, surroundings)
        with self._streamer.visit(block, Phase.FORWARD) as slot, torch.no_grad():
            recorded = batch.graphs.recorded[batch.signatures[block], slot.index]
            self._place(block, hidden, batch, recorded, self.adapters(block))
            recorded.forward()
            return recorded.output.clone()

    def backward(
        self,
        block: int,
        hidden: Tensor,
        batch: Batch,
        surroundings: Surroundings,
        adapters: Sequence[nn.Parameter],
        gradient: Tensor,
        needs_hidden: bool,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        if not isinstance(batch, GraphBatch):
            return super().backward(block, hidden, batch, surroundings, adapters, gradient, needs_hidden)
        with self._streamer.visit(block, Phase.BACKWARD) as slot, torch.no_grad(), surroundings.restored():
            recorded = batch.graphs.recorded[batch.signatures[block], slot.index]
            self._place(block, hidden, batch, recorded, adapters)
            batch.graphs.gradient.copy_(gradient)
            recorded.backward()
            first, *static = recorded.gradients
            gradients = [None if tensor is None else torch.empty_like(tensor) for tensor in static]
            torch._foreach_copy_(
                [tensor for tensor in gradients if tensor is not None],
                [tensor for tensor in static if tensor is not None],
            )
            return (first.clone() if needs_hidden and first is not None else None), gradients

    def _place(
        self, block: int, hidden: Tensor, batch: GraphBatch, recorded: Recorded, adapters: Sequence[nn.Parameter]
    ) -> None:
        """Copy what differs between blocks into the static buffers."""
        graphs = batch.graphs
        graphs.hidden.copy_(hidden)
        if adapters:
            torch._foreach_copy_(list(recorded.adapters), list(adapters))
        start = self._starts[block]
        for index in range(start, start + len(self._blocks[block])):
            kind = self._kinds[index]
            loaded = graphs.loaded[kind]
            static: list[Tensor] | None = None
            for number, tensor in enumerate(tensors_of(batch.calls[index])):
                if loaded[number] is not tensor:
                    static = tensors_of(graphs.calls[kind]) if static is None else static
                    static[number].copy_(tensor)
                    loaded[number] = tensor


def _new_shape(hidden: Tensor, calls: dict[str, Call]) -> ShapeGraphs:
    def own(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor).copy_(tensor)

    static = {kind: Call(map_tensors(call.args, own), map_tensors(call.kwargs, own)) for kind, call in calls.items()}
    return ShapeGraphs(
        hidden=torch.zeros_like(hidden, memory_format=torch.contiguous_format, requires_grad=False),
        gradient=torch.zeros_like(hidden, memory_format=torch.contiguous_format, requires_grad=False),
        calls=static,
        loaded={kind: [None] * len(tensors_of(call)) for kind, call in static.items()},
    )


@contextmanager
def _bound(copies: Sequence[LayerCopy], slot: Slot) -> Iterator[None]:
    """Every copy of a block bound to its place in a slot."""
    with ExitStack() as bindings:
        start = 0
        for made in copies:
            bindings.enter_context(made.template.bound(slot, start))
            start += made.template.packing.nbytes
        yield
