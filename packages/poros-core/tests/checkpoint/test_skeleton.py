"""The skeleton: placeholders that weigh nothing and poison whatever uses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

import poros
from poros.architecture import Architecture
from poros.checkpoint.skeleton import build_skeleton, placeholder, read_model_config
from poros.plugins import Plugins

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.bfloat16, (3, 5)), (torch.float32, ()), (torch.uint8, (1000, 1)), (torch.float32, (0,))]
)
def test_placeholders_have_a_shape_and_no_weight(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = placeholder(dtype, shape, CPU)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.untyped_storage().nbytes() == dtype.itemsize
    assert not dtype.is_floating_point or bool(torch.isnan(tensor).all())


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_big_skeleton_is_small(family: str, families: dict[str, Architecture]) -> None:
    """A published 27-72B model's skeleton takes no memory for its layers."""
    from transformers import AutoConfig

    architecture = families[family]
    config = AutoConfig.for_model(**architecture.published[-1].config)
    skeleton = build_skeleton(config, architecture, CPU)
    stored = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for places in skeleton.layers
        for tensor in (place.get() for place in places)
    }
    assert sum(stored.values()) < 100_000


@pytest.mark.parametrize("merge", [lambda m: m.merge_and_unload(), lambda m: m.merge_adapter()])
@pytest.mark.filterwarnings("ignore:Merge lora")
def test_merging_into_absent_weights_gives_nan(
    merge: Callable[[torch.nn.Module], object], checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    """A weight used outside its visit must not pass for a number."""
    model = poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins)
    merge(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])))
    weight = model.model.layers[0].self_attn.q_proj
    base = getattr(weight, "base_layer", weight).weight
    import bitsandbytes as bnb

    assert torch.isnan(bnb.functional.dequantize_4bit(base.data, base.quant_state)).any()


def test_the_config_is_not_changed(checkpoint: Callable[..., Path], families: dict[str, Architecture]) -> None:
    config = read_model_config(checkpoint("qwen2", {}), families["qwen2"])
    before = config.to_dict()
    build_skeleton(config, families["qwen2"], CPU)
    assert config.to_dict() == before
