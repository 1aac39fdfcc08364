"""The Qwen2 family: its data agrees with transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from poros_arch_qwen.qwen2 import QWEN2


@pytest.mark.parametrize("shape", QWEN2.published, ids=lambda shape: shape.id)
def test_published_shapes_have_the_published_number_of_parameters(shape: object) -> None:
    config = AutoConfig.for_model(**shape.config)  # type: ignore[attr-defined]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters  # type: ignore[attr-defined]


def test_layer_kinds_follow_the_sliding_window() -> None:
    config = AutoConfig.for_model(
        **{**QWEN2.tiny_config, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    )
    assert QWEN2.layer_kinds(config) == ("full_attention",) * 2 + ("sliding_attention",) * 3
    assert QWEN2.layer_kinds(AutoConfig.for_model(**QWEN2.tiny_config)) == ("full_attention",) * 5
