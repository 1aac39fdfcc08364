"""The streamer carries out a schedule: it brings each block into a slot in time for its visit."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from poros.errors import StreamError
from poros.store.store import HostStore
from poros.stream.schedule import Phase, Schedule, Visit
from poros.stream.slots import Slot
from poros.stream.transfer import Arrival, Transfer


@dataclass
class StreamCounts:
    """What has travelled so far.

    Attributes:
        copies: Blocks copied into slots.
        copied_bytes: Bytes copied.
        late: Copies that were started only when the block was already needed.
        visits: Blocks visited.
        copy_seconds: Time for which the link was busy with them; None where nothing takes that time.
        stall_seconds: Time for which the computation waited for copies; None likewise.
    """

    copies: int = 0
    copied_bytes: int = 0
    late: int = 0
    visits: int = 0
    copy_seconds: float | None = None
    stall_seconds: float | None = None

    def since(self, before: StreamCounts) -> StreamCounts:
        """What has come since an earlier `Streamer.measured()`."""
        return self._with(before, operator.sub)

    def plus(self, other: StreamCounts) -> StreamCounts:
        """The sum of two."""
        return self._with(other, operator.add)

    def _with(self, other: StreamCounts, combine: Callable[[Any, Any], Any]) -> StreamCounts:
        values: Any = {}
        for name, value in vars(self).items():
            values[name] = None if value is None else combine(value, getattr(other, name) or 0)
        return StreamCounts(**values)

    def per_step(self, steps: int, s_step: float | None, link_gb_s: float | None) -> dict[str, float | None]:
        """What travelled, under the names that receipts use.

        Args:
            steps: Optimizer steps in which it did.
            s_step: Seconds of one of them.
            link_gb_s: What the link can do, from `Streamer.link_gb_s`.
        """
        if not steps:
            return {}
        copied = self.copied_bytes / steps / 1e9
        return {
            "copied_gb_per_step": copied,
            "link_gb_s": link_gb_s,
            "link_share": copied / s_step / link_gb_s if s_step and link_gb_s else None,
            "stall_s_per_step": None if self.stall_seconds is None else self.stall_seconds / steps,
        }


class Lease:
    """The right to use a block during a visit.

    Args:
        streamer: Whose block.
        block: Which.
        position: Of the visit in the schedule.
    """

    def __init__(self, streamer: Streamer, block: int, position: int) -> None:
        self._streamer = streamer
        self._block = block
        self._position = position
        self._slot: Slot | None = None

    @property
    def stamp(self) -> int:
        """A number that is another one whenever the block has been copied into its slot anew."""
        return self._streamer.stamp(self.slot())

    @property
    def held(self) -> bool:
        """Whether this block is the one that was last taken out of its slot, so that the slot isn't needed."""
        return self._streamer.held == self._block

    def slot(self) -> Slot:
        """The slot in which the block lies, its bytes arrived.

        Raises:
            StreamError: every slot is in use by a visit further out.
        """
        if self._slot is None:
            self._slot = self._streamer.take(self._block, self._position)
        return self._slot

    def hold(self, take_out: Callable[[Slot], None], release: bool = True) -> None:
        """Take everything out of the slot; it stays outside until another block is held.

        Args:
            take_out: Starts copying what is in the slot to where it will stay.
            release: Whether to give the slot back now; not if somebody goes on reading it.
        """
        slot = self.slot()
        self._streamer.held = None  # for as long as it isn't sure that all was taken out
        self._streamer.drop_head()
        take_out(slot)
        self._streamer.held = self._block
        if release:
            self.release()

    def release(self) -> None:
        """Give the slot back."""
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._streamer.give_back(slot)


class Streamer:
    """Brings blocks from a store into slots.

    Args:
        store: Where the blocks come from.
        slots: Where they go.
        transfer: How they travel.
        blocks: The slabs of each block: its layers, and one number more for a head that travels, which comes last.
        homes: Block -> the slot in which it stays for good, for blocks that are to be resident.
        head: Where the head comes to lie, if it travels. It may be the same memory as the slots' and as that to which
            blocks are taken out.

    Attributes:
        held: The block that was last taken out of its slot with `Lease.hold`, if it is still there.
        head: Number of the head among the blocks, if it travels.

    The order of visits is a forecast, not a rule: a visit that was not the forecast one (an evaluation in the middle of
    training, a forward pass that is never followed by a backward pass) moves the forecast to it, and costs at most a
    late copy.
    """

    def __init__(
        self,
        store: HostStore,
        slots: Sequence[Slot],
        transfer: Transfer,
        blocks: Sequence[Sequence[int]],
        homes: Mapping[int, Slot] | None = None,
        head: Slot | None = None,
    ) -> None:
        self.counts = StreamCounts()
        self.slots = tuple(slots)
        self.homes = dict(homes or {})
        plan = (len(blocks) - (head is not None), len(slots), frozenset(self.homes), head is not None)
        self.training = Schedule.training(*plan)
        self.inference = Schedule.inference(*plan)
        self.head = self.training.whole
        self._head = head
        self._head_arrival: Arrival | None = None
        self._stamps: dict[int, int] = {}
        self._busy = False
        self._keeping_head = False
        self._store = store
        self._transfer = transfer
        self._blocks = [tuple(block) for block in blocks]
        self._schedule = self.training
        self._contents: list[int | None] = [None] * len(slots)
        self._arrivals: list[Arrival | None] = [None] * len(slots)
        self._locked: set[int] = set()
        self._at_home: dict[int, Arrival] = {}
        self._position = 0
        self.held: int | None = None
        self._closed = False
        # No copy may still be under way when slots or store are freed.
        weakref.finalize(self, transfer.close)

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return next(iter((*self.slots, *self.homes.values()))).buffer.device

    def expect(self, schedule: Schedule) -> None:
        """Say which order of visits to expect from now on."""
        self._schedule = schedule

    @contextmanager
    def visit(self, block: int, phase: Phase) -> Iterator[Lease]:
        """Use a block: the lease gives its slot, its bytes arrived, until the visit is over or gives it back.

        Raises:
            StreamError: the streamer is closed.
        """
        if self._closed:
            raise StreamError("this model no longer streams: it was detached", "load or attach it again")
        if phase is Phase.BACKWARD:
            self._schedule = self.training  # an evaluation may have come between
        position = self._schedule.position(Visit(block, phase))
        self._position = position
        self._fill(needed=True)
        self._position = position + 1
        lease = Lease(self, block, position)
        outer, self._busy = self._busy, True
        try:
            self.counts.visits += 1
            yield lease
        finally:
            lease.release()
            self._busy = outer
            self._fill()

    @contextmanager
    def keeping_head(self) -> Iterator[None]:
        """Let nothing overwrite the head between visits to it: there will be several in a row."""
        self._keeping_head = self.head is not None
        try:
            yield
        finally:
            self._keeping_head = False
            if not self._busy:
                self._locked.clear()
            self._fill()

    def drop_head(self) -> None:
        """Something is about to be written where the head lies, or is on its way to."""
        if self._head_arrival is not None:
            # It may have been given up for a block, and still be coming.
            self._head_arrival.wait()
            self._head_arrival = None
        self._contents = [None if there is not None and there == self.head else there for there in self._contents]

    def stamp(self, slot: Slot) -> int:
        """How often something was copied into a slot."""
        return self._stamps.get(slot.index, 0)

    def close(self) -> None:
        """Stop streaming; no copy is under way afterwards."""
        if not self._closed:
            self._closed = True
            self._transfer.close()

    def forget(self) -> None:
        """Treat every slot as empty and no block as held, for when the store has changed."""
        if self._locked:
            raise StreamError("the store can't change while a block is in use")
        self._contents = [None] * len(self.slots)
        self._arrivals = [None] * len(self.slots)
        self._at_home = {}
        self.held = None

    def take(self, block: int, position: int) -> Slot:
        """Lock the slot in which a block lies, its bytes arrived; a lease does this.

        Raises:
            StreamError: every slot is in use by a visit further out.
        """
        if block in self.homes:
            return self._home(block)
        if self._keeping_head and block != self.head:
            self._locked.clear()
        if block not in self._contents:
            # It is held and wasn't expected to be needed in a slot.
            self._position, self.held = position, None
            self._fill(needed=True)
        self._position = position + 1
        if block not in self._contents:
            raise StreamError(
                f"no slot is free for block {block}: {len(self._locked)} of {len(self.slots)} are in use",
                "blocks must be visited one at a time; is the model called from within one of its own layers?",
            )
        index = self._contents.index(block)
        self._locked.update(range(len(self.slots)) if block == self.head else (index,))
        self._fill()  # start what comes next before waiting for what is needed now
        arrival = self._arrivals[index]
        if arrival is not None:
            arrival.wait()  # at every visit: another stream may be the current one by now
        if block == self.head:
            assert self._head is not None
            return self._head
        return self.slots[index]

    def give_back(self, slot: Slot) -> None:
        """Let a locked slot be written again once the computation has come this far; a lease does this."""
        if self._head is not None and slot.index == self._head.index:
            for other in self.slots:  # blocks are copied to where the head was being read
                self._transfer.leave(other.index)
            if not self._keeping_head:
                self._locked.clear()
        elif slot.index in self._locked:
            self._transfer.leave(slot.index)
            self._locked.discard(slot.index)
        self._fill()

    def measured(self) -> StreamCounts:
        """The counts, with the times of all copies and visits that are over by now.

        On a GPU, synchronise first, so that all are.
        """
        self.counts.copy_seconds, self.counts.stall_seconds = self._transfer.times()
        return replace(self.counts)

    def link_gb_s(self, copies: int = 20) -> float | None:
        """What the link can do: blocks copied back to back while nothing else runs. GB = 1e9 bytes.

        Returns:
            None where that can't be measured: on a CPU, or when every block is resident.

        Raises:
            StreamError: a block is in use.
        """
        moving = [block for block in range(len(self._blocks)) if block not in self.homes and block != self.head]
        if not moving or self.measured().copy_seconds is None:
            return None
        self.forget()
        self._transfer.close()
        before, kept = self.measured(), replace(self.counts)
        for number in range(copies):
            self._copy(moving[number % len(moving)], self.slots[0])
        self._transfer.close()
        taken = self.measured().since(before)
        self.counts.copies, self.counts.copied_bytes = kept.copies, kept.copied_bytes
        return taken.copied_bytes / 1e9 / taken.copy_seconds if taken.copy_seconds else None

    def _home(self, block: int) -> Slot:
        """The slot of a resident block, which is brought there at its first visit."""
        home = self.homes[block]
        if block not in self._at_home:
            self._transfer.leave(home.index)  # what was there before may still be in use
            self._at_home[block] = self._copy(block, home)
        self._at_home[block].wait()
        return home

    def _fill(self, needed: bool = False) -> None:
        """Start every copy that may start; `needed` says that the block at the position is being visited."""
        while True:
            copy = self._schedule.next_copy(self._position, self._contents, self._locked, self.held, self._busy)
            if copy is None:
                return
            coming = self._schedule.after(copy, self._contents)
            target = self.slots[copy.slot]
            if copy.block == self.head:
                assert self._head is not None
                target, self.held = self._head, None
                self._transfer.leave(target.index)  # after everything that has been issued so far
            # Empty until the copy has been started: if that fails, nobody may take what is there for the block.
            self._contents = [None if there == copy.block else there for there in coming]
            arrival = self._copy(copy.block, target)
            if copy.block == self.head:
                self._head_arrival = arrival
            for slot in range(len(self.slots)):
                self._arrivals[slot] = arrival if coming[slot] == copy.block else self._arrivals[slot]
            self._contents = coming
            self.counts.late += needed and copy.ahead == 0

    def _copy(self, block: int, slot: Slot) -> Arrival:
        pieces = []
        offset = 0
        for layer in self._blocks[block]:
            slab = self._store.slab(layer)
            pieces.append((slab, slot.buffer[offset : offset + slab.numel()]))
            offset += slab.numel()
        arrival = self._transfer.copy(slot.index, pieces)
        self._stamps[slot.index] = self._stamps.get(slot.index, 0) + 1
        self.counts.copies += 1
        self.counts.copied_bytes += offset
        return arrival
