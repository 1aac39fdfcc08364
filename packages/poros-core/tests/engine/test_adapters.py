"""Adapters as plans count them and as warnings name them, from their config or from a model that has them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

import poros
from poros.architecture import Architecture
from poros.config import LoraPart, StreamConfig
from poros.engine.adapters import lora_config, lora_part, lora_there
from poros.engine.attach import attach
from poros.engine.budget import planned
from poros.engine.engine import engine_of
from poros.engine.measured import allocated_components
from poros.engine.parts import DecoderParts
from poros.errors import UnsupportedError
from poros.parity.stock import load_stock
from poros.plugins import Plugins

CPU = torch.device("cpu")


def test_adapters_as_a_plan_sees_them() -> None:
    assert lora_part(None) == LoraPart()
    assert lora_part(lora_config(LoraPart(rank=8))).targets == "all-linear"
    assert lora_part(lora_config(LoraPart(rank=8, targets=("q_proj",)))).targets == ("q_proj",)
    assert lora_part(lora_config(LoraPart(rank=8))).rank == 8
    assert lora_part(lora_config(LoraPart(dropout=0.1))).dropout == 0.1


@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": "all-linear", "rank_pattern": {"down_proj": 64, "layers.1.mlp.up_proj": 32}},
        {"target_modules": r".*layers\.[01]\.mlp\.down_proj"},
        {"target_modules": ["model.layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "mlp.up_proj"]},
        {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [2, 3]},
        {"target_modules": "all-linear", "exclude_modules": ["q_proj", "layers.2.mlp.up_proj"]},
        {"target_modules": "all-linear", "exclude_modules": r".*\.[012]\..*"},
    ],
)
def test_adapters_are_counted_as_peft_makes_them(
    targets: dict[str, Any], checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    """From their config before there is a model, and from a model that has them."""
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", **targets)
    loaded: Any = poros.load(checkpoint("qwen2", {}), lora=lora, device="cpu", plugins=plugins, vram="1GB", tokens=64)
    there = allocated_components(loaded)["adapters"]
    attached = attach(load_stock(checkpoint("qwen2", {}), lora, 0, CPU), plugins=plugins, vram="1GB", tokens=64)
    for model in (loaded, attached):
        plan = engine_of(model).plan
        assert plan is not None
        assert plan.device["adapters"] == there > 0


def test_every_adapter_of_a_model_is_counted(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    stock: Any = load_stock(checkpoint("qwen2", {}), lora_config(LoraPart(rank=4, targets=("q_proj",))), 0, CPU)
    stock.add_adapter("other", lora_config(LoraPart(rank=8, targets=("up_proj",), dropout=0.1)))
    there = sum(p.nbytes for name, p in stock.named_parameters() if "lora_" in name)
    plan = engine_of(attach(stock, plugins=plugins, vram="1GB", tokens=64)).plan
    assert plan is not None
    assert plan.device["adapters"] == there


@pytest.mark.parametrize("left", [("default",), ("other",), ()], ids=["first", "second", "none"])
def test_adapters_that_were_deleted_are_not_counted(
    left: tuple[str, ...], checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    """The layers that held them stay peft's, with an adapter less or with none."""
    stock: Any = load_stock(checkpoint("qwen2", {}), lora_config(LoraPart(rank=4, targets=("q_proj",))), 0, CPU)
    stock.add_adapter("other", lora_config(LoraPart(rank=8, targets=("up_proj",), dropout=0.1)))
    base = stock.get_base_model()  # which peft finds by the active adapter
    stock.set_adapter((*left, "other")[0])
    for name in {"default", "other"} - set(left):
        stock.delete_adapter(name)
    part = lora_there(DecoderParts.of(base, plugins.architecture_for("qwen2")).layers)
    if left:
        there = sum(p.nbytes for name, p in stock.named_parameters() if "lora_" in name)
        plan = engine_of(attach(stock, plugins=plugins, vram="1GB", tokens=64)).plan
        assert plan is not None
        assert plan.device["adapters"] == there > 0
        assert bool(part.dropout) == (left == ("other",))
    else:
        assert part == lora_there([nn.Linear(2, 2)])  # as of a model that never had any


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_adapter_that_the_dimensions_do_not_know_is_refused(
    dropout: float, checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """It would not be counted, or with dropout be a KeyError."""
    family = families["qwen2"]

    def without_o(values: Any) -> Any:
        made = family.dimensions(values)  # type: ignore[misc]
        linears = {name: shape for name, shape in made.layers[0].linears.items() if name != "self_attn.o_proj"}
        return dataclasses.replace(made, layers=[dataclasses.replace(one, linears=linears) for one in made.layers])

    lora = lora_config(LoraPart(rank=4, dropout=dropout))
    part = lora_there(DecoderParts.of(load_stock(checkpoint("qwen2", {}), lora, 0, CPU), family).layers)
    values = json.loads((checkpoint("qwen2", {}) / "config.json").read_text())
    stream = StreamConfig(vram="1GB", tokens=64)
    assert planned(stream, family, values, part, device=CPU) is not None
    with pytest.raises(UnsupportedError, match=r"the adapter on self_attn\.o_proj of layer 0 can't be planned for"):
        planned(stream, dataclasses.replace(family, dimensions=without_o), values, part, device=CPU)


def test_layers_whose_parts_have_other_names_can_be_planned(families: dict[str, Architecture]) -> None:
    family = families["qwen2"]

    def renamed(values: Any) -> Any:
        made = family.dimensions(values)  # type: ignore[misc]
        layers = [
            dataclasses.replace(one, linears={name.replace("_proj", ""): size for name, size in one.linears.items()})
            for one in made.layers
        ]
        return dataclasses.replace(made, layers=layers)

    other, stream = dataclasses.replace(family, dimensions=renamed), StreamConfig(vram="1GB", tokens=64)
    plans = [planned(stream, one, family.tiny_config, LoraPart(dropout=0.1), device=CPU) for one in (family, other)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[1].device == plans[0].device


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "the LoRA target v_proj is in 4 of 6 layers"),
        ({"exclude_modules": ["layers.0.self_attn.v_proj"]}, "the LoRA target v_proj is in 4 of 6 layers"),
        ({"exclude_modules": ["v_proj"]}, None),
        ({"exclude_modules": r".*\.v_proj"}, None),
        ({"exclude_modules": ["q_proj"]}, "the LoRA target v_proj is in 4 of 6 layers"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]}, None),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 2]}, None),
        ({"layers_to_transform": [2]}, None),  # a layer that has none, and no other was asked for
    ],
)
def test_a_target_that_some_layers_lack_is_said_unless_it_was_left_out(
    settings: dict[str, Any],
    words: str | None,
    checkpoint: Callable[..., Path],
    plugins: Plugins,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In this family every third layer uses its keys as values."""
    config = LoraConfig(r=2, task_type="CAUSAL_LM", **{"target_modules": ["q_proj", "v_proj"], **settings})
    poros.load(checkpoint("gemma4", {}), lora=config, seed=0, device="cpu", plugins=plugins)
    said = [record.message for record in caplog.records if "the LoRA target" in record.message]
    assert said == ([words] if words else [])
