"""Graphs on a CPU: recording is replaced by running again into the same results.

What a CUDA graph does is run the same kernels on the same addresses. Here a replay runs the recorded function once
more; what comes out must lie where the first run left its results. Whatever reads an argument that isn't a static
buffer reads a stale value, as a graph would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import poros
from poros.architecture import Architecture
from poros.config import LoraPart
from poros.engine.adapters import lora_config
from poros.engine.engine import engine_of
from poros.engine.graphs import GraphExecutor
from poros.engine.replay import Pool, Results
from poros.parity.stock import load_stock, make_adapters_count
from poros.plugins import Plugins

CPU = torch.device("cpu")


class HostGraphs(GraphExecutor):
    """Records on the host.

    Attributes:
        room: Whether there is room for graphs; without, recording fails as it does on a full card.
    """

    room = True

    def _warm_up(self, run: Callable[[], Results]) -> Results:
        return run()

    def _record(self, run: Callable[[], Results], pool: Pool) -> tuple[Callable[[], None], Results]:
        if not self.room:
            try:
                raise torch.OutOfMemoryError("made up")
            finally:
                raise RuntimeError("the recording could not be ended")
        results = run()
        self.num_recorded += 1

        def replay() -> None:
            for static, fresh in zip(results, run(), strict=True):
                if static is not None and fresh is not None and static.data_ptr() != fresh.data_ptr():
                    static.copy_(fresh)  # a place has grown since; a graph would still write to the old one

        return replay, results


def use_host_graphs(model: Any, architecture: Architecture, **options: Any) -> HostGraphs:
    """Give a streamed model this executor; `options` go to it."""
    engine = engine_of(model)
    kinds = architecture.layer_kinds(model.config.get_text_config())
    old = engine.executor
    places = {"keeping": old.keeping, "boundaries": engine.boundaries, "arena": engine.arena}
    executor = HostGraphs(engine.streamer, old._blocks, kinds, **{**places, **options})
    executor.gradients = engine.gradients
    engine.executor = executor
    return executor


def models(
    directory: Path, plugins: Plugins, architecture: Architecture, dropout: float = 0.1, **options: Any
) -> tuple[Any, Any, HostGraphs]:
    """A checkpoint as stock has it and streamed with graphs on the host, with the same adapters; and the executor."""
    lora = lora_config(LoraPart(rank=4, dropout=dropout))
    stock = load_stock(directory, lora, 0, CPU)
    streamed = poros.load(directory, lora=lora, seed=0, device="cpu", plugins=plugins, **options)
    for model in (stock, streamed):
        make_adapters_count(model, 0)
        model.train()
    return stock, streamed, use_host_graphs(streamed, architecture)


def step(model: Any, ids: torch.Tensor, **inputs: Any) -> list[torch.Tensor]:
    """Loss and gradients of a step; random numbers begin anew."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(input_ids=ids, labels=ids, **inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def evaluated(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits without gradients. In training mode: in eval mode, bitsandbytes has another kernel on some processors."""
    torch.manual_seed(2)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether several tensors are the same bits."""
    return len(one) == len(other) > 1 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def gradients(model: Any) -> list[torch.Tensor]:
    """Copies of all gradients."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def backward(model: Any, length: int) -> None:
    """Both passes over a row."""
    ids = torch.arange(3, 3 + length)[None]
    model(input_ids=ids, labels=ids).loss.backward()
