"""The Gemma 3 family: its data agrees with transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from poros_arch_gemma.gemma3 import GEMMA3


@pytest.mark.parametrize("shape", GEMMA3.published, ids=lambda shape: shape.id)
def test_published_shapes_have_the_published_number_of_parameters(shape: object) -> None:
    config = AutoConfig.for_model(**shape.config)  # type: ignore[attr-defined]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters  # type: ignore[attr-defined]


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
