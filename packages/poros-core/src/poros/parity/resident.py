"""Stock resident models with random weights at real shapes: what a benchmark needs and no download can give.

Memory and time don't depend on the values of the weights; say "random weights" wherever a number appears.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from transformers import AutoConfig, BitsAndBytesConfig
from transformers.quantizers.auto import AutoHfQuantizer

from poros.architecture import Architecture
from poros.checkpoint.skeleton import COMPUTE_DTYPE, build_skeleton, cut_layers


def random_resident(
    architecture: Architecture,
    config: Mapping[str, Any],
    device: torch.device,
    num_layers: int | None = None,
    seed: int = 0,
) -> Any:
    """A stock causal-LM model in NF4 with every weight on the device, as stock loading leaves one.

    Args:
        architecture: The family.
        config: Values of `config.json`, those of a published shape for instance.
        device: Where the weights are drawn, quantised and kept.
        num_layers: Cut the model to its first layers.
        seed: Of the weights.
    """
    skeleton = build_skeleton(cut_layers(AutoConfig.for_model(**config), num_layers), architecture, device)
    model = skeleton.model
    generator = torch.Generator(device).manual_seed(seed)

    def draw(shape: tuple[int, ...], spread: float) -> Tensor:
        return torch.empty(shape, dtype=COMPUTE_DTYPE, device=device).normal_(0, spread, generator=generator)

    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    for name, module in model.named_modules():
        if tied and name == architecture.head:
            continue
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if isinstance(module, bnb.nn.Linear4bit) and key == "weight":
                weight = draw((module.out_features, module.in_features), 0.02)
                module.weight = bnb.nn.Params4bit(
                    weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=module
                ).to(device)
            elif parameter.dim() == 1:
                # Norms of some families are centred on one, of others on zero; both are fine with a small value.
                module._parameters[key] = nn.Parameter(draw(tuple(parameter.shape), 0.1) + 0.5, requires_grad=False)
            else:
                module._parameters[key] = nn.Parameter(draw(tuple(parameter.shape), 0.02), requires_grad=False)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and key not in module._non_persistent_buffers_set:
                # One that a checkpoint holds, and the skeleton leaves as NaN: a scale, in every family so far.
                module._buffers[key] = draw(tuple(buffer.shape), 0.02).to(buffer.dtype) + 1
    if tied:
        model.tie_weights()
    return model


def save_resident(base: Any, directory: Path) -> None:
    """Write a model of `random_resident` as a checkpoint that is quantised already, so that others can train its bytes.

    Args:
        base: The model, without adapters.
        directory: Where to; made if missing.
    """
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=COMPUTE_DTYPE,
    )
    base.config.quantization_config = config
    base.config.dtype = COMPUTE_DTYPE
    base.hf_quantizer = AutoHfQuantizer.from_config(config, pre_quantized=True)
    base.is_loaded_in_4bit = base.is_quantized = True
    base.quantization_method = config.quant_method
    base.save_pretrained(directory, max_shard_size="5GB")
