"""Gemma 3: sliding and full layers with a rope table each, a scaled embedding, four norms a layer.

Text checkpoints (270M, 1B) and the text tower of multimodal ones (4B and up) are two families, because the stock
classes keep the same decoder in different places. The vision tower is not loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from poros import (
    Architecture,
    ModelDimensions,
    ParityCase,
    PublishedShape,
    Unsupported,
    gated_layer,
    uniform_model,
    windows_of,
)

# 96 is no square: the embedding scale sqrt(96) is rounded to bf16, which shows when it isn't.
TINY = {
    "model_type": "gemma3_text",
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "sliding_window": 4,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ],
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def layer_kinds(config: Any) -> Sequence[str]:
    """Sliding or full attention, layer by layer, as transformers derives it from the config."""
    return tuple(config.layer_types)


def final_softcap(config: Any) -> float | None:
    """Gemma 3 has no cap by default, but its config may name one."""
    cap = getattr(config, "final_logit_softcapping", None)
    return None if cap is None else float(cap)


def dimensions(values: Mapping[str, Any]) -> ModelDimensions:
    """Every layer has the same sizes: four norms over the hidden states, one over each query and key."""
    hidden, head_dim = values["hidden_size"], values.get("head_dim", 256)
    layer = gated_layer(
        hidden=hidden,
        inner=values["intermediate_size"],
        query=values.get("num_attention_heads", 8) * head_dim,
        key_value=values.get("num_key_value_heads", 4) * head_dim,
        norms=4,
        head_norm=head_dim,
        biases=("q_proj", "k_proj", "v_proj", "o_proj") if values.get("attention_bias") else (),
    )
    every = values.get("sliding_window_pattern", 6)
    return uniform_model(
        layer,
        values,
        vocabulary=262208,
        tied=True,
        has_softcap=values.get("final_logit_softcapping") is not None,
        windows=windows_of(values, window=4096, is_sliding=lambda index: (index + 1) % every != 0),
    )


def _shape(
    size: str, hidden: int, inner: int, layers: int, heads: int, kv: int, head_dim: int, window: int, parameters: int
) -> PublishedShape:
    return PublishedShape(
        id=f"gemma3-{size}",
        display_name=f"Gemma3-{size.upper()}",
        config={
            "model_type": "gemma3_text",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "head_dim": head_dim,
            "query_pre_attn_scalar": 168 if size == "27b" else 256,
            "vocab_size": 262144 if size in ("270m", "1b") else 262208,
            "sliding_window": window,
            "tie_word_embeddings": True,
            # The larger ones were stretched: their global layers rotate an eighth as fast.
            **(
                {"max_position_embeddings": 32768}
                if size in ("270m", "1b")
                else {"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
            ),
        },
        parameters=parameters,
    )


GEMMA3 = Architecture(
    family="gemma3",
    model_types=("gemma3_text",),
    layer_kinds=layer_kinds,
    dimensions=dimensions,
    final_softcap=final_softcap,
    unsupported=(
        Unsupported(
            name="bidirectional attention",
            applies=lambda config: bool(getattr(config, "use_bidirectional_attention", False)),
            hint="such checkpoints are embedding models; Poros trains causal language models",
            example={"use_bidirectional_attention": True},
        ),
    ),
    refused_model_types={
        "gemma": "the first Gemma family",
        "gemma2": "the second Gemma family",
        "gemma3n": "the Gemma 3n family",
    },
    tiny_config=TINY,
    parity_cases=(
        ParityCase(name="sliding-and-full", quirk={"sliding_window": 256}),
        ParityCase(
            name="scaled-rope",
            config={
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                }
            },
            quirk={
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                }
            },
        ),
        ParityCase(name="untied", config={"tie_word_embeddings": False}),
        ParityCase(name="soft-cap", config={"final_logit_softcapping": 1.0}, quirk={"final_logit_softcapping": None}),
    ),
    published=(
        _shape("270m", 640, 2048, 18, 4, 1, 256, 512, 268_098_176),
        _shape("1b", 1152, 6912, 26, 4, 1, 256, 512, 999_885_952),
        _shape("4b", 2560, 10240, 34, 8, 4, 256, 1024, 3_880_263_168),
        _shape("12b", 3840, 15360, 48, 16, 8, 256, 1024, 11_766_034_176),
        _shape("27b", 5376, 21504, 62, 32, 16, 128, 1024, 27_009_346_304),
    ),
)


def _inside(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a text model's config as a multimodal config holds them."""
    outer = {name: values[name] for name in ("tie_word_embeddings",) if name in values}
    return {**outer, "text_config": {**TINY, "initializer_range": 0.1, **values}}


VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}

GEMMA3_MULTIMODAL = dataclasses.replace(
    GEMMA3,
    family="gemma3_multimodal",
    model_types=("gemma3",),
    decoder="model.language_model",
    # As the hub has them; as transformers keeps them; and as transformers 5.5 saves them.
    checkpoint_prefixes=("language_model.model.", "model.language_model.", "model.language_model.model."),
    final_softcap=lambda config: None,  # the multimodal class doesn't apply it, whatever the config says
    has_outer_linears=lambda config: True,
    absent=("model.vision_tower", "model.multi_modal_projector"),
    refused_model_types={},
    tiny_config={
        "model_type": "gemma3",
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "boi_token_index": 120,
        "eoi_token_index": 121,
        "image_token_index": 122,
        **_inside({"tie_word_embeddings": True}),
    },
    parity_cases=tuple(
        dataclasses.replace(
            case, config=_inside(case.config), quirk=_inside({**case.config, **case.quirk}) if case.quirk else {}
        )
        for case in GEMMA3.parity_cases
        if case.name != "soft-cap"
    ),
    published=(),
)
