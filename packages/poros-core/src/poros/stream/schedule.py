"""The order in which blocks are visited, and the copies that order needs. Pure and torch-free.

A training step visits blocks 0..L-1 forward and L-1..0 backward, and the next step does the same again, so the future
is always known. That makes the best replacement rule usable as it stands: when a slot is needed, give up the block
whose next visit is farthest away (Belady, 1966), and copy ahead as soon as some slot holds a block that is needed later
than the next missing one. At the two turns of the cycle the last blocks are still in their slots, so with `k` slots a
training step of `L` blocks costs `2L - 2k` copies, which is the optimum.

    >>> Schedule.training(num_blocks=4, num_slots=2).copies_per_period()
    4

A visit that takes what it needs out of its slot at once (it restores the weights into a buffer of their own) gives the
slot back there and then, and *holds* its block until the next visit takes something out. At the two turns the next
visit is of the same block and needs no slot. That saves no copy, but the next one can start before the turn is over.

The head of a model may travel too. It is larger than a block and is needed when no block is, so it takes the place of
all slots and of what was taken out of them: it comes when the last block's visit is over, and whatever comes after it
overwrites it. In the schedule it is the *whole* block, visited at the turn.

    >>> Schedule.training(num_blocks=4, num_slots=2, head=True).copies_per_period()
    7
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Phase(Enum):
    """The direction of a visit."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Visit:
    """One use of a block: run it forward, or rebuild it and run it backward."""

    block: int
    phase: Phase


@dataclass(frozen=True)
class Copy:
    """A copy to start: which block goes into which slot, and how many visits ahead it is needed (0: it is late)."""

    block: int
    slot: int
    ahead: int


@dataclass(frozen=True)
class Schedule:
    """A period of visits that repeats for ever, and the number of slots it may use.

    Attributes:
        visits: One period. Each (block, phase) occurs at most once in it.
        num_slots: How many of the other blocks fit on the device at a time.
        resident: Blocks that are on the device anyway.
        whole: A block that takes all slots at once.
    """

    visits: tuple[Visit, ...]
    num_slots: int
    resident: frozenset[int] = frozenset()
    whole: int | None = None

    def __post_init__(self) -> None:
        if not self.visits:
            raise ValueError("a schedule needs at least one visit")
        if self.num_slots < 1 and not self.resident.issuperset(visit.block for visit in self.visits):
            raise ValueError(f"a schedule needs at least one slot, not {self.num_slots}")

    @classmethod
    def training(
        cls, num_blocks: int, num_slots: int, resident: frozenset[int] = frozenset(), head: bool = False
    ) -> Schedule:
        """Forward through all blocks and backward through them in reverse; the head is block number `num_blocks`."""
        forward = tuple(Visit(block, Phase.FORWARD) for block in range(num_blocks + head))
        backward = tuple(Visit(block, Phase.BACKWARD) for block in reversed(range(num_blocks + head)))
        return cls(forward + backward, num_slots, resident, num_blocks if head else None)

    @classmethod
    def inference(
        cls, num_blocks: int, num_slots: int, resident: frozenset[int] = frozenset(), head: bool = False
    ) -> Schedule:
        """Forward through all blocks, again and again."""
        visits = tuple(Visit(block, Phase.FORWARD) for block in range(num_blocks + head))
        return cls(visits, num_slots, resident, num_blocks if head else None)

    @cached_property
    def _position(self) -> dict[Visit, int]:
        return {visit: position for position, visit in enumerate(self.visits)}

    @cached_property
    def _uses(self) -> dict[int, list[int]]:
        uses: dict[int, list[int]] = {}
        for position, visit in enumerate(self.visits):
            uses.setdefault(visit.block, []).append(position)
        return uses

    def position(self, visit: Visit) -> int:
        """Where a visit stands in the period."""
        return self._position[visit]

    def distance(self, block: int, position: int) -> int:
        """How many visits after `position` the block is next visited; 0 when the visit at `position` is its own."""
        return min((use - position) % len(self.visits) for use in self._uses[block])

    def next_copy(
        self,
        position: int,
        contents: Sequence[int | None],
        locked: Collection[int] = (),
        held: int | None = None,
        busy: bool = False,
    ) -> Copy | None:
        """The copy worth starting now, or None when nothing is missing or nothing may be given up for it.

        Args:
            position: The next visit that has not begun (taken modulo the period).
            contents: The block in each slot, or on its way there; None for an empty slot. The whole block is in all.
            locked: Slots whose block is being used.
            held: The block that was taken out of its slot last; visits to it that come before any other need no slot.
            busy: Whether a block is being visited, from its slot or outside it.
        """
        skipped = 0
        while skipped < len(self.visits) and self.visits[(position + skipped) % len(self.visits)].block == held:
            skipped += 1
        position = (position + skipped) % len(self.visits)
        present = self.resident.union(block for block in contents if block is not None)
        missing = next(
            (
                (visit.block, ahead)
                for ahead in range(len(self.visits))
                if (visit := self.visits[(position + ahead) % len(self.visits)]).block not in present
            ),
            None,
        )
        if missing is None:
            return None
        block, ahead = missing
        if block == self.whole:
            # Not before the visits that come first: they need their slots, or what was taken out of them.
            return None if busy or locked or ahead or skipped else Copy(block, 0, 0)
        best: tuple[int, int] | None = None
        for slot, there in enumerate(contents):
            if slot in locked:
                continue
            until = len(self.visits) + 1 if there is None else self.distance(there, position)
            if until > ahead and (best is None or until > best[0]):
                best = (until, slot)
        return None if best is None else Copy(block, best[1], ahead + skipped)

    def after(self, copy: Copy, contents: Sequence[int | None]) -> list[int | None]:
        """What is in the slots once a copy has been started."""
        if copy.block == self.whole:
            return [copy.block] * len(contents)
        kept = [None if there == self.whole else there for there in contents]
        kept[copy.slot] = copy.block
        return kept

    def copies(self, periods: int = 1, holding: bool = False) -> list[list[Copy]]:
        """Play the schedule through from empty slots and list the copies of each period.

        Args:
            periods: How many periods to play.
            holding: Whether each visit takes its block out of the slot.
        """
        slots: list[int | None] = [None] * self.num_slots
        held: int | None = None
        played = []
        for _ in range(periods):
            started: list[Copy] = []

            def start(at: int, locked: Collection[int], busy: bool, started: list[Copy] = started) -> None:
                nonlocal slots, held
                while (copy := self.next_copy(at, slots, locked, held, busy)) is not None:
                    slots = self.after(copy, slots)
                    held = None if copy.block == self.whole else held
                    started.append(copy)

            for position, visit in enumerate(self.visits):
                locked: Collection[int] = ()
                if visit.block != held:
                    start(position, (), False)
                    held = visit.block if holding and visit.block != self.whole else None
                    if visit.block == self.whole:
                        locked = range(self.num_slots)
                    elif not holding and visit.block not in self.resident:
                        locked = (slots.index(visit.block),)
                start(position + 1, locked, True)
                start(position + 1, (), False)
            played.append(started)
        return played

    def copies_per_period(self, holding: bool = False) -> int:
        """Copies of one period in the steady state."""
        return len(self.copies(3, holding)[-1])


def evenly_spread(count: int, num_blocks: int) -> frozenset[int]:
    """Which blocks to keep on the device, if it is to be `count` of them.

    Evenly, so that between any two of them the same number of copies has the same time to hide in.

        >>> sorted(evenly_spread(2, 8))
        [2, 6]
    """
    count = min(count, num_blocks)
    return frozenset((2 * index + 1) * num_blocks // (2 * count) for index in range(count))
