"""Transfers that do their worst, to test who uses them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from poros.stream.transfer import Arrival, Piece


class Adversary:
    """A transfer that copies as late as it may and in random order, and poisons a slot the moment it is given up.

    Args:
        seed: Of the order.
        forget_waits: A broken streamer: waiting for an arrival does nothing.
    """

    def __init__(self, seed: int = 0, forget_waits: bool = False) -> None:
        self._random = random.Random(seed)
        self._pending: list[tuple[int, Sequence[Piece]]] = []
        self._forget_waits = forget_waits
        self.poisoned = 0

    def copy(self, slot: int, pieces: Sequence[Piece]) -> Arrival:
        for _, target in pieces:
            target.fill_(0xFF)  # NaN in every float format, the top code in every packed one
            self.poisoned += 1
        # What was on its way into this memory is overtaken. Slots and head may lie in the same.
        self._pending = [
            (other, ps) for other, ps in self._pending if other != slot and not _overlap(_targets(ps), _targets(pieces))
        ]
        self._pending.append((slot, pieces))
        adversary = self

        class Late:
            def wait(self) -> None:
                if not adversary._forget_waits:
                    adversary._deliver_until(slot)

        return Late()

    def _deliver_until(self, slot: int) -> None:
        self._random.shuffle(self._pending)
        while any(other == slot for other, _ in self._pending):
            _, pieces = self._pending.pop()
            for source, target in pieces:
                target.copy_(source)

    def leave(self, slot: int) -> None:
        pass

    def times(self) -> tuple[float | None, float | None]:
        return None, None

    def close(self) -> None:
        self._pending = []


class Procrastinator:
    """A transfer that copies in order, as one stream does, but late: when somebody waits, or when it catches up.

    So whatever is written into memory to which a copy is on its way is overwritten, unless the copy was waited for.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[int, Sequence[Piece]]] = []

    def catch_up(self) -> None:
        """Do everything that is pending."""
        while self._pending:
            for source, target in self._pending.pop(0)[1]:
                target.copy_(source)

    def copy(self, slot: int, pieces: Sequence[Piece]) -> Arrival:
        entry = (slot, pieces)
        self._pending.append(entry)
        procrastinator = self

        class Late:
            def wait(self) -> None:
                while any(other is entry for other in procrastinator._pending):
                    for source, target in procrastinator._pending.pop(0)[1]:
                        target.copy_(source)

        return Late()

    def leave(self, slot: int) -> None:
        pass

    def times(self) -> tuple[float | None, float | None]:
        return None, None

    def close(self) -> None:
        self._pending = []


def _targets(pieces: Sequence[Piece]) -> list[range]:
    return [range(target.data_ptr(), target.data_ptr() + target.nbytes) for _, target in pieces]


def _overlap(some: Sequence[range], others: Sequence[range]) -> bool:
    return any(one.start < other.stop and other.start < one.stop for one in some for other in others)
