"""Streamed equals stock on every surface, over the whole matrix of the promise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

import poros
from poros.architecture import Architecture
from poros.config import LoraPart
from poros.engine.adapters import lora_config
from poros.engine.attach import attach
from poros.engine.attention import attention_path
from poros.engine.engine import engine_of
from poros.engine.parts import DecoderParts
from poros.parity.stock import Work, load_stock, make_adapters_count, train
from poros.parity.surfaces import SURFACES, Trace, compare
from poros.plugins import Plugins

CPU = torch.device("cpu")
LAYERS = 5


def small_lora(dropout: float = 0.0, **values: Any) -> LoraConfig:
    return lora_config(LoraPart(rank=4, alpha=8, dropout=dropout, **values))


def run(model: Any, architecture: Architecture, work: Work) -> Trace:
    make_adapters_count(model, work.seed)
    with attention_path("fused"):
        return train(model, DecoderParts.of(model, architecture).layers, work, CPU)


VARIANTS = ((1, 1), (1, 2), (1, LAYERS), (2, 2), (3, 1), (2, 1), (3, 2))
"""(block size, slots); with five layers, blocks of two and three leave a remainder."""

MATRIX = tuple(itertools.product(("qwen2", "gemma3"), (True, False), (True, False), (0.0, 0.1), (1, 4)))
"""family, tied, padded, dropout, accumulation."""


def thinned() -> list[Any]:
    """Every point of the matrix with two of the variants in turn, so that every pair of values meets."""
    turn = itertools.cycle(VARIANTS)
    return [(*point, (next(turn), next(turn))) for point in MATRIX]


@pytest.mark.parametrize(("family", "tied", "padded", "dropout", "accumulation", "variants"), thinned())
def test_every_surface(
    family: str,
    tied: bool,
    padded: bool,
    dropout: float,
    accumulation: int,
    variants: tuple[tuple[int, int], ...],
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    config = {"tie_word_embeddings": tied}
    work = Work(steps=5, batch_size=2, length=16, padded=padded, accumulation=accumulation, learning_rate=1e-2)
    directory = checkpoint(family, config)
    reference = run(load_stock(directory, small_lora(dropout), work.seed, CPU), families[family], work)
    for block_size, slots in variants:
        model = poros.load(
            directory,
            lora=small_lora(dropout),
            seed=0,
            block_size=block_size,
            slots=slots,
            device="cpu",
            plugins=plugins,
        )
        result = compare(reference, run(model, families[family], work), engine_of(model).blocks)
        assert result.identical, f"block size {block_size}, {slots} slots: {result.difference}"
        assert result.surfaces == dict.fromkeys(SURFACES, True)
        # A and B of seven linears in each layer: gradient and value of every step, three optimizer tensors at the end
        assert result.compared > 2 * 7 * LAYERS * (2 * work.steps + 3)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied", "padded", "dropout", "accumulation"), MATRIX)
def test_every_surface_with_every_variant(
    family: str,
    tied: bool,
    padded: bool,
    dropout: float,
    accumulation: int,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    test_every_surface(family, tied, padded, dropout, accumulation, VARIANTS, checkpoint, families, plugins)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_attached_equals_stock(
    family: str,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    work = Work(steps=5, length=16, accumulation=2, learning_rate=1e-2)
    directory = checkpoint(family, {})
    reference = run(load_stock(directory, small_lora(0.1), 0, CPU), families[family], work)
    model = attach(load_stock(directory, small_lora(0.1), 0, CPU), block_size=2, plugins=plugins)
    result = compare(reference, run(model, families[family], work), engine_of(model).blocks)
    assert result.identical, str(result.difference)


@pytest.mark.parametrize(
    "pattern", [{"layers_to_transform": [2, 3]}, {"rank_pattern": {r"layers\.1\.self_attn\.q_proj": 8, "down_proj": 2}}]
)
def test_uneven_adapters(
    pattern: dict[str, Any], checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **pattern)
    work = Work(steps=3, length=16, accumulation=1, learning_rate=1e-2)
    directory = checkpoint("qwen2", {})
    models = (
        load_stock(directory, config, 0, CPU),
        poros.load(directory, lora=config, seed=0, device="cpu", plugins=plugins),
    )
    result = compare(*(run(model, families["qwen2"], work) for model in models), engine_of(models[1]).blocks)
    assert result.identical, str(result.difference)


def test_every_adapter_moves(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """A dead adapter (case O-04) shows as a lora_B that is still zero, with a finite and falling loss."""
    model = poros.load(checkpoint("qwen2", {}), lora=small_lora(), seed=0, device="cpu", plugins=plugins)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert len(before) == 2 * 7 * LAYERS
    with attention_path("fused"):
        train(model, DecoderParts.of(model, families["qwen2"]).layers, Work(steps=2, length=16), CPU)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert not torch.equal(parameter, before[name]), name
