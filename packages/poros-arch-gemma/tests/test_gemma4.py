"""The Gemma 4 family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import poros
from poros import ParityCase, PublishedShape
from poros.architecture import Architecture
from poros.config import LoraPart
from poros.engine.adapters import lora_config, narrowed
from poros.errors import CheckpointError, UnsupportedError
from poros.parity.gate import check
from poros.parity.resident import random_resident
from poros.parity.stock import Work, load_stock, make_adapters_count
from poros.testing.checkpoints import make_checkpoint
from poros.testing.conformance import ArchitectureConformance, Checkpoint
from poros.testing.models import marks
from poros_arch_gemma.gemma4 import E_SERIES, GEMMA4, GEMMA4_MULTIMODAL

OLD = pytest.mark.xfail(
    Version(transformers.__version__) < Version("5.10"),
    reason="transformers 5.5 builds keys and values for layers that share, and uses them when there is no cache",
)


CPU = torch.device("cpu")


class TestGemma4(ArchitectureConformance):
    architecture = GEMMA4

    @OLD
    def test_published_shapes_have_the_published_number_of_parameters(self, shape: PublishedShape) -> None:
        super().test_published_shapes_have_the_published_number_of_parameters(shape)

    @OLD
    def test_the_dimensions_are_the_models(self, case: ParityCase, checkpoint: Checkpoint) -> None:
        super().test_the_dimensions_are_the_models(case, checkpoint)


class TestGemma4Multimodal(ArchitectureConformance):
    architecture = GEMMA4_MULTIMODAL
    text_only = GEMMA4

    @OLD
    def test_the_dimensions_are_the_models(self, case: ParityCase, checkpoint: Checkpoint) -> None:
        super().test_the_dimensions_are_the_models(case, checkpoint)


@OLD
def test_keys_and_values_that_nobody_uses_may_be_in_the_files(tmp_path: Path) -> None:
    """Released E-series checkpoints hold them for layers that read those of others; stock ignores them too."""
    directory = make_checkpoint(tmp_path, GEMMA4, E_SERIES)
    weights = load_file(directory / "model.safetensors")
    assert "model.layers.5.self_attn.k_proj.weight" not in weights
    weights["model.layers.5.self_attn.k_proj.weight"] = torch.zeros(32, 96, dtype=torch.bfloat16)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert poros.load(directory, device="cpu") is not None
    weights["model.layers.5.self_attn.x_proj.weight"] = torch.zeros(32, 96, dtype=torch.bfloat16)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="x_proj"):
        poros.load(directory, device="cpu")


def test_layer_kinds_say_who_reads_shared_keys_and_values() -> None:
    dense = AutoConfig.for_model(**GEMMA4.tiny_config)
    assert set(GEMMA4.layer_kinds(dense)) == {"sliding_attention", "full_attention"}
    assert not GEMMA4.has_side_outputs(dense)
    sharing = AutoConfig.for_model(**{**GEMMA4.tiny_config, **E_SERIES})
    assert [("shared" in kind) for kind in GEMMA4.layer_kinds(sharing)] == [False] * 3 + [True] * 3
    assert GEMMA4.has_side_outputs(sharing)


@pytest.mark.parametrize("architecture", [GEMMA4, GEMMA4_MULTIMODAL], ids=lambda a: a.family)
@pytest.mark.parametrize("values", [{}, E_SERIES], ids=["dense", "e-series"])
def test_a_checkpoint_that_is_quantised_already(
    architecture: Architecture, values: dict[str, Any], tmp_path: Path
) -> None:
    """As stock saves it, the projection of per-layer embeddings in 4 bit too: trained as by stock."""
    whole = {"text_config": {**GEMMA4.tiny_config, "initializer_range": 0.1, **values}}
    made = make_checkpoint(tmp_path / "made", architecture, whole if architecture is GEMMA4_MULTIMODAL else values)
    config = AutoConfig.from_pretrained(made).get_text_config()
    lora = lora_config(LoraPart(rank=4))
    load_stock(made, narrowed(lora, architecture, config), 0, CPU).unload().save_pretrained(tmp_path / "quantised")
    found = []
    for model in (
        load_stock(tmp_path / "quantised", narrowed(lora, architecture, config), 0, CPU),
        poros.load(tmp_path / "quantised", lora=lora, seed=0, device="cpu"),
    ):
        make_adapters_count(model, 0)
        ids = torch.arange(3, 19)[None]
        with torch.autocast("cpu", torch.bfloat16):
            output = model.train()(input_ids=ids, labels=ids, use_cache=False, **marks(model, ids))
        output.loss.backward()
        found.append([output.logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 2
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_an_audio_tower_keeps_its_own_attention(tmp_path: Path) -> None:
    """It has no sdpa; the text decoder has, in stock too."""
    audio = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 32}
    directory = make_checkpoint(tmp_path, GEMMA4_MULTIMODAL, {"audio_config": audio})
    assert any("audio_tower" in name for name in load_file(directory / "model.safetensors"))
    result = check(str(directory), lora_config(LoraPart(rank=4)), Work(steps=2, length=16))
    assert result.verdict == "identical"


def test_what_is_left_out_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Global layers have no v_proj; adapters on all-linear stay in the text decoder."""
    directory = make_checkpoint(tmp_path / "text", GEMMA4, {})
    poros.load(directory, lora=lora_config(LoraPart(rank=2, targets=("v_proj",))), seed=0, device="cpu")
    assert "the LoRA target v_proj is in 4 of 6 layers" in caplog.text
    directory = make_checkpoint(tmp_path / "whole", GEMMA4_MULTIMODAL, {})
    poros.load(directory, lora=lora_config(LoraPart(rank=2)), seed=0, device="cpu")
    assert "all-linear is narrowed to the linear layers inside model.language_model.layers" in caplog.text


@OLD
@pytest.mark.parametrize("layers", [1, 3, 4, 5])
def test_a_model_that_shares_can_be_cut_anywhere(layers: int) -> None:
    """Layers that share are counted from the last one; the first layers of a model stay what they are."""
    config = {**GEMMA4.tiny_config, **E_SERIES}
    whole = AutoConfig.for_model(**config)
    kinds = GEMMA4.layer_kinds(whole)
    model = random_resident(GEMMA4, config, torch.device("cpu"), layers).train()
    assert list(GEMMA4.layer_kinds(model.config)) == list(kinds[:layers])
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        right = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(poros.attach(model)(input_ids=ids, use_cache=False).logits, right)


def test_one_tensor_of_all_layers_embeddings_is_not_cut(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, GEMMA4, E_SERIES)
    with pytest.raises(UnsupportedError, match="published shape"):
        poros.load(directory, device="cpu", num_layers=2)
