"""The Qwen2 family."""

from __future__ import annotations

from transformers import AutoConfig

from poros.testing.conformance import ArchitectureConformance
from poros_arch_qwen.qwen2 import QWEN2


class TestQwen2(ArchitectureConformance):
    architecture = QWEN2


def test_layer_kinds_follow_the_sliding_window() -> None:
    config = AutoConfig.for_model(
        **{**QWEN2.tiny_config, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    )
    assert QWEN2.layer_kinds(config) == ("full_attention",) * 2 + ("sliding_attention",) * 3
    assert QWEN2.layer_kinds(AutoConfig.for_model(**QWEN2.tiny_config)) == ("full_attention",) * 5
