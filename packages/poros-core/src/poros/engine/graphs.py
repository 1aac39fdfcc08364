"""The graph executor: one CUDA graph per (block signature, slot, direction, batch shape), replayed for every block.

A layer of a large model is hundreds of kernels forward and backward, and launching them from Python can take longer
than running them. Slots lie at fixed addresses, so one recorded graph serves every block that passes through a slot.
Only what differs between blocks is copied before a replay: the block's input, its adapters, and those arguments of
its layers that aren't in place already.

What is recorded is not the model's own layers but *copies* of them, one per position in a block, whose adapters are
static buffers. A block's signature holds everything that changes the recorded kernels: layouts, classes, layer kinds,
adapters, scaling, dropout. A forward pass with a new shape is recorded before its first block runs. A visit whose
signature has no graph (adapters were switched since), an evaluation, a call that can't be recorded, and a card without
room for the graphs run eagerly, with the same numbers; such a signature is recorded at the next forward pass.

Resident blocks that keep their activations have graphs of their own; see `poros.engine.chain`.

Dropout: a replay draws from the generator's offset as eager kernels do, so a replay at a saved offset draws the same
masks."""

from __future__ import annotations

import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from poros.engine.boundaries import Boundaries
from poros.engine.chain import Link, record_chain
from poros.engine.copies import BlockCopy, Copies
from poros.engine.executor import Batch, EagerExecutor, Surroundings, Visit, set_rng_state
from poros.engine.kernels.linear import FusedLinear4bit
from poros.engine.outside import Buffers, take_out
from poros.engine.prologue import Call
from poros.engine.recording import is_out_of_memory, record, warm_up
from poros.engine.replay import GraphBatch, GraphVisit, Pool, Recorded, Results, ShapeGraphs, new_shape
from poros.engine.signature import CannotRecordError, Signature, calls_by_kind, switches_signature, value_signature
from poros.engine.statics import Statics
from poros.engine.template import Template
from poros.engine.unused import skipping, unused_values
from poros.plan.graphs import MOST_GRAPHS
from poros.stream.schedule import Phase
from poros.stream.slots import Arena, Slot
from poros.stream.streamer import Lease, Streamer

log = logging.getLogger(__name__)


class GraphExecutor(EagerExecutor):
    """Replays recorded blocks.

    Args:
        streamer: Brings a block's bytes.
        blocks: The templates of each block's layers.
        kinds: The layer kind of each layer.
        keeping: Blocks whose activations are kept.
        boundaries: Where the inputs of blocks are kept; on the device by default.
        restore_once: Whether every visit takes its block out of the slot (see `poros.engine.outside`), or only one that
            runs the block several times.
        arena: Memory for what is taken out, if the head has it at other times.
        max_graphs: How many graphs are kept; those of the batch shapes least recently used go first.
        bounded: Whether there is a budget. A block that keeps its activations doesn't do so where it can't be replayed,
            for there is no room for them beside the graphs'; it is run again instead. And where a batch outgrows the
            static memory, the graphs of smaller ones go with it.
        fuse: Whether to restore weights with Poros's own kernel where it gives the same bits.

    Attributes:
        num_recorded: Graphs recorded so far.
        record_seconds: Time that took.
        num_replays: Blocks run by replaying.
        num_eager: Blocks run again eagerly for want of a graph.
        num_without_room: Times that the card had no room for the graphs of a batch shape, or none beside those of
            others.
        buffers: Where blocks are taken out to.
        statics: What replays read and leave.
        latest_pass: Number of the forward pass that has last run a block.
    """

    def __init__(
        self,
        streamer: Streamer,
        blocks: Sequence[Sequence[Template]],
        kinds: Sequence[str],
        keeping: Collection[int] = (),
        boundaries: Boundaries | None = None,
        *,
        restore_once: bool = True,
        arena: Arena | None = None,
        max_graphs: int = MOST_GRAPHS,
        bounded: bool = False,
        fuse: bool = True,
    ) -> None:
        super().__init__(streamer, blocks, keeping, boundaries)
        self.num_recorded = 0
        self.record_seconds = 0.0
        self.num_replays = 0
        self.num_eager = 0
        self.num_without_room = 0
        self.bounded = bounded
        self.latest_pass = 0
        self._passes = 0
        self._kinds = tuple(kinds)
        self._restore_once = restore_once
        self._max_graphs = max_graphs
        self._shapes: OrderedDict[Signature, ShapeGraphs] = OrderedDict()
        self._alive: weakref.WeakSet[ShapeGraphs] = weakref.WeakSet()  # those of batches under way included
        self.buffers = Buffers(arena)
        self.statics = Statics(exact=bounded)
        self._copies = Copies(self.buffers, fuse)
        self._takings: dict[Signature, dict[int, Callable[[], None]]] = {}
        self._pool, self._taking_pool, self._chain_pool = Pool(), Pool(), Pool()
        self._given_up: set[Signature] = set()  # batch shapes without graphs, and without memory for them
        self._hooked: set[int] = set()
        self._layouts = [
            tuple((id(template.packing), self._kinds[start + position]) for position, template in enumerate(block))
            for start, block in zip(self._starts, self._blocks, strict=False)
        ]

    def key(self, block: int, slot: Slot | None = None) -> Signature:
        """What a block's graphs, in a slot or outside one, are filed under, as the block is now."""
        return (self._layouts[block], self.signature(block), None if slot is None else slot.index)

    def takes_out(self, block: int) -> Callable[[Slot], None] | None:
        """What takes a block out of its slot, if that has been recorded."""
        takings = self._takings.get(self._layouts[block], {})
        if not all(slot.index in takings for slot in self._slots_of(block)):
            return None
        return lambda slot: takings[slot.index]()

    def _slots_of(self, block: int) -> Sequence[Slot]:
        home = self._streamer.homes.get(block)
        return self._streamer.slots if home is None else (home,)

    # -- before a forward pass ----------------------------------------------------------------------------------------

    def prepare(self, hidden: Tensor, calls: Sequence[Call], training: bool, repeated: bool = False) -> Batch:
        plain = Batch.of(calls, training)
        if not training:
            return plain
        if torch.is_anomaly_enabled():
            log.warning("running eagerly: anomaly detection looks at every operation, which graphs don't show")
            return plain
        try:
            graphs = self._graphs_for(hidden, calls, repeated)
        except CannotRecordError as error:
            log.warning("running eagerly: %s", error)
            return plain
        if graphs is None:
            return plain
        if graphs.stale:
            for kind, call in zip(self._kinds, calls, strict=True):
                graphs.place(kind, call)
            self._record_missing(graphs)
        if graphs.full:
            self._given_up.add(self._shapes.popitem()[0])  # the one last used
            return plain
        self._passes += 1
        return GraphBatch(calls=plain.calls, versions=plain.versions, graphs=graphs, number=self._passes)

    def _graphs_for(self, hidden: Tensor, calls: Sequence[Call], repeated: bool) -> ShapeGraphs | None:
        """The graphs of a batch shape, empty ones for a new shape; None if it was given up."""
        by_kind = calls_by_kind(self._kinds, calls, self._starts)
        chained = bool(self.keeping) and not repeated
        restore_once = repeated or self._restore_once
        key = (
            chained,
            restore_once,
            value_signature(hidden),
            switches_signature(hidden.device),
            tuple((kind, signature) for kind, (_, signature) in by_kind.items()),
        )
        if key in self._given_up:
            return None
        if key not in self._shapes:
            needed = max(map(len, self._shapes.values()), default=0)
            while self._shapes and sum(map(len, self._shapes.values())) + needed > self._max_graphs:
                self._shapes.popitem(last=False)  # first, so that there is room for what is recorded next
            arguments = {kind: call for kind, (call, _) in by_kind.items()}
            self.statics.outgrown = False
            made = new_shape(hidden, arguments, restore_once, chained, self.statics)
            if self.bounded and self.statics.outgrown:
                self._shapes.clear()
            self._shapes[key] = made
            self._alive.add(made)
            self._renew_pools()
        self._shapes.move_to_end(key)
        return self._shapes[key]

    def _record_missing(self, graphs: ShapeGraphs) -> None:
        """Record what isn't there yet; `graphs` is full afterwards if the card has no room for it."""
        wanted: dict[Signature, list[int]] = {}
        chain: dict[int, Slot] = {}
        for block in range(len(self)):
            hook = next((signature.hook for signature in self.signature(block) if signature.hook), None)
            if hook is not None:
                if block not in self._hooked:
                    log.warning("block %d runs eagerly: a hook is registered on %s of a layer", block, hook)
                    self._hooked.add(block)
            elif graphs.chained and block in self.keeping:
                chain[block] = self._streamer.homes[block]
            elif not self._is_recorded(graphs, block):
                wanted.setdefault(self.key(block), []).append(block)
        chain_is_old = any(not self.link_is_current(graphs, block) for block in chain)
        graphs.stale = False
        if not wanted and not chain_is_old:
            return
        began = time.perf_counter()
        device = graphs.hidden.device
        surroundings = Surroundings.now(device)
        known = set(graphs.recorded)
        self._streamer.held = None  # warming up overwrites what was taken out
        self._streamer.drop_head()
        try:
            for blocks in wanted.values():
                self._record_blocks(graphs, blocks, surroundings)
            if chain_is_old:
                self._record_chain(graphs, chain, surroundings)
        except CannotRecordError as error:
            graphs.full = True
            log.warning("running eagerly: %s", error)
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            for key in set(graphs.recorded) - known:  # the others may belong to a batch that is still on its way back
                del graphs.recorded[key]
            graphs.chain.clear()
            graphs.full = not self._drop_others(graphs)
            self._renew_pools()
            self.num_without_room += 1
            if not graphs.full:
                return
            if not any(shape.recorded for shape in self._alive):
                self._takings.clear()
                self._copies.forget()
                self.statics.forget()
                self.buffers.forget()
            log.warning(
                "no room to record graphs for %s (%s); such batches run eagerly, slower and with the same numbers",
                " x ".join(map(str, graphs.hidden.shape)),
                str(error).partition(". GPU")[0],
            )
            return
        finally:
            set_rng_state(surroundings.rng, device)
            self.record_seconds += time.perf_counter() - began
        gone = self._copies.forget_old({self.key(block) for block in range(len(self))})
        for shape in self._alive:
            shape.forget(gone)
        log.info("recorded graphs for %s", tuple(graphs.hidden.shape))

    def _drop_others(self, graphs: ShapeGraphs) -> bool:
        """Make room for graphs by dropping those of other shapes; whether it is worth another try next time."""
        others = [key for key, shape in self._shapes.items() if shape is not graphs and len(shape)]
        for key in others:
            del self._shapes[key]
        again, graphs.retried = bool(others) and not graphs.retried, True
        graphs.stale = again
        return again

    def _renew_pools(self) -> None:
        """Begin new pools where no graph is left: torch takes a pool back with its last graph."""
        if not any(shape.recorded for shape in self._alive):
            self._pool = Pool()
        if not any(shape.chain for shape in self._alive):
            self._chain_pool = Pool()

    def _is_recorded(self, graphs: ShapeGraphs, block: int) -> bool:
        if self.key(block) in graphs.recorded:
            return self.takes_out(block) is not None
        return all(self.key(block, slot) in graphs.recorded for slot in self._slots_of(block))

    def _record_blocks(self, graphs: ShapeGraphs, blocks: Sequence[int], surroundings: Surroundings) -> None:
        """Record what is missing for blocks that are alike."""
        first = blocks[0]
        lot = self.key(first)
        # Open until all is recorded: a head, to whose memory blocks are taken out, comes between two visits only.
        with self._streamer.visit(first, Phase.FORWARD) as lease:
            self._streamer.drop_head()
            here = lease.slot()
            kinds = [kind for _, kind in self._layouts[first]]
            made = self._copies.get(
                lot, self._blocks[first], kinds, here, graphs.hidden, surroundings, graphs.restore_once
            )
            slots = {slot.index: slot for block in blocks for slot in self._slots_of(block)}
            if made.outside:
                takings = self._takings.setdefault(self._layouts[first], {})
                for index in slots.keys() - takings.keys():
                    taking = partial(self._take_out, made, slots[index])
                    self._warm_up(taking)
                    takings[index], _ = self._record(taking, self._taking_pool)
                if lot not in graphs.recorded:
                    take_out(made, here)  # the block's own weights, to try things with
                    graphs.recorded[lot] = self._record_block(graphs, made, None, surroundings)
                return
            for slot in slots.values():
                if self.key(first, slot) not in graphs.recorded:
                    graphs.recorded[self.key(first, slot)] = self._record_block(graphs, made, slot, surroundings)

    @staticmethod
    def _take_out(made: BlockCopy, slot: Slot) -> Results:
        take_out(made, slot)
        return []

    # -- recording ----------------------------------------------------------------------------------------------------

    def _record_block(
        self, graphs: ShapeGraphs, made: BlockCopy, slot: Slot | None, surroundings: Surroundings
    ) -> Recorded:
        def forward() -> Results:
            with made.bound(slot), torch.no_grad(), surroundings.autocasting():
                return graphs.leave([made.run(graphs.hidden, graphs.calls)])

        def backward(unused: Sequence[FusedLinear4bit] = (), how: Literal["nan", "empty"] = "empty") -> Results:
            leaf = graphs.hidden.detach().requires_grad_()
            with made.bound(slot):
                with torch.enable_grad(), surroundings.autocasting(), skipping(unused, how):
                    output = made.run(leaf, graphs.calls)
                # Recording happens inside the caller's autocast, a backward pass outside it: products that the forward
                # pass did in float32 would be differentiated in bf16.
                with torch.autocast(graphs.hidden.device.type, enabled=False):
                    wanted = [leaf, *made.adapters]
                    gradients = torch.autograd.grad(output, wanted, graphs.gradient, allow_unused=True)
            return graphs.leave(gradients)

        def trial(unused: Sequence[FusedLinear4bit]) -> Results:
            set_rng_state(surroundings.rng, graphs.hidden.device)
            results = self._warm_up(partial(backward, unused, "nan"))
            return [None if tensor is None else tensor.clone() for tensor in results]

        for static in (graphs.hidden, graphs.gradient):
            static.normal_()
        self._warm_up(forward)
        if slot is None:
            made.unused = unused_values(made.fused(), trial, made.unused)
        else:
            self._warm_up(backward)
        recompute = partial(backward, (made.unused or ()) if slot is None else ())
        replay_forward, (output,) = self._record(forward, self._pool)
        replay_backward, gradients = self._record(recompute, self._pool)
        assert output is not None
        return Recorded(made, replay_forward, output, replay_backward, gradients)

    def _record_chain(self, graphs: ShapeGraphs, homes: dict[int, Slot], surroundings: Surroundings) -> None:
        """Record the blocks that keep their activations."""
        graphs.chain.clear()
        self._renew_pools()
        links = []
        for block, home in homes.items():
            kinds = [kind for _, kind in self._layouts[block]]
            with self._streamer.visit(block, Phase.FORWARD) as lease:
                made = self._copies.another(self._blocks[block], kinds, lease.slot(), graphs.hidden, surroundings)
            live = [parameter for template in self._blocks[block] for parameter in template.loose()]
            links.append(Link(block, home, self.signature(block), made, live))
        record_chain(links, graphs, surroundings, self._warm_up, self._record, self._chain_pool)
        graphs.chain.update((link.block, link) for link in links)

    def link_is_current(self, graphs: ShapeGraphs, block: int) -> bool:
        """Whether the recorded graphs of a block that keeps its activations are of the block as it is now."""
        link = graphs.chain.get(block)
        return link is not None and link.signature == self.signature(block) and link.is_in_place()

    def _warm_up(self, run: Callable[[], Results]) -> Results:
        return warm_up(run, self._streamer.device)

    def _record(self, run: Callable[[], Results], pool: Pool) -> tuple[Callable[[], None], Results]:
        self.num_recorded += 1
        return record(run, pool, self._streamer.device)

    # -- replaying ----------------------------------------------------------------------------------------------------

    def _visit(self, block: int, lease: Lease, bindings: ExitStack) -> Visit:
        return GraphVisit(self._blocks[block], self._starts[block], lease, bindings, block, self)

    def layer_kind(self, layer: int) -> str:
        """The kind of a layer of the model."""
        return self._kinds[layer]
