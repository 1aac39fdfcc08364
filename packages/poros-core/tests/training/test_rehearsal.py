"""A rehearsal finds out whether a step fits, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import TrainingArguments

import poros
from poros.config import LoraPart
from poros.engine.adapters import lora_config
from poros.engine.engine import engine_of
from poros.engine.parts import causal_lm, text_marks
from poros.errors import BudgetError
from poros.plugins import Plugins, load_plugins
from poros.training.rehearsal import rehearse
from poros.training.trainer import StreamedTrainer


def step_of(model: Any) -> Callable[[Mapping[str, torch.Tensor]], None]:
    def micro_step(inputs: Mapping[str, torch.Tensor]) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()

    return micro_step


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_nothing_is_left(
    micro_batches: int, place: Literal["device", "host"], checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    model = poros.load(
        checkpoint("gemma3", {}),
        lora=lora_config(LoraPart(rank=4, dropout=0.1)),
        seed=0,
        device="cpu",
        plugins=plugins,
        optimizer=place,
        gradients=place,
    )
    model.eval()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    state = torch.get_rng_state()
    rehearse(model, step_of(model), rows=2, tokens=24, micro_batches=micro_batches)
    assert engine_of(model).streamer.counts.visits >= 10
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    kept = engine_of(model).gradients
    assert kept is None or not any(parameter in kept for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert name not in before or torch.equal(parameter, before[name])


@pytest.mark.parametrize("padded", [True, False])
def test_padded_rows_are_rehearsed_where_there_are_any(
    padded: bool, checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    model = poros.load(checkpoint("qwen2", {}), lora=lora_config(LoraPart(rank=4)), device="cpu", plugins=plugins)
    masks: list[torch.Tensor] = []

    def step(inputs: Any) -> None:
        masks.append(inputs["attention_mask"])
        step_of(model)(inputs)

    rehearse(model, step, rows=2, tokens=24, micro_batches=1, padded=padded)
    assert [int(mask.sum()) for mask in masks] == ([48, 46] if padded else [48])


def test_full_rows_and_padded_ones_are_rehearsed(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    """Layers get a mask for padded rows only, and with it other kernels."""
    model = poros.load(checkpoint("qwen2", {}), lora=lora_config(LoraPart(rank=4)), device="cpu", plugins=plugins)
    engine = engine_of(model)
    masks = []
    prologue = engine.prologue

    def noting(*args: Any) -> Any:
        made = prologue(*args)
        masks.append(made.calls[0].kwargs["attention_mask"])
        return made

    engine.prologue = noting  # type: ignore[method-assign]
    rehearse(model, step_of(model), rows=2, tokens=24, micro_batches=1)
    first, second = masks
    assert first is None
    assert second.shape == (2, 1, 24, 24)


def test_too_little_memory_is_said(
    checkpoint: Callable[..., Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = poros.load(
        checkpoint("qwen2", {}), lora=lora_config(LoraPart(rank=4)), device="cpu", plugins=plugins, vram="1GB", tokens=8
    )

    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(type(engine_of(model)), "accumulate", full)
    with pytest.raises(BudgetError, match=r"2 rows of 24 tokens .* were planned"):
        rehearse(model, step_of(model), rows=2, tokens=24, micro_batches=1)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", sorted(architecture.family for architecture in load_plugins().architectures()))
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_trainers_own_step_is_rehearsed_in_every_family(
    family: str, accumulation: int, tmp_path: Path, checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    """A class that normalises no loss leaves that to the Trainer, which needs to know by how much."""
    model = poros.load(checkpoint(family), lora=lora_config(LoraPart(rank=4)), seed=0, device="cpu", plugins=plugins)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, bf16=True, report_to=[], gradient_accumulation_steps=accumulation
    )
    trainer = StreamedTrainer(model, arguments)
    marks = text_marks(causal_lm(model))
    assert rehearse(model, trainer.rehearsal_step, 2, 16, accumulation, marks=marks)
    assert all(parameter.grad is None for parameter in model.parameters())
