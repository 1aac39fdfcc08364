"""Small things that tests do with models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn

from poros.architecture import Architecture, ParityCase
from poros.checkpoint.locate import find_prefix
from poros.checkpoint.shards import Shards
from poros.config import LoraPart
from poros.dimensions import text_values
from poros.engine.adapters import lora_config
from poros.engine.attention import attention_path
from poros.engine.parts import causal_lm, text_marks


def lora(dropout: float) -> LoraConfig:
    """Small adapters on every linear layer."""
    return lora_config(LoraPart(rank=4, alpha=8, dropout=dropout))


def evaluated(model: Any, case: ParityCase) -> Tensor:
    """Logits of a row without gradients, in the mode of training."""
    ids = torch.arange(3, 3 + case.sequence_length)[None] % 64
    with torch.no_grad(), attention_path("fused"):
        found: Tensor = model.train()(input_ids=ids, use_cache=False, **marks(model, ids)).logits
    return found


def marks(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """What a multimodal class wants to be told about text."""
    return {name: torch.zeros_like(ids) for name in text_marks(causal_lm(model))}


def all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def text_part(whole: Path, directory: Path, architecture: Architecture) -> None:
    """Write the text tower of a multimodal checkpoint as a checkpoint of its own.

    Args:
        whole: The multimodal checkpoint.
        directory: Where to.
        architecture: The multimodal family.
    """
    values = text_values(json.loads((whole / "config.json").read_text(encoding="utf-8")))
    (directory / "config.json").write_text(json.dumps(dict(values)), encoding="utf-8")
    head = f"{architecture.head}.weight"
    with Shards.open(whole) as shards:
        probe = f"{architecture.embedding}.weight"
        prefix = find_prefix(shards.names, architecture.checkpoint_prefixes, probe, architecture.layers)
        tensors = {
            f"model.{name.removeprefix(prefix)}" if name.startswith(prefix) else head: shards.read(name)
            for name in shards.names
            if name.startswith(prefix) or name == head or name.endswith(f".{head}")
        }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
