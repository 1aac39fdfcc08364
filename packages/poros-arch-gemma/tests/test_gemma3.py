"""The Gemma 3 family."""

from __future__ import annotations

from transformers import AutoConfig

from poros.testing.conformance import ArchitectureConformance
from poros_arch_gemma.gemma3 import GEMMA3


class TestGemma3(ArchitectureConformance):
    architecture = GEMMA3


def test_layer_kinds_and_cap() -> None:
    config = AutoConfig.for_model(**GEMMA3.tiny_config)
    assert GEMMA3.layer_kinds(config)[2] == "full_attention"
    assert GEMMA3.layer_kinds(config).count("sliding_attention") == 3
    assert GEMMA3.final_softcap(config) is None
    capped = AutoConfig.for_model(**{**GEMMA3.tiny_config, "final_logit_softcapping": 30.0})
    assert GEMMA3.final_softcap(capped) == 30.0


def test_a_bidirectional_checkpoint_is_refused() -> None:
    config = AutoConfig.for_model(**{**GEMMA3.tiny_config, "use_bidirectional_attention": True})
    refusal = GEMMA3.refusal(config)
    assert refusal is not None
    assert refusal.name == "bidirectional attention"
    assert GEMMA3.refusal(AutoConfig.for_model(**GEMMA3.tiny_config)) is None
