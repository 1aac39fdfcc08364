"""Graphs of blocks that keep their activations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.architecture import Architecture
from poros.engine.attention import attention_path
from poros.engine.engine import engine_of
from poros.engine.executor import Visit
from poros.engine.parts import DecoderParts
from poros.parity.stock import Work, train
from poros.parity.surfaces import compare
from poros.plugins import Plugins
from poros.testing.graphs import gradients, models, same, step

CPU = torch.device("cpu")


@pytest.mark.parametrize("resident", [1, 2, 3, "all"])
@pytest.mark.parametrize("older_first", [True, False])
def test_two_passes_with_masks_of_their_own_over_kept_blocks(
    resident: Any,
    older_first: bool,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    """The recompute of the older pass places its own arguments where the newer pass's graphs read theirs."""
    stock, streamed, executor = models(
        checkpoint("qwen2", {}), plugins, families["qwen2"], dropout=0.0, resident=resident, recompute=False
    )
    ids = torch.randint(3, 100, (2, 10))
    found = []
    for model in (stock, streamed):
        losses = []
        for number in (1, 2):
            mask = torch.ones_like(ids)
            mask[1, 10 - 3 * number :] = 0
            positions = (torch.arange(10) * number)[None].expand(2, -1)
            losses.append(model(input_ids=ids, labels=ids, attention_mask=mask, position_ids=positions).loss)
        for loss in losses if older_first else losses[::-1]:
            loss.backward()
        found.append(gradients(model))
    assert any(shape.chain for shape in executor._shapes.values())
    assert same(*found)


@pytest.mark.parametrize("why", ["no room", "not recordable"])
def test_within_a_plan_nothing_is_kept_beside_the_graphs(
    why: str,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block whose activations no graph keeps is run again, with the same numbers."""
    stock, streamed, executor = models(
        checkpoint("qwen2", {}), plugins, families["qwen2"], resident="all", recompute=False
    )
    monkeypatch.setattr(Visit, "forward_keeping", lambda *args: pytest.fail("activations were kept eagerly"))
    executor.bounded = True
    inputs = {"unknown": object()} if why == "not recordable" else {}
    ids = torch.randint(3, 100, (1, 8))
    for room in (False, True):
        executor.room = room
        assert same(step(stock, ids, **inputs), step(streamed, ids, **inputs))
    assert executor.num_without_room == (why == "no room")


def test_kept_graphs_that_are_gone_when_they_are_wanted(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """Adapters were moved between forward and backward, and there was no room to record them anew."""
    stock, streamed, executor = models(
        checkpoint("qwen2", {}), plugins, families["qwen2"], dropout=0.0, resident="all", recompute=False
    )
    ids = torch.randint(3, 100, (1, 8))
    first = streamed(input_ids=ids, labels=ids).loss
    for parameter in streamed.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.clone()
    executor.room = False
    second = streamed(input_ids=ids, labels=ids).loss
    first.backward()
    second.backward()
    for _ in range(2):
        stock(input_ids=ids, labels=ids).loss.backward()
    assert same(gradients(stock), gradients(streamed))


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize(
    ("resident", "block_size", "accumulation"), [("all", 1, 1), (2, 1, 2), ("all", 3, 2), (1, 2, 1)]
)
def test_kept_activations(
    family: str,
    resident: Any,
    block_size: int,
    accumulation: int,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    architecture = families[family]
    work = Work(steps=3, length=16, accumulation=accumulation, learning_rate=1e-2)
    stock, streamed, executor = models(
        checkpoint(family, {}), plugins, architecture, resident=resident, recompute=False, block_size=block_size
    )
    engine = engine_of(streamed)
    with attention_path("fused"):
        one = train(stock, DecoderParts.of(stock, architecture).layers, work, CPU)
        other = train(streamed, DecoderParts.of(streamed, architecture).layers, work, CPU, accumulate=engine.accumulate)
    result = compare(one, other, engine.blocks)
    assert result.identical, str(result.difference)
    chained = [shape for shape in executor._shapes.values() if shape.chain]
    assert bool(chained) is (accumulation == 1 or resident == "all")
    for shape in chained:
        assert set(shape.chain) == executor.keeping


def test_kept_activations_of_a_pass_that_was_overtaken(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """There is room for one pass. An older one is run again instead; so is one whose adapters were moved."""
    found = []
    stock, streamed, _ = models(checkpoint("qwen2", {}), plugins, families["qwen2"], resident="all", recompute=False)
    for model in (stock, streamed):
        grown = []
        for lengths in ((8, 8), (8, 12, 8), (12, 8)):
            model.zero_grad()
            torch.manual_seed(1)
            outputs = [
                model(input_ids=torch.arange(3, 3 + n)[None]).logits.float().logsumexp(-1).sum() for n in lengths
            ]
            sum(outputs[1:], outputs[0]).backward()
            grown += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data * 2
        for _ in range(2):
            grown += step(model, torch.arange(3, 11)[None])
        found.append(grown)
    assert same(*found)
