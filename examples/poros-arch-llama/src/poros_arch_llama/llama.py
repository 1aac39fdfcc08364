"""Llama 3: one kind of layer, a scaled rope, tied head in the small sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from poros import Architecture, ModelDimensions, ParityCase, PublishedShape, gated_layer, uniform_model

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def layer_kinds(config: Any) -> Sequence[str]:
    """All layers are alike."""
    return ("decoder",) * int(config.num_hidden_layers)


def dimensions(values: Mapping[str, Any]) -> ModelDimensions:
    """Every layer has the same sizes."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    head_dim = values.get("head_dim") or hidden // heads
    attention = ("q_proj", "k_proj", "v_proj", "o_proj") if values.get("attention_bias") else ()
    mlp = ("gate_proj", "up_proj", "down_proj") if values.get("mlp_bias") else ()
    layer = gated_layer(
        hidden=hidden,
        inner=values["intermediate_size"],
        query=heads * head_dim,
        key_value=values.get("num_key_value_heads", heads) * head_dim,
        biases=(*attention, *mlp),
    )
    return uniform_model(layer, values, vocabulary=32000, tied=False)


def _rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _shape(
    name: str, hidden: int, inner: int, layers: int, heads: int, factor: float, parameters: int
) -> PublishedShape:
    return PublishedShape(
        id=f"llama{name}",
        display_name=f"Llama-{name.upper()}",
        config={
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _rope(factor),
            "tie_word_embeddings": name.startswith("3.2"),
        },
        parameters=parameters,
    )


LLAMA = Architecture(
    family="llama",
    model_types=("llama",),
    layer_kinds=layer_kinds,
    dimensions=dimensions,
    refused_model_types={"llama4": "mixture of experts", "mllama": "vision-language model"},
    tiny_config=TINY,
    parity_cases=(
        ParityCase(name="untied", quirk={"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}),
        ParityCase(name="tied", config={"tie_word_embeddings": True}),
        ParityCase(name="biases", config={"attention_bias": True, "mlp_bias": True}),
        ParityCase(
            name="scaled-rope",
            config={"rope_parameters": {**_rope(8.0), "original_max_position_embeddings": 16}},
            quirk={"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        ),
    ),
    published=(
        _shape("3.2-1b", 2048, 8192, 16, 32, 32.0, 1_235_814_400),
        _shape("3.1-8b", 4096, 14336, 32, 32, 8.0, 8_030_261_248),
        _shape("3.1-70b", 8192, 28672, 80, 64, 8.0, 70_553_706_496),
    ),
)
