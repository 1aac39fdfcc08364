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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from poros.checkpoint.frozen import frozen_tensors
from poros.engine.executor import Batch, EagerExecutor, Surroundings, Visit, set_rng_state
from poros.engine.prologue import Call
from poros.engine.replay import GraphBatch, GraphVisit, LayerCopy, Recorded, Results, ShapeGraphs, bound, new_shape
from poros.engine.signature import (
    CannotRecordError,
    Signature,
    call_signature,
    check_no_hooks,
    layer_signature,
    switches_signature,
    tensors_of,
    value_signature,
)
from poros.engine.template import Template
from poros.stream.schedule import Phase
from poros.stream.slots import Slot
from poros.stream.streamer import Streamer

log = logging.getLogger(__name__)


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
        num_replays: Blocks run by replaying.
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
        self.num_replays = 0
        self._kinds = tuple(kinds)
        self._slots = tuple(slots)
        self._max_shapes = max_shapes
        self._fuse = fuse
        self._shapes: OrderedDict[Signature, ShapeGraphs] = OrderedDict()
        self._restored: dict[Signature, Tensor] = {}
        self._stream: Any = None

    # -- before a forward pass ----------------------------------------------------------------------------------------

    def prepare(self, hidden: Tensor, calls: Sequence[Call], training: bool, repeated: bool = False) -> Batch:
        if not training:
            return Batch.of(calls, training)
        try:
            graphs = self._graphs_for(hidden, calls, repeated)
            signatures = self._signatures()
        except CannotRecordError as error:
            log.warning("running eagerly: %s", error)
            return Batch.of(calls, training)
        if not self._record_missing(graphs, signatures):
            return Batch.of(calls, training)
        plain = Batch.of(calls, training)
        return GraphBatch(calls=plain.calls, versions=plain.versions, graphs=graphs, signatures=signatures)

    def _graphs_for(self, hidden: Tensor, calls: Sequence[Call], repeated: bool) -> ShapeGraphs:
        """The graphs of a batch shape; empty ones for a new shape."""
        by_kind: dict[str, tuple[Call, Signature]] = {}
        for kind, call in zip(self._kinds, calls, strict=True):
            signature = call_signature(call)
            if by_kind.setdefault(kind, (call, signature))[1] != signature:
                raise CannotRecordError(f"layers of kind {kind!r} are called in different ways")
        for start, block in zip(self._starts, self._blocks, strict=False):
            seen: dict[str, list[Tensor]] = {}
            for index in range(start, start + len(block)):
                tensors = tensors_of(calls[index])
                first = seen.setdefault(self._kinds[index], tensors)
                if any(one is not other for one, other in zip(first, tensors, strict=True)):
                    # Both would be copied into the same static arguments before one replay.
                    raise CannotRecordError("layers of one kind in a block are given different tensors")
        key = (
            repeated,
            value_signature(hidden),
            switches_signature(hidden.device),
            tuple((kind, signature) for kind, (_, signature) in by_kind.items()),
        )
        if key not in self._shapes:
            self._shapes[key] = new_shape(hidden, {kind: call for kind, (call, _) in by_kind.items()}, repeated)
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
                check_no_hooks(template.layer)
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
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            graphs.full = True
            for signature, _, slot in wanted:  # the others may belong to a batch that is still on its way back
                graphs.recorded.pop((signature, slot.index), None)
            self._restored.clear()
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
        with self._streamer.visit(block, Phase.FORWARD) as slot, bound(copies, slot), surroundings.autocasting():
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
            if graphs.repeated:
                self._share_restored(copies, fresh)

    def _share_restored(self, copies: Sequence[LayerCopy], fresh: Sequence[LayerCopy]) -> None:
        """Give fused layers a buffer for their restored weight. Copies at one position of a block, of any batch shape,
        share their buffers: no two of them run at a time."""
        from poros.engine.kernels.linear import FusedLinear4bit

        for position, made in enumerate(copies):
            if not any(made is other for other in fresh):
                continue
            for name, layer in made.template.layer.named_modules():
                if isinstance(layer, FusedLinear4bit):
                    shape = (layer.out_features, layer.in_features)
                    key = (position, name, shape)
                    if key not in self._restored:
                        self._restored[key] = torch.empty(shape, dtype=torch.bfloat16, device=layer.weight.device)
                    layer.restored = self._restored[key]

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
            with bound(copies, slot), torch.no_grad(), surroundings.autocasting():
                return [run(graphs.hidden)]

        def backward() -> Results:
            leaf = graphs.hidden.detach().requires_grad_()
            with bound(copies, slot):
                with torch.enable_grad(), surroundings.autocasting():
                    output = run(leaf)
                # Recording happens inside the caller's autocast, a backward pass outside it: products that the forward
                # pass did in float32 would be differentiated in bf16.
                with torch.autocast(graphs.hidden.device.type, enabled=False):
                    return list(torch.autograd.grad(output, [leaf, *adapters], graphs.gradient, allow_unused=True))

        def restore() -> Results:
            with bound(copies, slot), torch.no_grad():
                for layer in restorable:
                    layer.restore()
            return []

        restorable: list[Any] = [
            layer
            for made in copies
            for layer in made.template.layer.modules()
            if getattr(layer, "restored", None) is not None
        ]
        replay_restore = self._record(restore, graphs)[0] if restorable else None
        replay_forward, (output,) = self._record(forward, graphs)
        replay_backward, gradients = self._record(backward, graphs)
        assert output is not None
        self.num_recorded += 2
        loose = [parameter for made in copies for parameter in made.template.loose()]
        return Recorded(loose, replay_forward, output, replay_backward, gradients, replay_restore)

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

    def _visit(self, block: int, slot: Slot, bindings: ExitStack) -> Visit:
        return GraphVisit(self._blocks[block], self._starts[block], slot, bindings, block, self._kinds, self._count)

    def _count(self) -> None:
        self.num_replays += 1


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is, or came of, one. Ending a recording that ran out of memory raises another error on top."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
