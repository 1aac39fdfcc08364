"""Which tensor is the head: the embedding, the model's own, or one beside its decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import poros
from poros.architecture import Architecture
from poros.errors import CheckpointError
from poros.plugins import Plugins

Edited = Callable[[Path, Callable[[dict[str, torch.Tensor]], None]], Path]
CPU = torch.device("cpu")
FAMILIES = ("qwen2", "gemma3")
Q = "model.layers.2.self_attn.q_proj.weight"


# -- tying (case O-16) ------------------------------------------------------------------------------------------------


def test_tied_stays_one_tensor(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    directory = checkpoint("qwen2", {"tie_word_embeddings": True})
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    model = poros.load(directory, device="cpu", plugins=plugins)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_with_a_copy_of_the_embedding_is_fine(
    checkpoint: Callable[..., Path], edited: Edited, plugins: Plugins
) -> None:
    def add_copy(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    directory = edited(checkpoint("qwen2", {"tie_word_embeddings": True}), add_copy)
    model = poros.load(directory, device="cpu", plugins=plugins)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_with_another_head_in_the_files_is_refused(
    checkpoint: Callable[..., Path], edited: Edited, plugins: Plugins
) -> None:
    def add_other(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2

    directory = edited(checkpoint("qwen2", {"tie_word_embeddings": True}), add_other)
    with pytest.raises(CheckpointError, match="differs from the embedding, but the config says that the two are tied"):
        poros.load(directory, device="cpu", plugins=plugins)


# -- which head (the first of several names is not the right one) -----------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("decoy", ["draft.lm_head.weight", "a.model.lm_head.weight", "zzz.lm_head.weight"])
def test_the_head_of_another_part_is_not_the_models(
    tied: bool, decoy: str, checkpoint: Callable[..., Path], edited: Edited, plugins: Plugins
) -> None:
    """However its name is sorted, and whether the model has a head of its own in the files or not."""
    directory = edited(
        checkpoint("qwen2", {"tie_word_embeddings": tied}),
        lambda tensors: tensors.update({decoy: torch.zeros_like(tensors["model.embed_tokens.weight"])}),
    )
    model = poros.load(directory, device="cpu", plugins=plugins)
    right = load_file(directory / "model.safetensors")[f"{'model.embed_tokens' if tied else 'lm_head'}.weight"]
    assert torch.equal(model.lm_head.weight, right)


def test_the_head_of_another_part_does_not_stand_in_for_a_missing_one(
    checkpoint: Callable[..., Path], edited: Edited, plugins: Plugins
) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["draft.lm_head.weight"] = tensors.pop("lm_head.weight")

    with pytest.raises(CheckpointError, match=r"- lm_head.weight is missing .*not tied"):
        poros.load(edited(checkpoint("qwen2", {}), rename), device="cpu", plugins=plugins)


BESIDE = "language_model.lm_head.weight"
"""Where a multimodal checkpoint keeps its head, beside the decoder `language_model.model`."""


@pytest.fixture
def multimodal(checkpoint: Callable[..., Path], families: dict[str, Architecture], edited: Edited) -> Any:
    """An untied multimodal checkpoint, its tensors named as on the hub, after a change."""

    def make(change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        text = {**families["gemma3"].tiny_config, "initializer_range": 0.1, "tie_word_embeddings": False}
        made = checkpoint("gemma3_multimodal", {"tie_word_embeddings": False, "text_config": text})

        def as_on_the_hub(tensors: dict[str, torch.Tensor]) -> None:
            for name in list(tensors):  # transformers 5.5 puts a word before it
                tensors[name.removeprefix("model.") if ".language_model.model." in name else name] = tensors.pop(name)
            change(tensors)

        return edited(made, as_on_the_hub)

    return make


@pytest.mark.parametrize("name", [BESIDE, "lm_head.weight"])
def test_a_head_beside_the_decoder_is_found_among_others(name: str, multimodal: Any, plugins: Plugins) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["draft.lm_head.weight"] = torch.zeros_like(tensors[BESIDE])
        tensors["vision_tower.lm_head.weight"] = torch.zeros(3)
        tensors[name] = tensors.pop(BESIDE)

    directory = multimodal(change)
    model = poros.load(directory, device="cpu", plugins=plugins)
    assert torch.equal(model.lm_head.weight, load_file(directory / "model.safetensors")[name])


def test_the_models_own_name_for_the_head_wins(multimodal: Any, plugins: Plugins) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors[BESIDE] * 2

    directory = multimodal(change)
    model = poros.load(directory, device="cpu", plugins=plugins)
    assert torch.equal(model.lm_head.weight, load_file(directory / "model.safetensors")["lm_head.weight"])


def test_two_heads_beside_the_decoder_are_refused(multimodal: Any, plugins: Plugins) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.lm_head.weight"] = tensors[BESIDE].clone()

    with pytest.raises(CheckpointError, match=f"{BESIDE} and model.lm_head.weight are in the files, and only one"):
        poros.load(multimodal(change), device="cpu", plugins=plugins)
