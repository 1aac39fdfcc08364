"""The parts of a live model that Poros touches, found by the paths of its architecture."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from peft import PeftModel
from torch import nn

from poros.architecture import Architecture


def causal_lm(model: nn.Module) -> Any:
    """The transformers causal-LM model inside a peft model, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def config_of(base: Any) -> Any:
    """The config of a causal-LM model's text decoder: its own, or a part of it in a multimodal model."""
    return base.config.get_text_config()


def text_marks(base: Any) -> tuple[str, ...]:
    """Inputs that a multimodal class must be given to learn what each token is; zeros mean text.

    Processors make them, tokenizers don't. transformers before 5.10 refuses to train without; later versions take none
    for text, and then choose the masks that the text-only class has.
    """
    if Version(transformers.__version__) >= Version("5.10"):
        return ()
    taken = inspect.signature(type(base).forward).parameters
    return tuple(name for name in ("token_type_ids", "mm_token_type_ids") if name in taken)


@dataclass(frozen=True)
class DecoderParts:
    """A text decoder and what belongs to it.

    Attributes:
        base: The causal-LM model.
        decoder: Its text decoder.
        layers: The decoder's layers.
        device: Where the model computes: where its embedding is.
    """

    base: Any
    decoder: nn.Module
    layers: list[nn.Module]
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module, architecture: Architecture, device: torch.device | None = None) -> DecoderParts:
        """The parts of a causal-LM model, which may be inside a peft model.

        Args:
            model: The model.
            architecture: Its family.
            device: Where it will compute, if its embedding isn't there yet.
        """
        base = causal_lm(model)
        decoder: nn.Module = base.get_submodule(architecture.decoder)
        layers = decoder.get_submodule(architecture.layers)
        assert isinstance(layers, nn.ModuleList)
        weight = decoder.get_submodule(architecture.embedding).weight
        assert isinstance(weight, torch.Tensor)
        return cls(base, decoder, list(layers), device or weight.device)
