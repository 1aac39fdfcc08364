"""Gemma 4: the dense sizes and the E-series.

Global layers have heads of another size than sliding ones, may use their keys as values, and rotate a part of each
head; every layer has a persistent scalar. The E-series adds an embedding per layer, and its last layers have no keys
and values of their own but read those of the last layers that have.

All released checkpoints are multimodal. Their text tower is a family beside the text-only one, because the stock
classes keep the same decoder in different places. The towers for images and sounds are not loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from poros import Architecture, ModelDimensions, ParityCase, PublishedShape, Unsupported, gated_layer

PATTERN = ("sliding_attention", "sliding_attention", "full_attention")

# As in Gemma 3, 96 is no square. Global layers: heads of twice the size, one of keys, no values of their own.
TINY = {
    "model_type": "gemma4_text",
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "max_position_embeddings": 256,
    "sliding_window": 4,
    "layer_types": list(PATTERN * 2),
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

E_SERIES = {
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
}


def layer_kinds(config: Any) -> Sequence[str]:
    """Sliding or full attention, and whether the layer reads the keys and values of an earlier one."""
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    return tuple(
        kind if index < first_shared else f"{kind}, shared keys and values"
        for index, kind in enumerate(config.layer_types)
    )


def final_softcap(config: Any) -> float | None:
    """The cap on the final logits; 30 in the released sizes."""
    cap = getattr(config, "final_logit_softcapping", None)
    return None if cap is None else float(cap)


def dimensions(values: Mapping[str, Any]) -> ModelDimensions:
    """Layer by layer: global ones have heads of their own size, the last ones of the E-series no keys and values."""
    hidden, count = values["hidden_size"], values["num_hidden_layers"]
    heads, kv_heads = values.get("num_attention_heads", 8), values.get("num_key_value_heads", 4)
    first_shared = count - values.get("num_kv_shared_layers", 0)
    per_layer = values.get("hidden_size_per_layer_input", 256)
    kinds = values.get("layer_types") or [
        "sliding_attention" if (index + 1) % 6 and index + 1 < count else "full_attention" for index in range(count)
    ]
    # As newer versions of transformers write it; with ten layers or more the numbers begin with zeros.
    exceptions = {int(index): own for index, own in (values.get("per_layer_config") or {}).items()}
    layers = []
    for index, kind in enumerate(kinds):
        own = exceptions.get(index, {})
        is_global, shares = kind == "full_attention", index >= first_shared
        head_dim = (
            own.get("head_dim") or values.get("global_head_dim", 512) if is_global else values.get("head_dim", 256)
        )
        one_for_both = is_global and values.get("attention_k_eq_v", False)
        own_heads = own.get("num_key_value_heads") or values.get("num_global_key_value_heads")
        wide = 2 if shares and values.get("use_double_wide_mlp", False) else 1
        layer = gated_layer(
            hidden=hidden,
            inner=wide * values["intermediate_size"],
            query=heads * head_dim,
            key_value=((own_heads if one_for_both else None) or kv_heads) * head_dim,
            norms=4,
            head_norm=head_dim,
            biases=("q_proj", "k_proj", "v_proj", "o_proj") if values.get("attention_bias") else (),
            without=("k_proj", "v_proj") if shares else ("v_proj",) if one_for_both else (),
        )
        linears, vectors = dict(layer.linears), dict(layer.vectors)
        if per_layer:
            linears |= {"per_layer_input_gate": (per_layer, hidden), "per_layer_projection": (hidden, per_layer)}
            vectors["post_per_layer_input_norm"] = hidden
        window = None if is_global else values.get("sliding_window", 512)
        layers.append(
            dataclasses.replace(layer, linears=linears, vectors=vectors, buffers={"layer_scalar": 1}, window=window)
        )
    width = count * per_layer
    return ModelDimensions(
        layers=layers,
        hidden=hidden,
        vocabulary=values.get("vocab_size", 262144),
        tied=values.get("tie_word_embeddings", True),
        tables={"embed_tokens_per_layer": (values.get("vocab_size_per_layer_input", 262144), width)} if width else {},
        outer_linears={"per_layer_model_projection": (width, hidden)} if width else {},
        outer_vectors=hidden + per_layer,
        has_softcap=values.get("final_logit_softcapping") is not None,
        shares=first_shared < count,
    )


def _shape(size: str, values: dict[str, Any], every: int, parameters: int) -> PublishedShape:
    """A released size whose every so-many-th layer is a global one."""
    layers = values["num_hidden_layers"]
    kinds = ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(layers)]
    return PublishedShape(
        id=f"gemma4-{size}",
        display_name=f"Gemma4-{size.upper()}",
        config={
            "model_type": "gemma4_text",
            "vocab_size": 262144,
            "head_dim": 256,
            "global_head_dim": 512,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
            "layer_types": kinds,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 1,
            **values,
        },
        parameters=parameters,
    )


GEMMA4 = Architecture(
    family="gemma4",
    model_types=("gemma4_text",),
    layer_kinds=layer_kinds,
    dimensions=dimensions,
    final_softcap=final_softcap,
    # Whether a layer leaves its keys and values, which changes nothing that it computes itself.
    inert=("store_full_length_kv",),
    side_output="shared_kv_states",
    has_side_outputs=lambda config: config.num_kv_shared_layers > 0,
    has_outer_linears=lambda config: config.hidden_size_per_layer_input > 0,
    unsupported=(
        Unsupported(
            name="mixture of experts",
            applies=lambda config: bool(getattr(config, "enable_moe_block", False)),
            hint="its experts are fused tensors that bitsandbytes leaves in 16 bit; the dense sizes run",
            example={"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        ),
        Unsupported(
            name="bidirectional attention",
            applies=lambda config: getattr(config, "use_bidirectional_attention", None) == "all",
            hint="such checkpoints are embedding models; Poros trains causal language models",
            example={"use_bidirectional_attention": "all"},
        ),
    ),
    refused_model_types={
        "gemma4_unified": "the unified family, which shares its name only",
        "gemma4_assistant": "an assistant for speculative decoding",
    },
    tiny_config=TINY,
    parity_cases=(
        ParityCase(name="dense", quirk={"sliding_window": 256}),
        ParityCase(
            name="proportional-rope",
            quirk={
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": {
                        "rope_type": "proportional",
                        "partial_rotary_factor": 1.0,
                        "rope_theta": 1000000.0,
                    },
                }
            },
        ),
        ParityCase(name="soft-cap", config={"final_logit_softcapping": 1.0}, quirk={"final_logit_softcapping": None}),
        ParityCase(name="values-of-their-own", config={"attention_k_eq_v": False}),
        ParityCase(name="untied", config={"tie_word_embeddings": False}),
        ParityCase(name="e-series", config=E_SERIES),
        # Several readers of the same keys in a block: the order in which their gradients are added counts.
        ParityCase(
            name="e-series-many-readers",
            config={**E_SERIES, "num_hidden_layers": 12, "num_kv_shared_layers": 9, "layer_types": list(PATTERN * 4)},
        ),
        ParityCase(name="e-series-double-wide", config={**E_SERIES, "use_double_wide_mlp": True}),
    ),
    published=(
        _shape(
            "e2b",
            {
                "hidden_size": 1536,
                "intermediate_size": 6144,
                "num_hidden_layers": 35,
                "num_attention_heads": 8,
                "num_key_value_heads": 1,
                "num_kv_shared_layers": 20,
                "hidden_size_per_layer_input": 256,
                "vocab_size_per_layer_input": 262144,
                "use_double_wide_mlp": True,
                "sliding_window": 512,
                "max_position_embeddings": 131072,
            },
            5,
            4_628_569_344,
        ),
        _shape(
            "e4b",
            {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 42,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "num_kv_shared_layers": 18,
                "hidden_size_per_layer_input": 256,
                "vocab_size_per_layer_input": 262144,
                "sliding_window": 512,
                "max_position_embeddings": 131072,
            },
            6,
            7_463_013_376,
        ),
        _shape(
            "31b",
            {
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_hidden_layers": 60,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "num_global_key_value_heads": 4,
                "attention_k_eq_v": True,
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 0,
                "sliding_window": 1024,
                "max_position_embeddings": 262144,
            },
            6,
            30_697_345_280,
        ),
    ),
)


def _inside(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a text model's config as a multimodal config holds them."""
    outer = {name: values[name] for name in ("tie_word_embeddings",) if name in values}
    return {**outer, "text_config": {**TINY, "initializer_range": 0.1, **values}}


GEMMA4_MULTIMODAL = dataclasses.replace(
    GEMMA4,
    family="gemma4_multimodal",
    model_types=("gemma4",),
    decoder="model.language_model",
    checkpoint_prefixes=("model.language_model.", "language_model.model."),
    has_outer_linears=lambda config: True,
    absent=("model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio"),
    refused_model_types={},
    tiny_config={
        "model_type": "gemma4",
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
        "audio_config": None,
        "boi_token_id": 120,
        "eoi_token_id": 121,
        "image_token_id": 122,
        "video_token_id": 123,
        "audio_token_id": 124,
        **_inside({"tie_word_embeddings": True}),
    },
    parity_cases=tuple(
        dataclasses.replace(
            case, config=_inside(case.config), quirk=_inside({**case.config, **case.quirk}) if case.quirk else {}
        )
        for case in GEMMA4.parity_cases
    ),
    published=(),
)
