"""Qwen2 and Qwen2.5: biases on q, k and v; tied head in the small sizes; sliding windows where asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from poros import Architecture, ModelDimensions, ParityCase, PublishedShape, gated_layer, uniform_model, windows_of

TINY = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


def layer_kinds(config: Any) -> Sequence[str]:
    """Full or sliding attention, layer by layer, as transformers derives it from the config."""
    return tuple(config.layer_types)


def dimensions(values: Mapping[str, Any]) -> ModelDimensions:
    """Every layer is alike; q, k and v have biases."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    head_dim = values.get("head_dim") or hidden // heads
    layer = gated_layer(
        hidden=hidden,
        inner=values["intermediate_size"],
        query=heads * head_dim,
        key_value=values.get("num_key_value_heads", 32) * head_dim,
        biases=("q_proj", "k_proj", "v_proj"),
    )
    first = values.get("max_window_layers", 28)
    slides = values.get("use_sliding_window", False) and values.get("sliding_window", 4096) is not None
    windows = windows_of(values, window=4096, is_sliding=lambda index: index >= first) if slides else None
    return uniform_model(layer, values, vocabulary=151936, tied=False, windows=windows)


def _shape(size: str, hidden: int, inner: int, layers: int, heads: int, kv: int, parameters: int) -> PublishedShape:
    tied = size in ("0.5b", "1.5b", "3b")
    return PublishedShape(
        id=f"qwen2.5-{size}",
        display_name=f"Qwen2.5-{size.upper()}",
        config={
            "model_type": "qwen2",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "vocab_size": 151936 if tied else 152064,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
            "use_sliding_window": False,
        },
        parameters=parameters,
    )


QWEN2 = Architecture(
    family="qwen2",
    model_types=("qwen2",),
    layer_kinds=layer_kinds,
    dimensions=dimensions,
    refused_model_types={
        "qwen2_moe": "mixture of experts",
        "qwen2_vl": "vision-language model",
        "qwen2_5_vl": "vision-language model",
        "qwen2_audio": "audio-language model",
    },
    tiny_config=TINY,
    parity_cases=(
        ParityCase(name="untied"),
        ParityCase(name="tied", config={"tie_word_embeddings": True}),
        ParityCase(
            name="sliding-window",
            config={"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
            quirk={"sliding_window": 256},
        ),
    ),
    published=(
        _shape("0.5b", 896, 4864, 24, 14, 2, 494_032_768),
        _shape("1.5b", 1536, 8960, 28, 12, 2, 1_543_714_304),
        _shape("3b", 2048, 11008, 36, 16, 2, 3_085_938_688),
        _shape("7b", 3584, 18944, 28, 28, 4, 7_615_616_512),
        _shape("14b", 5120, 13824, 48, 40, 8, 14_770_033_664),
        _shape("32b", 5120, 27648, 64, 40, 8, 32_763_876_352),
        _shape("72b", 8192, 29568, 80, 64, 8, 72_706_203_648),
    ),
)
