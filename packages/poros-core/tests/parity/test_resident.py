"""Models with random weights: what is saved is what was made, for stock and for Poros."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import poros
from poros.architecture import Architecture
from poros.parity.resident import random_resident, save_resident
from poros.plugins import Plugins

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_the_same_model(
    family: str, tied: bool, families: dict[str, Architecture], plugins: Plugins, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    config = {**families[family].tiny_config, "tie_word_embeddings": tied}
    ids = torch.arange(3, 19)[None]

    def logits(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model.train()(input_ids=ids, use_cache=False).logits

    base = random_resident(families[family], config, CPU)
    right = logits(base)
    save_resident(base, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert torch.equal(logits(stock), right)
    streamed = poros.load(tmp_path, device="cpu", plugins=plugins)
    assert torch.equal(logits(streamed), right)
