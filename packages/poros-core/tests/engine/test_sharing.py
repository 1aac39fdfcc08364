"""Layers that leave keys and values for later layers: gradients flow back to who left them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import poros
from poros.architecture import Architecture
from poros.config import LoraPart
from poros.engine import sharing
from poros.engine.adapters import lora_config, narrowed
from poros.engine.attach import attach
from poros.engine.attention import attention_path
from poros.engine.engine import engine_of
from poros.engine.parts import DecoderParts, config_of
from poros.parity.stock import Work, load_stock, make_adapters_count, train
from poros.parity.surfaces import Comparison, compare
from poros.plugins import Plugins
from poros.testing.transfers import Adversary

CPU = torch.device("cpu")


@pytest.fixture
def e_series(checkpoint: Callable[..., Path], families: dict[str, Architecture]) -> Path:
    case = next(case for case in families["gemma4"].parity_cases if case.name == "e-series")
    return checkpoint("gemma4", dict(case.config))


def compared(
    directory: Path, architecture: Architecture, plugins: Plugins, by_attach: bool, **options: Any
) -> Comparison:
    lora = lora_config(LoraPart(rank=4, dropout=0.1))
    stock = load_stock(directory, narrowed(lora, architecture, config_of(load_plain(directory))), 0, CPU)
    if by_attach:
        narrow = narrowed(lora, architecture, config_of(stock.get_base_model()))
        streamed = attach(load_stock(directory, narrow, 0, CPU), plugins=plugins, **options)
    else:
        streamed = poros.load(directory, lora=lora, seed=0, device="cpu", plugins=plugins, **options)
    traces = []
    work = Work(steps=3, length=16, accumulation=2, learning_rate=1e-2)
    for model in (stock, streamed):
        make_adapters_count(model, 0)
        with attention_path("fused"):
            traces.append(train(model, DecoderParts.of(model, architecture).layers, work, CPU))
    return compare(traces[0], traces[1], engine_of(streamed).blocks)


def load_plain(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory)


@pytest.mark.parametrize("by_attach", [True, False])
@pytest.mark.parametrize(("block_size", "slots"), [(1, 1), (2, 2), (4, 1), (5, 1), (6, 1)])
def test_every_surface(
    by_attach: bool, block_size: int, slots: int, e_series: Path, families: dict[str, Architecture], plugins: Plugins
) -> None:
    """Producers and consumers in blocks of their own, and together."""
    result = compared(
        e_series,
        families["gemma4"],
        plugins,
        by_attach,
        block_size=block_size,
        slots=slots,
        transfer=Adversary(seed=slots),
    )
    assert result.identical, str(result.difference)


@pytest.mark.xfail(
    Version(transformers.__version__) < Version("5.10"),
    reason="transformers 5.5 shares keys and values through a cache only, which training doesn't have",
)
def test_gradients_that_do_not_come_back_break_parity(
    e_series: Path, families: dict[str, Architecture], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sharing._SharingFunction.backward

    def forgetful(ctx: Any, *gradients: Any) -> Any:
        return right(ctx, gradients[0], *([None] * (len(gradients) - 1)))

    monkeypatch.setattr(sharing._SharingFunction, "backward", staticmethod(forgetful))
    result = compared(e_series, families["gemma4"], plugins, by_attach=False)
    assert not result.identical
    assert result.difference is not None
    assert result.difference.key.surface == "gradients"
    assert result.surfaces["logits"]


def test_generating(e_series: Path, families: dict[str, Architecture], plugins: Plugins) -> None:
    """With a cache, in which the sharing layers have no place of their own."""
    stock = load_plain(e_series).eval()
    lora = lora_config(LoraPart(rank=4))
    narrow = narrowed(lora, families["gemma4"], config_of(stock))
    resident = load_stock(e_series, narrow, 0, CPU)
    streamed = poros.load(e_series, lora=lora, seed=0, device="cpu", plugins=plugins)
    ids = torch.arange(3, 12)[None]
    texts = []
    for model in (resident, streamed):
        make_adapters_count(model, 0)
        model.train()  # the kernels of training; there is no dropout
        texts.append(model.generate(input_ids=ids, max_new_tokens=6, do_sample=False))
    assert torch.equal(*texts)


@pytest.mark.parametrize("keep", [1, 3, 0])
def test_logits_of_the_last_tokens_only(keep: int, e_series: Path, plugins: Plugins) -> None:
    """Newer versions of transformers drop the other tokens between two layers."""
    model = poros.load(e_series, lora=lora_config(LoraPart(rank=4)), seed=0, device="cpu", plugins=plugins)
    model.train()
    ids = torch.arange(2, 14).view(1, -1)
    mask = torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)  # without one they drop none
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits, few = (model(ids, attention_mask=mask, logits_to_keep=n).logits for n in (0, keep))
    assert torch.equal(few, logits[:, -keep:])
