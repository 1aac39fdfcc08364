"""What must be equal for a recorded graph to serve, and when that is looked up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from poros.architecture import Architecture
from poros.engine.engine import engine_of
from poros.engine.signature import LayerWatch
from poros.plugins import Plugins
from poros.testing.graphs import models, step


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.eval(),
        lambda one: setattr(one[1], "p", 0.5),
        lambda one: one[0].weight.requires_grad_(False),
        lambda one: one.append(nn.Identity()),
        lambda one: one[0].register_forward_hook(lambda *_: None),
        lambda one: one[0].double(),
    ],
)
def test_changes_are_seen(change: Callable[[Any], Any]) -> None:
    one = layer()
    watch = LayerWatch(one)
    before = watch.signature()
    assert watch.signature() is before
    change(one)
    assert watch.signature() is not before


def test_while_a_layer_is_held_it_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    right = LayerWatch._look
    monkeypatch.setattr(LayerWatch, "_look", lambda self: (looks.append(self), right(self))[1])
    one = layer()
    watch = LayerWatch(one)
    before = watch.signature()
    looks.clear()
    watch.hold(True)
    assert {watch.signature(), watch.signature()} == {before}
    assert len(watch.parameters()) == 2
    assert len(looks) == 1
    watch.hold(False)
    one.eval()
    assert watch.signature() is not before
    watch.hold(True)
    assert watch.signature() is not before, "what was seen before a layer was held says nothing"


def test_a_replayed_block_is_looked_at_once_a_visit(
    fusing: None,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And once more in the forward pass, for its adapters are asked for before the visit."""
    _, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"])
    ids = torch.randint(3, 100, (1, 8))
    step(streamed, ids)
    looks: list[Any] = []
    right = LayerWatch._look
    monkeypatch.setattr(LayerWatch, "_look", lambda self: (looks.append(self), right(self))[1])
    visits = engine_of(streamed).streamer.counts.visits
    step(streamed, ids)
    assert executor.num_eager == 0
    assert engine_of(streamed).streamer.counts.visits - visits == 2 * len(executor)
    assert len(looks) == 3 * len(executor)
