"""The schedule: correct, optimal, and torch-free."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import cache

import pytest

from poros.stream.schedule import Copy, Phase, Schedule, Visit, evenly_spread


def play(schedule: Schedule, periods: int) -> list[list[Copy]]:
    """Play a schedule and check at each visit that the block is there."""
    slots: list[int | None] = [None] * schedule.num_slots
    played = []
    for _ in range(periods):
        started: list[Copy] = []
        for position, visit in enumerate(schedule.visits):
            for locked in ((), None):
                at = position if locked is not None else position + 1
                held = () if locked is not None else (slots.index(visit.block),)
                while (copy := schedule.next_copy(at, slots, held)) is not None:
                    assert copy.slot not in held
                    assert copy.block not in slots
                    slots[copy.slot] = copy.block
                    started.append(copy)
                assert visit.block in slots
        played.append(started)
    return played


def fewest_copies(visits: tuple[int, ...], num_slots: int) -> int:
    """The fewest copies for a sequence of visits, found by trying every choice."""

    @cache
    def best(position: int, held: frozenset[int]) -> int:
        if position == len(visits):
            return 0
        block = visits[position]
        if block in held:
            return best(position + 1, held)
        if len(held) < num_slots:
            return 1 + best(position + 1, held | {block})
        return 1 + min(best(position + 1, (held - {victim}) | {block}) for victim in held)

    return best(0, frozenset())


@pytest.mark.parametrize("num_blocks", range(1, 8))
@pytest.mark.parametrize("num_slots", range(1, 9))
def test_training_needs_2l_minus_2k_copies(num_blocks: int, num_slots: int) -> None:
    schedule = Schedule.training(num_blocks, min(num_slots, num_blocks))
    copies = [len(started) for started in play(schedule, 4)]
    assert copies[1:] == [max(0, 2 * num_blocks - 2 * num_slots)] * 3
    assert schedule.copies_per_period() == copies[-1]


@pytest.mark.parametrize("num_blocks", range(1, 6))
@pytest.mark.parametrize("num_slots", range(1, 5))
def test_no_choice_needs_fewer_copies(num_blocks: int, num_slots: int) -> None:
    schedule = Schedule.training(num_blocks, num_slots)
    periods = 3
    ours = sum(len(started) for started in play(schedule, periods))
    # Copying ahead at the end already serves the next period, which the exhaustive search doesn't see.
    ahead = num_slots - 1
    assert ours <= fewest_copies(tuple(v.block for v in schedule.visits) * periods, num_slots) + ahead


@pytest.mark.parametrize("num_blocks", range(1, 8))
@pytest.mark.parametrize("num_slots", range(1, 9))
def test_inference_copies_each_block_at_most_once_a_pass(num_blocks: int, num_slots: int) -> None:
    """Fewer would be possible only by not copying ahead, which costs more time than the copies do."""
    copies = [len(started) for started in play(Schedule.inference(num_blocks, min(num_slots, num_blocks)), 4)]
    assert copies[-1] <= (0 if num_slots >= num_blocks else num_blocks)


def test_copies_ahead_while_a_block_is_in_use() -> None:
    schedule = Schedule.training(4, 2)
    assert schedule.next_copy(1, [0, None], locked=[0]) == Copy(block=1, slot=1, ahead=0)
    # Block 1 is in use and 0 is done with: 2 takes its place while 1 runs.
    assert schedule.next_copy(2, [0, 1], locked=[1]) == Copy(block=2, slot=0, ahead=0)
    # At the turn both last blocks stay: nothing may be given up for block 1.
    assert schedule.next_copy(4, [2, 3], locked=[1]) is None


def test_a_locked_slot_is_never_given_up() -> None:
    assert Schedule.training(3, 1).next_copy(1, [0], locked=[0]) is None


def test_positions() -> None:
    schedule = Schedule.training(3, 1)
    assert schedule.position(Visit(0, Phase.FORWARD)) == 0
    assert schedule.position(Visit(0, Phase.BACKWARD)) == 5
    assert schedule.distance(0, 1) == 4


@pytest.mark.parametrize(("visits", "slots"), [((), 1), ((Visit(0, Phase.FORWARD),), 0)])
def test_nonsense_is_refused(visits: tuple[Visit, ...], slots: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Schedule(visits, slots)


def test_imports_no_torch() -> None:
    code = "import sys, poros.stream.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_resident_blocks_are_never_copied(num_blocks: int, slots: int) -> None:
    for count in {0, 1, num_blocks // 2, num_blocks - 1, num_blocks}:
        resident = evenly_spread(count, num_blocks)
        assert len(resident) == count
        moving = num_blocks - count
        schedule = Schedule.training(num_blocks, slots if moving else 0, resident)
        copies = [copy for period in schedule.copies(periods=3) for copy in period]
        assert resident.isdisjoint(copy.block for copy in copies)
        assert schedule.copies_per_period() == 2 * moving - 2 * min(slots, moving)


def test_resident_blocks_are_evenly_spread() -> None:
    for num_blocks in (7, 64, 80):
        for count in range(1, num_blocks + 1):
            places = sorted(evenly_spread(count, num_blocks))
            gaps = [after - before for before, after in itertools.pairwise(places)]
            assert max(gaps, default=0) - min(gaps, default=0) <= 1
    assert evenly_spread(9, 4) == {0, 1, 2, 3}


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_holding_costs_no_copy(num_blocks: int, slots: int) -> None:
    schedule = Schedule.training(num_blocks, slots)
    optimum = 2 * num_blocks - 2 * min(slots, num_blocks)
    assert schedule.copies_per_period() == schedule.copies_per_period(holding=True) == optimum


def test_holding_lets_a_copy_start_at_the_turn() -> None:
    """Block 3 is held from its forward to its backward visit, so block 1 can be on its way meanwhile."""
    schedule = Schedule.training(num_blocks=4, num_slots=2)
    assert schedule.next_copy(4, [2, 3], locked=(1,)) is None
    assert schedule.next_copy(4, [2, 3], held=3) == Copy(block=1, slot=1, ahead=2)


@pytest.mark.parametrize("num_blocks", range(1, 8))
@pytest.mark.parametrize("num_slots", range(1, 5))
@pytest.mark.parametrize("holding", [False, True])
@pytest.mark.parametrize("resident", [0, 2])
def test_a_head_costs_one_copy_and_what_the_upper_turn_would_have_kept(
    num_blocks: int, num_slots: int, holding: bool, resident: int
) -> None:
    at_home = evenly_spread(resident, num_blocks)
    moving = num_blocks - len(at_home)
    if moving < num_slots:
        return
    schedule = Schedule.training(num_blocks, num_slots, at_home, head=True)
    played = schedule.copies(4, holding)
    kept = min(num_slots, moving)
    heads = [sum(copy.block == num_blocks for copy in started) for started in played]
    blocks = [sum(copy.block != num_blocks for copy in started) for started in played]
    assert heads == [1] * 4
    assert blocks[1:] == [2 * moving - kept] * 3


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_the_head_waits_for_the_last_block_and_is_overwritten_after_its_own_visits(num_slots: int) -> None:
    schedule = Schedule.training(3, num_slots, head=True)
    head = 3
    last = schedule.position(Visit(2, Phase.FORWARD))
    contents: list[int | None] = [2, 1, 0][:num_slots]
    assert schedule.whole == head
    assert schedule.next_copy(last, contents) is None or schedule.next_copy(last, contents).block != head  # type: ignore[union-attr]
    assert schedule.next_copy(last + 1, contents, busy=True) is None
    assert schedule.next_copy(last + 1, contents, locked=(0,)) is None
    found = schedule.next_copy(last + 1, contents)
    assert found == Copy(head, 0, 0)
    assert schedule.after(found, contents) == [head] * num_slots
    after = schedule.next_copy(last + 3, [head] * num_slots)
    assert after is not None and after.block == 2
    assert schedule.after(after, [head] * num_slots).count(head) == 0
