"""The gate on real (tiny) models: it passes, and it fails when it should."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.architecture import Architecture
from poros.config import LoraPart, StreamConfig
from poros.engine.adapters import lora_config
from poros.engine.attention import attention_path
from poros.engine.engine import engine_of
from poros.engine.executor import EagerExecutor
from poros.engine.parts import DecoderParts
from poros.parity import gate
from poros.parity.gate import check, corrupt, receipt_of
from poros.parity.stock import Work, load_stock, make_adapters_count, train
from poros.parity.surfaces import SURFACES, compare
from poros.plugins import Plugins
from poros.stream.schedule import Phase

CPU = torch.device("cpu")
WORK = Work(steps=2, length=16, accumulation=1)
PART = LoraPart(rank=4, dropout=0.1)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize("attention", ["math", "fused", "default"])
def test_a_right_model_is_identical(
    family: str, attention: Any, checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    told: list[tuple[str, int, int]] = []
    stream = StreamConfig(block_size=2)
    result = check(
        str(checkpoint(family, {})),
        lora_config(PART),
        WORK,
        stream=stream,
        attention=attention,
        plugins=plugins,
        announce=lambda *what: told.append(what),
    )
    assert result.verdict == "identical"
    assert result.surfaces == dict.fromkeys(SURFACES, True)
    assert result.control is not None
    assert result.control_block == result.control_found
    assert told[-1] == ("control arm", 7, 7)
    receipt = receipt_of(result, PART)
    assert receipt.parity == result.surfaces
    assert receipt.reason is None
    assert receipt.steps == WORK.steps


# Not quant_map: the kernels of bitsandbytes carry the NF4 table themselves and never read it.
FIELDS = [
    ("qwen2", "q_proj.weight"),
    ("qwen2", "down_proj.weight"),
    ("qwen2", "k_proj.bias"),
    ("qwen2", "v_proj.weight.absmax"),
    ("qwen2", "o_proj.weight.nested_absmax"),
    ("qwen2", "gate_proj.weight.nested_quant_map"),
    ("qwen2", "q_proj.weight.nested_offset"),
    ("qwen2", "post_attention_layernorm.weight"),
    ("gemma3", "q_norm.weight"),
    ("gemma3", "pre_feedforward_layernorm.weight"),
    ("gemma3", "mlp.down_proj.weight"),
]


@pytest.mark.parametrize(("family", "name"), FIELDS)
@pytest.mark.parametrize("block", [0, 2])
def test_one_corrupted_byte_of_any_kind_of_tensor_is_told_apart(
    family: str,
    name: str,
    block: int,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    """A template that keeps layer 0's bias or offset trains without an error; the gate must see each such tensor."""
    directory = checkpoint(family, {})
    models = (
        load_stock(directory, lora_config(PART), 0, CPU),
        poros.load(directory, lora=lora_config(PART), seed=0, block_size=2, device="cpu", plugins=plugins),
    )
    engine = engine_of(models[1])
    # The last byte of the field's first element: the sign of a float, the high code of a packed byte.
    layer = engine.blocks[block][0]
    field = next(f for f in engine.packings[layer].fields if f.name.endswith(name))
    used = 255 * 4 if name.endswith("nested_quant_map") else 0  # the code of the largest scale is always used
    assert corrupt(engine, block, name, used + field.dtype.itemsize - 1) == field.name
    traces = []
    for model in models:
        make_adapters_count(model, 0)
        with attention_path("fused"):
            traces.append(train(model, DecoderParts.of(model, families[family]).layers, WORK, CPU))
    result = compare(*traces, engine.blocks)
    assert not result.identical
    assert result.first_block == block
    assert result.difference is not None
    assert result.difference.key.surface == "logits"


def test_a_backward_pass_over_the_wrong_weights_is_told_apart(
    checkpoint: Callable[..., Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case O-01: logits and loss of the first step are right, gradients are not."""
    right = EagerExecutor.visiting

    @contextmanager
    def over_another_block(self: EagerExecutor, block: int, phase: Phase) -> Any:
        if block != 2 or phase is Phase.FORWARD:
            with right(self, block, phase) as visit:
                yield visit
            return
        store, streamer = self._streamer._store, self._streamer
        kept = store.slab(2).clone()
        store.slab(2).copy_(store.slab(1))
        streamer.forget()
        try:
            with right(self, block, phase) as visit:
                yield visit
        finally:
            store.slab(2).copy_(kept)
            streamer.forget()

    monkeypatch.setattr(EagerExecutor, "visiting", over_another_block)
    result = check(str(checkpoint("qwen2", {})), lora_config(PART), WORK, plugins=plugins)
    assert result.verdict == "different"
    assert result.streamed.surfaces["logits"] is True
    assert result.streamed.surfaces["gradients"] is False
    assert result.streamed.difference is not None
    assert result.streamed.difference.block == 2
    assert result.streamed.difference.key.surface == "gradients"


def test_stock_that_does_not_repeat_itself_is_a_verdict_of_its_own(
    checkpoint: Callable[..., Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = 0

    def unsteady(model: Any, layers: Any, work: Work, device: Any, *rest: Any, **options: Any) -> Any:
        nonlocal runs
        runs += 1
        trace = train(model, layers, work, device, *rest, **options)
        if runs == 2:
            key = next(k for k in trace.tensors if k.surface == "gradients")
            trace.tensors[key] = trace.tensors[key] + 1e-6
        return trace

    monkeypatch.setattr(gate, "train", unsteady)
    result = check(str(checkpoint("qwen2", {})), lora_config(PART), WORK, plugins=plugins)
    assert result.verdict == "not reproducible on this path"
    assert set(result.surfaces.values()) == {None}


def test_a_control_arm_that_is_not_caught_fails_the_gate(
    checkpoint: Callable[..., Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "corrupt", lambda engine, block: "nothing")
    result = check(str(checkpoint("qwen2", {})), lora_config(PART), WORK, plugins=plugins)
    assert result.verdict == "control arm not caught"


def test_a_control_arm_that_is_blamed_on_another_block_fails_the_gate(
    checkpoint: Callable[..., Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noticing that something is wrong is not enough: the gate must say where."""
    right = corrupt
    monkeypatch.setattr(gate, "corrupt", lambda engine, block: right(engine, block - 1))
    result = check(str(checkpoint("qwen2", {})), lora_config(PART), WORK, plugins=plugins)
    assert result.control is not None
    assert result.control_found == result.control_block - 1
    assert result.verdict == "control arm not caught"


def test_adapters_that_start_from_other_values_are_told_apart(
    checkpoint: Callable[..., Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case O-06: the seed must reach the adapters of both models in the same way."""
    from poros.parity import source

    right = source.load
    monkeypatch.setattr(source, "load", lambda *args, seed, **rest: right(*args, seed=seed + 1, **rest))
    result = check(str(checkpoint("qwen2", {})), lora_config(PART), WORK, plugins=plugins)
    assert result.verdict == "different"
    assert result.streamed.surfaces["logits"] is False


def test_adapters_with_zero_b_are_refused_by_construction(checkpoint: Callable[..., Path]) -> None:
    model = load_stock(checkpoint("qwen2", {}), lora_config(PART), 0, CPU)
    make_adapters_count(model, 0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            assert bool((parameter != 0).any()), name
