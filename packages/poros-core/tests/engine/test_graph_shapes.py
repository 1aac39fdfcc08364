"""Graphs of many batch shapes: what they share, which are kept, and what happens without room."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.architecture import Architecture
from poros.engine.engine import engine_of
from poros.engine.replay import Results
from poros.plan.fit import dimensions_of
from poros.plan.graphs import graphs_kept, graphs_of_shape, graphs_taking_out
from poros.plan.job import Job
from poros.plugins import Plugins
from poros.testing.graphs import HostGraphs, backward, evaluated, gradients, models, same, step
from poros.testing.transfers import Adversary
from poros.training.batches import batch_shapes

CPU = torch.device("cpu")


def test_shapes_come_and_go(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """A shape never seen before, more shapes than are kept, masks that come and go, an evaluation in between."""
    stock, streamed, executor = models(checkpoint("gemma3", {}), plugins, families["gemma3"])
    executor._max_graphs = 16
    for rows, length in ((1, 8), (2, 8), (1, 12), (1, 8), (1, 8), (3, 5)):
        ids = torch.randint(3, 100, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        for inputs in ({}, {"attention_mask": mask}):
            assert same(step(stock, ids, **inputs), step(streamed, ids, **inputs)), (rows, length, list(inputs))
        assert torch.equal(evaluated(stock, ids), evaluated(streamed, ids))
        assert len(executor._shapes) <= 2


def test_two_shapes_in_flight(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """Two forward passes of other shapes and masks before one backward pass."""
    found = []
    stock, streamed, _ = models(checkpoint("qwen2", {}), plugins, families["qwen2"])
    for model in (stock, streamed):
        torch.manual_seed(1)
        outputs = [model(input_ids=torch.arange(3, 3 + n)[None]).logits.float().logsumexp(-1).sum() for n in (8, 12, 8)]
        sum(outputs[1:], outputs[0]).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert same(*found)


def test_evaluations_and_other_shapes_between_blocks_that_are_held(
    fusing: None, checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    stock, streamed, _ = models(checkpoint("gemma3", {}), plugins, families["gemma3"], transfer=Adversary(seed=3))
    for length in (8, 12, 8, 8, 5, 8):
        ids = torch.randint(3, 100, (1, length))
        assert same(step(stock, ids), step(streamed, ids))
        assert torch.equal(evaluated(stock, ids), evaluated(streamed, ids))
        assert same(step(stock, ids), step(streamed, ids))


def test_a_shape_that_was_given_up_while_its_batch_is_under_way(
    fusing: None, checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """Its graphs read buffers that must not be replaced meanwhile."""
    stock, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"], dropout=0.0)
    executor._max_graphs = 4
    found = []
    for model in (stock, streamed):
        losses = []
        for length in (8, 12, 9):
            executor.room = length != 12
            ids = torch.arange(3, 3 + length)[None]
            losses.append(model(input_ids=ids, labels=ids).loss)
        for index in (2, 0, 1):
            losses[index].backward()
        found.append(gradients(model))
    assert executor.num_replays > 0
    assert same(*found)


@pytest.mark.parametrize(("resident", "accumulation"), [(0, 1), ("all", 1), (2, 3)])
def test_graphs_are_given_up_before_there_are_too_many(
    resident: Any,
    accumulation: int,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest shapes go before new ones are recorded, and with the last graph of a pool the pool."""
    stock, streamed, executor = models(
        checkpoint("qwen2", {}), plugins, families["qwen2"], resident=resident, recompute=resident == 0
    )
    backward(streamed, 6)
    of_one_shape = len(next(iter(executor._shapes.values())))
    executor._max_graphs = accumulation * of_one_shape
    right, renew, alive, pools = HostGraphs._record, HostGraphs._renew_pools, [], set()
    # A replay on the host holds its shape; one on a GPU doesn't.
    monkeypatch.setattr(HostGraphs, "_renew_pools", lambda self: (gc.collect(), renew(self)))

    def record(self: HostGraphs, *args: Any) -> Any:
        alive.append(sum(map(len, self._alive)))
        pools.add(args[1])
        return right(self, *args)

    monkeypatch.setattr(HostGraphs, "_record", record)
    lengths = [8, 12, 9, 8, 16, 7]
    for start in range(0, len(lengths), accumulation):
        for model in (stock, streamed):
            model.zero_grad()
            torch.manual_seed(1)
            steps = [partial(backward, model, length) for length in lengths[start : start + accumulation]]
            [step() for step in steps] if model is stock else engine_of(model).accumulate(steps)
        assert same(gradients(stock), gradients(streamed))
    assert executor.num_replays > 0
    assert max(alive) <= max(executor._max_graphs, of_one_shape)
    assert 1 <= len(executor._shapes) <= 2 * accumulation
    assert len(pools) >= (5 if accumulation == 1 else 1)


def test_batch_shapes_share_memory_and_copies(
    fusing: None,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of many lengths come in any order, with masks of their own, and come again."""
    from poros.engine import graphs

    tried: list[int] = []
    right = graphs.unused_values

    def counting(layers: Any, differentiate: Any, likely: Any) -> Any:
        tried.append(0)

        def counted(unused: Any) -> Results:
            tried[-1] += 1
            return differentiate(unused)

        return right(layers, counted, likely)

    monkeypatch.setattr(graphs, "unused_values", counting)
    stock, streamed, executor = models(checkpoint("gemma3", {}), plugins, families["gemma3"])
    lengths = [*range(20, 3, -1), 8, 20, 5]
    sizes = set()
    for length in lengths:
        ids = torch.randint(3, 100, (2, length))
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        for inputs in ({"attention_mask": mask}, {}):
            assert same(step(stock, ids, **inputs), step(streamed, ids, **inputs)), length
        sizes.add(executor.statics.nbytes)
    assert len(executor._shapes) == 2 * len(set(lengths))
    assert len(sizes) == 1, "the longest row came first, and still more memory was taken for shorter ones"
    copies = {id(graphs_of.copy) for shape in executor._shapes.values() for graphs_of in shape.recorded.values()}
    assert len(copies) == len({key for shape in executor._shapes.values() for key in shape.recorded})
    first, later = tried[: len(copies)], tried[len(copies) :]
    assert min(first) > 2 >= max(later) > 0
    recorded = executor.num_recorded
    step(streamed, torch.randint(3, 100, (2, 12)))
    assert executor.num_recorded == recorded


def test_a_longer_row_after_shorter_ones(
    fusing: None, checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """It gets larger static memory, and the graphs of shorter ones go on using theirs."""
    stock, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"])
    for length in (4, 9, 30, 4, 9, 30, 4):
        ids = torch.randint(3, 100, (1, length))
        assert same(step(stock, ids), step(streamed, ids)), length
    assert executor.num_eager == 0
    shapes = list(executor._shapes.values())
    assert len({shape.hidden.untyped_storage().data_ptr() for shape in shapes}) == 3


def test_within_a_budget_the_graphs_of_shorter_rows_go_when_a_longer_one_comes(
    fusing: None, checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """With the memory that they used; a batch that is under way then still has them."""
    stock, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"], dropout=0.0)
    executor.bounded = True
    for length in (4, 9, 7, 9, 30, 4, 9, 30):
        ids = torch.randint(3, 100, (1, length))
        assert same(step(stock, ids), step(streamed, ids)), length
        places = {shape.hidden.untyped_storage().data_ptr() for shape in executor._shapes.values()}
        assert len(places) == 1, length
    assert [shape.hidden.shape[1] for shape in executor._shapes.values()] == [4, 9, 30]
    found = []
    for model in (stock, streamed):
        model.zero_grad()
        losses = [model(input_ids=ids, labels=ids).loss for ids in (torch.arange(3, 3 + n)[None] for n in (30, 40))]
        for loss in losses:
            loss.backward()
        found.append(gradients(model))
    assert same(*found)
    assert executor.num_eager == 0


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gemma4"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 2},
        {"slots": 3},
        {"resident": 2, "recompute": False},
        {"resident": "all"},
        {"resident": "all", "recompute": False},
    ],
)
@pytest.mark.parametrize("restore_once", [True, False])
def test_a_plan_knows_how_many_graphs_a_shape_has(
    options: dict[str, Any],
    family: str,
    restore_once: bool,
    fusing: None,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    directory = checkpoint(family, {})
    stock, streamed, executor = models(directory, plugins, families[family], **options)
    executor._restore_once = restore_once
    ids = torch.randint(3, 100, (1, 9))
    assert same(step(stock, ids), step(streamed, ids))
    stream = engine_of(streamed).config.model_copy(update={"restore_once": restore_once})
    job = Job(
        dimensions=dimensions_of(families[family], json.loads((directory / "config.json").read_text())),
        tokens=9,
        block_size=stream.block_size,
    )
    recorded = sum(map(len, executor._shapes.values()))
    assert 0 < recorded == graphs_of_shape(job, stream)
    assert sum(map(len, executor._takings.values())) == graphs_taking_out(job, stream)


def test_a_kernel_that_differs_at_some_lengths_only(
    fusing: None,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from poros.engine import copies

    monkeypatch.setattr(copies, "matches", lambda layer, rows, dtype: rows != 9)
    stock, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"])
    for length in (8, 9, 8, 12):
        ids = torch.randint(3, 100, (1, length))
        assert same(step(stock, ids), step(streamed, ids)), length
    in_slots = [any(slot is not None for _, _, slot in shape.recorded) for shape in executor._shapes.values()]
    assert sorted(in_slots) == [False, False, True]


def test_graphs_of_other_shapes_make_room(
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row longer than all before finds no room beside their graphs; the next such row does."""
    stock, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"])
    record = HostGraphs._record

    def narrow(self: HostGraphs, *args: Any) -> Any:
        self.room = len(self._shapes) < 3
        return record(self, *args)

    monkeypatch.setattr(HostGraphs, "_record", narrow)
    found = []
    for length in (8, 9, 30, 30, 8):
        ids = torch.randint(3, 100, (1, length))
        assert same(step(stock, ids), step(streamed, ids)), length
        found.append((len(executor._shapes), executor.num_without_room, executor.num_eager > 0))
    assert found == [(1, 0, False), (2, 0, False), (1, 1, True), (1, 1, True), (2, 1, True)]


@pytest.mark.parametrize("room", [True, False])
def test_a_rehearsal_says_whether_there_was_room(
    room: bool, checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    from poros.training.rehearsal import rehearse

    _, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"])
    executor.room = room
    assert rehearse(streamed, lambda inputs: streamed(**inputs).loss.backward(), 1, 8, 1) is room


def test_no_room_means_eager(
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stock, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"])
    executor.room = False
    ids = torch.randint(3, 100, (1, 8))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert same(step(stock, ids), step(streamed, ids))
    assert caplog.text.count("no room to record graphs for 1 x 8 x 64") == 1
    assert executor.num_recorded == 0
    assert (len(executor._shapes), executor.statics.nbytes) == (0, 0)
    assert not executor._alive, "static memory that nobody replays from"


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize("options", [{}, {"resident": 2, "recompute": False}, {"resident": "all", "recompute": False}])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_in_the_second_epoch_nothing_is_recorded(
    family: str,
    options: dict[str, Any],
    batch_size: int,
    fusing: None,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    """All graphs of a run's batches are there then, if as many are kept as are planned for them."""
    directory = checkpoint(family, {})
    stock, streamed, executor = models(directory, plugins, families[family], **options)
    lengths = [16, 14, 8, 7, 7, 6, 3] if batch_size == 1 else [16, 16, 14, 9, 8, 8, 7, 5, 3]
    shapes = batch_shapes(lengths, batch_size, 8)
    job = Job(
        dimensions=dimensions_of(families[family], json.loads((directory / "config.json").read_text())),
        tokens=shapes.longest * batch_size,
        rows=batch_size,
        padded=shapes.padded,
        shapes=shapes.number,
    )
    executor._max_graphs = graphs_kept(job, engine_of(streamed).config)
    recorded = []
    for _ in range(2):
        for start in range(0, len(lengths), batch_size):
            rows = lengths[start : start + batch_size]
            width = -(-max(rows) // 8) * 8
            ids = torch.randint(3, 100, (len(rows), width))
            mask = torch.tensor([[1] * length + [0] * (width - length) for length in rows])
            inputs = {"attention_mask": mask}
            assert same(step(stock, ids, **inputs), step(streamed, ids, **inputs)), rows
        recorded.append(executor.num_recorded)
    assert recorded[0] == recorded[1] > 0
    assert len(executor._shapes) == shapes.number
    assert sum(map(len, executor._shapes.values())) == executor._max_graphs


@pytest.mark.parametrize("full_first", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_mask_that_comes_moves_nothing_else(
    family: str,
    full_first: bool,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    """Within a budget, where graphs go whose memory was outgrown, those of full and of padded rows both stay."""
    stock, streamed, executor = models(checkpoint(family, {}), plugins, families[family])
    executor.bounded = True
    ids = torch.randint(3, 100, (1, 12))
    padded = torch.ones_like(ids)
    padded[0, -2:] = 0
    masks = [torch.ones_like(ids), padded]
    recorded = []
    for mask in (masks if full_first else masks[::-1]) * 2:
        assert same(step(stock, ids, attention_mask=mask), step(streamed, ids, attention_mask=mask))
        recorded.append(executor.num_recorded)
    assert recorded[1] == recorded[3] > recorded[0]
    assert len(executor._shapes) == 2
