"""The streamer under an adversarial transfer: copies late and out of order, freed slots full of NaN."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import poros
from poros.architecture import Architecture
from poros.config import LoraPart
from poros.engine.adapters import lora_config
from poros.engine.attention import attention_path
from poros.engine.engine import engine_of
from poros.engine.parts import DecoderParts
from poros.errors import StreamError
from poros.parity.stock import Work, load_stock, make_adapters_count, train
from poros.parity.surfaces import compare
from poros.plugins import Plugins
from poros.store.tiers import PageableStore
from poros.stream.schedule import Phase, evenly_spread
from poros.stream.slots import Slot, make_slots
from poros.stream.streamer import StreamCounts, Streamer
from poros.stream.transfer import Arrival, HostTransfer, Piece, Spans
from poros.testing.transfers import Adversary

CPU = torch.device("cpu")


def losses(
    family: str,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    transfer: Adversary,
    slots: int,
    block_size: int,
) -> bool:
    lora = lora_config(LoraPart(rank=4, dropout=0.1))
    work = Work(steps=5, length=16, accumulation=2, learning_rate=1e-2)
    directory = checkpoint(family, {})
    models = (
        load_stock(directory, lora, 0, CPU),
        poros.load(
            directory,
            lora=lora,
            seed=0,
            slots=slots,
            block_size=block_size,
            device="cpu",
            plugins=plugins,
            transfer=transfer,
        ),
    )
    traces = []
    for model in models:
        make_adapters_count(model, 0)
        with attention_path("fused"):
            traces.append(train(model, DecoderParts.of(model, families[family]).layers, work, CPU))
    return compare(*traces, engine_of(models[1]).blocks).identical


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize(("slots", "block_size"), [(1, 1), (2, 1), (3, 1), (5, 1), (2, 2)])
def test_no_poison_reaches_a_result(
    family: str,
    slots: int,
    block_size: int,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    adversary = Adversary(seed=slots)
    assert losses(family, checkpoint, families, plugins, adversary, slots, block_size)
    assert adversary.poisoned > 0


def test_the_adversary_catches_a_streamer_that_does_not_wait(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    assert not losses("qwen2", checkpoint, families, plugins, Adversary(forget_waits=True), 2, 1)


@pytest.fixture
def streamer() -> Streamer:
    store = PageableStore([8] * 4)
    for layer in range(4):
        store.slab(layer).fill_(layer + 1)
    return Streamer(store, make_slots([8, 8], CPU), HostTransfer(), [(0,), (1,), (2,), (3,)])


def step(streamer: Streamer) -> None:
    for phase, blocks in ((Phase.FORWARD, range(4)), (Phase.BACKWARD, reversed(range(4)))):
        for block in blocks:
            with streamer.visit(block, phase) as lease:
                assert lease.slot().buffer.unique().tolist() == [block + 1]


def test_copies_per_step_are_the_schedules_optimum(streamer: Streamer) -> None:
    step(streamer)
    for _ in range(3):
        before = streamer.counts.copies
        step(streamer)
        assert streamer.counts.copies - before == 2 * 4 - 2 * 2 == streamer.training.copies_per_period()
    assert streamer.counts.copied_bytes == 8 * streamer.counts.copies
    assert streamer.counts.late == 1  # only the very first


def test_a_slot_is_handed_back_after_its_visit_and_not_written_before(streamer: Streamer) -> None:
    """On a GPU, handing back is the event that the next copy into the slot waits for."""
    events: list[tuple[str, int]] = []

    class Spy(HostTransfer):
        def copy(self, slot: int, pieces: Sequence[Piece]) -> Arrival:
            events.append(("copy", slot))
            return super().copy(slot, pieces)

        def leave(self, slot: int) -> None:
            events.append(("leave", slot))

    streamer._transfer = Spy()
    for _ in range(3):
        for phase, blocks in ((Phase.FORWARD, range(4)), (Phase.BACKWARD, reversed(range(4)))):
            for block in blocks:
                with streamer.visit(block, phase) as lease:
                    events.append(("use", lease.slot().index))
    for index in (0, 1):
        mine = [what for what, slot in events if slot == index]
        assert "use" in mine
        for what, following in itertools.pairwise(mine):
            assert (what, following) in {("copy", "use"), ("use", "leave"), ("leave", "use"), ("leave", "copy")}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_resident_blocks_travel_once(count: int) -> None:
    store = PageableStore([8] * 4)
    for layer in range(4):
        store.slab(layer).fill_(layer + 1)
    slots = make_slots([8] * (2 + count), CPU)
    moving = slots[:2] if count < 4 else ()
    homes = dict(zip(sorted(evenly_spread(count, 4)), slots[2:], strict=True))
    streamer = Streamer(store, moving, HostTransfer(), [(0,), (1,), (2,), (3,)], homes)
    step(streamer)
    before = streamer.measured()
    step(streamer)
    assert streamer.measured().since(before).copies == (0 if count == 4 else 2 * (4 - count) - 2 * min(2, 4 - count))
    store.slab(sorted(homes)[0]).add_(100)  # a change in the store comes through only when it is announced
    step(streamer)
    streamer.forget()
    with streamer.visit(sorted(homes)[0], Phase.FORWARD) as lease:
        assert lease.slot().buffer.unique().tolist() == [sorted(homes)[0] + 101]


class Event:
    """An event on a made-up GPU that is done when its time has come."""

    now = 0.0
    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.at = 0.0

    def record(self, stream: list[float]) -> None:
        self.at = stream[0]

    def query(self) -> bool:
        return self.at <= Event.now

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_spans_are_added_up_when_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "now", 0.0)
    monkeypatch.setattr(Event, "made", 0)
    spans, stream = Spans(Event), [0.0]
    for number in range(5):
        with spans.measured(stream):
            stream[0] += 100.0  # milliseconds
        stream[0] += 50.0
        Event.now = stream[0] if number < 3 else Event.now
    assert spans.seconds() == pytest.approx(0.3)
    Event.now = stream[0]
    assert spans.seconds() == pytest.approx(0.5)
    for _ in range(3):
        with spans.measured(stream):
            stream[0] += 1.0
    assert Event.made == 10  # events are used again


def test_events_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may ever ask for the times."""
    monkeypatch.setattr(Event, "now", 1e9)
    monkeypatch.setattr(Event, "made", 0)
    spans, stream = Spans(Event), [0.0]
    for _ in range(5000):
        with spans.measured(stream):
            stream[0] += 1.0
    assert Event.made < 1000
    assert spans.seconds() == pytest.approx(5.0)


def test_counts_per_step() -> None:
    before = StreamCounts(copies=2, copied_bytes=10**9, stall_seconds=1.0, copy_seconds=1.0)
    after = StreamCounts(copies=6, copied_bytes=5 * 10**9, stall_seconds=1.5, copy_seconds=2.0)
    assert after.since(before).plus(before) == after
    fields = after.since(before).per_step(steps=2, s_step=0.1, link_gb_s=40.0)
    assert fields == {"copied_gb_per_step": 2.0, "link_gb_s": 40.0, "link_share": 0.5, "stall_s_per_step": 0.25}
    assert StreamCounts().per_step(steps=0, s_step=None, link_gb_s=None) == {}
    on_cpu = StreamCounts(copied_bytes=10**9).since(StreamCounts()).per_step(1, 0.1, None)
    assert on_cpu["stall_s_per_step"] is on_cpu["link_share"] is None


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_block_that_is_taken_out_gives_its_slot_back_at_once(slots: int) -> None:
    store = PageableStore([8] * 6)
    for layer in range(6):
        store.slab(layer).fill_(layer + 1)
    streamer = Streamer(store, make_slots([8] * slots, CPU), HostTransfer(), [(layer,) for layer in range(6)])
    outside = torch.zeros(8, dtype=torch.uint8)

    def visit(block: int, phase: Phase) -> None:
        with streamer.visit(block, phase) as lease:
            if not lease.held:
                lease.hold(lambda slot: outside.copy_(slot.buffer))
            assert outside.unique().tolist() == [block + 1]

    for _ in range(4):
        before = streamer.counts.copies
        for phase, blocks in ((Phase.FORWARD, range(6)), (Phase.BACKWARD, reversed(range(6)))):
            for block in blocks:
                visit(block, phase)
    assert streamer.counts.copies - before == 2 * 6 - 2 * slots == streamer.training.copies_per_period(holding=True)
    assert streamer.counts.late == 1  # only the very first; with one slot too, the next copy starts in good time
    streamer.forget()
    store.slab(0).add_(100)
    with streamer.visit(0, Phase.FORWARD) as lease:
        assert not lease.held
        assert lease.slot().buffer.unique().tolist() == [101]


def test_taking_out_that_is_interrupted_holds_nothing(streamer: Streamer) -> None:
    """The buffers may hold half of either block then."""

    def interrupt(slot: Slot) -> None:
        raise KeyboardInterrupt

    with streamer.visit(0, Phase.FORWARD) as lease:
        lease.hold(lambda slot: None)
        assert lease.held
    with pytest.raises(KeyboardInterrupt), streamer.visit(1, Phase.FORWARD) as lease:
        lease.hold(interrupt)
    assert streamer.held is None
    step(streamer)


def test_a_held_block_that_is_wanted_in_a_slot_after_all(streamer: Streamer) -> None:
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for block in range(4):
            with streamer.visit(block, phase) as lease:
                lease.hold(lambda slot: None)
            with streamer.visit(block, phase) as lease:
                assert lease.held
                assert lease.slot().buffer.unique().tolist() == [block + 1]
    step(streamer)


def test_an_evaluation_in_the_middle_only_costs_copies(streamer: Streamer) -> None:
    step(streamer)
    streamer.expect(streamer.inference)
    for block in range(4):
        with streamer.visit(block, Phase.FORWARD) as lease:
            assert lease.slot().buffer.unique().tolist() == [block + 1]
    streamer.expect(streamer.training)
    step(streamer)


def test_visits_in_any_order_are_right(streamer: Streamer) -> None:
    order = random.Random(0)
    for _ in range(100):
        block = order.randrange(4)
        with streamer.visit(block, order.choice(list(Phase))) as lease:
            assert lease.slot().buffer.unique().tolist() == [block + 1]


def test_more_visits_at_a_time_than_slots_are_refused(streamer: Streamer) -> None:
    with (
        streamer.visit(0, Phase.FORWARD) as first,
        streamer.visit(1, Phase.FORWARD) as second,
        streamer.visit(2, Phase.FORWARD) as third,
    ):
        assert first.slot() is not second.slot()
        with pytest.raises(StreamError, match="no slot is free for block 2"):
            third.slot()
    step(streamer)


def test_a_copy_that_fails_leaves_an_empty_slot(streamer: Streamer) -> None:
    """An interrupted copy must not pass for the block the next time."""
    step(streamer)
    right = streamer._transfer.copy

    def interrupt(slot: int, pieces: Sequence[Piece]) -> Arrival:
        pieces[0][1].fill_(0xFF)
        raise KeyboardInterrupt

    streamer._transfer.copy = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        step(streamer)
    streamer._transfer.copy = right  # type: ignore[method-assign]
    step(streamer)
    step(streamer)


def test_a_visit_that_fails_gives_its_slot_back(streamer: Streamer) -> None:
    for _ in range(5):
        with pytest.raises(RuntimeError, match="boom"), streamer.visit(1, Phase.FORWARD) as lease:
            lease.slot()
            raise RuntimeError("boom")
    step(streamer)


def test_closed_means_closed(streamer: Streamer) -> None:
    streamer.close()
    streamer.close()
    with pytest.raises(StreamError, match="no longer streams"), streamer.visit(0, Phase.FORWARD):
        pass
