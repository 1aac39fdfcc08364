"""Qwen3, dense: norms on queries and keys, a head size of its own, no biases; tied head in the small sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from poros import Architecture, ModelDimensions, ParityCase, PublishedShape, gated_layer, uniform_model, windows_of

# head_dim is not hidden_size / num_attention_heads, as in several of the released sizes.
TINY = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


def layer_kinds(config: Any) -> Sequence[str]:
    """Full or sliding attention, layer by layer, as transformers derives it from the config."""
    return tuple(config.layer_types)


def dimensions(values: Mapping[str, Any]) -> ModelDimensions:
    """Every layer is alike; queries and keys have a norm, and biases where the config says so."""
    hidden, head_dim = values["hidden_size"], values.get("head_dim", 128)
    layer = gated_layer(
        hidden=hidden,
        inner=values["intermediate_size"],
        query=values["num_attention_heads"] * head_dim,
        key_value=values.get("num_key_value_heads", 32) * head_dim,
        head_norm=head_dim,
        biases=("q_proj", "k_proj", "v_proj", "o_proj") if values.get("attention_bias") else (),
    )
    first = values.get("max_window_layers", 28)
    slides = values.get("use_sliding_window", False) and values.get("sliding_window", 4096) is not None
    windows = windows_of(values, window=4096, is_sliding=lambda index: index >= first) if slides else None
    return uniform_model(layer, values, vocabulary=151936, tied=False, windows=windows)


def _shape(size: str, hidden: int, inner: int, layers: int, heads: int, parameters: int) -> PublishedShape:
    return PublishedShape(
        id=f"qwen3-{size}",
        display_name=f"Qwen3-{size.upper()}",
        config={
            "model_type": "qwen3",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": size in ("0.6b", "1.7b", "4b"),
            "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
            "use_sliding_window": False,
        },
        parameters=parameters,
    )


QWEN3 = Architecture(
    family="qwen3",
    model_types=("qwen3",),
    layer_kinds=layer_kinds,
    dimensions=dimensions,
    refused_model_types={
        "qwen3_moe": "mixture of experts; its experts are fused tensors that bitsandbytes leaves in 16 bit",
        "qwen3_next": "mixture of experts with linear attention",
        "qwen3_vl": "vision-language model",
        "qwen3_vl_moe": "vision-language model",
        "qwen3_5": "the Qwen3.5 family",
        "qwen3_5_moe": "the Qwen3.5 family",
    },
    tiny_config=TINY,
    parity_cases=(
        # The norms of queries and keys have no switch; a large epsilon takes most of their effect away.
        ParityCase(name="untied", quirk={"rms_norm_eps": 1.0}),
        ParityCase(name="tied", config={"tie_word_embeddings": True}),
        ParityCase(name="biases", config={"attention_bias": True}),
        ParityCase(
            name="sliding-window",
            config={"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
            quirk={"sliding_window": 256},
        ),
    ),
    published=(
        _shape("0.6b", 1024, 3072, 28, 16, 596_049_920),
        _shape("1.7b", 2048, 6144, 28, 16, 1_720_574_976),
        _shape("4b", 2560, 9728, 36, 32, 4_022_468_096),
        _shape("8b", 4096, 12288, 36, 32, 8_190_735_360),
        _shape("14b", 5120, 17408, 40, 40, 14_768_307_200),
        _shape("32b", 5120, 25600, 64, 64, 32_762_123_264),
    ),
)
